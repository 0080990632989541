// Packs weights for the GEMV kernels (formats.cuh), and converts rows for cuBLAS.

// Packs the blocks of a matrix; a row's padding scales are 0.
extern "C" __global__ void k_pack(Tensor w, u64 quants, u64 scales, i64 blocks, int format) {
    i64 stride = scale_stride(format, blocks), rows = w.d[0] * w.d[1] * w.d[2];
    FOR_EACH(n, rows * stride) {
        i64 b = n % stride, r = n / stride;
        u16 scale = 0, minimum = 0;
        if (b < blocks) {
            const u8 *row = (const u8 *)w.address + r * w.s[2];
            u8 *to = (u8 *)quants + (r * blocks + b) * packed_quant_bytes(format);
            pack_block(w.type, format, row, b, to, &scale, &minimum);
        }
        store_scale(format, scales, n, scale, minimum);
    }
}

// get_rows of a packed matrix, as f32.
extern "C" __global__ void k_get_rows_packed(Tensor x, u64 quants, u64 scales, int format, Tensor ids, Tensor out,
                                             u64 fault_word, u32 fault) {
    i64 t = blockIdx.x;
    i64 id = *(const int *)(ids.address + t * ids.s[3]);
    if (id < 0 || id >= x.d[2]) {
        if (threadIdx.x == 0) report(fault_word, fault);
        return;
    }
    i64 blocks = x.d[3] / 32;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x)
        ((float *)row_at(out, 0, 0, t))[c] = packed_element(quants, scales, format, id, blocks, c / 32, c % 32);
}

// Rows of a packed matrix as bf16: eight elements, a quarter of a block, per thread.
extern "C" __global__ void k_unpack_bf16(u64 quants, u64 scales, int format, i64 first_row, i64 rows, i64 blocks,
                                         u64 out) {
    // The host converts as many rows at a time as fit into scratch memory, so the total is far below 2³².
    u32 stride = (u32)scale_stride(format, blocks), total = (u32)(rows * blocks * 4);
    for (u32 n = blockIdx.x * blockDim.x + threadIdx.x; n < total; n += gridDim.x * blockDim.x) {
        u32 block = n / 4, part = n % 4, row = block / (u32)blocks, b = block - row * (u32)blocks;
        i64 at = first_row * blocks + block, scale_at = (first_row + row) * stride + b;
        float v[8];
        packed_eight(quants, scales, format, at, scale_at, part, v);
        ((uint4 *)out)[n] = make_uint4(floats_to_bf16x2(v[0], v[1]), floats_to_bf16x2(v[2], v[3]),
                                       floats_to_bf16x2(v[4], v[5]), floats_to_bf16x2(v[6], v[7]));
    }
}

// Contiguous f32 as bf16, eight elements per thread.
extern "C" __global__ void k_f32_to_bf16(u64 x, u64 eights, u64 out) {
    FOR_EACH(n, (i64)eights) {
        float4 a = ((const float4 *)x)[2 * n], b = ((const float4 *)x)[2 * n + 1];
        ((uint4 *)out)[n] = make_uint4(floats_to_bf16x2(a.x, a.y), floats_to_bf16x2(a.z, a.w),
                                       floats_to_bf16x2(b.x, b.y), floats_to_bf16x2(b.z, b.w));
    }
}

// Rows of a matrix in a block format, as in the file, as bf16: eight elements per thread.
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
    extern "C" __global__ void k_##name##_to_bf16(Tensor w, i64 first_row, i64 rows, u64 out) { \
        blocks_to_bf16<type>(w, first_row, rows, out); \
    }
FOR_EACH_TYPE_TO_BF16(BLOCKS_TO_BF16)

// Rows of any tensor as contiguous bf16 or f32; `mode` is one of CONVERT_TO_….
extern "C" __global__ void k_convert_rows(Tensor x, i64 first_row, i64 rows, u64 out, int mode) {
    FOR_EACH(n, rows * x.d[3]) {
        i64 c = n % x.d[3], r = first_row + n / x.d[3];
        i64 i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
        float v = any_element(x, i0, i1, i2, c);
        if (mode == CONVERT_TO_BF16) ((u16 *)out)[n] = float_to_bf16(v);
        else ((float *)out)[n] = v;
    }
}

// Rows of `x` as contiguous f16, each divided by a power of two, nearly always 1, that keeps it in the range of f16.
extern "C" __global__ void k_f32_to_f16_scaled(Tensor x, u64 out, u64 scales) {
    __shared__ float shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    float largest = 0.0f;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) largest = fmaxf(largest, fabsf(element(x, i0, i1, i2, c)));
    largest = block_max(largest, shared);
    float scale = 1.0f;
    while (largest > 16384.0f * scale && scale < 1e30f) scale *= 2.0f;
    if (threadIdx.x == 0) ((float *)scales)[r] = scale;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x)
        ((u16 *)out)[r * x.d[3] + c] = float_to_half(element(x, i0, i1, i2, c) / scale);
}

// Multiplies each row of a result by the scale that k_f32_to_f16_scaled divided the operand by.
extern "C" __global__ void k_scale_rows(u64 out, u64 scales, i64 cols) {
    float scale = ((const float *)scales)[blockIdx.x];
    if (scale == 1.0f) return;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) ((float *)out)[blockIdx.x * cols + c] *= scale;
}
