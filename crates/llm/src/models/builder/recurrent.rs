//! States of recurrent layers, and the short convolution that all of them have.
//!
//! A state tensor has a row for each state that is kept. A batch reads one row and writes another, in several pieces,
//! so that the state before the batch stays as it was: a batch that fails or is discarded changes nothing. Row 0 is never
//! written: it is the state of an empty sequence.
//!
//! A batch has tokens of one sequence, or one token of each of several, or both: single tokens, and parts of several prompts
//! ([`PromptParts`]). Sequences are independent of each other, as heads are: the heads of all of them are computed as those of
//! one. Parts are computed as if all had as many tokens as the longest. What follows the end of a shorter one is rows of zeros,
//! from which a state neither fades nor learns.

use quadriga_graph::{DType, DeltaRuleInputs, GatedDeltaRule, GraphBuilder, Value};

use super::LayerBuilder;
use crate::hyperparameters::{LinearAttention, RecurrentShape};
use crate::models::{GraphShape, PromptParts};
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
    /// Where the tokens of single sequences and of parts are, in a batch that has both, or several parts.
    parts: Option<PartInputs<'g>>,
}

/// Which tokens of a batch are a sequence's only one, and which are those of parts.
#[derive(Clone, Copy)]
struct PartInputs<'g> {
    shape: PromptParts,
    /// Absent where no sequence has one token.
    single_rows: Option<Value<'g>>,
    part_rows: Value<'g>,
    part_ends: Value<'g>,
    part_order: Value<'g>,
}

impl<'g> PartInputs<'g> {
    /// Rows `[n, c]` as those of single tokens `[singles, c]`, and those of parts `[length · count, c]`.
    fn divide(&self, rows: Value<'g>) -> (Option<Value<'g>>, Value<'g>) {
        let singles = self.single_rows.map(|singles| rows.get_rows(singles));
        (singles, rows.pad([1, 0]).get_rows(self.part_rows))
    }

    /// The reverse of it.
    fn join(&self, singles: Option<Value<'g>>, parts: Value<'g>) -> Value<'g> {
        let all = singles.map_or(parts, |singles| singles.concat(0, &[parts]));
        all.get_rows(self.part_order)
    }
}

