//! Random graphs for differential testing: what a backend computes in a session, with planned memory, in-place results
//! and fusion, against the oracle.
//!
//! A graph is generated from a seed alone, so a failure is reproduced by its number. Whether a difference is an error
//! cannot be told from one fixed tolerance, since chains of operations may amplify rounding: the oracle runs again with
//! every node's result perturbed by about one rounding error, and the tolerance follows from how far the outputs move.

mod generator;
mod model_ops;
mod own_ops;
mod windows;

use quadriga_graph::{BuildError, Graph, GraphBuilder};
use quadriga_runtime::{RuntimeError, Scheduler};

use self::generator::GraphGenerator;
use crate::{Oracle, OracleError, Rng};

/// A random graph with values for its inputs.
pub struct RandomGraph {
    /// The graph. All outputs are F32.
    pub graph: Graph,
    /// Its F32 inputs.
    pub inputs: Vec<(String, Vec<f32>)>,
    /// Its I32 inputs: positions, row numbers, spans.
    pub indices: Vec<(String, Vec<i32>)>,
    /// The names of its outputs.
    pub outputs: Vec<String>,
    /// The largest relative rounding error of an operation: larger with f16 results or quantized weights.
    rounding: f64,
}

/// The oracle's result for one output.
pub struct Expected {
    /// The output's name.
    pub name: String,
    /// Its values.
    pub values: Vec<f64>,
    /// The largest acceptable normalized mean squared error.
    pub tolerance: f64,
}

/// A result that differs from the expected one.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error(
    "output {name}: normalized mean squared error {error:.3e}, tolerance {tolerance:.3e}; \
     largest difference at {index}: {found} instead of {expected}"
)]
pub struct Difference {
    /// The output.
    pub name: String,
    /// The normalized mean squared error, or infinity if only one of the two is finite somewhere.
    pub error: f64,
    /// The largest acceptable one.
    pub tolerance: f64,
    /// The element that differs most.
    pub index: usize,
    /// Its value.
    pub found: f64,
    /// Its expected value.
    pub expected: f64,
}

/// A tolerance does not exceed a tenth of a result's size, except for results that rounding alone moves.
const MAX_TOLERANCE: f64 = 1e-2;

/// The largest acceptable normalized mean squared error of an output that simulated rounding errors of size `rounding`
/// move by `moved`.
///
/// An operation that is wrong is off by far more than a hundred times the simulated rounding errors. Some outputs say nothing
/// about it: a sum of normalized values is zero up to rounding, and normalizing it again gives any sign. Where one rounding
/// error per node moves the result by a hundredth of its size, the tolerance grows to ten times that.
fn tolerance(moved: f64, rounding: f64) -> f64 {
    let usual = (1e4 * moved.max(rounding * rounding)).min(MAX_TOLERANCE);
    if moved > 1e-4 { usual.max(100.0 * moved) } else { usual }
}

impl RandomGraph {
    /// The graph of a seed: the same on every machine.
    ///
    /// # Errors
    /// The generator built an invalid graph, which is an error of its own.
    pub fn new(seed: u64) -> Result<RandomGraph, BuildError> {
        let g = GraphBuilder::new();
        let (inputs, indices, outputs, rounding) = {
            let mut generator = GraphGenerator::new(&g, seed);
            let outputs = generator.build();
            (generator.inputs, generator.indices, outputs, generator.rounding)
        };
        Ok(RandomGraph { graph: g.finish()?, inputs, indices, outputs, rounding })
    }

    /// The oracle's results, with tolerances.
    ///
    /// # Errors
    /// The oracle cannot evaluate the graph.
    pub fn expected(&self) -> Result<Vec<Expected>, OracleError> {
        let exact = self.evaluate(None)?;
        let mut moved = vec![0.0f64; exact.len()];
        // Two perturbations, since one may happen to move an output little.
        for seed in [1, 2] {
            for ((moved, exact), perturbed) in moved.iter_mut().zip(&exact).zip(self.evaluate(Some(seed))?) {
                *moved = moved.max(nmse(exact, perturbed.iter().copied()).0);
            }
        }
        let rows = self.outputs.iter().zip(exact).zip(moved);
        Ok(rows
            .map(|((name, values), moved)| Expected {
                name: name.clone(),
                values,
                tolerance: tolerance(moved, self.rounding),
            })
            .collect())
    }

    /// The oracle's results; with a seed, every input and every node's result is off by about one rounding error.
    fn evaluate(&self, perturbation: Option<u64>) -> Result<Vec<Vec<f64>>, OracleError> {
        let mut oracle = Oracle::new(&self.graph)?;
        for (name, values) in &self.indices {
            oracle.set_i32(name, values)?;
        }
        for (name, values) in &self.inputs {
            oracle.set_f32(name, values)?;
        }
        match perturbation {
            None => oracle.run()?,
            Some(seed) => {
                let mut rng = Rng::new(seed);
                oracle.run_disturbed(|values| {
                    // Relative to the largest element: sums and differences of rounded values keep their absolute
                    // errors.
                    let largest =
                        values.iter().filter(|v| v.is_finite()).fold(0.0f64, |most, v| most.max(v.abs()));
                    for value in values.iter_mut() {
                        *value += self.rounding * largest * rng.uniform(-1.0, 1.0);
                    }
                })?;
            }
        }
        self.outputs.iter().map(|name| oracle.read(name)).collect()
    }

