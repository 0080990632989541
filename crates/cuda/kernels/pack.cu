// Weights into the packed layout of matmul.cu, and out of it again.

// Blocks of 32 into one of the packed layouts. Q4_0 becomes FOUR, Q4_1 and Q4_K become SHIFTED, Q8_0 becomes EIGHT.
extern "C" __global__ void k_pack(Tensor w, u64 quants, u64 scales, i64 blocks, int form) {
    i64 stride = scale_stride(form, blocks), rows = w.d[0] * w.d[1] * w.d[2];
    FOR_EACH(n, rows * stride) {
        i64 b = n % stride, r = n / stride;
        u16 scale = 0, shift = 0;
        if (b < blocks) {
            const u8 *row = (const u8 *)w.address + r * w.s[2];
            u8 *q = (u8 *)quants + (r * blocks + b) * (form == EIGHT ? 32 : 16);
            if (w.type == Q4_K) {
                const u8 *from = row + b / 8 * 144;
                int g = b % 8, s, m;
                k_scale_min(from + 4, g, &s, &m);
                scale = float_to_half(read_half(from) * s);
                shift = float_to_half(-read_half(from + 2) * m);
                for (int j = 0; j < 16; j++) {
                    int lo = from[16 + 32 * (g / 2) + j], hi = from[16 + 32 * (g / 2) + j + 16];
                    q[j] = g % 2 ? (lo >> 4) | (hi & 0xf0) : (lo & 15) | (hi & 15) << 4;
                }
            } else {
                int head = w.type == Q4_1 ? 4 : 2, body = form == EIGHT ? 32 : 16;
                const u8 *from = row + b * (head + body);
                scale = read16(from);
                if (form == SHIFTED) shift = read16(from + 2);
                for (int j = 0; j < body; j++) q[j] = from[head + j];
            }
        }
        // What pads a row is 0.
        if (form == SHIFTED) ((u32 *)scales)[n] = (u32)scale | (u32)shift << 16;
        else ((u16 *)scales)[n] = scale;
    }
}

__device__ __forceinline__ float packed_element(u64 quants, u64 scales, int form, i64 row, i64 blocks, i64 b, int j) {
    i64 at = row * blocks + b, scale_at = row * scale_stride(form, blocks) + b;
    if (form == EIGHT) return ((const i8 *)quants)[at * 32 + j] * half_to_float(((const u16 *)scales)[scale_at]);
    int q = ((const u8 *)quants)[at * 16 + j % 16];
    q = j < 16 ? q & 15 : q >> 4;
    if (form == FOUR) return (q - 8) * half_to_float(((const u16 *)scales)[scale_at]);
    u32 both = ((const u32 *)scales)[scale_at];
    return q * half_to_float((u16)both) + half_to_float((u16)(both >> 16));
}

// Rows of a packed matrix, picked by index, as f32.
extern "C" __global__ void k_get_rows_packed(Tensor x, u64 quants, u64 scales, int form, Tensor ids, Tensor out,
                                             u64 faults, u32 fault) {
    i64 t = blockIdx.x;
    i64 id = *(const int *)(ids.address + t * ids.s[3]);
    if (id < 0 || id >= x.d[2]) {
        if (threadIdx.x == 0) report(faults, fault);
        return;
    }
    i64 blocks = x.d[3] / 32;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x)
        ((float *)row_at(out, 0, 0, t))[c] = packed_element(quants, scales, form, id, blocks, c / 32, c % 32);
}

// Rows of a packed matrix as bf16: eight elements a thread, a quarter of a block.
extern "C" __global__ void k_unpack_bf16(u64 quants, u64 scales, int form, i64 first_row, i64 rows, i64 blocks,
                                         u64 out) {
    u32 stride = (u32)scale_stride(form, blocks), total = (u32)(rows * blocks * 4);   // far below 2³², as scratch memory is
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < total; n += gridDim.x * blockDim.x) {
        u32 block = n / 4, part = n % 4, row = block / (u32)blocks, b = block - row * (u32)blocks;
        i64 at = first_row * blocks + block, scale_at = (first_row + row) * stride + b;
        float scale, shift = 0.0f, v[8];
        if (form == SHIFTED) {
            u32 both = ((const u32 *)scales)[scale_at];
            scale = half_to_float((u16)both);
            shift = half_to_float((u16)(both >> 16));
        } else {
            scale = half_to_float(((const u16 *)scales)[scale_at]);
        }
        if (form == EIGHT) {
            uint2 q = ((const uint2 *)quants)[at * 4 + part];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = (int)(i8)((i < 4 ? q.x : q.y) >> (8 * (i % 4))) * scale;
        } else {
            uint2 q = ((const uint2 *)quants)[at * 2 + part % 2];
            u32 low = q.x >> (part / 2 * 4) & 0x0f0f0f0f, high = q.y >> (part / 2 * 4) & 0x0f0f0f0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int one = (int)((i < 4 ? low : high) >> (8 * (i % 4)) & 15);
                v[i] = form == FOUR ? (one - 8) * scale : one * scale + shift;
            }
        }
        ((uint4 *)out)[n] = make_uint4(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]), two_bf16(v[6], v[7]));
    }
}

