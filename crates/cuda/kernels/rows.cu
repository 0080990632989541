// Copies, casts, and rows picked or replaced by index.

// Quantizing, step by step as the host does it (graph/src/blocks/fit.rs), so that both give the same blocks. Nothing here
// may be fused or reordered. Scales stay f16 from where they are rounded: turned into f32 and back before they are
// written byte by byte, the compiler (CUDA 13.0) loses the low byte.

#define MOST 3.402823466e38f

__device__ __forceinline__ float finite(float x) { return x != x ? 0.0f : fminf(MOST, fmaxf(-MOST, x)); }

// The bits of a number as an f16 that is finite.
__device__ __forceinline__ u16 finite_half(float x) {
    return float_to_half(x != x ? 0.0f : fminf(65504.0f, fmaxf(-65504.0f, x)));
}

__device__ __forceinline__ float inverse_of(float step) { return step == 0.0f ? 0.0f : 1.0f / step; }

// A whole number from 0 to `highest`: what is too large, too small or no number becomes one, too.
__device__ __forceinline__ u32 whole(float x, float highest) { return (u32)fminf(highest, fmaxf(0.0f, x)); }

// The quant of a value with `value ≈ scale · (quant − offset)`.
__device__ __forceinline__ u32 centred(float x, float inverse, float offset) {
    return whole(x * inverse + (offset + 0.5f), 2.0f * offset - 1.0f);
}

// The scale, as f16, for quants from 0 to `2 · offset − 1`.
__device__ u16 fit_centred(const float *v, float offset) {
    float extreme = 0.0f;
    u16 best = 0;
    for (int i = 0; i < 32; i++) if (fabsf(v[i]) > fabsf(extreme)) extreme = v[i];
    double least = INF;
#pragma unroll 1
    for (int reaches = 0; reaches < 3; reaches++) {
        u16 half = finite_half(extreme / (0.5f * reaches - offset));
#pragma unroll 1
        for (int round = 0; round <= 2; round++) {
            float scale = half_to_float(half), inverse = inverse_of(scale);
            double error = 0.0, product = 0.0, square = 0.0;
            for (int i = 0; i < 32; i++) {
                double x = v[i], quant = (double)centred(v[i], inverse, offset) - (double)offset;
                double miss = x - (double)scale * quant;
                error += miss * miss;
                product += x * quant;
                square += quant * quant;
            }
            if (error < least) {
                least = error;
                best = half;
            }
            if (square == 0.0) break;
            half = finite_half((float)(product / square));
        }
    }
    return best;
}

// The quant of a value with `value ≈ scale · quant + minimum`.
__device__ __forceinline__ u32 from_minimum(float x, float inverse, float minimum, float highest) {
    return whole((x - minimum) * inverse + 0.5f, highest);
}

// Scale and minimum, as f16, for quants from 0 to `highest`.
__device__ ushort2 fit_from_minimum(const float *v, float highest) {
    float lowest = MOST, largest = -MOST;
    for (int i = 0; i < 32; i++) {
        lowest = fminf(lowest, v[i]);
        largest = fmaxf(largest, v[i]);
    }
    ushort2 best = {0, 0}, halves = {finite_half(largest / highest - lowest / highest), finite_half(lowest)};
    double least = INF;
#pragma unroll 1
    for (int round = 0; round <= 2; round++) {
        float scale = half_to_float(halves.x), minimum = half_to_float(halves.y), inverse = inverse_of(scale);
        double error = 0.0, sum_x = 0.0, sum_quant = 0.0, product = 0.0, square = 0.0;
        for (int i = 0; i < 32; i++) {
            double x = v[i], quant = (double)from_minimum(v[i], inverse, minimum, highest);
            double miss = x - ((double)scale * quant + (double)minimum);
            error += miss * miss;
            sum_x += x;
            sum_quant += quant;
            product += x * quant;
            square += quant * quant;
        }
        if (error < least) {
            least = error;
            best = halves;
        }
        double spread = 32.0 * square - sum_quant * sum_quant;
        if (spread == 0.0) break;
        double slope = (32.0 * product - sum_x * sum_quant) / spread;
        halves.x = finite_half((float)slope);
        halves.y = finite_half((float)((sum_x - slope * sum_quant) / 32.0));
    }
    return best;
}

