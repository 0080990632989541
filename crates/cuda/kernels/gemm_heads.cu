// Matrix multiplication of several heads, each with a matrix of its own: out [b, h, m, n] = x [b, h, m, k] · (w [b, h, n, k])ᵀ
// (mma; compute capability 8.0 and newer). All types, any strides of whole rows.
//
// A block computes a tile of 64 × 64 of one head, a warp 16 rows of it. Both operands pass through shared memory, 32 columns
// at a time, with f32 accuracy (split.cuh).

#define TILE 64
#define COLS 32

#if __CUDA_ARCH__ >= 800

extern "C" __global__ void __launch_bounds__(128)
    k_gemm_heads(const __grid_constant__ Tensor w, const __grid_constant__ Tensor x, const __grid_constant__ Tensor out) {
    const int pitch = tile_pitch<COLS>(), tile = TILE * pitch;
    __shared__ __align__(16) u8 rows[2 * TILE * tile_pitch<COLS>()], weights[2 * TILE * tile_pitch<COLS>()];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2, matrix = lane / 8;
    i64 i0 = blockIdx.z / x.d[1], i1 = blockIdx.z % x.d[1];
    i64 w0 = i0 / (x.d[0] / w.d[0]), w1 = i1 / (x.d[1] / w.d[1]);
    i64 first_n = (i64)blockIdx.x * TILE, first_m = (i64)blockIdx.y * TILE, k = x.d[3];
    wait_for_previous_kernel();

    u32 left = (u32)__cvta_generic_to_shared(rows) + (16 * warp + matrix % 2 * 8 + lane % 8) * pitch + matrix / 2 * 16;
    u32 right = (u32)__cvta_generic_to_shared(weights) + (matrix / 2 * 8 + lane % 8) * pitch + matrix % 2 * 16;
    float sum[TILE / 8][4];
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] = 0.0f;
    for (i64 first = 0; first < k; first += COLS) {
        for (int i = threadIdx.x; i < TILE * COLS / 2; i += 128) {
            int row = i / (COLS / 2), c = i % (COLS / 2) * 2;
            i64 col = first + c;
            float a[2], b[2];
            const u8 *weight = row_at(w, w0, w1, min(first_n + row, w.d[2] - 1));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                a[j] = first_m + row < x.d[2] && col + j < k ? element(x, i0, i1, first_m + row, col + j) : 0.0f;
                b[j] = first_n + row < w.d[2] && col + j < k ? row_element(w.type, weight, col + j) : 0.0f;
            }
            put_split(rows + row * pitch + 2 * c, tile, a[0], a[1]);
            put_split(weights + row * pitch + 2 * c, tile, b[0], b[1]);
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < COLS / 16; step++) {
            u32 high[4], low[4];
            load_matrices(high, left + step * 32);
            load_matrices(low, left + tile + step * 32);
#pragma unroll
            for (int n = 0; n < TILE / 16; n++) {
                u32 w_high[4], w_low[4];
                load_matrices(w_high, right + n * 16 * pitch + step * 32);
                load_matrices(w_low, right + tile + n * 16 * pitch + step * 32);
                mma_split(sum[2 * n], high, low, w_high, w_low);
                mma_split(sum[2 * n + 1], high, low, w_high + 2, w_low + 2);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int n = 0; n < TILE / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 row = first_m + 16 * warp + lane / 4 + i / 2 * 8, col = first_n + 8 * n + pair + i % 2;
            if (row < out.d[2] && col < out.d[3]) put(out, i0, i1, row, col, sum[n][i]);
        }
}

#endif
