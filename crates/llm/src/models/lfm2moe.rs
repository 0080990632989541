//! LFM 2 with experts: dense layers first, then experts with a selection bias.

use super::architecture::Architecture;
use super::lfm2;
use crate::Result;
use crate::hyperparameters::{ExpertDefaults, Gating, Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "lfm2moe",
    models: "LFM2 with experts (8B-A1B, 24B-A2B)",
    read,
    ..lfm2::ARCHITECTURE
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    lfm2::read_layers(keys, hyper)?;
    hyper.require_biases(keys, &["exp_probs_b"])?;
    hyper.read_experts(keys, ExpertDefaults { gating: Gating::Sigmoid, ..ExpertDefaults::NORMALIZED_SOFTMAX })
}
