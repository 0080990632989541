//! WeightStreaming: weights that live with the host are brought to a device for a run, where the work on them is worth the way.
//!
//! Many rows at once make a product long and its weight no larger. Past some number of operations for each byte, a
//! device that computes faster than the host does best to fetch the weight, use it and forget it: the copies are split
//! inputs like any others, made while the split before computes, and the memory planner gives them places for just that
//! time. The same goes for attention over keys and values that are kept by the host; where these are made on the
//! device, it writes them into its copy of the cache too, rather than wait for the host's (see [`super::split`]).
//! Weights that are small beside what is computed with them (those of norms, biases) draw nothing to the host then:
//! they are lent to whoever reads them.
#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized for all tensors and backends; ids are the graph's own"
)]

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};

use super::NO_BACKEND;
use super::assign::{Homes, Reason};
use crate::flow::Flow;

/// When the host's weights are lent to a device for a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct WeightStreaming {
    /// The least operations for each byte that has to be brought.
    pub operations_per_byte: u64,
    /// The least operations of a graph, all such nodes together: below, a run is short anyway.
    pub least_operations: u64,
}

impl Default for WeightStreaming {
    /// For a host of some teraflops and a bus of some tens of gigabytes a second: a Q4_0 weight is lent for 29 rows or
    /// more, an f16 weight for 100.
    fn default() -> WeightStreaming {
        WeightStreaming { operations_per_byte: 100, least_operations: 1_000_000_000 }
    }
}

/// A node that would rather run on the device, and what it is about.
struct Wish {
    storage: TensorId,
    fetched: [TensorId; 2],
    operations: u64,
}

/// Moves what is worth it to a device, and marks the weights that are lent. `on_host` says of each backend whether its
/// memory is the host's, `computes` whether the device computes a storage.
pub(crate) fn lend(
    graph: &Graph,
    flow: &Flow,
    on_host: &[bool],
    homes: &mut Homes,
    (lending, device): (WeightStreaming, u16),
    computes: impl Fn(TensorId) -> bool,
) {
    let with_host = |tensor: TensorId| {
        let home = homes.home[flow.storage[tensor.index()].index()];
        home != NO_BACKEND && on_host[usize::from(home)]
    };
    let mut wishes: Vec<Wish> = Vec::new();
    let homeless = |storage: TensorId| homes.home[storage.index()] == NO_BACKEND;
    for maker in flow.makers().iter().filter(|maker| maker.heavy && homeless(maker.storage)) {
        let Some(fetched) = fetched(graph, maker.node).filter(|ids| ids.iter().all(|id| with_host(*id)))
        else {
            continue;
        };
        let [one, other] = fetched.map(|id| flow.bytes[id.index()]);
        // A product's weight stands there twice.
        let bytes = if fetched[0] == fetched[1] { one } else { one.saturating_add(other) };
        let operations = operations(graph, maker.node);
        if operations >= bytes.saturating_mul(lending.operations_per_byte) {
            wishes.push(Wish { storage: maker.storage, fetched, operations });
        }
    }
    let operations = wishes.iter().fold(0u64, |sum, wish| sum.saturating_add(wish.operations));
    if wishes.is_empty() || operations < lending.least_operations {
        return;
    }
    // Which weights are read through views; and which are small beside everything that is computed with them.
    let (mut viewed, mut small) = (vec![false; graph.tensors().len()], vec![true; graph.tensors().len()]);
    for (maker, sources) in flow.iter() {
        let made = graph[graph[maker.node].output()].bytes();
        for source in sources.iter().filter(|source| source.kind == TensorKind::Weight) {
            let storage = source.storage.index();
            viewed[storage] |= source.tensor != source.storage;
            small[storage] &= graph[source.storage].bytes().saturating_mul(4) <= made;
        }
    }
    let lendable = |tensor: TensorId| {
        graph[tensor].kind() == TensorKind::Weight
            && with_host(tensor)
            && !viewed[tensor.index()]
            && graph.data(tensor).is_some()
    };
    let state = |tensor: TensorId| graph[graph[tensor].storage()].kind() == TensorKind::State;
    wishes.retain(|wish| wish.fetched.iter().all(|id| lendable(*id) || state(*id)) && computes(wish.storage));
    if wishes.is_empty() {
        return;
    }
    let mut lent: Vec<TensorId> = graph
        .of_kind(TensorKind::Weight)
        .filter(|weight| small[weight.index()] && lendable(*weight))
        .collect();
    lent.extend(wishes.iter().flat_map(|wish| wish.fetched).filter(|id| lendable(*id)));
    for wish in &wishes {
        homes.home[wish.storage.index()] = device;
        homes.reason[wish.storage.index()] = Reason::Borrows { tensor: wish.fetched[0].index() };
    }
    homes.lent.extend(lent);
    let states = wishes.iter().flat_map(|wish| wish.fetched).map(|id| graph[id].storage());
    homes.echoes =
        (device, states.filter(|id| graph[*id].kind() == TensorKind::State && computes(*id)).collect());
}

/// The two sources that would have to be brought for a node (twice the same where there is one), if it is of a kind for
/// which that can be worth it.
fn fetched(graph: &Graph, node: NodeId) -> Option<[TensorId; 2]> {
    let inputs = graph.inputs(node);
    match graph[node].op() {
        Op::MulMat | Op::MulMatId => Some([*inputs.first()?; 2]),
        Op::Attention(_) => Some([*inputs.get(1)?, *inputs.get(2)?]),
        _ => None,
    }
}

/// About how many operations such a node takes: two for each element of a weight's row or of a key, and each result.
fn operations(graph: &Graph, node: NodeId) -> u64 {
    let results = graph[graph[node].output()].elements() as u64;
    match (graph[node].op(), graph.inputs(node)) {
        (Op::Attention(_), [query, key, ..]) => {
            let [_, _, keys, _] = graph[*key].dims4();
            (graph[*query].elements() as u64).saturating_add(results).saturating_mul(2 * keys as u64)
        }
        (_, [weight, ..]) => results.saturating_mul(2 * graph[*weight].shape().cols() as u64),
        _ => 0,
    }
}