__device__ __forceinline__ void write16(u8 *to, u32 v) {
    to[0] = (u8)v;
    to[1] = (u8)(v >> 8);
}

__device__ __forceinline__ int block_bytes(u32 type) {
    return type == Q4_0 ? 18 : type == Q4_1 ? 20 : type == Q5_0 ? 22 : type == Q5_1 ? 24 : 34;
}

// Quantizes 32 values to a block.
__device__ void quantize_block(u32 type, float *v, u8 *block) {
    for (int i = 0; i < 32; i++) v[i] = finite(v[i]);
    if (type == Q8_0) {
        float most = 0.0f;
        for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(v[i]));
        u16 scale = finite_half(most / 127.0f);
        float inverse = inverse_of(half_to_float(scale));
        write16(block, scale);
        for (int i = 0; i < 32; i++) {
            float steps = fminf(127.0f, fmaxf(-127.0f, v[i] * inverse));
            ((i8 *)block)[2 + i] = (i8)(steps + copysignf(0.5f, steps));
        }
        return;
    }
    bool is_centred = type == Q4_0 || type == Q5_0, five = type == Q5_0 || type == Q5_1;
    float offset = five ? 16.0f : 8.0f, highest = five ? 31.0f : 15.0f;
    ushort2 fit = {0, 0};
    if (is_centred) fit.x = fit_centred(v, offset);
    else fit = fit_from_minimum(v, highest);
    float inverse = inverse_of(half_to_float(fit.x)), minimum = half_to_float(fit.y);
    write16(block, fit.x);
    if (!is_centred) write16(block + 2, fit.y);
    block += is_centred ? 2 : 4;
    u32 fifth = 0;
    u8 *low = block + (five ? 4 : 0);
    for (int i = 0; i < 16; i++) low[i] = 0;
    for (int i = 0; i < 32; i++) {
        u32 quant = is_centred ? centred(v[i], inverse, offset) : from_minimum(v[i], inverse, minimum, highest);
        low[i % 16] |= (u8)((quant & 15) << (i < 16 ? 0 : 4));
        fifth |= (quant >> 4 & 1) << i;
    }
    if (five) {
        write16(block, fifth & 0xffff);
        write16(block + 2, fifth >> 16);
    }
}

// `out` in row-major order takes the elements of `x` in row-major order; shapes may differ.
extern "C" __global__ void k_copy(Tensor x, Tensor out) {
    FOR_EACH(n, count(out)) {
        Position to = position(out, n), from = position(x, n);
        if (x.type == I32 && out.type == I32) {
            *(int *)(row_at(out, to.i0, to.i1, to.i2) + to.i3 * out.s[3]) =
                *(const int *)(row_at(x, from.i0, from.i1, from.i2) + from.i3 * x.s[3]);
        } else {
            put(out, to.i0, to.i1, to.i2, to.i3, any_element(x, from.i0, from.i1, from.i2, from.i3));
        }
    }
}

// The same into blocks of 32, a thread per block; rows of both sides have the same length.
extern "C" __global__ void k_copy_quantized(Tensor x, Tensor out) {
    i64 blocks = out.d[3] / 32;
    FOR_EACH(n, out.d[0] * out.d[1] * out.d[2] * blocks) {
        i64 b = n % blocks, r = n / blocks;
        i64 t2 = r % out.d[2], t1 = r / out.d[2] % out.d[1], t0 = r / out.d[2] / out.d[1];
        i64 f2 = r % x.d[2], f1 = r / x.d[2] % x.d[1], f0 = r / x.d[2] / x.d[1];
        float v[32];
        for (int i = 0; i < 32; i++) v[i] = any_element(x, f0, f1, f2, b * 32 + i);
        quantize_block(out.type, v, row_at(out, t0, t1, t2) + b * block_bytes(out.type));
    }
}

// Bytes of whole blocks moved between tensors of one quantized type.
extern "C" __global__ void k_copy_blocks(Tensor x, Tensor out, int block_len, int block_bytes) {
    i64 per_row = out.d[3] / block_len * block_bytes;
    FOR_EACH(n, out.d[0] * out.d[1] * out.d[2] * per_row) {
        i64 b = n % per_row, r = n / per_row;
        i64 t2 = r % out.d[2], t1 = r / out.d[2] % out.d[1], t0 = r / out.d[2] / out.d[1];
        i64 f2 = r % x.d[2], f1 = r / x.d[2] % x.d[1], f0 = r / x.d[2] / x.d[1];
        row_at(out, t0, t1, t2)[b] = row_at(x, f0, f1, f2)[b];
    }
}

