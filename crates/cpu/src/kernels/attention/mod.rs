//! Attention in one pass over the KV cache: `softmax(scale · q kᵀ + mask) v` with an online softmax.
//!
//! The query heads that share a key head are computed together, so that keys and values are read once for all of them.
//! Slots outside every query's span, and tiles of slots that the mask hides from all queries of a block, are not read:
//! the cost is that of the visible slots.
//!
//! Few queries read keys and values in place (work_unit.rs, cache_tile.rs, slot_tile.rs; decode_avx512.rs for f16, bf16 and q8_0); q4_0
//! and q5_1 are widened to f32, a tile at a time. Many queries use transposed kernels, with one query per SIMD lane
//! (transposed.rs): AMX tiles (transposed_amx.rs) or AVX-512 (transposed_avx512.rs).
//!
//! A sink is a score without a value: the online softmax of a query starts with it. Of the parts of a query that are
//! merged later, only the first does.
//!
//! The queries of each sequence are a run of their own (query_run.rs). The work of a run is divided by key heads and blocks
//! of queries, and, for few queries, by [`KV_SPLIT`] slots of the KV cache. The partial results of these splits are folded
//! one after another by their maxima and sums, by the thread that computes all of them or, where threads share them, at
//! the end: the same arithmetic, so that results depend neither on the number of threads nor on the other runs.

mod cache_tile;
#[cfg(target_arch = "x86_64")]
mod decode_avx512;
mod plan;
mod planner;
mod query_run;
mod slot_tile;
#[cfg(target_arch = "x86_64")]
mod transposed;
#[cfg(target_arch = "x86_64")]
mod transposed_amx;
#[cfg(target_arch = "x86_64")]
mod transposed_avx512;
mod unit_extent;
mod work_unit;

use std::marker::PhantomData;
use std::ops::Range;

use quadriga_graph::{DType, PAGE_SLOTS};

pub use query_run::PageTable;

use plan::{AttentionPlan, ManyQueryKernel};
use query_run::QueryRun;
use work_unit::WorkUnit;

use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// Slots of one KV split.
pub const KV_SPLIT: usize = 128;

/// From this many queries on, a run uses a kernel for many, where there is one.
const MANY_TOKENS: usize = 16;

const ALIGN: usize = 64;

/// Sizes and parameters of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Queries.
    pub tokens: usize,
    /// KV-cache slots: keys and values. With a page table, the positions that a row of it has pages for.
    pub slots: usize,
    /// Elements of a query and of a key, of one head.
    pub key_width: usize,
    /// Elements of a value, of one head.
    pub value_width: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Scores are replaced by `cap · tanh(score / cap)`, before the mask.
    pub soft_cap: Option<f32>,
    /// The type of keys, one of the [types of a KV cache](DType::is_cache_type).
    pub key_type: DType,
    /// The type of values, likewise.
    pub value_type: DType,
}

/// Rows at an address: row (i, head) starts at `pointer + i × stride + head × head_stride`, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct HeadRows {
    /// The first byte.
    pub pointer: *const u8,
    /// Bytes from one token or slot to the next.
    pub stride: usize,
    /// Bytes from one head to the next.
    pub head_stride: usize,
}

/// A mask that is added to the scores: row (token, head), one number per slot.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMask {
    /// Where the rows are; a head stride of 0 gives all heads the same mask.
    pub rows: HeadRows,
    /// F32 or F16.
    pub dtype: DType,
}

/// The memory of an attention's inputs and output. Rows are contiguous, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct AttentionMemory<'a> {
    /// `f32` queries.
    pub queries: HeadRows,
    /// Keys.
    pub keys: HeadRows,
    /// Values.
    pub values: HeadRows,
    /// Added to the scores.
    pub mask: Option<AttentionMask>,
    /// For each query, the first visible slot and one past the last; without spans, all slots are visible.
    pub spans: Option<&'a [[i32; 2]]>,
    /// Where slots are in keys and values, and instead of other spans those of the queries.
    pub pages: Option<PageTable<'a>>,
    /// For each head, one more score of every query, without a value.
    pub sinks: Option<&'a [f32]>,
    /// `f32` results: row (token, head) of `value_width` elements.
    pub output: HeadRows,
}

/// An attention, ready to run.
#[derive(Debug)]
pub struct Attention<'a> {
    isa: Isa,
    shape: AttentionShape,
    memory: AttentionMemory<'a>,
    plan: AttentionPlan,
    work: *mut u8,
    threads: usize,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: the caller of `new` promised the memory for 'a; threads write disjoint parts of output and work memory.
