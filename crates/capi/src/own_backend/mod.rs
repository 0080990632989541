//! Backends of the caller's own: a table of C functions as a [`Backend`](quadriga::runtime::Backend).
//!
//! `table` has the functions as the caller gives them, `shared` as they were checked, `node` what they are told about a node, and `device`
//! is the backend, with its buffers (`memory`), programs, and queues: those that do everything at once (`queue`), and those of
//! the caller's device that go on working (`async_queue`).

mod async_queue;
mod create;
mod device;
mod memory;
mod node;
mod program;
mod queue;
mod shared;
mod table;

pub use create::*;
pub use node::*;
pub use table::*;
