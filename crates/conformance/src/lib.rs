//! The exact oracle, and one suite of operation cases that every backend must pass.
//!
//! [`Oracle`] evaluates any graph in f64, slowly and obviously; [`compute_node`] does the same for one node on
//! plain bytes.
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

mod oracle;
mod rng;

pub use oracle::{Fault, Oracle, OracleError, compute_node};
pub use rng::Rng;
