//! One unit of work: a block of queries with the query heads of some key heads, over a range of cells.
//!
//! ```text
//! scratch memory of a thread, in f32; rows = key heads × queries of the block × query heads of a key head
//! columns  key_pad × TILE      a tile of keys, widened, in columns; not for few queries, which read the cache itself
//! widened  TILE × pad          a tile of keys or values, likewise
//! queries  rows × key_pad      scaled, filled up with zeros
//! sums     rows × value_pad    Σ p v so far
//! scores   rows × TILE         scores, then p = exp(score − largest)
//! state    rows × STATE        largest score so far, Σ p so far
//! ```

use std::ops::Range;

use quadriga_graph::DType;

#[cfg(target_arch = "x86_64")]
use super::avx512::{self, Far};
use super::tile::{self, Cells, F16, F32, Q8, Row, STATE, STRIP, TILE};
use super::{Attention, Plan, Rows, SPLIT};
use crate::kernels::vec::q8_0;
use crate::kernels::vec::simd::{Simd, dispatch};

/// How many cells ahead keys and values are asked for.
const AHEAD: usize = TILE;

pub(super) fn scratch_floats(plan: &Plan) -> Option<usize> {
    let rows = unit_rows(plan)?;
    let per_row = plan.key_pad.checked_add(plan.value_pad)?.checked_add(STATE + TILE)?;
    let tile = if plan.direct {
        0
    } else {
        plan.key_pad.checked_add(plan.key_pad.max(plan.value_pad))?.checked_mul(TILE)?
    };
    rows.checked_mul(per_row)?.checked_add(tile)
}

/// Rows that there is scratch memory for.
fn unit_rows(plan: &Plan) -> Option<usize> {
    plan.group.checked_mul(plan.block)?.checked_mul(plan.heads_at_once)?.checked_add(STRIP)
}

/// The parts of the scratch memory.
#[derive(Clone, Copy)]
struct Scratch {
    columns: *mut f32,
    widened: *mut f32,
    queries: *mut f32,
    sums: *mut f32,
    scores: *mut f32,
    state: *mut f32,
}

/// Where a unit is.
#[derive(Clone)]
pub(super) struct Unit {
    /// At most `heads_at_once`.
    pub(super) kv_heads: Range<usize>,
    pub(super) block: usize,
    pub(super) split: usize,
    /// Whether no query of the block sees any other part of the cells: the unit's results are the results.
    pub(super) alone: bool,
    /// Whether the thread has just computed the part of the cells before this one, and so has asked for its first
    /// cells.
    pub(super) follows: bool,
}

/// What a unit covers.
struct Place {
    kv_heads: Range<usize>,
    tokens: Range<usize>,
    cells: Range<usize>,
    /// Where the part of a row goes that is to be merged, by token and head; none if the results are complete.
    split: Option<usize>,
    /// Whether the first cells have been asked for.
    follows: bool,
}

impl Place {
    /// Rows of one key head.
    fn rows(&self, plan: &Plan) -> usize {
        self.tokens.len() * plan.group
    }

    /// Calls `work(row, token, head)` for all rows.
    #[inline(always)]
    fn each(&self, plan: &Plan, mut work: impl FnMut(usize, usize, usize)) {
        let mut row = 0;
        for kv_head in self.kv_heads.clone() {
            for token in self.tokens.clone() {
                for member in 0..plan.group {
                    work(row, token, kv_head * plan.group + member);
                    row += 1;
                }
            }
        }
    }
}

