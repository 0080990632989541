//! Qwen 1.5 and 2 with experts: Qwen 2's layers, whose experts' weights are not normalized, and an expert that all tokens
//! use, times the sigmoid of a gate.

use super::architecture::Architecture;
use super::qwen2;
use crate::Result;
use crate::hyperparameters::{ExpertDefaults, Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { name: "qwen2moe", models: "Qwen 1.5 and 2 with experts", read, ..qwen2::ARCHITECTURE };

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.require_tensor("output.weight")?;
    let defaults = ExpertDefaults {
        normalize: false,
        width: ExpertDefaults::SHARE_OF_DENSE,
        shared_width: |feed_forward, _| feed_forward,
        shared_gate: true,
        ..ExpertDefaults::NORMALIZED_SOFTMAX
    };
    hyper.read_experts(keys, defaults)
}
