//! The checker of memory plans. It shares no code with the planner, and is written to be verified by reading.
//!
//! From graph and request it collects every use of every storage as a plain list, and then checks the plan: every
//! tensor that is used has memory on its backend, aligned and inside its chunk; every view lies at its offset in its
//! source; every in-place result reuses a storage that nothing else still needs; and no two storages that are live in
//! the same step overlap.

use quadriga_graph::{Graph, NodeId, Tensor, TensorId, TensorKind};
use std::collections::{BTreeMap, BTreeSet};

use super::lifetime::Lifetime;
use super::plan::{MemoryPlan, TensorLocation};
use super::request::{InputPolicy, MemoryRequest};

/// A rule that a memory plan breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanViolation {
    /// The plan is not for this graph, or has lists of the wrong length.
    #[error("the plan does not describe this graph")]
    OtherGraph,
    /// A tensor that is used has no memory, or one with external memory was given some.
    #[error("{tensor} is {found}, but should be {expected}")]
    WrongLocation {
        /// The tensor.
        tensor: String,
        /// Its location in the plan.
        found: String,
        /// The location it should have.
        expected: &'static str,
    },
    /// A tensor is not on its backend.
    #[error("{tensor} is planned on backend {found}, but belongs on {expected}")]
    WrongBackend {
        /// The tensor.
        tensor: String,
        /// The backend in the plan.
        found: u16,
        /// The backend in the request.
        expected: u16,
    },
    /// An offset is not a multiple of the backend's alignment.
    #[error("{what} is at offset {offset}, which is not a multiple of {alignment}")]
    Misaligned {
        /// The tensor or extra.
        what: String,
        /// The offset.
        offset: u64,
        /// The backend's alignment.
        alignment: u64,
    },
    /// A storage reaches past the end of its chunk, or its chunk does not exist.
    #[error("{what} takes {bytes} bytes at offset {offset} of chunk {chunk}, which has {size}")]
    OutOfBounds {
        /// The tensor or extra.
        what: String,
        /// Its chunk.
        chunk: u32,
        /// Its offset.
        offset: u64,
        /// Its bytes.
        bytes: u64,
        /// Bytes of the chunk; 0 if there is none.
        size: u64,
    },
    /// A chunk is larger than the backend's largest buffer, though no single storage needs that.
    #[error(
        "chunk {chunk} of backend {backend} has {size} bytes, more than the limit of {limit} and than any storage in it"
    )]
    ChunkTooLarge {
        /// The backend.
        backend: usize,
        /// The chunk.
        chunk: usize,
        /// Its bytes.
        size: u64,
        /// The largest buffer.
        limit: u64,
    },
    /// A view, or the result of a write into a tensor, is not at its offset inside its source.
    #[error("{view} is not at its offset in {source_name}")]
    ViewElsewhere {
        /// The view.
        view: String,
        /// The tensor that owns the storage.
        source_name: String,
    },
    /// A result reuses a storage in place though a rule forbids it.
    #[error("{result} may not reuse the memory of {reused} in place: {why}")]
    NotInPlace {
        /// The result.
        result: String,
        /// The root of the storage.
        reused: String,
        /// The rule that is broken.
        why: &'static str,
    },
    /// The planned lifetime of a storage does not cover its uses.
    #[error("{tensor} is used in steps {needed}, but planned for {planned}")]
    TooShort {
        /// The root of the storage.
        tensor: String,
        /// The lifetime that its uses need.
        needed: Lifetime,
        /// The lifetime in the plan.
        planned: Lifetime,
    },
    /// Two storages that are live in the same step have a byte in common.
    #[error("{first} and {second} overlap in step {step}")]
    Overlap {
        /// One of them.
        first: String,
        /// The other.
        second: String,
        /// The step.
        step: u32,
    },
}

/// One use of a storage: its step, and the node that uses it; no node for outputs and holds.
#[derive(Clone, Copy)]
struct Use {
    step: u32,
    by: Option<NodeId>,
}

/// A storage with memory in an arena.
struct Occupant {
    name: String,
    location: TensorLocation,
    bytes: u64,
    life: Lifetime,
}

