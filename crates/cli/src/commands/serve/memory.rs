//! Whether a model fits into memory, and memory that the allocator keeps for later.

use std::sync::Arc;

use quadriga_runtime::{Backend, DeviceKind, Plan};

use crate::size;

/// Whether the only model that is served fits; with its KV cache, if the user chose the sizes.
///
/// # Errors
/// Which device has too little memory, and the options that need less.
pub(super) fn check_fit(plan: &Plan, backends: &[Arc<dyn Backend>], chosen: bool) -> Result<(), String> {
    for (bytes, backend) in plan.bytes().iter().zip(backends) {
        let device = backend.device();
        let Some(free) = device.free_bytes else { continue };
        // What nobody chose may use the swap space.
        let swap = if chosen || device.kind != DeviceKind::Cpu { 0 } else { free_swap() };
        let needed = if chosen { bytes.total() } else { bytes.total().saturating_sub(bytes.state) };
        if needed > free.saturating_add(swap) {
            return Err(format!(
                "the model does not fit: {} needs {}, but only {} are free; a smaller KV cache (--kv-tokens) or context (-c), or fewer \
                 requests at once (--parallel) need less",
                backend.name(),
                size::text(needed),
                size::text(free)
            ));
        }
    }
    Ok(())
}

/// Free bytes of the swap space, as far as the system tells.
fn free_swap() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0).saturating_mul(1024)
}

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
