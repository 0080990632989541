//! The kernels of attention_grouped.cu: which there are, and what they take.

use std::ffi::CStr;

use quadriga_graph::DType;

use crate::launch::{TensorArg, has_dense_rows};

/// Static shared memory of these kernels, rounded up.
const STATIC_SHARED_BYTES: u32 = 2048;

/// Rows of a block, pairs of query and head of a group, of the kernels for few of them.
const FEW: u64 = 16;
/// The same of the kernels for many.
const MANY: u64 = 64;
/// Rows of a block of the kernels for tiles of queries through page tables.
pub(super) const TILE_ROWS: u64 = MANY;
/// Both.
pub(super) const GROUPED_ROWS: [u64; 2] = [FEW, MANY];

/// A kernel for keys of `d` elements and values of `e`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GroupedKernel {
    d: i64,
    e: i64,
    /// Rows of a block.
    pub(super) rows: u64,
    /// Keys of a tile.
    keys: u32,
    pub(super) name: &'static CStr,
}

const fn kernel(d: i64, e: i64, rows: u64, keys: u32, name: &'static CStr) -> GroupedKernel {
    GroupedKernel { d, e, rows, keys, name }
}

/// Through page tables: for heads of at most so many elements, narrow ones first.
const PAGED_KERNELS: [GroupedKernel; 9] = [
    kernel(128, 128, MANY, 64, c"k_attention_grouped_paged_128_m4"),
    kernel(128, 128, FEW, 64, c"k_attention_grouped_paged_128_m1"),
    kernel(192, 128, MANY, 64, c"k_attention_grouped_paged_192_m4"),
    kernel(192, 128, FEW, 64, c"k_attention_grouped_paged_192_m1"),
    kernel(256, 256, MANY, 64, c"k_attention_grouped_paged_256_m4"),
    kernel(256, 256, FEW, 64, c"k_attention_grouped_paged_256_m1"),
    kernel(256, 256, FEW, 32, c"k_attention_grouped_paged_256_m1_small"),
    kernel(576, 512, MANY, 32, c"k_attention_grouped_paged_576_m4"),
    kernel(576, 512, FEW, 32, c"k_attention_grouped_paged_576_m1"),
];

const KERNELS: [GroupedKernel; 9] = [
    kernel(64, 64, FEW, 64, c"k_attention_grouped_64_m1"),
    kernel(96, 96, FEW, 64, c"k_attention_grouped_96_m1"),
    kernel(128, 128, FEW, 64, c"k_attention_grouped_128_m1"),
    kernel(192, 128, MANY, 64, c"k_attention_grouped_192_m4"),
    kernel(192, 128, FEW, 64, c"k_attention_grouped_192_m1"),
    kernel(256, 256, MANY, 64, c"k_attention_grouped_256_m4"),
    kernel(256, 256, FEW, 64, c"k_attention_grouped_256_m1"),
    kernel(576, 512, MANY, 32, c"k_attention_grouped_576_m4"),
    kernel(576, 512, FEW, 32, c"k_attention_grouped_576_m1"),
];

impl GroupedKernel {
    /// The kernel for these operands, if there is one whose shared memory fits a block.
    pub(super) fn of([q, k, v, out]: [&TensorArg; 4], shared_bytes_per_block: u32) -> Option<GroupedKernel> {
        let dense = are_dense([q, k, v, out]);
        let rows = (q.dims[1] / k.dims[1].max(1)).saturating_mul(q.dims[2]) as u64;
        let fits = |kernel: &&GroupedKernel| {
            (kernel.d, kernel.e) == (k.dims[3], v.dims[3])
                && (kernel.rows == FEW || rows > FEW)
                && kernel.shared_bytes() + STATIC_SHARED_BYTES <= shared_bytes_per_block
        };
        KERNELS.iter().find(fits).copied().filter(|_| dense)
    }

    /// The kernel that takes `rows` heads of a query, or of a tile of queries, through page tables: one for many rows if there
    /// are more than the other takes.
    pub(super) fn through_pages(
        [q, k, v, out]: [&TensorArg; 4],
        rows: u64,
        shared_bytes_per_block: u32,
    ) -> Option<GroupedKernel> {
        let (d, e) = (k.dims[3], v.dims[3]);
        // Rows are loaded eight elements at a time.
        let whole = [d, e].iter().all(|n| n % 8 == 0) && are_dense([q, k, v, out]);
        let fits = |kernel: &&GroupedKernel| {
            d <= kernel.d
                && e <= kernel.e
                && (kernel.rows == FEW || rows > FEW)
                && kernel.shared_bytes() + STATIC_SHARED_BYTES <= shared_bytes_per_block
        };
        PAGED_KERNELS.iter().find(fits).copied().filter(|_| whole)
    }

    /// Dynamic shared memory: queries, two tiles of keys and values, scores, weights.
    pub(super) fn shared_bytes(&self) -> u32 {
        let pitch = |elements: u32| 2 * elements + 16;
        let (rows, keys) = (self.rows as u32, self.keys);
        let [of_key, of_value] = [self.d, self.e].map(|elements| pitch(elements as u32));
        rows * of_key + 2 * keys * (of_key + of_value) + rows * (keys + 4) * 4 + rows * pitch(keys)
    }
}

