// Mixtures of experts: routing, biases and the weighted sum of the experts' results.

// The index in a key of `ranked`.
__device__ __forceinline__ u32 index_of(u64 key) { return ~(u32)key; }

// The largest key of a warp.
__device__ __forceinline__ u64 warp_max_u64(u64 v) {
#if __CUDA_ARCH__ >= 800
    u32 high = __reduce_max_sync(FULL, (u32)(v >> 32));
    u32 low = __reduce_max_sync(FULL, (u32)(v >> 32) == high ? (u32)v : 0);
    return (u64)high << 32 | low;
#else
    for (int o = 16; o > 0; o >>= 1) v = max(v, __shfl_xor_sync(FULL, v, o));
    return v;
#endif
}

// The weights of a token's experts from their probabilities; each lane has those of every 32nd slot in `weights`.
__device__ __forceinline__ void finish_weights(float *weights, int used, int softmax, int normalize, float scale) {
    int lane = threadIdx.x % WARP;
    if (softmax) {
        float largest = -INF, sum = 0.0f;
        for (int u = lane; u < used; u += WARP) largest = fmaxf(largest, weights[u]);
        largest = warp_max(largest);
        for (int u = lane; u < used; u += WARP) sum += weights[u] = expf(weights[u] - largest);
        sum = warp_sum(sum);
        for (int u = lane; u < used; u += WARP) weights[u] /= sum;
    }
    if (normalize) {
        float sum = 0.0f;
        for (int u = lane; u < used; u += WARP) sum += weights[u];
        sum = fmaxf(warp_sum(sum), MIN_WEIGHT_SUM);
        for (int u = lane; u < used; u += WARP) weights[u] /= sum;
    }
    for (int u = lane; u < used; u += WARP) weights[u] *= scale;
}

// Softmax of a token's logits, or the sigmoid of each, in place; a lane has every 32nd.
__device__ __forceinline__ void activate(int activation, float *values, int count) {
    int lane = threadIdx.x % WARP;
    if (activation == ROUTE_SIGMOID)
        for (int c = lane; c < count; c += WARP) values[c] = 1.0f / (1.0f + expf(-values[c]));
    if (activation != ROUTE_SOFTMAX) return;
    float largest = -INF, sum = 0.0f;
    for (int c = lane; c < count; c += WARP) largest = fmaxf(largest, values[c]);
    largest = warp_max(largest);
    for (int c = lane; c < count; c += WARP) sum += values[c] = expf(values[c] - largest);
    sum = warp_sum(sum);
    for (int c = lane; c < count; c += WARP) values[c] /= sum;
}

// A lane's best key among its share of `scores`; 0 if it has none left.
__device__ __forceinline__ u64 best_of_lane(const float *scores, const u8 *taken, int count) {
    u64 best = 0;
    for (int c = threadIdx.x % WARP; c < count; c += WARP)
        if (!taken[c]) best = max(best, ranked(scores[c], c));
    return best;
}

// The largest score that is not taken, which is then: all lanes get its key. `best` is the lane's own best.
__device__ __forceinline__ u64 take_best(const float *scores, u8 *taken, int count, u64 &best) {
    u64 key = warp_max_u64(best);
    if (best == key && key) {
        taken[index_of(key)] = 1;
        best = best_of_lane(scores, taken, count);
    }
    return key;
}

// Marks the experts of all but the best groups as taken. The score of a group is its largest, or the sum of its two largest.
__device__ __forceinline__ void keep_best_groups(const RouteWork &w, const float *scores, u8 *taken, float *of_group,
                                                 u8 *kept) {
    int lane = threadIdx.x % WARP, size = w.experts / w.groups;
    for (int g = lane; g < w.groups; g += WARP) {
        u64 first = 0, second = 0;
        for (int c = 0; c < size; c++) {
            u64 key = ranked(scores[g * size + c], c);
            second = max(second, min(first, key));
            first = max(first, key);
        }
        bool adds_second = second && w.group_scores > 1;
        of_group[g] = scores[g * size + index_of(first)] + (adds_second ? scores[g * size + index_of(second)] : 0.0f);
        kept[g] = 0;
    }
    __syncwarp();
    u64 best = best_of_lane(of_group, kept, w.groups);
    for (int i = 0; i < w.groups_used; i++) take_best(of_group, kept, w.groups, best);
    __syncwarp();
    for (int c = lane; c < w.experts; c += WARP) taken[c] = !kept[c / size];
    __syncwarp();
}

