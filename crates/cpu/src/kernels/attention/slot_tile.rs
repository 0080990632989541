//! The arithmetic on one tile of KV-cache slots: scores of a few rows, online softmax, and sums of weighted values.
//!
//! Keys and values are read in place, in the cache's type, or from tiles widened to f32. A row is a multiple of sixteen
//! elements. Several rows of queries share each load and conversion:
//!
//! ```text
//! scores   4 slots × ROWS queries    sums in registers, along the row; sixteen at a time are added up across
//!          2 vectors × ROWS queries  for many queries: keys transposed, one element of a query broadcast to a vector
//! weights  one row, all its slots    p = exp(score − largest); earlier sums are rescaled when the largest grows
//! gather   ROWS queries × 4 vectors  sums in registers, over the slots; p is broadcast to a vector
//! ```

use quadriga_graph::DType;

use super::{Attention, AttentionMask};
use crate::kernels::vec::simd::Simd;
use crate::kernels::vec::{exp, tanh};

/// Slots of a tile; a multiple of every vector's length.
pub(super) const TILE: usize = 32;

/// Floats of a row's state: sums of weights, one for each lane of a vector, then the largest score.
pub(super) const STATE: usize = 32;
const LARGEST: usize = 16;

/// An element type of the KV cache.
pub(super) trait CacheSource {
    /// Elements `column..column + N` of a row, as f32.
    ///
    /// # Safety
    /// The elements must be readable, and the CPU must have the instruction set of `S`; `column` is a multiple of `N`.
    unsafe fn load<S: Simd>(row: *const u8, column: usize) -> S::V;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Q8Slots;

impl CacheSource for F32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, column: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load(row.cast::<f32>().add(column)) }
    }
}

impl CacheSource for F16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, column: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load_f16(row.cast::<u16>().add(column)) }
    }
}

impl CacheSource for Bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, column: usize) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::load_bf16(row.cast::<u16>().add(column)) }
    }
}

impl CacheSource for Q8Slots {
    #[inline(always)]
    unsafe fn load<S: Simd>(row: *const u8, column: usize) -> S::V {
        // SAFETY: promised by the caller; a vector is inside one block.
        unsafe {
            let block = row.add(column / 32 * 34);
            let scale = half::f16::from_bits(block.cast::<u16>().read_unaligned()).to_f32();
            S::mul(S::splat(scale), S::load_i8(block.add(2 + column % 32).cast()))
        }
    }
}

/// A tile of keys or values: its first row, bytes from one row to the next, the number of rows, and elements per row.
#[derive(Clone, Copy)]
pub(super) struct SlotTile {
    pub(super) first: *const u8,
    pub(super) stride: usize,
    pub(super) count: usize,
    pub(super) width: usize,
    /// Memory to prefetch meanwhile: `prefetch_bytes` bytes with every slot, `prefetch_step` bytes apart.
    pub(super) prefetch: *const u8,
    pub(super) prefetch_step: usize,
    pub(super) prefetch_bytes: usize,
}

impl SlotTile {
    /// Slot `i`; for those past the end, the last.
    #[inline(always)]
    fn row(&self, i: usize) -> *const u8 {
        self.first.wrapping_add(i.min(self.count - 1) * self.stride)
    }

    /// Prefetches the memory that belongs to slot `i`.
    #[inline(always)]
    pub(super) unsafe fn prefetch_after<S: Simd>(&self, i: usize) {
        let at = self.prefetch.wrapping_add(i * self.prefetch_step);
        let mut line = 0;
        while line < self.prefetch_bytes {
            // SAFETY: any address may be prefetched.
            unsafe { S::prefetch(at.wrapping_add(line)) };
            line += 64;
        }
    }
}

/// Divides rows into the fewest strips of at most `most` rows, of nearly equal length: the first row and the number of
/// rows of each.
pub(super) fn strips(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let count = rows.div_ceil(most);
    let first = move |i: usize| i * rows / count;
    (0..count).map(move |i| (first(i), first(i + 1) - first(i)))
}

