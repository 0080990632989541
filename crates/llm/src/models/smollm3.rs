//! SmolLM 3: Llama's layers; every fourth has no rotary embedding.

use quadriga_graph::Pairing;

use super::architecture::Architecture;
use super::llama;
use crate::Result;
use crate::hyperparameters::{Hyperparameters, Keys};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "smollm3",
    models: "SmolLM 3",
    pairing: Pairing::Adjacent,
    read,
    ..llama::ARCHITECTURE
};

fn read(keys: &Keys<'_>, hyper: &mut Hyperparameters) -> Result<()> {
    keys.refuse_experts()?;
    hyper.layers.iter_mut().skip(3).step_by(4).for_each(|layer| layer.rope = None);
    Ok(())
}
