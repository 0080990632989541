//! Collectives: the graphs of all ranks evaluated together.

use quadriga_graph::{Collective, CollectiveKind, Graph, NodeId, Op, Ranks};

use super::memory::{OracleLayout, ViewMut};
use super::{Oracle, OracleError, Storage};

/// Evaluates the graphs of all ranks of one group: each collective from the exact values of all of them.
///
/// ```
/// use quadriga_conformance::RankOracle;
/// use quadriga_graph::{BuildError, DType, Graph, GraphBuilder, Ranks};
///
/// let graph = |rank: usize| -> Result<Graph, BuildError> {
///     let g = GraphBuilder::new();
///     let x = g.input("x", DType::F32, [1, 2]);
///     g.output("y", x.all_gather(Ranks { group: 0, rank, count: 2 }, [2, 2]));
///     g.finish()
/// };
/// let graphs = [graph(0)?, graph(1)?];
/// let mut oracle = RankOracle::new(&graphs)?;
/// for (rank, values) in [[1.0, 2.0], [3.0, 4.0]].iter().enumerate() {
///     oracle.rank(rank)?.set_f32("x", values)?;
/// }
/// oracle.run()?;
/// assert_eq!(oracle.rank(1)?.read("y")?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RankOracle<'g> {
    ranks: Vec<Oracle<'g>>,
}

/// What a rank has sent to another.
struct SentValues {
    from: usize,
    to: usize,
    tag: u16,
    values: Vec<f64>,
}

impl<'g> RankOracle<'g> {
    /// An oracle of graphs, one for each rank, in order.
    pub fn new(graphs: impl IntoIterator<Item = &'g Graph>) -> Result<RankOracle<'g>, OracleError> {
        let ranks = graphs.into_iter().map(Oracle::new).collect::<Result<_, _>>()?;
        Ok(RankOracle { ranks })
    }

    /// The oracle of one rank, to set its inputs and to read its results.
    pub fn rank(&mut self, rank: usize) -> Result<&mut Oracle<'g>, OracleError> {
        let count = self.ranks.len();
        self.ranks
            .get_mut(rank)
            .ok_or_else(|| OracleError::Ranks(format!("there is no rank {rank} of {count}")))
    }

    /// Computes every node of all ranks, each rank's in execution order.
    pub fn run(&mut self) -> Result<(), OracleError> {
        let mut next = vec![0; self.ranks.len()];
        let mut sent = Vec::new();
        loop {
            let mut waiting = Vec::new();
            let mut progress = false;
            for (rank, next) in next.iter_mut().enumerate() {
                let before = *next;
                let collective = self.advance(rank, next, &mut sent)?;
                progress |= *next > before;
                waiting.extend(collective.map(|node| (rank, node)));
            }
            if waiting.is_empty() && !progress {
                break;
            }
            let all_meet = waiting.len() == self.ranks.len() && !waiting.iter().any(|at| self.receives(*at));
            if all_meet {
                self.exchange(&waiting)?;
                next.iter_mut().for_each(|next| *next += 1);
            } else if !progress {
                let text = waiting.iter().map(|(rank, node)| self.describe(*rank, *node));
                let text = text.collect::<Vec<_>>().join(", ");
                return Err(OracleError::Ranks(format!("ranks wait for each other: {text}")));
            }
        }
        if let Some(message) = sent.first() {
            let SentValues { from, to, tag, .. } = message;
            return Err(OracleError::Ranks(format!("rank {to} never receives {tag} of rank {from}")));
        }
        Ok(())
    }

    /// Whether a rank waits for a message.
    fn receives(&self, (rank, node): (usize, NodeId)) -> bool {
        let op = self.ranks.get(rank).and_then(|oracle| oracle.graph.get_node(node)).map(|n| n.op());
        matches!(op, Some(Op::Collective(Collective { kind: CollectiveKind::Receive { .. }, .. })))
    }

    fn describe(&self, rank: usize, node: NodeId) -> String {
        let name = self.ranks.get(rank).map_or_else(String::new, |oracle| oracle.graph.node_name(node));
        format!("rank {rank} at {name}")
    }

    /// Computes a rank's nodes up to one that waits for others, which is returned.
    fn advance(
        &mut self,
        rank: usize,
        next: &mut usize,
        sent: &mut Vec<SentValues>,
    ) -> Result<Option<NodeId>, OracleError> {
        let count = self.ranks.len();
        let oracle = self.rank(rank)?;
        while *next < oracle.graph.nodes().len() {
            let node = NodeId::from_index(*next);
            let Some(Op::Collective(Collective { ranks, kind })) =
                oracle.graph.get_node(node).map(|n| n.op())
            else {
                oracle.run_node(node)?;
                *next += 1;
                continue;
            };
            let Ranks { rank: own, count: of, .. } = *ranks;
            if (own, of) != (rank, count) {
                let text = format!("a node for rank {own} of {of} in the graph of rank {rank} of {count}");
                return Err(OracleError::Ranks(text));
            }
            match *kind {
                CollectiveKind::Send { to, tag } => {
                    let values = oracle.first_input(node)?;
                    oracle.set_result(node, &values)?;
                    sent.push(SentValues { from: rank, to, tag, values });
                }
                CollectiveKind::Receive { from, tag, .. } => {
                    let found = |m: &SentValues| (m.from, m.to, m.tag) == (from, rank, tag);
                    let Some(message) = sent.iter().position(found) else { return Ok(Some(node)) };
                    oracle.set_result(node, &sent.remove(message).values)?;
                }
                _ => return Ok(Some(node)),
            }
            *next += 1;
        }
        Ok(None)
    }

