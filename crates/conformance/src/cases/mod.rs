//! The suite of cases: for each operation, the sizes, types, layouts and values that break kernels.

mod attention;
mod elementwise;
pub(crate) mod fill;
mod fused;
mod layout;
mod matrix;
mod norms;
mod reduce;
mod rows;
mod sketch;

use std::collections::{BTreeMap, HashSet};

use quadriga_graph::{BuildError, DType, Graph, GraphBuilder};
use thiserror::Error;

use crate::{Oracle, OracleError, Rng, Tolerance};
use sketch::Sketch;

/// Row lengths around block and vector widths.
const WIDTHS: [usize; 24] =
    [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 511, 1000];

/// Every type that weights can have.
const WEIGHT_TYPES: [DType; 16] = {
    use DType::*;
    [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4]
};

/// Every type that values can be written in.
const WRITABLE: [DType; 8] = {
    use DType::*;
    [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0]
};

/// One test of a backend: a graph, the values of its inputs, and how close its outputs must come.
#[derive(Debug)]
pub struct Case {
    /// A readable name, unique in the suite.
    pub name: String,
    /// The operation that the case is about.
    pub operation: &'static str,
    /// The graph. Weights carry their bytes; states start as zeros; all outputs are contiguous.
    pub graph: Graph,
    /// The bytes of each input, by name.
    pub inputs: Vec<(String, Vec<u8>)>,
    /// How close the outputs must come to the oracle's.
    pub tolerance: Tolerance,
}

impl Case {
    /// What the outputs are, by the oracle, in the order of [`Graph::outputs`].
    pub fn expected(&self) -> Result<Vec<Vec<f64>>, OracleError> {
        let mut oracle = Oracle::new(&self.graph)?;
        for (name, bytes) in &self.inputs {
            oracle.set(name, bytes)?;
        }
        oracle.run()?;
        self.graph.outputs().iter().map(|(_, id)| oracle.values(*id)).collect()
    }
}

/// A case that could not be built: a mistake in the suite about the rules of the graph.
#[derive(Debug, Error)]
#[error("the case \"{name}\" is broken: {error}")]
pub struct BrokenCase {
    /// The case's name.
    pub name: String,
    /// The operation that the case is about.
    pub operation: &'static str,
    /// What the graph says.
    pub error: BuildError,
}

type Build = Box<dyn for<'g> Fn(&Sketch<'g>) + Send + Sync>;

/// A case that has not been built yet.
struct Entry {
    operation: &'static str,
    name: String,
    tolerance: Tolerance,
    build: Build,
}

/// Collects the entries of a suite; a name that is taken already is left out.
#[derive(Default)]
struct List {
    entries: Vec<Entry>,
    names: HashSet<String>,
}

impl List {
    fn push(
        &mut self,
        operation: &'static str,
        details: String,
        tolerance: Tolerance,
        build: impl for<'g> Fn(&Sketch<'g>) + Send + Sync + 'static,
    ) {
        let name = format!("{operation} {details}");
        if self.names.insert(name.clone()) {
            self.entries.push(Entry { operation, name, tolerance, build: Box::new(build) });
        }
    }

    /// A number that grows with the list, to take layouts in turn.
    fn turn(&self) -> usize {
        self.entries.len()
    }
}

/// All cases, always the same ones. They are built one by one when asked for.
pub struct Suite {
    entries: Vec<Entry>,
}

impl Default for Suite {
    fn default() -> Suite {
        Suite::new()
    }
}

impl Suite {
    /// The suite.
    pub fn new() -> Suite {
        let mut list = List::default();
        elementwise::list(&mut list);
        norms::list(&mut list);
        attention::list(&mut list);
        matrix::list(&mut list);
        rows::list(&mut list);
        layout::list(&mut list);
        reduce::list(&mut list);
        fused::list(&mut list);
        attention::many(&mut list);
        Suite { entries: list.entries }
    }

    /// How many cases there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
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

    /// The operation that the case at `index` is about.
    pub fn operation(&self, index: usize) -> Option<&'static str> {
        self.entries.get(index).map(|e| e.operation)
    }

    /// The case with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|e| e.name == name)
    }

    /// Builds the case at `index`; `None` past the end.
    pub fn case(&self, index: usize) -> Option<Result<Case, BrokenCase>> {
        let entry = self.entries.get(index)?;
        let graph = GraphBuilder::new();
        let sketch = Sketch::new(&graph, seed_of(&entry.name));
        (entry.build)(&sketch);
        let inputs = sketch.into_inputs();
        let (name, operation) = (entry.name.clone(), entry.operation);
        Some(match graph.finish() {
            Ok(graph) => Ok(Case { name, operation, graph, inputs, tolerance: entry.tolerance }),
            Err(error) => Err(BrokenCase { name, operation, error }),
        })
    }

    /// Builds all cases in turn.
    pub fn iter(&self) -> impl Iterator<Item = Result<Case, BrokenCase>> + '_ {
        (0..self.len()).filter_map(|i| self.case(i))
    }

    /// The indices of about `count` cases spread over all operations, at least one of each: always the same for
    /// the same seed.
    pub fn sample(&self, count: usize, seed: u64) -> Vec<usize> {
        let mut by_operation: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
        for (index, entry) in self.entries.iter().enumerate() {
            by_operation.entry(entry.operation).or_default().push(index);
        }
        let mut rng = Rng::new(seed);
        let mut chosen = Vec::new();
        for indices in by_operation.values() {
            let share = (count * indices.len()).div_ceil(self.len().max(1)).clamp(1, indices.len());
            let order = fill::shuffled(indices.len(), &mut rng);
            chosen.extend(order.iter().take(share).filter_map(|i| indices.get(*i)));
        }
        chosen.sort_unstable();
        chosen
    }
}

/// A case's seed follows from its name alone, so that adding cases leaves the others as they are (FNV-1a).
fn seed_of(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
