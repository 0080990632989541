//! Matrix multiplication: weights `W [n, k]` of any type × activations `X [m, k]` → `Y [m, n]`, `Y = X Wᵀ`.
//!
//! Weights are packed once ([`PackedLayout`]); one packed layout serves GEMV and GEMM on every instruction set.
//! Activations are converted to the format of the kernel ([`ActivationFormat`]) once per matmul:
//!
//! - **`Int8x2`**: GEMV, and GEMM with up to 12 to 64 rows, of quantized weights. Activations are 15-bit integers with one
//!   scale for 32 elements (256 with AVX-512, where the weights have superblocks of 256), each split into a high and a
//!   low int8. A weight is `w = d q + m`, so a block adds `d · dₓ · Σ q xq + m · dₓ Σ xq`: an integer dot product for
//!   each of the two bytes, one conversion, and two multiply-adds. GEMV streams the packed weights once, at the speed
//!   of memory, and so does GEMM with AVX-512 for several rows at a time. For quants that are costly to unpack, GEMM
//!   unpacks those of a row group once into a panel of bytes, for all rows of activations; with AVX2 always, into
//!   16-bit integers, which are multiplied with both bytes at once.
//! - **`Int16`**: GEMM with many rows of quantized weights. Activations are 15-bit integers with one scale for 128
//!   elements. A group's weights are unpacked once for all rows and rounded to 11-bit integers, also with one scale
//!   for 128: a sum of 128 products fits 32 bits and is scaled once, which leaves 97 % of all instructions to the
//!   products. (8-bit activations with a scale for 32 need fewer, 13 for 32 columns instead of 16.5, but are an order
//!   of magnitude less exact: near ties between tokens would be decided wrongly.) The error is below that of bf16.
//! - **`Bf16Tiles`**: GEMM with many rows on AMX, in bf16. With int8 tiles, a scale for every 32 columns would follow
//!   each tile product (16 cycles) with a store, conversion and scaling of 256 sums (40 cycles and more): 200
//!   multiply-adds a cycle. Weights unpacked to bf16, into a panel in the L2 cache, need no scaling: 512 a cycle, and
//!   the unpacking (about 80 cycles for 16 × 32 weights) is paid once for all rows.
//! - **`F32Panels`**: F32, F16 and BF16 weights in f32 arithmetic, and every type on a CPU without vector kernels.
//!
//! Results depend neither on the number of threads nor on how rows of weights are distributed among them. They do not
//! depend on the number of rows, either, up to [`ActivationFormat::few_rows`]: sums are formed in the same order for one
//! row and for several. With F32 weights, and with F16 and BF16 weights except on AMX, that holds for any number of rows:
//! the columns of a row are added up in panels of `FLOAT_PANEL`, and the panels one after the other.

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels use every format"))]
mod activations;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod format;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels need the ranges"))]
mod grid_quants;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels need the ranges"))]
mod lut_quants;
mod pack;
mod partition;
#[cfg(target_arch = "x86_64")]
mod prefetch;
mod prepare;
mod quant_row;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels need the ranges"))]
mod quants;
mod scalar;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels need the constants"))]
mod scales;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only vector kernels use every format"))]
mod view;

use std::ops::Range;

use quadriga_graph::DType;

pub use activations::Activations;
pub use pack::PackedLayout;
pub use view::{Input, InputType, NO_ROW, Output};

use partition::{MatmulPartition, MatrixWork};

use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// The number of rows from which AMX tiles beat vector kernels: below, most of a tile and of the unpacking is wasted.
const MIN_TILE_ROWS: usize = 13;

/// The number of rows from which rounding weights to int16 pays: with AVX2, and for the rows of experts.
const MIN_INT16_ROWS: usize = 16;

/// The most rows that kernels of few rows work on at a time. With AVX-512, rounding weights to int16 pays little up to
/// there.
const FEW_ROWS: usize = 64;

/// Activations that share a scale where the weights have superblocks of as many columns, with AVX-512.
const WIDE_SPAN: usize = 256;

/// Bytes of weights in a chunk of few rows, when there are enough chunks for every thread: about a microsecond's worth,
/// so that all threads finish at nearly the same time. Each thread takes a contiguous run of chunks.
const CHUNK_BYTES: usize = 24 << 10;

/// Row groups of unquantized weights in a chunk of many rows, when there are enough chunks for every thread.
const PLAIN_GROUPS: usize = 8;

/// Columns of unquantized weights that are added up before the sum is added to that of the columns before: the order of
/// sums for any number of rows. Even, since some types have pairs of columns.
#[cfg(target_arch = "x86_64")]
const FLOAT_PANEL: usize = 192;

/// Multiply-adds of a chunk, when there are enough chunks for every thread: small, so that all threads finish at nearly
/// the same time, but some tens of microseconds.
const CHUNK_WORK: usize = 4 << 20;

