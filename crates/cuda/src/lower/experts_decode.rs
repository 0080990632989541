//! Launches of the experts' matrices for one token, streamed through shared memory. See kernels/experts_decode.cu.

use std::ffi::CStr;

use super::expert_extents::{ExpertExtents, MAX_SUMMED};
use super::formats::{MatrixFormat, expert_gemv_shared_bytes};

/// Warps of a block of gate and up, as in the kernel.
const GATED_WARPS: usize = 16;
/// The same of the last matrix.
const SUMMED_WARPS: usize = 8;
/// The most rows of gate and up that a warp has.
const MAX_ROWS: usize = 6;
/// Rows of the last matrix that a warp has, most first.
const LINES: [usize; 2] = [2, 1];
/// Shared memory of a block of gate and up, and of a block of the last matrix: together they fit on an SM, so that the
/// second one's copies run beside the first.
const GATED_BYTES: usize = 150_000;
const SUMMED_BYTES: usize = 76_000;
/// The shared memory that a block must be allowed.
pub(super) const NEEDED_BYTES: u32 = GATED_BYTES as u32;

/// Grid and shared memory of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StreamedExperts {
    pub(super) name: &'static CStr,
    /// Rows of a block.
    pub(super) rows: usize,
    pub(super) grid: [u32; 2],
    /// Threads of a block.
    pub(super) threads: u32,
    pub(super) shared_bytes: usize,
}

impl StreamedExperts {
    /// Gate and up, a block of which has rows of one expert; `None` if a block for each SM does not cover them.
    pub(super) fn gated(
        format: MatrixFormat,
        extents: &ExpertExtents,
        multiprocessors: usize,
    ) -> Option<StreamedExperts> {
        let ExpertExtents { used, n, k, .. } = *extents;
        let blocks = |rows: usize| used * n.div_ceil(rows * GATED_WARPS);
        let rows = GATED_WARPS * (1..=MAX_ROWS).find(|rows| blocks(*rows) <= multiprocessors)?;
        let shared_bytes = rows * 2 * format.row_bytes(k) + expert_gemv_shared_bytes(k);
        let name = match format {
            MatrixFormat::Q4 => c"k_experts_q4_gated_streamed",
            MatrixFormat::Q4Min => c"k_experts_q4min_gated_streamed",
            MatrixFormat::Q8 => c"k_experts_q8_gated_streamed",
            MatrixFormat::Mxfp4 => c"k_experts_mxfp4_gated_streamed",
            MatrixFormat::F16 => return None,
        };
        let (grid, threads) = ([n.div_ceil(rows) as u32, used as u32], GATED_WARPS as u32 * 32);
        (shared_bytes <= GATED_BYTES).then_some(StreamedExperts { name, rows, grid, threads, shared_bytes })
    }

    /// The last matrix, a block of which has rows of all experts; `None` if two blocks for each SM do not cover them.
    pub(super) fn summed(
        format: MatrixFormat,
        extents: &ExpertExtents,
        multiprocessors: usize,
    ) -> Option<StreamedExperts> {
        let ExpertExtents { used, x_rows, n, k, .. } = *extents;
        let name = match format {
            MatrixFormat::Q4 => c"k_experts_q4_summed_streamed",
            MatrixFormat::Q4Min => c"k_experts_q4min_summed_streamed",
            MatrixFormat::Q8 => c"k_experts_q8_summed_streamed",
            MatrixFormat::Mxfp4 => c"k_experts_mxfp4_summed_streamed",
            MatrixFormat::F16 => return None,
        };
        let with = |lines: usize| {
            let rows = SUMMED_WARPS * lines;
            let shared_bytes = used * rows * format.row_bytes(k) + expert_gemv_shared_bytes(x_rows * k);
            let (grid, threads) = ([n.div_ceil(rows) as u32, 1], SUMMED_WARPS as u32 * 32);
            let fits = shared_bytes <= SUMMED_BYTES && grid[0] as usize <= 2 * multiprocessors;
            fits.then_some(StreamedExperts { name, rows, grid, threads, shared_bytes })
        };
        LINES.into_iter().find_map(with).filter(|_| used <= MAX_SUMMED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-30B-A3B: 8 experts of 768 rows.
    const GATED: ExpertExtents =
        ExpertExtents { experts: 128, tokens: 1, used: 8, x_rows: 1, n: 768, k: 2048 };
    const SUMMED: ExpertExtents =
        ExpertExtents { experts: 128, tokens: 1, used: 8, x_rows: 8, n: 2048, k: 768 };

    #[test]
    fn both_launches_cover_their_rows_and_fit_on_an_sm_together() {
        let gated = StreamedExperts::gated(MatrixFormat::Q4, &GATED, 132).unwrap();
        // A row has 1,024 bytes of quants and 128 of scales.
        assert_eq!((gated.rows, gated.grid), (48, [16, 8]));
        assert_eq!(gated.shared_bytes, 48 * 2 * 1152 + 2560);
        let summed = StreamedExperts::summed(MatrixFormat::Q4, &SUMMED, 132).unwrap();
        assert_eq!((summed.rows, summed.grid), (16, [128, 1]));
        assert_eq!(summed.shared_bytes, 8 * 16 * (384 + 48) + 8 * 960);
        // Of the 227 KiB of an SM, each block also needs 1 KiB and its own small arrays.
        const { assert!(GATED_BYTES + SUMMED_BYTES + 2 * 2048 <= 227 << 10) };
    }

    #[test]
    fn fewer_rows_are_tried_and_matrices_that_are_too_large_are_left_to_other_kernels() {
        let q8 = StreamedExperts::summed(MatrixFormat::Q8, &SUMMED, 132).unwrap();
        assert_eq!((q8.rows, q8.grid), (8, [256, 1]));
        assert_eq!(StreamedExperts::gated(MatrixFormat::Q8, &GATED, 132), None, "shared memory");
        assert_eq!(StreamedExperts::gated(MatrixFormat::Q4, &ExpertExtents { n: 2880, ..GATED }, 132), None);
        assert_eq!(
            StreamedExperts::summed(MatrixFormat::Q4, &ExpertExtents { k: 4096, ..SUMMED }, 132),
            None
        );
        assert_eq!(
            StreamedExperts::summed(MatrixFormat::Q4, &ExpertExtents { n: 8192, ..SUMMED }, 132),
            None
        );
    }

    #[test]
    fn warps_and_rows_are_those_of_the_kernels() {
        let source = include_str!("../../kernels/experts_decode.cu");
        let defined = |name: &str| -> usize {
            let start = format!("#define {name} ");
            source.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap()
        };
        assert_eq!((defined("GATED_WARPS"), defined("SUMMED_WARPS")), (GATED_WARPS, SUMMED_WARPS));
        assert_eq!(defined("PART_ROWS") * defined("MAX_PARTS"), MAX_ROWS);
        assert_eq!(defined("MAX_LINES"), LINES[0]);
        assert_eq!(defined("MAX_USED"), MAX_SUMMED);
    }
}
