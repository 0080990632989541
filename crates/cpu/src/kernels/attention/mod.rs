//! Attention in one pass: `softmax(scale · q kᵀ + mask) v` with a running softmax.
//!
//! The query heads that share a key head are computed together, so that keys and values are read once for all of
//! them. Cells outside every query's span, and tiles of cells that the mask hides from all queries of a block, are
//! not read: the cost is that of the visible part.
//!
//! Few queries read keys and values where they are (unit.rs, tile.rs; avx512.rs for f16). Many have kernels of their
//! own, with a query in each lane (lanes.rs): AMX tiles (amx.rs) or AVX-512 (many.rs).
//!
//! Work is shared out by key heads and blocks of queries. When these are few (one query after a long context), the
//! cells are also split, every [`SPLIT`] cells, and the parts merged afterwards by their maxima and sums. The split
//! depends on the shape alone, so results do not depend on the number of threads.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod many;
mod tile;
mod unit;

use std::marker::PhantomData;
use std::ops::Range;

use quadriga_graph::DType;

use unit::Unit;

use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// Cells of one part, when the cells are split.
pub const SPLIT: usize = 128;

/// Below this many units of work, the cells are split.
const FEW_UNITS: usize = 64;

/// Rows (queries × heads) that a unit of work aims at.
const UNIT_ROWS: usize = 64;

/// Up to this many queries read keys and values where they are; more are worth a widened copy.
const FEW_TOKENS: usize = 4;

/// Sizes and parameters of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Queries.
    pub tokens: usize,
    /// Keys and values.
    pub cells: usize,
    /// Elements of a query and of a key, of one head.
    pub key_width: usize,
    /// Elements of a value, of one head.
    pub value_width: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Scores are replaced by `cap · tanh(score / cap)`, before the mask.
    pub soft_cap: Option<f32>,
    /// The type of keys: F32, F16, BF16 or Q8_0.
    pub key_type: DType,
    /// The type of values: F32, F16, BF16 or Q8_0.
    pub value_type: DType,
}

/// Rows at an address: row (i, head) starts at `pointer + i × stride + head × head_stride`, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// The first byte.
    pub pointer: *const u8,
    /// Bytes from one token or cell to the next.
    pub stride: usize,
    /// Bytes from one head to the next.
    pub head_stride: usize,
}

/// Numbers that are added to the scores: row (token, head), one number per cell.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// Where the rows are; a head stride of 0 gives all heads the same mask.
    pub rows: Rows,
    /// F32 or F16.
    pub dtype: DType,
}

/// The memory an attention works on. Rows are contiguous, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// `f32` queries.
    pub queries: Rows,
    /// Keys.
    pub keys: Rows,
    /// Values.
    pub values: Rows,
    /// What is added to the scores.
    pub mask: Option<Mask>,
    /// For each query the first cell it sees and one past the last; without spans, all see all cells.
    pub spans: Option<&'a [[i32; 2]]>,
    /// `f32` results: row (token, head) of `value_width` elements.
    pub output: Rows,
}

/// An attention, ready to run.
#[derive(Debug)]
pub struct Attention<'a> {
    isa: Isa,
    shape: Shape,
    memory: Memory<'a>,
    plan: Plan,
    work: *mut u8,
    threads: usize,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: the maker promised the memory for 'a; threads write disjoint parts of output and work memory.
unsafe impl Send for Attention<'_> {}
// SAFETY: as above.
unsafe impl Sync for Attention<'_> {}

/// How the work is cut up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    /// Query heads of a key head.
    group: usize,
    /// Queries of a unit.
    block: usize,
    /// Blocks of queries.
    blocks: usize,
    /// Parts of the cells.
    splits: usize,
    /// Elements of a padded key row and value row.
    key_pad: usize,
    value_pad: usize,
    /// Key heads that one unit may take.
    heads_at_once: usize,
    /// Whether keys and values are read where they are.
    direct: bool,
    /// How many queries are computed, if there are enough of them.
    many: Option<Many>,
}

/// Kernels for many queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "they are x86-64 kernels"))]
enum Many {
    /// AMX tiles.
    Tiles,
    /// AVX-512 vectors.
    Vectors,
}

const ALIGN: usize = 64;

