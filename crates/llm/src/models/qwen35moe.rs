//! Qwen 3.5 and 3.6 with experts: Qwen 3.5's layers, and an expert that all tokens use, times the sigmoid of a gate.

use super::architecture::Architecture;
use super::qwen35;
use crate::Result;
use crate::hyperparameters::{ExpertDefaults, Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { name: "qwen35moe", models: "Qwen 3.5 and 3.6 with experts", read, ..qwen35::ARCHITECTURE };

/// Recurrent layers, and experts in all layers.
pub(super) fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    hyper.skip_predicting_blocks(keys)?;
    let defaults = ExpertDefaults {
        width: ExpertDefaults::SHARE_OF_DENSE,
        shared_width: |feed_forward, _| feed_forward,
        shared_gate: true,
        ..ExpertDefaults::NORMALIZED_SOFTMAX
    };
    hyper.read_experts(keys, defaults)?;
    qwen35::read_layers(keys, hyper)
}
