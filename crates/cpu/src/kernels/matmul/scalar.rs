//! Matrix multiplication in portable Rust: f32 arithmetic on dequantized weights, on any CPU.

use std::ops::Range;

use super::Task;
use super::activations::Activations;
use super::format::GROUP;
use super::view::Input;

/// Columns dequantized at a time: a multiple of every superblock's columns.
const STEP: usize = 256;

/// Transposes the rows of one panel.
#[expect(clippy::indexing_slicing, reason = "panels have at most 16 rows, and pieces at most PIECE columns")]
pub(super) fn f32_panel(activations: &Activations<'_>, input: &Input<'_>, rows: Range<usize>) {
    /// Columns at a time, of all rows.
    const PIECE: usize = 64;
    let (panel, count) = activations.f32_panel(rows.start);
    let mut values = [[0.0_f32; PIECE]; 16];
    for first in (0..activations.columns()).step_by(PIECE) {
        let length = PIECE.min(activations.columns() - first);
        for (i, row) in rows.clone().enumerate() {
            input.read(row, first, &mut values[i][..length]);
        }
        // SAFETY: the panel holds `count` values for each column, and only this chunk writes it.
        let piece = unsafe { std::slice::from_raw_parts_mut(panel.add(first * count), length * count) };
        for (k, column) in piece.chunks_exact_mut(count.max(1)).enumerate() {
            for (value, row) in column.iter_mut().zip(&values) {
                *value = row[k];
            }
        }
    }
}

/// Runs a task.
#[expect(clippy::indexing_slicing, reason = "all indices are below the fixed array lengths")]
pub(super) fn multiply(task: &Task<'_>) {
    let columns = task.layout.columns();
    let mut weights = [[0.0_f32; STEP]; GROUP];
    for group in task.groups.clone() {
        let first_column = group * GROUP;
        let count = GROUP.min(task.layout.rows() - first_column);
        let packed = task.group(group);
        for first in (0..columns).step_by(STEP) {
            let length = STEP.min(columns - first);
            for (lane, values) in weights.iter_mut().enumerate().take(count) {
                task.layout.read_lane(packed, lane, first, &mut values[..length]);
            }
            for row in 0..task.rows {
                let Some(out) = task.output.row(row) else { continue };
                let (x, _) = task.activations.f32_panel(task.first_row + row);
                // SAFETY: panels of one row are rows; `first + length <= columns`.
                let x = unsafe { std::slice::from_raw_parts(x.add(first), length) };
                for (lane, values) in weights.iter().enumerate().take(count) {
                    // Eight partial sums keep the rounding error small and let the compiler use vectors.
                    let mut sums = [0.0_f32; 8];
                    for (w, x) in values[..length].chunks(8).zip(x.chunks(8)) {
                        for (sum, (w, x)) in sums.iter_mut().zip(w.iter().zip(x)) {
                            *sum += w * x;
                        }
                    }
                    let sum: f32 = sums.iter().sum();
                    // SAFETY: the lane is below the rows of the weights, which are the columns of the output.
                    unsafe {
                        let place = out.add(first_column + lane);
                        *place = if first == 0 { sum } else { *place + sum };
                    }
                }
            }
        }
    }
}
