//! The suite of cases: for each operation, the sizes, types, layouts and values at which kernels tend to fail.

mod attention;
pub(crate) mod builder;
mod collectives;
mod conv;
mod elementwise;
mod experts;
pub(crate) mod fill;
mod fused;
mod layout;
mod matrix;
mod norms;
mod paged_attention;
mod recurrent;
mod reduce;
mod rows;
mod sparse;

use std::collections::{BTreeMap, HashSet};

use quadriga_graph::{BuildError, DType, Graph, GraphBuilder, Op};
use thiserror::Error;

use crate::{OracleError, RankOracle, Rng, Tolerance};
use builder::CaseBuilder;

/// Row lengths around block and vector widths.
const WIDTHS: [usize; 24] =
    [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 1000];

/// The types of weights.
const WEIGHT_TYPES: [DType; 26] = {
    use DType::*;
    [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4,
        NVFP4, TQ1_0, TQ2_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S,
    ]
};

/// The types that operations can write.
const WRITABLE: [DType; 8] = {
    use DType::*;
    [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0]
};

/// The group of ranks in the graphs of cases.
pub const CASE_GROUP: u32 = 0;

/// One test of a backend: a graph, the values of its inputs, and how close its outputs must come.
#[derive(Debug)]
pub struct Case {
    /// A readable name, unique in the suite.
    pub name: String,
    /// The operation under test.
    pub operation: &'static str,
    /// The graph. Weights have their bytes; states start as zeros where they are not given; outputs are contiguous.
    pub graph: Graph,
    /// The bytes of each input, and of states that do not start as zeros, by name.
    pub inputs: Vec<(String, Vec<u8>)>,
    /// How close the outputs must come to the oracle's.
    pub tolerance: Tolerance,
    /// Of a case of several ranks, the graphs and inputs of the ranks after the first.
    pub others: Vec<CaseGraph>,
}

/// What another rank computes in a case.
#[derive(Clone, Debug)]
pub struct CaseGraph {
    /// The graph.
    pub graph: Graph,
    /// The bytes of each input, by name.
    pub inputs: Vec<(String, Vec<u8>)>,
}

/// What one rank computes in a case.
#[derive(Clone, Copy, Debug)]
pub struct RankPart<'c> {
    /// The graph.
    pub graph: &'c Graph,
    /// The bytes of each input, by name.
    pub inputs: &'c [(String, Vec<u8>)],
}

impl Case {
    /// What each rank computes; of nearly all cases there is one.
    pub fn parts(&self) -> impl Iterator<Item = RankPart<'_>> {
        let others = self.others.iter().map(|CaseGraph { graph, inputs }| RankPart { graph, inputs });
        std::iter::once(RankPart { graph: &self.graph, inputs: &self.inputs }).chain(others)
    }

    /// Whether the graphs have collectives, so that they are computed with ranks of the group [`CASE_GROUP`](crate::CASE_GROUP).
    pub fn has_ranks(&self) -> bool {
        self.graph.nodes().iter().any(|node| matches!(node.op(), Op::Collective(_)))
            || !self.others.is_empty()
    }

    /// The outputs that the oracle computes: of each rank in the order of [`Graph::outputs`].
    pub fn expected(&self) -> Result<Vec<Vec<f64>>, OracleError> {
        let mut oracle = RankOracle::new(self.parts().map(|part| part.graph))?;
        for (rank, part) in self.parts().enumerate() {
            for (name, bytes) in part.inputs {
                oracle.rank(rank)?.set(name, bytes)?;
            }
        }
        oracle.run()?;
        let mut values = Vec::new();
        for (rank, part) in self.parts().enumerate() {
            for (_, id) in part.graph.outputs() {
                values.push(oracle.rank(rank)?.values(*id)?);
            }
        }
        Ok(values)
    }
}

/// A case whose graph could not be built: a bug in the suite.
#[derive(Debug, Error)]
#[error("the case \"{name}\" is broken: {error}")]
pub struct BrokenCase {
    /// The case's name.
    pub name: String,
    /// The operation under test.
    pub operation: &'static str,
    /// The builder's error.
    pub error: BuildError,
}

/// Builds the graph of a rank.
type RankBuild = Box<dyn for<'g> Fn(&CaseBuilder<'g>, usize) + Send + Sync>;

/// A case that is built on demand.
struct CaseEntry {
    operation: &'static str,
    name: String,
    tolerance: Tolerance,
    /// How many ranks compute it together.
    ranks: usize,
    build: RankBuild,
}

/// Collects the entries of a suite; entries with a duplicate name are dropped.
#[derive(Default)]
struct CaseList {
    entries: Vec<CaseEntry>,
    names: HashSet<String>,
}

impl CaseList {
    fn push(
        &mut self,
        operation: &'static str,
        details: String,
        tolerance: Tolerance,
        build: impl for<'g> Fn(&CaseBuilder<'g>) + Send + Sync + 'static,
    ) {
        self.push_ranks(operation, details, tolerance, 1, Box::new(move |s, _| build(s)));
    }

    /// A case that several ranks compute together.
    fn push_ranks(
        &mut self,
        operation: &'static str,
        details: String,
        tolerance: Tolerance,
        ranks: usize,
        build: RankBuild,
    ) {
        let name = format!("{operation} {details}");
        if self.names.insert(name.clone()) {
            self.entries.push(CaseEntry { operation, name, tolerance, ranks, build });
        }
    }

    /// The number of entries so far; cases use it to alternate between layouts.
    fn len(&self) -> usize {
        self.entries.len()
    }
}

