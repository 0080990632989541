//! Quadriga as a C library. The header `include/quadriga.h`, which is generated from these sources, is its documentation.
//!
//! | part | modules |
//! |---|---|
//! | the boundary | `status` (errors), `handle` (numbers that stand for objects), `process` (forks), `guard` (no panic leaves), `arguments` |
//! | text | `model`, `request`, `generator`, `kv_cache`, `service`, `embedder` |
//! | graphs | `builder`, `ops_*`, `gguf`, `graph`, `custom` |
//! | running | `backend`, `buffer`, `allocator`, `scheduler`, `plan`, `session`, `session_state`, `session_overlap`, `observe`, `conformance` |
//! | own backends | `own_backend` |
//!
//! ```
//! assert_eq!(quadriga_c::qd_abi_version(), quadriga_c::QD_ABI_VERSION);
//! ```

#![allow(non_camel_case_types, reason = "these are the names of the C interface")]
#![allow(clippy::missing_safety_doc, reason = "the header says once what pointers must be")]
#![allow(clippy::type_complexity, reason = "types of C functions are written out where the header has them")]
#![allow(clippy::too_many_arguments, reason = "C has no other way to return a size and an error")]

mod allocator;
mod answer;
mod arguments;
mod backend;
mod buffer;
mod builder;
mod callbacks;
mod conformance;
mod custom;
mod dtype;
mod embedder;
mod engine_params;
mod generator;
mod gguf;
mod graph;
mod guard;
mod handle;
mod kv_cache;
mod model;
mod model_source;
mod observe;
mod ops_attention;
mod ops_conv;
mod ops_elementwise;
mod ops_layout;
mod ops_matrix;
mod own_backend;
mod plan;
mod process;
mod request;
mod scheduler;
mod service;
mod session;
mod session_overlap;
mod session_state;
mod status;
mod tensor;
mod version;

pub use allocator::*;
pub use answer::*;
pub use backend::*;
pub use buffer::*;
pub use builder::*;
pub use conformance::*;
pub use custom::*;
pub use dtype::*;
pub use embedder::*;
pub use engine_params::*;
pub use generator::*;
pub use gguf::*;
pub use graph::*;
pub use kv_cache::*;
pub use model::*;
pub use observe::*;
pub use ops_attention::*;
pub use ops_conv::*;
pub use ops_elementwise::*;
pub use ops_layout::*;
pub use ops_matrix::*;
pub use own_backend::*;
pub use plan::*;
pub use request::*;
pub use scheduler::*;
pub use service::*;
pub use session::*;
pub use session_overlap::*;
pub use session_state::*;
pub use status::*;
pub use tensor::*;
pub use version::*;