// Contiguous f32 as bf16, eight elements a thread.
extern "C" __global__ void k_to_bf16(u64 x, u64 eights, u64 out) {
    FOR_EACH(n, (i64)eights) {
        float4 a = ((const float4 *)x)[2 * n], b = ((const float4 *)x)[2 * n + 1];
        ((uint4 *)out)[n] = make_uint4(two_bf16(a.x, a.y), two_bf16(a.z, a.w), two_bf16(b.x, b.y), two_bf16(b.z, b.w));
    }
}

// Rows of a matrix in a block format, as the file has it, as bf16: eight elements a thread.
template <int TYPE> __device__ __forceinline__ void blocks_to_bf16(Tensor w, i64 first_row, i64 rows, u64 out) {
    u32 eighths = (u32)(w.d[3] / 8);
    FOR_EACH(n, rows * eighths) {
        const u8 *row = (const u8 *)w.address + (first_row + (u32)n / eighths) * w.s[2];
        u32 c = (u32)n % eighths * 8;
        u32 words[4];
        for (int i = 0; i < 4; i++)
            words[i] = (u32)float_to_bf16(row_element(TYPE, row, c + 2 * i)) |
                       (u32)float_to_bf16(row_element(TYPE, row, c + 2 * i + 1)) << 16;
        ((int4 *)out)[n] = make_int4(words[0], words[1], words[2], words[3]);
    }
}

#define BLOCKS_TO_BF16(name, type) \
    extern "C" __global__ void name(Tensor w, i64 first_row, i64 rows, u64 out) { \
        blocks_to_bf16<type>(w, first_row, rows, out); \
    }
BLOCKS_TO_BF16(k_bf16_from_q4_0, Q4_0)
BLOCKS_TO_BF16(k_bf16_from_q4_1, Q4_1)
BLOCKS_TO_BF16(k_bf16_from_q5_0, Q5_0)
BLOCKS_TO_BF16(k_bf16_from_q5_1, Q5_1)
BLOCKS_TO_BF16(k_bf16_from_q8_0, Q8_0)
BLOCKS_TO_BF16(k_bf16_from_q4_k, Q4_K)
BLOCKS_TO_BF16(k_bf16_from_q5_k, Q5_K)
BLOCKS_TO_BF16(k_bf16_from_q6_k, Q6_K)

// Rows of any tensor as contiguous bf16 (mode 0) or f32 (mode 1).
extern "C" __global__ void k_to_dense(Tensor x, i64 first_row, i64 rows, u64 out, int mode) {
    FOR_EACH(n, rows * x.d[3]) {
        i64 c = n % x.d[3], r = first_row + n / x.d[3];
        i64 i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
        float v = any_element(x, i0, i1, i2, c);
        if (mode == 0) ((u16 *)out)[n] = float_to_bf16(v);
        else ((float *)out)[n] = v;
    }
}

// Rows of `x` as contiguous f16, each divided by a power of two that keeps it inside f16's range: nearly always 1.
extern "C" __global__ void k_to_half_scaled(Tensor x, u64 out, u64 scales) {
    __shared__ float shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    float most = 0.0f;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) most = fmaxf(most, fabsf(element(x, i0, i1, i2, c)));
    most = block_max(most, shared);
    float scale = 1.0f;
    while (most > 16384.0f * scale && scale < 1e30f) scale *= 2.0f;
    if (threadIdx.x == 0) ((float *)scales)[r] = scale;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x)
        ((u16 *)out)[r * x.d[3] + c] = float_to_half(element(x, i0, i1, i2, c) / scale);
}

// Multiplies each row of a result by what its operand was divided by.
extern "C" __global__ void k_scale_rows(u64 out, u64 scales, i64 cols) {
    float scale = ((const float *)scales)[blockIdx.x];
    if (scale == 1.0f) return;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) ((float *)out)[blockIdx.x * cols + c] *= scale;
}
