//! Granite 3 with experts: Granite's factors and layers; in some models all tokens use one expert beside theirs.

use super::architecture::Architecture;
use super::granite;
use crate::Result;
use crate::hyperparameters::{ExpertDefaults, Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { name: "granitemoe", models: "Granite 3 with experts", read, ..granite::ARCHITECTURE };

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    granite::read_scales(keys, hyper)?;
    hyper.read_experts(keys, ExpertDefaults::NORMALIZED_SOFTMAX)
}
