// What every kernel file shares: tensor descriptors, conversions, and element access for every block format.
// It is put before each file by the host; no toolkit header is needed.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INF __int_as_float(0x7f800000)
#define WARP 32
#define FULL 0xffffffffu

// Ids of the element types, as in model files.
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
       Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, I32 = 26, BF16 = 30, MXFP4 = 39 };

// Layouts that matrices have on the device: packed (see matmul.cu), or f16 as in the file.
enum { FOUR, SHIFTED, EIGHT, HALF };

// How many of a row's scales lie from one row to the next, so that each row's start at whole 16 bytes.
__device__ __forceinline__ i64 scale_stride(int form, i64 blocks) {
    return form == SHIFTED ? (blocks + 3) / 4 * 4 : (blocks + 7) / 8 * 8;
}

// A tensor as the host describes it: address, type, extents and byte strides, outermost dimension first.
struct Tensor {
    u64 address;
    u32 type;
    u32 packed;
    i64 d[4];
    i64 s[4];
};

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

// To about two units in the last place.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_exp(float x) { return power_of_two(x * LOG2E); }

__device__ __forceinline__ float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }

// Rounds to nearest, ties to even; a NaN stays one.
__device__ __forceinline__ u16 float_to_bf16(float f) {
    u32 bits = __float_as_uint(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40);
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Two at a time: the first in the low half.
__device__ __forceinline__ u32 two_bf16(float one, float two) {
#if __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(two), "f"(one));
    return both;
#else
    return (u32)float_to_bf16(one) | (u32)float_to_bf16(two) << 16;
#endif
}

__device__ __forceinline__ u16 read16(const u8 *p) { return (u16)p[0] | (u16)p[1] << 8; }
__device__ __forceinline__ float read_half(const u8 *p) { return half_to_float(read16(p)); }
__device__ __forceinline__ u32 read32(const u8 *p) { return (u32)read16(p) | (u32)read16(p + 2) << 16; }

__device__ const i8 IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
__device__ const i8 MXFP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The scale of an MXFP4 block, halved, since its levels are doubled.
__device__ __forceinline__ float mxfp4_scale(u8 e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (u32)(e - 1) << 23);
}

// Scale and minimum of group `g` of a Q4_K or Q5_K block, six bits each.
__device__ __forceinline__ void k_scale_min(const u8 *scales, int g, int *scale, int *minimum) {
    if (g < 4) {
        *scale = scales[g] & 63;
        *minimum = scales[g + 4] & 63;
    } else {
        *scale = (scales[g + 4] & 15) | (scales[g - 4] >> 6) << 4;
        *minimum = (scales[g + 4] >> 4) | (scales[g] >> 6) << 4;
    }
}

__device__ __forceinline__ int q3_k_scale(const u8 *scales, int g) {
    int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    int high = (scales[8 + g % 4] >> (2 * (g / 4))) & 3;
    return (low | high << 4) - 32;
}