/// Calls `$kernel::<S, …, ROWS>(first row, …)` for all of `$rows` rows, as many at a time as the registers hold.
/// Further constants of the kernel may follow the element type.
macro_rules! in_strips {
    ($rows:expr, $kernel:ident::<$s:ty, $source:ty $(, $constant:literal)?>($row:ident $(, $argument:expr)*)) => {{
        let most = if <$s>::REGISTERS >= 32 { 4 } else { 3 };
        for ($row, count) in strips($rows, most) {
            match count {
                4 => $kernel::<$s, $source, 4 $(, $constant)?>($row $(, $argument)*),
                3 => $kernel::<$s, $source, 3 $(, $constant)?>($row $(, $argument)*),
                2 => $kernel::<$s, $source, 2 $(, $constant)?>($row $(, $argument)*),
                _ => $kernel::<$s, $source, 1 $(, $constant)?>($row $(, $argument)*),
            }
        }
    }};
}

/// Scores of `rows` queries (`pad` floats each) with a tile of keys, into rows of [`TILE`] floats.
///
/// # Safety
/// All of this memory must be valid; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, K: CacheSource>(
    keys: SlotTile,
    queries: *const f32,
    pad: usize,
    rows: usize,
    scores: *mut f32,
) {
    #[inline(always)]
    unsafe fn strip<S: Simd, K: CacheSource, const ROWS: usize, const VECTORS: usize>(
        row: usize,
        keys: SlotTile,
        queries: *const f32,
        pad: usize,
        scores: *mut f32,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let queries = queries.add(row * pad);
            let width = if VECTORS == 0 { keys.width } else { VECTORS * S::N };
            for block in (0..keys.count).step_by(16) {
                let mut folded = [[S::fold4([S::splat(0.0); 4]); 4]; ROWS];
                for four in 0..4 {
                    let [k0, k1, k2, k3] = [0, 1, 2, 3].map(|i| keys.row(block + 4 * four + i));
                    if row == 0 {
                        for i in 0..4 {
                            keys.prefetch_after::<S>(block + 4 * four + i);
                        }
                    }
                    let mut sums = [[S::splat(0.0); 4]; ROWS];
                    let mut i = 0;
                    while i < width {
                        let k = [
                            K::load::<S>(k0, i),
                            K::load::<S>(k1, i),
                            K::load::<S>(k2, i),
                            K::load::<S>(k3, i),
                        ];
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let q = S::load(queries.add(r * pad + i));
                            for (sum, k) in sums.iter_mut().zip(k) {
                                *sum = S::fma(q, k, *sum);
                            }
                        }
                        i += S::N;
                    }
                    for (folded, sums) in folded.iter_mut().zip(sums) {
                        if let Some(place) = folded.get_mut(four) {
                            *place = S::fold4(sums);
                        }
                    }
                }
                for (r, folded) in folded.into_iter().enumerate() {
                    S::sums16(folded, scores.add((row + r) * TILE + block));
                }
            }
        }
    }
    // SAFETY: promised by the caller.
    unsafe {
        // Rows of common lengths are unrolled.
        match keys.width / S::N {
            4 if S::N > 1 => in_strips!(rows, strip::<S, K, 4>(row, keys, queries, pad, scores)),
            8 if S::N > 1 => in_strips!(rows, strip::<S, K, 8>(row, keys, queries, pad, scores)),
            _ => in_strips!(rows, strip::<S, K, 0>(row, keys, queries, pad, scores)),
        }
    }
}

/// Rows that [`column_scores`] takes at a time; it may read and write as many past the last.
pub(super) const STRIP: usize = 8;

/// Transposes a tile of `pad` elements a row into `pad` columns of [`TILE`].
///
/// # Safety
/// Both must be valid; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn to_columns<S: Simd>(rows: *const f32, pad: usize, columns: *mut f32) {
    for slot in (0..TILE).step_by(S::N) {
        for i in (0..pad).step_by(S::N) {
            // SAFETY: promised by the caller; both lengths are multiples of every vector's.
            unsafe { S::transpose(rows.add(slot * pad + i), pad, columns.add(i * TILE + slot), TILE) };
        }
    }
}