    /// Executes a collective that all ranks have reached.
    fn exchange(&mut self, nodes: &[(usize, NodeId)]) -> Result<(), OracleError> {
        let (mut kinds, mut inputs, mut rows) = (Vec::new(), Vec::new(), 0);
        for (oracle, (_, node)) in self.ranks.iter().zip(nodes) {
            let Some(Op::Collective(collective)) = oracle.graph.get_node(*node).map(|n| n.op()) else {
                return Err(OracleError::NoSuchId(node.index()));
            };
            kinds.push(&collective.kind);
            inputs.push(oracle.first_input(*node)?);
            let first = oracle.graph.inputs(*node).first().and_then(|id| oracle.graph.get(*id));
            rows = first.map_or(0, |tensor| tensor.dims4()[2]);
        }
        let (Some(kind), true) = (kinds.first(), kinds.windows(2).all(|pair| pair.first() == pair.last()))
        else {
            return Err(OracleError::Ranks(format!("the ranks do different things: {kinds:?}")));
        };
        let results = results(kind, &inputs, rows);
        for ((oracle, (_, node)), values) in self.ranks.iter_mut().zip(nodes).zip(results) {
            oracle.set_result(*node, &values)?;
        }
        Ok(())
    }
}

/// Each rank's result of a collective, from the values of all.
fn results(kind: &CollectiveKind, inputs: &[Vec<f64>], rows: usize) -> Vec<Vec<f64>> {
    let all = inputs.len();
    let sum = || {
        let mut sum = inputs.first().cloned().unwrap_or_default();
        for values in inputs.iter().skip(1) {
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        sum
    };
    let part = |values: &[f64], row: usize, first: usize, columns: usize, all: usize| {
        values.get(row * all + first..row * all + first + columns).unwrap_or_default().to_vec()
    };
    match kind {
        CollectiveKind::AllReduce => vec![sum(); all],
        CollectiveKind::Broadcast { root } => vec![inputs.get(*root).cloned().unwrap_or_default(); all],
        CollectiveKind::AllGather { columns } => {
            let row = |row: usize| {
                let parts = inputs.iter().zip(columns);
                parts.flat_map(move |(values, columns)| part(values, row, 0, *columns, *columns))
            };
            vec![(0..rows).flat_map(row).collect(); all]
        }
        CollectiveKind::ReduceScatter { columns } => {
            let (sum, width) = (sum(), columns.iter().sum());
            let of = |(rank, own): (usize, &usize)| {
                let first = columns.iter().take(rank).sum();
                (0..rows).flat_map(|row| part(&sum, row, first, *own, width)).collect()
            };
            columns.iter().enumerate().map(of).collect()
        }
        CollectiveKind::Send { .. } | CollectiveKind::Receive { .. } => Vec::new(),
    }
}

impl Oracle<'_> {
    /// The values of a node's first input.
    fn first_input(&self, node: NodeId) -> Result<Vec<f64>, OracleError> {
        let input = self.graph.inputs(node).first().ok_or(OracleError::NoSuchId(node.index()))?;
        self.values(*input)
    }

    /// Sets the result of a node that other ranks take part in.
    fn set_result(&mut self, node: NodeId, values: &[f64]) -> Result<(), OracleError> {
        let failed = |error| OracleError::Node { node: self.graph.node_name(node), error };
        let output =
            self.graph.get_node(node).map(|n| n.output()).ok_or(OracleError::NoSuchId(node.index()))?;
        let tensor = self.graph.get(output).ok_or(OracleError::NoSuchId(output.index()))?;
        if values.len() != tensor.elements() {
            let (name, shape) = (self.graph.node_name(node), tensor.shape());
            return Err(OracleError::Ranks(format!("{name} gets {} values for {shape}", values.len())));
        }
        let mut storage = Storage::computed(tensor).map_err(failed)?;
        if let Some(memory) = storage.memory_mut(0) {
            let layout = OracleLayout::of(tensor).map_err(failed)?;
            ViewMut { layout, memory }.set_all(values).map_err(failed)?;
        }
        if let Some(slot) = self.storages.get_mut(output.index()) {
            *slot = storage;
        }
        Ok(())
    }
}