// Element `i` of a row that starts at `row`.
__device__ __forceinline__ float row_element(u32 type, const u8 *row, i64 i) {
    switch (type) {
    case F32: return ((const float *)row)[i];
    case F16: return half_to_float(((const u16 *)row)[i]);
    case BF16: return bf16_to_float(((const u16 *)row)[i]);
    case I32: return (float)((const int *)row)[i];
    case Q4_0: {
        const u8 *b = row + i / 32 * 18;
        int l = i % 32, q = b[2 + l % 16];
        return ((l < 16 ? q & 15 : q >> 4) - 8) * read_half(b);
    }
    case Q4_1: {
        const u8 *b = row + i / 32 * 20;
        int l = i % 32, q = b[4 + l % 16];
        return (l < 16 ? q & 15 : q >> 4) * read_half(b) + read_half(b + 2);
    }
    case Q5_0: {
        const u8 *b = row + i / 32 * 22;
        int l = i % 32, q = b[6 + l % 16];
        int high = (read32(b + 2) >> l) & 1;
        return (((l < 16 ? q & 15 : q >> 4) | high << 4) - 16) * read_half(b);
    }
    case Q5_1: {
        const u8 *b = row + i / 32 * 24;
        int l = i % 32, q = b[8 + l % 16];
        int high = (read32(b + 4) >> l) & 1;
        return ((l < 16 ? q & 15 : q >> 4) | high << 4) * read_half(b) + read_half(b + 2);
    }
    case Q8_0: {
        const u8 *b = row + i / 32 * 34;
        return ((const i8 *)b)[2 + i % 32] * read_half(b);
    }
    case Q2_K: {
        const u8 *b = row + i / 256 * 84;
        int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32;
        int sc = b[8 * n + 2 * j + l / 16];
        int q = (b[16 + 32 * n + l] >> (2 * j)) & 3;
        return read_half(b + 80) * (sc & 15) * q - read_half(b + 82) * (sc >> 4);
    }
    case Q3_K: {
        const u8 *b = row + i / 256 * 110;
        int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32;
        int q = ((b[32 + 32 * n + l] >> (2 * j)) & 3) - ((b[l] >> (4 * n + j)) & 1 ? 0 : 4);
        return read_half(b + 108) * q3_k_scale(b + 96, 8 * n + 2 * j + l / 16) * q;
    }
    case Q4_K: {
        const u8 *b = row + i / 256 * 144;
        int e = i % 256, c = e / 64, l = e % 64, scale, minimum;
        k_scale_min(b + 4, 2 * c + l / 32, &scale, &minimum);
        int q = b[16 + 32 * c + l % 32];
        q = l < 32 ? q & 15 : q >> 4;
        return read_half(b) * scale * q - read_half(b + 2) * minimum;
    }
    case Q5_K: {
        const u8 *b = row + i / 256 * 176;
        int e = i % 256, c = e / 64, l = e % 64, g = 2 * c + l / 32, scale, minimum;
        k_scale_min(b + 4, g, &scale, &minimum);
        int q = b[48 + 32 * c + l % 32];
        q = (l < 32 ? q & 15 : q >> 4) | ((b[16 + l % 32] >> g) & 1) << 4;
        return read_half(b) * scale * q - read_half(b + 2) * minimum;
    }
    case Q6_K: {
        const u8 *b = row + i / 256 * 210;
        int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32;
        int low = b[64 * n + l + 32 * (j & 1)];
        low = j < 2 ? low & 15 : low >> 4;
        int q = (low | ((b[128 + 32 * n + l] >> (2 * j)) & 3) << 4) - 32;
        return read_half(b + 208) * ((const i8 *)b)[192 + 8 * n + 2 * j + l / 16] * q;
    }
    case IQ4_NL: {
        const u8 *b = row + i / 32 * 18;
        int l = i % 32, q = b[2 + l % 16];
        return IQ4_LEVELS[l < 16 ? q & 15 : q >> 4] * read_half(b);
    }
    case IQ4_XS: {
        const u8 *b = row + i / 256 * 136;
        int e = i % 256, g = e / 32, l = e % 32;
        int scale = ((b[4 + g / 2] >> (4 * (g % 2))) & 15) | ((read16(b + 2) >> (2 * g)) & 3) << 4;
        int q = b[8 + 16 * g + l % 16];
        return read_half(b) * (scale - 32) * IQ4_LEVELS[l < 16 ? q & 15 : q >> 4];
    }
    case MXFP4: {
        const u8 *b = row + i / 32 * 17;
        int l = i % 32, q = b[1 + l % 16];
        return mxfp4_scale(b[0]) * MXFP4_LEVELS[l < 16 ? q & 15 : q >> 4];
    }
    }
    return 0.0f;
}

// The byte address of the row `[i0, i1, i2]`.
__device__ __forceinline__ u8 *row_at(const Tensor &t, i64 i0, i64 i1, i64 i2) {
    return (u8 *)t.address + i0 * t.s[0] + i1 * t.s[1] + i2 * t.s[2];
}

