//! Matmuls of a mixture of experts.
//!
//! Of one token, each expert multiplies one row. Every thread converts the rows that it needs itself, and all experts are one
//! parallel region. Of more tokens, rows are sorted by expert, so that each expert multiplies all its rows at once.
//!
//! Matmuls of the same activations and experts (gate and up) are one step: a thread computes the same columns of both for
//! an expert's rows, then the elementwise operations on them (biases, gate) as epilogues. Of few rows, all matmuls of a
//! feed-forward are one step (feed_forward.rs).

mod feed_forward;
mod jobs;
mod lists;
mod step;

use quadriga_graph::DType;

use super::operand::PackedWeight;
use super::packed_matmul::ActivationMatrix;
use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::kernels::matmul::{ActivationFormat, Activations, NO_ROW};
use crate::step::Access;
use crate::view::TensorView;

pub(crate) use feed_forward::FeedForwardStep;
pub(crate) use jobs::MAX_JOB_ROWS;
use lists::ExpertLists;

/// The most rows of one token that a thread keeps apart: one bit each.
const MAX_SINGLE_ROWS: usize = u64::BITS as usize;

/// The expert in slot `u` of token `t`, checked; `None` for −1, an expert that is not here.
pub(super) fn expert(ids: &TensorView, t: usize, u: usize, experts: usize) -> Result<Option<usize>, String> {
    let id = ids.index([0, 0, t], u);
    let expert = usize::try_from(id).ok().filter(|expert| *expert < experts);
    match expert {
        None if id != -1 => Err(format!("expert {id} of token {t} is outside 0..{experts}")),
        expert => Ok(expert),
    }
}

/// The row of the activations for a token and expert slot. The strides of tokens and of slots are arbitrary: rows are
/// counted in steps of their greatest common divisor.
#[derive(Clone, Copy, PartialEq)]
struct RowsOfTokens {
    step: usize,
    token: usize,
    choice: usize,
}

impl RowsOfTokens {
    fn new(x: &TensorView) -> RowsOfTokens {
        let [_, tokens, choices, _] = x.dims;
        let [_, s1, s2, _] = x.strides;
        let (s1, s2) = (if tokens > 1 { s1 } else { 0 }, if choices > 1 { s2 } else { 0 });
        let (mut step, mut rest) = (s1, s2);
        while rest > 0 {
            (step, rest) = (rest, step % rest);
        }
        let step = step.max(1);
        RowsOfTokens { step, token: s1 / step, choice: s2 / step }
    }

    fn row(self, t: usize, u: usize) -> u32 {
        (t * self.token + u * self.choice) as u32
    }

    /// All rows as a matrix; `None` if row indices do not fit 32 bits.
    fn matrix(self, x: &TensorView) -> Option<ActivationMatrix> {
        let [_, tokens, choices, _] = x.dims;
        let last = (tokens - 1) * self.token + (choices - 1) * self.choice;
        (last < NO_ROW as usize).then_some(())?;
        ActivationMatrix::new(x, [0; 3], last + 1, self.step, x.cols())
    }
}

/// How the activations of an expert matmul are prepared: from shapes alone.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct ExpertActivations {
    isa: Isa,
    dtype: DType,
    format: ActivationFormat,
    /// Whether each row is multiplied by itself, from a thread's own copy of the activations.
    single: bool,
    /// Prepared rows, with padding.
    rows: usize,
    columns: usize,
}

impl ExpertActivations {
    /// The activations of `tokens` tokens that use `used` of `experts` experts each, with `choices` rows for a token: one
    /// for all of its experts, or one for each.
    pub(crate) fn new(
        isa: Isa,
        dtype: DType,
        [tokens, used, choices]: [usize; 3],
        experts: usize,
        columns: usize,
    ) -> Result<ExpertActivations, KernelError> {
        if tokens == 1 && used <= MAX_SINGLE_ROWS {
            let format = ActivationFormat::of_single_rows(isa, dtype)?;
            return Ok(ExpertActivations { isa, dtype, format, single: true, rows: choices, columns });
        }
        let too_large = KernelError::TooLarge { rows: tokens, columns: used };
        let rows = tokens.checked_mul(used).ok_or(too_large)?;
        // Experts that have rows, at most; the average of their rows decides about the format.
        let busy = experts.min(rows).max(1);
        let format = ActivationFormat::of_experts(isa, dtype, rows.div_ceil(busy))?;
        let rows = rows + busy * (format.row_granularity() - 1);
        Ok(ExpertActivations { isa, dtype, format, single: false, rows, columns })
    }

