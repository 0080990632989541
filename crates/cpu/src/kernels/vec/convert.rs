//! Conversion of rows of other types to `f32`, and of `f32` to 16 bits.

use half::{bf16, f16};
use quadriga_graph::DType;
use quadriga_graph::blocks::{BlockQ4_0, BlockQ5_1, BlockQ8_0};

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

/// `out[i] = x[i]`, rounded to the nearest, for as many elements as the shorter slice has.
pub fn f32_to_bf16(isa: Isa, x: &[f32], out: &mut [bf16]) {
    // The compiler vectorizes it by itself: there are no branches.
    #[inline(always)]
    unsafe fn body<S: Simd>(x: &[f32], out: &mut [bf16]) {
        for (x, out) in x.iter().zip(out) {
            let bits = x.to_bits();
            let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
            // A NaN stays one, also where its upper bits are zeros.
            let nan = (bits >> 16) as u16 | 0x40;
            *out = bf16::from_bits(if x.is_nan() { nan } else { rounded });
        }
    }
    dispatch!(isa, body(x: &[f32], out: &mut [bf16]) -> ())
}

unsafe fn widen_raw(isa: Isa, kind: ConvertKind, x: *const u16, out: *mut f32, count: usize) {
    dispatch!(isa, widen(kind: ConvertKind, x: *const u16, out: *mut f32, count: usize) -> ())
}

/// Widens elements of 16 bits.
#[inline(always)]
unsafe fn widen<S: Simd>(kind: ConvertKind, x: *const u16, out: *mut f32, count: usize) {
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

/// Reads `out.len()` elements of a type of the KV cache ([`DType::is_cache_type`]) from memory of any alignment, exactly;
/// false for other types and for partial blocks.
///
/// # Safety
/// The bytes of that many elements must be readable at the address.
#[inline]
pub unsafe fn load_row(isa: Isa, dtype: DType, from: *const u8, out: &mut [f32]) -> bool {
    if !dtype.is_cache_type() || !out.len().is_multiple_of(dtype.block_len()) {
        return false;
    }
    let (out, count) = (out.as_mut_ptr(), out.len());
    dispatch!(isa, load_elements(dtype: DType, from: *const u8, out: *mut f32, count: usize) -> ());
    true
}

/// As [`load_row`], for code that is generic over the instruction set: whole blocks of a type of the KV cache.
///
/// # Safety
/// `count` elements must be readable and writable; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn load_elements<S: Simd>(dtype: DType, from: *const u8, out: *mut f32, count: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(from, out.cast(), count * 4),
            DType::F16 => widen::<S>(ConvertKind::F16, from.cast(), out, count),
            DType::BF16 => widen::<S>(ConvertKind::Bf16, from.cast(), out, count),
            DType::Q8_0 => load_blocks::<S, BlockQ8_0>(from, out, count / 32),
            DType::Q5_1 => load_blocks::<S, BlockQ5_1>(from, out, count / 32),
            DType::Q4_0 => load_blocks::<S, BlockQ4_0>(from, out, count / 32),
            _ => {}
        }
    }
}

/// A block of 32 elements `scale × quant + minimum`.
trait LinearBlock {
    /// Whether there is a minimum.
    const MINIMUM: bool;

    /// Scale and minimum.
    fn range(&self) -> [f32; 2];

    /// The quants.
    fn quants(&self) -> [i8; 32];
}

impl LinearBlock for BlockQ8_0 {
    const MINIMUM: bool = false;

    #[inline(always)]
    fn range(&self) -> [f32; 2] {
        [self.scale.to_f32(), 0.0]
    }

    #[inline(always)]
    fn quants(&self) -> [i8; 32] {
        self.quants
    }
}

impl LinearBlock for BlockQ5_1 {
    const MINIMUM: bool = true;

    #[inline(always)]
    fn range(&self) -> [f32; 2] {
        [self.scale.to_f32(), self.minimum.to_f32()]
    }

    #[inline(always)]
    fn quants(&self) -> [i8; 32] {
        let fifth_bits = u32::from_le_bytes(self.fifth_bits);
        let mut quants = nibbles(&self.quants);
        for (i, quant) in quants.iter_mut().enumerate() {
            *quant |= (fifth_bits >> i & 1) << 4;
        }
        quants.map(|quant| quant as i8)
    }
}

impl LinearBlock for BlockQ4_0 {
    const MINIMUM: bool = false;

    #[inline(always)]
    fn range(&self) -> [f32; 2] {
        [self.scale.to_f32(), 0.0]
    }

    #[inline(always)]
    fn quants(&self) -> [i8; 32] {
        nibbles(&self.quants).map(|quant| quant as i8 - 8)
    }
}

/// The four bits of 32 elements: the low ones of all bytes, then the high ones.
#[inline(always)]
fn nibbles(packed: &[u8; 16]) -> [u32; 32] {
    let mut quants = [0; 32];
    let (low, high) = quants.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        (*low, *high) = (u32::from(byte & 0x0f), u32::from(byte >> 4));
    }
    quants
}

/// Widens blocks.
///
/// # Safety
/// `blocks` blocks must be readable and `32 × blocks` numbers writable; the CPU must have the instruction set of `S`.
#[inline(always)]
unsafe fn load_blocks<S: Simd, B: LinearBlock>(from: *const u8, out: *mut f32, blocks: usize) {
    for i in 0..blocks {
        // SAFETY: promised by the caller; a block consists of bytes, so any address suits it.
        unsafe {
            let block = &*from.cast::<B>().add(i);
            let ([scale, minimum], quants) = (block.range().map(|v| S::splat(v)), block.quants());
            for j in (0..32).step_by(S::N) {
                let v = S::mul(scale, S::load_i8(quants.as_ptr().add(j)));
                S::store(out.add(32 * i + j), if B::MINIMUM { S::add(v, minimum) } else { v });
            }
        }
    }
}
