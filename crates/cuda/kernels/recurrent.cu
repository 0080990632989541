// Recurrent layers: causal convolution and the gated delta rule.

// Causal convolution of each channel: a thread per result.
extern "C" __global__ void k_ssm_conv(Tensor x, Tensor kernel, u64 out, i64 total) {
    wait_for_previous_kernel();
    i64 channels = x.d[3], taps = kernel.d[3];
    FOR_EACH(n, total) {
        i64 c = n % channels, t = n / channels;
        const float *weights = (const float *)row_at(kernel, 0, 0, c);
        float sum = 0.0f;
        for (i64 j = 0; j < taps; j++) sum += weights[j] * ((const float *)row_at(x, 0, 0, t + j))[c];
        ((float *)out)[n] = sum;
    }
}

// The gated delta rule. Columns of the state are independent: column j depends on element j of the values alone. A warp
// has eight columns, four lanes each, and keeps them in registers over all tokens; a block has 32 columns of one head.
// Queries, keys and values of the next tokens are loaded while those of the current ones are used.
struct DeltaRule {
    Tensor q, k, v, gates, betas, state;
    u64 out;         // f32: results [t, h, e], then the state [h, d, e]
    float scale;
    int tiled;       // which key head serves value head i of h: i mod g, else i / (h / g)
    int delta;       // whether the state learns the difference to what it yields for the key, else the value
    int reserved;
};

#define COLUMNS 32
#define THREADS 128
// Elements of keys that are loaded at once, and of queries as many.
#define LOADED 1024

// Element `i` of a lane's part of a column is row `16 · (i / 4) + 4 · part + i % 4`: four lanes read 64 adjacent bytes of
// the key.
template <int DEPTH> __device__ __forceinline__ void delta_rule(const DeltaRule &w) {
    const int own = DEPTH / 4, tokens_at_once = LOADED / DEPTH, per_thread = LOADED / THREADS;
    const int values_per_thread = (tokens_at_once * COLUMNS + THREADS - 1) / THREADS;
    __shared__ __align__(16) float keys[LOADED], queries[LOADED], values[tokens_at_once * COLUMNS];
    __shared__ float decays[tokens_at_once], betas[tokens_at_once];
    int lane = threadIdx.x % WARP, part = lane / 8, in_block = threadIdx.x / WARP * 8 + lane % 8;
    i64 head = blockIdx.y, heads = w.v.d[2], depth = w.k.d[3], width = w.v.d[3], tokens = w.v.d[1];
    i64 key_head = w.tiled ? head % w.k.d[2] : head / (heads / w.k.d[2]);
    i64 first_column = (i64)blockIdx.x * COLUMNS, column = first_column + in_block;
    bool exists = column < width;
    wait_for_previous_kernel();

    float state[own];
#pragma unroll
    for (int i = 0; i < own; i++) {
        int row = 16 * (i / 4) + 4 * part + i % 4;
        state[i] = exists && row < depth ? ((const float *)row_at(w.state, 0, head, row))[column] : 0.0f;
    }
    float key[per_thread], query[per_thread], value[values_per_thread], decay = 0.0f, beta = 0.0f;
    auto load = [&](i64 first) {
#pragma unroll
        for (int i = 0; i < per_thread; i++) {
            int n = i * THREADS + threadIdx.x, c = n % DEPTH;
            i64 t = first + n / DEPTH;
            bool inside = t < tokens && c < depth;
            key[i] = inside ? ((const float *)row_at(w.k, 0, t, key_head))[c] : 0.0f;
            query[i] = inside ? ((const float *)row_at(w.q, 0, t, key_head))[c] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < values_per_thread; i++) {
            int n = i * THREADS + threadIdx.x;
            i64 t = first + n / COLUMNS, c = first_column + n % COLUMNS;
            bool inside = n < tokens_at_once * COLUMNS && t < tokens && c < width;
            value[i] = inside ? ((const float *)row_at(w.v, 0, t, head))[c] : 0.0f;
        }
        if (threadIdx.x < tokens_at_once && first + threadIdx.x < tokens) {
            decay = ((const float *)row_at(w.gates, 0, 0, first + threadIdx.x))[head];
            beta = ((const float *)row_at(w.betas, 0, 0, first + threadIdx.x))[head];
        }
    };
    load(0);
    for (i64 first = 0; first < tokens; first += tokens_at_once) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < per_thread; i++) {
            keys[i * THREADS + threadIdx.x] = key[i];
            queries[i * THREADS + threadIdx.x] = query[i];
        }
#pragma unroll
        for (int i = 0; i < values_per_thread; i++) {
            int n = i * THREADS + threadIdx.x;
            if (n < tokens_at_once * COLUMNS) values[n] = value[i];
        }
        if (threadIdx.x < tokens_at_once) {
            decays[threadIdx.x] = expf(decay);
            betas[threadIdx.x] = beta;
        }
        __syncthreads();
        load(first + tokens_at_once);
        int count = (int)min((i64)tokens_at_once, tokens - first);
        for (int t = 0; t < count; t++) {
            const float4 *k = (const float4 *)(keys + t * DEPTH) + part, *q = (const float4 *)(queries + t * DEPTH) + part;
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < own / 4; i++) {
                float4 four = k[4 * i];
                sum[0] += state[4 * i] * four.x;
                sum[1] += state[4 * i + 1] * four.y;
                sum[2] += state[4 * i + 2] * four.z;
                sum[3] += state[4 * i + 3] * four.w;
            }
            float expected = (sum[0] + sum[1]) + (sum[2] + sum[3]), fade = decays[t];
            expected += __shfl_xor_sync(FULL, expected, 8);
            expected += __shfl_xor_sync(FULL, expected, 16);
            float learned = values[t * COLUMNS + in_block] - (w.delta ? fade * expected : 0.0f);
            float change = betas[t] * learned;
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = 0.0f;
#pragma unroll
            for (int i = 0; i < own / 4; i++) {
                float4 four = k[4 * i], by = q[4 * i];
                state[4 * i] = fade * state[4 * i] + four.x * change;
                state[4 * i + 1] = fade * state[4 * i + 1] + four.y * change;
                state[4 * i + 2] = fade * state[4 * i + 2] + four.z * change;
                state[4 * i + 3] = fade * state[4 * i + 3] + four.w * change;
                sum[0] += state[4 * i] * by.x;
                sum[1] += state[4 * i + 1] * by.y;
                sum[2] += state[4 * i + 2] * by.z;
                sum[3] += state[4 * i + 3] * by.w;
            }
            float result = (sum[0] + sum[1]) + (sum[2] + sum[3]);
            result += __shfl_xor_sync(FULL, result, 8);
            result += __shfl_xor_sync(FULL, result, 16);
            if (part == 0 && exists) ((float *)w.out)[((first + t) * heads + head) * width + column] = w.scale * result;
        }
    }
    if (!exists) return;
    float *after = (float *)w.out + (tokens * heads + head * depth) * width + column;
#pragma unroll
    for (int i = 0; i < own; i++) {
        int row = 16 * (i / 4) + 4 * part + i % 4;
        if (row < depth) after[row * width] = state[i];
    }
}

#define DELTA_RULE(depth) \
    extern "C" __global__ void __launch_bounds__(THREADS) k_delta_rule_##depth(const __grid_constant__ DeltaRule w) { \
        delta_rule<depth>(w); \
    }
DELTA_RULE(64) DELTA_RULE(128) DELTA_RULE(256)
