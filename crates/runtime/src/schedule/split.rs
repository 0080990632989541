//! Splitting: each backend's nodes are cut into runs that start when what they wait for is there.
//!
//! A backend works through its *lane*: its nodes in the graph's order, cut into splits. A node joins the last split of
//! its lane, unless it must wait for something that this split did not wait for, or somebody already waits for this
//! split. So consecutive nodes of one backend form one split, and so do interleaved independent branches. Views
//! compute nothing and are in no split.
//!
//! A tensor that lives elsewhere (a weight that is lent, too) is copied: once per version of its bytes and lane, however
//! many nodes read it.
//!
//! A state that a device borrows is copied as it was, and what the device itself makes is written into the copy as well as
//! at home: the write is *echoed*. So the state travels early, the new rows travel home while nobody waits for them, and
//! nothing goes both ways in between.
#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized for the graph's tensors, nodes and the backends"
)]

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::NO_BACKEND;
use super::assign::Homes;
use crate::flow::{Flow, Maker, Source};

/// Nodes that one backend runs in one go.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Split {
    /// The backend's number.
    pub backend: usize,
    /// Its nodes are `first_node..first_node + node_count` of [`Splits::nodes`].
    pub first_node: usize,
    /// How many nodes it has.
    pub node_count: usize,
    /// The copies that it is the first to read.
    pub inputs: Vec<usize>,
    /// Copies made from storages that it writes: they must be done before it starts.
    pub after_copies: Vec<usize>,
}

/// Bytes brought from one backend to another, once a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Copy {
    /// The tensor that is read on the other side, by index; the first of those that share the copy.
    pub tensor: usize,
    /// The tensor that owns the storage, by index.
    pub storage: usize,
    /// The first byte within the storage.
    pub offset: usize,
    /// How many bytes.
    pub bytes: usize,
    /// Where they come from.
    pub from: usize,
    /// Where they go.
    pub to: usize,
    /// The split that makes them; `None` if they are there before the run, as a state is.
    pub source: Option<usize>,
    /// The first split that reads them.
    pub reader: usize,
    /// The split of the reading lane that must be done before the copy may start, because other tensors used its
    /// place before; `None`: all that the lane did in earlier runs.
    pub after: Option<usize>,
    /// The last node that reads it.
    pub last_node: usize,
}

/// A weight, constant or input, and a backend that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LeafUse {
    /// The tensor, by index.
    pub tensor: usize,
    /// The backend.
    pub backend: usize,
    /// Whether some of it is read through views.
    pub viewed: bool,
}

/// The graph, cut.
#[derive(Clone, Debug, Default)]
pub struct Splits {
    /// All splits; each waits only for earlier ones.
    pub splits: Vec<Split>,
    /// The nodes of all splits, one after the other.
    pub nodes: Vec<NodeId>,
    /// All copies.
    pub copies: Vec<Copy>,
    /// What leaves are read where.
    pub leaves: Vec<LeafUse>,
    /// For each backend its splits, in order.
    pub lanes: Vec<Vec<u32>>,
    /// For each node its split; `u32::MAX` for views.
    pub split_of_node: Vec<u32>,
    /// Nodes that write a state at home and are repeated on a copy of it, in order, each with the split that does so.
    pub echoes: Vec<(NodeId, usize)>,
    /// For each split and backend: one past the highest split of that backend known to be done when it starts.
    pub(crate) done: Vec<u32>,
    /// For each lane and each remote tensor it reads: the copy.
    pub(crate) copy_of: FxHashMap<(u32, u16), u32>,
    /// Tensors read through a copy, with it.
    pub(crate) remote_reads: Vec<(TensorId, u32)>,
    /// Copies with a split of their source's lane that waits for them though it reads nothing of what follows.
    pub(crate) released: FxHashMap<u32, u32>,
}

impl Splits {
    /// Whether a split repeats a node that writes elsewhere.
    pub fn is_echo(&self, node: NodeId, split: usize) -> bool {
        self.echoes.binary_search(&(node, split)).is_ok()
    }

