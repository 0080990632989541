//! Where and when: backends, buffers, memory planning, scheduling and sessions.

#![forbid(unsafe_code)]

mod backend;
mod error;
pub mod memory;

pub use backend::{
    Backend, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Place, Program, Queue, Refusal, Region,
    SplitSource, Usage, WeightLayout, check_range, compute_once,
};
pub use error::BackendError;
