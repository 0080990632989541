//! Memory that is mapped but not resident: the system counts it as free until it is touched.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The mappings of this process, by address, with their sizes.
static MAPPINGS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// All that are noted now.
pub(crate) fn mappings() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes a mapping.
pub(crate) fn add(pointer: NonNull<u8>, bytes: usize) {
    mappings().insert(pointer.as_ptr().addr(), bytes);
}

/// Forgets a mapping. It is to be unmapped afterwards only: [`bytes`] looks at all that are noted.
pub(crate) fn remove(pointer: NonNull<u8>) {
    mappings().remove(&pointer.as_ptr().addr());
}

/// Bytes of all mappings that are not resident.
pub(crate) fn bytes() -> u64 {
    mappings().iter().map(|(address, bytes)| (bytes - resident(*address, *bytes)) as u64).sum()
}

/// Resident bytes of a mapping; all of them where the system does not tell.
#[cfg(target_os = "linux")]
pub(crate) fn resident(address: usize, bytes: usize) -> usize {
    const CHUNK: usize = 64 << 20;
    // SAFETY: it only reads a constant of the system.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096).max(1);
    let mut states = vec![0_u8; CHUNK.min(bytes).div_ceil(page)];
    let mut found = 0;
    for first in (0..bytes).step_by(CHUNK) {
        let length = CHUNK.min(bytes - first);
        let start = std::ptr::without_provenance_mut(address + first);
        // SAFETY: `states` has a byte for each page of `length` bytes; the call reads and writes nothing else.
        if unsafe { libc::mincore(start, length, states.as_mut_ptr()) } != 0 {
            return bytes;
        }
        let pages = states.iter().take(length.div_ceil(page));
        found += pages.filter(|state| **state & 1 == 1).count() * page;
    }
    found.min(bytes)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn resident(_: usize, bytes: usize) -> usize {
    bytes
}
