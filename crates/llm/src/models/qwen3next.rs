//! Qwen3-Next: as Qwen 3.5 with experts, with another order of the heads of the delta rule.

use super::architecture::Architecture;
use super::builder::{DeltaLayout, ModelBuilder};
use super::{qwen35, qwen35moe};
use crate::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { name: "qwen3next", models: "Qwen3-Next", build, ..qwen35moe::ARCHITECTURE };

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    qwen35::build_with(model, DeltaLayout::Grouped)
}
