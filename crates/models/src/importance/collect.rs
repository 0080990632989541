//! Computes importance: runs a model over a text and adds up the squares of the inputs of its weight matrices.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use quadriga_graph::{DType, Graph, NodeId, Op, TensorId, TensorKind};
use quadriga_llm::{BatchToken, Engine};
use quadriga_runtime::{Observed, Observer, Plan};

use super::matrix::{ImportanceEntry, ImportanceMatrix};
use crate::error::{ImportanceError, Result};

/// A matrix multiplication whose inputs are observed.
#[derive(Clone)]
struct Use {
    /// The name of the weight.
    weight: String,
    /// Matrices (experts) of the weight.
    matrices: usize,
    /// The activations.
    input: TensorId,
    /// The experts of each row, for a weight of experts.
    ids: Option<TensorId>,
    /// The later of the nodes that compute them.
    last: NodeId,
}

/// The uses that depend on the result of a node.
#[derive(Default)]
struct Uses {
    all: Vec<Use>,
    /// By the node that computes the activations or the experts: indices in `all`.
    by_node: HashMap<NodeId, Vec<usize>>,
}

/// Sums in double precision: a long text adds many small squares to large sums.
struct Sums {
    squares: Vec<f64>,
    counts: Vec<u64>,
}

#[derive(Default)]
struct Collected {
    sums: BTreeMap<String, Sums>,
    not_finite: Option<String>,
}

/// Observes the inputs of all multiplications with weights.
struct Collector {
    collected: Arc<Mutex<Collected>>,
    /// Of each graph, by its address, which stays its own while the graph is kept.
    uses: HashMap<usize, (Arc<Graph>, Uses)>,
    /// Activations and experts of uses that wait for the other one.
    waiting: HashMap<TensorId, Vec<u8>>,
}

/// The node that computed the memory of a tensor: through views, not through writes.
fn producer(graph: &Graph, mut tensor: TensorId) -> Option<NodeId> {
    loop {
        let TensorKind::Computed(node) = graph.get(tensor)?.kind() else { return None };
        if !graph.get_node(node)?.op().is_view() {
            return Some(node);
        }
        tensor = *graph.inputs(node).first()?;
    }
}

impl Uses {
    fn of(graph: &Graph) -> Uses {
        let mut uses = Uses::default();
        for node in graph.node_ids() {
            let Some(op) = graph.get_node(node).map(|node| node.op()) else { continue };
            let (weight, input, ids) = match (op, graph.inputs(node)) {
                (Op::MulMat, [weight, input]) => (*weight, *input, None),
                (Op::MulMatId, [weight, input, ids]) => (*weight, *input, Some(*ids)),
                _ => continue,
            };
            let (Some(leaf), Some(name)) = (graph.get(weight), graph.leaf_name(weight)) else { continue };
            let is_float = graph.get(input).is_some_and(|input| input.dtype() == DType::F32);
            if leaf.kind() != TensorKind::Weight || !is_float {
                continue;
            }
            let matrices = if ids.is_some() { leaf.shape().dims().first().copied().unwrap_or(1) } else { 1 };
            let index = uses.all.len();
            let nodes = [Some(input), ids].into_iter().flatten().map(|tensor| producer(graph, tensor));
            let Some(nodes) = nodes.collect::<Option<Vec<NodeId>>>() else { continue };
            let Some(last) = nodes.iter().copied().max() else { continue };
            uses.all.push(Use { weight: name.to_owned(), matrices, input, ids, last });
            for node in nodes {
                uses.by_node.entry(node).or_default().push(index);
            }
        }
        uses
    }
}

impl Collector {
    fn uses(&mut self, plan: &Plan) -> &Uses {
        let graph = plan.graph();
        let key = Arc::as_ptr(graph) as usize;
        &self.uses.entry(key).or_insert_with(|| (graph.clone(), Uses::of(graph))).1
    }
}

impl Observer for Collector {
    fn wants(&mut self, plan: &Plan, node: NodeId) -> bool {
        self.uses(plan).by_node.contains_key(&node)
    }

