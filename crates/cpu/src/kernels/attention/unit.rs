//! One unit of work: a block of queries with the query heads of one key head, over a range of cells.
//!
//! ```text
//! scratch memory of a thread, in f32; rows = queries of the block × query heads of the key head
//! queries  rows × key_pad      scaled, filled up with zeros
//! sums     rows × value_pad    Σ p v so far
//! state    rows × 2            largest score so far, Σ p so far
//! scores   rows × TILE         scores, then p = exp(score − largest)
//! keys     TILE × key_pad      a tile of keys, widened
//! values   TILE × value_pad    a tile of values, widened
//! ```

use quadriga_graph::DType;

use super::{Attention, Plan, Rows, SPLIT};
use crate::kernels::vec::simd::{Simd, dispatch};
use crate::kernels::vec::{self, exp, q8_0, tanh};

/// Cells taken at a time.
const TILE: usize = 32;

pub(super) fn scratch_floats(plan: &Plan) -> Option<usize> {
    let rows = plan.group.checked_mul(plan.block)?;
    let per_row = plan.key_pad.checked_add(plan.value_pad)?.checked_add(2 + TILE)?;
    let tile = plan.key_pad.checked_add(plan.value_pad)?.checked_mul(TILE)?;
    rows.checked_mul(per_row)?.checked_add(tile)
}

/// The parts of the scratch memory.
#[derive(Clone, Copy)]
struct Scratch {
    queries: *mut f32,
    sums: *mut f32,
    state: *mut f32,
    scores: *mut f32,
    keys: *mut f32,
    values: *mut f32,
}

/// Where a unit is.
#[derive(Clone, Copy)]
struct Place {
    kv_head: usize,
    first_token: usize,
    tokens: usize,
    /// Cells `begin..end` of the split.
    begin: usize,
    end: usize,
}

