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
//! The work is divided by key heads and blocks of queries. When these are few (one query after a long context), the KV
//! cache is also split, every [`KV_SPLIT`] slots, and the partial results are merged by their maxima and sums. The split
//! depends on the shape alone, so results do not depend on the number of threads.

mod cache_tile;
#[cfg(target_arch = "x86_64")]
mod decode_avx512;
mod slot_tile;
#[cfg(target_arch = "x86_64")]
mod transposed;
#[cfg(target_arch = "x86_64")]
mod transposed_amx;
#[cfg(target_arch = "x86_64")]
mod transposed_avx512;
mod work_unit;

use std::marker::PhantomData;
use std::ops::Range;

use quadriga_graph::DType;

use work_unit::WorkUnit;

use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// Slots of one KV split.
pub const KV_SPLIT: usize = 128;

/// Below this many units of work, the KV cache is split.
const FEW_UNITS: usize = 64;

/// Rows (queries × heads) of a unit of work, about.
const UNIT_ROWS: usize = 64;

/// Up to this many queries read keys and values in place; for more, a tile is first widened and transposed.
const FEW_TOKENS: usize = 4;

/// Sizes and parameters of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Queries.
    pub tokens: usize,
    /// KV-cache slots: keys and values.
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

/// How the work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AttentionPlan {
    /// Query heads per key head.
    group: usize,
    /// Queries per unit.
    block: usize,
    /// Blocks of queries.
    blocks: usize,
    /// KV splits.
    kv_splits: usize,
    /// Elements of a padded key row and value row.
    key_pad: usize,
    value_pad: usize,
    /// Bytes of a key and of a value.
    key_bytes: usize,
    value_bytes: usize,
    /// Key heads that one unit may take.
    heads_at_once: usize,
    /// Whether rows of keys and values are read as they are, in place or widened. Otherwise keys are transposed first.
    direct: bool,
    /// The kernel for many queries, if there are enough of them.
    many: Option<ManyQueryKernel>,
}

/// Kernels for many queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "they are x86-64 kernels"))]
enum ManyQueryKernel {
    /// AMX tiles.
    Amx,
    /// AVX-512 vectors.
    Avx512,
}

const ALIGN: usize = 64;

impl AttentionPlan {
    fn new(isa: Isa, shape: &AttentionShape) -> Result<AttentionPlan, KernelError> {
        for dtype in [shape.key_type, shape.value_type] {
            if !dtype.is_cache_type() {
                return Err(KernelError::Type { dtype });
            }
        }
        for (dtype, columns) in [(shape.key_type, shape.key_width), (shape.value_type, shape.value_width)] {
            if !columns.is_multiple_of(dtype.block_len()) {
                return Err(KernelError::Blocks { dtype, columns });
            }
        }
        if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
            let (left, right) = (shape.heads, shape.kv_heads);
            return Err(KernelError::Differ { what: "query heads as a multiple of key heads", left, right });
        }
        let group = shape.heads / shape.kv_heads;
        #[cfg(target_arch = "x86_64")]
        let many = match (isa.amx(), isa.avx512()) {
            (Some(_), _) if transposed_amx::is_supported(shape) => Some(ManyQueryKernel::Amx),
            (_, Some(_)) if transposed_avx512::is_supported(shape) => Some(ManyQueryKernel::Avx512),
            _ => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let many = {
            let _ = isa;
            None
        };
        let block = (UNIT_ROWS / group.max(1)).clamp(1, shape.tokens.max(1));
        let blocks = shape.tokens.div_ceil(block);
        let few = many.is_none() && shape.kv_heads.saturating_mul(blocks) < FEW_UNITS;
        let kv_splits = if few { shape.slots.div_ceil(KV_SPLIT).max(1) } else { 1 };
        let (key_pad, value_pad) = (shape.key_width.div_ceil(16) * 16, shape.value_width.div_ceil(16) * 16);
        let even = shape.key_width == key_pad && shape.value_width == value_pad;
        let direct = even && shape.tokens <= FEW_TOKENS;
        let heads_at_once = if direct && kv_splits > 1 { shape.kv_heads } else { 1 };
        let row_bytes = |dtype: DType, width: usize| dtype.row_bytes(width).unwrap_or(0);
        let key_bytes = row_bytes(shape.key_type, shape.key_width);
        let value_bytes = row_bytes(shape.value_type, shape.value_width);
        Ok(AttentionPlan {
            group,
            block,
            blocks,
            kv_splits,
            key_pad,
            value_pad,
            key_bytes,
            value_bytes,
            heads_at_once,
            direct,
            many,
        })
    }

