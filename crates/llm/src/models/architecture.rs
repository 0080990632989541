//! What an architecture is to the rest of the crate: one entry of a table.

use quadriga_graph::Pairing;

use super::builder::ModelBuilder;
use crate::Result;
use crate::hyperparameters::{Activation, Hyperparameters, Keys, NormKind};

/// A model architecture.
pub(super) struct Architecture {
    /// The name in GGUF files, which is the prefix of its keys, too.
    pub(super) name: &'static str,
    /// Well-known models of it.
    pub(super) models: &'static str,
    /// Which elements of a head RoPE rotates as a pair.
    pub(super) pairing: Pairing,
    /// The kind of its norms.
    pub(super) norm: NormKind,
    /// The activation of its feed-forward networks: files that name another one are refused, unless `read` looks the key up.
    pub(super) activation: Activation,
    /// Reads the keys that are special to the architecture, after the common ones.
    pub(super) read: fn(&Keys<'_>, &mut Hyperparameters) -> Result<()>,
    /// Builds the graph.
    pub(super) build: fn(&ModelBuilder<'_>) -> Result<()>,
}

impl Architecture {
    /// Reads and checks all hyperparameters.
    pub(super) fn hyperparameters(&self, keys: &Keys<'_>) -> Result<Hyperparameters> {
        let mut hyper = Hyperparameters::read(keys, self.pairing, self.norm)?;
        (self.read)(keys, &mut hyper)?;
        hyper.check(keys)?;
        hyper.refuse_unread(keys, self.activation)?;
        Ok(hyper)
    }
}
