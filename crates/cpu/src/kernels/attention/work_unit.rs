//! One unit of work: a block of queries with the query heads of some key heads, over a range of KV-cache slots.
//!
//! ```text
//! scratch memory of a thread, in f32; rows = key heads × queries of the block × query heads of a key head
//! columns  key_pad × TILE      a tile of keys, widened and transposed; not for few queries
//! widened  TILE × pad          a tile of keys or values, widened; few queries read most types in place instead
//! queries  rows × key_pad      scaled, padded with zeros
//! sums     rows × value_pad    Σ p v so far
//! scores   rows × TILE         scores, then p = exp(score − largest)
//! state    rows × STATE        largest score so far, Σ p so far
//! ```

use std::ops::Range;

use quadriga_graph::DType;

use super::cache_tile::{CacheSide, CacheTile, PREFETCH_DISTANCE, TileScratch, columns_width, widened_width};
use super::slot_tile::{self, STATE, STRIP, ScoreRow, TILE};
use super::{Attention, AttentionPlan, AttentionShape, HeadRows, KV_SPLIT};
use crate::kernels::vec::simd::{Simd, dispatch};

pub(super) fn scratch_floats(plan: &AttentionPlan, shape: &AttentionShape) -> Option<usize> {
    let rows = unit_rows(plan)?;
    let per_row = plan.key_pad.checked_add(plan.value_pad)?.checked_add(STATE + TILE)?;
    let tiles = columns_width(plan).checked_add(widened_width(plan, shape))?.checked_mul(TILE)?;
    rows.checked_mul(per_row)?.checked_add(tiles)
}

/// Rows of the scratch memory.
fn unit_rows(plan: &AttentionPlan) -> Option<usize> {
    plan.group.checked_mul(plan.block)?.checked_mul(plan.heads_at_once)?.checked_add(STRIP)
}

/// The arrays in the scratch memory.
#[derive(Clone, Copy)]
struct UnitScratch {
    tiles: TileScratch,
    queries: *mut f32,
    sums: *mut f32,
    scores: *mut f32,
    state: *mut f32,
}

/// The position of a unit in the work.
#[derive(Clone)]
pub(super) struct WorkUnit {
    /// At most `heads_at_once`.
    pub(super) kv_heads: Range<usize>,
    pub(super) block: usize,
    pub(super) split: usize,
    /// Whether it is the first of a query's KV splits, which starts with the sink.
    pub(super) first: bool,
    /// Whether no query of the block sees any other KV split: the unit's results are final.
    pub(super) alone: bool,
    /// Whether the thread has just computed the previous KV split, and with it prefetched the first slots of this one.
    pub(super) prefetched: bool,
}

/// The heads, queries and slots of a unit.
struct UnitExtent {
    kv_heads: Range<usize>,
    tokens: Range<usize>,
    slots: Range<usize>,
    /// The KV split that the partial results belong to; `None` if the results are final.
    split: Option<usize>,
    /// Whether the queries start with their sinks.
    first: bool,
    /// Whether the first slots have been prefetched.
    prefetched: bool,
}

impl UnitExtent {
    /// Rows of one key head.
    fn rows(&self, plan: &AttentionPlan) -> usize {
        self.tokens.len() * plan.group
    }

