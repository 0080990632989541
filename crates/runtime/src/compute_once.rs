//! One run of some nodes, outside of sessions.

use crate::{Backend, BackendError, Region, SplitSource, Usage};

/// Compiles and runs nodes once and waits for them, without a session. Scratch memory that the nodes need and the split
/// lacks is allocated for the run.
pub fn compute_once(backend: &dyn Backend, split: &SplitSource<'_>) -> Result<(), BackendError> {
    let SplitSource { graph, nodes, place, kept, ref scratch, ranks } = *split;
    let needed = backend.scratch_bytes(graph, nodes);
    let scratch = match scratch {
        Some(scratch) if scratch.bytes >= needed => Some(scratch.clone()),
        _ if needed == 0 => None,
        _ => Some(Region::new(backend.allocate(needed, Usage::Compute)?, 0, needed)?),
    };
    let mut program = backend.compile(&SplitSource { graph, nodes, place, kept, scratch, ranks })?;
    let mut queue = backend.queue()?;
    queue.run(&mut *program)?;
    queue.synchronize()
}
