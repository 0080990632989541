//! Estimates of a node's work, from types and shapes alone.

use quadriga_graph::{Collective, CollectiveKind, DType, Graph, NodeId, Op, PAGE_SLOTS, Tensor};
use serde::Serialize;

/// An estimate of a node's work, to compare with a machine's peak rates (roofline).
///
/// Matmul and attention count one multiplication and one addition per multiply-accumulate; norms, softmax, gated
/// activations and RoPE count four operations per element, all other operations one. Traffic counts each tensor once,
/// in its own type: for `get_rows` only the rows that are read, for `set_rows` only the rows that are written.
/// Attention counts all keys, including those that a span or mask hides; through a page table those of the table's pages. Collectives count the bytes that a rank sends
/// ([`Collective::sent_bytes`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Cost {
    /// Arithmetic operations.
    pub operations: u64,
    /// Bytes read and written.
    pub traffic: u64,
    /// Bytes sent to other ranks.
    pub sent: u64,
}

impl Cost {
    /// The work of a node; zero for views.
    pub fn of(graph: &Graph, node: NodeId) -> Cost {
        let found = graph.get_node(node).and_then(|n| Some((n.op(), graph.get(n.output())?)));
        let Some((op, output)) = found.filter(|(op, _)| !op.is_view()) else { return Cost::default() };
        let inputs: Vec<&Tensor> = graph.inputs(node).iter().filter_map(|id| graph.get(*id)).collect();
        let sent = match (op, inputs.first()) {
            (Op::Collective(collective), Some(first)) => collective.sent_bytes(first, output),
            _ => 0,
        };
        Cost { operations: operations(op, &inputs, output), traffic: traffic(op, &inputs, output), sent }
    }

    /// The sum of each.
    pub fn and(self, other: Cost) -> Cost {
        Cost {
            operations: self.operations.saturating_add(other.operations),
            traffic: self.traffic.saturating_add(other.traffic),
            sent: self.sent.saturating_add(other.sent),
        }
    }
}

fn elements(tensor: &Tensor) -> u64 {
    tensor.elements() as u64
}

/// Bytes of `elements` elements of a type.
fn bytes_of(dtype: DType, elements: u64) -> u64 {
    elements / (dtype.block_len() as u64).max(1) * dtype.block_bytes() as u64
}

fn operations(op: &Op, inputs: &[&Tensor], output: &Tensor) -> u64 {
    let cols = |input: usize| inputs.get(input).map_or(0, |tensor| tensor.shape().cols() as u64);
    let rows = |input: usize| inputs.get(input).map_or(0, |tensor| tensor.dims4()[2] as u64);
    match op {
        Op::MulMat | Op::MulMatId => elements(output).saturating_mul(2 * cols(1)),
        Op::MulMatSparse { .. } => elements(output).saturating_mul(2 * cols(0)),
        Op::AxpySparse => elements(output).saturating_mul(2 * rows(0)),
        Op::OutProd => elements(output).saturating_mul(2 * rows(0)),
        Op::Attention(_) => {
            // Q·Kᵀ, then scores times V.
            let queries = inputs.first().map_or(0, |query| elements(query) / cols(0).max(1));
            let keys = page_table(op, inputs).map_or(u64::MAX, row_slots).min(rows(1));
            queries.saturating_mul(2 * keys).saturating_mul(cols(1).saturating_add(cols(2)))
        }
        Op::SsmConv => elements(output).saturating_mul(2 * cols(1)),
        Op::GatedDeltaRule(_) => {
            // Decay, prediction, update and result: seven operations for each element of the state and each token.
            let tokens = inputs.get(2).map_or(0, |values| values.dims4()[1] as u64);
            inputs.get(5).map_or(0, |state| elements(state)).saturating_mul(7).saturating_mul(tokens)
        }
        Op::Norm { .. }
        | Op::RmsNorm { .. }
        | Op::GroupNorm { .. }
        | Op::L2Norm { .. }
        | Op::SoftMax { .. }
        | Op::Gated { .. }
        | Op::Rope { .. } => elements(output).saturating_mul(4),
        Op::SumExperts => inputs.first().map_or(0, |x| elements(x)).saturating_mul(2),
        Op::SelectExperts(_) => inputs.first().map_or(0, |scores| elements(scores)),
        Op::Sum | Op::SumRows | Op::Mean | Op::ArgMax | Op::ArgSort { .. } | Op::TopK { .. } => {
            inputs.first().map_or(0, |input| elements(input))
        }
        Op::ConvDepthwise { window } | Op::Pool { window, .. } => {
            let [height, width] = window.kernel.map(|extent| extent as u64);
            elements(output).saturating_mul(height.saturating_mul(width)).saturating_mul(2)
        }
        Op::ConvTranspose { .. } => {
            let kernel =
                inputs.first().map_or(0, |kernel| elements(kernel) / (kernel.dims4()[0].max(1) as u64));
            inputs.get(1).map_or(0, |x| elements(x)).saturating_mul(2).saturating_mul(kernel)
        }
        Op::CrossEntropyLoss => inputs.first().map_or(0, |logits| elements(logits).saturating_mul(4)),
        Op::Im2Col { .. } => 0,
        Op::Collective(Collective { ranks, kind }) => match kind {
            CollectiveKind::AllReduce | CollectiveKind::ReduceScatter { .. } => {
                elements(output).saturating_mul(ranks.count.saturating_sub(1) as u64)
            }
            _ => 0,
        },
        Op::Custom(custom) => custom.operations(inputs, output),
        Op::GetRows | Op::SetRows | Op::Concat { .. } | Op::Repeat { .. } | Op::Pad { .. } => 0,
        _ => elements(output),
    }
}