    /// Bytes of scratch memory for one thread, of partial results, and of keys and values as AMX tiles.
    fn bytes(&self, shape: &AttentionShape) -> Option<[usize; 3]> {
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(ALIGN);
        let scratch = work_unit::scratch_floats(self, shape)?.checked_mul(4)?;
        let rows = shape.tokens.checked_mul(shape.heads)?;
        let partials = if self.kv_splits == 1 {
            0
        } else {
            rows.checked_mul(self.kv_splits)?.checked_mul(self.value_pad.checked_add(2)?)?.checked_mul(4)?
        };
        #[cfg(target_arch = "x86_64")]
        match self.many {
            Some(ManyQueryKernel::Amx) => {
                let [scratch, tiles] = transposed_amx::bytes(shape)?;
                return Some([aligned(scratch)?, 0, aligned(tiles)?]);
            }
            Some(ManyQueryKernel::Avx512) => return Some([aligned(transposed_avx512::bytes(shape)?)?, 0, 0]),
            None => {}
        }
        Some([aligned(scratch)?, aligned(partials)?, 0])
    }

    fn total(&self, shape: &AttentionShape, threads: usize) -> Result<usize, KernelError> {
        self.bytes(shape)
            .and_then(|[scratch, partials, tiles]| {
                scratch.checked_mul(threads)?.checked_add(partials)?.checked_add(tiles)?.checked_add(ALIGN)
            })
            .ok_or(KernelError::TooLarge { rows: shape.tokens, columns: shape.slots })
    }
}

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
    /// There is no kernel for these types or sizes, there are fewer spans than queries, or fewer sinks than heads.
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
        let AttentionShape { kv_heads, tokens, slots, .. } = self.shape;
        let [scratch_bytes, partials_bytes, _] =
            self.plan.bytes(&self.shape).ok_or(KernelError::TooLarge { rows: tokens, columns: slots })?;
        let partials = self.work.cast::<f32>();
        let scratch = self.work.wrapping_add(partials_bytes + worker.index() * scratch_bytes);
        #[cfg(target_arch = "x86_64")]
        match (self.plan.many, self.isa.amx(), self.isa.avx512()) {
            (Some(ManyQueryKernel::Amx), Some(token), _) => {
                let tiles = self.work.wrapping_add(self.threads * scratch_bytes);
                return transposed_amx::run(token, self, worker, scratch, tiles);
            }
            (Some(ManyQueryKernel::Avx512), _, Some(token)) => {
                return transposed_avx512::run(token, self, worker, scratch);
            }
            _ => {}
        }
        let AttentionPlan { blocks, kv_splits, heads_at_once, .. } = self.plan;
        if kv_splits == 1 {
            worker.chunks(kv_heads * blocks, |unit| {
                // Under causal spans, late queries see the most slots: they go first.
                let (kv_head, block) = (unit % kv_heads, blocks - 1 - unit / kv_heads);
                let unit = WorkUnit {
                    kv_heads: kv_head..kv_head + 1,
                    block,
                    split: 0,
                    first: true,
                    alone: true,
                    prefetched: false,
                };
                work_unit::run(self, unit, scratch.cast(), partials);
            });
            return Ok(());
        }
        // The heads of a slot are adjacent in memory: a unit takes all of them where that leaves enough units, so that
        // it reads memory sequentially.
        let visible = self.visible_splits();
        let together = if visible.len() * blocks >= 4 * worker.threads() { heads_at_once } else { 1 };
        let strips = kv_heads.div_ceil(together);
        let alone = visible.len() == 1;
        let mut next = usize::MAX;
        worker.chunks(strips * visible.len() * blocks, |unit| {
            let prefetched = strips == 1 && unit == next && !unit.is_multiple_of(visible.len());
            next = unit + 1;
            let (strip, rest) = (unit % strips, unit / strips);
            let (split, block) = (visible.start + rest % visible.len(), rest / visible.len());
            let kv_heads = strip * together..((strip + 1) * together).min(kv_heads);
            let first = split == visible.start;
            let unit = WorkUnit { kv_heads, block, split, first, alone, prefetched };
            work_unit::run(self, unit, scratch.cast(), partials);
        });
        if alone {
            return Ok(());
        }
        worker.barrier()?;
        let heads = self.shape.heads;
        worker.chunks(tokens * heads, |row| {
            work_unit::merge(self, [row / heads, row % heads], &visible, partials);
        });
        Ok(())
    }

    /// The KV splits that any query sees; at least one.
    fn visible_splits(&self) -> Range<usize> {
        let (first, last) = (0..self.shape.tokens).fold((usize::MAX, 0), |(first, last), token| {
            let (begin, end) = self.span(token);
            if begin < end { (first.min(begin), last.max(end)) } else { (first, last) }
        });
        if first < last { first / KV_SPLIT..last.div_ceil(KV_SPLIT) } else { 0..1 }
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
        match self.memory.spans.and_then(|spans| spans.get(token)) {
            Some([begin, end]) => {
                let limit = |v: &i32| usize::try_from(*v).unwrap_or(0).min(slots);
                (limit(begin), limit(end))
            }
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
