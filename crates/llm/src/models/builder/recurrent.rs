//! States of recurrent layers, and the short convolution that all of them have.
//!
//! A state tensor has a row for each state that is kept. A batch reads one row and writes another, in several pieces,
//! so that the state before the batch stays as it was: a batch that fails or is discarded changes nothing. Row 0 is never
//! written: it is the state of an empty sequence.
//!
//! A batch has tokens of one sequence, or one token of each of several. Sequences are independent of each other, as heads
//! are: the heads of all of them are computed as those of one.

use quadriga_graph::{DType, DeltaRuleInputs, GatedDeltaRule, GraphBuilder, Value};

use super::LayerBuilder;
use crate::hyperparameters::{LinearAttention, RecurrentShape};
use crate::{Error, Result};

/// The state of the convolution: the tokens before the current one.
const CONV_STATE: &str = "conv_state";
/// The state of linear attention.
const LINEAR_STATE: &str = "delta_state";

/// Whether a state tensor has a row for each recurrent state, and not one for each slot of the KV cache.
pub(crate) fn is_recurrent_state(name: &str) -> bool {
    [CONV_STATE, LINEAR_STATE].iter().any(|part| name.rsplit_once('.').is_some_and(|(_, last)| last == *part))
}

/// The pieces of the states that a batch reads and writes, `row · pieces + i` each, of one sequence after the other.
#[derive(Clone, Copy)]
pub(super) struct RecurrentInputs<'g> {
    conv: [Value<'g>; 2],
    /// Those of linear attention; absent where the layers have none.
    linear: Option<[Value<'g>; 2]>,
}

impl<'g> RecurrentInputs<'g> {
    pub(super) fn new(g: &'g GraphBuilder, shape: &RecurrentShape, sequences: usize) -> RecurrentInputs<'g> {
        let input = |name: &str, pieces: usize| g.input(name, DType::I32, [sequences * pieces]);
        RecurrentInputs {
            conv: ["conv_from", "conv_to"].map(|name| input(name, shape.conv_pieces())),
            linear: shape
                .linear
                .map(|linear| ["delta_from", "delta_to"].map(|name| input(name, linear.pieces()))),
        }
    }
}

/// The state of a layer's linear attention, as a batch sees it.
pub(super) struct LinearState<'g> {
    /// The state before the batch `[sequences · value_heads, key_length, value_length]`.
    before: Value<'g>,
    /// All rows, in pieces.
    rows: Value<'g>,
    /// The pieces that the batch writes.
    to: Value<'g>,
}

impl<'g> LinearState<'g> {
    /// Writes the state after the batch.
    fn write(self, after: Value<'g>) {
        let (pieces, len) = (self.to.shape().cols(), self.rows.shape().cols());
        self.rows.set_rows(after.reshape([pieces, len]), self.to);
    }
}

/// What linear attention computes with, of each token.
#[derive(Clone, Copy)]
pub(super) struct LinearInputs<'g> {
    /// `[n, key_heads, key_length]`
    pub(super) queries: Value<'g>,
    /// `[n, key_heads, key_length]`
    pub(super) keys: Value<'g>,
    /// `[n, value_heads, value_length]`
    pub(super) values: Value<'g>,
    /// `[n, value_heads]`
    pub(super) gates: Value<'g>,
    /// `[n, value_heads]`
    pub(super) betas: Value<'g>,
}

