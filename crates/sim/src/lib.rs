//! A device that exists only in software: memory of its own that the host reaches only through the backend traits, command
//! queues on threads of their own, latencies, limits and faults. It computes with the exact oracle, so results are real.
//!
//! It serves tests of everything that happens between devices, and people without a second device.
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
//! let mut session = Scheduler::new([sim]).plan(&graph)?.session()?;
//! session.run(&[("x", &[1.0f32, 2.0, 3.0, 4.0])])?;
//! assert_eq!(session.read::<f32>("y")?, [1.0, 4.0, 9.0, 16.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod device;
mod event;
mod faults;
mod memory;
mod program;
mod queue;
mod settings;

pub use device::Sim;
pub use faults::{Counts, What};
pub use settings::{Clock, Settings};
