// Products of f32 accuracy on tensor cores (compute capability 8.0 and newer): each operand is a sum of two bf16, in two
// tiles of shared memory, and three of the four products count.

#if __CUDA_ARCH__ >= 800

// Bytes from row to row of a tile of bf16 in shared memory: the eight rows of a matrix fall into different banks.
template <int COLS> __device__ __forceinline__ constexpr int tile_pitch() { return 2 * COLS + 16; }

// Two floats, each as a sum of two bf16; where that is not possible, they stay what they are.
__device__ __forceinline__ void split_floats(float a, float b, u32 *high, u32 *low) {
    u32 both = floats_to_bf16x2(a, b);
    float rest_a = a - __uint_as_float(both << 16), rest_b = b - __uint_as_float(both & 0xffff0000u);
    *high = both;
    *low = floats_to_bf16x2(fabsf(a) < INF ? rest_a : 0.0f, fabsf(b) < INF ? rest_b : 0.0f);
}

// Adds the product of two matrices that are sums.
__device__ __forceinline__ void mma_split(float sum[4], const u32 high[4], const u32 low[4], const u32 *b_high,
                                          const u32 *b_low) {
    mma<true>(sum, high, b_high[0], b_high[1]);
    mma<true>(sum, high, b_low[0], b_low[1]);
    mma<true>(sum, low, b_high[0], b_high[1]);
}

// Two floats to a pair of tiles `distance` bytes apart.
__device__ __forceinline__ void put_split(u8 *at, int distance, float a, float b) {
    u32 high, low;
    split_floats(a, b, &high, &low);
    *(u32 *)at = high;
    *(u32 *)(at + distance) = low;
}

#endif