/// The page table of attention, if it has one.
fn page_table<'a>(op: &Op, inputs: &[&'a Tensor]) -> Option<&'a Tensor> {
    let Op::Attention(attention) = op else { return None };
    inputs.last().copied().filter(|_| attention.pages)
}

/// The slots of a sequence's row of a page table.
fn row_slots(table: &Tensor) -> u64 {
    (table.shape().cols() as u64).saturating_mul(PAGE_SLOTS as u64)
}

fn traffic(op: &Op, inputs: &[&Tensor], output: &Tensor) -> u64 {
    let bytes = |tensor: &Tensor| bytes_of(tensor.dtype(), elements(tensor));
    let add = |a: u64, b: u64, c: u64| a.saturating_add(b).saturating_add(c);
    let [first, rest @ ..] = inputs else { return bytes(output) };
    let others = rest.iter().fold(0u64, |sum, input| sum.saturating_add(bytes(input)));
    match op {
        Op::Attention(_) if let Some(table) = page_table(op, inputs) => {
            // Of keys and values the slots of all pages in the table, at most all there are.
            let slots = row_slots(table).saturating_mul(table.dims4()[2] as u64);
            let read = |pool: &Tensor| {
                let rows = pool.dims4()[2].max(1) as u64;
                bytes(pool) / rows * slots.min(rows)
            };
            let pools = rest.iter().take(2).fold(0u64, |sum, pool| sum.saturating_add(read(pool)));
            let others = rest.iter().skip(2).fold(0u64, |sum, input| sum.saturating_add(bytes(input)));
            add(bytes(first), pools.saturating_add(others), bytes(output))
        }
        Op::GetRows => add(bytes_of(first.dtype(), elements(output)), others, bytes(output)),
        // Inputs of a message are only waited for.
        Op::Collective(Collective { kind: CollectiveKind::Receive { .. }, .. }) => bytes(output),
        Op::SetRows | Op::CopyInto => {
            let written = rest.first().map_or(0, |source| bytes_of(first.dtype(), elements(source)));
            others.saturating_add(written)
        }
        Op::MulMatId => {
            // Every expert that is used is read once, at most all of them.
            let experts = first.dims4()[1].max(1) as u64;
            let used = rest.get(1).map_or(0, |ids| elements(ids)).min(experts);
            add(bytes(first) / experts * used, others, bytes(output))
        }
        _ => add(bytes(first), others, bytes(output)),
    }
}
