//! Graphs of the user's own: built, planned, run and inspected from Python.

pub(crate) mod array;
pub(crate) mod builder;
pub(crate) mod custom;
mod observer;
mod operation;
pub(crate) mod plan;
pub(crate) mod session;