impl Plan {
    fn new(isa: Isa, shape: &Shape) -> Result<Plan, KernelError> {
        for dtype in [shape.key_type, shape.value_type] {
            if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0) {
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
            (Some(_), _) if amx::suits(shape) => Some(Many::Tiles),
            (_, Some(_)) if many::suits(shape) => Some(Many::Vectors),
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
        let splits = if few { shape.cells.div_ceil(SPLIT).max(1) } else { 1 };
        let (key_pad, value_pad) = (shape.key_width.div_ceil(16) * 16, shape.value_width.div_ceil(16) * 16);
        let even = shape.key_width == key_pad && shape.value_width == value_pad;
        let brain = shape.key_type == DType::BF16 || shape.value_type == DType::BF16;
        let direct = even && !brain && shape.tokens <= FEW_TOKENS;
        let heads_at_once = if direct && splits > 1 { shape.kv_heads } else { 1 };
        Ok(Plan { group, block, blocks, splits, key_pad, value_pad, heads_at_once, direct, many })
    }

    /// Bytes of scratch memory for one thread, of parts that are merged later, and of keys and values as tiles.
    fn bytes(&self, shape: &Shape) -> Option<[usize; 3]> {
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(ALIGN);
        let scratch = unit::scratch_floats(self)?.checked_mul(4)?;
        let rows = shape.tokens.checked_mul(shape.heads)?;
        let parts = if self.splits == 1 {
            0
        } else {
            rows.checked_mul(self.splits)?.checked_mul(self.value_pad.checked_add(2)?)?.checked_mul(4)?
        };
        #[cfg(target_arch = "x86_64")]
        match self.many {
            Some(Many::Tiles) => {
                let [scratch, tiles] = amx::bytes(shape)?;
                return Some([aligned(scratch)?, 0, aligned(tiles)?]);
            }
            Some(Many::Vectors) => return Some([aligned(many::bytes(shape)?)?, 0, 0]),
            None => {}
        }
        Some([aligned(scratch)?, aligned(parts)?, 0])
    }

    fn total(&self, shape: &Shape, threads: usize) -> Result<usize, KernelError> {
        self.bytes(shape)
            .and_then(|[scratch, parts, tiles]| {
                scratch.checked_mul(threads)?.checked_add(parts)?.checked_add(tiles)?.checked_add(ALIGN)
            })
            .ok_or(KernelError::TooLarge { rows: shape.tokens, columns: shape.cells })
    }
}

impl<'a> Attention<'a> {
    /// Bytes of work memory for runs of up to `threads` threads.
    ///
    /// # Errors
    /// Types or sizes that there is no kernel for.
    pub fn work_bytes(isa: Isa, shape: &Shape, threads: usize) -> Result<usize, KernelError> {
        Plan::new(isa, shape)?.total(shape, threads)
    }

    /// An attention on this memory.
    ///
    /// # Errors
    /// Types or sizes that there is no kernel for, or fewer spans than queries.
    ///
    /// # Safety
    /// For `'a`: all rows must be readable, the output's writable, and [`work_bytes`](Attention::work_bytes) bytes at
    /// `work` initialised and writable; output and work memory must be used through this object alone. Output rows
    /// must not overlap.
    pub unsafe fn new(
        isa: Isa,
        shape: Shape,
        memory: Memory<'a>,
        threads: usize,
        work: *mut u8,
    ) -> Result<Attention<'a>, KernelError> {
        let plan = Plan::new(isa, &shape)?;
        plan.total(&shape, threads)?;
        if let Some(spans) = memory.spans
            && spans.len() < shape.tokens
        {
            return Err(KernelError::Short { what: "spans", has: spans.len(), needs: shape.tokens });
        }
        if let Some(mask) = memory.mask
            && !matches!(mask.dtype, DType::F32 | DType::F16)
        {
            return Err(KernelError::Type { dtype: mask.dtype });
        }
        let work = work.wrapping_add(work.align_offset(ALIGN));
        Ok(Attention { isa, shape, memory, plan, work, threads, lifetime: PhantomData })
    }

