//! Memory that the allocator keeps for later.

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
