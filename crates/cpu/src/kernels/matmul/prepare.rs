//! Filling activations: from a matrix of the graph to the format of a kernel, with the instructions of the CPU.

use std::ops::Range;

use super::activations::Activations;
use super::view::Input;
use super::{ActivationFormat, scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::kernels::KernelError;
use crate::pool::Worker;

impl Activations<'_> {
    /// Fills the activations from a matrix, on all threads of a run.
    ///
    /// # Errors
    /// The shapes differ.
    ///
    /// # Safety
    /// Every thread of the worker's run calls this with the same matrix. Barriers separate the call from every other
    /// use of the activations, above all from [`multiply`](super::multiply).
    pub unsafe fn prepare(&self, worker: &Worker<'_>, input: &Input<'_>) -> Result<(), KernelError> {
        let differ = |what, left, right| {
            if left == right { Ok(()) } else { Err(KernelError::Differ { what, left, right }) }
        };
        differ("rows of input and activations", input.rows(), self.rows)?;
        differ("columns of input and activations", input.columns(), self.columns)?;
        let step = if self.format.row_granularity() == 1 && self.rows > 64 {
            8
        } else {
            self.format.row_granularity()
        };
        worker.chunks(self.rows.div_ceil(step), |chunk| {
            // SAFETY: promised by the caller; each chunk of rows goes to one thread.
            unsafe { self.prepare_rows(chunk * step..((chunk + 1) * step).min(self.rows), input) };
        });
        Ok(())
    }

    /// Fills some rows from a matrix, on this thread.
    ///
    /// # Safety
    /// - The matrix has the shape of the activations.
    /// - The first row is a multiple of [`row_granularity`](ActivationFormat::row_granularity), and so is the end
    ///   unless it is the last row.
    /// - No other thread uses these rows of the activations at the same time.
    pub(crate) unsafe fn prepare_rows(&self, rows: Range<usize>, input: &Input<'_>) {
        let step = self.format.row_granularity();
        for first in rows.clone().step_by(step) {
            let rows = first..(first + step).min(rows.end);
            match self.format {
                #[cfg(target_arch = "x86_64")]
                ActivationFormat::F32Panels(_) if let Some(token) = self.isa.avx512() => {
                    avx512::prepare::f32_panel(token, self, input, rows);
                }
                ActivationFormat::F32Panels(_) => scalar::f32_panel(self, input, rows),
                #[cfg(target_arch = "x86_64")]
                ActivationFormat::Int8x2(span) => match (self.isa.avx512(), self.isa.avx2()) {
                    (Some(token), _) => avx512::prepare::int8x2_row(token, self, input, first, span),
                    (None, Some(token)) => avx2::prepare::int8x2_row(token, self, input, first),
                    (None, None) => {}
                },
                #[cfg(target_arch = "x86_64")]
                ActivationFormat::Int16 => match (self.isa.avx512(), self.isa.avx2()) {
                    (Some(token), _) => avx512::prepare::int16_row(token, self, input, first),
                    (None, Some(token)) => avx2::prepare::int16_row(token, self, input, first),
                    (None, None) => {}
                },
                #[cfg(target_arch = "x86_64")]
                ActivationFormat::Bf16Tiles => {
                    if let Some(token) = self.isa.avx512() {
                        avx512::prepare::bf16_tile_rows(token, self, input, rows);
                    }
                }
                // `ActivationFormat::choose` gives these forms only where the instructions exist.
                #[cfg(not(target_arch = "x86_64"))]
                ActivationFormat::Int8x2(_) | ActivationFormat::Int16 | ActivationFormat::Bf16Tiles => {}
            }
        }
    }
}
