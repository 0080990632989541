//! Feed-forward networks.

use quadriga_graph::{Gate, Value};

use super::LayerBuilder;
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
            None => self.dense(x, gate),
        }
    }

    /// `down(gate(x) · up(x))` with an activation of the gate. Gate and up are two matrices, or the first and second half of
    /// `ffn_up`.
    fn dense(&self, x: Value<'g>, gate: Gate) -> Result<Value<'g>> {
        let (width, inner) = (self.model.hyper.width, self.feed_forward_width()?);
        let is_fused = !self.model.weights.has(&self.name("ffn_gate.weight"))
            && self.model.weights.rows(&self.name("ffn_up.weight")) == Some(2 * inner);
        let [gated, up] = if is_fused {
            self.fused("ffn_up", ["gate", "up"], [inner; 2], x)?
        } else {
            let gated = self.linear("ffn_gate", inner, x)?;
            [gated, self.linear("ffn_up", inner, x)?]
        };
        self.linear("ffn_down", width, gated.gated(gate, up))
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