    fn observe(&mut self, observed: Observed<'_>) -> ControlFlow<()> {
        let graph = observed.plan.graph().clone();
        let uses: Vec<Use> = {
            let all = self.uses(observed.plan);
            let indices = all.by_node.get(&observed.node).cloned().unwrap_or_default();
            indices.iter().filter_map(|index| all.all.get(*index).cloned()).collect()
        };
        for found in uses {
            let own = |tensor: TensorId| producer(&graph, tensor) == Some(observed.node);
            for tensor in [Some(found.input), found.ids].into_iter().flatten().filter(|tensor| own(*tensor)) {
                let bytes = gather(&graph, observed.tensor, tensor, observed.bytes);
                self.waiting.insert(tensor, bytes);
            }
            if found.last != observed.node {
                continue;
            }
            let Some(input) = self.waiting.get(&found.input) else { continue };
            let ids = found.ids.and_then(|ids| self.waiting.get(&ids));
            let width = graph.get(found.input).and_then(|input| input.shape().dims().last().copied());
            let mut collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
            if !add(&mut collected, &found, input, ids.map(Vec::as_slice), width.unwrap_or(1)) {
                collected.not_finite = Some(found.weight.clone());
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }
}

/// The bytes of `tensor`, contiguous, from those of the tensor that owns its memory.
fn gather(graph: &Graph, owner: TensorId, tensor: TensorId, bytes: &[u8]) -> Vec<u8> {
    let (Some(owner), Some(tensor)) = (graph.get(owner), graph.get(tensor)) else { return Vec::new() };
    let start = tensor.offset().saturating_sub(owner.offset());
    let (dims, strides) = (tensor.dims4(), tensor.strides());
    let [a, b, c, d] = dims;
    let [sa, sb, sc, sd] = strides;
    let size = tensor.dtype().block_bytes();
    let mut out = Vec::with_capacity(a * b * c * d * size);
    for i in 0..a {
        for j in 0..b {
            for k in 0..c {
                let row = start + i * sa + j * sb + k * sc;
                if sd == size {
                    out.extend_from_slice(bytes.get(row..row + d * size).unwrap_or_default());
                    continue;
                }
                for l in 0..d {
                    let at = row + l * sd;
                    out.extend_from_slice(bytes.get(at..at + size).unwrap_or_default());
                }
            }
        }
    }
    out
}

/// Adds the squares of all rows; false if one is not finite.
fn add(collected: &mut Collected, found: &Use, input: &[u8], ids: Option<&[u8]>, width: usize) -> bool {
    let size = width * found.matrices;
    let sums = collected
        .sums
        .entry(found.weight.clone())
        .or_insert_with(|| Sums { squares: vec![0.0; size], counts: vec![0; found.matrices] });
    if sums.squares.len() != size {
        return true;
    }
    let (values, _) = input.as_chunks::<4>();
    let rows: Vec<&[[u8; 4]]> = values.chunks_exact(width.max(1)).collect();
    let experts: Vec<i32> = match ids {
        Some(ids) => ids.as_chunks::<4>().0.iter().map(|id| i32::from_ne_bytes(*id)).collect(),
        None => vec![0; rows.len()],
    };
    // One row of activations for all experts of a token, or one for each of them.
    let per_row = if rows.is_empty() { 1 } else { (experts.len() / rows.len()).max(1) };
    for (i, expert) in experts.iter().enumerate() {
        let (Some(row), Ok(expert)) = (rows.get(i / per_row), usize::try_from(*expert)) else { continue };
        let Some(squares) = sums.squares.get_mut(expert * width..(expert + 1) * width) else { continue };
        for (sum, value) in squares.iter_mut().zip(*row) {
            let value = f64::from(f32::from_ne_bytes(*value));
            *sum += value * value;
        }
        if let Some(count) = sums.counts.get_mut(expert) {
            *count += 1;
        }
    }
    sums.squares.iter().all(|sum| sum.is_finite())
}

/// Computes the importance of a model's inputs over chunks of a text, on an engine of its own. `each` is called after each
/// chunk with the number of chunks so far, and what was collected if it asks for it; it returns false to stop.
pub fn collect(
    engine: &mut Engine,
    tokens: &[u32],
    chunk: usize,
    dataset: &str,
    each: &mut dyn FnMut(usize, &dyn Fn() -> ImportanceMatrix) -> bool,
) -> Result<ImportanceMatrix> {
    let chunk = chunk.max(1);
    if tokens.len() < chunk {
        return Err(ImportanceError::ShortText { found: tokens.len(), expected: chunk }.into());
    }
    let collected = Arc::new(Mutex::new(Collected::default()));
    let observer = Collector { collected: collected.clone(), uses: HashMap::new(), waiting: HashMap::new() };
    engine.observe_nodes(Some(Box::new(observer)));
    let mut result = Ok(());
    let mut done = 0;
    for part in tokens.chunks_exact(chunk) {
        engine.truncate(0, 0);
        // Every token is an output: the last layer computes those only.
        let batch: Vec<BatchToken> =
            part.iter().map(|token| BatchToken { sequence: 0, token: *token, output: true }).collect();
        if let Err(error) = engine.extend(&batch) {
            let not_finite = collected.lock().unwrap_or_else(PoisonError::into_inner).not_finite.clone();
            result = Err(match not_finite {
                Some(tensor) => ImportanceError::NotFinite { tensor }.into(),
                None => error.into(),
            });
            break;
        }
        done += 1;
        if !each(done, &|| matrix(&collected, done, chunk, dataset)) {
            break;
        }
    }
    engine.observe_nodes(None);
    engine.truncate(0, 0);
    result.map(|()| matrix(&collected, done, chunk, dataset))
}

/// What was collected, as a matrix.
fn matrix(collected: &Mutex<Collected>, chunks: usize, chunk: usize, dataset: &str) -> ImportanceMatrix {
    let collected = collected.lock().unwrap_or_else(PoisonError::into_inner);
    let entries = collected.sums.iter().map(|(name, sums)| {
        let entry = ImportanceEntry {
            sums: sums.squares.iter().map(|square| *square as f32).collect(),
            counts: sums.counts.iter().map(|count| *count as f32).collect(),
        };
        (name.clone(), entry)
    });
    ImportanceMatrix {
        entries: entries.collect(),
        datasets: vec![dataset.to_owned()],
        chunk_count: chunks as u32,
        chunk_size: chunk as u32,
        text: None,
        text_chunks: 0,
        text_start: None,
    }
}
