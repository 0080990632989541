//! Sizes of the arrays in scratch memory.

/// Scratch bytes for converted weights: enough rows at a time to fill the device.
pub(super) const SLAB_BYTES: usize = 96 << 20;

/// The same where another kernel takes the weight as it is, unless its place or shape forbids that.
pub(super) const SPARE_SLAB_BYTES: usize = 24 << 20;

/// Scratch arrays start at multiples of this.
pub(super) const ALIGNMENT: usize = 256;

/// The bytes of arrays one after another, each aligned.
pub(super) fn total_bytes<const N: usize>(arrays: [usize; N]) -> usize {
    arrays.iter().fold(0, |sum, bytes| sum.saturating_add(aligned(*bytes)))
}

pub(super) fn aligned(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX)
}

/// Two lists of indices of all elements.
pub(super) fn sort(elements: usize) -> [usize; 2] {
    [elements.saturating_mul(4); 2]
}

/// Two lists of the indices of the `k` largest elements of each of the runs of each row.
pub(super) fn top_of_runs(rows: usize, runs: usize, k: usize) -> [usize; 2] {
    [rows.saturating_mul(runs.saturating_mul(k * 4)); 2]
}

/// Rows quantized to 8 bits in blocks of 32: the elements; scale and scaled sum of each block.
pub(super) fn quantized(rows: usize, blocks: usize) -> [usize; 2] {
    [rows.saturating_mul(blocks * 32), rows.saturating_mul(blocks * 8)]
}

/// Rows as f16, and a scale for each row.
pub(super) fn f16_rows(m: usize, k: usize) -> [usize; 2] {
    [m.saturating_mul(k * 2), m.saturating_mul(4)]
}

/// Rows of 16-bit elements, padded to whole 256, and a scale for each.
pub(super) fn mixed_rows(m: usize, k: usize) -> [usize; 2] {
    [m.saturating_mul(k.next_multiple_of(256) * 2), m.saturating_mul(4)]
}

/// Rows in an operand type of `size` bytes, and as many rows of the weight as are converted at a time: a slab of at most so many
/// bytes.
pub(super) fn operands(m: usize, k: usize, size: usize, n: usize, slab: usize) -> [usize; 2] {
    [m.saturating_mul(k * size), rows_per_slab(k, size, n, slab).saturating_mul(k * size)]
}

/// Rows and columns of the results of a block of GEMM.
pub(super) const GEMM_TILE: usize = 128;

/// How many rows of a weight are converted at a time: whole tiles of GEMM, if there are that many, and in any case an even number,
/// since the kernels store pairs of results, which must not begin at an odd column.
pub(super) fn rows_per_slab(k: usize, size: usize, n: usize, slab: usize) -> usize {
    let fitting = slab / (k * size).max(1);
    let whole = if fitting > GEMM_TILE { fitting - fitting % GEMM_TILE } else { fitting - fitting % 2 };
    whole.clamp(2.min(n.max(1)), n.max(1))
}

/// Scratch bytes for converted weights of neurons: less, since the budget of a GPU that has a part of a model only is better used
/// for weights.
pub(super) const NEURON_SLAB_BYTES: usize = 48 << 20;

/// Rows and columns of a tile that is transposed.
pub(super) const TRANSPOSE_TILE: usize = 32;

/// Rows in an operand type of `size` bytes, a scale for each, as many columns of the weight as are transposed at a time, and a byte
/// for each tile.
pub(super) fn transposed_operands(m: usize, k: usize, size: usize, n: usize) -> [usize; 4] {
    let slab = columns_per_slab(k, size, n).saturating_mul(k * size);
    let tiles = k.div_ceil(TRANSPOSE_TILE).saturating_mul(n.div_ceil(TRANSPOSE_TILE));
    [m.saturating_mul(k * size), m.saturating_mul(4), slab, tiles]
}

/// How many columns of a weight are transposed at a time: tiles of GEMM, or at least whole tiles of the transposition.
pub(super) fn columns_per_slab(k: usize, size: usize, n: usize) -> usize {
    rows_per_slab(k, size, n, NEURON_SLAB_BYTES).next_multiple_of(TRANSPOSE_TILE).min(n.max(1))
}

/// The most rows of a tile of one expert.
pub(super) const EXPERT_TILE: usize = 64;

/// Rows in the order of their experts, the number of tiles and the tiles, and `x` bytes of activations.
pub(super) fn sorted_rows(rows: usize, tiles: usize, x: usize) -> [usize; 3] {
    [rows.saturating_mul(4), tiles.saturating_add(1).saturating_mul(16), x]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_after_the_first_begin_at_even_columns() {
        // What is left of scratch memory may be any number of bytes: 5,709 rows of 10,240 bytes, 14,043 of 7,168.
        let slabs = [SLAB_BYTES, SPARE_SLAB_BYTES, 58_460_160, 1, 3 * 8192, 129 * 4096];
        for k in [1, 16, 33, 2048, 3584, 3840, 4096, 5120, 14336, 1 << 20, 100_000_000] {
            for size in [2, 4] {
                for n in [1, 2, 3, 127, 4096, 13824, 18944, 262_144] {
                    for rows in slabs.map(|slab| rows_per_slab(k, size, n, slab)) {
                        assert!(rows <= n && (rows == n || rows % 2 == 0 && rows > 0), "{rows} of {n} × {k}");
                    }
                    let columns = columns_per_slab(k, size, n);
                    assert!(columns <= n && (columns == n || columns.is_multiple_of(TRANSPOSE_TILE)));
                }
            }
        }
        assert_eq!(rows_per_slab(5120, 2, 13824, 58_460_160), 5632, "tiles of 128 rows");
        assert_eq!(rows_per_slab(5120, 2, 13824, 77 * 10_240), 76);
        assert_eq!(rows_per_slab(5120, 2, 13824, SLAB_BYTES), 9728);
    }

    #[test]
    fn what_is_left_has_room_for_the_rows_of_the_forecast() {
        for (k, n) in [(5120, 13824), (3584, 18944), (100_000_000, 7)] {
            let forecast = rows_per_slab(k, 2, n, SPARE_SLAB_BYTES);
            let left = aligned(forecast * k * 2);
            let rows = rows_per_slab(k, 2, n, left / ALIGNMENT * ALIGNMENT);
            assert!(rows >= forecast && rows * k * 2 <= left, "{rows} of {forecast}");
        }
    }
}
