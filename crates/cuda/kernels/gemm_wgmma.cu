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

struct __align__(64) TensorMap { u64 words[16]; };

// Columns of a slot: 128 bytes, the width of the swizzle.
#define SLOT_COLS 64
// Rows and columns of a block's results.
#define TILE_ROWS 128
#define TILE_COLS 128
#define SLOTS 6
#define GROUP 128

// Arrives at the same barrier of a block of the cluster. The default scope, the block, is enough: wgmma has read the slot
// when its group is complete, and no thread has written to it. Cluster scope would put a fence for the whole device here.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
                 "}" ::"r"(barrier), "r"(block) : "memory");
}

// Waits for all threads of the cluster. It orders no ordinary writes: a release would wait for those of the results.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 block_of_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Loads a box of a matrix; its first element is in column `col` of row `row`.
__device__ __forceinline__ void load_box(u32 to, const TensorMap &map, u32 col, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(col), "r"(row), "r"(barrier) : "memory");
}

// The same, to the same place in every block of the cluster that `mask` names.
__device__ __forceinline__ void load_box_to_all(u32 to, const TensorMap &map, u32 col, u32 row, u32 barrier, u16 mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(&map), "r"(col), "r"(row), "r"(barrier), "h"(mask) : "memory");
}

// A matrix in shared memory as wgmma takes it: rows of 128 bytes, swizzled, eight rows 1,024 bytes after the previous.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_64 SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
#define WGMMA(type) \
    asm volatile("{\n" \
                 ".reg .pred p;\n" \
                 "setp.ne.b32 p, %66, 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, " \
                 "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, " \
                 "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
                 "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, " \
                 "0;\n" \
                 "}" : SUMS_64 : "l"(left), "l"(right), "r"(add))

// Adds the product of a 64 × 16 and a 16 × 128 matrix in shared memory to `d`; what is in `d` is ignored where `add` is
// 0.
template <bool IS_BF16>
__device__ __forceinline__ void wgmma(float (&d)[TILE_COLS / 2], u64 left, u64 right, int add) {
    if (IS_BF16) WGMMA("bf16");
    else WGMMA("f16");
}

struct GemmResult {
    u64 out;         // f32
    u64 scales;      // factors on its rows; 0: none
    u32 m, n, k;
    u32 stride;      // elements from row to row of the result
};

#define SLOT_BYTES ((TILE_ROWS + TILE_COLS) * SLOT_COLS * 2)

__device__ __forceinline__ void store_tile(const GemmResult &r, const float (&d)[TILE_COLS / 2], u32 row, u32 col) {
    bool pairs = r.stride % 2 == 0;
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
                wgmma<IS_BF16>(d, left + 2 * step, right + 2 * step, i > 0 || step > 0);
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
