//! BERT and its kin (all-MiniLM, bge, e5): encoders, whose tokens attend to all others, with a norm after each sum.

use quadriga_graph::{Pairing, Value};

use super::architecture::Architecture;
use super::builder::{LayerBuilder, ModelBuilder, TOKEN_TYPE_COUNT, TOKEN_TYPES};
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind, require_bias};
use crate::{Error, Result};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "bert",
    models: "all-MiniLM, bge, e5",
    pairing: Pairing::Half,
    norm: NormKind::Layer,
    activation: Activation::Gelu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    read_encoder(keys, hyper)?;
    hyper.require_biases(
        keys,
        &["attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_up", "ffn_down"],
    )?;
    // Positions are embedded.
    hyper.layers.iter_mut().for_each(|layer| layer.rope = None);
    Ok(())
}

/// What all encoders have in common.
pub(super) fn read_encoder(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.encoder = true;
    require_bias(keys, "token_embd_norm")?;
    check_token_types(keys, hyper)?;
    hyper.require_biases(keys, &["attn_output_norm", "layer_output_norm"])?;
    let causal = keys.find_flag("attention.causal")?.unwrap_or(false);
    if causal {
        Err(keys.wrong("attention.causal", true, "false: encoders see the whole text"))
    } else {
        Ok(())
    }
}

/// An error unless the file has a vector for each type of tokens that its tokenizer counts. A single type may have none: models
/// without types (DistilBERT) are counted as having one.
fn check_token_types(keys: &Keys<'_>, hyper: &Hyperparameters) -> Result<()> {
    let count = keys.file().find::<u64>(TOKEN_TYPE_COUNT)?.unwrap_or(0);
    if count == 0 || !keys.has_tensors() {
        return Ok(());
    }
    if count == 1 && keys.file().find_tensor(TOKEN_TYPES).is_none() {
        return Ok(());
    }
    let found = keys.file().tensor(TOKEN_TYPES)?.shape().dims().to_vec();
    let wanted = vec![usize::try_from(count).unwrap_or(usize::MAX), hyper.width];
    if found == wanted {
        return Ok(());
    }
    Err(Error::TensorShape { name: TOKEN_TYPES.to_owned(), found, wanted })
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let embedded = model.embed_position(model.embed_type(model.embed()?)?)?;
    build_with(model, embedded, |layer, x| layer.plain_feed_forward(x))
}

/// The layers of an encoder, from embedded tokens on.
pub(super) fn build_with<'g>(
    model: &ModelBuilder<'g>,
    embedded: Value<'g>,
    feed_forward: impl Fn(&LayerBuilder<'_, 'g>, Value<'g>) -> Result<Value<'g>>,
) -> Result<()> {
    let mut x = model.named_norm("token_embd_norm", embedded)?;
    for layer in model.layers() {
        let (query, key, value) = layer.query_key_value(x)?;
        let attended = layer.attention_to_all(layer.rope(query), layer.rope(key), value)?;
        x = layer.norm("attn_output_norm", x.add(attended))?;
        x = layer.norm("layer_output_norm", x.add(feed_forward(&layer, x)?))?;
    }
    model.finish_encoder(x)
}
