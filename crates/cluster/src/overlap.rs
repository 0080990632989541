//! Work beside an operation that has begun.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::ClusterError;

/// Does work, then finishes an operation that has begun before, also if the work panics: other ranks have this one's part already, and
/// the next operation would take its place.
pub(crate) fn during(
    work: &mut dyn FnMut(),
    finish: impl FnOnce() -> Result<(), ClusterError>,
) -> Result<(), ClusterError> {
    let worked = catch_unwind(AssertUnwindSafe(work));
    let finished = finish();
    match worked {
        Ok(()) => finished,
        Err(panic) => resume_unwind(panic),
    }
}