/// Computes a unit: writes results, or a part for [`merge`] if the cells are split.
pub(super) fn run(
    attention: &Attention<'_>,
    kv_head: usize,
    block: usize,
    split: usize,
    scratch: *mut f32,
    parts: *mut f32,
) {
    let plan = &attention.plan;
    let first_token = block * plan.block;
    let tokens = plan.block.min(attention.shape.tokens - first_token);
    let whole = plan.splits == 1;
    let (begin, end) = if whole {
        (0, attention.shape.cells)
    } else {
        (split * SPLIT, ((split + 1) * SPLIT).min(attention.shape.cells))
    };
    let place = Place { kv_head, first_token, tokens, begin, end };
    let rows = plan.group * plan.block;
    let mut at = scratch;
    let mut take = |floats: usize| {
        let here = at;
        at = at.wrapping_add(floats);
        here
    };
    // The order keeps the vectors of tiles, sums and queries aligned.
    let scratch = Scratch {
        keys: take(TILE * plan.key_pad),
        values: take(TILE * plan.value_pad),
        queries: take(rows * plan.key_pad),
        sums: take(rows * plan.value_pad),
        scores: take(rows * TILE),
        state: take(rows * 2),
    };
    dispatch!(attention.isa, body(attention: &Attention<'_>, place: Place, scratch: Scratch) -> ());
    for token in 0..tokens {
        for member in 0..plan.group {
            let row = token * plan.group + member;
            let (token, head) = (first_token + token, kv_head * plan.group + member);
            // SAFETY: the row's sums and state are in scratch memory; each part belongs to one unit.
            unsafe {
                let (sums, state) = (scratch.sums.add(row * plan.value_pad), scratch.state.add(2 * row));
                if whole {
                    let total = *state.add(1);
                    write(attention, token, head, sums, if total > 0.0 { 1.0 / total } else { 0.0 });
                } else {
                    let part = part(attention, parts, token, head, split);
                    std::ptr::copy_nonoverlapping(sums, part, plan.value_pad);
                    std::ptr::copy_nonoverlapping(state, part.add(plan.value_pad), 2);
                }
            }
        }
    }
}

/// The memory of one part: sums, then the largest score and the total.
fn part(attention: &Attention<'_>, parts: *mut f32, token: usize, head: usize, split: usize) -> *mut f32 {
    let plan = &attention.plan;
    let index = (token * attention.shape.heads + head) * plan.splits + split;
    parts.wrapping_add(index * (plan.value_pad + 2))
}

/// Merges the parts of a row and writes the result.
pub(super) fn merge(attention: &Attention<'_>, token: usize, head: usize, parts: *mut f32) {
    let plan = &attention.plan;
    let pad = plan.value_pad;
    // SAFETY: all parts of the row were written before the barrier; the first one is used for the result.
    unsafe {
        let at = |split: usize| part(attention, parts, token, head, split);
        let largest = (0..plan.splits).fold(f32::NEG_INFINITY, |most, s| most.max(*at(s).add(pad)));
        let mut total = 0.0;
        let first = at(0);
        for split in 0..plan.splits {
            let part = at(split);
            let own = *part.add(pad);
            let factor = if own == f32::NEG_INFINITY { 0.0 } else { (own - largest).exp() };
            total += factor * *part.add(pad + 1);
            if split == 0 {
                vec::scale(attention.isa, std::slice::from_raw_parts_mut(first, pad), factor);
            } else if factor > 0.0 {
                let sums = std::slice::from_raw_parts_mut(first, pad);
                vec::axpy(attention.isa, factor, std::slice::from_raw_parts(part, pad), sums);
            }
        }
        write(attention, token, head, first, if total > 0.0 { 1.0 / total } else { 0.0 });
    }
}

/// Writes a row of results: sums × factor.
unsafe fn write(attention: &Attention<'_>, token: usize, head: usize, sums: *const f32, factor: f32) {
    let out = attention.memory.output.row(token, head).cast::<f32>().cast_mut();
    for i in 0..attention.shape.value_width {
        // SAFETY: the maker of the attention promised the row; `sums` holds a row too.
        unsafe { out.add(i).write_unaligned(*sums.add(i) * factor) };
    }
}

#[inline(always)]
unsafe fn body<S: Simd>(attention: &Attention<'_>, place: Place, scratch: Scratch) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    let rows = place.tokens * plan.group;
    let (mut begin, mut end) = (place.end, place.begin);
    // SAFETY: all addresses below are inside the scratch memory, or in rows that the attention's maker promised.
    unsafe {
        for token in 0..place.tokens {
            let (first, last) = attention.span(place.first_token + token);
            if first < last {
                begin = begin.min(first.max(place.begin));
                end = end.max(last.min(place.end));
            }
            for member in 0..plan.group {
                let row = token * plan.group + member;
                let q = memory.queries.row(place.first_token + token, place.kv_head * plan.group + member);
                let to = scratch.queries.add(row * plan.key_pad);
                for i in 0..plan.key_pad {
                    *to.add(i) = if i < shape.key_width {
                        q.cast::<f32>().add(i).read_unaligned() * shape.scale
                    } else {
                        0.0
                    };
                }
                *scratch.state.add(2 * row) = f32::NEG_INFINITY;
                *scratch.state.add(2 * row + 1) = 0.0;
            }
        }
        for i in (0..rows * plan.value_pad).step_by(16) {
            for j in (0..16).step_by(S::N) {
                S::store(scratch.sums.add(i + j), S::splat(0.0));
            }
        }
        let mut cell = begin;
        while cell < end {
            let count = TILE.min(end - cell);
            if visible(attention, &place, cell, count) {
                tile::<S>(attention, &place, scratch, cell, count);
            }
            cell += count;
        }
    }
}

/// Whether any query of the block can see any of these cells through the mask.
#[inline(always)]
unsafe fn visible(attention: &Attention<'_>, place: &Place, cell: usize, count: usize) -> bool {
    let Some(mask) = attention.memory.mask else { return true };
    for token in place.first_token..place.first_token + place.tokens {
        for member in 0..attention.plan.group {
            let head = place.kv_head * attention.plan.group + member;
            for i in cell..cell + count {
                // SAFETY: the mask has a number for every cell.
                if unsafe { masked(mask.dtype, mask.rows.row(token, head), i) } > f32::NEG_INFINITY {
                    return true;
                }
            }
            if mask.rows.head_stride == 0 {
                break;
            }
        }
    }
    false
}

#[inline(always)]
pub(super) unsafe fn masked(dtype: DType, row: *const u8, cell: usize) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        if dtype == DType::F32 {
            row.cast::<f32>().add(cell).read_unaligned()
        } else {
            half::f16::from_bits(row.cast::<u16>().add(cell).read_unaligned()).to_f32()
        }
    }
}