impl<'g> LayerBuilder<'_, 'g> {
    /// The heads of the layer's linear attention, and its state.
    pub(super) fn linear_attention(&self) -> Result<(LinearAttention, LinearState<'g>)> {
        let (shape, inputs) = self.recurrent()?;
        let (Some(linear), Some([from, to])) = (shape.linear, inputs.linear) else {
            return Err(self.no_state("ssm.state_size"));
        };
        let rows = self.states(LINEAR_STATE, linear.pieces(), linear.state());
        let heads = self.model.shape.sequences * linear.value_heads;
        let dims = [heads, linear.key_length, linear.value_length];
        Ok((linear, LinearState { before: rows.get_rows(from).reshape(dims), rows, to }))
    }

    /// The results of linear attention `[n, value_heads, value_length]`; its state is written.
    pub(super) fn attend_linearly(
        &self,
        linear: LinearAttention,
        state: LinearState<'g>,
        inputs: LinearInputs<'g>,
        rule: GatedDeltaRule,
    ) -> Value<'g> {
        let LinearInputs { mut queries, mut keys, mut values, mut gates, mut betas } = inputs;
        let (n, sequences) = (self.model.shape.tokens, self.model.shape.sequences);
        if sequences > 1 {
            let LinearAttention { mut key_heads, value_heads, key_length, value_length } = linear;
            if rule.tiled {
                // Key heads of several sequences are not tiled: each value head gets one of its own.
                key_heads = value_heads;
                [queries, keys] = [queries, keys].map(|x| x.repeat([n, value_heads, key_length]));
            }
            let joined = |x: Value<'g>, heads: usize, d: usize| x.cont().reshape([1, n * heads, d]);
            [queries, keys] = [queries, keys].map(|x| joined(x, key_heads, key_length));
            values = joined(values, value_heads, value_length);
            [gates, betas] = [gates, betas].map(|x| x.cont().reshape([1, n * value_heads]));
        }
        let inputs = DeltaRuleInputs { keys, values, gates, betas, state: state.before };
        let (results, after) = queries.gated_delta_rule(inputs, rule);
        state.write(after);
        results.reshape([n, linear.value_heads, linear.value_length])
    }

    /// The causal convolution of the tokens `[n, conv_width]`, after those that its state remembers.
    pub(super) fn convolved(&self, kernel: &str, x: Value<'g>) -> Result<Value<'g>> {
        let (shape, inputs) = self.recurrent()?;
        let (n, before, pieces) = (self.model.shape.tokens, shape.conv_kernel - 1, shape.conv_pieces());
        let (sequences, width) = (self.model.shape.sequences, shape.conv_width);
        let [from, to] = inputs.conv;
        let states = self.states(CONV_STATE, pieces, shape.conv_state());
        let weight =
            self.model.weights.elements(&self.name(kernel), &[shape.conv_width, shape.conv_kernel])?;
        let piece = shape.conv_state() / pieces;
        if sequences == 1 {
            let remembered = states.get_rows(from).reshape([before, width]);
            let all = remembered.concat(0, &[x]);
            states.set_rows(all.slice(0, n, before).reshape([pieces, piece]), to);
            return Ok(all.ssm_conv(weight));
        }
        // One sequence below the other: of the results, those count that see the rows of one sequence only.
        let remembered = states.get_rows(from).reshape([sequences, before, width]);
        let all = remembered.concat(1, &[x.cont().reshape([sequences, 1, width])]);
        states.set_rows(all.slice(1, 1, before).cont().reshape([sequences * pieces, piece]), to);
        let convolved = all.reshape([sequences * shape.conv_kernel, width]).ssm_conv(weight);
        let row = size_of::<f32>() * width;
        let (step, size) = (shape.conv_kernel * row, convolved.shape().rows() * row);
        Ok(convolved.view([sequences, width], [size, size, step, size_of::<f32>()], 0).cont())
    }

    /// The channels of the convolution.
    pub(super) fn channels(&self) -> Result<usize> {
        Ok(self.recurrent()?.0.conv_width)
    }

    fn recurrent(&self) -> Result<(&'g RecurrentShape, RecurrentInputs<'g>)> {
        let found = self.model.hyper.recurrent.as_ref().zip(self.model.recurrent);
        found.ok_or_else(|| self.no_state("ssm.conv_kernel"))
    }

    /// The error about a recurrent layer of a model whose keys describe none.
    fn no_state(&self, key: &str) -> Error {
        Error::Hyperparameter {
            key: format!("{}.{key}", self.model.hyper.architecture),
            value: "missing".to_owned(),
            wanted: "given for recurrent layers".to_owned(),
        }
    }

    /// A state tensor of the layer, as rows of its pieces.
    fn states(&self, part: &str, pieces: usize, len: usize) -> Value<'g> {
        let rows = self.model.shape.state_rows;
        let states = self.model.g.state(&self.name(part), DType::F32, [rows, pieces, len / pieces]);
        states.reshape([rows * pieces, len / pieces])
    }
}

/// Some heads `[n, heads, d]` of rows `[n, width]`, from column `first` on, as a view.
pub(super) fn heads_at(rows: Value<'_>, first: usize, heads: usize, d: usize) -> Value<'_> {
    let (n, row) = (rows.shape().rows(), 4 * rows.shape().cols());
    rows.view([n, heads, d], [n * row, row, 4 * d, 4], 4 * first)
}
