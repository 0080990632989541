//! Nomic Embed: BERT with RoPE in place of embedded positions and a gated feed-forward network.

use quadriga_graph::Gate;

use super::architecture::Architecture;
use super::bert;
use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::Activation;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "nomic-bert",
    models: "Nomic Embed Text",
    activation: Activation::Silu,
    read: bert::read_encoder,
    build,
    ..bert::ARCHITECTURE
};

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let embedded = model.embed_type(model.embed()?)?;
    bert::build_with(model, embedded, |layer, x| layer.feed_forward(x, Gate::Swiglu))
}