/// The suite: a fixed list of cases, each built on demand.
///
/// ```
/// use quadriga_conformance::Suite;
///
/// let suite = Suite::new();
/// let case = suite.case(suite.find("add F32 [1, 1, 1, 7]").unwrap_or(0)).unwrap()?;
/// assert_eq!(case.expected()?.len(), case.graph.outputs().len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Suite {
    entries: Vec<CaseEntry>,
}

impl Default for Suite {
    fn default() -> Suite {
        Suite::new()
    }
}

impl Suite {
    /// The suite.
    pub fn new() -> Suite {
        let mut list = CaseList::default();
        elementwise::list(&mut list);
        norms::list(&mut list);
        attention::list(&mut list);
        matrix::list(&mut list);
        rows::list(&mut list);
        layout::list(&mut list);
        reduce::list(&mut list);
        conv::list(&mut list);
        fused::list(&mut list);
        attention::many(&mut list);
        attention::sinks(&mut list);
        attention::cache_types(&mut list);
        attention::latent(&mut list);
        experts::list(&mut list);
        attention::non_finite_queries(&mut list);
        attention::values_in_keys(&mut list);
        paged_attention::list(&mut list);
        fused::long_caches(&mut list);
        experts::extreme(&mut list);
        recurrent::list(&mut list);
        sparse::list(&mut list);
        attention::wide_heads(&mut list);
        paged_attention::wide_heads(&mut list);
        collectives::list(&mut list);
        Suite { entries: list.entries }
    }

    /// The number of cases.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no cases.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of cases for each operation.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for entry in &self.entries {
            *counts.entry(entry.operation).or_default() += 1;
        }
        counts
    }

    /// The name of the case at `index`.
    pub fn name(&self, index: usize) -> Option<&str> {
        self.entries.get(index).map(|e| e.name.as_str())
    }

    /// The operation under test of the case at `index`.
    pub fn operation(&self, index: usize) -> Option<&'static str> {
        self.entries.get(index).map(|e| e.operation)
    }

    /// How many ranks compute the case at `index` together.
    pub fn ranks(&self, index: usize) -> Option<usize> {
        self.entries.get(index).map(|e| e.ranks)
    }

    /// The index of the case with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|e| e.name == name)
    }

    /// Builds the case at `index`; `None` past the end.
    pub fn case(&self, index: usize) -> Option<Result<Case, BrokenCase>> {
        let entry = self.entries.get(index)?;
        let of_rank = |rank: usize| {
            let graph = GraphBuilder::new();
            let builder = CaseBuilder::new(&graph, seed_of(&entry.name).wrapping_add(rank as u64));
            (entry.build)(&builder, rank);
            let inputs = builder.into_inputs();
            graph.finish().map(|graph| CaseGraph { graph, inputs })
        };
        let others = (1..entry.ranks).map(of_rank).collect::<Result<Vec<_>, _>>();
        let (name, operation, tolerance) = (entry.name.clone(), entry.operation, entry.tolerance);
        Some(match of_rank(0).and_then(|first| Ok((first, others?))) {
            Ok((CaseGraph { graph, inputs }, others)) => {
                Ok(Case { name, operation, graph, inputs, tolerance, others })
            }
            Err(error) => Err(BrokenCase { name, operation, error }),
        })
    }

    /// Builds all cases, one after another.
    pub fn iter(&self) -> impl Iterator<Item = Result<Case, BrokenCase>> + '_ {
        (0..self.len()).filter_map(|i| self.case(i))
    }

    /// The indices of about `count` cases, a share of each operation and at least one; equal seeds give equal samples.
    pub fn sample(&self, count: usize, seed: u64) -> Vec<usize> {
        let mut by_operation: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
        for (index, entry) in self.entries.iter().enumerate() {
            by_operation.entry(entry.operation).or_default().push(index);
        }
        let mut rng = Rng::new(seed);
        let mut chosen = Vec::new();
        for indices in by_operation.values() {
            let share =
                count.saturating_mul(indices.len()).div_ceil(self.len().max(1)).clamp(1, indices.len());
            let order = fill::shuffled(indices.len(), &mut rng);
            chosen.extend(order.iter().take(share).filter_map(|i| indices.get(*i)));
        }
        chosen.sort_unstable();
        chosen
    }

    /// As many of these cases as given: one of each operation first, then a share of each; equal seeds give equal
    /// samples.
    pub fn sample_of(&self, cases: &[usize], count: usize, seed: u64) -> Vec<usize> {
        let mut by_operation: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
        for index in cases {
            if let Some(entry) = self.entries.get(*index) {
                by_operation.entry(entry.operation).or_default().push(*index);
            }
        }
        let mut rng = Rng::new(seed);
        let mut ranked: Vec<(usize, u64, usize)> = Vec::new();
        for indices in by_operation.values() {
            let order = fill::shuffled(indices.len(), &mut rng);
            for (place, index) in order.iter().filter_map(|i| indices.get(*i)).enumerate() {
                ranked.push((place * cases.len() / indices.len().max(1), rng.next_u64(), *index));
            }
        }
        ranked.sort_unstable();
        let mut chosen: Vec<usize> = ranked.into_iter().take(count).map(|(.., index)| index).collect();
        chosen.sort_unstable();
        chosen
    }
}

/// The seed of a case: the FNV-1a hash of its name, so that adding cases does not change the others.
fn seed_of(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