/// Scores of `rows` queries (`pad` floats each) with a transposed tile of keys, into rows of [`TILE`] floats.
///
/// # Safety
/// All of this memory must be valid, with room for [`STRIP`] more rows of queries and scores; the CPU must have the
/// instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn column_scores<S: Simd>(
    columns: *const f32,
    queries: *const f32,
    pad: usize,
    rows: usize,
    scores: *mut f32,
) {
    #[inline(always)]
    unsafe fn strip<S: Simd, const ROWS: usize>(
        columns: *const f32,
        queries: *const f32,
        pad: usize,
        scores: *mut f32,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            for slot in (0..TILE).step_by(2 * S::N) {
                let mut sums = [[S::splat(0.0); 2]; ROWS];
                for i in 0..pad {
                    let column = columns.add(i * TILE + slot);
                    let (low, high) = (S::load(column), S::load(column.add(S::N)));
                    for (r, [a, b]) in sums.iter_mut().enumerate() {
                        let q = S::splat(*queries.add(r * pad + i));
                        (*a, *b) = (S::fma(q, low, *a), S::fma(q, high, *b));
                    }
                }
                for (r, [a, b]) in sums.into_iter().enumerate() {
                    S::store(scores.add(r * TILE + slot), a);
                    S::store(scores.add(r * TILE + slot + S::N), b);
                }
            }
        }
    }
    let step = if S::REGISTERS >= 32 { STRIP } else { 6 };
    let mut row = 0;
    while row < rows {
        // The last strip overlaps the previous one rather than being short.
        let first = row.min(rows.saturating_sub(step));
        // SAFETY: promised by the caller.
        unsafe {
            let (queries, scores) = (queries.add(first * pad), scores.add(first * TILE));
            if S::REGISTERS >= 32 {
                strip::<S, STRIP>(columns, queries, pad, scores);
            } else {
                strip::<S, 6>(columns, queries, pad, scores);
            }
        }
        row += step;
    }
}

/// Adds weighted values of a tile to the sums of `rows` rows (`pad` floats each).
///
/// # Safety
/// All of this memory must be valid; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn gather<S: Simd, K: CacheSource>(
    values: SlotTile,
    weights: *const f32,
    rows: usize,
    sums: *mut f32,
    pad: usize,
) {
    #[inline(always)]
    unsafe fn strip<S: Simd, K: CacheSource, const ROWS: usize>(
        row: usize,
        values: SlotTile,
        weights: *const f32,
        sums: *mut f32,
        pad: usize,
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let (weights, sums) = (weights.add(row * TILE), sums.add(row * pad));
            let mut column = 0;
            while column < values.width {
                let prefetch = row == 0 && column == 0;
                if column + 4 * S::N <= values.width {
                    columns::<S, K, ROWS, 4>(values, column, prefetch, weights, sums, pad);
                    column += 4 * S::N;
                } else {
                    columns::<S, K, ROWS, 1>(values, column, prefetch, weights, sums, pad);
                    column += S::N;
                }
            }
        }
    }
    // SAFETY: promised by the caller.
    unsafe { in_strips!(rows, strip::<S, K>(row, values, weights, sums, pad)) }
}

#[inline(always)]
unsafe fn columns<S: Simd, K: CacheSource, const ROWS: usize, const VECTORS: usize>(
    values: SlotTile,
    column: usize,
    prefetch: bool,
    weights: *const f32,
    sums: *mut f32,
    pad: usize,
) {
    // SAFETY: promised by the caller.
    unsafe {
        let place = |r: usize, v: usize| sums.add(r * pad + column + v * S::N);
        let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(place(r, v));
            }
        }
        let mut value = values.first;
        for slot in 0..values.count {
            if prefetch {
                values.prefetch_after::<S>(slot);
            }
            let mut loaded = [S::splat(0.0); VECTORS];
            for (v, loaded) in loaded.iter_mut().enumerate() {
                *loaded = K::load::<S>(value, column + v * S::N);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = S::splat(*weights.add(r * TILE + slot));
                for (sum, value) in sums.iter_mut().zip(loaded) {
                    *sum = S::fma(weight, value, *sum);
                }
            }
            value = value.wrapping_add(values.stride);
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                S::store(place(r, v), sum);
            }
        }
    }
}

/// One row of scores: its query, and its online softmax so far.
#[derive(Clone, Copy)]
pub(super) struct ScoreRow {
    pub(super) token: usize,
    pub(super) head: usize,
    /// [`TILE`] scores, which become weights.
    pub(super) scores: *mut f32,
    /// [`STATE`] floats.
    pub(super) state: *mut f32,
    /// `value_pad` sums.
    pub(super) sums: *mut f32,
}

