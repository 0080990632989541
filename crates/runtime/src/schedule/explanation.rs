//! All of a plan's decisions as plain, serialisable data, from which pages and reports are made.
//!
//! The schema is described in `docs/plan-schema.md`. Its number grows when a field changes its meaning or is removed; new
//! fields may be added at any time.

use std::collections::HashMap;

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};
use serde::Serialize;

use super::order::ScheduleStep;
use super::plan::{BackendBytes, Decision, Plan};
use super::splits::{Copy, Split};
use crate::memory::{BackendPlan, Lifetime, TensorLocation};
use crate::weights::{WeightUses, residency};
use crate::{Cost, Layout};

/// The number of the schema that [`Explanation`] follows.
pub const PLAN_SCHEMA: u32 = 2;

/// All of a plan's decisions, as data.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// [`PLAN_SCHEMA`].
    pub schema: u32,
    /// The graph's fingerprint.
    pub graph: String,
    /// One past the last step. Steps are node numbers, in execution order; views are nodes that compute nothing.
    pub steps: u32,
    /// The backends, in order of preference.
    pub backends: Vec<BackendLine>,
    /// The splits.
    pub splits: Vec<SplitLine>,
    /// The copies.
    pub copies: Vec<CopyLine>,
    /// The commands of a run, in the order in which they are issued.
    pub order: Vec<ScheduleStep>,
    /// The nodes, without views.
    pub nodes: Vec<NodeLine>,
    /// Everything that has memory: weights, states, inputs, results, copies and scratch memory.
    pub storages: Vec<StorageLine>,
}

/// A backend of an [`Explanation`].
#[derive(Clone, Debug, Serialize)]
pub struct BackendLine {
    /// Its name and the memory that the plan takes.
    #[serde(flatten)]
    pub bytes: BackendBytes,
    /// Bytes that are allocated in all: weights, state and compute.
    pub total: u64,
    /// The vendor's name for the device.
    pub description: String,
    /// All of its memory, if known.
    pub memory: Option<u64>,
    /// Free bytes when the plan was explained, if known.
    pub free: Option<u64>,
    /// Bytes of each buffer of its arena; together they are `compute`.
    pub chunks: Vec<u64>,
    /// The most bytes in use in one step: no plan with this sharing of storages needs fewer.
    pub lower_bound: u64,
    /// The first step in which most bytes are in use.
    pub peak_step: u32,
    /// Bytes that all results, inputs and copies would take if nothing shared memory.
    pub unshared: u64,
    /// The packing strategy that found the offsets.
    pub strategy: String,
    /// Whether the arena is proved to be as small as possible.
    pub optimal: bool,
}

/// A split of an [`Explanation`].
#[derive(Clone, Debug, Serialize)]
pub struct SplitLine {
    /// Backend, nodes and copies.
    #[serde(flatten)]
    pub split: Split,
    /// The number of its first node.
    pub first: usize,
    /// The number of its last node.
    pub last: usize,
    /// The work of all its nodes.
    #[serde(flatten)]
    pub cost: Cost,
}

/// A copy of an [`Explanation`].
#[derive(Clone, Debug, Serialize)]
pub struct CopyLine {
    /// What is copied, from where to where.
    #[serde(flatten)]
    pub copy: Copy,
    /// The name of the tensor.
    pub name: String,
    /// Its index among the storages.
    pub place: usize,
    /// Whether it is a streamed weight.
    pub streamed: bool,
}

/// A node of an [`Explanation`].
#[derive(Clone, Debug, Serialize)]
pub struct NodeLine {
    /// Its number.
    pub node: usize,
    /// Its name.
    pub name: String,
    /// Its operation.
    pub operation: &'static str,
    /// Whether it is executed together with other ranks.
    pub collective: bool,
    /// The split it is in.
    pub split: usize,
    /// Where it runs, and why.
    #[serde(flatten)]
    pub decision: Decision,
    /// Why, in words.
    pub why: String,
    /// The type of its result.
    pub dtype: &'static str,
    /// The shape of its result, outermost dimension first.
    pub shape: Vec<usize>,
    /// The bytes of its result.
    pub bytes: u64,
    /// The index of its result among the storages; `None` if nothing reads it.
    pub storage: Option<usize>,
    /// Its work.
    #[serde(flatten)]
    pub cost: Cost,
}