// A token's probabilities, its experts and their weights, by one warp. Shared memory: probabilities, scores (where there is
// a bias), weights, scores of groups, then bytes that mark what is taken.
__device__ __forceinline__ void route_token(const RouteWork &w, i64 token, float *memory) {
    int lane = threadIdx.x % WARP;
    const float *logits = (const float *)row_at(w.logits, 0, 0, token);
    if (routes_in_registers(w)) {
        write_routed(w, token, route_in_registers(w, logits));
        return;
    }
    float *values = memory, *scores = w.bias ? memory + w.experts : memory;
    float *weights = scores + w.experts, *of_group = weights + w.used;
    u8 *taken = (u8 *)(of_group + w.groups), *kept = taken + w.experts;
    for (int c = lane; c < w.experts; c += WARP) {
        values[c] = __ldcg(logits + c);
        taken[c] = 0;
    }
    activate(w.activation, values, w.experts);
    if (w.bias)
        for (int c = lane; c < w.experts; c += WARP) scores[c] = values[c] + ((const float *)w.bias)[c];
    __syncwarp();
    if (w.groups > 1) keep_best_groups(w, scores, taken, of_group, kept);
    u64 best = best_of_lane(scores, taken, w.experts);
    for (int u = 0; u < w.used; u++) {
        u32 expert = index_of(take_best(scores, taken, w.experts, best));
        if (lane == u % WARP) {
            ((int *)w.ids)[token * w.used + u] = (int)expert;
            weights[u] = values[expert];
        }
    }
    if (!w.weights) return;
    finish_weights(weights, w.used, w.softmax, w.normalize, w.scale);
    for (int u = lane; u < w.used; u += WARP) ((float *)w.weights)[token * w.used + u] = weights[u];
}

// A warp per token.
extern "C" __global__ void k_route(const __grid_constant__ RouteWork w) {
    extern __shared__ float memory[];
    wait_for_previous_kernel();
    route_token(w, blockIdx.x, memory);
}

// The router of one token: RMS norm of its row, and the logits of all experts.
struct RouterWork {
    RouteWork route;         // from the logits that this kernel writes
    Tensor router;           // [e, k]: f32, f16 or bf16
    u64 x;                   // f32 [k]: the row before the norm
    u64 norm;                // f32 [k]: the norm's weight
    u64 normed;              // f32 [k]: the row after the norm, which the experts read
    u64 bias;                // f32 [e], added to the logits; 0: none
    u64 counter;             // finished blocks, the last of which routes; 0: another kernel routes
    float eps;
};

#define ROUTER_THREADS 128
// float4s of the router's row and of the norm's weight that a thread loads before the previous kernel is complete.
#define ROUTER_AHEAD 4

// Norm, logits and perhaps routing in one launch: a block per expert, the last of which routes. The norm's scale is a factor
// on the logit. The first block writes the normalised row.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) k_router(const __grid_constant__ RouterWork w) {
    extern __shared__ float memory[];
    __shared__ float2 partial[ROUTER_THREADS / WARP];
    __shared__ bool is_last;
    int quads = (int)(w.router.d[3] / 4), thread = threadIdx.x;
    const u8 *weights = row_at(w.router, 0, 0, blockIdx.x);
    const float4 *x = (const float4 *)w.x, *norm = (const float4 *)w.norm, zero = {0.0f, 0.0f, 0.0f, 0.0f};
    auto four = [&](int i) {
        if (w.router.type == F32) return __ldcs((const float4 *)weights + i);
        uint2 pairs = __ldcs((const uint2 *)weights + i);
        u16 h[4] = {(u16)pairs.x, (u16)(pairs.x >> 16), (u16)pairs.y, (u16)(pairs.y >> 16)};
        if (w.router.type == F16)
            return make_float4(half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3]));
        return make_float4(bf16_to_float(h[0]), bf16_to_float(h[1]), bf16_to_float(h[2]), bf16_to_float(h[3]));
    };
    float dot = 0.0f, squares = 0.0f;
    auto add = [&](float4 v, float4 r, float4 g) {
        dot += v.x * g.x * r.x + v.y * g.y * r.y + v.z * g.z * r.z + v.w * g.w * r.w;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    };
    float4 r[ROUTER_AHEAD], g[ROUTER_AHEAD], v[ROUTER_AHEAD];
#pragma unroll
    for (int j = 0; j < ROUTER_AHEAD; j++) {
        int i = j * ROUTER_THREADS + thread;
        r[j] = i < quads ? four(i) : zero;
        g[j] = i < quads ? norm[i] : zero;
    }
    wait_for_previous_kernel();