/// The format of activations that a kernel works on; the [module](self) explains which is used when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFormat {
    /// f32, in panels of this many rows, column-major inside.
    F32Panels(usize),
    /// 15-bit integers split into two int8, with a scale for this many elements: 32 or 256.
    Int8x2(usize),
    /// 15-bit integers as int16, with a scale for 128 elements.
    Int16,
    /// bf16 in AMX tiles.
    Bf16Tiles,
}

impl ActivationFormat {
    /// The format for a matmul of `rows` activations with weights of a type. Matmuls of the same activations with
    /// weights that need the same format can share the converted activations.
    ///
    /// # Errors
    /// There is no kernel for the type.
    pub fn choose(isa: Isa, dtype: DType, rows: usize) -> Result<ActivationFormat, KernelError> {
        if !dtype.is_computable() {
            return Err(KernelError::Type { dtype });
        }
        Ok(match isa {
            Isa::Amx(_) if rows >= MIN_TILE_ROWS && dtype != DType::F32 => ActivationFormat::Bf16Tiles,
            Isa::Scalar => ActivationFormat::F32Panels(1),
            _ if dtype.is_quantized() && rows > ActivationFormat::few_rows(isa, dtype) => {
                ActivationFormat::Int16
            }
            Isa::Avx512(_) | Isa::Amx(_) if dtype.block_len() == WIDE_SPAN => {
                ActivationFormat::Int8x2(WIDE_SPAN)
            }
            _ if dtype.is_quantized() => ActivationFormat::Int8x2(format::BLOCK),
            Isa::Avx2(_) | Isa::AvxVnni(_) => ActivationFormat::F32Panels(6),
            Isa::Avx512(_) | Isa::Amx(_) => ActivationFormat::F32Panels(12),
        })
    }

    /// Up to this many rows, the result of each with weights of a type is the same bits as alone: a sequence that is decoded
    /// beside others has the same results as alone.
    pub const fn few_rows(isa: Isa, dtype: DType) -> usize {
        match isa {
            Isa::Scalar => usize::MAX,
            Isa::Amx(_) if matches!(dtype, DType::F32) => usize::MAX,
            Isa::Avx2(_) | Isa::AvxVnni(_) | Isa::Avx512(_) if !dtype.is_quantized() => usize::MAX,
            Isa::Avx2(_) | Isa::AvxVnni(_) => MIN_INT16_ROWS - 1,
            Isa::Avx512(_) => FEW_ROWS,
            Isa::Amx(_) => MIN_TILE_ROWS - 1,
        }
    }

    /// The format for matmuls with the weights of experts, each of about `rows` rows.
    ///
    /// # Errors
    /// There is no kernel for the type.
    pub fn of_experts(isa: Isa, dtype: DType, rows: usize) -> Result<ActivationFormat, KernelError> {
        let many = dtype.is_quantized() && rows >= MIN_INT16_ROWS;
        ActivationFormat::choose(isa, dtype, if many { rows.max(FEW_ROWS + 1) } else { rows })
    }

    /// The format for matmuls of one row each, however many rows there are: every row is converted by itself.
    ///
    /// # Errors
    /// There is no kernel for the type.
    pub fn of_single_rows(isa: Isa, dtype: DType) -> Result<ActivationFormat, KernelError> {
        Ok(match ActivationFormat::choose(isa, dtype, 1)? {
            ActivationFormat::F32Panels(_) => ActivationFormat::F32Panels(1),
            format => format,
        })
    }

    /// Rows that are converted together: a matmul may start at any multiple of it.
    pub const fn row_granularity(self) -> usize {
        match self {
            ActivationFormat::F32Panels(rows) => rows,
            ActivationFormat::Int8x2(_) | ActivationFormat::Int16 => 1,
            ActivationFormat::Bf16Tiles => format::GROUP,
        }
    }
}

/// One weight matrix to multiply with prepared activations, and the output.
#[derive(Clone, Copy, Debug)]
pub struct Matmul<'a> {
    /// The layout of the packed weights.
    pub layout: &'a PackedLayout,
    /// The packed weights.
    pub packed: &'a [u8],
    /// The output, `[rows, layout.rows()]`.
    pub output: &'a Output<'a>,
    /// The first row of activations to use: a multiple of [`ActivationFormat::row_granularity`].
    pub first_row: usize,
}

