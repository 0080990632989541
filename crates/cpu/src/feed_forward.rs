//! Finds the feed-forwards of experts that may run as one step, and memory for what they compute on the way.
//!
//! The memory plan assumes that nodes run in order: the results of the last matrices may have the memory of the first ones,
//! which other threads still write when both are one step. So results that only nodes of the feed-forward read are in scratch
//! memory of the program instead, and so are the prepared activations of the last matrices.

use std::collections::HashMap;

use quadriga_graph::{DType, Graph, NodeId, Op, TensorId};
use quadriga_runtime::{BackendError, Layout, Region, TensorPlace};

use crate::buffer::HostBuffer;
use crate::isa::Isa;
use crate::memory::ALIGNMENT;
use crate::ops::{ExpertActivations, MAX_JOB_ROWS, PreparedMemory};
use crate::places::OperandPlaces;

/// A feed-forward of few rows.
#[derive(Clone, Debug, PartialEq)]
struct RoutedFeedForward {
    /// The positions of its first node and of its last, the sum over experts.
    span: [usize; 2],
    /// Positions of the nodes that compute its results, and of the sum.
    nodes: Vec<usize>,
    /// Results that only these nodes read, each before those that it is computed from.
    results: Vec<TensorId>,
    /// How many inputs of nodes each of them is.
    readers: Vec<usize>,
    /// The matmul with the last matrices.
    last: Option<NodeId>,
    /// Bytes of the prepared activations of the last matrices.
    prepared: usize,
}

/// Where a feed-forward's results and prepared activations are in scratch memory.
struct ScratchLayout {
    /// The offset of each result, in their order.
    results: Vec<usize>,
    prepared: usize,
    bytes: usize,
}

/// Not in the split.
const NOWHERE: u32 = u32::MAX;

/// Searches some nodes of a graph, given by their positions.
struct Finder<'a> {
    graph: &'a Graph,
    nodes: &'a [NodeId],
    isa: Isa,
    /// Whether a result is read by others than these nodes.
    kept: &'a dyn Fn(TensorId) -> bool,
    /// The position of each node of the graph.
    positions: Vec<u32>,
}

/// The feed-forwards of these nodes. Those that overlap another one are left out: they would share its scratch memory.
fn find(
    graph: &Graph,
    nodes: &[NodeId],
    isa: Isa,
    kept: &dyn Fn(TensorId) -> bool,
) -> Vec<RoutedFeedForward> {
    let is_sum = |id: &NodeId| graph.get_node(*id).is_some_and(|node| *node.op() == Op::SumExperts);
    if !nodes.iter().any(is_sum) {
        return Vec::new();
    }
    let mut positions = vec![NOWHERE; graph.nodes().len()];
    for (position, node) in nodes.iter().enumerate() {
        if let Some(place) = positions.get_mut(node.index()) {
            *place = u32::try_from(position).unwrap_or(NOWHERE);
        }
    }
    let finder = Finder { graph, nodes, isa, kept, positions };
    let mut found: Vec<RoutedFeedForward> = Vec::new();
    for (position, _) in nodes.iter().enumerate().filter(|(_, id)| is_sum(id)) {
        let Some(next) = finder.before_sum(position) else { continue };
        if found.last().is_none_or(|previous| previous.span[1] < next.span[0]) {
            found.push(next);
        }
    }
    finder.drop_read_elsewhere(&mut found);
    found
}

impl Finder<'_> {
    fn node(&self, position: usize) -> Option<(NodeId, &Op, &[TensorId])> {
        let id = *self.nodes.get(position)?;
        Some((id, self.graph.get_node(id)?.op(), self.graph.inputs(id)))
    }

    /// The feed-forward whose results a sum over experts adds up.
    fn before_sum(&self, position: usize) -> Option<RoutedFeedForward> {
        let (_, _, &[summed, _]) = self.node(position)? else { return None };
        let [_, tokens, used, _] = self.graph.get(summed)?.dims4();
        if !(1..=MAX_JOB_ROWS).contains(&tokens.checked_mul(used)?) {
            return None;
        }
        let mut found = RoutedFeedForward {
            span: [position; 2],
            nodes: vec![position],
            results: Vec::new(),
            readers: Vec::new(),
            last: None,
            prepared: 0,
        };
        self.add(summed, &mut found)?;
        found.last.map(|_| found)
    }

    /// Adds the nodes that compute a result; `None` if it is not one of a feed-forward.
    fn add(&self, result: TensorId, found: &mut RoutedFeedForward) -> Option<()> {
        let tensor = self.graph.get(result)?;
        let position = *self.positions.get(tensor.node()?.index())? as usize;
        let (id, op, inputs) = self.node(position)?;
        let own = tensor.storage() == result && tensor.dtype() == DType::F32 && tensor.is_contiguous();
        if !own || op.is_view() || tensor.bytes() == 0 || (self.kept)(result) {
            return None;
        }
        if found.results.contains(&result) {
            return Some(());
        }
        found.results.push(result);
        found.nodes.push(position);
        found.span[0] = found.span[0].min(position);
        match (op, inputs) {
            (Op::MulMatId, &[weight, x, _]) if found.last.is_none() => {
                found.last = Some(id);
                found.prepared = self.prepared_bytes(weight, x, result)?;
                self.add(x, found)
            }
            (Op::MulMatId, _) => Some(()),
            (Op::Gated { .. }, inputs) => inputs.iter().try_for_each(|input| self.add(*input, found)),
            (
                Op::AddId | Op::Binary(_) | Op::Unary(_) | Op::Scale { .. } | Op::Clamp { .. },
                &[changed, ..],
            ) => self.add(changed, found),
            _ => None,
        }
    }

    fn prepared_bytes(&self, weight: TensorId, x: TensorId, result: TensorId) -> Option<usize> {
        let (weight, x) = (self.graph.get(weight)?, self.graph.get(x)?);
        let [_, tokens, used, _] = self.graph.get(result)?.dims4();
        let [d0, d1, ..] = weight.dims4();
        let ([_, _, choices, columns], experts) = (x.dims4(), d0.checked_mul(d1)?);
        let shape = [tokens, used, choices];
        let activations = ExpertActivations::new(self.isa, weight.dtype(), shape, experts, columns).ok()?;
        activations.shared_bytes().ok()
    }

    /// Leaves out feed-forwards of which another node reads a result, or a view of it.
    fn drop_read_elsewhere(&self, found: &mut Vec<RoutedFeedForward>) {
        // The feed-forward of each tensor, one more than its index.
        let mut owners = vec![0_u32; self.graph.tensors().len()];
        for (number, feed_forward) in (1..).zip(&*found) {
            for result in &feed_forward.results {
                owners.iter_mut().skip(result.index()).take(1).for_each(|owner| *owner = number);
            }
        }
        let mut valid = vec![true; found.len()];
        for (position, id) in self.nodes.iter().enumerate() {
            for input in self.graph.inputs(*id) {
                let Some(tensor) = self.graph.get(*input) else { continue };
                let owner = owners.get(tensor.storage().index()).copied().unwrap_or_default() as usize;
                let Some(number) = owner.checked_sub(1) else { continue };
                let own = found.get(number).is_some_and(|one| one.nodes.contains(&position));
                if !own || tensor.storage() != *input {
                    valid.iter_mut().skip(number).take(1).for_each(|valid| *valid = false);
                }
                if let Some(one) = found.get_mut(number)
                    && let Some(at) = one.results.iter().position(|result| result == input)
                {
                    one.readers.resize(one.results.len(), 0);
                    one.readers.iter_mut().skip(at).take(1).for_each(|readers| *readers += 1);
                }
            }
        }
        let mut valid = valid.into_iter();
        found.retain(|_| valid.next().unwrap_or(false));
    }
}

