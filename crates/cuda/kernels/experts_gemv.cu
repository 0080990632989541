// Matrices of experts times few tokens: a warp multiplies some rows of an expert's matrix with a token's activations.
//
// The matrices of all experts of a token fit the device at once, so that a grid has all its loads in flight in one wave;
// each warp starts its own before the block quantizes the activations.
//
// Gate and up are multiplied in one launch, with the activation as epilogue. The last matrix is multiplied by all of a
// token's experts in one dot product, each expert's share times its weight: the weighted sum needs no launch of its own.

#define WARPS 8
#define THREADS (WARPS * WARP)
// float4s of the activations that a thread loads at once.
#define BATCH 6

// A block as it is in memory.
template <int F> struct RawBlock {
    int4 quants[F == MATRIX_Q8 ? 2 : 1];
    u32 scale;

    __device__ __forceinline__ void load(u64 from, u64 scales, u64 line, u32 blocks, u32 stride, u32 b) {
        const int4 *at = (const int4 *)from + (line * blocks + b) * (F == MATRIX_Q8 ? 2 : 1);
        quants[0] = __ldcs(at);
        if (F == MATRIX_Q8) quants[F == MATRIX_Q8] = __ldcs(at + 1);
        scale = F == MATRIX_Q4_MIN ? __ldcs((const u32 *)scales + line * stride + b)
                                   : (u32)__ldcs((const u16 *)scales + line * stride + b);
    }
};

// `MATRICES`: 2 for gate and up. `SUMMED`: over a token's experts. A warp multiplies `LINES` rows, of one matrix or half of
// them of each, and a lane has `AHEAD` blocks of each in flight.
template <int F, int MATRICES, bool SUMMED, int LINES, int AHEAD> __device__ __forceinline__ void expert_gemv(const ExpertGemv &w) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ int experts[SUMMED ? 64 : 1];
    __shared__ float factors[SUMMED ? 64 : 1];
    const int rows = LINES / MATRICES;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, token = w.first_token + blockIdx.z, slot = blockIdx.y;
    u32 blocks = w.cols / 32, stride = (u32)scale_stride(F, blocks), first = (blockIdx.x * WARPS + warp) * rows;
    u32 all = SUMMED ? w.used * blocks : blocks, x_rows = SUMMED ? w.x_rows : 1;
    Row row(memory, x_rows * w.cols);
    wait_for_previous_kernel();
    u32 quads = x_rows * w.cols / 4;
    u64 x_row = (u64)token * w.x_rows + (SUMMED || w.x_rows == 1 ? 0 : slot);
    const float4 *x = (const float4 *)w.x + x_row * (w.cols / 4), zero = {0.0f, 0.0f, 0.0f, 0.0f};
    float4 v[BATCH];
    auto load_x = [&](u32 first) {
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            u32 i = first + j * THREADS + threadIdx.x;
            v[j] = i < quads ? x[i] : zero;
        }
    };
    load_x(0);
    int expert = -1;
    if (SUMMED) {
        for (u32 u = threadIdx.x; u < w.used; u += THREADS) {
            experts[u] = expert_of(w, token, u);
            factors[u] = experts[u] < 0 ? 0.0f : ((const float *)(w.weights + token * w.weights_stride))[u];
        }
        __syncthreads();
    } else {
        expert = expert_of(w, token, slot);
        if (expert < 0) {
            if (lane < rows && first + lane < w.rows)
                ((float *)w.out)[((u64)token * w.used + slot) * w.rows + first + lane] = 0.0f;
            return;
        }
    }
    float inverse = 1.0f / blocks;
    // Which of a token's experts, and which block of its row, number `i` is.
    auto slot_of = [&](u32 i) { return (u32)((i + 0.5f) * inverse); };
    RawBlock<F> raw[AHEAD][LINES];
    auto load = [&](u32 i, RawBlock<F> (&to)[LINES]) {
        if (i >= all) return;
        u32 u = SUMMED ? slot_of(i) : 0, b = SUMMED ? i - u * blocks : i;
        if (SUMMED && experts[u] < 0) return;
        u64 base = (u64)(SUMMED ? experts[u] : expert) * w.rows;
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            int m = MATRICES == 2 ? line % 2 : 0;
            u32 r = min(first + (MATRICES == 2 ? line / 2 : line), w.rows - 1);
            to[line].load(w.quants[m], w.scales[m], base + r, blocks, stride, b);
        }
    };