    /// Computes the graph in a session of the scheduler's backends.
    ///
    /// # Errors
    /// Planning, loading or running failed.
    pub fn run(&self, scheduler: &Scheduler) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let mut session = scheduler.plan(&self.graph)?.session()?;
        for (name, values) in &self.inputs {
            session.set(name, values)?;
        }
        for (name, values) in &self.indices {
            session.set(name, values)?;
        }
        session.run(&[])?;
        self.outputs.iter().map(|name| session.read(name)).collect()
    }
}

/// Compares results with the oracle's.
///
/// # Errors
/// The first output that differs.
pub fn compare(expected: &[Expected], found: &[Vec<f32>]) -> Result<(), Difference> {
    for (expected, found) in expected.iter().zip(found) {
        let (error, index) = nmse(&expected.values, found.iter().map(|v| f64::from(*v)));
        if error.is_nan() || error > expected.tolerance || expected.values.len() != found.len() {
            return Err(Difference {
                name: expected.name.clone(),
                error,
                tolerance: expected.tolerance,
                index,
                found: found.get(index).copied().unwrap_or(f32::NAN).into(),
                expected: expected.values.get(index).copied().unwrap_or(f64::NAN),
            });
        }
    }
    Ok(())
}

/// The normalized mean squared error, and the element that differs most.
fn nmse(exact: &[f64], found: impl Iterator<Item = f64>) -> (f64, usize) {
    let (mut error, mut power, mut worst) = (0.0, 0.0, (0.0, 0));
    for (index, (want, have)) in exact.iter().zip(found).enumerate() {
        if !want.is_finite() || !have.is_finite() {
            if want.is_nan() && have.is_nan() || *want == have {
                continue;
            }
            return (f64::INFINITY, index);
        }
        let square = (want - have) * (want - have);
        error += square;
        power += want * want;
        if square > worst.0 {
            worst = (square, index);
        }
    }
    // Differences of values of size 1 may cancel: errors count as if the result had at least a tenth of that size.
    (error / power.max(exact.len() as f64 * 1e-2).max(f64::MIN_POSITIVE), worst.1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use quadriga_graph::{DType, Shape, Value};

    use super::*;

    /// A graph of one input, computed with f32's rounding errors.
    fn graph_of(
        shape: [usize; 2],
        values: Vec<f32>,
        build: impl for<'g> FnOnce(Value<'g>) -> Value<'g>,
    ) -> RandomGraph {
        let g = GraphBuilder::new();
        g.output("y", build(g.input("x", DType::F32, Shape::from(shape))));
        RandomGraph {
            graph: g.finish().unwrap(),
            inputs: vec![("x".to_owned(), values)],
            indices: Vec::new(),
            outputs: vec!["y".to_owned()],
            rounding: f64::from(f32::EPSILON) / 2.0,
        }
    }

    /// The exact result with the sign of one element changed.
    fn with_sign_changed(expected: &[Expected], at: usize) -> Vec<f32> {
        let mut found: Vec<f32> = expected[0].values.iter().map(|value| *value as f32).collect();
        found[at] = -found[at];
        found
    }

    #[test]
    fn signs_of_rounding_errors_are_not_judged() {
        // A sum of normalized values is zero up to rounding, and normalizing it again gives its sign.
        let values = (0..4 * 64).map(|i| ((i * 37 % 101) as f32) * 0.03 - 1.4).collect();
        let signs = graph_of([4, 64], values, |x| x.norm(1e-5).sum_rows().rms_norm(1e-30));
        let expected = signs.expected().unwrap();
        for row in 0..4 {
            compare(&expected, &[with_sign_changed(&expected, row)]).unwrap();
        }
    }

    #[test]
    fn one_sign_of_a_rounding_error_among_many_others_is_not_judged() {
        let rows = 46;
        let of = |cancels: bool| {
            let mut values: Vec<f32> = (0..rows * 64).map(|i| ((i * 37 % 101) as f32) * 0.01 + 0.1).collect();
            if cancels {
                // 0.1 + 0.2 - 0.3, which is zero but for the rounding of these numbers.
                values[..64].fill(0.0);
                values[..3].copy_from_slice(&[0.1, 0.2, -0.3]);
            }
            graph_of([rows, 64], values, |x| x.sum_rows().rms_norm(1e-30))
        };
        let expected = of(true).expected().unwrap();
        compare(&expected, &[with_sign_changed(&expected, 0)]).unwrap();
        // Without it, a wrong sign is an error.
        let expected = of(false).expected().unwrap();
        assert!(expected[0].tolerance <= MAX_TOLERANCE, "{}", expected[0].tolerance);
        compare(&expected, &[with_sign_changed(&expected, 0)]).unwrap_err();
    }
}
