//! A session: memory, compiled splits and queues for the plans of one model, and the running of them.
//!
//! [`session`] has the type that users see; it composes the rest. [`plan_cache`] holds the prepared plans, finds them
//! by key or fingerprint, and drops those that were not used for long ([`plan_limits`], [`forget`]); [`memory`] has weights, states and arenas, and [`places`] tells from them where each tensor of
//! a plan is; [`compile`] turns splits into programs. In a run, [`inputs`] copies the caller's bytes into the arena,
//! [`issue`] starts it, [`execute`] issues copies ([`transfer`]) and splits in the plan's order to the queues of each [`lane`], and
//! [`outputs`] reads results back, [`pending_read`] while the next run is in flight. [`debug`] times runs, [`observe`] shows
//! intermediate results, [`failure`] recovers from failed runs.
//! [`convert`] converts `f32` values, [`interface`] lists inputs and outputs. Between runs, [`state_access`] reads and writes states, and [`snapshot`] saves and restores all of them.

mod arena;
mod binding_table;
mod bindings;
mod checksum;
mod clock;
mod compile;
mod convert;
mod debug;
mod element;
mod execute;
mod failure;
mod forget;
mod inputs;
mod interface;
mod issue;
mod lane;
mod memory;
mod observe;
mod outputs;
mod pending_read;
mod places;
mod plan_bytes;
mod plan_cache;
mod plan_key;
mod plan_limits;
mod prepared;
mod selected;
#[expect(clippy::module_inception, reason = "the type that the folder is named after")]
mod session;
mod slice_uploads;
mod snapshot;
mod state;
mod state_access;
mod tensor;
mod tensor_ref;
mod transfer;
mod upload;

pub use debug::SessionDebug;
pub use element::{Element, Values};
pub use interface::TensorInfo;
pub use memory::SessionMemory;
pub use observe::{Observed, ObservedRun, Observer};
pub use pending_read::PendingRead;
pub use plan_key::{ModelId, PlanKey};
pub use plan_limits::{PlanLimits, PlanUsage};
pub use session::Session;
pub use slice_uploads::{DEFAULT_UPLOAD_BYTES, SliceUpload, WeightSlice};
pub use state_access::StateInfo;
pub use tensor::SessionTensor;
pub use tensor_ref::TensorRef;