// Any element of a plain (not quantized) tensor, with any strides.
__device__ __forceinline__ float element(const Tensor &t, i64 i0, i64 i1, i64 i2, i64 i3) {
    const u8 *p = row_at(t, i0, i1, i2) + i3 * t.s[3];
    switch (t.type) {
    case F32: return *(const float *)p;
    case F16: return half_to_float(*(const u16 *)p);
    case BF16: return bf16_to_float(*(const u16 *)p);
    case I32: return (float)*(const int *)p;
    }
    return 0.0f;
}

// Any element of any tensor: quantized ones have dense rows.
__device__ __forceinline__ float any_element(const Tensor &t, i64 i0, i64 i1, i64 i2, i64 i3) {
    if (t.type == F32 || t.type == F16 || t.type == BF16 || t.type == I32) return element(t, i0, i1, i2, i3);
    return row_element(t.type, row_at(t, i0, i1, i2), i3);
}

// Writes an element of a plain tensor.
__device__ __forceinline__ void put(const Tensor &t, i64 i0, i64 i1, i64 i2, i64 i3, float v) {
    u8 *p = row_at(t, i0, i1, i2) + i3 * t.s[3];
    switch (t.type) {
    case F32: *(float *)p = v; break;
    case F16: *(u16 *)p = float_to_half(v); break;
    case BF16: *(u16 *)p = float_to_bf16(v); break;
    case I32: *(int *)p = (int)v; break;
    }
}

__device__ __forceinline__ i64 count(const Tensor &t) { return t.d[0] * t.d[1] * t.d[2] * t.d[3]; }

// The position of element number `n` of a tensor in row-major order.
struct Position { i64 i0, i1, i2, i3; };
__device__ __forceinline__ Position position(const Tensor &t, i64 n) {
    Position p;
    p.i3 = n % t.d[3]; n /= t.d[3];
    p.i2 = n % t.d[2]; n /= t.d[2];
    p.i1 = n % t.d[1];
    p.i0 = n / t.d[1];
    return p;
}

// Lets the next kernel start, which will wait for this one where it must.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same, and waits for the kernel before. What a kernel does ahead of this must not depend on the one before.
// Launches without the attribute pass through.
__device__ __forceinline__ void after_kernel_before() {
    let_next_start();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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

// Sum and maximum over a block of at most 1024 threads; every thread gets the result. `shared` has 32 floats.
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

// Leaves the number of a fault where the host finds it; the first one wins.
__device__ __forceinline__ void report(u64 faults, u32 number) {
    asm volatile("{ .reg .u32 old; atom.sys.global.cas.b32 old, [%0], 0, %1; }" ::"l"(faults), "r"(number) : "memory");
}

// Rotary position embedding.
struct Rope {
    int dims, half_split;
    float base, scale, ext_factor, attn_factor;
    float low, high;   // YaRN's correction range
};

// How far pair number `pair` of a head turns per position, before the position is known.
struct Turn { double step, mix; float magnitude; };

__device__ __forceinline__ Turn turn_of(const Rope &rope, const Tensor &factors, i64 pair) {
    Turn turn;
    double factor = factors.address ? (double)*(const float *)(factors.address + pair * factors.s[3]) : 1.0;
    turn.step = exp2(-2.0 * pair / rope.dims * log2((double)rope.base)) / factor;
    turn.magnitude = rope.attn_factor;
    turn.mix = 0.0;
    if (rope.ext_factor != 0.0f) {
        double ramp = (pair - rope.low) / fmax(0.001, (double)rope.high - rope.low);
        turn.mix = (1.0 - fmin(1.0, fmax(0.0, ramp))) * rope.ext_factor;
        turn.magnitude *= 1.0f + 0.1f * logf(1.0f / rope.scale);
    }
    return turn;
}

__device__ __forceinline__ void angle(const Turn &turn, float scale, int at, float *s, float *c) {
    double turned = at * turn.step, theta = scale * turned;
    theta = theta * (1.0 - turn.mix) + turned * turn.mix;
    theta -= rint(theta * 0.15915494309189533577) * 6.283185307179586477;
    sincosf((float)theta, s, c);
    *s *= turn.magnitude;
    *c *= turn.magnitude;
}
