//! Phi 3, 3.5 and 4: Llama's layers with fused projections, and frequency factors for long contexts (the builder finds
//! both). The window in some files is not used: they do not say in which layers.

use quadriga_graph::Pairing;

use super::architecture::Architecture;
use super::llama;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "phi3",
    models: "Phi 3, 3.5 and 4",
    pairing: Pairing::Half,
    read: |keys, _| {
        keys.ignore("attention.sliding_window");
        keys.refuse_experts()
    },
    ..llama::ARCHITECTURE
};
