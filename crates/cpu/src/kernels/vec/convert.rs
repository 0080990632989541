//! Conversion of rows of other types to `f32`, and of `f32` to `f16`.

use half::{bf16, f16};
use quadriga_graph::DType;

use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// A 16-bit element type.
#[derive(Clone, Copy)]
enum ConvertKind {
    F16,
    Bf16,
}

/// `out[i] = x[i]`, for as many elements as the shorter slice has; exact.
pub fn f16_to_f32(isa: Isa, x: &[f16], out: &mut [f32]) {
    // SAFETY: both slices hold that many elements.
    unsafe { widen_raw(isa, ConvertKind::F16, x.as_ptr().cast(), out.as_mut_ptr(), x.len().min(out.len())) }
}

/// `out[i] = x[i]`, for as many elements as the shorter slice has; exact.
pub fn bf16_to_f32(isa: Isa, x: &[bf16], out: &mut [f32]) {
    // SAFETY: both slices hold that many elements.
    unsafe { widen_raw(isa, ConvertKind::Bf16, x.as_ptr().cast(), out.as_mut_ptr(), x.len().min(out.len())) }
}

/// `out[i] = x[i]`, rounded to the nearest, for as many elements as the shorter slice has.
pub fn f32_to_f16(isa: Isa, x: &[f32], out: &mut [f16]) {
    #[inline(always)]
    unsafe fn body<S: Simd>(x: *const f32, out: *mut u16, count: usize) {
        let whole = count - count % S::N;
        // SAFETY: promised by the caller.
        unsafe {
            for i in (0..whole).step_by(S::N) {
                S::store_f16(out.add(i), S::load(x.add(i)));
            }
            for i in whole..count {
                out.add(i).write(f16::from_f32(*x.add(i)).to_bits());
            }
        }
    }
    let count = x.len().min(out.len());
    let (x, out) = (x.as_ptr(), out.as_mut_ptr().cast::<u16>());
    dispatch!(isa, body(x: *const f32, out: *mut u16, count: usize) -> ())
}

unsafe fn widen_raw(isa: Isa, kind: ConvertKind, x: *const u16, out: *mut f32, count: usize) {
    #[inline(always)]
    unsafe fn body<S: Simd>(kind: ConvertKind, x: *const u16, out: *mut f32, count: usize) {
        let whole = count - count % S::N;
        // SAFETY: promised by the caller.
        unsafe {
            for i in (0..whole).step_by(S::N) {
                let v = match kind {
                    ConvertKind::F16 => S::load_f16(x.add(i)),
                    ConvertKind::Bf16 => S::load_bf16(x.add(i)),
                };
                S::store(out.add(i), v);
            }
            for i in whole..count {
                let bits = x.add(i).read_unaligned();
                *out.add(i) = match kind {
                    ConvertKind::F16 => f16::from_bits(bits).to_f32(),
                    ConvertKind::Bf16 => bf16::from_bits(bits).to_f32(),
                };
            }
        }
    }
    dispatch!(isa, body(kind: ConvertKind, x: *const u16, out: *mut f32, count: usize) -> ())
}

/// Reads `out.len()` elements of type F32, F16, BF16 or Q8_0 from memory of any alignment; false for other types and
/// for partial blocks of Q8_0.
///
/// # Safety
/// The bytes of that many elements must be readable at the address.
#[inline]
pub unsafe fn load_row(isa: Isa, dtype: DType, from: *const u8, out: &mut [f32]) -> bool {
    match dtype {
        // SAFETY: promised by the caller.
        DType::F32 => unsafe {
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().cast(), out.len() * 4);
        },
        // SAFETY: promised by the caller.
        DType::F16 => unsafe { widen_raw(isa, ConvertKind::F16, from.cast(), out.as_mut_ptr(), out.len()) },
        // SAFETY: promised by the caller.
        DType::BF16 => unsafe { widen_raw(isa, ConvertKind::Bf16, from.cast(), out.as_mut_ptr(), out.len()) },
        DType::Q8_0 if out.len().is_multiple_of(32) => {
            let (out, blocks) = (out.as_mut_ptr(), out.len() / 32);
            dispatch!(isa, q8_0(from: *const u8, out: *mut f32, blocks: usize) -> ());
        }
        _ => return false,
    }
    true
}

/// Widens blocks of Q8_0.
///
/// # Safety
/// `blocks` blocks must be readable and `32 × blocks` numbers writable; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn q8_0<S: Simd>(from: *const u8, out: *mut f32, blocks: usize) {
    for block in 0..blocks {
        // SAFETY: promised by the caller.
        unsafe {
            let block_at = from.add(block * 34);
            let scale = S::splat(f16::from_bits(block_at.cast::<u16>().read_unaligned()).to_f32());
            for i in (0..32).step_by(S::N) {
                let q = S::load_i8(block_at.add(2 + i).cast());
                S::store(out.add(block * 32 + i), S::mul(scale, q));
            }
        }
    }
}