    /// Bytes of work memory for a number of threads.
    pub(super) fn work_bytes(&self, threads: usize) -> Result<usize, KernelError> {
        let bytes = |threads| Activations::format_work_bytes(self.format, self.rows, self.columns, threads);
        if !self.single {
            return bytes(threads);
        }
        let too_large = KernelError::TooLarge { rows: self.rows, columns: self.columns };
        self.thread_bytes()?.checked_mul(threads).ok_or(too_large)
    }

    /// Bytes of the activations without the scratch memory of threads.
    pub(crate) fn shared_bytes(&self) -> Result<usize, KernelError> {
        Activations::format_work_bytes(self.format, self.rows, self.columns, 0)
    }

    /// Bytes of one thread's own activations.
    fn thread_bytes(&self) -> Result<usize, KernelError> {
        let bytes = Activations::format_work_bytes(self.format, self.rows, self.columns, 1)?;
        let too_large = KernelError::TooLarge { rows: self.rows, columns: self.columns };
        bytes.checked_next_multiple_of(64).ok_or(too_large)
    }
}

/// Memory for prepared activations that outlive a phase of a step.
#[derive(Clone, Copy)]
pub(crate) struct PreparedMemory {
    pub(crate) pointer: *mut u8,
    pub(crate) bytes: usize,
}

/// A matmul of each row with the matrix of its expert.
pub(crate) struct ExpertMatMul {
    packed: PackedWeight,
    x: ActivationMatrix,
    x_rows: RowsOfTokens,
    ids: TensorView,
    out: *mut f32,
    tokens: usize,
    used: usize,
    activations: ExpertActivations,
    /// The rows of each expert; only of more than one token.
    lists: Option<ExpertLists>,
    /// Memory for its activations, if it may be the last of a feed-forward that is one step.
    prepared: Option<PreparedMemory>,
    accesses: Vec<Access>,
    pub(crate) name: usize,
}

// SAFETY: addresses and numbers; the invariant of `TensorView` says when they may be used.
unsafe impl Send for ExpertMatMul {}
// SAFETY: as above; the lists are written by one thread, with a barrier before others read them.
unsafe impl Sync for ExpertMatMul {}

impl ExpertMatMul {
    /// A matmul of the rows of `x` with the matrices of the experts in `ids`.
    pub(super) fn new(
        packed: PackedWeight,
        x: &TensorView,
        ids: &TensorView,
        out: &TensorView,
        isa: Isa,
    ) -> Result<ExpertMatMul, String> {
        let [_, tokens, used, _] = out.dims;
        let missing = "its activations cannot be read as a matrix";
        let x_rows = RowsOfTokens::new(x);
        let shape = [tokens, used, x.dims[2]];
        let activations = ExpertActivations::new(isa, packed.layout.dtype(), shape, packed.count, x.cols())
            .map_err(|error| error.to_string())?;
        let lists =
            if activations.single { None } else { Some(ExpertLists::new(packed.count, activations.rows)?) };
        let reads = [Access::range(packed.range(), false), Access::reads(x), Access::reads(ids)];
        Ok(ExpertMatMul {
            packed,
            x: x_rows.matrix(x).ok_or(missing)?,
            x_rows,
            ids: *ids,
            out: out.row_pointer([0; 3]).ok_or(missing)?.cast(),
            tokens,
            used,
            activations,
            lists,
            prepared: None,
            accesses: reads.into_iter().chain([Access::writes(out)]).collect(),
            name: 0,
        })
    }

    /// Sets memory apart for its prepared activations.
    pub(crate) fn set_prepared(&mut self, memory: PreparedMemory) {
        let start = memory.pointer.addr();
        let access = Access::range(start..start + memory.bytes, true);
        // Never over its own operands, or another step would have to prepare them.
        if !self.accesses.iter().any(|own| own.conflicts(&access)) {
            // Before the result, which is the last.
            self.accesses.insert(self.accesses.len().saturating_sub(1), access);
            self.prepared = Some(memory);
        }
    }

    /// The access to its activations.
    pub(crate) fn activations_access(&self) -> Option<&Access> {
        self.accesses.get(1)
    }
}
