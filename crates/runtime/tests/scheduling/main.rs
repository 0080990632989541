//! Scheduling graphs on several devices, and running them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod assignment;
mod barriers;
mod bindings;
mod common;
mod copies;
mod dependencies;
mod experts;
mod explanation;
mod faults;
#[path = "../common/hostile_memory.rs"]
mod hostile_memory;
mod identical;
mod in_place;
#[path = "../common/in_place_operations.rs"]
mod in_place_operations;
mod large;
mod misbehaving;
mod observing;
mod overlap;
mod overlapping_inputs;
mod pipelining;
mod places;
mod ranks;
mod recorded;
mod running;
mod splitting;
mod staging;
mod states;
mod streaming;
mod switching;
mod traits;
mod uploads;
mod values;
mod weights;
mod wrong_plans;
