// Operations that work element by element.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x)));
}

__device__ float unary(int op, float x, float p, float q) {
    switch (op) {
    case 0: return x * x;
    case 1: return sqrtf(x);
    case 2: return logf(x);
    case 3: return expf(x);
    case 4: return sinf(x);
    case 5: return cosf(x);
    case 6: return fabsf(x);
    case 7: return -x;
    case 8: return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f);
    case 9: return x > 0.0f ? 1.0f : 0.0f;
    case 10: return fmaxf(x, 0.0f);
    case 11: return gelu(x);
    case 12: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
    case 13: return x * sigmoid(1.702f * x);
    case 14: return x * sigmoid(x);
    case 15: return sigmoid(x);
    case 16: return tanhf(x);
    case 17: return x > 0.0f ? x : expm1f(x);
    case 18: return x * fminf(1.0f, fmaxf(0.0f, (x + 3.0f) / 6.0f));
    case 19: return fminf(1.0f, fmaxf(0.0f, (x + 3.0f) / 6.0f));
    case 20: return x > 20.0f ? x : log1pf(expf(x));
    case 100: return x * p + q;
    case 101: return fminf(q, fmaxf(p, x));
    }
    return x;
}

extern "C" __global__ void k_unary(Tensor x, Tensor out, int op, float p, float q) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        put(out, i.i0, i.i1, i.i2, i.i3, unary(op, element(x, i.i0, i.i1, i.i2, i.i3), p, q));
    }
}

// `b` is repeated to the shape of `a`.
extern "C" __global__ void k_binary(Tensor a, Tensor b, Tensor out, int op) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float x = element(a, i.i0, i.i1, i.i2, i.i3);
        float y = element(b, i.i0 % b.d[0], i.i1 % b.d[1], i.i2 % b.d[2], i.i3 % b.d[3]);
        float r = op == 0 ? x + y : op == 1 ? x - y : op == 2 ? x * y : x / y;
        put(out, i.i0, i.i1, i.i2, i.i3, r);
    }
}

extern "C" __global__ void k_gated(Tensor gate, Tensor up, Tensor out, int op) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float g = element(gate, i.i0, i.i1, i.i2, i.i3);
        float u = element(up, i.i0, i.i1, i.i2, i.i3);
        float a = op == 0 ? g * sigmoid(g) : op == 1 ? gelu(g) : fmaxf(g, 0.0f);
        put(out, i.i0, i.i1, i.i2, i.i3, a * u);
    }
}

// The same for contiguous f32 of equal shapes, in whole float4s.
__device__ __forceinline__ float combined(int op, float x, float y) {
    return op == 0 ? x + y : op == 1 ? x - y : op == 2 ? x * y : x / y;
}

extern "C" __global__ void k_binary_dense(u64 a, u64 b, u64 out, u64 quads, int op) {
    FOR_EACH(n, (i64)quads) {
        float4 x = ((const float4 *)a)[n], y = ((const float4 *)b)[n];
        ((float4 *)out)[n] =
            make_float4(combined(op, x.x, y.x), combined(op, x.y, y.y), combined(op, x.z, y.z), combined(op, x.w, y.w));
    }
}

__device__ __forceinline__ float gated(int op, float g, float u) {
    return (op == 0 ? g * sigmoid(g) : op == 1 ? gelu(g) : fmaxf(g, 0.0f)) * u;
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

// Ends the context: for tests of what a lost device does.
extern "C" __global__ void k_trap() { asm volatile("trap;"); }

// Up to eight small moves, a block for each: of bytes that come with the launch, or from elsewhere.
struct Moves {
    u64 to[8];
    u64 from[8];   // 0: the bytes are in `data`
    u32 len[8], at[8];
    u8 data[448];
};

extern "C" __global__ void k_move(const __grid_constant__ Moves w) {
    u32 i = blockIdx.x;
    const u8 *from = (const u8 *)w.from[i];
    for (u32 c = threadIdx.x; c < w.len[i]; c += blockDim.x) ((u8 *)w.to[i])[c] = from ? from[c] : w.data[w.at[i] + c];
}
