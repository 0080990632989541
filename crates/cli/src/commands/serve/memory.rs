//! Whether a model fits into memory, and memory that the allocator keeps for later.

use std::sync::Arc;

use quadriga_runtime::{Backend, Plan};
use quadriga_server::{MemoryDemand, MemoryShortage, memory_shortages};

use crate::size;

/// Whether the only model that is served fits; with its KV cache, if the user chose the sizes.
///
/// # Errors
/// Which device has too little memory, and the options that need less.
pub(super) fn check_fit(plan: &Plan, backends: &[Arc<dyn Backend>], chosen: bool) -> Result<(), String> {
    let demand = if chosen { MemoryDemand::Whole } else { MemoryDemand::WithoutStates };
    match memory_shortages(plan, backends, demand).first() {
        None => Ok(()),
        Some(MemoryShortage { backend, needed, available }) => Err(format!(
            "the model does not fit: {backend} needs {}, but only {} are free; a smaller KV cache (--kv-tokens) or context (-c), or fewer \
             requests at once (--parallel) need less",
            size::text(*needed),
            size::text(*available)
        )),
    }
}

/// Has all threads allocate from one arena, from which [`release`] gives everything back that is free. By default glibc makes one for
/// each thread, up to eight a core, and keeps what lies at the end of all but the first for ever: 40 MB after some storms of requests.
/// Small blocks come from caches of each thread, so that threads hardly wait for each other. To be called before there are others.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) fn use_one_arena() {
    // SAFETY: it changes a number that is read when an arena is made.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Other allocators have no arenas of this kind.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn use_one_arena() {}

/// Gives memory back to the system that nothing uses. The allocator of glibc keeps what lies between blocks in use: after a time with
/// many requests that is most of what they needed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(super) fn release() {
    // SAFETY: it may be called at any time from any thread, and touches nothing that is in use.
    unsafe { libc::malloc_trim(0) };
}

/// Other allocators give memory back by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(super) fn release() {}
