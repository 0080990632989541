//! Decode attention with AVX-512: whole tiles of f16, bf16 or q8_0 keys and values for few queries, read in place.
//!
//! Decoding after a long context is bound by memory. Registers and prefetches are scheduled by hand so that computing hides
//! behind it:
//!
//! ```text
//! scores   4 slots × ROWS queries    one vector of 16 elements after the other; every loaded key serves all queries
//!          16 slots                  of each query: 16 vectors of sums become one vector of 16 scores
//! gather   ROWS queries × 4 vectors  sums stay in registers over the tile's slots; a weight is broadcast to a vector
//! ```
//!
//! Every slot prefetches two lines of the next tile into the L2 cache ([`PrefetchLines`]), and the row
//! [`NEAR_DISTANCE`] slots ahead into the L1 cache.
//!
//! The scales of a tile's q8_0 blocks are collected first. They are applied to keys, and to the weights of values.

use std::arch::asm;
use std::arch::x86_64::*;

use super::slot_tile::{Bf16, F16, Q8Slots, SlotTile, TILE, strips};

/// How many slots ahead rows are prefetched from the L2 to the L1 cache.
const NEAR_DISTANCE: usize = 8;

/// Elements of a vector.
const LANES: usize = 16;

/// Two cache lines to prefetch with every slot and every 64 elements of it, and their distance from slot to slot.
#[derive(Clone, Copy)]
pub(super) struct PrefetchLines {
    pub(super) at: [*const u8; 2],
    pub(super) step: usize,
}

/// Elements of a step, and the most that a row may have.
const STEP: usize = 4 * LANES;
const MAX_WIDTH: usize = 576;

/// Whether the kernels below support a tile: it is full, and its rows are a multiple of 64 elements.
pub(super) fn is_supported(slots: &SlotTile) -> bool {
    slots.count == TILE
        && slots.width.is_multiple_of(STEP)
        && slots.width <= MAX_WIDTH
        && slots.stride < i32::MAX as usize / TILE
}

/// The scales of a tile's blocks: `[blocks of a row][TILE]`.
type Scales = [[f32; TILE]; MAX_WIDTH / 32];

/// How rows of an element type are loaded here.
pub(super) trait CacheRows {
    /// Bytes of [`STEP`] elements.
    const BYTES: usize;
    /// Whether blocks have scales.
    const SCALED: bool;

    /// Vector `VECTOR` of four rows, a stride apart; for types with scales, those of its block for these slots are at
    /// an address.
    ///
    /// # Safety
    /// All must be readable; the CPU must have AVX-512.
    unsafe fn four<const VECTOR: usize>(row: *const u8, stride: usize, scales: *const f32) -> [__m512; 4];

    /// Vector `VECTOR` of a row, without scale.
    ///
    /// # Safety
    /// It must be readable; the CPU must have AVX-512.
    unsafe fn one<const VECTOR: usize>(row: *const u8) -> __m512;
}

/// Assembly that gives four vectors `{k0}` to `{k3}`, from rows that are a `{stride}` apart. Conversions are from
/// memory: between registers they take one more operation.
macro_rules! four {
    ($row:expr, $stride:expr, [$($line:literal),*] $(, $name:ident = $value:expr)* ; $($offset:ident = $constant:expr),*) => {{
        let (k0, k1, k2, k3): (__m512, __m512, __m512, __m512);
        asm!(
            $($line,)*
            k0 = out(zmm_reg) k0,
            k1 = out(zmm_reg) k1,
            k2 = out(zmm_reg) k2,
            k3 = out(zmm_reg) k3,
            row = in(reg) $row,
            stride = in(reg) $stride,
            three = in(reg) 3 * $stride,
            $($name = in(reg) $value,)*
            $($offset = const $constant,)*
            options(readonly, nostack, preserves_flags)
        );
        [k0, k1, k2, k3]
    }};
}

