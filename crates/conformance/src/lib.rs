//! Tests that a backend computes every operation correctly: a reference evaluator in f64 (the oracle), and a suite of
//! more than 21,000 cases that compares a backend's results with it.
//!
//! [`Oracle`] evaluates any graph, [`compute_node`] one node on plain bytes. [`Suite`] lists the cases, a [`Target`]
//! computes them ([`BackendTarget`] on one backend, in guarded memory), and [`run_cases`] compares the results.
//! Cases of collectives have a graph for each rank, which are threads ([`on_rank_threads`]); [`RankOracle`] evaluates them together.
//! [`RandomGraph`] generates graphs for differential tests.
//!
//! ```
//! use quadriga_conformance::{RoundingOracle, Suite, run_cases};
//!
//! let suite = Suite::new();
//! let sample = suite.sample(50, 1);
//! let report = run_cases(sample.into_iter().filter_map(|i| suite.case(i)), &mut RoundingOracle);
//! assert!(report.is_clean(), "{report}");
//! ```
//!
//! ```
//! use quadriga_conformance::Oracle;
//! use quadriga_graph::{DType, GraphBuilder};
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [2, 2]);
//! g.output("y", x.soft_max(1.0, None, None));
//! let graph = g.finish()?;
//!
//! let mut oracle = Oracle::new(&graph)?;
//! oracle.set_f32("x", &[0.0, 0.0, 5.0, 5.0])?;
//! oracle.run()?;
//! assert_eq!(oracle.read("y")?, [0.5; 4]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod backend_target;
mod cases;
mod custom_cases;
mod fixture;
mod judge;
mod oracle;
mod random_graph;
mod ranks;
mod rng;
mod rounding_oracle;
mod runner;

pub use backend_target::{BackendTarget, computes_in_place};
pub use cases::{BrokenCase, CASE_GROUP, Case, CaseGraph, RankPart, Suite};
pub use custom_cases::custom_cases;
pub use fixture::Fixture;
pub use judge::{Mismatch, Tolerance, judge};
pub use oracle::{EvalError, Oracle, OracleError, RankOracle, compute_custom_node, compute_node};
pub use random_graph::{Difference, Expected, RandomGraph, compare};
pub use ranks::on_rank_threads;
pub use rng::Rng;
pub use rounding_oracle::RoundingOracle;
pub use runner::{CaseOutcome, OperationTotals, Outputs, Report, Target, TargetError, check, run_cases};