    /// Computes; every thread of the run calls this. It has barriers inside; one more must follow before the results
    /// are read.
    ///
    /// # Errors
    /// There are more threads than the work memory was made for, or another thread failed.
    pub fn run(&self, worker: &Worker<'_>) -> Result<(), KernelError> {
        if worker.threads() > self.threads {
            let (has, needs) = (self.threads, worker.threads());
            return Err(KernelError::Short { what: "threads the work memory was made for", has, needs });
        }
        let Shape { kv_heads, tokens, cells, .. } = self.shape;
        let [scratch_bytes, parts_bytes, _] =
            self.plan.bytes(&self.shape).ok_or(KernelError::TooLarge { rows: tokens, columns: cells })?;
        let parts = self.work.cast::<f32>();
        let scratch = self.work.wrapping_add(parts_bytes + worker.index() * scratch_bytes);
        #[cfg(target_arch = "x86_64")]
        match (self.plan.many, self.isa.amx(), self.isa.avx512()) {
            (Some(Many::Tiles), Some(token), _) => {
                let tiles = self.work.wrapping_add(self.threads * scratch_bytes);
                return amx::run(token, self, worker, scratch, tiles);
            }
            (Some(Many::Vectors), _, Some(token)) => return many::run(token, self, worker, scratch),
            _ => {}
        }
        let Plan { blocks, splits, heads_at_once, .. } = self.plan;
        if splits == 1 {
            worker.chunks(kv_heads * blocks, |unit| {
                // Late queries see the most cells under a causal span: they go first.
                let (kv_head, block) = (unit % kv_heads, blocks - 1 - unit / kv_heads);
                let unit =
                    Unit { kv_heads: kv_head..kv_head + 1, block, split: 0, alone: true, follows: false };
                unit::run(self, unit, scratch.cast(), parts);
            });
            return Ok(());
        }
        // The heads of a cell lie side by side: a unit takes all of them where that leaves enough units, so that it
        // reads memory front to back.
        let visible = self.visible_splits();
        let together = if visible.len() * blocks >= 4 * worker.threads() { heads_at_once } else { 1 };
        let strips = kv_heads.div_ceil(together);
        let alone = visible.len() == 1;
        let mut next = usize::MAX;
        worker.chunks(strips * visible.len() * blocks, |unit| {
            let follows = strips == 1 && unit == next && !unit.is_multiple_of(visible.len());
            next = unit + 1;
            let (strip, rest) = (unit % strips, unit / strips);
            let (split, block) = (visible.start + rest % visible.len(), rest / visible.len());
            let kv_heads = strip * together..((strip + 1) * together).min(kv_heads);
            unit::run(self, Unit { kv_heads, block, split, alone, follows }, scratch.cast(), parts);
        });
        if alone {
            return Ok(());
        }
        worker.barrier()?;
        let heads = self.shape.heads;
        worker.chunks(tokens * heads, |row| {
            unit::merge(self, [row / heads, row % heads], &visible, parts);
        });
        Ok(())
    }

    /// The parts of the cells that any query sees; at least one.
    fn visible_splits(&self) -> Range<usize> {
        let (first, last) = (0..self.shape.tokens).fold((usize::MAX, 0), |(first, last), token| {
            let (begin, end) = self.span(token);
            if begin < end { (first.min(begin), last.max(end)) } else { (first, last) }
        });
        if first < last { first / SPLIT..last.div_ceil(SPLIT) } else { 0..1 }
    }

    /// Whether a query sees any of these cells with this head.
    fn sees(&self, token: usize, head: usize, cells: Range<usize>) -> bool {
        let (first, last) = self.span(token);
        let cells = cells.start.max(first)..cells.end.min(last);
        let Some(mask) = self.memory.mask else { return !cells.is_empty() };
        let row = mask.rows.row(token, head);
        // SAFETY: the mask has a number for every cell, as the maker of the attention promised.
        cells.into_iter().any(|cell| unsafe { tile::masked(&mask, row, cell) } > f32::NEG_INFINITY)
    }

    /// The cells that a query sees.
    fn span(&self, token: usize) -> (usize, usize) {
        let cells = self.shape.cells;
        match self.memory.spans.and_then(|spans| spans.get(token)) {
            Some([begin, end]) => {
                let limit = |v: &i32| usize::try_from(*v).unwrap_or(0).min(cells);
                (limit(begin), limit(end))
            }
            None => (0, cells),
        }
    }
}

impl Rows {
    /// The address of a row.
    fn row(&self, index: usize, head: usize) -> *const u8 {
        self.pointer.wrapping_add(index * self.stride + head * self.head_stride)
    }
}
