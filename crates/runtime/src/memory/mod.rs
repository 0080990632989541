//! Memory: which bytes every tensor gets, and for how long.
//!
//! - [`FreeList`] answers one request at a time, the way the original allocator did; the planner's baseline.
//! - [`packing`] places all storages of a graph at once, knowing all lifetimes.

mod free_blocks;
mod free_list;
mod ordered_set;
pub mod packing;

pub use free_list::{FreeList, FreeListError, Live, Region};
