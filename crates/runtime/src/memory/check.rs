//! The judge of memory plans. It shares no code with the planner, and is meant to be believed by reading.
//!
//! It knows the graph and the request, collects every use of every storage as a plain list, and then asks of the plan:
//! is everything that is used somewhere, on the right backend, aligned and inside its chunk? Does every view lie where
//! its source puts it? Was every storage that is taken over in place free to take? And do any two storages that are in
//! use in the same step have a byte in common?

use quadriga_graph::{Graph, NodeId, Tensor, TensorId, TensorKind};
use std::collections::{BTreeMap, BTreeSet};

use super::lifetimes::Lifetime;
use super::plan::{MemoryPlan, Spot};
use super::request::{Inputs, Request};

/// What is wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// The plan is not for this graph, or has lists of the wrong length.
    #[error("the plan does not describe this graph")]
    OtherGraph,
    /// A tensor that is used has no memory, or one that has memory of its own was given some.
    #[error("{tensor} is {found}, but should be {expected}")]
    WrongSpot {
        /// The tensor.
        tensor: String,
        /// Where the plan has it.
        found: String,
        /// Where it should be.
        expected: &'static str,
    },
    /// A tensor is not on its backend.
    #[error("{tensor} is planned on backend {found}, but belongs on {expected}")]
    WrongBackend {
        /// The tensor.
        tensor: String,
        /// Where the plan has it.
        found: u16,
        /// Where it belongs.
        expected: u16,
    },
    /// A place is not a multiple of the backend's alignment.
    #[error("{what} is at offset {offset}, which is not a multiple of {alignment}")]
    Misaligned {
        /// What is there.
        what: String,
        /// The offset.
        offset: u64,
        /// The backend's alignment.
        alignment: u64,
    },
    /// Something reaches past the end of its chunk, or its chunk does not exist.
    #[error("{what} takes {bytes} bytes at offset {offset} of chunk {chunk}, which has {size}")]
    OutOfBounds {
        /// What is there.
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
    /// A chunk is larger than the backend's largest buffer, and than any one thing in it.
    #[error(
        "chunk {chunk} of backend {backend} has {size} bytes, more than {limit} and than any one thing in it"
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
    /// A view or a written result is not where its source puts it, or not inside it.
    #[error("{view} does not lie where its source {source_name} puts it")]
    ViewElsewhere {
        /// The view.
        view: String,
        /// The tensor that owns the storage.
        source_name: String,
    },
    /// A result took over a storage that it may not.
    #[error("{result} may not take over the memory of {taken}: {why}")]
    NotInPlace {
        /// The result.
        result: String,
        /// The root of the storage.
        taken: String,
        /// The rule that is broken.
        why: &'static str,
    },
    /// A storage is said to live shorter than it is used.
    #[error("{tensor} is used during {needed}, but planned for {planned}")]
    TooShort {
        /// The root of the storage.
        tensor: String,
        /// The lifetime that its uses need.
        needed: Lifetime,
        /// The lifetime in the plan.
        planned: Lifetime,
    },
    /// Two storages that are in use in the same step have a byte in common.
    #[error("{first} and {second} overlap in step {step}")]
    Overlap {
        /// The one.
        first: String,
        /// The other.
        second: String,
        /// The step.
        step: u32,
    },
}

/// One use of a storage: in which step, and by which node, if it is one.
#[derive(Clone, Copy)]
struct Use {
    step: u32,
    by: Option<NodeId>,
}

/// Something that occupies bytes for a while.
struct Occupant {
    name: String,
    spot: Spot,
    bytes: u64,
    life: Lifetime,
}

/// Finds out whether `plan` is a right answer to `request`.
pub fn check(request: &Request<'_>, plan: &MemoryPlan) -> Result<(), Flaw> {
    let graph = request.graph;
    let count = graph.tensors().len();
    let lengths = [plan.spots.len(), plan.lifetimes.len(), plan.bytes.len(), plan.sharing.roots.len()];
    if plan.graph != graph.fingerprint()
        || lengths.iter().any(|length| *length != count)
        || plan.extra_spots.len() != request.extras.len()
        || plan.backends.len() != request.memories.len()
    {
        return Err(Flaw::OtherGraph);
    }
    let end = end_of_run(request);
    let outputs = graph.outputs().iter().map(|(_, output)| *output);
    let mut placed = storages(graph, request.placed.iter().copied());
    for (flag, tensor) in placed.iter_mut().zip(graph.tensors()) {
        *flag |= matches!(tensor.kind(), TensorKind::Weight | TensorKind::Constant | TensorKind::State);
    }
    let judge = Judge {
        request,
        graph,
        plan,
        uses: collect_uses(request, end),
        outputs: storages(graph, outputs),
        placed,
        end,
    };
    judge.spots()?;
    judge.in_place()?;
    judge.overlaps(&judge.occupants()?)
}

