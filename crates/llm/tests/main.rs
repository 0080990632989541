//! Language models, one module for each thing that they do. One program has them all: to link one for each file took longer than to run them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod across_devices;
mod broken_models;
mod chat_templates;
mod common;
mod constraint_masks;
mod encoders;
mod engine;
mod exact_quantized;
mod exact_results;
mod expert_slot_bits;
mod expert_slot_quantized;
mod expert_slots;
mod experts;
mod forged_turns;
mod gbnf;
mod generator;
mod generator_failures;
mod hostile_architectures;
mod hyperparameters;
mod judging;
mod latent_attention;
mod neuron_slots;
mod neurons;
mod pipelines;
mod placement;
mod placement_by_cost;
mod placement_estimates;
mod published_templates;
mod random_models;
mod rank_architectures;
mod rank_histories;
mod rank_simulation;
mod ranks;
mod reasoning;
mod recurrent_models;
mod requests;
mod run_ahead;
mod sampling;
mod sampling_steps;
mod saved_state;
mod saved_state_of_ranks;
mod scripted_answers;
mod serving;
mod serving_embeddings;
mod serving_events;
mod serving_experts;
mod serving_faults;
mod serving_guesses;
mod serving_latent;
mod serving_memory;
mod serving_neighbours;
mod serving_prefixes;
mod serving_recurrent;
mod serving_shares;
mod serving_windows;
mod stop_strings;
mod structured_output;
mod template_expressions;
mod template_limits;
mod template_rewriting;
mod tensor_list;
mod tensor_placement;
mod tokenizer_exact;
mod tokenizer_hostile;
mod tokenizer_reference;
mod tool_call_tags;
mod tool_call_values;
mod tool_calls;
mod truncated_file;
mod two_models;
mod uneven_devices;
mod unread_keys;
mod windows;

/// Files that are programs of their own, as they count what a whole process does.
const APART: &[&str] = &["tokenizer_matching", "template_bombs", "default_model", "main"];

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