    /// The nodes of a split.
    pub fn nodes_of(&self, split: usize) -> &[NodeId] {
        self.splits
            .get(split)
            .map_or(&[], |s| self.nodes.get(s.first_node..s.first_node + s.node_count).unwrap_or(&[]))
    }

    /// What is known to be done, per backend, when a split starts.
    pub(crate) fn done_before(&self, split: usize) -> &[u32] {
        let lanes = self.lanes.len();
        self.done.get(split * lanes..(split + 1) * lanes).unwrap_or(&[])
    }
}

/// A copy of the current version of a storage's bytes.
#[derive(Clone, Copy)]
struct Current {
    to: u16,
    copy: u32,
}

struct Splitter<'a> {
    graph: &'a Graph,
    homes: &'a Homes,
    out: Splits,
    /// For each storage one past the split that wrote it last.
    written_by: Vec<u32>,
    /// For each lane its last split, if it still takes nodes: nobody waits for it yet.
    open: Vec<Option<u32>>,
    /// For each storage with copies of its current version: those.
    current: FxHashMap<TensorId, Vec<Current>>,
    /// For each leaf the backend that read it last, and for those that several read, all of them.
    leaf_reader: Vec<u16>,
    shared_leaves: FxHashSet<(u32, u16)>,
    viewed: FxHashSet<u32>,
    /// Copies of what was echoed to the home of the state, with the split that reads them there.
    sent_home: Vec<(u32, u32)>,
}

pub(crate) fn split(graph: &Graph, flow: &Flow, homes: &Homes, backends: usize) -> Splits {
    let mut splitter = Splitter {
        graph,
        homes,
        out: Splits {
            lanes: vec![Vec::new(); backends],
            split_of_node: vec![u32::MAX; graph.nodes().len()],
            leaves: Vec::with_capacity(flow.leaves.len()),
            ..Splits::default()
        },
        written_by: vec![0; flow.storage.len()],
        open: vec![None; backends],
        current: FxHashMap::default(),
        leaf_reader: vec![NO_BACKEND; flow.storage.len()],
        shared_leaves: FxHashSet::default(),
        viewed: FxHashSet::default(),
        sent_home: Vec::new(),
    };
    for (maker, sources) in flow.iter() {
        splitter.node(maker, sources);
    }
    splitter.leaf_outputs();
    splitter.release_sent();
    splitter.finish(flow)
}