/// One past the last step that anything happens in.
fn end_of_run(request: &Request<'_>) -> u32 {
    let nodes = (0..request.graph.nodes().len()).map(|node| request.step(node) + 1);
    let holds = request.holds.iter().map(|hold| hold.until + 1);
    let extras = request.extras.iter().map(|extra| match extra.lifetime.end {
        u32::MAX => extra.lifetime.start + 1,
        end => end,
    });
    nodes.chain(holds).chain(extras).max().unwrap_or(0).max(1)
}

/// For each tensor whether it is the storage of one of those named.
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
fn collect_uses(request: &Request<'_>, end: u32) -> Vec<Vec<Use>> {
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
            // Read through a copy, which the caller's hold accounts for.
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

/// The backend of the storage that a tensor lies in.
fn storage_backend(request: &Request<'_>, tensor: TensorId) -> u16 {
    let storage = request.graph.get(tensor).map_or(tensor, Tensor::storage);
    request.backend(storage.index())
}

struct Judge<'a> {
    request: &'a Request<'a>,
    graph: &'a Graph,
    plan: &'a MemoryPlan,
    uses: Vec<Vec<Use>>,
    /// For each storage whether an output lies in it.
    outputs: Vec<bool>,
    /// For each storage whether the planner must leave it alone.
    placed: Vec<bool>,
    end: u32,
}

