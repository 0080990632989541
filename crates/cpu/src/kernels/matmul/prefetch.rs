//! Software prefetching: packed weights that are about to be read, output rows that are about to be written.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use super::Task;
use super::format::GROUP;

/// Prefetch distance of the L1 cache, in bytes.
const L1_DISTANCE: usize = 2560;

/// Prefetch distance of the L2 cache, in bytes: so far that a core always has as many memory requests in flight as it
/// can (about 48 lines), also while it waits for one of them.
const L2_DISTANCE: usize = 8192;

/// Prefetches the beginning of bytes that a thread is about to read front to back.
pub(super) fn first(bytes: &[u8]) {
    for line in (0..bytes.len().min(L2_DISTANCE)).step_by(64) {
        // SAFETY: a hint, which never faults, of an instruction that every x86-64 CPU has.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().wrapping_add(line).cast()) };
    }
}

/// Prefetches as many bytes as are about to be read at an address, the prefetch distances ahead of it. The hardware
/// prefetcher alone is too late, and stops at the end of a page.
#[inline(always)]
pub(super) fn stream(at: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        // SAFETY: as above.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(L2_DISTANCE + 64 * line).cast());
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(L1_DISTANCE + 64 * line).cast());
        }
    }
}

/// Prefetches bytes that are read after all those of the current panels of columns.
#[inline(always)]
pub(super) fn ahead(at: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(64 * line).cast()) };
    }
}

/// Prefetches, for writing, the output of two groups and some rows.
#[inline]
pub(super) fn output(task: &Task<'_>, group: usize, rows: Range<usize>) {
    for out in rows.filter_map(|row| task.output.row(row)) {
        for column in [group * GROUP, group * GROUP + GROUP] {
            let place = out.wrapping_add(column);
            // SAFETY: a hint, which never faults; a CPU without it does nothing.
            unsafe { asm!("prefetchw [{0}]", in(reg) place, options(nostack, readonly, preserves_flags)) };
        }
    }
}
