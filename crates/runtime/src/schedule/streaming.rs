//! Weight streaming: host-resident weights are copied to a device for a run, where the work on them outweighs the copy.
//!
//! A large batch makes a matmul long and its weight no larger. Past some number of operations per byte, a device that
//! computes faster than the host does best to copy the weight, use it and drop it: the copies are split inputs like any
//! others, made while the previous split computes, and the memory planner gives them memory for just that time. The same
//! holds for attention over a host-resident KV cache; keys and values that are computed on the device are written into
//! its copy of the cache too, so that it need not wait for the host (see [`super::split`]). Weights that are small
//! beside the results computed with them (norms, biases) place no nodes on the host then: they are streamed to every reader.
#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized for all tensors and backends; ids are the graph's own"
)]

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};

use super::placement::{NO_BACKEND, Placements, Reason};
use crate::ExpertRows;
use crate::flow::Flow;

/// When host-resident weights are streamed to a device for a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WeightStreaming {
    /// The least number of operations per byte that has to be copied; those with few rows for each expert's matrix count
    /// [up to four times](ExpertRows::host_slowness).
    pub operations_per_byte: u64,
    /// The least number of operations of all such nodes of a graph together: a smaller run is short anyway.
    pub min_operations: u64,
}

impl Default for WeightStreaming {
    /// For a host of some teraflops and a bus of some tens of gigabytes a second: a Q4_0 weight is streamed for 29 rows
    /// or more, an f16 weight for 100.
    fn default() -> WeightStreaming {
        WeightStreaming { operations_per_byte: 100, min_operations: 1_000_000_000 }
    }
}

impl WeightStreaming {
    /// For a host with so many operations a second in matmuls, and a link to the device with so many bytes a second: a
    /// weight is streamed where its copy takes less time than the host would. `None` if a rate is not known.
    pub fn for_rates(host_operations: f64, link_bytes: f64) -> Option<WeightStreaming> {
        let is_known = |rate: f64| rate.is_finite() && rate > 0.0;
        let operations_per_byte = (host_operations / link_bytes).clamp(1.0, 10_000.0) as u64;
        let known = is_known(host_operations) && is_known(link_bytes);
        known.then_some(WeightStreaming { operations_per_byte, ..WeightStreaming::default() })
    }
}

/// A node that would be faster on the device.
struct StreamingCandidate {
    storage: TensorId,
    /// The inputs that would be streamed.
    streamed: [TensorId; 2],
    operations: u64,
}

