// GEMM on Hopper's tensor cores: out [m, n] = x [m, k] · (w [n, k])ᵀ, operands bf16 or f16, sums and result f32.
//
// A block computes a tile of the result. Two warp groups (128 threads) multiply, each 64 rows of the tile, and a warp
// loads: one of its threads keeps a ring of slots full. Tiles of both operands, 64 columns wide, arrive by the tensor
// copy engine (cp.async.bulk.tensor) in the 128-byte swizzle that wgmma reads. Each slot has two mbarriers: `full` counts
// arriving bytes, `empty` the warp groups that are done with it.
//
// Blocks of a cluster take tiles of the same weight rows and different activation rows. Each loads its share of the
// weight tile and sends it to all, so that the L2 cache is asked for it once per cluster.
//
// Columns and rows beyond the operands arrive as zeros.

#if __CUDA_ARCH_FEAT_SM90_ALL

// Rows and columns of a block's results.
#define TILE_ROWS 128
#define TILE_COLS 128
#define SLOTS 6

struct GemmResult {
    u64 out;         // f32
    u64 scales;      // factors on its rows; 0: none
    u32 m, n, k;
    u32 stride;      // elements from row to row of the result
};

#define SLOT_BYTES ((TILE_ROWS + TILE_COLS) * SLOT_COLS * 2)

__device__ __forceinline__ void store_tile(const GemmResult &r, const float (&d)[TILE_COLS / 2], u32 row, u32 col) {
    bool pairs = r.stride % 2 == 0 && r.out % 8 == 0;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        if (row >= r.m) continue;
        float scale = r.scales ? ((const float *)r.scales)[row] : 1.0f;
        float *to = (float *)r.out + (u64)row * r.stride + col;
#pragma unroll
        for (int j = 0; j < TILE_COLS / 8; j++) {
            float a = d[4 * j + 2 * half] * scale, b = d[4 * j + 2 * half + 1] * scale;
            u32 at = col + 8 * j;
            if (pairs && at + 1 < r.n) {
                *(float2 *)(to + 8 * j) = make_float2(a, b);
            } else {
                if (at < r.n) to[8 * j] = a;
                if (at + 1 < r.n) to[8 * j + 1] = b;
            }
        }
    }
}

// `CLUSTER` blocks share a tile of the weight, whose rows are columns of the result.
template <int CLUSTER, bool IS_BF16>
__device__ __forceinline__ void gemm(const TensorMap &x, const TensorMap &w, const GemmResult &result) {
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * SLOTS];
    const u32 x_bytes = TILE_ROWS * SLOT_COLS * 2, share = TILE_COLS / CLUSTER;
    u32 base = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * SLOTS;
    u32 group = threadIdx.x / GROUP, rounds = (result.k + SLOT_COLS - 1) / SLOT_COLS;
    u32 first_row = blockIdx.x * TILE_ROWS, first_col = blockIdx.y * TILE_COLS;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < SLOTS; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1) cluster_barrier();
    else __syncthreads();

    if (group == 2) {
        wait_for_previous_kernel();
        if (threadIdx.x == 2 * GROUP) {
            u32 rank = CLUSTER > 1 ? block_of_cluster() : 0, slot = 0, parity = 1;
            for (u32 i = 0; i < rounds; i++) {
                u32 at = base + slot * SLOT_BYTES, barrier = full + 8 * slot;
                barrier_wait(empty + 8 * slot, parity);
                barrier_expect(barrier, SLOT_BYTES);
                load_box(at, x, i * SLOT_COLS, first_row, barrier);
                at += x_bytes + rank * share * SLOT_COLS * 2;
                if (CLUSTER > 1)
                    load_box_to_all(at, w, i * SLOT_COLS, first_col + rank * share, barrier, (1 << CLUSTER) - 1);
                else
                    load_box(at, w, i * SLOT_COLS, first_col, barrier);
                if (++slot == SLOTS) {
                    slot = 0;
                    parity ^= 1;
                }
            }
        }
    } else {
        launch_dependents();
        float d[TILE_COLS / 2];
        u32 slot = 0, parity = 0, previous = 0;
        for (u32 i = 0; i < rounds; i++) {
            barrier_wait(full + 8 * slot, parity);
            u32 at = base + slot * SLOT_BYTES;
            u64 left = operand(at + group * 64 * SLOT_COLS * 2), right = operand(at + x_bytes);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < SLOT_COLS / 16; step++)
                wgmma<TILE_COLS, IS_BF16>(d, left + 2 * step, right + 2 * step, i > 0 || step > 0);
            wgmma_commit();
            // The multiplications of the round before are complete: its slot can be filled again.
            wgmma_wait<1>();
            if (i > 0 && threadIdx.x % GROUP < CLUSTER) barrier_arrive_at(empty + 8 * previous, threadIdx.x % GROUP);
            previous = slot;
            if (++slot == SLOTS) {
                slot = 0;
                parity ^= 1;
            }
        }
        wgmma_wait<0>();
        u32 lane = threadIdx.x % WARP, warp = threadIdx.x % GROUP / WARP;
        store_tile(result, d, first_row + group * 64 + warp * 16 + lane / 4, first_col + lane % 4 * 2);
    }
    __syncwarp();
    // A block ends only when no other one sends to its shared memory.
    if (CLUSTER > 1) cluster_barrier();
}

#define GEMM(name, cluster, is_bf16) \
    extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(2 * GROUP + WARP, 1) \
        name(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, \
             const __grid_constant__ GemmResult result) { \
        gemm<cluster, is_bf16>(x, w, result); \
    }
GEMM(k_gemm_bf16_wgmma, 1, true)
GEMM(k_gemm_bf16_wgmma_pair, 2, true)
GEMM(k_gemm_f16_wgmma, 1, false)
GEMM(k_gemm_f16_wgmma_pair, 2, false)

#endif
