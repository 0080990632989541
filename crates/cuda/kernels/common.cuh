// Shared by all kernel files: integer types, float conversions, reductions, programmatic dependent launch, fault
// reports. The host puts this, op_codes.cuh, code_books.cuh, formats.cuh and tensor.cuh before each file; no toolkit
// header is needed.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INF __int_as_float(0x7f800000)
#define WARP 32
#define FULL 0xffffffffu

__device__ __forceinline__ float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

#define LOG2E 1.4426950408889634f

// 2^x, to about 2 ulp.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_exp(float x) { return fast_exp2(x * LOG2E); }

__device__ __forceinline__ float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ u16 float_to_bf16(float f) {
    u32 bits = __float_as_uint(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Two floats as bf16x2, the first in the low 16 bits.
__device__ __forceinline__ u32 floats_to_bf16x2(float low, float high) {
#if __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return (u32)float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
#endif
}

#if __CUDA_ARCH__ >= 800
// Two floats as f16x2, the first in the low 16 bits.
__device__ __forceinline__ u32 floats_to_f16x2(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#endif

// Little-endian integers and f16 at any byte address.
__device__ __forceinline__ u16 read16(const u8 *p) { return (u16)p[0] | (u16)p[1] << 8; }
__device__ __forceinline__ float read_half(const u8 *p) { return half_to_float(read16(p)); }
__device__ __forceinline__ u32 read32(const u8 *p) { return (u32)read16(p) | (u32)read16(p + 2) << 16; }

__device__ __forceinline__ void write16(u8 *to, u32 v) {
    to[0] = (u8)v;
    to[1] = (u8)(v >> 8);
}

// Four products of packed 8-bit integers, added to `c`.
__device__ __forceinline__ int dp4a_signed(int a, int b, int c) {
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ int dp4a_unsigned(u32 a, int b, int c) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Programmatic dependent launch: allows the next kernel of the stream to start. It waits for the end of this one in
// `wait_for_previous_kernel`.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same, then waits until the previous kernel is complete and its writes are visible. Code ahead of this call must
// not read anything that the previous kernel writes. A launch without the attribute passes through.
__device__ __forceinline__ void wait_for_previous_kernel() {
    launch_dependents();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Grid-stride loop.
#define FOR_EACH(n, total) \
    for (i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x; n < (total); n += (i64)gridDim.x * blockDim.x)

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
    return v;
}

// Sum and maximum over a block of at most 1024 threads; every thread gets the result. `shared` holds 32 floats.
__device__ __forceinline__ float block_sum(float v, float *shared) {
    v = warp_sum(v);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    v = threadIdx.x % WARP < (blockDim.x + WARP - 1) / WARP ? shared[threadIdx.x % WARP] : 0.0f;
    __syncthreads();
    return warp_sum(v);
}

__device__ __forceinline__ float block_max(float v, float *shared) {
    v = warp_max(v);
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    v = threadIdx.x % WARP < (blockDim.x + WARP - 1) / WARP ? shared[threadIdx.x % WARP] : -INF;
    __syncthreads();
    return warp_max(v);
}

// Stores the code of a fault in the host's fault word; the first report wins.
__device__ __forceinline__ void report(u64 fault_word, u32 code) {
    asm volatile("{ .reg .u32 old; atom.sys.global.cas.b32 old, [%0], 0, %1; }" ::"l"(fault_word), "r"(code)
                 : "memory");
}
