//! Packing: where does each storage go, when all sizes and lifetimes are known?
//!
//! Picture every storage as a rectangle: its lifetime runs along one axis, its bytes along the other. The lifetimes are
//! given, so a rectangle can only slide up and down in address; no two may overlap, and the pile is to be as low as
//! possible. The most bytes alive at one moment are a lower bound that is often, but not always, reached. Finding the
//! lowest pile is NP-hard; finding a good one is not:
//!
//! - [`Effort::Fast`] tries the free list in time order and a few greedy orders, and stops at the lower bound.
//! - [`Effort::Search`] goes on from there with a seeded search.
//! - [`Effort::Exact`] goes on with branch and bound until the peak is proved optimal.
//!
//! More effort never gives a worse peak, and no effort one that is worse than the free list's. [`check()`] judges any
//! packing, and shares no code with what makes them.
//!
//! ```
//! use quadriga_runtime::memory::packing::{Effort, PackingItem, PackingProblem, pack};
//! let problem = PackingProblem::new(vec![
//!     PackingItem { size: 4, start: 0, end: 2 },
//!     PackingItem { size: 8, start: 1, end: 3 },
//!     PackingItem { size: 4, start: 2, end: 4 },
//! ]);
//! let packing = pack(&problem, Effort::Fast)?;
//! assert_eq!((packing.peak, packing.lower_bound), (12, 12));
//! # Ok::<(), quadriga_runtime::memory::packing::PackingError>(())
//! ```

mod check;
mod chunks;
mod conflicts;
mod csv;
mod exact;
mod fast;
mod greedy;
mod packer;
mod problem;
mod search;
mod sorting;
mod time_order;
mod timeline;
mod walls;

pub use check::{PackingViolation, check};
pub use csv::{CsvError, parse_csv};
pub use packer::{Packer, pack};
pub use problem::{Effort, Packing, PackingError, PackingItem, PackingProblem, Placement, Strategy};
