//! Attention of many queries with AMX tiles.

use super::{Attention, Shape};
use crate::isa::Amx;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// Whether tiles are worth it.
pub(super) fn suits(_shape: &Shape) -> bool {
    false
}

/// Bytes of scratch memory for one thread, and of keys and values as tiles.
pub(super) fn bytes(_shape: &Shape) -> Option<[usize; 2]> {
    Some([0, 0])
}

/// Computes.
pub(super) fn run(
    _token: Amx,
    _attention: &Attention<'_>,
    _worker: &Worker<'_>,
    _scratch: *mut u8,
    _tiles: *mut u8,
) -> Result<(), KernelError> {
    Ok(())
}
