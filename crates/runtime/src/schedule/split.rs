//! Splitting: each backend's nodes are cut into splits, which start when the copies that they read are done.
//!
//! A backend works through its *lane*: its nodes in the graph's order, cut into splits. A node joins the last split of
//! its lane, unless it must wait for a copy that this split does not wait for, or another split already waits for this
//! one. So consecutive nodes of one backend form one split, and so do interleaved independent branches. Views compute
//! nothing and are in no split. A barrier of the graph ends all splits, and is where lanes wait for each other.
//!
//! A collective starts a split where there are several lanes: other backends can read what was computed before it while it
//! waits for other ranks. Collectives run in the graph's order on whatever lanes they are, since all ranks must agree on it.
//!
//! A tensor on another backend (a streamed weight, too) is copied: once per version of its bytes and lane, however many
//! nodes read it.
//!
//! A host-resident state that the streaming device reads is copied as it is before the run. A write whose values the
//! device computes is *mirrored*: the device repeats it on its copy, and the host writes the state itself. So the state
//! is copied early, the new rows are written back while nothing waits for them, and no split waits for a round trip.
#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized for the graph's tensors, nodes and the backends"
)]

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};
use rustc_hash::{FxHashMap, FxHashSet};

use super::placement::{NO_BACKEND, Placements};
use super::selection::{SliceReads, StreamedReads};
use super::splits::{Copy, CopySelection, LeafUse, Split, Splits};
use crate::flow::{Flow, FlowInput, Producer};

/// A copy of the current version of a storage's bytes.
#[derive(Clone, Copy)]
struct Current {
    to: u16,
    copy: u32,
}

struct Splitter<'a> {
    graph: &'a Graph,
    placements: &'a Placements,
    out: Splits,
    /// For each storage one past the split that wrote it last.
    written_by: Vec<u32>,
    /// For each lane its last split, if it still takes nodes: no other split waits for it yet.
    open: Vec<Option<u32>>,
    /// For each storage the copies of the current version of its bytes.
    current: FxHashMap<TensorId, Vec<Current>>,
    /// For each leaf the backend that read it last; `shared_leaves` has all backends of leaves that several read.
    leaf_reader: Vec<u16>,
    shared_leaves: FxHashSet<(u32, u16)>,
    viewed: FxHashSet<u32>,
    /// For each lane its last split before the latest barrier.
    before_barrier: Vec<Option<u32>>,
    /// The split of the latest collective.
    last_collective: Option<usize>,
    /// Copies that write values of mirrored writes back to the backend of the state, with the split that reads them.
    write_backs: Vec<(u32, u32)>,
    /// Streamed weights of which selected slices are read.
    slices: SliceReads,
    /// For each lane the streamed weights that its last split is the first to read.
    streamed: Vec<StreamedReads>,
}

pub(crate) fn split(graph: &Graph, flow: &Flow, placements: &Placements, backends: usize) -> Splits {
    let mut splitter = Splitter {
        graph,
        placements,
        out: Splits {
            lanes: vec![Vec::new(); backends],
            split_of_node: vec![u32::MAX; graph.nodes().len()],
            leaves: Vec::with_capacity(flow.leaves.len()),
            ..Splits::default()
        },
        written_by: vec![0; flow.storage.len()],
        open: vec![None; backends],
        before_barrier: Vec::new(),
        last_collective: None,
        current: FxHashMap::default(),
        leaf_reader: vec![NO_BACKEND; flow.storage.len()],
        shared_leaves: FxHashSet::default(),
        viewed: FxHashSet::default(),
        write_backs: Vec::new(),
        slices: SliceReads::of(graph, &placements.streamed),
        streamed: vec![StreamedReads::default(); backends],
    };
    let mut barriers = graph.barriers().iter().copied().peekable();
    for (producer, inputs) in flow.iter() {
        while barriers.next_if(|barrier| *barrier <= producer.node).is_some() {
            splitter.barrier();
        }
        splitter.node(producer, inputs);
    }
    splitter.leaf_outputs();
    splitter.release_write_backs();
    splitter.finish(flow)
}