/// What a storage is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StorageUse {
    /// Parameters, and constants of the graph: loaded once.
    Weight,
    /// Tensors that outlive a run, such as a KV cache.
    State,
    /// Set by the caller.
    Input,
    /// Results.
    Compute,
    /// The copy of a tensor of another backend.
    Copy,
    /// The scratch memory of a split's program.
    Scratch,
}

/// Bytes of a backend, and when they are in use.
#[derive(Clone, Debug, Serialize)]
pub struct StorageLine {
    /// The name of the tensor that owns it; for a copy, of the tensor that is copied; for scratch memory, of the split's
    /// first result.
    pub name: String,
    /// What it is for.
    pub usage: StorageUse,
    /// The backend's number.
    pub backend: usize,
    /// Its bytes.
    pub bytes: u64,
    /// The number of the arena's buffer; `None` outside the arena.
    pub chunk: Option<u32>,
    /// Bytes from the start of that buffer; `None` outside the arena.
    pub offset: Option<u64>,
    /// The first step in which it is in use.
    pub start: u32,
    /// One past the last step in which it is in use.
    pub end: u32,
    /// The tensor's number in the graph.
    pub tensor: usize,
    /// The node that writes it first, if one does.
    pub node: Option<usize>,
    /// The type of its elements.
    pub dtype: &'static str,
    /// Its shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// How many results are in it one after another: 1, and one more for each that is computed in place.
    pub results: usize,
    /// Whether it is read in the file map, and takes no memory.
    pub mapped: bool,
    /// Whether its layout is the backend's own.
    pub packed: bool,
    /// Why it is on this backend, in words.
    pub why: String,
}

impl Plan {
    /// All decisions, as data.
    pub fn explain(&self) -> Explanation {
        let (graph, splits) = (self.graph(), self.splits());
        let (storages, place_of) = StorageTable::of(self);
        let line = |node: NodeId| {
            let split = *splits.split_of_node.get(node.index())?;
            let output = graph.get_node(node)?.output();
            let tensor = graph.get(output)?;
            Some(NodeLine {
                node: node.index(),
                name: graph.node_name(node),
                operation: graph.get_node(node)?.op().name(),
                collective: matches!(graph.get_node(node)?.op(), Op::Collective(_)),
                split: (split != u32::MAX).then_some(split as usize)?,
                decision: self.decision(node)?,
                why: self.reason(node),
                dtype: tensor.dtype().name(),
                shape: tensor.shape().dims().to_vec(),
                bytes: tensor.bytes() as u64,
                storage: place_of.result(self, output),
                cost: Cost::of(graph, node),
            })
        };
        let split = |(number, split): (usize, &Split)| {
            let nodes = splits.nodes_of(number);
            let costs = nodes.iter().map(|node| Cost::of(graph, *node));
            SplitLine {
                split: split.clone(),
                first: nodes.first().map_or(0, |node| node.index()),
                last: nodes.last().map_or(0, |node| node.index()),
                cost: costs.fold(Cost::default(), Cost::and),
            }
        };
        let copy = |(number, copy): (usize, &Copy)| CopyLine {
            copy: copy.clone(),
            name: graph.name(TensorId::from_index(copy.tensor)),
            place: place_of.first_copy + number,
            streamed: self.is_streamed(copy.storage),
        };
        Explanation {
            schema: PLAN_SCHEMA,
            graph: graph.fingerprint().to_string(),
            steps: self.memory().horizon.max(graph.nodes().len() as u32),
            backends: self.backend_lines(),
            splits: splits.splits.iter().enumerate().map(split).collect(),
            copies: splits.copies.iter().enumerate().map(copy).collect(),
            order: self.order().to_vec(),
            nodes: graph.node_ids().filter_map(line).collect(),
            storages,
        }
    }