/// Checks that `plan` is a correct plan for `request`.
pub fn check(request: &MemoryRequest<'_>, plan: &MemoryPlan) -> Result<(), PlanViolation> {
    let graph = request.graph;
    let count = graph.tensors().len();
    let lengths = [plan.locations.len(), plan.lifetimes.len(), plan.bytes.len(), plan.sharing.roots.len()];
    if plan.graph != graph.fingerprint()
        || lengths.iter().any(|length| *length != count)
        || plan.extra_locations.len() != request.extras.len()
        || plan.backends.len() != request.memories.len()
    {
        return Err(PlanViolation::OtherGraph);
    }
    let end = end_of_run(request);
    let outputs = graph.outputs().iter().map(|(_, output)| *output);
    let mut external = storages(graph, request.external.iter().copied());
    for (flag, tensor) in external.iter_mut().zip(graph.tensors()) {
        *flag |= matches!(tensor.kind(), TensorKind::Weight | TensorKind::Constant | TensorKind::State);
    }
    let checker = Checker {
        request,
        graph,
        plan,
        uses: collect_uses(request, end),
        outputs: storages(graph, outputs),
        external,
        end,
    };
    checker.locations()?;
    checker.in_place()?;
    checker.overlaps(&checker.occupants()?)
}

/// One past the last step of the run.
fn end_of_run(request: &MemoryRequest<'_>) -> u32 {
    let nodes = (0..request.graph.nodes().len()).map(|node| request.step(node) + 1);
    let holds = request.holds.iter().map(|hold| hold.until + 1);
    let extras = request.extras.iter().map(|extra| match extra.lifetime.end {
        u32::MAX => extra.lifetime.start + 1,
        end => end,
    });
    nodes.chain(holds).chain(extras).max().unwrap_or(0).max(1)
}

/// For each tensor whether it owns the storage of one of `named`.
fn storages(graph: &Graph, named: impl Iterator<Item = TensorId>) -> Vec<bool> {
    let mut flags = vec![false; graph.tensors().len()];
    for tensor in named.filter_map(|id| graph.get(id)) {
        if let Some(flag) = flags.get_mut(tensor.storage().index()) {
            *flag = true;
        }
    }
    flags
}

/// For each tensor that owns a storage, all uses of it.
fn collect_uses(request: &MemoryRequest<'_>, end: u32) -> Vec<Vec<Use>> {
    let graph = request.graph;
    let held: BTreeSet<TensorId> = request.holds.iter().map(|hold| hold.tensor).collect();
    let mut uses = vec![Vec::new(); graph.tensors().len()];
    let mut add = |tensor: TensorId, step: u32, by: Option<NodeId>| {
        if let Some(list) = graph.get(tensor).and_then(|tensor| uses.get_mut(tensor.storage().index())) {
            list.push(Use { step, by });
        }
    };
    for (id, node) in graph.node_ids().zip(graph.nodes()).filter(|(_, node)| !node.op().is_view()) {
        let step = request.step(id.index());
        add(node.output(), step, Some(id));
        for input in graph.inputs(id) {
            // The node reads a copy; the hold covers the original.
            let elsewhere = storage_backend(request, *input) != request.backend(node.output().index());
            if !(elsewhere && held.contains(input)) {
                add(*input, step, Some(id));
            }
        }
    }
    for hold in request.holds {
        add(hold.tensor, hold.until, None);
    }
    for (_, output) in graph.outputs() {
        add(*output, end - 1, None);
    }
    uses
}

/// The backend of a tensor's storage.
fn storage_backend(request: &MemoryRequest<'_>, tensor: TensorId) -> u16 {
    let storage = request.graph.get(tensor).map_or(tensor, Tensor::storage);
    request.backend(storage.index())
}

struct Checker<'a> {
    request: &'a MemoryRequest<'a>,
    graph: &'a Graph,
    plan: &'a MemoryPlan,
    uses: Vec<Vec<Use>>,
    /// For each storage whether an output lies in it.
    outputs: Vec<bool>,
    /// For each storage whether its memory is external.
    external: Vec<bool>,
    end: u32,
}

