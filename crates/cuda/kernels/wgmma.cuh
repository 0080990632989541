// Hopper's tensor cores (wgmma), tensor copy engine and clusters: what the GEMM kernels for it share.

#if __CUDA_ARCH_FEAT_SM90_ALL

struct __align__(64) TensorMap { u64 words[16]; };

// Threads of a warp group.
#define GROUP 128
// Columns of a slot: 128 bytes of 16-bit elements, the width of the swizzle.
#define SLOT_COLS 64

// Arrives at a barrier of this block.
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

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

// The same, and what a thread wrote to shared memory before is visible to all after.
__device__ __forceinline__ void cluster_barrier_of_writes() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 block_of_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 blocks_of_cluster() {
    u32 blocks;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

// Four floats of another block's shared memory; `address` is as this block would have it.
__device__ __forceinline__ float4 load_from_block(u32 address, u32 block) {
    float4 v;
    asm volatile("{\n"
                 ".reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
                 "}" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(block) : "memory");
    return v;
}

// Makes what this thread wrote to shared memory visible to wgmma and the copy engine.
__device__ __forceinline__ void fence_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// The registers of 64 × 8, 16, 32, 64, 128 and 256 sums: names, then operands.
#define SUMS_4 "%0, %1, %2, %3"
#define SUMS_8 SUMS_4 ", %4, %5, %6, %7"
#define SUMS_16 SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_32 SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_64 SUMS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
    "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_128 SUMS_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
    "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
    "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, " \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OF_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OF_8(i) OF_4(i), OF_4(i + 4)
#define OF_16(i) OF_8(i), OF_8(i + 8)
#define OF_32(i) OF_16(i), OF_16(i + 16)
#define OF_64(i) OF_32(i), OF_32(i + 32)
#define OF_128(i) OF_64(i), OF_64(i + 64)
// `add` is the operand after those, then come `left` and `right`.
#define WGMMA(shape, type, sums, of, add_at, left_at, right_at, trans, left_operands) \
    asm volatile("{\n" \
                 ".reg .pred p;\n" \
                 "setp.ne.b32 p, " add_at ", 0;\n" \
                 "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" sums "}, " left_at ", " right_at \
                 ", p, 1, 1, " trans ";\n" \
                 "}" : of(0) : "r"(add), left_operands, "l"(right))
#define IN_SHARED "l"(left)
#define WGMMA_OF(type) \
    if constexpr (N == 8) WGMMA("m64n8k16", type, SUMS_4, OF_4, "%4", "%5", "%6", "0, 0", IN_SHARED); \
    else if constexpr (N == 16) WGMMA("m64n16k16", type, SUMS_8, OF_8, "%8", "%9", "%10", "0, 0", IN_SHARED); \
    else if constexpr (N == 32) WGMMA("m64n32k16", type, SUMS_16, OF_16, "%16", "%17", "%18", "0, 0", IN_SHARED); \
    else if constexpr (N == 64) WGMMA("m64n64k16", type, SUMS_32, OF_32, "%32", "%33", "%34", "0, 0", IN_SHARED); \
    else if constexpr (N == 128) WGMMA("m64n128k16", type, SUMS_64, OF_64, "%64", "%65", "%66", "0, 0", IN_SHARED); \
    else WGMMA("m64n256k16", type, SUMS_128, OF_128, "%128", "%129", "%130", "0, 0", IN_SHARED)

// Adds the product of a 64 × 16 and a 16 × N matrix in shared memory to `d`; what is in `d` is ignored where `add` is 0.
template <int N, bool IS_BF16> __device__ __forceinline__ void wgmma(float (&d)[N / 2], u64 left, u64 right, int add) {
    if constexpr (IS_BF16) {
        WGMMA_OF("bf16");
    } else {
        WGMMA_OF("f16");
    }
}

// The same with the first matrix in registers: a lane has rows `lane / 4` and `lane / 4 + 8` of its warp's 16, of each
// the columns `lane % 4 · 2` and the next, then those 8 further.
#define IN_REGISTERS "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3])
#define WGMMA_FROM(type) \
    if constexpr (N == 8) WGMMA("m64n8k16", type, SUMS_4, OF_4, "%4", "{%5, %6, %7, %8}", "%9", "0", IN_REGISTERS); \
    else if constexpr (N == 16) WGMMA("m64n16k16", type, SUMS_8, OF_8, "%8", "{%9, %10, %11, %12}", "%13", "0", IN_REGISTERS); \
    else if constexpr (N == 32) WGMMA("m64n32k16", type, SUMS_16, OF_16, "%16", "{%17, %18, %19, %20}", "%21", "0", IN_REGISTERS); \
    else if constexpr (N == 64) WGMMA("m64n64k16", type, SUMS_32, OF_32, "%32", "{%33, %34, %35, %36}", "%37", "0", IN_REGISTERS); \
    else if constexpr (N == 128) WGMMA("m64n128k16", type, SUMS_64, OF_64, "%64", "{%65, %66, %67, %68}", "%69", "0", IN_REGISTERS); \
    else WGMMA("m64n256k16", type, SUMS_128, OF_128, "%128", "{%129, %130, %131, %132}", "%133", "0", IN_REGISTERS)

template <int N, bool IS_BF16>
__device__ __forceinline__ void wgmma_from(float (&d)[N / 2], const u32 *left, u64 right, int add) {
    if constexpr (IS_BF16) {
        WGMMA_FROM("bf16");
    } else {
        WGMMA_FROM("f16");
    }
}

#endif
