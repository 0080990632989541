// Tensors as kernels see them, and access to their elements.

// A tensor as the host describes it: address, type, extents and byte strides, outermost dimension first.
struct Tensor {
    u64 address;
    u32 type;
    u32 reserved;
    i64 d[4];
    i64 s[4];
};

// The byte address of the row `[i0, i1, i2]`.
__device__ __forceinline__ u8 *row_at(const Tensor &t, i64 i0, i64 i1, i64 i2) {
    return (u8 *)t.address + i0 * t.s[0] + i1 * t.s[1] + i2 * t.s[2];
}

// An element of a plain (not quantized) tensor with any strides.
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

// An element of any tensor; rows of quantized ones are contiguous.
__device__ __forceinline__ float any_element(const Tensor &t, i64 i0, i64 i1, i64 i2, i64 i3) {
    if (IS_PLAIN(t.type)) return element(t, i0, i1, i2, i3);
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

// The indices of element number `n` of a tensor in row-major order.
struct Position { i64 i0, i1, i2, i3; };
__device__ __forceinline__ Position position(const Tensor &t, i64 n) {
    Position p;
    p.i3 = n % t.d[3]; n /= t.d[3];
    p.i2 = n % t.d[2]; n /= t.d[2];
    p.i1 = n % t.d[1];
    p.i0 = n / t.d[1];
    return p;
}