/// Part of a matmul, for one thread: some row groups of weights, all rows of activations.
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

    /// Whether the activations are one row in a panel of its own, so that the panel is the row. One row out of a panel
    /// of several is not.
    #[cfg(target_arch = "x86_64")]
    fn is_single_row_panel(&self) -> bool {
        self.rows == 1 && self.activations.f32_panel(self.first_row).1 == 1
    }

    /// Writes zeros: the result of a matmul over no columns.
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
/// - Until the next barrier no other code reads or writes the outputs, and no two outputs of the call overlap.
pub unsafe fn multiply(
    worker: &Worker<'_>,
    activations: &Activations<'_>,
    matmuls: &[Matmul<'_>],
) -> Result<(), KernelError> {
    // SAFETY: promised by the caller.
    unsafe { multiply_fused(worker, activations, matmuls, false, |_, _| {}) }
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
    matmuls: &[Matmul<'_>],
    together: bool,
    epilogue: impl Fn(usize, Range<usize>),
) -> Result<(), KernelError> {
    for matmul in matmuls {
        verify(activations, matmul)?;
        let (left, right) = (matmul.layout.rows(), matmuls.first().map_or(0, |first| first.layout.rows()));
        if together && left != right {
            return Err(KernelError::Differ {
                what: "output columns of matmuls computed together",
                left,
                right,
            });
        }
    }
    let scratch = activations.scratch(worker)?;
    let work = |matmul: &Matmul<'_>| matrix_work(activations.format(), matmul.layout, matmul.output.rows());
    // Matmuls that are computed together are all partitioned like the first of them.
    let works = || matmuls.iter().map(work).take(if together { 1 } else { matmuls.len() });
    let partition = MatmulPartition::new(works(), worker.threads());
    // The previous chunk of this thread: chunks are contiguous until the thread helps others with theirs.
    #[cfg(target_arch = "x86_64")]
    let mut previous = None;
    worker.chunks(partition.chunks(), |chunk| {
        let mut ranges = partition.ranges(chunk, works());
        let mut groups = 0..0;
        for (number, matmul) in matmuls.iter().enumerate() {
            groups = ranges.next().unwrap_or(groups);
            if groups.is_empty() {
                continue;
            }
            let columns =
                groups.start * format::GROUP..(groups.end * format::GROUP).min(matmul.layout.rows());
            #[cfg(target_arch = "x86_64")]
            if matmul.output.rows() == 1 && (groups.start == 0 || previous != chunk.checked_sub(1)) {
                prefetch::first(
                    matmul.packed.get(groups.start * matmul.layout.group_bytes()..).unwrap_or(&[]),
                );
            }
            run_groups(activations, matmul, groups.clone(), scratch);
            epilogue(number, columns);
        }
        #[cfg(target_arch = "x86_64")]
        {
            previous = Some(chunk);
        }
    });
    Ok(())
}

/// One thread's part of a matmul: some row groups of the weights.
fn run_groups(activations: &Activations<'_>, matmul: &Matmul<'_>, groups: Range<usize>, scratch: *mut u8) {
    let Matmul { layout, packed, output, first_row } = *matmul;
    let task = Task { layout, packed, activations, output, first_row, rows: output.rows(), groups, scratch };
    if layout.columns() == 0 {
        task.clear();
    } else {
        run(&task);
    }
}

/// Multiplies some row groups of a weight matrix, on this thread alone: for callers that distribute the work themselves.
/// `follows` says that the thread has just multiplied the groups before these.
///
/// # Errors
/// As [`multiply`].
///
/// # Safety
/// - The rows of the activations that the matmul uses are filled: by this thread, or before a barrier.
/// - Until the next barrier no other code reads or writes these columns of the output.
pub unsafe fn multiply_groups(
    worker: &Worker<'_>,
    activations: &Activations<'_>,
    matmul: &Matmul<'_>,
    groups: Range<usize>,
    follows: bool,
) -> Result<(), KernelError> {
    verify(activations, matmul)?;
    pack::check("row groups of the weights", matmul.layout.groups(), groups.end)?;
    #[cfg(target_arch = "x86_64")]
    if matmul.output.rows() == 1 && !follows {
        prefetch::first(matmul.packed.get(groups.start * matmul.layout.group_bytes()..).unwrap_or(&[]));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = follows;
    run_groups(activations, matmul, groups, activations.scratch(worker)?);
    Ok(())
}

/// Row groups that a chunk of a matmul of `rows` rows should have at most, if there are more than enough.
pub fn groups_of_chunk(format: ActivationFormat, layout: &PackedLayout, rows: usize) -> usize {
    matrix_work(format, layout, rows).max_groups
}

/// Row groups that a kernel takes together. A GEMV takes them one by one, so that all threads finish at nearly the same
/// time.
pub const fn groups_together(rows: usize) -> usize {
    if rows == 1 { 1 } else { 2 }
}

/// How many times as long a chunk of AMX tiles may be, if there are more than enough: the activations then pass through
/// the L2 cache once for more weights.
const LONG_TILE_CHUNK: usize = 4;

/// The cost of a matmul, for [`MatmulPartition`].
fn matrix_work(format: ActivationFormat, layout: &PackedLayout, rows: usize) -> MatrixWork {
    let group_work = format::GROUP * layout.columns() * rows;
    let (cost, max_groups) = match format {
        // All rows of activations pass through the cache once for each chunk.
        ActivationFormat::F32Panels(_) if rows > 1 => (group_work, PLAIN_GROUPS),
        ActivationFormat::F32Panels(_) | ActivationFormat::Int8x2(_) => {
            let bytes = layout.group_bytes().max(1);
            (bytes, CHUNK_BYTES / bytes)
        }
        ActivationFormat::Int16 | ActivationFormat::Bf16Tiles => (group_work, CHUNK_WORK / group_work.max(1)),
    };
    let unit = groups_together(rows);
    let long = if format == ActivationFormat::Bf16Tiles { LONG_TILE_CHUNK } else { 1 };
    let long_groups = long * max_groups.max(unit);
    MatrixWork { groups: layout.groups(), unit, cost, max_groups, long_groups }
}

/// Prefetches the packed weights that this thread will read first in a GEMV with these matrices (or with all of them
/// `together`): to be called while the thread still has to wait.
pub fn prefetch_first<'a>(
    worker: &Worker<'_>,
    format: ActivationFormat,
    matrices: impl Iterator<Item = (&'a PackedLayout, &'a [u8])> + Clone,
    together: bool,
) {
    let works = || {
        let count = if together { 1 } else { usize::MAX };
        matrices.clone().map(|(layout, _)| matrix_work(format, layout, 1)).take(count)
    };
    let partition = MatmulPartition::new(works(), worker.threads());
    let ranges = partition.ranges(worker.first_of(partition.chunks()), works());
    if let Some(((layout, packed), groups)) = matrices.zip(ranges).find(|(_, groups)| !groups.is_empty()) {
        #[cfg(target_arch = "x86_64")]
        prefetch::first(packed.get(groups.start * layout.group_bytes()..).unwrap_or(&[]));
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (layout, packed, groups);
    }
}

/// Checks a matmul against its activations.
fn verify(activations: &Activations<'_>, matmul: &Matmul<'_>) -> Result<(), KernelError> {
    let Matmul { layout, packed, output, first_row } = matmul;
    let differ = |what, left, right| {
        if left == right { Ok(()) } else { Err(KernelError::Differ { what, left, right }) }
    };
    differ("columns of weights and activations", layout.columns(), activations.columns())?;
    differ("rows of weights and columns of the output", layout.rows(), output.columns())?;
    pack::check("packed weights", packed.len(), layout.bytes())?;
    pack::check("rows of activations", activations.rows(), first_row.saturating_add(output.rows()))?;
    let step = activations.format().row_granularity();
    differ(
        "first row of activations and its last multiple of the row granularity",
        *first_row,
        first_row / step * step,
    )?;
    let fits = match activations.format() {
        // Vector kernels take single rows only as they are.
        ActivationFormat::F32Panels(1) => {
            activations.isa() == Isa::Scalar || (output.rows() == 1 && !layout.is_quantized())
        }
        ActivationFormat::F32Panels(_) => !layout.is_quantized(),
        ActivationFormat::Int8x2(_) => {
            ActivationFormat::choose(activations.isa(), layout.dtype(), 1) == Ok(activations.format())
        }
        ActivationFormat::Int16 => layout.is_quantized(),
        ActivationFormat::Bf16Tiles => layout.dtype() != DType::F32,
    };
    if fits { Ok(()) } else { Err(KernelError::Type { dtype: layout.dtype() }) }
}

#[cfg(target_arch = "x86_64")]
fn run(task: &Task<'_>) {
    let isa = task.activations.isa();
    match task.activations.format() {
        ActivationFormat::Bf16Tiles => {
            if let Some(token) = isa.amx() {
                amx::multiply(token, task);
            }
        }
        ActivationFormat::Int8x2(_) => match (isa.avx512(), isa.avx2()) {
            (Some(token), _) => avx512::int8x2::multiply(token, task),
            (None, Some(token)) => avx2::int8x2::multiply(token, isa.avx_vnni(), task),
            (None, None) => {}
        },
        ActivationFormat::Int16 => match (isa.avx512(), isa.avx2()) {
            (Some(token), _) => avx512::int16::multiply(token, task),
            (None, Some(token)) => avx2::int16::multiply(token, isa.avx_vnni(), task),
            (None, None) => {}
        },
        ActivationFormat::F32Panels(1 | 12) if let Some(token) = isa.avx512() => {
            avx512::f32::multiply(token, task)
        }
        ActivationFormat::F32Panels(1 | 6) if let Some(token) = isa.avx2() => {
            avx2::f32::multiply(token, task)
        }
        ActivationFormat::F32Panels(_) => scalar::multiply(task),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn run(task: &Task<'_>) {
    scalar::multiply(task);
}
