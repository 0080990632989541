//! Matrix products: weights `W [n, k]` of any type × activations `X [m, k]` → `Y [m, n]`, `Y = X Wᵀ`.
//!
//! Weights are packed once ([`PackedLayout`]); one packed layout serves one row and many rows, and every instruction set.
//! Activations are brought into the form that the kernel wants ([`Activations`]) once per product:
//!
//! - **Bytes**: 15-bit integers with one scale for 32 elements (for 256 where the weights have such blocks and the CPU
//!   AVX-512), in two bytes each, for few rows with quantized weights.
//!   Weights are affine in their stored integers, `w = d q + m`, so a block adds `d · dₓ · Σ q xq + m · dₓ Σ xq`: an
//!   integer dot product for each of the two bytes, one conversion, and two multiply-adds. One-row products read the
//!   packed weights straight through, at the speed of memory. A few rows unpack a group's quants once into a panel of
//!   bytes and use it for all rows.
//! - **Words**: 15-bit integers with one scale for 128 elements, for many rows with quantized weights. A group's weights
//!   are unpacked once for all rows and rounded to 11-bit integers, also with one scale for 128: then a sum of 128
//!   products fits 32 bits and is scaled once, which leaves 97 % of all instructions to the products. (8-bit
//!   activations with a scale for 32 need fewer, 13 for 32 columns instead of 16.5, but are an order of magnitude less
//!   exact: near ties between tokens then fall the wrong way.) The error is below that of bf16.
//! - **Tiles**: bf16 in the layout of AMX tiles, for many rows. A scale every 32 columns would end every int8 tile
//!   product (16 cycles) with a store, conversion and scaling of 256 sums (40 cycles and more): 200 multiply-adds a
//!   cycle. Weights unpacked to bf16 into a panel in the second-level cache need no scaling: 512 a cycle, and the
//!   unpacking (about 80 cycles for 16 × 32 weights) is paid once for all rows.
//! - **Panels**: f32, for plain weights, and for everything on a CPU without vectors.
//!
//! Results depend neither on the number of threads nor on how rows of weights are shared out.

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels use every format"))]
mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod format;
mod pack;
mod partition;
#[cfg(target_arch = "x86_64")]
mod prefetch;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels need the ranges"))]
mod quants;
mod scalar;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels need the constants"))]
mod scales;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels use every format"))]
mod view;

use std::ops::Range;

use quadriga_graph::DType;

pub use activations::Activations;
pub use pack::PackedLayout;
pub use view::{Input, InputType, NO_ROW, Output};

use partition::{MatrixWork, Partition};

use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// From how many rows on AMX tiles beat vector kernels: below, most of a tile and of the unpacking is wasted.
const TILE_ROWS: usize = 12;

/// From how many rows on rounding weights to words pays.
const WORD_ROWS: usize = 16;

/// Bytes of weights that a thread takes at a time, when there are enough for every thread and few rows: about a
/// microsecond's worth, so that all threads end at nearly the same time. A thread's chunks are neighbours.
const CHUNK_BYTES: usize = 24 << 10;

/// Groups of plain weights that a thread takes at a time, when there are enough for every thread and many rows.
const PLAIN_GROUPS: usize = 8;

/// Multiplications that a thread takes at a time, when there are enough for every thread: small, so that all threads end
/// at nearly the same time, but some tens of microseconds.
const CHUNK_WORK: usize = 4 << 20;

/// The form of activations that a product works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFormat {
    /// f32, in panels of this many rows.
    F32Panels(usize),
    /// 15-bit integers in two bytes each, with a scale for this many elements: 32 or 256.
    Int8x2(usize),
    /// 15-bit integers with a scale for 128 elements.
    Int16,
    /// bf16 in AMX tiles.
    Bf16Tiles,
}

impl ActivationFormat {
    /// The form for products of `rows` activations with weights of a type. Products of the same activations with
    /// weights of the same form can share one preparation.
    ///
    /// # Errors
    /// There is no kernel for the type.
    pub fn choose(isa: Isa, dtype: DType, rows: usize) -> Result<ActivationFormat, KernelError> {
        if !dtype.is_computable() {
            return Err(KernelError::Type { dtype });
        }
        Ok(match isa {
            Isa::Amx(_) if rows >= TILE_ROWS && dtype != DType::F32 => ActivationFormat::Bf16Tiles,
            Isa::Scalar => ActivationFormat::F32Panels(1),
            _ if dtype.is_quantized() && rows >= WORD_ROWS => ActivationFormat::Int16,
            Isa::Avx512(_) | Isa::Amx(_) if dtype.is_quantized() => {
                ActivationFormat::Int8x2(dtype.block_len())
            }
            _ if dtype.is_quantized() => ActivationFormat::Int8x2(format::BLOCK),
            Isa::Avx2(_) => ActivationFormat::F32Panels(6),
            Isa::Avx512(_) | Isa::Amx(_) => ActivationFormat::F32Panels(12),
        })
    }
}

