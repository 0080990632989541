// Activation rows in shared memory, as the GEMV kernels multiply them.

// The two halves of each block are stored apart, so that adjacent lanes read adjacent words and no banks conflict.
struct Row {
    int4 *low, *high;       // 8-bit elements 0..16 and 16..32 of each block
    float2 *scales;         // scale, and scale times the sum of the elements
    float4 *even, *odd;     // f32 elements 0..4 and 4..8 of each eight, where the matrix is f16

    // A row of `cols` elements, quantized or not.
    __device__ __forceinline__ Row(u8 *memory, u32 cols) {
        low = (int4 *)memory;
        high = low + cols / 32;
        scales = (float2 *)(high + cols / 32);
        even = (float4 *)memory;
        odd = even + cols / 8;
    }
};

// Stores four elements of the row: quantized, together with those of seven other lanes, or as f32 for an f16 matrix.
template <int F> __device__ __forceinline__ void store_activations(const Row &row, int i, int quads, float4 v) {
    if (F == MATRIX_F16) {
        if (i < quads) (i % 2 ? row.odd : row.even)[i / 2] = v;
        return;
    }
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int o = 4; o > 0; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, o));
    float step = largest * (1.0f / 127.0f), inverse = step > 0.0f ? __fdividef(127.0f, largest) : 0.0f;
    int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse), c = __float2int_rn(v.z * inverse),
        d = __float2int_rn(v.w * inverse);
    int sum = a + b + c + d;
    if (Matrix<F>::HAS_OFFSET)
        for (int o = 4; o > 0; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
    if (i < quads) {
        int part = i % 8;
        ((u32 *)((part < 4 ? row.low : row.high) + i / 8))[part % 4] =
            (u32)(a & 255) | (u32)(b & 255) << 8 | (u32)(c & 255) << 16 | (u32)d << 24;
        if (part == 0) row.scales[i / 8] = make_float2(step, step * sum);
    }
}
