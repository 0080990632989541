// Weights into the packed layout of matmul.cu, and out of it again.

// What one block of 32 becomes: 4-bit quants with scale and shift. Q4_0, Q4_1 and Q4_K only.
extern "C" __global__ void k_pack4(Tensor w, u64 quants, u64 scales, i64 blocks) {
    FOR_EACH(n, w.d[0] * w.d[1] * w.d[2] * blocks) {
        i64 b = n % blocks, r = n / blocks;
        const u8 *row = (const u8 *)w.address + r * w.s[2];
        u8 *q = (u8 *)quants + n * 16;
        u16 scale, shift;
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
            bool shifted = w.type == Q4_1;
            const u8 *from = row + b * (shifted ? 20 : 18);
            scale = read16(from);
            shift = shifted ? read16(from + 2) : float_to_half(-8.0f * read_half(from));
            for (int j = 0; j < 16; j++) q[j] = from[(shifted ? 4 : 2) + j];
        }
        ((u32 *)scales)[n] = (u32)scale | (u32)shift << 16;
    }
}

// Q8_0.
extern "C" __global__ void k_pack8(Tensor w, u64 quants, u64 scales, i64 blocks) {
    FOR_EACH(n, w.d[0] * w.d[1] * w.d[2] * blocks) {
        const u8 *from = (const u8 *)w.address + n / blocks * w.s[2] + n % blocks * 34;
        ((u16 *)scales)[n] = read16(from);
        for (int j = 0; j < 32; j++) ((u8 *)quants)[n * 32 + j] = from[2 + j];
    }
}

__device__ __forceinline__ float packed_element(u64 quants, u64 scales, int eight, i64 block, int j) {
    if (eight) return ((const i8 *)quants)[block * 32 + j] * half_to_float(((const u16 *)scales)[block]);
    u32 both = ((const u32 *)scales)[block];
    int q = ((const u8 *)quants)[block * 16 + j % 16];
    return (j < 16 ? q & 15 : q >> 4) * half_to_float((u16)both) + half_to_float((u16)(both >> 16));
}

// Rows of a packed matrix, picked by index, as f32.
extern "C" __global__ void k_get_rows_packed(Tensor x, u64 quants, u64 scales, int eight, Tensor ids, Tensor out,
                                             u64 faults, u32 fault) {
    i64 t = blockIdx.x;
    i64 id = *(const int *)(ids.address + t * ids.s[3]);
    if (id < 0 || id >= x.d[2]) {
        if (threadIdx.x == 0) report(faults, fault);
        return;
    }
    i64 blocks = x.d[3] / 32;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x)
        ((float *)row_at(out, 0, 0, t))[c] = packed_element(quants, scales, eight, id * blocks + c / 32, c % 32);
}

// `rows` rows of a packed matrix as bf16: eight elements a thread.
extern "C" __global__ void k_unpack_bf16(u64 quants, u64 scales, int eight, i64 first, i64 blocks_total, u64 out) {
    FOR_EACH(n, blocks_total * 4) {
        i64 block = first + n / 4;
        int part = n % 4;
        u32 words[4];
        for (int i = 0; i < 4; i++) {
            u16 a = float_to_bf16(packed_element(quants, scales, eight, block, part * 8 + 2 * i));
            u16 b = float_to_bf16(packed_element(quants, scales, eight, block, part * 8 + 2 * i + 1));
            words[i] = (u32)a | (u32)b << 16;
        }
        ((int4 *)out)[n] = make_int4(words[0], words[1], words[2], words[3]);
    }
}

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
