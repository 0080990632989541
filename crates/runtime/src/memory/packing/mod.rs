//! Packing: an offset for each storage, when all sizes and lifetimes are known.
//!
//! This is offline *dynamic storage allocation* (DSA). Every storage is a rectangle, its lifetime along one axis and
//! its bytes along the other. Lifetimes are fixed, so only addresses are chosen; rectangles must not overlap, and the
//! highest address is to be minimized. The peak of live bytes is a lower bound that is often reached. The problem is
//! NP-hard, so the caller chooses the effort:
//!
//! - [`Effort::Fast`] tries several greedy orders and best fit in time order, and stops at the lower bound.
//! - [`Effort::Search`] continues with branch and bound for a limited number of steps; in large problems only the items
//!   live near the peak are packed by branch and bound.
//! - [`Effort::Exact`] continues until the peak is proved optimal.
//!
//! More effort never gives a higher peak, and no effort gives a higher one than best fit in time order, which is what
//! ggml's allocator does. [`check()`] verifies any packing and shares no code with the packer.
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

mod boundaries;
mod check;
mod chunked_time_order;
mod conflicts;
mod core_search;
mod csv;
mod exact;
mod fast;
mod greedy;
mod offset_order;
mod packer;
mod problem;
mod radix_sort;
mod range_maximum;
mod search;
#[cfg(test)]
mod tests;
mod time_order;
mod timeline;

pub use check::{PackingViolation, check};
pub use csv::{CsvError, parse_csv};
pub use packer::{Packer, pack};
pub use problem::{Effort, PackedOffset, Packing, PackingError, PackingItem, PackingProblem, Strategy};
