//! Qwen 3 with experts: Qwen 3's layers, whose experts' weights are normalized.

use super::architecture::Architecture;
use super::qwen3;
use crate::Result;
use crate::hyperparameters::{ExpertDefaults, Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen3moe",
    models: "Qwen3 30B-A3B and 235B-A22B, Qwen3 Coder",
    read,
    ..qwen3::ARCHITECTURE
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    let width = ExpertDefaults::SHARE_OF_DENSE;
    hyper.read_experts(keys, ExpertDefaults { width, ..ExpertDefaults::NORMALIZED_SOFTMAX })
}
