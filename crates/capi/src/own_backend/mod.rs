//! Backends of the caller's own: a table of C functions as a [`Backend`](quadriga::runtime::Backend).
//!
//! `table` has the functions as the caller gives them, `node` what they are told about a node, `device` the backend with its
//! buffers, programs and queues.

mod create;
mod device;
mod node;
mod table;

pub use create::*;
pub use node::*;
pub use table::*;