/// One tile of cells for all rows of the unit.
#[inline(always)]
unsafe fn tile<S: Simd>(
    attention: &Attention<'_>,
    place: &Place,
    scratch: Scratch,
    cell: usize,
    count: usize,
) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    let rows = place.tokens * plan.group;
    let fours = count.next_multiple_of(4);
    // SAFETY: as in `body`.
    unsafe {
        widen::<S>(
            shape.key_type,
            &memory.keys,
            place.kv_head,
            cell,
            count,
            shape.key_width,
            plan.key_pad,
            scratch.keys,
        );
        for i in count * plan.key_pad..fours * plan.key_pad {
            *scratch.keys.add(i) = 0.0;
        }
        let mut row = 0;
        while row + 2 <= rows {
            scores::<S, 2>(plan, scratch, row, fours);
            row += 2;
        }
        if row < rows {
            scores::<S, 1>(plan, scratch, row, fours);
        }
        for row in 0..rows {
            let (token, member) = (place.first_token + row / plan.group, row % plan.group);
            soften::<S>(attention, scratch, row, token, place.kv_head * plan.group + member, cell, count);
        }
        widen::<S>(
            shape.value_type,
            &memory.values,
            place.kv_head,
            cell,
            count,
            shape.value_width,
            plan.value_pad,
            scratch.values,
        );
        let mut row = 0;
        while row + 2 <= rows {
            gather::<S, 2>(plan, scratch, row, count);
            row += 2;
        }
        if row < rows {
            gather::<S, 1>(plan, scratch, row, count);
        }
    }
}

/// Widens rows of keys or values to f32, filled up with zeros.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a kernel: rows, range and sizes")]
unsafe fn widen<S: Simd>(
    dtype: DType,
    from: &Rows,
    head: usize,
    cell: usize,
    count: usize,
    width: usize,
    pad: usize,
    to: *mut f32,
) {
    let whole = width - width % S::N;
    let row_bytes = width / dtype.block_len() * dtype.block_bytes();
    for i in 0..count {
        // SAFETY: promised by the caller.
        unsafe {
            let (row, out) = (from.row(cell + i, head), to.add(i * pad));
            // Heads of a cell are read at different times, in steps that hardware does not foresee.
            let ahead = from.row(cell + i + TILE, head);
            for line in (0..row_bytes).step_by(64) {
                S::prefetch(ahead.wrapping_add(line));
            }
            match dtype {
                DType::F32 => {
                    for j in (0..whole).step_by(S::N) {
                        S::store(out.add(j), S::load(row.cast::<f32>().add(j)));
                    }
                    for j in whole..width {
                        *out.add(j) = row.cast::<f32>().add(j).read_unaligned();
                    }
                }
                DType::F16 => {
                    for j in (0..whole).step_by(S::N) {
                        S::store(out.add(j), S::load_f16(row.cast::<u16>().add(j)));
                    }
                    for j in whole..width {
                        *out.add(j) =
                            half::f16::from_bits(row.cast::<u16>().add(j).read_unaligned()).to_f32();
                    }
                }
                DType::BF16 => {
                    for j in (0..whole).step_by(S::N) {
                        S::store(out.add(j), S::load_bf16(row.cast::<u16>().add(j)));
                    }
                    for j in whole..width {
                        *out.add(j) =
                            half::bf16::from_bits(row.cast::<u16>().add(j).read_unaligned()).to_f32();
                    }
                }
                _ => q8_0::<S>(row, out, width / 32),
            }
            for j in width..pad {
                *out.add(j) = 0.0;
            }
        }
    }
}

/// Scores of `ROWS` rows with a tile of keys, four cells at a time.
#[inline(always)]
unsafe fn scores<S: Simd, const ROWS: usize>(plan: &Plan, scratch: Scratch, row: usize, cells: usize) {
    let width = plan.key_pad;
    // SAFETY: as in `body`.
    unsafe {
        let queries = scratch.queries.add(row * width).cast_const();
        for cell in (0..cells).step_by(4) {
            let keys = scratch.keys.add(cell * width).cast_const();
            let mut sums = [[S::splat(0.0); 4]; ROWS];
            let mut i = 0;
            while i < width {
                let k0 = S::load(keys.add(i));
                let k1 = S::load(keys.add(width + i));
                let k2 = S::load(keys.add(2 * width + i));
                let k3 = S::load(keys.add(3 * width + i));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let q = S::load(queries.add(r * width + i));
                    sums[0] = S::fma(q, k0, sums[0]);
                    sums[1] = S::fma(q, k1, sums[1]);
                    sums[2] = S::fma(q, k2, sums[2]);
                    sums[3] = S::fma(q, k3, sums[3]);
                }
                i += S::N;
            }
            for (r, sums) in sums.into_iter().enumerate() {
                let four = S::sum4(sums);
                let to = scratch.scores.add((row + r) * TILE + cell);
                std::ptr::copy_nonoverlapping(four.as_ptr(), to, 4);
            }
        }
    }
}

