//! Short convolutions with gates before and after them, in place of attention.

use quadriga_graph::Value;

use super::LayerBuilder;
use crate::Result;

impl<'g> LayerBuilder<'_, 'g> {
    /// One matrix makes three vectors of a token: the gate of the convolution's input, that of its result, and the input. `None`
    /// if no token of the batch is an output and this is the last layer.
    pub(in crate::models) fn short_convolution(&self, x: Value<'g>) -> Result<Option<Value<'g>>> {
        // Channels are as many as the residual stream has; a rank of several has some of them.
        let width = self.channels()?;
        let all = self.linear("shortconv.in_proj", 3 * width, x)?;
        let part = |number: usize| all.slice(1, number * width, width);
        let gated = {
            let _scope = self.model.g.scope(&self.name("shortconv"));
            let convolved = self.convolved("shortconv.conv.weight", part(0).mul(part(2)))?;
            if self.ends_here() {
                return Ok(None);
            }
            part(1).mul(convolved)
        };
        self.linear("shortconv.out_proj", self.width(), self.output_rows(gated)).map(Some)
    }
}