/// Computes a unit: writes results, or parts for [`merge`].
pub(super) fn run(attention: &Attention<'_>, unit: Unit, scratch: *mut f32, parts: *mut f32) {
    let plan = &attention.plan;
    let Unit { kv_heads, block, split, alone, follows } = unit;
    let (tokens, cells) = (attention.shape.tokens, attention.shape.cells);
    let cells = if plan.splits == 1 { 0..cells } else { split * SPLIT..((split + 1) * SPLIT).min(cells) };
    let tokens = block * plan.block..((block + 1) * plan.block).min(tokens);
    let place = &Place { kv_heads, tokens, cells, split: (!alone).then_some(split), follows };
    let Some(rows) = unit_rows(plan) else { return };
    let mut at = scratch;
    let mut take = |floats: usize| {
        let here = at;
        at = at.wrapping_add(floats);
        here
    };
    // All lengths are multiples of sixteen, which keeps vectors aligned.
    let scratch = Scratch {
        columns: take(if plan.direct { 0 } else { TILE * plan.key_pad }),
        widened: take(if plan.direct { 0 } else { TILE * plan.key_pad.max(plan.value_pad) }),
        queries: take(rows * plan.key_pad),
        sums: take(rows * plan.value_pad),
        scores: take(rows * TILE),
        state: take(rows * STATE),
    };
    dispatch!(attention.isa, body(attention: &Attention<'_>, place: &Place, scratch: Scratch, parts: *mut f32) -> ());
}

/// The memory of one part: sums, then the largest score and the total.
fn part(attention: &Attention<'_>, parts: *mut f32, token: usize, head: usize, split: usize) -> *mut f32 {
    let plan = &attention.plan;
    let index = (token * attention.shape.heads + head) * plan.splits + split;
    parts.wrapping_add(index * (plan.value_pad + 2))
}

/// Merges these parts of a row and writes the result.
pub(super) fn merge(attention: &Attention<'_>, row: [usize; 2], splits: &Range<usize>, parts: *mut f32) {
    dispatch!(attention.isa, merge_with(attention: &Attention<'_>, row: [usize; 2], splits: &Range<usize>, parts: *mut f32) -> ());
}

#[inline(always)]
unsafe fn merge_with<S: Simd>(
    attention: &Attention<'_>,
    [token, head]: [usize; 2],
    splits: &Range<usize>,
    parts: *mut f32,
) {
    let pad = attention.plan.value_pad;
    // SAFETY: these parts of the row were written before the barrier; the first one is used for the result.
    unsafe {
        let at = |split: usize| part(attention, parts, token, head, split);
        let largest = splits.clone().fold(f32::NEG_INFINITY, |most, s| most.max(*at(s).add(pad)));
        let mut total = 0.0;
        let sums = at(splits.start);
        for split in splits.clone() {
            let part = at(split);
            let own = *part.add(pad);
            let factor = if own == f32::NEG_INFINITY { 0.0 } else { (own - largest).exp() };
            total += factor * *part.add(pad + 1);
            let factor = S::splat(factor);
            for i in (0..pad).step_by(S::N) {
                let (own, sum) = (S::load(part.add(i)), S::load(sums.add(i)));
                let sum = if split == splits.start { S::mul(factor, own) } else { S::fma(factor, own, sum) };
                S::store(sums.add(i), sum);
            }
        }
        write::<S>(attention, token, head, sums, total);
    }
}

/// Writes a row of results: sums ÷ total.
#[inline(always)]
unsafe fn write<S: Simd>(attention: &Attention<'_>, token: usize, head: usize, sums: *const f32, total: f32) {
    let out = attention.memory.output.row(token, head).cast::<f32>().cast_mut();
    let width = attention.shape.value_width;
    let factor = if total > 0.0 { 1.0 / total } else { 0.0 };
    let whole = width - width % S::N;
    // SAFETY: the maker of the attention promised the row; `sums` holds a row too.
    unsafe {
        for i in (0..whole).step_by(S::N) {
            S::store(out.add(i), S::mul(S::load(sums.add(i)), S::splat(factor)));
        }
        for i in whole..width {
            out.add(i).write_unaligned(*sums.add(i) * factor);
        }
    }
}

#[inline(always)]
unsafe fn body<S: Simd>(attention: &Attention<'_>, place: &Place, scratch: Scratch, parts: *mut f32) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    // SAFETY: all addresses below are inside the scratch memory, or in rows that the attention's maker promised.
    unsafe {
        place.each(plan, |row, token, head| {
            let from = memory.queries.row(token, head).cast::<f32>();
            let to = scratch.queries.add(row * plan.key_pad);
            let whole = shape.key_width - shape.key_width % S::N;
            for i in (0..whole).step_by(S::N) {
                S::store(to.add(i), S::mul(S::load(from.add(i)), S::splat(shape.scale)));
            }
            for i in whole..plan.key_pad {
                *to.add(i) =
                    if i < shape.key_width { from.add(i).read_unaligned() * shape.scale } else { 0.0 };
            }
            let sums = scratch.sums.add(row * plan.value_pad);
            tile::clear::<S>(scratch.state.add(row * STATE), sums, plan.value_pad);
        });
        let (mut begin, mut end) = (place.cells.end, place.cells.start);
        for token in place.tokens.clone() {
            let (first, last) = attention.span(token);
            if first < last {
                begin = begin.min(first.max(place.cells.start));
                end = end.max(last.min(place.cells.end));
            }
        }
        if plan.direct && !place.follows {
            // What later tiles ask for ahead, nobody has asked for yet.
            ask_for::<S>(&memory.keys, shape.key_type, shape.key_width, place, begin..end.min(begin + AHEAD));
            ask_for::<S>(
                &memory.values,
                shape.value_type,
                shape.value_width,
                place,
                begin..end.min(begin + AHEAD),
            );
        }
        let mut cell = begin;
        while cell < end {
            let count = TILE.min(end - cell);
            if let Some(tokens) = seeing(attention, place, &(cell..cell + count)) {
                one_tile::<S>(attention, place, &tokens, scratch, cell, count);
            }
            cell += count;
        }
        place.each(plan, |row, token, head| {
            let sums = scratch.sums.add(row * plan.value_pad);
            let [largest, total] = tile::largest_and_total::<S>(scratch.state.add(row * STATE));
            let Some(split) = place.split else {
                write::<S>(attention, token, head, sums, total);
                return;
            };
            let part = part(attention, parts, token, head, split);
            for i in (0..plan.value_pad).step_by(S::N) {
                S::store(part.add(i), S::load(sums.add(i)));
            }
            part.add(plan.value_pad).write(largest);
            part.add(plan.value_pad + 1).write(total);
        });
    }
}

/// Asks for the rows of some cells, of all heads of a unit.
#[inline(always)]
unsafe fn ask_for<S: Simd>(from: &Rows, dtype: DType, width: usize, place: &Place, cells: Range<usize>) {
    let bytes = width / dtype.block_len() * dtype.block_bytes();
    for cell in cells {
        for head in place.kv_heads.clone() {
            let row = from.row(cell, head);
            for line in (0..bytes).step_by(64) {
                // SAFETY: any address may be asked for.
                unsafe { S::prefetch(row.wrapping_add(line)) };
            }
        }
    }
}

/// From the first to the last query of the block that sees any of these cells, with any of the unit's heads.
fn seeing(attention: &Attention<'_>, place: &Place, cells: &Range<usize>) -> Option<Range<usize>> {
    let group = attention.plan.group;
    let mut heads = place.kv_heads.start * group..place.kv_heads.end * group;
    if attention.memory.mask.is_none_or(|mask| mask.rows.head_stride == 0) {
        // What one head sees, all do.
        heads.end = heads.end.min(heads.start + 1);
    }
    let sees = |token: &usize| heads.clone().any(|head| attention.sees(*token, head, cells.clone()));
    let first = place.tokens.clone().find(sees)?;
    let last = place.tokens.clone().rfind(sees)?;
    Some(first..last + 1)
}

/// One tile of cells for the rows of these queries.
#[inline(always)]
unsafe fn one_tile<S: Simd>(
    attention: &Attention<'_>,
    place: &Place,
    tokens: &Range<usize>,
    scratch: Scratch,
    cell: usize,
    count: usize,
) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    let skipped = (tokens.start - place.tokens.start) * plan.group;
    let rows = tokens.len() * plan.group;
    // The first row of a key head.
    let first_row = |i: usize| i * place.rows(plan) + skipped;
    let heads = place.kv_heads.clone();
    let direct = |from: &Rows, dtype: DType, head: usize, width: usize| {
        let bytes = width / dtype.block_len() * dtype.block_bytes();
        // All heads together ask for the next tile front to back, which hardware then does ahead of them.
        let together = from.head_stride == bytes && from.stride == bytes * heads.len();
        let dense = from.row(cell + AHEAD, heads.start).wrapping_add((head - heads.start) * TILE * bytes);
        Cells {
            first: from.row(cell, head),
            stride: from.stride,
            count,
            width,
            ahead: if together { dense } else { from.row(cell + AHEAD, head) },
            ahead_step: if together { bytes } else { from.stride },
            ahead_bytes: bytes,
        }
    };
    // Keys and values that avx512.rs knows.
    #[cfg(target_arch = "x86_64")]
    let known = S::REGISTERS >= 32
        && plan.direct
        && matches!(shape.key_type, DType::F16 | DType::Q8_0)
        && (shape.key_type, shape.key_width) == (shape.value_type, shape.value_width);
    // What is asked for while a head's keys (side 0) or values (side 1) are worked on. Where the heads lie side by
    // side, they ask for the next tile of keys and of values together and in turns: for the first half of both while
    // keys are worked on, for the second while values are. With two streams a core has more requests on the way than
    // with one.
    #[cfg(target_arch = "x86_64")]
    let far = |side: usize, head: usize| {
        let half = shape.key_width / shape.key_type.block_len() * shape.key_type.block_bytes() / 2;
        let all = [&memory.keys, &memory.values];
        if all.iter().all(|rows| rows.head_stride == 2 * half && rows.stride == 2 * half * heads.len()) {
            let skip = (head - heads.start) * TILE * half;
            let at = all.map(|rows| rows.row(cell + AHEAD + side * TILE / 2, heads.start).wrapping_add(skip));
            return Far { at, step: half };
        }
        let rows = if side == 0 { &memory.keys } else { &memory.values };
        let row = rows.row(cell + AHEAD, head);
        Far { at: [row, row.wrapping_add(half)], step: rows.stride }
    };
    // SAFETY: as in `body`.
    unsafe {
        for (i, head) in place.kv_heads.clone().enumerate() {
            let row = first_row(i);
            let queries = scratch.queries.add(row * plan.key_pad).cast_const();
            let scores = scratch.scores.add(row * TILE);
            let keys = direct(&memory.keys, shape.key_type, head, shape.key_width);
            match shape.key_type {
                #[cfg(target_arch = "x86_64")]
                DType::F16 if known && avx512::suits(&keys) => {
                    avx512::scores::<F16>(&keys, far(0, head), queries, plan.key_pad, rows, scores);
                }
                #[cfg(target_arch = "x86_64")]
                DType::Q8_0 if known && avx512::suits(&keys) => {
                    avx512::scores::<Q8>(&keys, far(0, head), queries, plan.key_pad, rows, scores);
                }
                DType::F16 if plan.direct => {
                    tile::scores::<S, F16>(keys, queries, plan.key_pad, rows, scores)
                }
                DType::Q8_0 if plan.direct => {
                    tile::scores::<S, Q8>(keys, queries, plan.key_pad, rows, scores)
                }
                DType::F32 if plan.direct => {
                    tile::scores::<S, F32>(keys, queries, plan.key_pad, rows, scores)
                }
                dtype => {
                    widen::<S>(dtype, keys, plan.key_pad, scratch.widened);
                    tile::to_columns::<S>(scratch.widened, plan.key_pad, scratch.columns);
                    tile::column_scores::<S>(scratch.columns, queries, plan.key_pad, rows, scores);
                }
            }
        }
        let sees_all = |token: usize| {
            let (first, last) = attention.span(token);
            first <= cell && cell + TILE <= last
        };
        let plain = count == TILE
            && shape.soft_cap.is_none()
            && memory.mask.is_none()
            && tokens.clone().all(sees_all);
        for (i, kv_head) in place.kv_heads.clone().enumerate() {
            for r in 0..rows {
                let row = first_row(i) + r;
                let row = Row {
                    token: tokens.start + r / plan.group,
                    head: kv_head * plan.group + r % plan.group,
                    scores: scratch.scores.add(row * TILE),
                    state: scratch.state.add(row * STATE),
                    sums: scratch.sums.add(row * plan.value_pad),
                };
                if !plain {
                    tile::mask::<S>(attention, row, cell, count);
                }
                tile::weights::<S>(row, plan.value_pad);
            }
        }
        for (i, head) in place.kv_heads.clone().enumerate() {
            let row = first_row(i);
            let weights = scratch.scores.add(row * TILE).cast_const();
            let sums = scratch.sums.add(row * plan.value_pad);
            let values = direct(&memory.values, shape.value_type, head, shape.value_width);
            match shape.value_type {
                #[cfg(target_arch = "x86_64")]
                DType::F16 if known && avx512::suits(&values) => {
                    avx512::gather::<F16>(&values, far(1, head), weights, rows, sums, plan.value_pad);
                }
                #[cfg(target_arch = "x86_64")]
                DType::Q8_0 if known && avx512::suits(&values) => {
                    avx512::gather::<Q8>(&values, far(1, head), weights, rows, sums, plan.value_pad);
                }
                DType::F16 if plan.direct => {
                    tile::gather::<S, F16>(values, weights, rows, sums, plan.value_pad)
                }
                DType::Q8_0 if plan.direct => {
                    tile::gather::<S, Q8>(values, weights, rows, sums, plan.value_pad)
                }
                DType::F32 if plan.direct => {
                    tile::gather::<S, F32>(values, weights, rows, sums, plan.value_pad)
                }
                dtype => {
                    widen::<S>(dtype, values, plan.value_pad, scratch.widened);
                    let values = Cells {
                        first: scratch.widened.cast_const().cast(),
                        stride: plan.value_pad * 4,
                        count,
                        width: plan.value_pad,
                        ahead: std::ptr::null(),
                        ahead_step: 0,
                        ahead_bytes: 0,
                    };
                    tile::gather::<S, F32>(values, weights, rows, sums, plan.value_pad);
                }
            }
        }
    }
}

/// Widens rows of keys or values to f32, filled up with zeros.
#[inline(always)]
unsafe fn widen<S: Simd>(dtype: DType, cells: Cells, pad: usize, to: *mut f32) {
    let width = cells.width;
    let whole = width - width % S::N;
    for i in 0..cells.count {
        // SAFETY: promised by the caller.
        unsafe {
            let (row, out) = (cells.first.wrapping_add(i * cells.stride), to.add(i * pad));
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
