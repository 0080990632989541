//! The tensors of a model by its metadata alone are those of its file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeMap;

use crate::common::recurrent::parts_of;
use crate::common::{Parts, Recipe};
use quadriga_gguf::File;
use quadriga_llm::models::tensors;

/// Names and dimensions of the tensors of a file, and as the metadata alone tell them.
fn compare(what: &str, mut parts: Parts, architecture: &str, vocabulary: usize) {
    let in_file: BTreeMap<String, Vec<usize>> =
        parts.tensors.iter().map(|(name, _, dims, _)| (name.clone(), dims.clone())).collect();
    parts.tensors.clear();
    parts.set(&format!("{architecture}.vocab_size"), vocabulary as u32);
    let metadata = File::from_bytes(parts.bytes()).unwrap();
    let listed = tensors(&metadata, &|name| in_file.contains_key(name))
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    for spec in &listed {
        let dims = in_file.get(&spec.name).unwrap_or_else(|| panic!("{what}: {} is not there", spec.name));
        // A bias of one expert after another may be given as a matrix or a vector.
        assert_eq!(
            dims.iter().product::<usize>(),
            spec.dims.iter().product::<usize>(),
            "{what}: {}",
            spec.name
        );
        let is_small = spec.name.ends_with("norm.weight") || spec.name.ends_with(".bias");
        assert!(!is_small || spec.f32_only, "{what}: {}", spec.name);
    }
    let missing: Vec<&String> =
        in_file.keys().filter(|name| !listed.iter().any(|spec| spec.name == **name)).collect();
    assert!(missing.is_empty(), "{what}: not listed {missing:?}");
}

#[test]
fn metadata_tell_the_tensors_of_every_family() {
    let dense = Recipe::families().into_iter().map(|recipe| (recipe.architecture, recipe));
    for (what, recipe) in dense.chain(Recipe::with_experts()) {
        // Only the tensors of a file tell that there are two of them, or that some are one.
        if recipe.long_factors || recipe.fused_feed_forward || recipe.fused_attention {
            continue;
        }
        compare(what, recipe.parts(), recipe.architecture, recipe.vocabulary);
    }
    let recipe = Recipe { layers: 5, ..Recipe::new("qwen35") };
    compare("qwen35", parts_of(&recipe), "qwen35", recipe.vocabulary);
}