/// Whether the kernels read queries, keys and values, and write results, as they are in memory.
fn are_dense([q, k, v, out]: [&TensorArg; 4]) -> bool {
    [q, out].iter().all(|t| has_dense_rows(t, DType::F32, 8)) && is_cached(k) && is_cached(v)
}

/// Whether the tensor cores' kernels read keys or values of this type and alignment.
pub(super) fn is_cached(t: &TensorArg) -> bool {
    [(DType::F16, 16), (DType::BF16, 16), (DType::Q8_0, 2), (DType::Q5_1, 2), (DType::Q4_0, 2)]
        .into_iter()
        .any(|(dtype, alignment)| has_dense_rows(t, dtype, alignment))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dynamic shared memory of a block on Hopper.
    const HOPPER: u32 = 232_448;
    /// The same on devices of compute capability 8.6.
    const SMALL: u32 = 101_376;

    fn tensor(dtype: DType, dims: [i64; 4]) -> TensorArg {
        let row = dtype.row_bytes(dims[3] as usize).unwrap() as i64;
        let strides = [dims[1] * dims[2] * row, dims[2] * row, row, dtype.block_bytes() as i64];
        TensorArg { address: 1 << 20, dtype: dtype.id(), reserved: 0, dims, strides }
    }

    fn found(
        [heads, queries]: [i64; 2],
        [d, e]: [i64; 2],
        dtype: DType,
        shared: u32,
    ) -> Option<GroupedKernel> {
        let q = tensor(DType::F32, [1, heads, queries, d]);
        let out = tensor(DType::F32, [1, queries, heads, e]);
        let (k, v) = (tensor(dtype, [1, 1, 100, d]), tensor(dtype, [1, 1, 100, e]));
        GroupedKernel::of([&q, &k, &v, &out], shared)
    }

    #[test]
    fn every_kernel_fits_hopper_and_its_smallest_others() {
        for kernel in KERNELS.into_iter().chain(PAGED_KERNELS) {
            assert!(kernel.shared_bytes() + STATIC_SHARED_BYTES <= HOPPER, "{kernel:?}");
        }
        assert_eq!(found([16, 40], [256, 256], DType::F16, HOPPER).unwrap().rows, 64);
        assert_eq!(found([16, 40], [128, 128], DType::F16, SMALL).unwrap().rows, 16);
        assert_eq!(found([16, 40], [576, 512], DType::F16, SMALL), None);
    }

    #[test]
    fn rows_are_queries_times_heads_and_types_those_of_caches() {
        assert_eq!(found([16, 1], [576, 512], DType::BF16, HOPPER).unwrap().rows, 16);
        assert_eq!(found([17, 1], [576, 512], DType::BF16, HOPPER).unwrap().rows, 64);
        for dtype in [DType::Q4_0, DType::Q5_1, DType::Q8_0] {
            assert!(found([4, 1], [64, 64], dtype, HOPPER).is_some(), "{dtype}");
        }
        assert_eq!(found([4, 1], [64, 64], DType::F32, HOPPER), None);
        assert_eq!(found([4, 1], [64, 96], DType::F16, HOPPER), None);
    }

    #[test]
    fn through_pages_narrower_heads_use_the_kernel_of_the_next_width() {
        let found = |rows: u64, [d, e]: [i64; 2], dtype: DType, shared: u32| {
            let (q, out) = (tensor(DType::F32, [1, 16, 3, d]), tensor(DType::F32, [1, 3, 16, e]));
            let (k, v) = (tensor(dtype, [1, 1, 128, d]), tensor(dtype, [1, 1, 128, e]));
            let kernel = GroupedKernel::through_pages([&q, &k, &v, &out], rows, shared);
            kernel.and_then(|kernel| kernel.name.to_str().ok())
        };
        for (widths, name) in [
            ([112, 112], "k_attention_grouped_paged_128_m1"),
            ([160, 128], "k_attention_grouped_paged_192_m1"),
            ([192, 192], "k_attention_grouped_paged_256_m1"),
            ([576, 512], "k_attention_grouped_paged_576_m1"),
        ] {
            assert_eq!(found(16, widths, DType::F16, HOPPER), Some(name));
        }
        assert_eq!(found(17, [256, 256], DType::Q8_0, HOPPER), Some("k_attention_grouped_paged_256_m4"));
        assert_eq!(
            found(64, [256, 256], DType::F16, SMALL),
            Some("k_attention_grouped_paged_256_m1_small"),
            "a block of a smaller device"
        );
        for (widths, dtype) in [
            ([576, 512], DType::F32),
            ([100, 64], DType::F16),
            ([64, 576], DType::F16),
            ([640, 64], DType::F16),
        ] {
            assert_eq!(found(16, widths, dtype, HOPPER), None, "{widths:?} {dtype}");
        }
    }
}
