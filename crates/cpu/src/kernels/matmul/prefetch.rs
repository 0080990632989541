//! Asking for memory before it is used: packed weights to be read, places of results to be written.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use super::Task;
use super::format::GROUP;

/// How far ahead the first-level cache is asked to load, in bytes.
const NEAR: usize = 2560;

/// How far ahead the second-level cache is: so far that memory always has as many requests as a core can have on the
/// way (about 48 lines), also while the core waits for one of them.
const FAR: usize = 8192;

/// Asks for the first of the bytes that a thread is about to read front to back.
pub(super) fn first(bytes: &[u8]) {
    for line in (0..bytes.len().min(FAR)).step_by(64) {
        // SAFETY: a hint, which never faults, of an instruction that every x86-64 CPU has.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().wrapping_add(line).cast()) };
    }
}

/// Asks for as many bytes as are about to be read at an address, further on. Left alone, the hardware asks too late,
/// and not at all past the end of a page.
#[inline(always)]
pub(super) fn stream(at: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        // SAFETY: as above.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(FAR + 64 * line).cast());
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(NEAR + 64 * line).cast());
        }
    }
}

/// Asks for the places of the results of two groups and some rows, which are about to be written.
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
