//! Tensors of a file that its model does not use. Whatever computes without them computes another model: a key is wrong, or the
//! architecture's name.

use quadriga_gguf::File;
use quadriga_graph::{GraphBuilder, layer_of};

use super::builder::ModelBuilder;
use super::{GraphShape, find, finish};
use crate::hyperparameters::Hyperparameters;
use crate::{Error, Result};

/// How many tensors an error names.
const NAMED: usize = 3;

/// Tensors of a layer that change nothing: frequencies that are computed, and what PowerInfer's runtime writes for itself.
const HARMLESS: [&str; 5] =
    ["attn_rot_embd.weight", "rot_embd.weight", "rope_freqs.weight", "gpu_idx", "gpu_bucket"];

/// Tensors that make keys and values. Files of Gemma 3n have them in all layers, also in those that attend to others' keys and values.
const OF_KEYS_AND_VALUES: [&str; 3] = ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"];

/// Tensors of no layer that change nothing, and the beginnings of the names of those that encode pictures and sound.
const OF_NO_LAYER: [&str; 4] = ["rope_freqs.", "rope_factors_", "v.", "mm."];

/// Builds the smallest graph of a model, which checks every tensor that it uses, and refuses a file that has others.
pub(crate) fn check_tensors(file: &File, hyper: &Hyperparameters) -> Result<()> {
    let g = GraphBuilder::new();
    let unused = ModelBuilder::new(&g, file, hyper, &[], None, GraphShape::new(1, 1)).and_then(|builder| {
        (find(hyper.architecture)?.build)(&builder)?;
        let unknown = builder.unknown_tensors().into_iter();
        let unused = unknown.filter(|name| !is_harmless(name, hyper));
        Ok(unused.map(str::to_owned).collect::<Vec<String>>())
    });
    let (_, unused) = finish(g, unused)?;
    if unused.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = unused.iter().take(NAMED).map(|name| format!("{name:?}")).collect();
    Err(Error::UnusedTensors {
        architecture: hyper.architecture,
        count: unused.len(),
        names: names.join(", "),
        key: suspect(&unused, file, hyper),
    })
}

/// Whether the model is the same without a tensor.
fn is_harmless(name: &str, hyper: &Hyperparameters) -> bool {
    let Some(layer) = layer_of(name) else {
        return OF_NO_LAYER.iter().any(|beginning| name.starts_with(beginning));
    };
    let part = name.strip_prefix(&format!("blk.{layer}.")).unwrap_or(name);
    // Blocks that predict further tokens are not computed, and predictors of neurons are where they are asked for.
    let is_skipped = (hyper.layers.len()..hyper.blocks).contains(&layer);
    let is_predictor = hyper.predictor_threshold.is_some() && ["fc1.weight", "fc2.weight"].contains(&part);
    // The matrices of latent attention may be there in both layouts; the keys tell which of them is used.
    let matrix = part.strip_suffix(".weight").or(part.strip_suffix(".scale")).unwrap_or(part);
    let is_double = match hyper.latent {
        Some(latent) if latent.separate => matrix == "attn_kv_b",
        Some(_) => matrix == "attn_k_b" || matrix == "attn_v_b",
        None => false,
    };
    let shares = hyper.layers.get(layer).is_some_and(|layer| layer.shares_cache_of.is_some());
    let is_shared = shares && OF_KEYS_AND_VALUES.contains(&part);
    is_skipped
        || is_predictor
        || is_double
        || is_shared
        || HARMLESS.contains(&part)
        || part.ends_with(".input_scale")
}

/// The key that is most likely wrong.
fn suspect(unused: &[String], file: &File, hyper: &Hyperparameters) -> String {
    let own = |key: &str| format!("{}.{key}", hyper.architecture);
    let any = |is: &dyn Fn(&str) -> bool| unused.iter().any(|name| is(name));
    let key = match () {
        () if any(&|name| layer_of(name).is_some_and(|layer| layer >= hyper.blocks)) => "block_count",
        () if any(&|name| name.contains("_shexp.")) && hyper.experts().is_some() => {
            let width = "expert_shared_feed_forward_length";
            if file.value(&own(width)).is_some() { width } else { "expert_shared_count" }
        }
        () if any(&|name| name.contains("_exps.") || name.contains("ffn_gate_inp.")) => "expert_count",
        () => return "general.architecture".to_owned(),
    };
    own(key)
}