unsafe impl Send for Attention<'_> {}
// SAFETY: as above.
unsafe impl Sync for Attention<'_> {}

impl<'a> Attention<'a> {
    /// Bytes of work memory for runs of up to `threads` threads.
    ///
    /// # Errors
    /// There is no kernel for these types or sizes.
    pub fn work_bytes(isa: Isa, shape: &AttentionShape, threads: usize) -> Result<usize, KernelError> {
        AttentionPlan::new(isa, shape)?.total(shape, threads)
    }

    /// An attention on this memory.
    ///
    /// # Errors
    /// There is no kernel for these types or sizes, there are fewer spans than queries, fewer sinks than heads, or a page
    /// table for fewer slots or without any page.
    ///
    /// # Safety
    /// For `'a`: all rows must be readable, the output's writable, and [`work_bytes`](Attention::work_bytes) bytes at
    /// `work` initialised and writable; output and work memory must be used through this object alone. Output rows
    /// must not overlap.
    pub unsafe fn new(
        isa: Isa,
        shape: AttentionShape,
        memory: AttentionMemory<'a>,
        threads: usize,
        work: *mut u8,
    ) -> Result<Attention<'a>, KernelError> {
        let plan = AttentionPlan::new(isa, &shape)?;
        plan.total(&shape, threads)?;
        if let Some(spans) = memory.spans
            && spans.len() < shape.tokens
        {
            return Err(KernelError::Short { what: "spans", has: spans.len(), needs: shape.tokens });
        }
        if let Some(PageTable { spans, columns, rows, .. }) = memory.pages {
            let check = |what, has, needs| {
                if has < needs { Err(KernelError::Short { what, has, needs }) } else { Ok(()) }
            };
            check("spans", spans.len(), shape.tokens)?;
            check("positions with a page", columns.saturating_mul(PAGE_SLOTS), shape.slots)?;
            check("rows of keys and values", rows, PAGE_SLOTS)?;
        }
        if let Some(sinks) = memory.sinks
            && sinks.len() < shape.heads
        {
            return Err(KernelError::Short { what: "sinks", has: sinks.len(), needs: shape.heads });
        }
        if let Some(mask) = memory.mask
            && !matches!(mask.dtype, DType::F32 | DType::F16)
        {
            return Err(KernelError::Type { dtype: mask.dtype });
        }
        let work = work.wrapping_add(work.align_offset(ALIGN));
        Ok(Attention { isa, shape, memory, plan, work, threads, lifetime: PhantomData })
    }

    /// Computes this thread's share. It has barriers inside; one more must follow before the results are read.
    ///
    /// # Errors
    /// The run has more threads than the work memory is for, or another thread failed.
    ///
    /// # Safety
    /// All workers of one run must call it, once each and at the same point of the run; no other run may use the
    /// attention meanwhile.
    pub unsafe fn run(&self, worker: &Worker<'_>) -> Result<(), KernelError> {
        if worker.threads() > self.threads {
            let (has, needs) = (self.threads, worker.threads());
            return Err(KernelError::Short { what: "threads that the work memory is for", has, needs });
        }
        let AttentionShape { heads, kv_heads, tokens, slots, .. } = self.shape;
        let [scratch_bytes, partials_bytes, _] =
            self.plan.bytes(&self.shape).ok_or(KernelError::TooLarge { rows: tokens, columns: slots })?;
        let partials = self.work.cast::<f32>();
        let scratch = self.work.wrapping_add(partials_bytes + worker.index() * scratch_bytes);
        // The heads of a slot are adjacent in memory: a unit takes all of them where that leaves enough units, so that
        // it reads memory sequentially.
        let pieces: usize = self.short_runs().map(|(run, _)| run.splits().len()).sum();
        let enough = pieces >= 4 * worker.threads();
        let mut shared = false;
        for (run, partial) in self.short_runs() {
            let together = if enough && self.plan.is_direct(&run) { kv_heads } else { 1 };
            let (strips, blocks) = (kv_heads.div_ceil(together), run.tokens.len().div_ceil(self.plan.block));
            let splits = run.splits();
            let parts = if partial.is_some() { splits.len() } else { 1 };
            let mut next = usize::MAX;
            worker.chunks(strips * parts * blocks, |unit| {
                let prefetched = strips == 1 && unit == next && !unit.is_multiple_of(parts);
                next = unit + 1;
                let (strip, rest) = (unit % strips, unit / strips);
                // Under causal spans, late queries see the most slots: they go first.
                let (part, block) = (rest % parts, blocks - 1 - rest / parts);
                let unit = WorkUnit {
                    run: &run,
                    kv_heads: strip * together..((strip + 1) * together).min(kv_heads),
                    block,
                    splits: if parts == 1 {
                        splits.clone()
                    } else {
                        splits.start + part..splits.start + part + 1
                    },
                    partials: partial.map(|first| partials.wrapping_add(first)),
                    prefetched,
                };
                work_unit::run(self, &unit, scratch.cast());
            });
            shared |= partial.is_some();
        }
        if shared {
            worker.barrier()?;
            for (run, partial) in self.short_runs() {
                let Some(first) = partial else { continue };
                worker.chunks(run.tokens.len() * heads, |row| {
                    work_unit::merge(self, &run, row, partials.wrapping_add(first));
                });
            }
        }
        #[cfg(target_arch = "x86_64")]
        for (number, run) in self.runs().filter(|run| self.is_long(run)).enumerate() {
            match (self.plan.many, self.isa.amx(), self.isa.avx512()) {
                (Some(ManyQueryKernel::Amx), Some(token), _) => {
                    let tiles = self.work.wrapping_add(partials_bytes + self.threads * scratch_bytes);
                    if number > 0 {
                        // The tiles of the run before must no longer be in use.
                        worker.barrier()?;
                    }
                    transposed_amx::run(token, self, &run, worker, scratch, tiles)?;
                }
                (Some(ManyQueryKernel::Avx512), _, Some(token)) => {
                    transposed_avx512::run(token, self, &run, worker, scratch)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether no query's result can depend on slots that it does not see. Where several queries see different slots, those
    /// of all of them are multiplied, some with a weight of 0, which makes NaN of a NaN or an infinite value.
    pub fn is_separate(&self) -> bool {
        self.memory.mask.is_none() && self.runs().all(|run| run.tokens.len() == 1 || run.slots.is_empty())
    }

    /// Whether a run has enough queries for a kernel for many.
    fn is_long(&self, run: &QueryRun) -> bool {
        self.plan.many.is_some() && run.tokens.len() >= MANY_TOKENS && !run.slots.is_empty()
    }

    /// The runs that are not [long](Attention::is_long). Where several units share the slots of a run, which is as long as
    /// there is memory for partial results, it comes with the place of these in floats.
    fn short_runs(&self) -> impl Iterator<Item = (QueryRun, Option<usize>)> {
        let mut used = 0;
        self.runs().filter(|run| !self.is_long(run)).map(move |run| {
            let splits = run.splits().len();
            let rows = run.tokens.len().saturating_mul(self.shape.heads).saturating_mul(splits);
            let fits = splits > 1 && rows <= self.plan.partials - used;
            let place = fits.then_some(used * self.plan.partial_floats());
            used += if fits { rows } else { 0 };
            (run, place)
        })
    }

    /// Whether a query sees any of these slots with this head.
    fn sees(&self, token: usize, head: usize, slots: Range<usize>) -> bool {
        let (first, last) = self.span(token);
        let slots = slots.start.max(first)..slots.end.min(last);
        let Some(mask) = self.memory.mask else { return !slots.is_empty() };
        let row = mask.rows.row(token, head);
        // SAFETY: the caller of `new` promised a mask with a number for every slot.
        slots.into_iter().any(|slot| unsafe { slot_tile::masked(&mask, row, slot) } != f32::NEG_INFINITY)
    }

    /// The score and weight that the online softmax of a head's queries starts with: those of its sink.
    fn sink(&self, head: usize) -> [f32; 2] {
        match self.memory.sinks.and_then(|sinks| sinks.get(head)) {
            Some(sink) => [*sink, 1.0],
            None => [f32::NEG_INFINITY, 0.0],
        }
    }

    /// The slots that a query sees.
    fn span(&self, token: usize) -> (usize, usize) {
        let slots = self.shape.slots;
        let limit = |v: &i32| usize::try_from(*v).unwrap_or(0).min(slots);
        if let Some(pages) = self.memory.pages {
            return pages.spans.get(token).map_or((0, 0), |[begin, end, _]| (limit(begin), limit(end)));
        }
        match self.memory.spans.and_then(|spans| spans.get(token)) {
            Some([begin, end]) => (limit(begin), limit(end)),
            None => (0, slots),
        }
    }
}

impl HeadRows {
    /// The address of a row.
    fn row(&self, index: usize, head: usize) -> *const u8 {
        self.pointer.wrapping_add(index * self.stride + head * self.head_stride)
    }
}
