//! Runs one tensor graph on several processors at once.

pub mod fetch;
pub mod plan_instance;
