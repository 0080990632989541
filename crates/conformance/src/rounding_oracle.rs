//! The oracle as a target, with every result rounded to its type.

use quadriga_graph::{Collective, Op};
use quadriga_runtime::{ExchangeCall, RankGroup};

use crate::{Case, Outputs, RankPart, Target, TargetError, compute_node, on_rank_threads};

/// The oracle as a target: node by node on plain bytes, each result rounded to its type, as in a straightforward
/// backend. It shows that every case can be built and computed, and the error of rounding alone.
#[derive(Clone, Copy, Default, Debug)]
pub struct RoundingOracle;

impl RoundingOracle {
    fn compute(part: RankPart<'_>, ranks: Option<&dyn RankGroup>) -> Option<Result<Outputs, String>> {
        let graph = part.graph;
        // The bytes of each storage, at the index of the tensor that owns it.
        let mut storages: Vec<Vec<u8>> = Vec::new();
        for id in graph.tensor_ids() {
            let tensor = graph.get(id)?;
            let owned = if tensor.storage() == id { tensor.bytes() } else { 0 };
            storages.push(graph.data(id).map_or_else(|| vec![0; owned], |data| data.bytes().to_vec()));
        }
        for (name, bytes) in part.inputs {
            *storages.get_mut(graph.leaf(name)?.index())? = bytes.clone();
        }
        let range = |id| {
            let tensor = graph.get(id)?;
            Some((tensor.storage().index(), tensor.offset()..tensor.offset() + tensor.bytes()))
        };
        for node in graph.node_ids() {
            let mut inputs: Vec<Vec<u8>> = Vec::new();
            for id in graph.inputs(node) {
                let (storage, bytes) = range(*id)?;
                inputs.push(storages.get(storage)?.get(bytes)?.to_vec());
            }
            let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            let (storage, bytes) = range(graph.get_node(node)?.output())?;
            let output = storages.get_mut(storage)?.get_mut(bytes)?;
            let computed = match (graph.get_node(node)?.op(), ranks) {
                (Op::Collective(Collective { kind, .. }), Some(ranks)) => {
                    let first = graph.get(*graph.inputs(node).first()?)?;
                    let dtype = graph.get(graph.get_node(node)?.output())?.dtype();
                    let mut input = *inputs.first()?;
                    if kind.is_in_place() {
                        output.copy_from_slice(input);
                        input = &[];
                    }
                    ranks.exchange(ExchangeCall { kind, dtype, rows: first.dims4()[2], input, output })
                }
                _ => compute_node(graph, node, &inputs, output).map_err(|error| error.to_string()),
            };
            if let Err(error) = computed {
                return Some(Err(error));
            }
        }
        let mut outputs = Outputs::new();
        for (_, id) in graph.outputs() {
            let (storage, bytes) = range(*id)?;
            outputs.push(storages.get(storage)?.get(bytes)?.to_vec());
        }
        Some(Ok(outputs))
    }

    fn outputs(computed: Option<Result<Outputs, String>>) -> Result<Outputs, TargetError> {
        match computed {
            Some(computed) => computed.map_err(TargetError::Failed),
            None => Err(TargetError::Failed("an input is not in the graph, or too short".into())),
        }
    }
}

impl Target for RoundingOracle {
    fn name(&self) -> String {
        "the oracle, rounded after each node".into()
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let part = RankPart { graph: &case.graph, inputs: &case.inputs };
        RoundingOracle::outputs(RoundingOracle::compute(part, None))
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        on_rank_threads(case, |_, part, ranks| {
            RoundingOracle::outputs(RoundingOracle::compute(part, Some(&*ranks)))
        })
    }
}