impl RoutedFeedForward {
    /// Offsets in scratch memory. A result has the place of its first input where its operation works in place and nothing else
    /// reads that input, so that fewer bytes pass through the caches.
    fn layout(&self, graph: &Graph) -> Option<ScratchLayout> {
        let mut bytes = 0_usize;
        let mut place = |needs: usize| {
            let offset = bytes;
            bytes = bytes.checked_add(needs)?.checked_next_multiple_of(ALIGNMENT)?;
            Some(offset)
        };
        let mut results = vec![0; self.results.len()];
        for (at, result) in self.results.iter().enumerate().rev() {
            let offset = match self.in_place_of(graph, *result) {
                Some(input) => *results.get(input)?,
                None => place(graph.get(*result)?.bytes())?,
            };
            results.iter_mut().skip(at).take(1).for_each(|place| *place = offset);
        }
        let prepared = place(self.prepared)?;
        Some(ScratchLayout { results, prepared, bytes })
    }

    /// Which of the results a result may replace in memory.
    fn in_place_of(&self, graph: &Graph, result: TensorId) -> Option<usize> {
        let tensor = graph.get(result)?;
        let node = tensor.node()?;
        let first = *graph.inputs(node).first()?;
        let input = self.results.iter().position(|other| *other == first)?;
        let allowed = graph.get_node(node)?.op().declaration().in_place.contains(&0)
            && self.readers.get(input) == Some(&1)
            && graph.get(first)?.same_layout(tensor);
        allowed.then_some(input)
    }
}

/// Scratch memory that a program of these nodes needs, at most.
pub(crate) fn scratch_bytes(graph: &Graph, nodes: &[NodeId], isa: Isa) -> usize {
    let found = find(graph, nodes, isa, &|_| false);
    found.iter().filter_map(|one| Some(one.layout(graph)?.bytes)).max().unwrap_or(0)
}

/// Gives the results of feed-forwards places in scratch memory. Returns the memory for prepared activations, by the matmul
/// with the last matrices.
pub(crate) fn place_results(
    places: &mut OperandPlaces<'_>,
    graph: &Graph,
    nodes: &[NodeId],
    isa: Isa,
    kept: &dyn Fn(TensorId) -> bool,
    scratch: Option<&Region>,
) -> Result<HashMap<NodeId, PreparedMemory>, BackendError> {
    let mut prepared = HashMap::new();
    let Some((scratch, buffer)) = scratch.and_then(|scratch| Some((scratch, HostBuffer::of(scratch)?)))
    else {
        return Ok(prepared);
    };
    for found in find(graph, nodes, isa, kept) {
        let (Some(layout), Some(last)) = (found.layout(graph), found.last) else { continue };
        let packed = |id: &NodeId| graph.inputs(*id).first().is_some_and(|weight| places.is_packed(*weight));
        if layout.bytes > scratch.bytes || !packed(&last) {
            continue;
        }
        for (result, offset) in found.results.iter().zip(&layout.results) {
            let bytes = graph.get(*result).map_or(0, |tensor| tensor.bytes());
            let region = Region::new(scratch.buffer.clone(), scratch.offset + offset, bytes)?;
            places.replace(*result, TensorPlace { region, layout: Layout::Plain });
        }
        let region = Region::new(scratch.buffer.clone(), scratch.offset + layout.prepared, found.prepared)?;
        let pointer = buffer.pointer().wrapping_add(region.offset);
        prepared.insert(last, PreparedMemory { pointer, bytes: region.bytes });
    }
    Ok(prepared)
}
