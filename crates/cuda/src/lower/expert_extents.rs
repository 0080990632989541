//! The extents of multiplications with experts' matrices, and what follows from them.

use super::formats::MAX_GEMV_ROWS;
use super::scratch;

/// The most experts that are sorted by, beside those that are elsewhere.
const MAX_SORTED_EXPERTS: usize = 1023;
/// The most experts of a token whose results a GEMV sums.
pub(super) const MAX_SUMMED: usize = 64;
/// The compute capability that the GEMM needs.
const MMA_COMPUTE_CAPABILITY: (i32, i32) = (8, 0);
/// The largest grid in y and z.
pub(super) const MAX_GRID_Y: usize = 65_535;

/// The extents of a multiplication with experts' matrices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ExpertExtents {
    pub(super) experts: usize,
    pub(super) tokens: usize,
    /// Experts of a token.
    pub(super) used: usize,
    /// Rows of `x` of a token: 1, or one for each expert.
    pub(super) x_rows: usize,
    /// Rows and columns of a matrix.
    pub(super) n: usize,
    pub(super) k: usize,
}

impl ExpertExtents {
    pub(super) fn new(w: [usize; 4], x: [usize; 4], ids: [usize; 4]) -> ExpertExtents {
        let [_, experts, n, k] = w;
        ExpertExtents { experts, tokens: x[1], used: ids[3], x_rows: x[2], n, k }
    }

    /// Tokens and their experts.
    pub(super) fn rows(&self) -> usize {
        self.tokens.saturating_mul(self.used)
    }

    /// The most tiles that the rows are cut into. Rows of experts that are elsewhere have tiles of their own.
    pub(super) fn max_tiles(&self) -> usize {
        self.rows() / scratch::EXPERT_TILE + (self.experts + 1).min(self.rows())
    }

    /// Whether rows are sorted and multiplied on tensor cores.
    pub(super) fn uses_gemm(&self, compute_capability: (i32, i32)) -> bool {
        self.tokens > MAX_GEMV_ROWS
            && compute_capability >= MMA_COMPUTE_CAPABILITY
            && self.experts <= MAX_SORTED_EXPERTS
            && self.max_tiles() <= MAX_GRID_Y
            && self.rows() < i32::MAX as usize
            && self.k.is_multiple_of(32)
    }

    /// Scratch memory of the GEMM: sorted rows, tiles, rows as bf16.
    pub(super) fn gemm_scratch(&self) -> [usize; 3] {
        let x = self.tokens.saturating_mul(self.x_rows).saturating_mul(self.k * 2);
        scratch::sorted_rows(self.rows(), self.max_tiles(), x)
    }

    /// Bytes of scratch memory, with whichever kernel: the GEMV needs the rows as f32 where they are not.
    pub(super) fn scratch_bytes(&self) -> usize {
        let x = self.tokens.saturating_mul(self.x_rows).saturating_mul(self.k * 4);
        scratch::total_bytes(self.gemm_scratch()).max(scratch::total_bytes([x]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: (i32, i32) = (9, 0);

    fn of(tokens: usize) -> ExpertExtents {
        ExpertExtents::new([1, 128, 768, 2048], [1, tokens, 1, 2048], [1, 1, tokens, 8])
    }

    #[test]
    fn many_tokens_are_sorted_where_there_is_mma() {
        assert!(!of(8).uses_gemm(HOPPER) && of(9).uses_gemm(HOPPER));
        assert!(!of(512).uses_gemm((7, 5)));
        assert!(!ExpertExtents { experts: 2000, ..of(512) }.uses_gemm(HOPPER));
        assert!(!ExpertExtents { k: 48, ..of(512) }.uses_gemm(HOPPER));
    }

    #[test]
    fn the_forecast_is_enough_for_every_way_to_cut_tiles() {
        // 128 experts of 32 rows each: a tile for each. All rows with one expert: 64 tiles.
        assert!(of(512).max_tiles() >= 128);
        assert_eq!(of(1).max_tiles(), 8);
        let [sorted, tiles, x] = of(512).gemm_scratch();
        assert_eq!((sorted, x), (4096 * 4, 512 * 2048 * 2));
        assert_eq!(tiles, (1 + of(512).max_tiles()) * 16);
        assert!(of(512).scratch_bytes() >= sorted + tiles + x);
    }
}
