//! Decode attention over long caches: the kernels of attention_decode.cu, and what they take.

use std::ffi::CStr;

/// The fewest keys for which these kernels are faster than those of attention.cu.
pub(super) const MIN_KEYS: u64 = 4096;
/// The most query heads that share a head of the keys.
pub(super) const MAX_SHARED_HEADS: u64 = 8;
/// Threads of a block.
pub(super) const THREADS: u32 = 128;
/// Static shared memory of these kernels, rounded up.
const STATIC_SHARED_BYTES: u32 = 10_240;

/// A kernel of attention_decode.cu.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LongKernel {
    pub(super) name: &'static CStr,
    /// Dynamic shared memory of a block.
    pub(super) shared_bytes: u32,
}

impl LongKernel {
    /// The kernel for heads of `d` elements, with a norm of query or key, if there is one whose shared memory fits a block.
    pub(super) fn of(d: i64, normed: bool, shared_bytes_per_block: u32) -> Option<LongKernel> {
        let name = match (d, normed) {
            (64, false) => c"k_attention_long_64",
            (128, false) => c"k_attention_long_128",
            (64, true) => c"k_attention_long_64_normed",
            (128, true) => c"k_attention_long_128_normed",
            _ => return None,
        };
        // Four rings, each with three tiles of 16 keys and values of 128 elements or six of 64, and room for alignment.
        let shared_bytes = 4 * 3 * 2 * 16 * 128 * 2 + 256;
        (shared_bytes + STATIC_SHARED_BYTES <= shared_bytes_per_block)
            .then_some(LongKernel { name, shared_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_64_and_128_have_kernels_where_a_block_has_the_shared_memory() {
        let hopper = 232_448;
        for (d, normed) in [(64, false), (128, false), (64, true), (128, true)] {
            let kernel = LongKernel::of(d, normed, hopper).unwrap();
            // Two blocks on a multiprocessor, each with what the driver reserves.
            assert!(2 * (kernel.shared_bytes + STATIC_SHARED_BYTES + 1024) <= 233_472, "{kernel:?}");
            assert_eq!(LongKernel::of(d, normed, 101_376), None);
        }
        assert_eq!(LongKernel::of(256, false, hopper), None);
    }
}
