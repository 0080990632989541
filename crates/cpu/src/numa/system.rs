//! The system calls behind NUMA binding: CPUs of threads, nodes of pages.

use std::ops::Range;

/// The CPUs that this thread may run on; empty where the system does not tell.
#[cfg(target_os = "linux")]
pub(crate) fn allowed_cpus() -> Vec<usize> {
    // SAFETY: an empty set is a value of the type; the call writes a set of the size that it is given.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) {
            0 => set,
            _ => return Vec::new(),
        }
    };
    // SAFETY: the numbers are below the size of a set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// The CPU that this thread runs on at the moment.
#[cfg(target_os = "linux")]
pub(crate) fn current_cpu() -> usize {
    // SAFETY: the call takes and changes nothing.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

#[cfg(all(target_os = "linux", not(loom)))]
fn set_of(cpus: &[usize]) -> libc::cpu_set_t {
    // SAFETY: an empty set is a value of the type; the numbers are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter()
            .filter(|cpu| **cpu < libc::CPU_SETSIZE as usize)
            .for_each(|cpu| libc::CPU_SET(*cpu, &mut set));
        set
    }
}

/// Binds this thread to CPUs.
#[cfg(all(target_os = "linux", not(loom)))]
pub(crate) fn bind_this_thread(cpus: &[usize]) -> std::io::Result<()> {
    let set = set_of(cpus);
    // SAFETY: the call reads a set of the size that it is given.
    match unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Binds another thread, which is not joined yet, to CPUs.
#[cfg(all(target_os = "linux", not(loom)))]
pub(crate) fn bind_thread<T>(thread: &std::thread::JoinHandle<T>, cpus: &[usize]) -> std::io::Result<()> {
    use std::os::unix::thread::JoinHandleExt;
    let set = set_of(cpus);
    // SAFETY: the handle exists, so the thread has not been joined; the call reads a set of the size that it is given.
    let code = unsafe {
        libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if code == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(code)) }
}

/// How pages are divided among nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PagePolicy {
    /// On one node, as long as it has memory.
    Preferred,
    /// In turns on all of them.
    Interleaved,
}

/// Asks the system for pages of some nodes in a range of addresses that starts and ends at pages. `false` if it refuses:
/// the pages are then where they are first written.
#[cfg(target_os = "linux")]
pub(crate) fn bind_pages(pages: Range<usize>, nodes: &[usize], policy: PagePolicy) -> bool {
    const BITS: usize = 1024;
    const MOVE: libc::c_long = 1 << 1;
    let mut mask = [0_u64; BITS / 64];
    for node in nodes {
        match mask.get_mut(node / 64) {
            Some(word) => *word |= 1 << (node % 64),
            None => return false,
        }
    }
    let policy: libc::c_long = match policy {
        PagePolicy::Preferred => 1,
        PagePolicy::Interleaved => 3,
    };
    // SAFETY: the call reads the mask and decides where pages are in physical memory; it changes no contents, and refuses
    // addresses without memory.
    let code = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            pages.start,
            pages.len(),
            policy,
            mask.as_ptr(),
            BITS as libc::c_long,
            MOVE,
        )
    };
    code == 0
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use super::{PagePolicy, Range};

    pub(crate) fn allowed_cpus() -> Vec<usize> {
        Vec::new()
    }

    pub(crate) fn current_cpu() -> usize {
        0
    }

    pub(crate) fn bind_this_thread(_cpus: &[usize]) -> std::io::Result<()> {
        Ok(())
    }

    pub(crate) fn bind_thread<T>(_: &std::thread::JoinHandle<T>, _cpus: &[usize]) -> std::io::Result<()> {
        Ok(())
    }

    pub(crate) fn bind_pages(_pages: Range<usize>, _nodes: &[usize], _policy: PagePolicy) -> bool {
        false
    }
}
#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::*;