impl Judge<'_> {
    fn uses_of(&self, storage: TensorId) -> &[Use] {
        self.uses.get(storage.index()).map_or(&[], Vec::as_slice)
    }

    fn root(&self, tensor: TensorId) -> TensorId {
        self.plan.sharing.root(tensor).unwrap_or(tensor)
    }

    fn is_output(&self, storage: TensorId) -> bool {
        self.outputs.get(storage.index()).copied().unwrap_or(false)
    }

    fn is_placed(&self, storage: TensorId) -> bool {
        self.placed.get(storage.index()).copied().unwrap_or(false)
    }

    /// Every tensor is where its storage is, on the right backend.
    fn spots(&self) -> Result<(), Flaw> {
        for (id, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()) {
            let storage = tensor.storage();
            let (spot, home) = (self.plan.spot(id), self.plan.spot(storage));
            let expected = match (self.is_placed(storage), self.uses_of(storage).is_empty(), home) {
                (true, _, Spot::Placed { .. }) | (false, true, Spot::Unused) => None,
                (false, false, Spot::Arena { .. }) => None,
                (true, ..) => Some("left alone"),
                (false, true, _) => Some("nowhere, as nobody uses it"),
                (false, false, _) => Some("in an arena"),
            };
            if let Some(expected) = expected {
                let (tensor, found) = (self.graph.name(id), format!("{spot:?}"));
                return Err(Flaw::WrongSpot { tensor, found, expected });
            }
            let backend = match home {
                Spot::Unused => None,
                Spot::Placed { backend } | Spot::Arena { backend, .. } => Some(backend),
            };
            let expected = self.request.backend(storage.index());
            if let Some(found) = backend.filter(|found| *found != expected) {
                return Err(Flaw::WrongBackend { tensor: self.graph.name(id), found, expected });
            }
            let source_end = self.graph.get(storage).map_or(0, Tensor::bytes);
            let inside = tensor.offset().checked_add(tensor.bytes()).is_some_and(|end| end <= source_end);
            let put = match home {
                Spot::Arena { backend, chunk, offset } => {
                    Spot::Arena { backend, chunk, offset: offset + tensor.offset() as u64 }
                }
                other => other,
            };
            if !inside || spot != put {
                let (view, source_name) = (self.graph.name(id), self.graph.name(storage));
                return Err(Flaw::ViewElsewhere { view, source_name });
            }
            if self.root(id) != self.root(storage) {
                return Err(Flaw::ViewElsewhere {
                    view: self.graph.name(id),
                    source_name: self.graph.name(self.root(id)),
                });
            }
        }
        Ok(())
    }

    /// Every storage that lies in another one's place was free to take it.
    fn in_place(&self) -> Result<(), Flaw> {
        for (result, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()) {
            let root = self.root(result);
            if tensor.storage() != result || root == result {
                continue;
            }
            let broken =
                |why| Flaw::NotInPlace { result: self.graph.name(result), taken: self.graph.name(root), why };
            if self.root(root) != root || self.plan.spot(result) != self.plan.spot(root) {
                return Err(broken("it is not where the storage is"));
            }
            let TensorKind::Computed(node) = tensor.kind() else { return Err(broken("it is not computed")) };
            let Some(op) = self.graph.get_node(node).map(|node| node.op()) else {
                return Err(broken("it is not computed"));
            };
            let inputs = self.graph.inputs(node);
            let from_here: Vec<usize> =
                (0..inputs.len()).filter(|i| inputs.get(*i).is_some_and(|x| self.root(*x) == root)).collect();
            let [choice] = from_here[..] else { return Err(broken("not exactly one input lies there")) };
            if !op.declaration().in_place.contains(&choice) {
                return Err(broken("the operation does not work in place"));
            }
            let Some(input) = inputs.get(choice).and_then(|id| self.graph.get(*id)) else {
                return Err(broken("its input does not exist"));
            };
            let whole = self.graph.get(input.storage()).map_or(0, Tensor::bytes);
            if !input.same_layout(tensor) || input.offset() != 0 || input.bytes() != whole {
                return Err(broken("the input has another layout, or is a part of its storage"));
            }
            if self.is_placed(input.storage()) || self.is_output(input.storage()) {
                return Err(broken("the input is placed beforehand, or an output"));
            }
            if self.graph.get(input.storage()).is_some_and(|t| t.kind() == TensorKind::Input)
                && self.request.inputs == Inputs::Keep
            {
                return Err(broken("inputs are kept"));
            }
            if self.request.backend(input.storage().index()) != self.request.backend(result.index()) {
                return Err(broken("it is computed on another backend"));
            }
            let step = self.request.step(node.index());
            let used_later = |u: &Use| u.by != Some(node) && u.step >= step;
            if self.uses_of(input.storage()).iter().any(used_later) {
                return Err(broken("something else uses the input at that time or later"));
            }
        }
        Ok(())
    }

    /// Everything that has bytes in an arena, with the lifetime that its uses need.
    fn occupants(&self) -> Result<Vec<Occupant>, Flaw> {
        let mut needed: BTreeMap<TensorId, (Lifetime, u64)> = BTreeMap::new();
        for (id, tensor) in self.graph.tensor_ids().zip(self.graph.tensors()) {
            let uses = self.uses_of(id);
            if tensor.storage() != id || self.is_placed(id) || uses.is_empty() {
                continue;
            }
            let given = tensor.kind() == TensorKind::Input;
            // A hold that ends before there is something to hold means nothing.
            let by_nodes = uses.iter().filter(|u| u.by.is_some()).map(|u| u.step);
            let first = if given { 0 } else { by_nodes.min().unwrap_or(0) };
            let last = uses.iter().map(|u| u.step + 1).max().unwrap_or(0);
            let kept = self.is_output(id) || (given && self.request.inputs == Inputs::Keep);
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
                return Err(Flaw::TooShort { tensor: self.graph.name(root), needed: life, planned });
            }
            occupants.push(Occupant { name: self.graph.name(root), spot: self.plan.spot(root), bytes, life });
        }
        for (index, extra) in self.request.extras.iter().enumerate() {
            let life = Lifetime { start: extra.lifetime.start, end: extra.lifetime.end.min(self.end) };
            let spot = self.plan.extra_spot(index);
            let name = format!("extra {index}");
            match spot {
                Spot::Arena { backend, .. } if backend == extra.backend => {}
                _ => {
                    let found = format!("{spot:?}");
                    return Err(Flaw::WrongSpot { tensor: name, found, expected: "on its backend" });
                }
            }
            occupants.push(Occupant { name, spot, bytes: extra.bytes, life });
        }
        Ok(occupants)
    }

    /// Everything is aligned and inside its chunk, and nothing overlaps.
    fn overlaps(&self, occupants: &[Occupant]) -> Result<(), Flaw> {
        let mut largest: BTreeMap<(u16, u32), u64> = BTreeMap::new();
        let mut events = Vec::new();
        for (index, Occupant { name, spot, bytes, life }) in occupants.iter().enumerate() {
            let Spot::Arena { backend, chunk, offset } = *spot else { continue };
            let memory = self.request.memories.get(usize::from(backend));
            let alignment = memory.map_or(1, |memory| memory.facts.alignment) as u64;
            if !offset.is_multiple_of(alignment) {
                return Err(Flaw::Misaligned { what: name.clone(), offset, alignment });
            }
            let chunks = self.plan.backends.get(usize::from(backend)).map(|plan| &plan.chunks);
            let size = chunks.and_then(|chunks| chunks.get(chunk as usize)).copied();
            if size.is_none() || offset.checked_add(*bytes) > size {
                let (what, size) = (name.clone(), size.unwrap_or(0));
                return Err(Flaw::OutOfBounds { what, chunk, offset, bytes: *bytes, size });
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
                    return Err(Flaw::ChunkTooLarge { backend, chunk, size: *size, limit });
                }
            }
        }

        // Ends before starts: what ends at a step is not in use in it.
        events.sort_unstable();
        let mut in_use: BTreeMap<(u16, u32, u64), (u64, usize)> = BTreeMap::new();
        for (step, starts, index) in events {
            let Some(Occupant { spot: Spot::Arena { backend, chunk, offset }, bytes, .. }) =
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
                return Err(Flaw::Overlap { first: name(*other), second: name(index), step });
            }
            in_use.insert((*backend, *chunk, *offset), (offset + bytes, index));
        }
        Ok(())
    }
}