#pragma unroll
    for (int j = 0; j < ROUTER_AHEAD; j++) {
        int i = j * ROUTER_THREADS + thread;
        v[j] = i < quads ? x[i] : zero;
    }
#pragma unroll
    for (int j = 0; j < ROUTER_AHEAD; j++) add(v[j], r[j], g[j]);
    for (int i = ROUTER_AHEAD * ROUTER_THREADS + thread; i < quads; i += ROUTER_THREADS) add(x[i], four(i), norm[i]);
    dot = warp_sum(dot);
    squares = warp_sum(squares);
    if (thread % WARP == 0) partial[thread / WARP] = make_float2(dot, squares);
    __syncthreads();
    dot = squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUTER_THREADS / WARP; i++) {
        dot += partial[i].x;
        squares += partial[i].y;
    }
    float scale = 1.0f / sqrtf(squares / (4 * quads) + w.eps);
    if (thread == 0) {
        float logit = dot * scale + (w.bias ? ((const float *)w.bias)[blockIdx.x] : 0.0f);
        *(float *)(w.route.logits.address + 4 * blockIdx.x) = logit;
        if (w.counter) {
            __threadfence();
            is_last = atomicAdd((u32 *)w.counter, 1) == gridDim.x - 1;
        }
    }
    if (blockIdx.x == 0) {
        float4 *to = (float4 *)w.normed;
        auto put4 = [&](int i, float4 v, float4 g) {
            to[i] = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
        };
#pragma unroll
        for (int j = 0; j < ROUTER_AHEAD; j++)
            if (j * ROUTER_THREADS + thread < quads) put4(j * ROUTER_THREADS + thread, v[j], g[j]);
        for (int i = ROUTER_AHEAD * ROUTER_THREADS + thread; i < quads; i += ROUTER_THREADS) put4(i, x[i], norm[i]);
    }
    if (!w.counter) return;
    __syncthreads();
    if (!is_last || thread >= WARP) return;
    __threadfence();
    if (thread == 0) *(u32 *)w.counter = 0;
    route_token(w.route, 0, memory);
}

// The weights of experts that another node has selected: a warp per token.
extern "C" __global__ void k_expert_weights(Tensor probabilities, Tensor ids, u64 out, int softmax, int normalize,
                                            float scale, u64 fault_word, u32 fault) {
    wait_for_previous_kernel();
    i64 token = blockIdx.x, used = ids.d[3];
    const float *row = (const float *)row_at(probabilities, 0, 0, token);
    const int *of_token = (const int *)row_at(ids, 0, 0, token);
    float *weights = (float *)out + token * used;
    for (int u = threadIdx.x; u < used; u += WARP) {
        int expert = of_token[u];
        bool exists = expert >= 0 && expert < probabilities.d[3];
        if (!exists) report(fault_word, fault);
        weights[u] = exists ? row[expert] : 0.0f;
    }
    finish_weights(weights, (int)used, softmax, normalize, scale);
}

// Adds to each row the bias of its expert: a block per row.
extern "C" __global__ void k_add_id(Tensor x, Tensor biases, Tensor ids, Tensor out, u64 fault_word, u32 fault) {
    wait_for_previous_kernel();
    i64 u = blockIdx.x % x.d[2], t = blockIdx.x / x.d[2];
    int expert = ((const int *)row_at(ids, 0, 0, t))[u];
    if (expert < -1 || expert >= biases.d[2]) {
        if (threadIdx.x == 0) report(fault_word, fault);
        return;
    }
    const float *row = (const float *)row_at(x, 0, t, u), *bias = (const float *)row_at(biases, 0, 0, max(expert, 0));
    float *to = (float *)row_at(out, 0, t, u);
    // −1 is an expert that is elsewhere.
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) to[c] = expert < 0 ? row[c] : row[c] + bias[c];
}

// The weighted sum over the experts of a token: blocks over tokens and columns.
extern "C" __global__ void k_sum_experts(Tensor x, Tensor weights, u64 out) {
    wait_for_previous_kernel();
    i64 t = blockIdx.x, c = (i64)blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= x.d[3]) return;
    const float *of_token = (const float *)row_at(weights, 0, 0, t);
    float sum = 0.0f;
    for (i64 u = 0; u < x.d[2]; u++) sum += of_token[u] * ((const float *)row_at(x, 0, t, u))[c];
    ((float *)out)[t * x.d[3] + c] = sum;
}