    /// Calls `work(row, token, head)` for all rows.
    #[inline(always)]
    fn each(&self, plan: &AttentionPlan, mut work: impl FnMut(usize, usize, usize)) {
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

/// Computes a unit: writes results, or partial results for [`merge`].
pub(super) fn run(attention: &Attention<'_>, unit: WorkUnit, scratch: *mut f32, partials: *mut f32) {
    let plan = &attention.plan;
    let WorkUnit { kv_heads, block, split, first, alone, prefetched } = unit;
    let (tokens, slots) = (attention.shape.tokens, attention.shape.slots);
    let slots =
        if plan.kv_splits == 1 { 0..slots } else { split * KV_SPLIT..((split + 1) * KV_SPLIT).min(slots) };
    let tokens = block * plan.block..((block + 1) * plan.block).min(tokens);
    let split = (!alone).then_some(split);
    let extent = &UnitExtent { kv_heads, tokens, slots, split, first, prefetched };
    let Some(rows) = unit_rows(plan) else { return };
    let mut at = scratch;
    let mut take = |floats: usize| {
        let here = at;
        at = at.wrapping_add(floats);
        here
    };
    // All lengths are multiples of sixteen, which keeps vectors aligned.
    let scratch = UnitScratch {
        tiles: TileScratch {
            columns: take(TILE * columns_width(plan)),
            widened: take(TILE * widened_width(plan, &attention.shape)),
        },
        queries: take(rows * plan.key_pad),
        sums: take(rows * plan.value_pad),
        scores: take(rows * TILE),
        state: take(rows * STATE),
    };
    dispatch!(attention.isa, body(attention: &Attention<'_>, extent: &UnitExtent, scratch: UnitScratch, partials: *mut f32) -> ());
}

/// The memory of one partial result: sums, then the largest score and the total.
fn partial(
    attention: &Attention<'_>,
    partials: *mut f32,
    token: usize,
    head: usize,
    split: usize,
) -> *mut f32 {
    let plan = &attention.plan;
    let index = (token * attention.shape.heads + head) * plan.kv_splits + split;
    partials.wrapping_add(index * (plan.value_pad + 2))
}

/// Merges the partial results of a row and writes the result.
pub(super) fn merge(
    attention: &Attention<'_>,
    row: [usize; 2],
    kv_splits: &Range<usize>,
    partials: *mut f32,
) {
    dispatch!(attention.isa, merge_with(attention: &Attention<'_>, row: [usize; 2], kv_splits: &Range<usize>, partials: *mut f32) -> ());
}

#[inline(always)]
unsafe fn merge_with<S: Simd>(
    attention: &Attention<'_>,
    [token, head]: [usize; 2],
    kv_splits: &Range<usize>,
    partials: *mut f32,
) {
    let pad = attention.plan.value_pad;
    // SAFETY: the row's partial results were written before the barrier; the first one is overwritten by the result.
    unsafe {
        let at = |split: usize| partial(attention, partials, token, head, split);
        let largest = kv_splits.clone().fold(f32::NEG_INFINITY, |most, s| most.max(*at(s).add(pad)));
        let mut total = 0.0;
        let sums = at(kv_splits.start);
        for split in kv_splits.clone() {
            let partial = at(split);
            let own = *partial.add(pad);
            let factor = if own == f32::NEG_INFINITY { 0.0 } else { (own - largest).exp() };
            total += factor * *partial.add(pad + 1);
            let factor = S::splat(factor);
            for i in (0..pad).step_by(S::N) {
                let (own, sum) = (S::load(partial.add(i)), S::load(sums.add(i)));
                let sum =
                    if split == kv_splits.start { S::mul(factor, own) } else { S::fma(factor, own, sum) };
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
    // Without visible slots, zeros; a NaN stays one.
    let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
    let whole = width - width % S::N;
    // SAFETY: the caller of `Attention::new` promised the row; `sums` holds a row too.
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
unsafe fn body<S: Simd>(
    attention: &Attention<'_>,
    extent: &UnitExtent,
    scratch: UnitScratch,
    partials: *mut f32,
) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    // SAFETY: all addresses below are inside the scratch memory, or in rows that the caller of `Attention::new` promised.
    unsafe {
        extent.each(plan, |row, token, head| {
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
            let start = if extent.first { attention.sink(head) } else { [f32::NEG_INFINITY, 0.0] };
            slot_tile::clear(start, scratch.state.add(row * STATE), sums, plan.value_pad);
        });
        let (mut begin, mut end) = (extent.slots.end, extent.slots.start);
        for token in extent.tokens.clone() {
            let (first, last) = attention.span(token);
            if first < last {
                begin = begin.min(first.max(extent.slots.start));
                end = end.max(last.min(extent.slots.end));
            }
        }
        if plan.direct && !extent.prefetched {
            // Each tile prefetches the next one; nothing has prefetched the first.
            prefetch_rows::<S>(
                &memory.keys,
                shape.key_type,
                shape.key_width,
                extent,
                begin..end.min(begin + PREFETCH_DISTANCE),
            );
            prefetch_rows::<S>(
                &memory.values,
                shape.value_type,
                shape.value_width,
                extent,
                begin..end.min(begin + PREFETCH_DISTANCE),
            );
        }
        let mut slot = begin;
        while slot < end {
            let count = TILE.min(end - slot);
            if let Some(tokens) = seeing(attention, extent, &(slot..slot + count)) {
                one_tile::<S>(attention, extent, &tokens, scratch, slot, count);
            }
            slot += count;
        }
        extent.each(plan, |row, token, head| {
            let sums = scratch.sums.add(row * plan.value_pad);
            let [largest, total] = slot_tile::largest_and_total::<S>(scratch.state.add(row * STATE));
            let Some(split) = extent.split else {
                write::<S>(attention, token, head, sums, total);
                return;
            };
            let partial = partial(attention, partials, token, head, split);
            for i in (0..plan.value_pad).step_by(S::N) {
                S::store(partial.add(i), S::load(sums.add(i)));
            }
            partial.add(plan.value_pad).write(largest);
            partial.add(plan.value_pad + 1).write(total);
        });
    }
}

/// Prefetches the rows of some slots, of all heads of a unit.
#[inline(always)]
unsafe fn prefetch_rows<S: Simd>(
    from: &HeadRows,
    dtype: DType,
    width: usize,
    extent: &UnitExtent,
    slots: Range<usize>,
) {
    let bytes = width / dtype.block_len() * dtype.block_bytes();
    for slot in slots {
        for head in extent.kv_heads.clone() {
            let row = from.row(slot, head);
            for line in (0..bytes).step_by(64) {
                // SAFETY: any address may be prefetched.
                unsafe { S::prefetch(row.wrapping_add(line)) };
            }
        }
    }
}

/// The range of queries of the block that see any of these slots, with any of the unit's heads.
fn seeing(attention: &Attention<'_>, extent: &UnitExtent, slots: &Range<usize>) -> Option<Range<usize>> {
    let group = attention.plan.group;
    let mut heads = extent.kv_heads.start * group..extent.kv_heads.end * group;
    if attention.memory.mask.is_none_or(|mask| mask.rows.head_stride == 0) {
        // All heads see the same slots.
        heads.end = heads.end.min(heads.start + 1);
    }
    let sees = |token: &usize| heads.clone().any(|head| attention.sees(*token, head, slots.clone()));
    let first = extent.tokens.clone().find(sees)?;
    let last = extent.tokens.clone().rfind(sees)?;
    Some(first..last + 1)
}

/// One tile of slots for the rows of these queries.
#[inline(always)]
unsafe fn one_tile<S: Simd>(
    attention: &Attention<'_>,
    extent: &UnitExtent,
    tokens: &Range<usize>,
    scratch: UnitScratch,
    slot: usize,
    count: usize,
) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    let skipped = (tokens.start - extent.tokens.start) * plan.group;
    let rows = tokens.len() * plan.group;
    // The first row of a key head.
    let first_row = |i: usize| i * extent.rows(plan) + skipped;
    // SAFETY: as in `body`.
    unsafe {
        for (i, head) in extent.kv_heads.clone().enumerate() {
            let row = first_row(i);
            let queries = scratch.queries.add(row * plan.key_pad).cast_const();
            let keys = CacheTile::new(attention, CacheSide::Keys, &extent.kv_heads, head, slot, count);
            keys.scores::<S>(plan, scratch.tiles, queries, rows, scratch.scores.add(row * TILE));
        }
        let sees_all = |token: usize| {
            let (first, last) = attention.span(token);
            first <= slot && slot + TILE <= last
        };
        let plain = count == TILE
            && shape.soft_cap.is_none()
            && memory.mask.is_none()
            && tokens.clone().all(sees_all);
        for (i, kv_head) in extent.kv_heads.clone().enumerate() {
            for r in 0..rows {
                let row = first_row(i) + r;
                let row = ScoreRow {
                    token: tokens.start + r / plan.group,
                    head: kv_head * plan.group + r % plan.group,
                    scores: scratch.scores.add(row * TILE),
                    state: scratch.state.add(row * STATE),
                    sums: scratch.sums.add(row * plan.value_pad),
                };
                if !plain {
                    slot_tile::mask::<S>(attention, row, slot, count);
                }
                slot_tile::weights::<S>(row, plan.value_pad);
            }
        }
        for (i, head) in extent.kv_heads.clone().enumerate() {
            let row = first_row(i);
            let weights = scratch.scores.add(row * TILE).cast_const();
            let sums = scratch.sums.add(row * plan.value_pad);
            let values = CacheTile::new(attention, CacheSide::Values, &extent.kv_heads, head, slot, count);
            values.gather::<S>(plan, scratch.tiles, weights, rows, sums);
        }
    }
}