impl Splitter<'_> {
    fn node(&mut self, producer: Producer, inputs: &[FlowInput]) {
        let Producer { node, storage, overwrites, .. } = producer;
        let lane = self.placements.backend[storage.index()];

        let mirror = if overwrites { self.mirror(producer, inputs, lane) } else { None };
        let mut reads_copies = false;
        for input in inputs {
            let is_remote = self.remote(input, lane).is_some();
            reads_copies |= is_remote;
            if !is_remote && !input.is_copied() {
                self.leaf(input.storage, input.tensor != input.storage, lane);
            }
        }
        // Copies of the bytes that this node overwrites.
        let mut outstanding =
            if overwrites { self.current.remove(&storage).unwrap_or_default() } else { Vec::new() };
        if let Some(mirror) = mirror {
            outstanding.retain(|current| current.copy != mirror.copy);
        }
        let is_collective = matches!(self.graph[node].op(), Op::Collective(_));
        let joins = self.open[usize::from(lane)].map(|open| open as usize).filter(|open| {
            outstanding.is_empty()
                && (!is_collective || self.open.len() == 1)
                && (!reads_copies || inputs.iter().all(|input| self.is_known(input, lane, *open)))
                && !self.must_end(inputs, lane, *open)
        });
        let split = joins.unwrap_or_else(|| self.start(inputs, lane));
        if is_collective {
            self.follow_collective(split);
        }
        for waited in outstanding {
            self.out.splits[split].after_copies.push(waited.copy as usize);
        }
        if reads_copies {
            for input in inputs {
                self.read_copy(input, lane, split, node);
            }
        }
        self.out.split_of_node[node.index()] = split as u32;
        self.out.splits[split].node_count += 1;
        self.written_by[storage.index()] = split as u32 + 1;
        if let Some(mirror) = mirror {
            // An open split may wait for one more copy: nothing waits for the split yet, so this copy does not either.
            self.out.splits[split].after_copies.push(mirror.copy as usize);
            self.current.entry(storage).or_default().push(mirror);
            for input in inputs {
                if self.remote(input, lane) == Some(mirror.to) {
                    let copy = self.find_copy(input.tensor, lane);
                    self.write_backs.extend(copy.map(|copy| (copy, split as u32)));
                }
            }
        }
    }

    /// Repeats a write to a state on the streaming device's copy, if the device has all other inputs. Returns the copy,
    /// which has the same bytes as the state then.
    fn mirror(&mut self, producer: Producer, inputs: &[FlowInput], lane: u16) -> Option<Current> {
        let to = self.placements.streaming_device;
        if !self.placements.mirrored_states.contains(&producer.storage) {
            return None;
        }
        let [target, values @ ..] = inputs else { return None };
        let output = self.graph[producer.node].output();
        let covers = self.graph[output].same_layout(&self.graph[target.tensor])
            && self.graph[output].offset() == self.graph[target.tensor].offset();
        if target.storage != producer.storage
            || !covers
            || to == lane
            || values.iter().any(|input| self.remote(input, to).is_some())
        {
            return None;
        }
        let joins = self.open[usize::from(to)].map(|open| open as usize);
        let joins = joins.filter(|open| inputs.iter().all(|input| self.is_known(input, to, *open)));
        let split = joins.unwrap_or_else(|| self.start(inputs, to));
        for input in inputs {
            if !input.is_copied() {
                self.leaf(input.storage, input.tensor != input.storage, to);
            }
            self.read_copy(input, to, split, producer.node);
        }
        let copy = self.find_copy(target.tensor, to)?;
        self.out.copy_of.insert((output.index() as u32, to), copy);
        self.out.mirrored_writes.push((producer.node, split));
        self.out.splits[split].node_count += 1;
        Some(Current { to, copy })
    }

    /// The backend that a tensor must be copied from to be read in a lane.
    fn remote(&self, input: &FlowInput, lane: u16) -> Option<u16> {
        let owner = self.placements.backend[input.storage.index()];
        let is_copied = input.is_copied()
            || (input.kind == TensorKind::Weight && self.placements.streamed.contains(&input.storage));
        (is_copied && owner != lane).then_some(owner)
    }

    /// Whether an open split can read a tensor without waiting for another split.
    fn is_known(&self, input: &FlowInput, lane: u16, open: usize) -> bool {
        let Some(owner) = self.remote(input, lane) else { return true };
        let written = self.written_by[input.storage.index()];
        self.find_copy(input.tensor, lane).is_some()
            || written <= self.out.done_before(open)[usize::from(owner)]
    }

    /// Whether an open split ends before a node that reads a streamed weight: the indices that select its slices are
    /// computed in the split, or the split reads enough of streamed weights already.
    fn must_end(&self, inputs: &[FlowInput], lane: u16, open: usize) -> bool {
        let streamed = inputs.iter().filter(|input| {
            input.kind == TensorKind::Weight
                && self.remote(input, lane).is_some()
                && self.find_copy(input.tensor, lane).is_none()
        });
        let activations = inputs.get(1).map(|input| input.storage);
        let mut ends = streamed.map(|input| {
            self.selection(input.tensor, lane).is_some_and(|selection| selection.computed_by == open)
                || self.streamed[usize::from(lane)].is_full(self.graph[input.tensor].bytes(), activations)
        });
        ends.any(|ends| ends)
    }

    /// The indices that select the slices of a streamed weight which a lane reads, if the lane computes them.
    fn selection(&self, weight: TensorId, lane: u16) -> Option<CopySelection> {
        let ids = self.slices.ids_of(weight)?;
        let storage = self.graph[ids].storage();
        let computed_by = self.written_by[storage.index()].checked_sub(1)? as usize;
        let selection = CopySelection { ids: ids.index(), computed_by };
        (self.placements.backend[storage.index()] == lane).then_some(selection)
    }

    fn find_copy(&self, tensor: TensorId, lane: u16) -> Option<u32> {
        let t = &self.graph[tensor];
        let copies = self.current.get(&t.storage())?;
        copies.iter().find_map(|current| {
            let copy = &self.out.copies[current.copy as usize];
            let inside = copy.offset <= t.offset() && t.offset() + t.bytes() <= copy.offset + copy.bytes;
            (current.to == lane && inside).then_some(current.copy)
        })
    }

    /// Ends all splits. The first split of each lane after a barrier waits for the last one of every lane before it.
    fn barrier(&mut self) {
        self.open.fill(None);
        self.before_barrier = self.out.lanes.iter().map(|lane| lane.last().copied()).collect();
    }

    /// The splits before the last barrier that a new split of a lane has to wait for: those of other lanes that the lane
    /// does not know to be done.
    fn after_barrier(&self, split: usize, lane: u16) -> Vec<usize> {
        let done = self.out.done_before(split);
        let others = self.before_barrier.iter().enumerate().filter(|(other, _)| *other != usize::from(lane));
        let unknown = others.filter_map(|(other, last)| last.filter(|last| done[other] <= *last));
        unknown.map(|last| last as usize).collect()
    }

    /// A new split for a node: it waits for the splits that write the node's inputs.
    fn start(&mut self, inputs: &[FlowInput], lane: u16) -> usize {
        let (split, lanes) = (self.out.splits.len(), self.out.lanes.len());
        let before = match self.out.lanes[usize::from(lane)].last() {
            Some(last) => self.out.done_before(*last as usize).to_vec(),
            None => vec![0; lanes],
        };
        self.out.done.extend(before);
        if let Some(last) = self.out.lanes[usize::from(lane)].last() {
            self.out.done[split * lanes + usize::from(lane)] = last + 1;
        }
        for input in inputs {
            // An input with a current copy needs no wait for its source.
            if let Some(owner) = self.remote(input, lane)
                && self.find_copy(input.tensor, lane).is_none()
            {
                let written = self.written_by[input.storage.index()];
                if written > self.out.done[split * lanes + usize::from(owner)] {
                    self.out.done[split * lanes + usize::from(owner)] = written;
                    for other in 0..lanes {
                        let theirs = self.out.done[(written as usize - 1) * lanes + other];
                        let ours = &mut self.out.done[split * lanes + other];
                        *ours = theirs.max(*ours);
                    }
                }
            }
        }
        let after_splits = self.after_barrier(split, lane);
        for before in &after_splits {
            self.know_done(split, *before);
        }
        self.out.splits.push(Split {
            backend: usize::from(lane),
            first_node: 0,
            node_count: 0,
            inputs: Vec::new(),
            after_copies: Vec::new(),
            after_splits,
        });
        self.out.lanes[usize::from(lane)].push(split as u32);
        self.open[usize::from(lane)] = Some(split as u32);
        self.streamed[usize::from(lane)] = StreamedReads::default();
        split
    }

    /// Records that a split starts when another one is done, and so is everything that the other knows to be.
    fn know_done(&mut self, split: usize, before: usize) {
        let lanes = self.out.lanes.len();
        let other = self.out.splits[before].backend;
        self.out.done[split * lanes + other] = before as u32 + 1;
        for lane in 0..lanes {
            let theirs = self.out.done[before * lanes + lane];
            let ours = &mut self.out.done[split * lanes + lane];
            *ours = theirs.max(*ours);
        }
    }

    /// Lets the split of a collective, which it starts where there are several lanes, wait for that of the previous one.
    fn follow_collective(&mut self, split: usize) {
        let Some(before) = self.last_collective.replace(split) else { return };
        let other = self.out.splits[before].backend;
        if other != self.out.splits[split].backend && self.out.done_before(split)[other] <= before as u32 {
            self.out.splits[split].after_splits.push(before);
            self.know_done(split, before);
            // A split that another one waits for takes no more nodes.
            if self.open[other] == Some(before as u32) {
                self.open[other] = None;
            }
        }
    }

    /// Lets a node read a tensor of another backend through a copy, which is added unless there is one.
    fn read_copy(&mut self, input: &FlowInput, lane: u16, split: usize, node: NodeId) {
        let Some(owner) = self.remote(input, lane) else { return };
        let FlowInput { tensor, storage, kind } = *input;
        if kind == TensorKind::Weight {
            // A streamed weight stays resident on its backend.
            self.leaf(storage, tensor != storage, owner);
        }
        let copy = match self.find_copy(tensor, lane) {
            Some(copy) => copy,
            None => {
                if kind == TensorKind::Weight {
                    let activations = self.graph.inputs(node).get(1).map(|x| self.graph[*x].storage());
                    self.streamed[usize::from(lane)].add(self.graph[tensor].bytes(), activations);
                }
                self.copy(tensor, owner, lane, split)
            }
        };
        self.out.copies[copy as usize].last_node = node.index();
        if self.out.copy_of.insert((tensor.index() as u32, lane), copy) != Some(copy) {
            self.out.remote_reads.push((tensor, copy));
        }
    }

    fn copy(&mut self, tensor: TensorId, owner: u16, lane: u16, split: usize) -> u32 {
        let t = &self.graph[tensor];
        let copy = self.out.copies.len();
        let source = self.written_by[t.storage().index()].checked_sub(1).map(|s| s as usize);
        let open = &mut self.open[usize::from(owner)];
        if open.is_some_and(|open| Some(open as usize) == source) {
            *open = None;
        }
        let splits = &self.out.lanes[usize::from(lane)];
        let after = splits.len().checked_sub(3).map(|before| splits[before] as usize);
        let is_weight = t.kind() == TensorKind::Weight;
        let selected_by = if is_weight { self.selection(tensor, lane) } else { None };
        self.out.copies.push(Copy {
            tensor: tensor.index(),
            storage: t.storage().index(),
            offset: t.offset(),
            bytes: t.bytes(),
            from: usize::from(owner),
            to: usize::from(lane),
            source,
            reader: split,
            after,
            last_node: 0,
            selected_by,
        });
        self.current.entry(t.storage()).or_default().push(Current { to: lane, copy: copy as u32 });
        self.out.splits[split].inputs.push(copy);
        copy as u32
    }

    fn leaf(&mut self, storage: TensorId, viewed: bool, lane: u16) {
        if viewed {
            self.viewed.insert(storage.index() as u32);
        }
        let (index, last) = (storage.index(), self.leaf_reader[storage.index()]);
        if last == lane {
            return;
        }
        if last != NO_BACKEND {
            self.shared_leaves.insert((index as u32, last));
            if !self.shared_leaves.insert((index as u32, lane)) {
                return;
            }
        }
        self.leaf_reader[index] = lane;
        self.out.leaves.push(LeafUse { tensor: index, backend: usize::from(lane), viewed: false });
    }

    /// A leaf that is an output must be on some backend even if no node reads it.
    fn leaf_outputs(&mut self) {
        for (_, output) in self.graph.outputs() {
            let storage = self.graph[*output].storage();
            if matches!(self.graph[storage].kind(), TensorKind::Computed(_) | TensorKind::State) {
                continue;
            }
            if self.leaf_reader[storage.index()] == NO_BACKEND {
                let backend = self.placements.backend[storage.index()];
                self.leaf(storage, false, if backend == NO_BACKEND { 0 } else { backend });
            }
            self.viewed.insert(storage.index() as u32);
        }
    }

    /// The streaming device waits for no split of the state's backend, and so would hold the source of a write-back to
    /// the end of the run. Two splits later the copy is done, and waiting for it costs nothing.
    fn release_write_backs(&mut self) {
        for (copy, reader) in std::mem::take(&mut self.write_backs) {
            let Copy { source: Some(source), from, .. } = self.out.copies[copy as usize] else { continue };
            let lane = &self.out.lanes[from];
            let at = lane.partition_point(|split| (*split as usize) < source);
            // Splits wait only for earlier ones, and the copy for none after its reader.
            let waits = lane.iter().skip(at + 2).find(|split| **split > reader);
            if let Some(split) = waits.copied()
                && self.out.released.insert(copy, split).is_none()
            {
                self.out.splits[split as usize].after_copies.push(copy as usize);
            }
        }
    }

    /// Makes the nodes of each split contiguous.
    fn finish(mut self, flow: &Flow) -> Splits {
        let mut first = 0;
        for split in &mut self.out.splits {
            split.first_node = first;
            first += split.node_count;
            split.node_count = 0;
        }
        self.out.nodes = vec![NodeId::from_index(0); first];
        let mut mirrored = self.out.mirrored_writes.iter().peekable();
        for Producer { node, .. } in flow.producers() {
            let mirror = mirrored.next_if(|(repeated, _)| repeated == node).map(|(_, split)| *split);
            for split in mirror.into_iter().chain([self.out.split_of_node[node.index()] as usize]) {
                let split = &mut self.out.splits[split];
                self.out.nodes[split.first_node + split.node_count] = *node;
                split.node_count += 1;
            }
        }
        if !self.viewed.is_empty() {
            for leaf in &mut self.out.leaves {
                leaf.viewed = self.viewed.contains(&(leaf.tensor as u32));
            }
        }
        self.out
    }
}
