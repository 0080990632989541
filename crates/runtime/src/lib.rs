//! Where and when: backends, buffers, memory planning, scheduling and sessions.

pub mod memory;
