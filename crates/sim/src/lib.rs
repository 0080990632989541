//! A simulated device for tests and for planning: a backend with its own memory, command queues, latencies, memory
//! limits and injectable faults, all in software. It computes with the f64 oracle of `quadriga-conformance`, so its
//! results are correct.
//!
//! In debug builds every access to its memory is checked to be ordered after the accesses it conflicts with, whatever
//! the timing (see [`SimSettings::check_order`]).
//!
//! Tests use it to exercise everything that happens between devices (copies, scheduling, memory limits, lost devices)
//! on a machine with only a CPU.
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::Scheduler;
//! use quadriga_sim::Sim;
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [4]);
//! g.output("y", x.sqr());
//! let graph = g.finish()?;
//!
//! let sim = Sim::new("sim:0").alignment(256).build();
//! let mut session = Scheduler::new(sim).plan(&graph)?.session()?;
//! session.run(&[("x", &[1.0f32, 2.0, 3.0, 4.0])])?;
//! assert_eq!(session.read::<f32>("y")?, [1.0, 4.0, 9.0, 16.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod device;
mod event;
mod faults;
mod inner;
mod memory;
mod order;
mod program;
mod queue;
mod settings;
mod slices;

/// The family of backends in [`CustomKernel::backend_code`](quadriga_graph::CustomKernel::backend_code): the code is a
/// [`CustomOp`](quadriga_graph::CustomOp), whose code for the CPU a simulated device runs.
pub const FAMILY: &str = "sim";

pub use device::Sim;
pub use faults::{FaultCounts, FaultPoint};
pub use settings::{Clock, SimSettings};
