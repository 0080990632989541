//! The server, one module for each interface and each way to go wrong. One program has them all: to link one for each file took longer than to run them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod answer_tokens;
mod anthropic;
mod chat_completions;
mod common;
mod complete_grammars;
mod completions;
mod connections;
mod cut_calls;
mod defaults;
mod dropped_connections;
mod editors;
mod embeddings;
mod faults;
mod field_values;
mod hostile_schemas;
mod keys;
mod llama_server;
mod logs;
mod models;
mod ollama;
mod openapi;
mod reasoning_off;
mod responses;
mod slow_loaders;
mod strict_templates;
mod tool_choice;
mod vllm;

/// Files that are programs of their own, as they count what a whole process does.
const APART: &[&str] = &["load", "transport", "main"];

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
