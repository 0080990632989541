//! Mamba 2: layers of a state space behind a short convolution, without attention and feed-forward networks.

use quadriga_graph::Pairing;

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "mamba2",
    models: "Mamba 2, Mamba Codestral",
    pairing: Pairing::Half,
    norm: NormKind::Rms,
    activation: Activation::Silu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.read_all_recurrent(keys)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let Some(mixed) = layer.state_space(normed)? else { return Ok(()) };
        x = layer.residual(layer.output_rows(x), mixed);
    }
    model.finish(x)
}