impl Checker<'_> {
    fn uses_of(&self, storage: TensorId) -> &[Use] {
        self.uses.get(storage.index()).map_or(&[], Vec::as_slice)
    }

    fn root(&self, tensor: TensorId) -> TensorId {
        self.plan.sharing.root(tensor).unwrap_or(tensor)
    }

    fn is_output(&self, storage: TensorId) -> bool {
        self.outputs.get(storage.index()).copied().unwrap_or(false)
    }

    fn is_external(&self, storage: TensorId) -> bool {
        self.external.get(storage.index()).copied().unwrap_or(false)
    }

    /// Every tensor is in its storage, on the right backend.
    fn locations(&self) -> Result<(), PlanViolation> {
        for (id, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()) {
            let storage = tensor.storage();
            let (location, storage_location) = (self.plan.location(id), self.plan.location(storage));
            let expected =
                match (self.is_external(storage), self.uses_of(storage).is_empty(), storage_location) {
                    (true, _, TensorLocation::External { .. }) | (false, true, TensorLocation::Unused) => {
                        None
                    }
                    (false, false, TensorLocation::Arena { .. }) => None,
                    (true, ..) => Some("external"),
                    (false, true, _) => Some("without memory, as nothing uses it"),
                    (false, false, _) => Some("in an arena"),
                };
            if let Some(expected) = expected {
                let (tensor, found) = (self.graph.name(id), format!("{location:?}"));
                return Err(PlanViolation::WrongLocation { tensor, found, expected });
            }
            let backend = match storage_location {
                TensorLocation::Unused => None,
                TensorLocation::External { backend } | TensorLocation::Arena { backend, .. } => Some(backend),
            };
            let expected = self.request.backend(storage.index());
            if let Some(found) = backend.filter(|found| *found != expected) {
                return Err(PlanViolation::WrongBackend { tensor: self.graph.name(id), found, expected });
            }
            let source_end = self.graph.get(storage).map_or(0, Tensor::bytes);
            let inside = tensor.offset().checked_add(tensor.bytes()).is_some_and(|end| end <= source_end);
            let put = match storage_location {
                TensorLocation::Arena { backend, chunk, offset } => {
                    let offset = offset.saturating_add(tensor.offset() as u64);
                    TensorLocation::Arena { backend, chunk, offset }
                }
                other => other,
            };
            if !inside || location != put {
                let (view, source_name) = (self.graph.name(id), self.graph.name(storage));
                return Err(PlanViolation::ViewElsewhere { view, source_name });
            }
            if self.root(id) != self.root(storage) {
                return Err(PlanViolation::ViewElsewhere {
                    view: self.graph.name(id),
                    source_name: self.graph.name(self.root(id)),
                });
            }
        }
        Ok(())
    }

    /// Every in-place result follows the rules of [`sharing`](super::sharing).
    fn in_place(&self) -> Result<(), PlanViolation> {
        for (result, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()) {
            let root = self.root(result);
            if tensor.storage() != result || root == result {
                continue;
            }
            let broken = |why| PlanViolation::NotInPlace {
                result: self.graph.name(result),
                reused: self.graph.name(root),
                why,
            };
            if self.root(root) != root || self.plan.location(result) != self.plan.location(root) {
                return Err(broken("it is not at the start of the storage"));
            }
            let TensorKind::Computed(node) = tensor.kind() else { return Err(broken("it is not computed")) };
            let Some(op) = self.graph.get_node(node).map(|node| node.op()) else {
                return Err(broken("it is not computed"));
            };
            let inputs = self.graph.inputs(node);
            let from_here: Vec<usize> =
                (0..inputs.len()).filter(|i| inputs.get(*i).is_some_and(|x| self.root(*x) == root)).collect();
            let [reused] = from_here[..] else {
                return Err(broken("not exactly one input is in that storage"));
            };
            if !op.declaration().in_place.contains(&reused) {
                return Err(broken("the operation does not run in place on that input"));
            }
            let Some(input) = inputs.get(reused).and_then(|id| self.graph.get(*id)) else {
                return Err(broken("its input does not exist"));
            };
            let whole = self.graph.get(input.storage()).map_or(0, Tensor::bytes);
            if !input.same_layout(tensor) || input.offset() != 0 || input.bytes() != whole {
                return Err(broken("the input has another layout, or is only a part of its storage"));
            }
            if self.is_external(input.storage()) || self.is_output(input.storage()) {
                return Err(broken("the input has external memory, or is an output"));
            }
            if self.graph.get(input.storage()).is_some_and(|t| t.kind() == TensorKind::Input)
                && self.request.inputs == InputPolicy::Keep
            {
                return Err(broken("inputs are kept"));
            }
            if self.request.backend(input.storage().index()) != self.request.backend(result.index()) {
                return Err(broken("it is computed on another backend"));
            }
            let step = self.request.step(node.index());
            let used_later = |u: &Use| u.by != Some(node) && u.step >= step;
            if self.uses_of(input.storage()).iter().any(used_later) {
                return Err(broken("the input is used elsewhere in that step or later"));
            }
        }
        Ok(())
    }

    /// Every storage in an arena, with the lifetime that its uses need.
    fn occupants(&self) -> Result<Vec<Occupant>, PlanViolation> {
        let mut needed: BTreeMap<TensorId, (Lifetime, u64)> = BTreeMap::new();
        for (id, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()) {
            let uses = self.uses_of(id);
            if tensor.storage() != id || self.is_external(id) || uses.is_empty() {
                continue;
            }
            let given = tensor.kind() == TensorKind::Input;
            // A hold that ends before the tensor is computed has no effect.
            let by_nodes = uses.iter().filter(|u| u.by.is_some()).map(|u| u.step);
            let first = if given { 0 } else { by_nodes.min().unwrap_or(0) };
            let last = uses.iter().map(|u| u.step + 1).max().unwrap_or(0);
            let kept = self.is_output(id) || (given && self.request.inputs == InputPolicy::Keep);
            let end = if kept { self.end } else { last };
            let memory = self.request.memories.get(usize::from(self.request.backend(id.index())));
            let bytes = memory.map_or(0, |memory| memory.storage_bytes(tensor));
            let entry = needed.entry(self.root(id)).or_insert((Lifetime { start: first, end }, bytes));
            entry.0.start = entry.0.start.min(first);
            entry.0.end = entry.0.end.max(end);
            entry.1 = entry.1.max(bytes);
        }
        let mut occupants = Vec::new();
        for (root, (life, bytes)) in needed {
            let planned = self.plan.lifetimes.get(root.index()).copied().unwrap_or_default();
            if planned.start > life.start || planned.end < life.end {
                return Err(PlanViolation::TooShort { tensor: self.graph.name(root), needed: life, planned });
            }
            occupants.push(Occupant {
                name: self.graph.name(root),
                location: self.plan.location(root),
                bytes,
                life,
            });
        }
        for (index, extra) in self.request.extras.iter().enumerate() {
            let life = Lifetime { start: extra.lifetime.start, end: extra.lifetime.end.min(self.end) };
            let location = self.plan.extra_location(index);
            let name = format!("extra {index}");
            match location {
                TensorLocation::Arena { backend, .. } if backend == extra.backend => {}
                _ => {
                    let found = format!("{location:?}");
                    return Err(PlanViolation::WrongLocation {
                        tensor: name,
                        found,
                        expected: "in its backend's arena",
                    });
                }
            }
            occupants.push(Occupant { name, location, bytes: extra.bytes, life });
        }
        Ok(occupants)
    }

    /// Every storage is aligned and inside its chunk, and no two that are live together overlap.
    fn overlaps(&self, occupants: &[Occupant]) -> Result<(), PlanViolation> {
        let mut largest: BTreeMap<(u16, u32), u64> = BTreeMap::new();
        let mut events = Vec::new();
        for (index, Occupant { name, location, bytes, life }) in occupants.iter().enumerate() {
            let TensorLocation::Arena { backend, chunk, offset } = *location else { continue };
            let memory = self.request.memories.get(usize::from(backend));
            let alignment = memory.map_or(1, |memory| memory.facts.alignment) as u64;
            if !offset.is_multiple_of(alignment) {
                return Err(PlanViolation::Misaligned { what: name.clone(), offset, alignment });
            }
            let chunks = self.plan.backends.get(usize::from(backend)).map(|plan| &plan.chunks);
            let size = chunks.and_then(|chunks| chunks.get(chunk as usize)).copied();
            let end = offset.checked_add(*bytes);
            if end.is_none_or(|end| size.is_none_or(|size| end > size)) {
                let (what, size) = (name.clone(), size.unwrap_or(0));
                return Err(PlanViolation::OutOfBounds { what, chunk, offset, bytes: *bytes, size });
            }
            let most = largest.entry((backend, chunk)).or_default();
            *most = bytes.next_multiple_of(alignment).max(*most);
            if *bytes > 0 && !life.is_empty() {
                events.push((life.start, true, index));
                events.push((life.end, false, index));
            }
        }
        for (backend, (plan, memory)) in self.plan.backends.iter().zip(self.request.memories).enumerate() {
            let Some(limit) = memory.facts.max_buffer.map(|max| max as u64) else { continue };
            for (chunk, size) in plan.chunks.iter().enumerate() {
                let most = largest.get(&(backend as u16, chunk as u32)).copied().unwrap_or(0);
                if *size > limit && *size > most && *size > memory.facts.alignment as u64 {
                    return Err(PlanViolation::ChunkTooLarge { backend, chunk, size: *size, limit });
                }
            }
        }

        // Ends sort before starts: a storage that ends at a step is not live in it.
        events.sort_unstable();
        let mut in_use: BTreeMap<(u16, u32, u64), (u64, usize)> = BTreeMap::new();
        for (step, starts, index) in events {
            let Some(Occupant { location: TensorLocation::Arena { backend, chunk, offset }, bytes, .. }) =
                occupants.get(index)
            else {
                continue;
            };
            if !starts {
                in_use.remove(&(*backend, *chunk, *offset));
                continue;
            }
            let below = in_use.range((*backend, *chunk, 0)..(*backend, *chunk, offset + bytes)).next_back();
            if let Some((_, (end, other))) = below
                && end > offset
            {
                let name = |index: usize| occupants.get(index).map(|o| o.name.clone()).unwrap_or_default();
                return Err(PlanViolation::Overlap { first: name(*other), second: name(index), step });
            }
            in_use.insert((*backend, *chunk, *offset), (offset + bytes, index));
        }
        Ok(())
    }
}
