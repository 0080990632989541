//! The end of a process in which a thread does not come back.

/// Ends this process at once: nothing is flushed, and no handler of a library runs, which could wait for other ranks. For use where
/// MPI does not return.
pub fn end_process(code: i32) -> ! {
    // SAFETY: the call takes any number, and does not return.
    unsafe { libc::_exit(code) }
}
