//! Feed-forward networks.

use quadriga_graph::{Gate, Value};

use super::{FeedForward, LayerBuilder};
use crate::{Error, Result};

impl<'g> LayerBuilder<'_, 'g> {
    /// The layer's feed-forward network, with an activation of the gate: a mixture of experts in layers that have one.
    pub(in crate::models) fn feed_forward(&self, x: Value<'g>, gate: Gate) -> Result<Value<'g>> {
        self.feed_forward_routed_by(x, x, gate)
    }

    /// The same, with experts that are selected by other rows than they read.
    pub(in crate::models) fn feed_forward_routed_by(
        &self,
        router: Value<'g>,
        x: Value<'g>,
        gate: Gate,
    ) -> Result<Value<'g>> {
        match self.shape.experts {
            Some(experts) => self.mixture(experts, router, x, gate),
            None => self.feed_forward_of(x, x, FeedForward::Gated(gate)),
        }
    }

    /// Whether gate and up are the first and second half of `ffn_up`.
    pub(super) fn has_fused_gate(&self) -> Result<bool> {
        let inner = self.feed_forward_width()?;
        Ok(!self.model.weights.has(&self.name("ffn_gate.weight"))
            && self.model.weights.rows(&self.name("ffn_up.weight")) == Some(2 * inner))
    }

    /// `down(gate(x) · up(x))` with an activation of the gate, and with gate and up in one matrix.
    pub(super) fn fused_dense(&self, x: Value<'g>, gate: Gate) -> Result<Value<'g>> {
        let inner = self.feed_forward_width()?;
        let [gated, up] = self.fused("ffn_up", ["gate", "up"], [inner; 2], x)?;
        self.down(gated.gated(gate, up))
    }

    /// The width of the dense feed-forward network, which the file must name.
    pub(in crate::models) fn feed_forward_width(&self) -> Result<usize> {
        match self.shape.feed_forward {
            0 => Err(Error::Hyperparameter {
                key: format!("{}.feed_forward_length", self.model.hyper.architecture),
                value: "0 or missing".to_owned(),
                wanted: "at least 1".to_owned(),
            }),
            width => Ok(width),
        }
    }
}
