//! One unit of work: a block of queries of a run with the query heads of some key heads, over some of its KV splits.
//!
//! ```text
//! scratch memory of a thread, in f32; rows = key heads × queries of the block × query heads of a key head
//! columns  key_pad × TILE      a tile of keys, widened and transposed; not for few queries
//! widened  TILE × pad          a tile of keys or values, widened; few queries read most types in place instead
//! queries  rows × key_pad      scaled, padded with zeros
//! sums     rows × value_pad    Σ p v so far
//! scores   rows × TILE         scores, then p = exp(score − largest)
//! state    rows × STATE        largest score so far, Σ p so far
//! folded   rows × (value_pad + 2)  sums, largest score and Σ p of the KV splits before
//! ```

use std::ops::Range;

use super::cache_tile::{CacheSide, CacheTile, PREFETCH_DISTANCE, TileScratch, columns_width, widened_width};
use super::query_run::QueryRun;
use super::slot_tile::{self, STATE, STRIP, ScoreRow, TILE};
use super::unit_extent::UnitExtent;
use super::{Attention, AttentionPlan, AttentionShape, KV_SPLIT};
use crate::kernels::vec::simd::{Simd, dispatch};

pub(super) fn scratch_floats(plan: &AttentionPlan, shape: &AttentionShape) -> Option<usize> {
    let rows = unit_rows(plan, shape)?;
    let per_row = plan.key_pad.checked_add(2 * plan.value_pad)?.checked_add(STATE + TILE + ROW_END)?;
    let tiles = columns_width(plan).checked_add(widened_width(plan))?.checked_mul(TILE)?;
    rows.checked_mul(per_row)?.checked_add(tiles)
}

/// Floats after the sums of a folded row, so that rows stay aligned.
const ROW_END: usize = 16;

/// Rows of the scratch memory.
fn unit_rows(plan: &AttentionPlan, shape: &AttentionShape) -> Option<usize> {
    plan.unit_rows(shape)?.checked_add(STRIP)
}

/// The arrays in the scratch memory.
#[derive(Clone, Copy)]
struct UnitScratch {
    tiles: TileScratch,
    queries: *mut f32,
    sums: *mut f32,
    scores: *mut f32,
    state: *mut f32,
    folded: *mut f32,
}

/// The position of a unit in the work.
pub(super) struct WorkUnit<'a> {
    pub(super) run: &'a QueryRun,
    /// All of them, for runs whose rows are read as they are, or one.
    pub(super) kv_heads: Range<usize>,
    /// The block of the run's queries.
    pub(super) block: usize,
    /// The KV splits that the unit computes: all of the run, or one of several.
    pub(super) splits: Range<usize>,
    /// Where the partial results of the run are, if units share its KV splits.
    pub(super) partials: Option<*mut f32>,
    /// Whether the thread has just computed the previous KV split, and with it prefetched the first slots of this one.
    pub(super) prefetched: bool,
}

/// Computes a unit: writes results, or partial results for [`merge`].
pub(super) fn run(attention: &Attention<'_>, unit: &WorkUnit<'_>, scratch: *mut f32) {
    let plan = &attention.plan;
    let Some(rows) = unit_rows(plan, &attention.shape) else { return };
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
            widened: take(TILE * widened_width(plan)),
        },
        queries: take(rows * plan.key_pad),
        sums: take(rows * plan.value_pad),
        scores: take(rows * TILE),
        state: take(rows * STATE),
        folded: take(rows * (plan.value_pad + ROW_END)),
    };
    dispatch!(attention.isa, body(attention: &Attention<'_>, unit: &WorkUnit<'_>, scratch: UnitScratch) -> ());
}

/// The memory of one partial result of a run: sums, then the largest score and the total. `row` is a query of the run with
/// a head, `split` a KV split of the run.
fn partial(
    attention: &Attention<'_>,
    run: &QueryRun,
    partials: *mut f32,
    row: usize,
    split: usize,
) -> *mut f32 {
    let splits = run.splits();
    let index = row * splits.len() + split - splits.start;
    partials.wrapping_add(index * attention.plan.partial_floats())
}

