//! The command, one module for each thing that its users do. One program has them all: to link one for each file took longer than to run them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod answers;
mod bad_input;
mod batch;
mod bench;
mod chat;
mod cluster_examples;
mod common;
mod constraints;
mod contrib;
mod embed;
mod exact;
mod fetching;
mod foreign_options;
mod hostile_text;
mod hub;
mod inspect;
mod interruption;
mod judging;
mod llama_environment;
mod making_models;
mod model_argument;
mod model_memory;
mod neurons;
mod output_files;
mod outputs;
mod page;
mod picture;
mod placement_flags;
mod plan_instance;
mod plan_lines;
mod plan_ranks;
mod quantize;
mod reasoning;
mod serve;
mod serve_start;
mod split_modes;
mod synth;
mod tools;
mod topics;
mod trace;
mod traces;

/// Files that are programs of their own: `scripts/mpi-tests` runs `mpi`.
const APART: &[&str] = &["main", "mpi"];

#[test]
fn every_file_is_a_module_of_this_program() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        let listed = include_str!("main.rs").contains(&format!("\nmod {name};\n"));
        assert!(!is_source || listed || APART.contains(&name.as_str()), "{name}.rs is not in main.rs");
    }
}
