//! Which biases a file must have. A bias that is missing would go unnoticed: the model would compute something else.

use super::Hyperparameters;
use super::keys::Keys;
use crate::Result;

/// The projections whose biases come together.
const ATTENTION: [&str; 3] = ["attn_q", "attn_k", "attn_v"];

impl Hyperparameters {
    /// An error unless these parts of all layers have biases, as far as the layers have the parts.
    pub(crate) fn require_biases(&self, keys: &Keys<'_>, parts: &[&str]) -> Result<()> {
        if !keys.has_tensors() {
            return Ok(());
        }
        let layers = 0..self.layers.len();
        layers.into_iter().try_for_each(|layer| {
            parts.iter().try_for_each(|part| require_bias(keys, &format!("blk.{layer}.{part}")))
        })
    }

    /// An error unless all layers have the weights of these parts, or none has one.
    pub(crate) fn require_all_or_none(&self, keys: &Keys<'_>, parts: &[&str]) -> Result<()> {
        if !keys.has_tensors() {
            return Ok(());
        }
        let layers = 0..self.layers.len();
        let names = || {
            let of = |layer: usize| parts.iter().map(move |part| format!("blk.{layer}.{part}.weight"));
            layers.clone().flat_map(of)
        };
        match names().any(|name| keys.file().find_tensor(&name).is_some()) {
            true => names().try_for_each(|name| Ok(keys.file().tensor(&name).map(drop)?)),
            false => Ok(()),
        }
    }

    /// An error if some layers have a bias that others lack, or some of a layer's queries, keys and values.
    pub(super) fn check_biases(&self, keys: &Keys<'_>) -> Result<()> {
        if !keys.has_tensors() {
            return Ok(());
        }
        let mut parts: Vec<&str> =
            keys.file().tensors().filter_map(|tensor| bias_of(tensor.name())).collect();
        parts.sort_unstable();
        parts.dedup();
        if ATTENTION.iter().any(|part| parts.contains(part)) {
            parts.extend(ATTENTION);
        }
        self.require_biases(keys, &parts)
    }
}

/// The part of a layer that a bias belongs to.
fn bias_of(name: &str) -> Option<&str> {
    name.strip_prefix("blk.")?.split_once('.')?.1.strip_suffix(".bias")
}

/// An error if the file has a weight without its bias.
pub(crate) fn require_bias(keys: &Keys<'_>, name: &str) -> Result<()> {
    let has = |name: &str| keys.file().find_tensor(name).is_some();
    // The bias of the selection is beside the router's matrix.
    let owner = match name.strip_suffix("exp_probs_b") {
        Some(layer) => format!("{layer}ffn_gate_inp.weight"),
        None => format!("{name}.weight"),
    };
    if has(&owner) {
        keys.file().tensor(&format!("{name}.bias"))?;
    }
    Ok(())
}