/// Merges the partial results of a row of a run, one of its queries with a head, and writes the result.
pub(super) fn merge(attention: &Attention<'_>, run: &QueryRun, row: usize, partials: *mut f32) {
    dispatch!(attention.isa, merge_with(attention: &Attention<'_>, run: &QueryRun, row: usize, partials: *mut f32) -> ());
}

#[inline(always)]
unsafe fn merge_with<S: Simd>(attention: &Attention<'_>, run: &QueryRun, row: usize, partials: *mut f32) {
    let (pad, heads) = (attention.plan.value_pad, attention.shape.heads);
    let splits = run.splits();
    // SAFETY: the row's partial results were written before the barrier; the first one is overwritten by the result.
    unsafe {
        let folded = partial(attention, run, partials, row, splits.start);
        for split in splits.start + 1..splits.end {
            let partial = partial(attention, run, partials, row, split);
            fold::<S>(folded, partial, [*partial.add(pad), *partial.add(pad + 1)], pad);
        }
        let total = *folded.add(pad + 1);
        write::<S>(attention, run.tokens.start + row / heads, row % heads, folded, total);
    }
}

/// Adds a partial result (sums; the largest score and the sum of weights) to the one of all slots before, which has the
/// two numbers after its sums.
///
/// # Safety
/// Both must be valid; the CPU must have the instruction set of `S`.
#[inline(always)]
unsafe fn fold<S: Simd>(folded: *mut f32, sums: *const f32, [own, total]: [f32; 2], pad: usize) {
    // SAFETY: promised by the caller.
    unsafe {
        let before = *folded.add(pad);
        let largest = before.max(own);
        let factor = |most: f32| if most == f32::NEG_INFINITY { 0.0 } else { (most - largest).exp() };
        let (earlier, later) = (factor(before), factor(own));
        *folded.add(pad) = largest;
        *folded.add(pad + 1) = earlier * *folded.add(pad + 1) + later * total;
        let (earlier, later) = (S::splat(earlier), S::splat(later));
        for i in (0..pad).step_by(S::N) {
            let sum = S::mul(earlier, S::load(folded.add(i)));
            S::store(folded.add(i), S::fma(later, S::load(sums.add(i)), sum));
        }
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
unsafe fn body<S: Simd>(attention: &Attention<'_>, unit: &WorkUnit<'_>, scratch: UnitScratch) {
    let (plan, shape, memory) = (&attention.plan, &attention.shape, &attention.memory);
    let run = unit.run;
    let first = run.tokens.start + unit.block * plan.block;
    let mut extent = UnitExtent {
        run,
        kv_heads: unit.kv_heads.clone(),
        tokens: first..(first + plan.block).min(run.tokens.end),
        slots: 0..0,
        direct: plan.is_direct(run),
        prefetched: unit.prefetched,
    };
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
        });
        for split in unit.splits.clone() {
            extent.slots = split * KV_SPLIT..((split + 1) * KV_SPLIT).min(shape.slots);
            one_split::<S>(attention, &extent, split == run.splits().start, scratch);
            extent.each(plan, |row, token, head| {
                let sums = scratch.sums.add(row * plan.value_pad);
                let [largest, total] = slot_tile::largest_and_total::<S>(scratch.state.add(row * STATE));
                let keep = |to: *mut f32| {
                    for i in (0..plan.value_pad).step_by(S::N) {
                        S::store(to.add(i), S::load(sums.add(i)));
                    }
                    to.add(plan.value_pad).write(largest);
                    to.add(plan.value_pad + 1).write(total);
                };
                if let Some(partials) = unit.partials {
                    let row = (token - run.tokens.start) * shape.heads + head;
                    keep(partial(attention, run, partials, row, split));
                    return;
                }
                if unit.splits.len() == 1 {
                    write::<S>(attention, token, head, sums, total);
                    return;
                }
                let folded = scratch.folded.add(row * (plan.value_pad + ROW_END));
                if split == unit.splits.start {
                    keep(folded);
                    return;
                }
                fold::<S>(folded, sums, [largest, total], plan.value_pad);
                if split + 1 == unit.splits.end {
                    write::<S>(attention, token, head, folded, *folded.add(plan.value_pad + 1));
                }
            });
            extent.prefetched = true;
        }
    }
}

/// The online softmax of a unit's rows over the slots of one KV split.
#[inline(always)]
unsafe fn one_split<S: Simd>(
    attention: &Attention<'_>,
    extent: &UnitExtent<'_>,
    is_first: bool,
    scratch: UnitScratch,
) {
    let plan = &attention.plan;
    // SAFETY: as in `body`.
    unsafe {
        extent.each(plan, |row, _, head| {
            let sums = scratch.sums.add(row * plan.value_pad);
            let start = if is_first { attention.sink(head) } else { [f32::NEG_INFINITY, 0.0] };
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
        if extent.direct && !extent.prefetched {
            // Each tile prefetches the next one; nothing has prefetched the first.
            for side in [CacheSide::Keys, CacheSide::Values] {
                prefetch_rows::<S>(attention, side, extent, begin..end.min(begin + PREFETCH_DISTANCE));
            }
        }
        let mut slot = begin;
        while slot < end {
            // Tiles end at multiples of their length, and so inside a page.
            let count = (TILE - slot % TILE).min(end - slot);
            if let Some(tokens) = seeing(attention, extent, &(slot..slot + count)) {
                one_tile::<S>(attention, extent, &tokens, scratch, slot, count);
            }
            slot += count;
        }
    }
}

/// Prefetches the rows of some slots, of all heads of a unit.
#[inline(always)]
unsafe fn prefetch_rows<S: Simd>(
    attention: &Attention<'_>,
    side: CacheSide,
    extent: &UnitExtent<'_>,
    slots: Range<usize>,
) {
    let (from, dtype, width) = side.rows(attention);
    let bytes = width / dtype.block_len() * dtype.block_bytes();
    for slot in slots {
        for head in extent.kv_heads.clone() {
            let row = from.row(attention.cache_row(extent.run.table, slot), head);
            for line in (0..bytes).step_by(64) {
                // SAFETY: any address may be prefetched.
                unsafe { S::prefetch(row.wrapping_add(line)) };
            }
        }
    }
}

/// The range of queries of the block that see any of these slots, with any of the unit's heads.
fn seeing(attention: &Attention<'_>, extent: &UnitExtent<'_>, slots: &Range<usize>) -> Option<Range<usize>> {
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
    extent: &UnitExtent<'_>,
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
            let keys = CacheTile::new(attention, CacheSide::Keys, extent, head, slot, count);
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
            let values = CacheTile::new(attention, CacheSide::Values, extent, head, slot, count);
            values.gather::<S>(plan, scratch.tiles, weights, rows, sums);
        }
    }
}