impl ActivationFormat {
    /// Rows that are prepared together: a product may start at any multiple of it.
    pub const fn row_granularity(self) -> usize {
        match self {
            ActivationFormat::F32Panels(rows) => rows,
            ActivationFormat::Int8x2(_) | ActivationFormat::Int16 => 1,
            ActivationFormat::Bf16Tiles => format::GROUP,
        }
    }
}

/// One product of prepared activations with packed weights.
#[derive(Clone, Copy, Debug)]
pub struct Matmul<'a> {
    /// How the weights are packed.
    pub layout: &'a PackedLayout,
    /// The packed weights.
    pub packed: &'a [u8],
    /// Where the results go: `[rows, layout.rows()]`.
    pub output: &'a Output<'a>,
    /// The first row of the activations to use; a multiple of 16 (of 12 and 6 for plain weights) unless 0.
    pub first_row: usize,
}

/// Part of a product: some groups of weight rows, all rows of activations.
struct Task<'a> {
    layout: &'a PackedLayout,
    packed: &'a [u8],
    activations: &'a Activations<'a>,
    output: &'a Output<'a>,
    first_row: usize,
    rows: usize,
    groups: Range<usize>,
    /// [`activations::SCRATCH`] bytes for this thread alone, aligned to 64.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only vector kernels unpack"))]
    scratch: *mut u8,
}

impl Task<'_> {
    /// The packed bytes of a group; empty if there is no such group.
    fn group(&self, group: usize) -> &[u8] {
        let bytes = self.layout.group_bytes();
        self.packed.get(group * bytes..(group + 1) * bytes).unwrap_or(&[])
    }

    /// Writes zeros: the product over no columns.
    fn clear(&self) {
        let columns =
            self.groups.start * format::GROUP..(self.groups.end * format::GROUP).min(self.layout.rows());
        for out in (0..self.rows).filter_map(|row| self.output.row(row)) {
            for column in columns.clone() {
                // SAFETY: the rows of the weights are the columns of the output.
                unsafe { *out.add(column) = 0.0 };
            }
        }
    }
}