extern "C" __global__ void k_get_rows(Tensor x, Tensor ids, Tensor out, u64 faults, u32 fault) {
    i64 r = blockIdx.x, t = r % out.d[2], i1 = r / out.d[2] % out.d[1], i0 = r / out.d[2] / out.d[1];
    i64 id = *(const int *)(ids.address + i0 * ids.s[1] + i1 * ids.s[2] + t * ids.s[3]);
    if (id < 0 || id >= x.d[2]) {
        if (threadIdx.x == 0) report(faults, fault);
        return;
    }
    for (i64 c = threadIdx.x; c < out.d[3]; c += blockDim.x) {
        if (x.type == I32)
            ((int *)row_at(out, i0, i1, t))[c] = ((const int *)row_at(x, i0, i1, id))[c];
        else
            ((float *)row_at(out, i0, i1, t))[c] = row_element(x.type, row_at(x, i0, i1, id), c);
    }
}

// Rows of `x` written over rows of `target`; blocks of 32 take a thread each.
extern "C" __global__ void k_set_rows(Tensor target, Tensor x, Tensor ids, u64 faults, u32 fault) {
    i64 r = blockIdx.x, t = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    i64 id = *(const int *)(ids.address + i0 % ids.d[1] * ids.s[1] + i1 % ids.d[2] * ids.s[2] + t * ids.s[3]);
    if (id < 0 || id >= target.d[2]) {
        if (threadIdx.x == 0) report(faults, fault);
        return;
    }
    if (target.type != F32 && target.type != F16 && target.type != BF16 && target.type != I32) {
        for (i64 b = threadIdx.x; b < x.d[3] / 32; b += blockDim.x) {
            float v[32];
            for (int i = 0; i < 32; i++) v[i] = element(x, i0, i1, t, b * 32 + i);
            quantize_block(target.type, v, row_at(target, i0, i1, id) + b * block_bytes(target.type));
        }
    } else {
        for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) put(target, i0, i1, id, c, element(x, i0, i1, t, c));
    }
}

// Contiguous f32 rows over f16 rows, four elements a thread.
extern "C" __global__ void k_set_rows_f16(u64 target, i64 stride, i64 rows, u64 x, u64 ids, int quads, u64 faults,
                                          u32 fault) {
    i64 t = blockIdx.y, id = ((const int *)ids)[t];
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (id < 0 || id >= rows) {
        if (c == 0) report(faults, fault);
        return;
    }
    if (c >= quads) return;
    float4 v = ((const float4 *)x)[t * quads + c];
    uint2 halves;
    halves.x = (u32)float_to_half(v.x) | (u32)float_to_half(v.y) << 16;
    halves.y = (u32)float_to_half(v.z) | (u32)float_to_half(v.w) << 16;
    ((uint2 *)(target + id * stride))[c] = halves;
}

extern "C" __global__ void k_repeat(Tensor x, Tensor out) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        i64 a = i.i0 % x.d[0], b = i.i1 % x.d[1], c = i.i2 % x.d[2], d = i.i3 % x.d[3];
        if (x.type == I32)
            *(int *)(row_at(out, i.i0, i.i1, i.i2) + i.i3 * out.s[3]) = *(const int *)(row_at(x, a, b, c) + d * x.s[3]);
        else
            put(out, i.i0, i.i1, i.i2, i.i3, element(x, a, b, c, d));
    }
}

extern "C" __global__ void k_pad(Tensor x, Tensor out, i64 b0, i64 b1, i64 b2, i64 b3) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        i64 a = i.i0 - b0, b = i.i1 - b1, c = i.i2 - b2, d = i.i3 - b3;
        bool inside = a >= 0 && a < x.d[0] && b >= 0 && b < x.d[1] && c >= 0 && c < x.d[2] && d >= 0 && d < x.d[3];
        put(out, i.i0, i.i1, i.i2, i.i3, inside ? element(x, a, b, c, d) : 0.0f);
    }
}