/// Moves nodes to the device where streaming pays off, and marks the weights that are streamed. `on_host` says for each
/// backend whether its memory is the host's, `computes` whether the device computes a storage.
pub(crate) fn stream_weights(
    graph: &Graph,
    flow: &Flow,
    on_host: &[bool],
    placements: &mut Placements,
    (streaming, device): (WeightStreaming, u16),
    computes: impl Fn(TensorId) -> bool,
) {
    let host_resident = |tensor: TensorId| {
        let backend = placements.backend[flow.storage[tensor.index()].index()];
        backend != NO_BACKEND && on_host[usize::from(backend)]
    };
    let mut candidates: Vec<StreamingCandidate> = Vec::new();
    let is_free = |storage: TensorId| placements.backend[storage.index()] == NO_BACKEND;
    for producer in flow.producers().iter().filter(|producer| producer.heavy && is_free(producer.storage)) {
        let inputs = streamed_inputs(graph, producer.node);
        let Some(streamed) = inputs.filter(|ids| ids.iter().all(|id| host_resident(*id))) else {
            continue;
        };
        let [one, other] = streamed.map(|id| flow.bytes[id.index()]);
        // The weight of a matmul is listed twice.
        let bytes = if streamed[0] == streamed[1] { one } else { one.saturating_add(other) };
        let bytes = used_bytes(graph, producer.node, bytes);
        let operations = operations(graph, producer.node);
        let slowness = ExpertRows::of(graph, producer.node).map_or(1.0, ExpertRows::host_slowness);
        if operations as f64 * slowness >= bytes.saturating_mul(streaming.operations_per_byte) as f64 {
            candidates.push(StreamingCandidate { storage: producer.storage, streamed, operations });
        }
    }
    let operations = candidates.iter().fold(0u64, |sum, candidate| sum.saturating_add(candidate.operations));
    if candidates.is_empty() || operations < streaming.min_operations {
        return;
    }
    // Which weights are read through views; and which are small beside every result that is computed with them.
    let (mut viewed, mut small) = (vec![false; graph.tensors().len()], vec![true; graph.tensors().len()]);
    for (producer, inputs) in flow.iter() {
        let result = graph[graph[producer.node].output()].bytes();
        for input in inputs.iter().filter(|input| input.kind == TensorKind::Weight) {
            let storage = input.storage.index();
            viewed[storage] |= input.tensor != input.storage;
            small[storage] &= graph[input.storage].bytes().saturating_mul(4) <= result;
        }
    }
    let can_stream = |tensor: TensorId| {
        graph[tensor].kind() == TensorKind::Weight
            && host_resident(tensor)
            && !viewed[tensor.index()]
            && graph.data(tensor).is_some()
    };
    let state = |tensor: TensorId| graph[graph[tensor].storage()].kind() == TensorKind::State;
    candidates.retain(|candidate| {
        candidate.streamed.iter().all(|id| can_stream(*id) || state(*id)) && computes(candidate.storage)
    });
    if candidates.is_empty() {
        return;
    }
    let mut streamed: Vec<TensorId> = graph
        .of_kind(TensorKind::Weight)
        .filter(|weight| small[weight.index()] && can_stream(*weight))
        .collect();
    let inputs = || candidates.iter().flat_map(|candidate| candidate.streamed);
    streamed.extend(inputs().filter(|id| can_stream(*id)));
    for candidate in &candidates {
        placements.backend[candidate.storage.index()] = device;
        let reason = Reason::Streams { tensor: candidate.streamed[0].index() };
        placements.reason[candidate.storage.index()] = reason;
    }
    placements.streamed.extend(streamed);
    placements.streaming_device = device;
    let states = inputs().map(|id| graph[id].storage());
    placements.mirrored_states =
        states.filter(|id| graph[*id].kind() == TensorKind::State && computes(*id)).collect();
}

/// What remains of the work where rows of inactive neurons are skipped, compared with a matmul of all rows: a quarter.
const SPARSE_SHARE: u64 = 4;

/// The two inputs of a node that would have to be streamed (the same one twice where there is one), if its operation is
/// one for which that can pay off.
fn streamed_inputs(graph: &Graph, node: NodeId) -> Option<[TensorId; 2]> {
    let inputs = graph.inputs(node);
    match graph[node].op() {
        Op::MulMat | Op::MulMatId | Op::MulMatSparse { .. } | Op::AxpySparse => Some([*inputs.first()?; 2]),
        Op::Attention(_) => Some([*inputs.get(1)?, *inputs.get(2)?]),
        _ => None,
    }
}

/// About how many bytes a node reads of the `bytes` of its streamed inputs: of experts, those that so many tokens use if all
/// experts are equally likely.
fn used_bytes(graph: &Graph, node: NodeId, bytes: u64) -> u64 {
    ExpertRows::of(graph, node).map_or(bytes, |rows| (bytes as f64 * rows.share()) as u64)
}

/// About how many operations such a node takes: a multiplication and an addition for each pair of elements.
fn operations(graph: &Graph, node: NodeId) -> u64 {
    let results = graph[graph[node].output()].elements() as u64;
    match (graph[node].op(), graph.inputs(node)) {
        (Op::Attention(_), [query, key, ..]) => {
            let [_, _, keys, _] = graph[*key].dims4();
            (graph[*query].elements() as u64).saturating_add(results).saturating_mul(2 * keys as u64)
        }
        // Rows of inactive neurons are skipped; the host computes the others without its matrix units.
        (Op::MulMatSparse { .. }, [weight, ..]) => {
            results.saturating_mul(2 * graph[*weight].shape().cols() as u64) / SPARSE_SHARE
        }
        (Op::AxpySparse, [weight, ..]) => {
            results.saturating_mul(2 * graph[*weight].shape().rows() as u64) / SPARSE_SHARE
        }
        (_, [weight, ..]) => results.saturating_mul(2 * graph[*weight].shape().cols() as u64),
        _ => 0,
    }
}