    /// The explanation as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.explain()).unwrap_or_default()
    }

    fn backend_lines(&self) -> Vec<BackendLine> {
        let line =
            |(index, (bytes, backend)): (usize, (BackendBytes, &std::sync::Arc<dyn crate::Backend>))| {
                let device = backend.device();
                let empty = BackendPlan::default();
                let plan = self.memory().backends.get(index).unwrap_or(&empty);
                BackendLine {
                    // Without work memory, so that a plan reads the same for any number of threads.
                    total: bytes.total() - bytes.work,
                    bytes,
                    description: device.description,
                    memory: device.total_bytes,
                    free: device.free_bytes,
                    chunks: plan.chunks.clone(),
                    lower_bound: plan.lower_bound,
                    peak_step: self.memory().peak_step(index),
                    unshared: plan.inputs + plan.results + plan.extras,
                    strategy: plan.strategy.to_string(),
                    optimal: plan.proved_optimal,
                }
            };
        self.bytes().into_iter().zip(self.backends()).enumerate().map(line).collect()
    }
}

/// The indices of tensors and copies among the storages of an explanation.
struct StorageTable {
    /// Results and states, by the tensor that owns the storage.
    of_root: HashMap<usize, usize>,
    first_copy: usize,
}

impl StorageTable {
    /// All storages: weights, states, inputs, results, then copies by number, then scratch memory.
    fn of(plan: &Plan) -> (Vec<StorageLine>, StorageTable) {
        let graph = plan.graph();
        let horizon = plan.memory().horizon.max(graph.nodes().len() as u32);
        let mut lines = Vec::new();
        let mut of_root = HashMap::new();
        weights(plan, horizon, &mut lines);
        for id in graph.of_kind(TensorKind::State) {
            if let Some(backend) = plan.placement(id) {
                of_root.insert(id.index(), lines.len());
                let bytes = |b: &std::sync::Arc<dyn crate::Backend>, t| b.storage_bytes(t) as u64;
                let size = plan.backends().get(backend).zip(graph.get(id)).map_or(0, |(b, t)| bytes(b, t));
                lines.extend(line(
                    plan,
                    id,
                    StorageUse::State,
                    backend,
                    size,
                    Lifetime { start: 0, end: horizon },
                ));
            }
        }
        inputs(plan, horizon, &mut lines);
        results(plan, &mut lines, &mut of_root);
        let first_copy = lines.len();
        for (number, copy) in plan.splits().copies.iter().enumerate() {
            let extra = plan.space().first_copy + number;
            let tensor = TensorId::from_index(copy.tensor);
            let life = plan.memory().extras.get(extra).map_or(Lifetime::NEVER, |extra| extra.lifetime);
            let bytes = plan.memory().extras.get(extra).map_or(0, |extra| extra.bytes);
            let end = life.end.min(horizon);
            let made = line(plan, tensor, StorageUse::Copy, copy.to, bytes, Lifetime { end, ..life });
            let from = plan.backends().get(copy.from).map_or("", |b| b.name());
            let origin = if copy.source.is_some() { "is computed" } else { "is" };
            lines.extend(made.map(|made| StorageLine {
                why: format!("split {} reads it here; it {origin} on {from}", copy.reader),
                ..at(made, plan.memory().extra_location(extra))
            }));
        }
        scratches(plan, &mut lines);
        (lines, StorageTable { of_root, first_copy })
    }

    fn result(&self, plan: &Plan, output: TensorId) -> Option<usize> {
        let graph: &Graph = plan.graph();
        let storage = graph.get(output)?.storage();
        let root = plan.memory().sharing.root(storage).unwrap_or(storage);
        self.of_root.get(&root.index()).or_else(|| self.of_root.get(&storage.index())).copied()
    }
}

fn scratches(plan: &Plan, lines: &mut Vec<StorageLine>) {
    let graph = plan.graph();
    for (split, extra) in &plan.space().scratches {
        let first = plan.splits().nodes_of(*split as usize).first().and_then(|node| graph.get_node(*node));
        let (Some(node), Some(extra)) = (first, plan.memory().extras.get(*extra as usize)) else { continue };
        let backend = usize::from(extra.backend);
        let made = line(plan, node.output(), StorageUse::Scratch, backend, extra.bytes, extra.lifetime);
        let location = plan.space().scratch(*split as usize);
        lines.extend(made.map(|made| StorageLine {
            why: format!("scratch memory of split {split}"),
            chunk: location.map(|(slot, _)| slot.chunk),
            offset: location.map(|(slot, _)| slot.offset),
            ..made
        }));
    }
}

