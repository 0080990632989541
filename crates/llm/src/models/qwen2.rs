//! Qwen 2 and 2.5: Llama's layers, with biases on queries, keys and values (added wherever a file has them) and RoPE that
//! pairs the two halves of a head.

use quadriga_graph::Pairing;

use super::architecture::Architecture;
use super::llama;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen2",
    models: "Qwen 2 and 2.5, QwQ, DeepSeek R1 Distill Qwen",
    pairing: Pairing::Half,
    read: llama::read_dense,
    ..llama::ARCHITECTURE
};