impl CacheRows for F16 {
    const BYTES: usize = 2 * STEP;
    const SCALED: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn four<const VECTOR: usize>(row: *const u8, stride: usize, _scales: *const f32) -> [__m512; 4] {
        // SAFETY: promised by the caller: 32 bytes of each row are read.
        unsafe {
            four!(row, stride, [
                "vcvtph2ps {k0}, ymmword ptr [{row} + {at}]",
                "vcvtph2ps {k1}, ymmword ptr [{row} + {stride} + {at}]",
                "vcvtph2ps {k2}, ymmword ptr [{row} + 2 * {stride} + {at}]",
                "vcvtph2ps {k3}, ymmword ptr [{row} + {three} + {at}]"
            ]; at = 32 * VECTOR)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn one<const VECTOR: usize>(row: *const u8) -> __m512 {
        let out: __m512;
        // SAFETY: reads 32 bytes, which the caller promised.
        unsafe {
            asm!(
                "vcvtph2ps {out}, ymmword ptr [{row} + {at}]",
                out = lateout(zmm_reg) out,
                row = in(reg) row,
                at = const 32 * VECTOR,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        out
    }
}

impl CacheRows for Bf16 {
    const BYTES: usize = 2 * STEP;
    const SCALED: bool = false;

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn four<const VECTOR: usize>(row: *const u8, stride: usize, _scales: *const f32) -> [__m512; 4] {
        // SAFETY: promised by the caller: 32 bytes of each row are read.
        unsafe {
            four!(row, stride, [
                "vpmovzxwd {k0}, ymmword ptr [{row} + {at}]",
                "vpmovzxwd {k1}, ymmword ptr [{row} + {stride} + {at}]",
                "vpmovzxwd {k2}, ymmword ptr [{row} + 2 * {stride} + {at}]",
                "vpmovzxwd {k3}, ymmword ptr [{row} + {three} + {at}]",
                "vpslld {k0}, {k0}, 16",
                "vpslld {k1}, {k1}, 16",
                "vpslld {k2}, {k2}, 16",
                "vpslld {k3}, {k3}, 16"
            ]; at = 32 * VECTOR)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn one<const VECTOR: usize>(row: *const u8) -> __m512 {
        // SAFETY: reads 32 bytes, which the caller promised.
        unsafe {
            let bits = _mm256_loadu_si256(row.wrapping_add(32 * VECTOR).cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }
}

impl CacheRows for Q8Slots {
    const BYTES: usize = STEP / 32 * 34;
    const SCALED: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn four<const VECTOR: usize>(row: *const u8, stride: usize, scales: *const f32) -> [__m512; 4] {
        // SAFETY: promised by the caller: 16 bytes of each row and four scales are read.
        unsafe {
            four!(row, stride, [
                "vpmovsxbd {k0}, xmmword ptr [{row} + {at}]",
                "vpmovsxbd {k1}, xmmword ptr [{row} + {stride} + {at}]",
                "vpmovsxbd {k2}, xmmword ptr [{row} + 2 * {stride} + {at}]",
                "vpmovsxbd {k3}, xmmword ptr [{row} + {three} + {at}]",
                "vcvtdq2ps {k0}, {k0}",
                "vcvtdq2ps {k1}, {k1}",
                "vcvtdq2ps {k2}, {k2}",
                "vcvtdq2ps {k3}, {k3}",
                "vmulps {k0}, {k0}, dword ptr [{scales}]{{1to16}}",
                "vmulps {k1}, {k1}, dword ptr [{scales} + 4]{{1to16}}",
                "vmulps {k2}, {k2}, dword ptr [{scales} + 8]{{1to16}}",
                "vmulps {k3}, {k3}, dword ptr [{scales} + 12]{{1to16}}"
            ], scales = scales; at = VECTOR / 2 * 34 + 2 + VECTOR % 2 * 16)
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn one<const VECTOR: usize>(row: *const u8) -> __m512 {
        // SAFETY: reads 16 bytes, which the caller promised.
        unsafe {
            let quants = row.wrapping_add(VECTOR / 2 * 34 + 2 + VECTOR % 2 * 16);
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(quants.cast())))
        }
    }
}

/// Collects the scales of a tile.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn collect<K: CacheRows>(slots: &SlotTile, scales: &mut Scales) {
    if !K::SCALED {
        return;
    }
    let first: [i32; LANES] = std::array::from_fn(|i| (i * slots.stride) as i32);
    // SAFETY: promised by the caller: every block begins with its scale, and is longer than the four bytes read.
    unsafe {
        let places = _mm512_loadu_si512(first.as_ptr().cast());
        for (block, scales) in scales.iter_mut().take(slots.width / 32).enumerate() {
            for half in 0..TILE / LANES {
                let at = slots.first.wrapping_add(half * LANES * slots.stride + 34 * block);
                let bits = _mm512_i32gather_epi32::<1>(places, at.cast());
                let scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
                _mm512_storeu_ps(scales.as_mut_ptr().add(half * LANES), scale);
            }
        }
    }
}

/// Calls `$kernel::<$rows_of, ROWS>(row, far, …)` for strips of up to four of `$rows` rows. Only the first strip
/// prefetches the next tile; later ones prefetch lines that are already cached.
macro_rules! in_strips {
    ($rows:expr, $slots:expr, $far:expr, $kernel:ident::<$rows_of:ty>($($argument:expr),*)) => {{
        let mut far = $far;
        for (row, count) in strips($rows, 4) {
            match count {
                4 => $kernel::<$rows_of, 4>(row, far, $($argument),*),
                3 => $kernel::<$rows_of, 3>(row, far, $($argument),*),
                2 => $kernel::<$rows_of, 2>(row, far, $($argument),*),
                _ => $kernel::<$rows_of, 1>(row, far, $($argument),*),
            }
            far = PrefetchLines { at: [$slots.first; 2], step: 0 };
        }
    }};
}

/// Scores of `rows` queries (`pad` floats each) with a tile of keys, into rows of [`TILE`] floats.
///
/// # Safety
/// All of this memory must be valid, the tile must be [supported](is_supported), and the CPU must have AVX-512.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn scores<K: CacheRows>(
    keys: &SlotTile,
    far: PrefetchLines,
    queries: *const f32,
    pad: usize,
    rows: usize,
    scores: *mut f32,
) {
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn strip<K: CacheRows, const ROWS: usize>(
        row: usize,
        far: PrefetchLines,
        keys: &SlotTile,
        queries: *const f32,
        pad: usize,
        scores: *mut f32,
        scales: &Scales,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let (queries, mut to) = (queries.add(row * pad), scores.add(row * TILE));
            let (mut key, mut far) = (keys.first, far);
            for sixteen in 0..TILE / LANES {
                let mut folded = [[_mm512_setzero_ps(); 4]; ROWS];
                for four in 0..4 {
                    let slot = LANES * sixteen + 4 * four;
                    let scales = scales.as_ptr().cast::<f32>().wrapping_add(slot);
                    let sums = four_slots::<K, ROWS>(key, keys, &mut far, queries, pad, scales);
                    for (place, sum) in folded.iter_mut().filter_map(|row| row.get_mut(four)).zip(sums) {
                        *place = sum;
                    }
                    key = key.wrapping_add(4 * keys.stride);
                }
                for (r, folded) in folded.into_iter().enumerate() {
                    _mm512_storeu_ps(to.add(r * TILE), across(folded));
                }
                to = to.add(LANES);
            }
        }
    }
    // SAFETY: promised by the caller.
    unsafe {
        let mut scales = [[0.0; TILE]; MAX_WIDTH / 32];
        collect::<K>(keys, &mut scales);
        in_strips!(rows, keys, far, strip::<K>(keys, queries, pad, scores, &scales));
    }
}

/// For each query the products with four slots, added up to four numbers a slot: number `i` of slot `c` is element `4i
/// + c`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn four_slots<K: CacheRows, const ROWS: usize>(
    key: *const u8,
    keys: &SlotTile,
    far: &mut PrefetchLines,
    queries: *const f32,
    pad: usize,
    scales: *const f32,
) -> [__m512; ROWS] {
    // SAFETY: promised by the caller.
    unsafe {
        let stride = keys.stride;
        let mut sums = [[_mm512_setzero_ps(); 4]; ROWS];
        let mut column = 0;
        while column < keys.width {
            let bytes = column / STEP * K::BYTES;
            let at = key.wrapping_add(bytes);
            for slot in 0..4 {
                prefetch(far, bytes / 2, at.wrapping_add((NEAR_DISTANCE + slot) * stride), slot);
            }
            let q = queries.add(column);
            let low = scales.wrapping_add(column / 32 * TILE);
            let high = low.wrapping_add(TILE);
            sums = one_vector::<ROWS, 0>(sums, K::four::<0>(at, stride, low), q, pad);
            sums = one_vector::<ROWS, 1>(sums, K::four::<1>(at, stride, low), q, pad);
            sums = one_vector::<ROWS, 2>(sums, K::four::<2>(at, stride, high), q, pad);
            sums = one_vector::<ROWS, 3>(sums, K::four::<3>(at, stride, high), q, pad);
            column += STEP;
        }
        far.at = far.at.map(|at| at.wrapping_add(4 * far.step));
        sums.map(|[a, b, c, d]| {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
            _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
        })
    }
}

/// Adds the products of vector `VECTOR` of each query and of four slots to their sums.
///
/// In assembly, like the loads before it, so that the order stays as written; the compiler would load all keys first and
/// run out of registers.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn one_vector<const ROWS: usize, const VECTOR: usize>(
    mut sums: [[__m512; 4]; ROWS],
    [k0, k1, k2, k3]: [__m512; 4],
    queries: *const f32,
    pad: usize,
) -> [[__m512; 4]; ROWS] {
    for (r, [a, b, c, d]) in sums.iter_mut().enumerate() {
        let q: __m512;
        // SAFETY: promised by the caller: 64 bytes of each query are read.
        unsafe {
            asm!(
                "vmovups {q}, zmmword ptr [{row} + 64 * {vector}]",
                "vfmadd231ps {a}, {q}, {k0}",
                "vfmadd231ps {b}, {q}, {k1}",
                "vfmadd231ps {c}, {q}, {k2}",
                "vfmadd231ps {d}, {q}, {k3}",
                q = out(zmm_reg) q,
                a = inout(zmm_reg) *a,
                b = inout(zmm_reg) *b,
                c = inout(zmm_reg) *c,
                d = inout(zmm_reg) *d,
                k0 = in(zmm_reg) k0,
                k1 = in(zmm_reg) k1,
                k2 = in(zmm_reg) k2,
                k3 = in(zmm_reg) k3,
                row = in(reg) queries.wrapping_add(r * pad),
                vector = const VECTOR,
                options(readonly, nostack, preserves_flags)
            );
        }
        let _ = q;
    }
    sums
}

/// Sixteen scores of what [`four_slots`] gave for sixteen slots.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn across([a, b, c, d]: [__m512; 4]) -> __m512 {
    // Keeps the order of slots: quarters 0 and 2, then 1 and 3 of two vectors, added.
    let halves = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    halves(halves(a, b), halves(c, d))
}

/// Adds weighted values of a tile to the sums of `rows` rows (`pad` floats each); weights are rows of [`TILE`] floats.
///
/// # Safety
/// All of this memory must be valid, the tile must be [supported](is_supported), and the CPU must have AVX-512.
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) unsafe fn gather<K: CacheRows>(
    values: &SlotTile,
    far: PrefetchLines,
    weights: *const f32,
    rows: usize,
    sums: *mut f32,
    pad: usize,
) {
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn strip<K: CacheRows, const ROWS: usize>(
        row: usize,
        far: PrefetchLines,
        values: &SlotTile,
        weights: *const f32,
        sums: *mut f32,
        pad: usize,
        scales: &Scales,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let mut scaled = [[[0.0; TILE]; ROWS]; 2];
            let (weights, sums) = (weights.add(row * TILE), sums.add(row * pad));
            let mut column = 0;
            while column < values.width {
                let mut sum = [[_mm512_setzero_ps(); 4]; ROWS];
                for (r, sum) in sum.iter_mut().enumerate() {
                    for (v, sum) in sum.iter_mut().enumerate() {
                        *sum = _mm512_loadu_ps(sums.add(r * pad + column + v * LANES));
                    }
                }
                // The weights of both blocks of a step, `[ROWS][TILE]` each.
                let mut both = [weights; 2];
                if K::SCALED {
                    let blocks = scales.iter().skip(column / 32);
                    for ((both, scaled), scales) in both.iter_mut().zip(&mut scaled).zip(blocks) {
                        *both = scaled.as_ptr().cast();
                        for (r, scaled) in scaled.iter_mut().enumerate() {
                            for i in (0..TILE).step_by(LANES) {
                                let weight = _mm512_loadu_ps(weights.add(r * TILE + i));
                                let scale = _mm512_loadu_ps(scales.as_ptr().add(i));
                                _mm512_storeu_ps(scaled.as_mut_ptr().add(i), _mm512_mul_ps(weight, scale));
                            }
                        }
                    }
                }
                let bytes = column / STEP * K::BYTES;
                let (mut value, mut far) = (values.first.wrapping_add(bytes), far);
                for slot in 0..TILE {
                    prefetch(&far, bytes / 2, value.wrapping_add(NEAR_DISTANCE * values.stride), 0);
                    far.at = far.at.map(|at| at.wrapping_add(far.step));
                    let v = [K::one::<0>(value), K::one::<1>(value), K::one::<2>(value), K::one::<3>(value)];
                    for (r, sum) in sum.iter_mut().enumerate() {
                        let [low, high] = both.map(|weights| _mm512_set1_ps(*weights.add(r * TILE + slot)));
                        for ((sum, v), weight) in sum.iter_mut().zip(v).zip([low, low, high, high]) {
                            *sum = _mm512_fmadd_ps(weight, v, *sum);
                        }
                    }
                    value = value.wrapping_add(values.stride);
                }
                for (r, sum) in sum.into_iter().enumerate() {
                    for (v, sum) in sum.into_iter().enumerate() {
                        _mm512_storeu_ps(sums.add(r * pad + column + v * LANES), sum);
                    }
                }
                column += STEP;
            }
        }
    }
    // SAFETY: promised by the caller.
    unsafe {
        let mut scales = [[0.0; TILE]; MAX_WIDTH / 32];
        collect::<K>(values, &mut scales);
        in_strips!(rows, values, far, strip::<K>(values, weights, sums, pad, &scales));
    }
}

/// Prefetches the two far lines of a slot's elements, which begin `bytes` bytes into the row, and the same elements of a
/// nearby row.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch(far: &PrefetchLines, bytes: usize, near: *const u8, slot: usize) {
    let step = slot * far.step + bytes;
    for at in far.at {
        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(step).cast());
    }
    _mm_prefetch::<_MM_HINT_T0>(near.cast());
    _mm_prefetch::<_MM_HINT_T0>(near.wrapping_add(64).cast());
}
