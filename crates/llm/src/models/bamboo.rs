//! Bamboo: Mistral's layers with a feed-forward network of which gate and up are both rectified, so that few neurons are
//! active.

use quadriga_graph::Pairing;

use super::architecture::Architecture;
use super::builder::{FeedForward, ModelBuilder};
use super::llama;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "bamboo",
    models: "Bamboo",
    pairing: Pairing::Adjacent,
    norm: NormKind::Rms,
    activation: Activation::Relu,
    read,
    build,
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    llama::read_dense(keys, hyper)?;
    hyper.rectified = true;
    hyper.read_predictors(keys)
}

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    llama::build_with(model, FeedForward::RectifiedBoth)
}
