//! Weights: in which layout each backend holds them, how many bytes that takes, and where they are.
//!
//! Scheduling asks [`layout`] for layouts and bytes before anything is allocated; a session asks its [`SessionWeights`]
//! for places. Neither is known here: a caller says which weights are read where with [`WeightRead`]s.
//!
//! A weight is resident on a backend in one of three ways: *packed* or plain in a buffer of the backend, *mapped* (the
//! backend reads the bytes of the file), or *streamed*: every run copies it from its [`streaming_source()`].

mod layout;
mod resident;
mod session_weights;
mod store;
mod streaming_source;
mod uses;

pub(crate) use layout::{WeightRead, bytes_on, fitting, residency};
pub(crate) use resident::{PlanWeights, ResidentWeight, unset};
pub use session_weights::Progress;
pub(crate) use session_weights::SessionWeights;
pub(crate) use store::{WeightStore, same_bytes};
pub(crate) use streaming_source::streaming_source;
pub(crate) use uses::WeightUses;
