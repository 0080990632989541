// Normalisation and softmax: one block per row, or per group of channels.

// `mode` is one of NORM_…; `weight` (address 0: none) multiplies the result.
extern "C" __global__ void k_row_norm(Tensor x, Tensor weight, Tensor out, int mode, float eps) {
    __shared__ float shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1], cols = x.d[3];
    float mean = 0.0f;
    if (mode == NORM_MEAN_VARIANCE) {
        float sum = 0.0f;
        for (i64 c = threadIdx.x; c < cols; c += blockDim.x) sum += element(x, i0, i1, i2, c);
        mean = block_sum(sum, shared) / cols;
    }
    float squares = 0.0f;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        float v = element(x, i0, i1, i2, c) - mean;
        squares += v * v;
    }
    squares = block_sum(squares, shared);
    float scale = mode == NORM_L2 ? 1.0f / fmaxf(sqrtf(squares), eps) : 1.0f / sqrtf(squares / cols + eps);
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        float v = (element(x, i0, i1, i2, c) - mean) * scale;
        if (weight.address)
            v *= element(weight, i0 % weight.d[0], i1 % weight.d[1], i2 % weight.d[2], c % weight.d[3]);
        put(out, i0, i1, i2, c, v);
    }
}

// RMS norm of contiguous f32 rows of whole float4s, times a weight: every element is loaded once. A thread keeps at
// most four float4s in registers, so rows have at most 16 × blockDim elements.
extern "C" __global__ void k_rms_norm(u64 x, u64 weight, u64 out, int quads, float eps) {
    __shared__ float shared[32];
    wait_for_previous_kernel();
    const float4 *from = (const float4 *)x + (i64)blockIdx.x * quads;
    const float4 *scales = (const float4 *)weight;
    float4 v[4];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int c = threadIdx.x + i * blockDim.x;
        if (c < quads) {
            v[i] = from[c];
            squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
        }
    }
    float scale = 1.0f / sqrtf(block_sum(squares, shared) / (4 * quads) + eps);
    float4 *to = (float4 *)out + (i64)blockIdx.x * quads;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int c = threadIdx.x + i * blockDim.x;
        if (c < quads) {
            float4 w = scales[c];
            to[c] = make_float4(v[i].x * scale * w.x, v[i].y * scale * w.y, v[i].z * scale * w.z, v[i].w * scale * w.w);
        }
    }
}

extern "C" __global__ void k_group_norm(Tensor x, Tensor out, int groups, float eps) {
    __shared__ float shared[32];
    i64 b = blockIdx.x / groups, group = blockIdx.x % groups, channels = x.d[1] / groups;
    i64 n = channels * x.d[2] * x.d[3], first = group * channels;
    float sum = 0.0f;
    for (i64 e = threadIdx.x; e < n; e += blockDim.x)
        sum += element(x, b, first + e / x.d[3] / x.d[2], e / x.d[3] % x.d[2], e % x.d[3]);
    float mean = block_sum(sum, shared) / n, squares = 0.0f;
    for (i64 e = threadIdx.x; e < n; e += blockDim.x) {
        float v = element(x, b, first + e / x.d[3] / x.d[2], e / x.d[3] % x.d[2], e % x.d[3]) - mean;
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(block_sum(squares, shared) / n + eps);
    for (i64 e = threadIdx.x; e < n; e += blockDim.x) {
        i64 c = first + e / x.d[3] / x.d[2], h = e / x.d[3] % x.d[2], w = e % x.d[3];
        put(out, b, c, h, w, (element(x, b, c, h, w) - mean) * scale);
    }
}

extern "C" __global__ void k_soft_max(Tensor x, Tensor mask, Tensor sinks, Tensor out, float scale) {
    __shared__ float shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1], cols = x.d[3];
    i64 m0 = mask.address ? i0 % mask.d[0] : 0, m1 = mask.address ? i1 % mask.d[1] : 0;
    float sink = sinks.address ? element(sinks, 0, 0, 0, i1) : -INF;
    float highest = sink;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        float v = element(x, i0, i1, i2, c) * scale;
        if (mask.address) v += element(mask, m0, m1, i2, c);
        highest = fmaxf(highest, v);
    }
    highest = block_max(highest, shared);
    if (highest == -INF) {   // the whole row is masked
        for (i64 c = threadIdx.x; c < cols; c += blockDim.x) put(out, i0, i1, i2, c, 0.0f);
        return;
    }
    float sum = 0.0f;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        float v = element(x, i0, i1, i2, c) * scale;
        if (mask.address) v += element(mask, m0, m1, i2, c);
        sum += expf(v - highest);
    }
    sum = block_sum(sum, shared);
    if (sinks.address) sum += expf(sink - highest);
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        float v = element(x, i0, i1, i2, c) * scale;
        if (mask.address) v += element(mask, m0, m1, i2, c);
        put(out, i0, i1, i2, c, expf(v - highest) / sum);
    }
}
