// Quantizing, for the kernels that write quantized rows.

// Types that set_rows and casts can write.
__device__ __forceinline__ int quantized_block_bytes(u32 type) {
    return type == Q4_0   ? Q4_0_BYTES
           : type == Q4_1 ? Q4_1_BYTES
           : type == Q5_0 ? Q5_0_BYTES
           : type == Q5_1 ? Q5_1_BYTES
                          : Q8_0_BYTES;
}

// Quantizing follows graph/src/blocks/fit.rs operation by operation, so that host and device produce the same blocks:
// files that use it are compiled without fused multiply-add. Scales stay f16 bits once they are rounded: converted to
// f32 and back before they are stored byte by byte, they lose their low byte in the code of CUDA 13.0's compiler.

#define MAX_FLOAT 3.402823466e38f

__device__ __forceinline__ float finite(float x) { return x != x ? 0.0f : fminf(MAX_FLOAT, fmaxf(-MAX_FLOAT, x)); }

// The nearest finite f16; NaN becomes 0.
__device__ __forceinline__ u16 finite_half(float x) {
    return float_to_half(x != x ? 0.0f : fminf(65504.0f, fmaxf(-65504.0f, x)));
}

__device__ __forceinline__ float inverse_of(float step) { return step == 0.0f ? 0.0f : 1.0f / step; }

// Truncated to an integer and clamped to 0 ..= `highest`; NaN becomes 0.
__device__ __forceinline__ u32 whole(float x, float highest) { return (u32)fminf(highest, fmaxf(0.0f, x)); }

// The quant of a value, where `value ≈ scale · (quant − offset)`.
__device__ __forceinline__ u32 centred(float x, float inverse, float offset) {
    return whole(x * inverse + (offset + 0.5f), 2.0f * offset - 1.0f);
}

// The scale (f16 bits) with the least squared error, for quants of 0 ..= `2 · offset − 1`.
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

// The quant of a value, where `value ≈ scale · quant + minimum`.
__device__ __forceinline__ u32 from_minimum(float x, float inverse, float minimum, float highest) {
    return whole((x - minimum) * inverse + 0.5f, highest);
}

// Scale and minimum (f16 bits) with the least squared error, for quants of 0 ..= `highest`.
__device__ ushort2 fit_from_minimum(const float *v, float highest) {
    float lowest = MAX_FLOAT, largest = -MAX_FLOAT;
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

// Quantizes 32 values to a block of `type`.
__device__ void quantize_block(u32 type, float *v, u8 *block) {
    for (int i = 0; i < 32; i++) v[i] = finite(v[i]);
    if (type == Q8_0) {
        float largest = 0.0f;
        for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(v[i]));
        u16 scale = finite_half(largest / 127.0f);
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
