//! The exact oracle, and one suite of operation cases that every backend must pass.

mod rng;

pub use rng::Rng;
