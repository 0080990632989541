//! Software prefetching of rows that are about to be read.

use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Prefetches so many bytes at an address, which need not be valid, into the L2 cache.
pub(crate) fn prefetch(isa: Isa, at: *const u8, bytes: usize) {
    #[inline(always)]
    unsafe fn body<S: Simd>(at: *const u8, bytes: usize) {
        // From the first line, wherever in it the bytes begin, to the last.
        let lines = (at.addr() % 64 + bytes).div_ceil(64);
        for line in 0..lines {
            // SAFETY: a hint, which never faults.
            unsafe { S::prefetch(at.wrapping_add(64 * line)) };
        }
    }
    dispatch!(isa, body(at: *const u8, bytes: usize) -> ())
}