/// Caps and masks a row of scores, and turns them into weights relative to the largest so far.
#[inline(always)]
unsafe fn soften<S: Simd>(
    attention: &Attention<'_>,
    scratch: Scratch,
    row: usize,
    token: usize,
    head: usize,
    cell: usize,
    count: usize,
) {
    // SAFETY: as in `body`; a row of scores is TILE long, a multiple of every vector's length.
    unsafe {
        let scores = scratch.scores.add(row * TILE);
        if let Some(cap) = attention.shape.soft_cap {
            for i in (0..TILE).step_by(S::N) {
                let v = tanh::<S>(S::mul(S::load(scores.add(i)), S::splat(1.0 / cap)));
                S::store(scores.add(i), S::mul(v, S::splat(cap)));
            }
        }
        if let Some(mask) = attention.memory.mask {
            let mask_row = mask.rows.row(token, head);
            for i in 0..count {
                *scores.add(i) += masked(mask.dtype, mask_row, cell + i);
            }
        }
        let (first, last) = attention.span(token);
        for i in 0..first.saturating_sub(cell).min(count) {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        for i in last.saturating_sub(cell).min(count)..TILE {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let mut most = S::splat(f32::NEG_INFINITY);
        for i in (0..TILE).step_by(S::N) {
            most = S::max(S::load(scores.add(i)), most);
        }
        let state = scratch.state.add(2 * row);
        let before = *state;
        let largest = S::largest(most).max(before);
        if largest == f32::NEG_INFINITY {
            for i in (0..TILE).step_by(S::N) {
                S::store(scores.add(i), S::splat(0.0));
            }
            return;
        }
        let mut total = S::splat(0.0);
        for i in (0..TILE).step_by(S::N) {
            let p = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(largest)));
            S::store(scores.add(i), p);
            total = S::add(total, p);
        }
        let total = S::sum(total);
        if largest > before {
            // Earlier weights were relative to a smaller largest score.
            let factor = if before == f32::NEG_INFINITY { 0.0 } else { (before - largest).exp() };
            *state = largest;
            *state.add(1) = *state.add(1) * factor + total;
            let sums = scratch.sums.add(row * attention.plan.value_pad);
            for i in (0..attention.plan.value_pad).step_by(S::N) {
                S::store(sums.add(i), S::mul(S::load(sums.add(i)), S::splat(factor)));
            }
        } else {
            *state.add(1) += total;
        }
    }
}

/// Adds the weighted values of a tile to the sums of `ROWS` rows, four vectors at a time.
#[inline(always)]
unsafe fn gather<S: Simd, const ROWS: usize>(plan: &Plan, scratch: Scratch, row: usize, cells: usize) {
    let width = plan.value_pad;
    let mut first = 0;
    // SAFETY: as in `body`.
    unsafe {
        while first < width {
            if first + 4 * S::N <= width {
                columns::<S, ROWS, 4>(plan, scratch, row, cells, first);
                first += 4 * S::N;
            } else {
                columns::<S, ROWS, 1>(plan, scratch, row, cells, first);
                first += S::N;
            }
        }
    }
}

#[inline(always)]
unsafe fn columns<S: Simd, const ROWS: usize, const VECTORS: usize>(
    plan: &Plan,
    scratch: Scratch,
    row: usize,
    cells: usize,
    first: usize,
) {
    let width = plan.value_pad;
    // SAFETY: as in `body`.
    unsafe {
        let sums_at = |r: usize, v: usize| scratch.sums.add((row + r) * width + first + v * S::N);
        let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(sums_at(r, v));
            }
        }
        for cell in 0..cells {
            let values = scratch.values.add(cell * width + first).cast_const();
            let mut weights = [S::splat(0.0); ROWS];
            for (r, weight) in weights.iter_mut().enumerate() {
                *weight = S::splat(*scratch.scores.add((row + r) * TILE + cell));
            }
            for v in 0..VECTORS {
                let value = S::load(values.add(v * S::N));
                for (sums, weight) in sums.iter_mut().zip(&weights) {
                    if let Some(sum) = sums.get_mut(v) {
                        *sum = S::fma(*weight, value, *sum);
                    }
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                S::store(sums_at(r, v), sum);
            }
        }
    }
}