/// Initializes a row's online softmax with a score and its weight.
///
/// # Safety
/// The row's state and sums must be writable.
#[inline(always)]
pub(super) unsafe fn clear([score, weight]: [f32; 2], state: *mut f32, sums: *mut f32, pad: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        std::ptr::write_bytes(state, 0, STATE);
        *state = weight;
        *state.add(LARGEST) = score;
        std::ptr::write_bytes(sums, 0, pad);
    }
}

/// The largest score and the sum of weights of a row.
///
/// # Safety
/// The state must be readable; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn largest_and_total<S: Simd>(state: *const f32) -> [f32; 2] {
    // SAFETY: promised by the caller; only the lanes of one vector are used.
    unsafe { [*state.add(LARGEST), S::sum(S::load(state))] }
}

/// Applies soft cap, mask and span to the scores of slots `slot..slot + count`.
///
/// # Safety
/// The row must be valid; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn mask<S: Simd>(attention: &Attention<'_>, row: ScoreRow, slot: usize, count: usize) {
    let ScoreRow { token, head, scores, .. } = row;
    // SAFETY: promised by the caller; a row of scores is a multiple of every vector's length.
    unsafe {
        if let Some(cap) = attention.shape.soft_cap {
            for i in (0..TILE).step_by(S::N) {
                let v = tanh::<S>(S::mul(S::load(scores.add(i)), S::splat(1.0 / cap)));
                S::store(scores.add(i), S::mul(v, S::splat(cap)));
            }
        }
        if let Some(mask) = attention.memory.mask {
            let mask_row = mask.rows.row(token, head);
            for i in 0..count {
                *scores.add(i) += masked(&mask, mask_row, slot + i);
            }
        }
        let (first, last) = attention.span(token);
        for i in 0..first.saturating_sub(slot).min(count) {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        for i in last.saturating_sub(slot).min(count)..TILE {
            *scores.add(i) = f32::NEG_INFINITY;
        }
    }
}

/// Converts the scores of a tile to weights relative to the largest score so far; rescales `pad` sums when that grows.
///
/// # Safety
/// The row must be valid; the CPU must have the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd>(row: ScoreRow, pad: usize) {
    let ScoreRow { scores, state, sums, .. } = row;
    // SAFETY: promised by the caller; a row of scores is a multiple of every vector's length.
    unsafe {
        let mut most = S::splat(f32::NEG_INFINITY);
        for i in (0..TILE).step_by(S::N) {
            most = S::max(S::load(scores.add(i)), most);
        }
        let before = *state.add(LARGEST);
        let mut largest = before;
        if S::any_above(most, S::splat(before)) {
            largest = S::largest(most);
            *state.add(LARGEST) = largest;
            // Earlier weights were relative to a smaller maximum.
            let factor = S::splat(if before == f32::NEG_INFINITY { 0.0 } else { (before - largest).exp() });
            S::store(state, S::mul(S::load(state), factor));
            for i in (0..pad).step_by(S::N) {
                S::store(sums.add(i), S::mul(S::load(sums.add(i)), factor));
            }
        }
        if largest == f32::NEG_INFINITY {
            // No score is a number: they are −∞, or NaN, which makes the result NaN.
            let sum = (0..TILE).fold(0.0, |sum, i| sum + *scores.add(i));
            *state += if sum.is_nan() { sum } else { 0.0 };
            std::ptr::write_bytes(scores, 0, TILE);
            return;
        }
        let mut total = S::load(state);
        for i in (0..TILE).step_by(S::N) {
            let p = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(largest)));
            S::store(scores.add(i), p);
            total = S::add(total, p);
        }
        S::store(state, total);
    }
}

/// The number that the mask adds to the score of a slot.
///
/// # Safety
/// The row of the mask must have this slot.
#[inline(always)]
pub(super) unsafe fn masked(mask: &AttentionMask, row: *const u8, slot: usize) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        if mask.dtype == DType::F32 {
            row.cast::<f32>().add(slot).read_unaligned()
        } else {
            half::f16::from_bits(row.cast::<u16>().add(slot).read_unaligned()).to_f32()
        }
    }
}
