// GEMM without cuBLAS: out [m, n] = x [m, k] · (w [n, k])ᵀ, sums and result f32.
//
// bf16 and f16 operands (compute capability 8.0 and newer): a block computes a tile of 128 × 128 on tensor cores (mma),
// a warp 64 × 32 of it. Tiles of both operands, 32 columns wide, pass through a ring of slots in shared memory that
// cp.async fills ahead. Rows of a slot have 64 bytes; the 16-byte parts of a row are swapped so that the eight rows of
// an 8 × 8 matrix fall into different banks.
//
// f32 operands: the same tile with multiply-adds, each thread 8 × 8 results.
//
// Rows beyond an operand repeat its last one, and their results are not stored; columns beyond `k` are zeros.

struct GemmWork {
    u64 x, w;        // rows of `k` elements
    u64 out;         // f32
    u64 scales;      // factors on its rows; 0: none
    u32 m, n, k;
    u32 stride;      // elements from row to row of the result
};

#define TILE 128
#define THREADS 256

__device__ __forceinline__ void store_one(const GemmWork &g, u32 row, u32 col, float v) {
    if (row < g.m && col < g.n) ((float *)g.out)[(u64)row * g.stride + col] = v;
}

#if __CUDA_ARCH__ >= 800

#define COLS 32
#define SLOTS 4
#define SLOT_BYTES (2 * TILE * COLS * 2)

// Where part `part` of a row is in a tile.
__device__ __forceinline__ u32 part_at(u32 row, u32 part) { return row * (COLS * 2) + (part ^ (row >> 1 & 3)) * 16; }

// Starts to load 128 rows of an operand, 32 columns from `col` on.
__device__ __forceinline__ void load_tile(u32 to, u64 from, u32 first, u32 rows, u32 col, u32 k) {
#pragma unroll
    for (u32 i = threadIdx.x; i < TILE * COLS / 8; i += THREADS) {
        u32 row = i / (COLS / 8), part = i % (COLS / 8), c = col + part * 8;
        u64 source = from + ((u64)min(first + row, rows - 1) * k + min(c, k - 8)) * 2;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + part_at(row, part)), "l"(source),
                     "r"(c < k ? 16 : 0) : "memory");
    }
}

template <bool IS_BF16> __device__ __forceinline__ void gemm_mma(const GemmWork &g) {
    extern __shared__ __align__(128) u8 memory[];
    u32 base = (u32)__cvta_generic_to_shared(memory), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 first_row = blockIdx.x * TILE, first_col = blockIdx.y * TILE, rounds = (g.k + COLS - 1) / COLS;
    u32 warp_row = warp % 2 * 64, warp_col = warp / 2 * 32;
    wait_for_previous_kernel();
    auto load = [&](u32 round) {
        if (round < rounds) {
            u32 to = base + round % SLOTS * SLOT_BYTES;
            load_tile(to, g.x, first_row, g.m, round * COLS, g.k);
            load_tile(to + TILE * COLS * 2, g.w, first_col, g.n, round * COLS, g.k);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (u32 i = 0; i < SLOTS - 1; i++) load(i);
    float sum[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; i++) sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
    for (u32 round = 0; round < rounds; round++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 2) : "memory");
        // All have loaded this slot, and are done with the one that is loaded next.
        __syncthreads();
        load(round + SLOTS - 1);
        u32 x = base + round % SLOTS * SLOT_BYTES, w = x + TILE * COLS * 2;
#pragma unroll
        for (int step = 0; step < COLS / 16; step++) {
            u32 a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Matrices: rows 0..8 and 8..16 of columns 0..8, then of columns 8..16.
                u32 row = warp_row + i * 16 + lane % 16;
                load_matrices(a[i], x + part_at(row, step * 2 + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                // Matrices: columns 0..8 and 8..16 of rows 0..8, then of rows 8..16.
                u32 row = warp_col + j * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b[j], w + part_at(row, step * 2 + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma<IS_BF16>(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    bool pairs = g.stride % 2 == 0 && g.out % 8 == 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = first_row + warp_row + i * 16 + half * 8 + lane / 4;
            float scale = g.scales && row < g.m ? ((const float *)g.scales)[row] : 1.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 col = first_col + warp_col + j * 8 + lane % 4 * 2;
                float v0 = sum[i][j][2 * half] * scale, v1 = sum[i][j][2 * half + 1] * scale;
                if (pairs && row < g.m && col + 1 < g.n) {
                    *(float2 *)((float *)g.out + (u64)row * g.stride + col) = make_float2(v0, v1);
                } else {
                    store_one(g, row, col, v0);
                    store_one(g, row, col + 1, v1);
                }
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) k_gemm_bf16(const __grid_constant__ GemmWork g) {
    gemm_mma<true>(g);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) k_gemm_f16(const __grid_constant__ GemmWork g) {
    gemm_mma<false>(g);
}

#endif

#define F32_COLS 8

// Four elements of a row of f32; zeros beyond `k`.
__device__ __forceinline__ float4 four_of(u64 from, u32 row, u32 rows, u32 col, u32 k) {
    if (col >= k) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return *(const float4 *)(from + ((u64)min(row, rows - 1) * k + col) * 4);
}

extern "C" __global__ void __launch_bounds__(THREADS) k_gemm_f32(const __grid_constant__ GemmWork g) {
    // Tiles with columns as rows; a thread's results are rows 4 · y + (0..4) and 64 more, columns alike.
    __shared__ __align__(16) float xs[2][F32_COLS][TILE + 4], ws[2][F32_COLS][TILE + 4];
    u32 first_row = blockIdx.x * TILE, first_col = blockIdx.y * TILE, rounds = (g.k + F32_COLS - 1) / F32_COLS;
    u32 row = threadIdx.x / 2, part = threadIdx.x % 2 * 4, x4 = threadIdx.x % 16 * 4, y4 = threadIdx.x / 16 * 4;
    wait_for_previous_kernel();
    float sum[8][8];
#pragma unroll
    for (int i = 0; i < 64; i++) sum[i / 8][i % 8] = 0.0f;
    float4 x = four_of(g.x, first_row + row, g.m, part, g.k), w = four_of(g.w, first_col + row, g.n, part, g.k);
    for (u32 round = 0; round < rounds; round++) {
        u32 now = round % 2, next = (round + 1) * F32_COLS + part;
        xs[now][part][row] = x.x, xs[now][part + 1][row] = x.y, xs[now][part + 2][row] = x.z;
        xs[now][part + 3][row] = x.w;
        ws[now][part][row] = w.x, ws[now][part + 1][row] = w.y, ws[now][part + 2][row] = w.z;
        ws[now][part + 3][row] = w.w;
        // The tiles of the round before the last are no longer read: the buffers alternate.
        __syncthreads();
        x = four_of(g.x, first_row + row, g.m, next, g.k), w = four_of(g.w, first_col + row, g.n, next, g.k);
#pragma unroll
        for (int c = 0; c < F32_COLS; c++) {
            float a[8], b[8];
            *(float4 *)a = *(const float4 *)&xs[now][c][y4];
            *(float4 *)(a + 4) = *(const float4 *)&xs[now][c][y4 + 64];
            *(float4 *)b = *(const float4 *)&ws[now][c][x4];
            *(float4 *)(b + 4) = *(const float4 *)&ws[now][c][x4 + 64];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            store_one(g, first_row + y4 + i % 4 + i / 4 * 64, first_col + x4 + j % 4 + j / 4 * 64, sum[i][j]);
}