impl<'g> RecurrentInputs<'g> {
    pub(super) fn new(
        g: &'g GraphBuilder,
        shape: &RecurrentShape,
        batch: &GraphShape,
    ) -> RecurrentInputs<'g> {
        let input = |name: &str, pieces: usize| g.input(name, DType::I32, [batch.sequences * pieces]);
        let index = |name: &str, len: usize| g.input(name, DType::I32, [len]);
        RecurrentInputs {
            conv: ["conv_from", "conv_to"].map(|name| input(name, shape.conv_pieces())),
            linear: shape
                .linear
                .map(|linear| ["delta_from", "delta_to"].map(|name| input(name, linear.pieces()))),
            parts: batch.parts.map(|parts| PartInputs {
                shape: parts,
                single_rows: (parts.singles > 0).then(|| index("single_rows", parts.singles)),
                part_rows: index("part_rows", parts.length * parts.count),
                part_ends: index("part_ends", parts.count * (shape.conv_kernel - 1)),
                part_order: index("part_order", batch.tokens),
            }),
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
    /// Writes the states after the batch, of some sequences after others.
    fn write(self, after: impl IntoIterator<Item = Value<'g>>) {
        write_pieces(self.rows, self.to, after);
    }
}

/// Writes states, of some sequences after others, to the rows of these pieces.
fn write_pieces<'g>(rows: Value<'g>, to: Value<'g>, states: impl IntoIterator<Item = Value<'g>>) {
    let len = rows.shape().cols();
    let (mut rows, mut first) = (rows, 0);
    for state in states {
        let pieces = state.shape().elements() / len.max(1);
        let own = if pieces == to.shape().cols() { to } else { to.slice(0, first, pieces) };
        rows = rows.set_rows(state.reshape([pieces, len]), own);
        first += pieces;
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

impl<'g> LinearInputs<'g> {
    /// Those of single tokens, and those of parts.
    fn divide(
        self,
        parts: &PartInputs<'g>,
        linear: LinearAttention,
    ) -> (Option<LinearInputs<'g>>, LinearInputs<'g>) {
        let LinearAttention { key_heads, value_heads, key_length, value_length } = linear;
        let n = self.gates.shape().rows();
        let heads = |x: Value<'g>, heads: usize, d: usize| {
            let (singles, parts) = parts.divide(x.cont().reshape([n, heads * d]));
            let apart = |x: Value<'g>| x.reshape([x.shape().rows(), heads, d]);
            (singles.map(apart), apart(parts))
        };
        let rates = |x: Value<'g>| parts.divide(x.cont());
        let queries = heads(self.queries, key_heads, key_length);
        let keys = heads(self.keys, key_heads, key_length);
        let values = heads(self.values, value_heads, value_length);
        let (gates, betas) = (rates(self.gates), rates(self.betas));
        let singles = || {
            let (queries, keys, values) = (queries.0?, keys.0?, values.0?);
            Some(LinearInputs { queries, keys, values, gates: gates.0?, betas: betas.0? })
        };
        let (queries, keys, values) = (queries.1, keys.1, values.1);
        (singles(), LinearInputs { queries, keys, values, gates: gates.1, betas: betas.1 })
    }
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
        let (n, heads) = (self.model.shape.tokens, linear.value_heads);
        let width = heads * linear.value_length;
        let results = match self.model.recurrent.and_then(|inputs| inputs.parts) {
            None => {
                let (sequences, before) = (self.model.shape.sequences, state.before);
                let (results, after) = delta_rule(linear, [n / sequences, sequences], inputs, before, rule);
                state.write([after]);
                results
            }
            Some(parts) => {
                let PromptParts { singles, count, length } = parts.shape;
                let (of_singles, of_parts) = inputs.divide(&parts, linear);
                let before = |first: usize, count: usize| state.before.slice(0, first * heads, count * heads);
                let single = of_singles
                    .map(|inputs| delta_rule(linear, [1, singles], inputs, before(0, singles), rule));
                let (results, after) =
                    delta_rule(linear, [length, count], of_parts, before(singles, count), rule);
                state.write(single.map(|(_, after)| after).into_iter().chain([after]));
                let single = single.map(|(results, _)| results.reshape([singles, width]));
                parts.join(single, results.reshape([length * count, width]))
            }
        };
        results.reshape([n, heads, linear.value_length])
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
        if let Some(parts) = inputs.parts {
            let remembered = states.get_rows(from).reshape([sequences, before, width]);
            let (of_singles, of_parts) = parts.divide(x.cont());
            let PromptParts { singles, count, length } = parts.shape;
            let of_singles =
                of_singles.map(|x| convolved_singles(remembered.slice(0, 0, singles), x, weight));
            // Parts are channels beside each other: a row has a token of each.
            let known = remembered.slice(0, singles, count).permute([1, 0, 2]).cont();
            let all = known
                .reshape([before, count * width])
                .concat(0, &[of_parts.reshape([length, count * width])]);
            let after = all.reshape([(before + length) * count, width]).get_rows(parts.part_ends);
            write_pieces(states, to, of_singles.map(|(_, after)| after).into_iter().chain([after]));
            let weight = if count > 1 { weight.repeat([count * width, shape.conv_kernel]) } else { weight };
            let of_parts = all.ssm_conv(weight).reshape([length * count, width]);
            return Ok(parts.join(of_singles.map(|(convolved, _)| convolved), of_parts));
        }
        if sequences == 1 {
            let remembered = states.get_rows(from).reshape([before, width]);
            let all = remembered.concat(0, &[x]);
            write_pieces(states, to, [all.slice(0, n, before)]);
            return Ok(all.ssm_conv(weight));
        }
        let remembered = states.get_rows(from).reshape([sequences, before, width]);
        let (convolved, after) = convolved_singles(remembered, x.cont(), weight);
        write_pieces(states, to, [after]);
        Ok(convolved)
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

/// The convolution of one token of each sequence `[sequences, width]` after those that it remembers `[sequences, before, width]`, and
/// the tokens that it remembers then.
fn convolved_singles<'g>(remembered: Value<'g>, x: Value<'g>, weight: Value<'g>) -> (Value<'g>, Value<'g>) {
    let (sequences, width) = (x.shape().rows(), x.shape().cols());
    let kernel = weight.shape().cols();
    // One sequence below the other: of the results, those count that see the rows of one sequence only.
    let all = remembered.concat(1, &[x.reshape([sequences, 1, width])]);
    let after = all.slice(1, 1, kernel - 1).cont();
    let convolved = all.reshape([sequences * kernel, width]).ssm_conv(weight);
    let row = size_of::<f32>() * width;
    let (step, size) = (kernel * row, convolved.shape().rows() * row);
    let convolved = convolved.view([sequences, width], [size, size, step, size_of::<f32>()], 0).cont();
    (convolved, after)
}

/// The gated delta rule for so many tokens of each of several sequences, whose inputs have the first token of each, then the second
/// of each, …. Results, in the same order, and states.
fn delta_rule<'g>(
    linear: LinearAttention,
    [tokens, sequences]: [usize; 2],
    inputs: LinearInputs<'g>,
    state: Value<'g>,
    rule: GatedDeltaRule,
) -> (Value<'g>, Value<'g>) {
    let LinearInputs { mut queries, mut keys, mut values, mut gates, mut betas } = inputs;
    if sequences > 1 {
        let LinearAttention { mut key_heads, value_heads, key_length, value_length } = linear;
        if rule.tiled {
            // Key heads of several sequences are not tiled: each value head gets one of its own.
            key_heads = value_heads;
            let dims = [tokens * sequences, value_heads, key_length];
            [queries, keys] = [queries, keys].map(|x| x.repeat(dims));
        }
        let joined = |x: Value<'g>, heads: usize, d: usize| x.cont().reshape([tokens, sequences * heads, d]);
        [queries, keys] = [queries, keys].map(|x| joined(x, key_heads, key_length));
        values = joined(values, value_heads, value_length);
        [gates, betas] = [gates, betas].map(|x| x.cont().reshape([tokens, sequences * value_heads]));
    }
    queries.gated_delta_rule(DeltaRuleInputs { keys, values, gates, betas, state }, rule)
}

/// Some heads `[n, heads, d]` of rows `[n, width]`, from column `first` on, as a view.
pub(super) fn heads_at(rows: Value<'_>, first: usize, heads: usize, d: usize) -> Value<'_> {
    let (n, row) = (rows.shape().rows(), 4 * rows.shape().cols());
    rows.view([n, heads, d], [n * row, row, 4 * d, 4], 4 * first)
}