#pragma unroll
    for (int n = 0; n < AHEAD; n++) load(lane + n * WARP, raw[n]);

    // Every warp takes part in every round, because eight lanes quantize a block of 32 together.
    for (u32 first_quad = 0; first_quad < quads; first_quad += BATCH * THREADS) {
        if (first_quad > 0) load_x(first_quad);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (first_quad + j * THREADS < quads)
                store_activations<F>(row, (int)(first_quad + j * THREADS + threadIdx.x), (int)quads, v[j]);
    }
    __syncthreads();

    float acc[LINES];
#pragma unroll
    for (int line = 0; line < LINES; line++) acc[line] = 0.0f;
    for (u32 round = lane; round - lane < all; round += AHEAD * WARP) {
#pragma unroll
        for (int n = 0; n < AHEAD; n++) {
            u32 i = round + n * WARP;
            if (i < all && (!SUMMED || experts[slot_of(i)] >= 0)) {
                u32 u = SUMMED ? slot_of(i) : 0, at = SUMMED && w.x_rows == 1 ? i - u * blocks : i;
                int4 low = row.low[at], high = row.high[at];
                float2 e = row.scales[at];
                float factor = SUMMED ? factors[u] : 1.0f;
#pragma unroll
                for (int line = 0; line < LINES; line++) {
                    float part = 0.0f;
                    Matrix<F>::add_dot(raw[n][line].quants, (const u8 *)&raw[n][line].scale, 0, low, high, e, part);
                    acc[line] += SUMMED ? factor * part : part;
                }
            }
            load(i + AHEAD * WARP, raw[n]);
        }
    }
#pragma unroll
    for (int line = 0; line < LINES; line++) acc[line] = warp_sum(acc[line]);
    // Lane `r` writes row `r`.
#pragma unroll
    for (int r = 0; r < rows; r++) {
        u32 at = first + r;
        if (lane != r || at >= w.rows) continue;
        if (SUMMED) {
            float sum = acc[r];
            if (w.bias[0])
                for (u32 u = 0; u < w.used; u++)
                    if (experts[u] >= 0) sum += factors[u] * ((const float *)w.bias[0])[(u64)experts[u] * w.rows + at];
            u64 to = (u64)token * w.rows + at;
            if (w.add) sum += ((const float *)w.add)[to];
            ((float *)w.out)[to] = sum;
            continue;
        }
        float result[2] = {acc[MATRICES * r], acc[MATRICES * r + MATRICES - 1]};
        for (int m = 0; m < MATRICES; m++)
            if (w.bias[m]) result[m] += ((const float *)w.bias[m])[(u64)expert * w.rows + at];
        u64 to = ((u64)token * w.used + slot) * w.rows + at;
        ((float *)w.out)[to] = MATRICES == 2 ? gated(w.gate, result[0], result[1]) : result[0];
    }
}

#define EXPERT_GEMV(name, format, matrices, summed, lines, ahead) \
    extern "C" __global__ void __launch_bounds__(THREADS, format == MATRIX_Q8 || lines * ahead > 8 && matrices == 1 ? 2 : 3) \
        name(const __grid_constant__ ExpertGemv w) { \
        expert_gemv<format, matrices, summed, lines, ahead>(w); \
    }
#define EXPERT_GEMV_OF_EACH_KIND(name, format) \
    EXPERT_GEMV(k_expert_gemv_##name, format, 1, false, 4, 2) \
    EXPERT_GEMV(k_expert_gemv_##name##_gated, format, 2, false, 4, 2) \
    EXPERT_GEMV(k_expert_gemv_##name##_summed, format, 1, true, 1, 6)
FOR_EACH_PACKED_FORMAT(EXPERT_GEMV_OF_EACH_KIND)
