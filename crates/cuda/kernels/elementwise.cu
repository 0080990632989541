// Elementwise operations.

__device__ float unary(int op, float x, float p, float q) {
    switch (op) {
    case UNARY_SQR: return x * x;
    case UNARY_SQRT: return sqrtf(x);
    case UNARY_LOG: return logf(x);
    case UNARY_EXP: return expf(x);
    case UNARY_SIN: return sinf(x);
    case UNARY_COS: return cosf(x);
    case UNARY_ABS: return fabsf(x);
    case UNARY_NEG: return -x;
    case UNARY_SIGN: return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f);
    case UNARY_STEP: return x > 0.0f ? 1.0f : 0.0f;
    case UNARY_RELU: return fmaxf(x, 0.0f);
    case UNARY_GELU: return gelu(x);
    case UNARY_GELU_ERF: return 0.5f * x * erfcf(x * -0.70710678118654752440f);   // 1 + erf cancels for negative x
    case UNARY_GELU_QUICK: return x * sigmoid(1.702f * x);
    case UNARY_SILU: return x * sigmoid(x);
    case UNARY_SIGMOID: return sigmoid(x);
    case UNARY_TANH: return tanhf(x);
    case UNARY_ELU: return x > 0.0f ? x : expm1f(x);
    case UNARY_HARD_SWISH: return x * fminf(1.0f, fmaxf(0.0f, (x + 3.0f) / 6.0f));
    case UNARY_HARD_SIGMOID: return fminf(1.0f, fmaxf(0.0f, (x + 3.0f) / 6.0f));
    case UNARY_SOFTPLUS: return x > 20.0f ? x : log1pf(expf(x));
    case UNARY_SCALE: return x * p + q;
    case UNARY_CLAMP: return fminf(q, fmaxf(p, x));
    }
    return x;
}

extern "C" __global__ void k_unary(Tensor x, Tensor out, int op, float p, float q) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        put(out, i.i0, i.i1, i.i2, i.i3, unary(op, element(x, i.i0, i.i1, i.i2, i.i3), p, q));
    }
}

__device__ __forceinline__ float binary(int op, float x, float y) {
    return op == BINARY_ADD ? x + y : op == BINARY_SUB ? x - y : op == BINARY_MUL ? x * y : x / y;
}

// `b` is broadcast to the shape of `a`.
extern "C" __global__ void k_binary(Tensor a, Tensor b, Tensor out, int op) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float x = element(a, i.i0, i.i1, i.i2, i.i3);
        float y = element(b, i.i0 % b.d[0], i.i1 % b.d[1], i.i2 % b.d[2], i.i3 % b.d[3]);
        put(out, i.i0, i.i1, i.i2, i.i3, binary(op, x, y));
    }
}

extern "C" __global__ void k_gated(Tensor gate, Tensor up, Tensor out, int op) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float g = element(gate, i.i0, i.i1, i.i2, i.i3);
        float u = element(up, i.i0, i.i1, i.i2, i.i3);
        put(out, i.i0, i.i1, i.i2, i.i3, gated(op, g, u));
    }
}

// k_binary and k_gated for contiguous f32 tensors of equal shapes, a float4 per thread.
extern "C" __global__ void k_binary_dense(u64 a, u64 b, u64 out, u64 quads, int op) {
    FOR_EACH(n, (i64)quads) {
        float4 x = ((const float4 *)a)[n], y = ((const float4 *)b)[n];
        ((float4 *)out)[n] =
            make_float4(binary(op, x.x, y.x), binary(op, x.y, y.y), binary(op, x.z, y.z), binary(op, x.w, y.w));
    }
}

extern "C" __global__ void k_gated_dense(u64 gate, u64 up, u64 out, u64 quads, int op) {
    FOR_EACH(n, (i64)quads) {
        float4 g = ((const float4 *)gate)[n], u = ((const float4 *)up)[n];
        ((float4 *)out)[n] =
            make_float4(gated(op, g.x, u.x), gated(op, g.y, u.y), gated(op, g.z, u.z), gated(op, g.w, u.w));
    }
}

extern "C" __global__ void k_diag_mask(Tensor x, Tensor out, i64 past, float value) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        put(out, i.i0, i.i1, i.i2, i.i3, i.i3 > past + i.i2 ? value : element(x, i.i0, i.i1, i.i2, i.i3));
    }
}

// Traps, which ends the context: tests lose the device with it.
extern "C" __global__ void k_trap() { asm volatile("trap;"); }

// Up to eight small copies, one block each: from bytes in the kernel's parameters, or from an address.
struct SmallCopies {
    u64 to[8];
    u64 from[8];   // 0: the bytes are in `data`
    u32 len[8], at[8];
    u8 data[448];
};

extern "C" __global__ void k_small_copies(const __grid_constant__ SmallCopies w) {
    u32 i = blockIdx.x;
    const u8 *from = (const u8 *)w.from[i];
    for (u32 c = threadIdx.x; c < w.len[i]; c += blockDim.x) ((u8 *)w.to[i])[c] = from ? from[c] : w.data[w.at[i] + c];
}