/// The line of a tensor, without an offset in an arena.
fn line(
    plan: &Plan,
    id: TensorId,
    usage: StorageUse,
    backend: usize,
    bytes: u64,
    life: Lifetime,
) -> Option<StorageLine> {
    let tensor = plan.graph().get(id)?;
    Some(StorageLine {
        name: plan.graph().name(id),
        usage,
        backend,
        bytes,
        chunk: None,
        offset: None,
        start: life.start,
        end: life.end,
        tensor: id.index(),
        node: tensor.node().map(|node| node.index()),
        dtype: tensor.dtype().name(),
        shape: tensor.shape().dims().to_vec(),
        results: 1,
        mapped: false,
        packed: false,
        why: plan.reason_of(tensor.storage()),
    })
}

fn at(line: StorageLine, location: TensorLocation) -> StorageLine {
    match location {
        TensorLocation::Arena { chunk, offset, .. } => {
            StorageLine { chunk: Some(chunk), offset: Some(offset), ..line }
        }
        TensorLocation::Unused | TensorLocation::External { .. } => line,
    }
}

fn weights(plan: &Plan, horizon: u32, lines: &mut Vec<StorageLine>) {
    let graph = plan.graph();
    let uses = WeightUses::of(graph);
    for read in plan.weight_reads() {
        let Some(backend) = plan.backends().get(read.backend) else { continue };
        let held = residency(graph, &**backend, read, &uses.of_tensor(graph, read.tensor));
        let life = Lifetime { start: 0, end: horizon };
        let bytes = held.layout.bytes as u64;
        let made = line(plan, read.tensor, StorageUse::Weight, read.backend, bytes, life);
        let packed = held.layout.layout != Layout::Plain;
        lines.extend(made.map(|made| StorageLine { mapped: held.mapped, packed, ..made }));
    }
}

fn inputs(plan: &Plan, horizon: u32, lines: &mut Vec<StorageLine>) {
    for leaf in &plan.splits().leaves {
        let id = TensorId::from_index(leaf.tensor);
        let key = (leaf.tensor as u32, leaf.backend as u16);
        let Some(first) = plan.space().inputs.get(&key) else { continue };
        let banks = plan.space().banks.get(leaf.backend).map_or(1, |banks| usize::from(*banks));
        for extra in *first as usize..*first as usize + banks {
            let bytes = plan.memory().extras.get(extra).map_or(0, |extra| extra.bytes);
            let life = Lifetime { start: 0, end: horizon };
            let made = line(plan, id, StorageUse::Input, leaf.backend, bytes, life);
            lines.extend(made.map(|made| at(made, plan.memory().extra_location(extra))));
        }
    }
}

fn results(plan: &Plan, lines: &mut Vec<StorageLine>, of_root: &mut HashMap<usize, usize>) {
    let (graph, memory) = (plan.graph(), plan.memory());
    let mut results: HashMap<usize, usize> = HashMap::new();
    for (id, root) in graph.tensor_ids().zip(&memory.sharing.roots) {
        let own = graph.get(id).is_some_and(|t| t.storage() == id && t.node().is_some());
        *results.entry(root.index()).or_default() += usize::from(own);
    }
    let places = memory.lifetimes.iter().zip(&memory.bytes).zip(&memory.locations).enumerate();
    for (index, ((life, bytes), location)) in places {
        let TensorLocation::Arena { backend, .. } = location else { continue };
        if life.is_empty() {
            continue;
        }
        let id = TensorId::from_index(index);
        let end = life.end.min(memory.horizon);
        let life = Lifetime { end, ..*life };
        let made = line(plan, id, StorageUse::Compute, usize::from(*backend), *bytes, life);
        if let Some(made) = made {
            of_root.insert(index, lines.len());
            let results = results.get(&index).copied().unwrap_or(1).max(1);
            lines.push(StorageLine { results, ..at(made, *location) });
        }
    }
}