impl Splitter<'_> {
    fn node(&mut self, maker: Maker, sources: &[Source]) {
        let Maker { node, storage, overwrites, .. } = maker;
        let lane = self.homes.home[storage.index()];

        let echo = if overwrites { self.echo(maker, sources, lane) } else { None };
        let mut travels = false;
        for source in sources {
            let away = self.remote(source, lane).is_some();
            travels |= away;
            if !away && !source.moves() {
                self.leaf(source.storage, source.tensor != source.storage, lane);
            }
        }
        // Copies made from what this node is about to overwrite.
        let mut outstanding =
            if overwrites { self.current.remove(&storage).unwrap_or_default() } else { Vec::new() };
        if let Some(echo) = echo {
            outstanding.retain(|current| current.copy != echo.copy);
        }
        let joins = self.open[usize::from(lane)].map(|open| open as usize).filter(|open| {
            outstanding.is_empty()
                && (!travels || sources.iter().all(|source| self.is_known(source, lane, *open)))
        });
        let split = joins.unwrap_or_else(|| self.start(sources, lane));
        for waited in outstanding {
            self.out.splits[split].after_copies.push(waited.copy as usize);
        }
        if travels {
            for source in sources {
                self.fetch(source, lane, split, node);
            }
        }
        self.out.split_of_node[node.index()] = split as u32;
        self.out.splits[split].node_count += 1;
        self.written_by[storage.index()] = split as u32 + 1;
        if let Some(echo) = echo {
            // A split that is open takes one more wait: nobody waits for it yet, so this copy does not either.
            self.out.splits[split].after_copies.push(echo.copy as usize);
            self.current.entry(storage).or_default().push(echo);
            for source in sources {
                if self.remote(source, lane) == Some(echo.to) {
                    let copy = self.find_copy(source.tensor, lane);
                    self.sent_home.extend(copy.map(|copy| (copy, split as u32)));
                }
            }
        }
    }

    /// Repeats a write on the borrower's copy of what is written, if everything else that it takes is there. Returns the
    /// copy, which is as new as the state then.
    fn echo(&mut self, maker: Maker, sources: &[Source], lane: u16) -> Option<Current> {
        let (to, states) = (self.homes.echoes.0, &self.homes.echoes.1);
        if !states.contains(&maker.storage) {
            return None;
        }
        let [target, values @ ..] = sources else { return None };
        let output = self.graph[maker.node].output();
        let covers = self.graph[output].same_layout(&self.graph[target.tensor])
            && self.graph[output].offset() == self.graph[target.tensor].offset();
        if target.storage != maker.storage
            || !covers
            || to == lane
            || values.iter().any(|source| self.remote(source, to).is_some())
        {
            return None;
        }
        let joins = self.open[usize::from(to)].map(|open| open as usize);
        let joins = joins.filter(|open| sources.iter().all(|source| self.is_known(source, to, *open)));
        let split = joins.unwrap_or_else(|| self.start(sources, to));
        for source in sources {
            if !source.moves() {
                self.leaf(source.storage, source.tensor != source.storage, to);
            }
            self.fetch(source, to, split, maker.node);
        }
        let copy = self.find_copy(target.tensor, to)?;
        self.out.copy_of.insert((output.index() as u32, to), copy);
        self.out.echoes.push((maker.node, split));
        self.out.splits[split].node_count += 1;
        Some(Current { to, copy })
    }

    /// Where a tensor is that is elsewhere.
    fn remote(&self, source: &Source, lane: u16) -> Option<u16> {
        let home = self.homes.home[source.storage.index()];
        let moves = source.moves()
            || (source.kind == TensorKind::Weight && self.homes.lent.contains(&source.storage));
        (moves && home != lane).then_some(home)
    }

    /// Whether an open split needs to wait for nothing new to read a tensor.
    fn is_known(&self, source: &Source, lane: u16, open: usize) -> bool {
        let Some(home) = self.remote(source, lane) else { return true };
        let made = self.written_by[source.storage.index()];
        self.find_copy(source.tensor, lane).is_some() || made <= self.out.done_before(open)[usize::from(home)]
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

    /// A new split for a node: it waits for the splits that made what the node reads.
    fn start(&mut self, sources: &[Source], lane: u16) -> usize {
        let (split, lanes) = (self.out.splits.len(), self.out.lanes.len());
        let before = match self.out.lanes[usize::from(lane)].last() {
            Some(last) => self.out.done_before(*last as usize).to_vec(),
            None => vec![0; lanes],
        };
        self.out.done.extend(before);
        if let Some(last) = self.out.lanes[usize::from(lane)].last() {
            self.out.done[split * lanes + usize::from(lane)] = last + 1;
        }
        for source in sources {
            // A copy that is as new as its source is there already: nobody waits for the source.
            if let Some(home) = self.remote(source, lane)
                && self.find_copy(source.tensor, lane).is_none()
            {
                let made = self.written_by[source.storage.index()];
                if made > self.out.done[split * lanes + usize::from(home)] {
                    self.out.done[split * lanes + usize::from(home)] = made;
                    for other in 0..lanes {
                        let theirs = self.out.done[(made as usize - 1) * lanes + other];
                        let ours = &mut self.out.done[split * lanes + other];
                        *ours = theirs.max(*ours);
                    }
                }
            }
        }
        self.out.splits.push(Split {
            backend: usize::from(lane),
            first_node: 0,
            node_count: 0,
            inputs: Vec::new(),
            after_copies: Vec::new(),
        });
        self.out.lanes[usize::from(lane)].push(split as u32);
        self.open[usize::from(lane)] = Some(split as u32);
        split
    }

    /// Sees to it that a tensor that is elsewhere is brought here.
    fn fetch(&mut self, source: &Source, lane: u16, split: usize, node: NodeId) {
        let Some(home) = self.remote(source, lane) else { return };
        let Source { tensor, storage, kind } = *source;
        if kind == TensorKind::Weight {
            // A weight that is lent stays at home all the same.
            self.leaf(storage, tensor != storage, home);
        }
        let copy = match self.find_copy(tensor, lane) {
            Some(copy) => copy,
            None => self.copy(tensor, home, lane, split),
        };
        self.out.copies[copy as usize].last_node = node.index();
        if self.out.copy_of.insert((tensor.index() as u32, lane), copy) != Some(copy) {
            self.out.remote_reads.push((tensor, copy));
        }
    }

    fn copy(&mut self, tensor: TensorId, home: u16, lane: u16, split: usize) -> u32 {
        let t = &self.graph[tensor];
        let copy = self.out.copies.len();
        let source = self.written_by[t.storage().index()].checked_sub(1).map(|s| s as usize);
        let open = &mut self.open[usize::from(home)];
        if open.is_some_and(|open| Some(open as usize) == source) {
            *open = None;
        }
        let place = &self.out.lanes[usize::from(lane)];
        let after = place.len().checked_sub(3).map(|before| place[before] as usize);
        self.out.copies.push(Copy {
            tensor: tensor.index(),
            storage: t.storage().index(),
            offset: t.offset(),
            bytes: t.bytes(),
            from: usize::from(home),
            to: usize::from(lane),
            source,
            reader: split,
            after,
            last_node: 0,
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

    /// A leaf that is an output itself must be somewhere even if no node reads it.
    fn leaf_outputs(&mut self) {
        for (_, output) in self.graph.outputs() {
            let storage = self.graph[*output].storage();
            if matches!(self.graph[storage].kind(), TensorKind::Computed(_) | TensorKind::State) {
                continue;
            }
            if self.leaf_reader[storage.index()] == NO_BACKEND {
                let home = self.homes.home[storage.index()];
                self.leaf(storage, false, if home == NO_BACKEND { 0 } else { home });
            }
            self.viewed.insert(storage.index() as u32);
        }
    }

    /// The borrower learns of nothing that happens at the state's home, and so would keep what it sends there to the end of
    /// the run. Two splits later the way is over, and to wait for it costs nothing.
    fn release_sent(&mut self) {
        for (copy, reader) in std::mem::take(&mut self.sent_home) {
            let Copy { source: Some(source), from, .. } = self.out.copies[copy as usize] else { continue };
            let lane = &self.out.lanes[from];
            let made = lane.partition_point(|split| (*split as usize) < source);
            // Splits wait only for earlier ones, and the copy for none after its reader.
            let waits = lane.iter().skip(made + 2).find(|split| **split > reader);
            if let Some(split) = waits.copied()
                && self.out.released.insert(copy, split).is_none()
            {
                self.out.splits[split as usize].after_copies.push(copy as usize);
            }
        }
    }

    /// Lays the nodes of each split side by side.
    fn finish(mut self, flow: &Flow) -> Splits {
        let mut first = 0;
        for split in &mut self.out.splits {
            split.first_node = first;
            first += split.node_count;
            split.node_count = 0;
        }
        self.out.nodes = vec![NodeId::from_index(0); first];
        let mut echoes = self.out.echoes.iter().peekable();
        for Maker { node, .. } in flow.makers() {
            let echo = echoes.next_if(|(echoed, _)| echoed == node).map(|(_, split)| *split);
            for split in echo.into_iter().chain([self.out.split_of_node[node.index()] as usize]) {
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