/// Multiplies the same prepared activations with several weight matrices, on all threads of a run.
///
/// # Errors
/// Shapes do not match, or memory is too short: nothing is written then.
///
/// # Safety
/// - Every thread of the worker's run calls this with the same arguments (or, with
///   [private](Activations::private) activations, with its own copy of the same values).
/// - The activations are filled: a barrier separates this call from [`Activations::prepare`], and from whatever refills
///   them later.
/// - No thread reads or writes the outputs before the next barrier, and no two outputs of the call overlap.
pub unsafe fn multiply(
    worker: &Worker<'_>,
    activations: &Activations<'_>,
    products: &[Matmul<'_>],
) -> Result<(), KernelError> {
    // SAFETY: promised by the caller.
    unsafe { multiply_fused(worker, activations, products, false, |_, _| {}) }
}

/// As [`multiply`], with a fused epilogue: calls `epilogue(matmul, columns)` on the thread that has computed these
/// output columns of all rows, each column once, while they are in its cache. If the matmuls are `together`, the thread
/// has computed the same columns of all previous matmuls, too (the gate and up projections of a gated unit, say).
///
/// # Errors
/// As [`multiply`]; or the matmuls are to be together, but have not equally many output columns.
///
/// # Safety
/// As [`multiply`]; the epilogue touches no output columns but those that it is given.
pub unsafe fn multiply_fused(
    worker: &Worker<'_>,
    activations: &Activations<'_>,
    products: &[Matmul<'_>],
    together: bool,
    epilogue: impl Fn(usize, Range<usize>),
) -> Result<(), KernelError> {
    for product in products {
        verify(activations, product)?;
        let (left, right) = (product.layout.rows(), products.first().map_or(0, |first| first.layout.rows()));
        if together && left != right {
            return Err(KernelError::Differ { what: "columns of products computed together", left, right });
        }
    }
    let scratch = activations.scratch(worker)?;
    let piece = |product: &Matmul<'_>| piece(activations.form(), product.layout, product.output.rows());
    // Products that are computed together are cut like the first of them, chunk by chunk.
    let pieces = || products.iter().map(piece).take(if together { 1 } else { products.len() });
    let cut = Partition::new(pieces(), worker.threads());
    // The chunk this thread has just done: its chunks are neighbours, until it helps others with theirs.
    #[cfg(target_arch = "x86_64")]
    let mut before = None;
    worker.chunks(cut.chunks(), |chunk| {
        let mut ranges = cut.ranges(chunk, pieces());
        let mut groups = 0..0;
        for (number, product) in products.iter().enumerate() {
            groups = ranges.next().unwrap_or(groups);
            if groups.is_empty() {
                continue;
            }
            let rows = product.output.rows();
            let columns =
                groups.start * format::GROUP..(groups.end * format::GROUP).min(product.layout.rows());
            let Matmul { layout, packed, output, first_row } = *product;
            #[cfg(target_arch = "x86_64")]
            if rows == 1 && (groups.start == 0 || before != chunk.checked_sub(1)) {
                prefetch::first(packed.get(groups.start * layout.group_bytes()..).unwrap_or(&[]));
            }
            let groups = groups.clone();
            let task = Task { layout, packed, activations, output, first_row, rows, groups, scratch };
            if layout.columns() == 0 {
                task.clear();
            } else {
                run(&task);
            }
            epilogue(number, columns);
        }
        #[cfg(target_arch = "x86_64")]
        {
            before = Some(chunk);
        }
    });
    Ok(())
}

/// What [`Partition`] must know of a matrix.
fn piece(form: ActivationFormat, layout: &PackedLayout, rows: usize) -> MatrixWork {
    let group_work = format::GROUP * layout.columns() * rows;
    let (cost, most) = match form {
        // All rows pass through the cache once for each chunk.
        ActivationFormat::F32Panels(_) if rows > 1 => (group_work, PLAIN_GROUPS),
        ActivationFormat::F32Panels(_) | ActivationFormat::Int8x2(_) => {
            let bytes = layout.group_bytes().max(1);
            (bytes, CHUNK_BYTES / bytes)
        }
        ActivationFormat::Int16 | ActivationFormat::Bf16Tiles => (group_work, CHUNK_WORK / group_work.max(1)),
    };
    MatrixWork { groups: layout.groups(), cost, most }
}

/// Asks for the packed weights that this thread will read first in a product of one row with these matrices (or with all
/// of them `together`): to be called while the thread still has to wait.
pub fn prefetch_first<'a>(
    worker: &Worker<'_>,
    form: ActivationFormat,
    matrices: impl Iterator<Item = (&'a PackedLayout, &'a [u8])> + Clone,
    together: bool,
) {
    let pieces = || {
        let most = if together { 1 } else { usize::MAX };
        matrices.clone().map(|(layout, _)| piece(form, layout, 1)).take(most)
    };
    let cut = Partition::new(pieces(), worker.threads());
    let ranges = cut.ranges(worker.first_of(cut.chunks()), pieces());
    if let Some(((layout, packed), groups)) = matrices.zip(ranges).find(|(_, groups)| !groups.is_empty()) {
        #[cfg(target_arch = "x86_64")]
        prefetch::first(packed.get(groups.start * layout.group_bytes()..).unwrap_or(&[]));
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (layout, packed, groups);
    }
}

fn verify(activations: &Activations<'_>, product: &Matmul<'_>) -> Result<(), KernelError> {
    let Matmul { layout, packed, output, first_row } = product;
    let differ = |what, left, right| {
        if left == right { Ok(()) } else { Err(KernelError::Differ { what, left, right }) }
    };
    differ("columns of weights and activations", layout.columns(), activations.columns())?;
    differ("rows of weights and columns of the output", layout.rows(), output.columns())?;
    pack::check("packed weights", packed.len(), layout.bytes())?;
    pack::check("rows of activations", activations.rows(), first_row.saturating_add(output.rows()))?;
    let step = activations.form().row_granularity();
    differ("first row, rounded to the step of the form, and first row", first_row / step * step, *first_row)?;
    let fits = match activations.form() {
        ActivationFormat::F32Panels(1) => true,
        ActivationFormat::F32Panels(_) => !layout.is_quantized(),
        ActivationFormat::Int8x2(_) => {
            ActivationFormat::choose(activations.isa(), layout.dtype(), 1) == Ok(activations.form())
        }
        ActivationFormat::Int16 => layout.is_quantized(),
        ActivationFormat::Bf16Tiles => layout.dtype() != DType::F32,
    };
    if fits { Ok(()) } else { Err(KernelError::Type { dtype: layout.dtype() }) }
}

#[cfg(target_arch = "x86_64")]
fn run(task: &Task<'_>) {
    let isa = task.activations.isa();
    match task.activations.form() {
        ActivationFormat::Bf16Tiles => {
            if let Some(token) = isa.amx() {
                amx::multiply(token, task);
            }
        }
        ActivationFormat::Int8x2(_) => match (isa.avx512(), isa.avx2()) {
            (Some(token), _) => avx512::int8x2::multiply(token, task),
            (None, Some(token)) => avx2::int8x2::multiply(token, task),
            (None, None) => {}
        },
        ActivationFormat::Int16 => match (isa.avx512(), isa.avx2()) {
            (Some(token), _) => avx512::int16::multiply(token, task),
            (None, Some(token)) => avx2::int16::multiply(token, task),
            (None, None) => {}
        },
        ActivationFormat::F32Panels(12) if let Some(token) = isa.avx512() => {
            avx512::f32::multiply(token, task)
        }
        ActivationFormat::F32Panels(6) if let Some(token) = isa.avx2() => avx2::f32::multiply(token, task),
        ActivationFormat::F32Panels(_) => scalar::multiply(task),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn run(task: &Task<'_>) {
    scalar::multiply(task);
}
