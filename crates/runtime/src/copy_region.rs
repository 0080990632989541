//! Copies of tensors between backends, outside of sessions.

use crate::{Backend, BackendError, Region};

/// How bytes got from one place to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyRoute {
    /// Both places are the same: there was nothing to do.
    Same,
    /// The target's backend copied them.
    Pulled,
    /// The source's backend copied them.
    Pushed,
    /// Both copied them, to and from staging memory.
    Staged,
    /// The host read and wrote them.
    Host,
}

/// Copies the bytes of a tensor to another place of equal size and layout, on the same backend or another one, and waits
/// for the end. The target's backend copies them if it can reach both places, else the source's, else they go through
/// staging memory or the host. A copy to itself does nothing.
///
/// No command in flight may use either place. [`Session::tensor`](crate::Session::tensor) has the place of a session's
/// tensor.
///
/// ```
/// use quadriga_runtime::{Backend, CopyRoute, Region, Usage, copy_region};
///
/// let cpu = quadriga_cpu::Backend::new()?;
/// let device = quadriga_sim::Sim::new("sim:0").build();
/// let from = Region::new(cpu.allocate(64, Usage::Compute)?, 0, 64)?;
/// let to = Region::new(device.allocate(64, Usage::Compute)?, 0, 64)?;
/// from.buffer.write(0, &[7; 64])?;
/// assert_eq!(copy_region((&cpu, &from), (&*device, &to))?, CopyRoute::Pulled);
/// let mut bytes = [0; 64];
/// to.buffer.read(0, &mut bytes)?;
/// assert_eq!(bytes, [7; 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The sizes differ, the two places overlap without being the same, or a device fails.
pub fn copy_region(
    (source, from): (&dyn Backend, &Region),
    (target, to): (&dyn Backend, &Region),
) -> Result<CopyRoute, BackendError> {
    if from.bytes != to.bytes {
        let backend = target.name().to_owned();
        return Err(BackendError::SizeMismatch { backend, from: from.bytes, to: to.bytes });
    }
    if std::ptr::addr_eq(&raw const *from.buffer, &raw const *to.buffer) {
        if from.offset == to.offset {
            return Ok(CopyRoute::Same);
        }
        if from.offset.abs_diff(to.offset) < from.bytes {
            return Err(BackendError::Failed {
                backend: target.name().to_owned(),
                what: "copying a tensor",
                reason: "the two places overlap".to_owned(),
            });
        }
    }
    let mut pull = target.queue()?;
    if pull.copy(from, to)? {
        return pull.synchronize().map(|()| CopyRoute::Pulled);
    }
    let mut push = source.queue()?;
    if push.copy(from, to)? {
        return push.synchronize().map(|()| CopyRoute::Pushed);
    }
    let staging = Region::new(source.staging(from.bytes)?, 0, from.bytes)?;
    if push.copy(from, &staging)? {
        push.synchronize()?;
        if pull.copy(&staging, to)? {
            return pull.synchronize().map(|()| CopyRoute::Staged);
        }
    }
    let mut bytes = vec![0; from.bytes];
    push.read(from, &mut bytes)?;
    pull.write(to, &bytes)?;
    pull.synchronize().map(|()| CopyRoute::Host)
}
