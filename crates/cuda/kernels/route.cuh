// Routing: which experts a token uses, and their weights. The kernels of experts.cu and experts_decode.cu share it.

struct RouteWork {
    Tensor logits;           // [t, e]
    u64 bias;                // f32 [e], added to the probabilities for the selection only; 0: none
    u64 ids;                 // i32 [t, used]
    u64 weights;             // f32 [t, used]; 0: not wanted
    int activation;          // one of ROUTE_…
    int experts, used, groups, groups_used;
    int group_scores;        // the largest scores of a group that are added: 1 or 2
    int softmax, normalize;  // of the selected probabilities
    float scale;
};

// The least sum by which weights are divided.
#define MIN_WEIGHT_SUM 6.103515625e-5f
// The most experts, per lane of a warp, that are routed in registers.
#define ROUTE_PER_LANE 8

// An expert of a token, and its weight.
struct Routed { int expert; float weight; };

__device__ __forceinline__ u32 warp_max_u32(u32 v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL, v);
#else
    for (int o = 16; o > 0; o >>= 1) v = max(v, __shfl_xor_sync(FULL, v, o));
    return v;
#endif
}

// Whether `route_in_registers` takes so many experts.
__device__ __forceinline__ bool routes_in_registers(const RouteWork &w) {
    // With a bias, scores of softmax are not in the order of the logits.
    bool ordered = !w.bias || w.activation != ROUTE_SOFTMAX;
    return ordered && w.groups <= 1 && w.experts <= ROUTE_PER_LANE * WARP && w.used <= WARP;
}

// The logits of a lane, of at most 32 · N experts: every 32nd. None has the key 0, nor has a lane without a logit another.
template <int N> struct LaneLogits {
    float values[N];

    __device__ __forceinline__ LaneLogits(const RouteWork &w, const float *logits) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            int c = threadIdx.x % WARP + i * WARP;
            values[i] = c < w.experts ? __ldcg(logits + c) : -INF;
        }
    }

    // The experts with the best scores, of equal ones the first: lane `u` returns number `u`, if that is below `count`. Softmax
    // keeps the order of logits.
    __device__ __forceinline__ int select(const RouteWork &w, int count) const {
        int lane = threadIdx.x % WARP, selected = 0;
        u32 keys[N], at[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            int c = at[i] = lane + i * WARP;
            float score = w.activation == ROUTE_SIGMOID ? 1.0f / (1.0f + expf(-values[i])) : values[i];
            if (w.bias && c < w.experts) score += ((const float *)w.bias)[c];
            keys[i] = c < w.experts ? sortable(score, 0) : 0;
        }
        // The lane's own in order: each takes its place among those before it.
#pragma unroll
        for (int i = 1; i < N; i++)
#pragma unroll
            for (int j = i; j > 0; j--)
                if (keys[j] > keys[j - 1]) {
                    u32 key = keys[j], index = at[j];
                    keys[j] = keys[j - 1];
                    at[j] = at[j - 1];
                    keys[j - 1] = key;
                    at[j - 1] = index;
                }
        for (int u = 0; u < count; u++) {
            u32 top = warp_max_u32(keys[0]), owners = __ballot_sync(FULL, keys[0] == top);
            // Several lanes with the best score: the first expert.
            int owner = __ffs(owners) - 1;
            if (owners & (owners - 1)) {
                u32 first = ~warp_max_u32(keys[0] == top ? ~at[0] : 0);
                owner = first % WARP;
            }
            int expert = __shfl_sync(FULL, (int)at[0], owner);
            if (lane == u) selected = expert;
            if (lane == owner) {
#pragma unroll
                for (int i = 0; i + 1 < N; i++) {
                    keys[i] = keys[i + 1];
                    at[i] = at[i + 1];
                }
                keys[N - 1] = 0;
            }
        }
        return selected;
    }

    // The weight of each lane's selected expert.
    __device__ __forceinline__ float weight(const RouteWork &w, const float *logits, int selected) const {
        int lane = threadIdx.x % WARP;
        bool has = lane < w.used;
        float value = has ? __ldcg(logits + selected) : -INF, largest = -INF, sum = 0.0f;
        if (w.activation == ROUTE_SIGMOID) value = 1.0f / (1.0f + expf(-value));
        if (w.activation == ROUTE_SOFTMAX) {
#pragma unroll
            for (int i = 0; i < N; i++) largest = fmaxf(largest, values[i]);
            largest = warp_max(largest);
#pragma unroll
            for (int i = 0; i < N; i++)
                if (lane + i * WARP < w.experts) sum += expf(values[i] - largest);
            value = expf(value - largest) / warp_sum(sum);
        }
        if (w.softmax) {
            // Every lane takes part in the maximum.
            largest = warp_max(has ? value : -INF);
            value = has ? expf(value - largest) : 0.0f;
            value /= warp_sum(value);
        }
        if (w.normalize) value /= fmaxf(warp_sum(has ? value : 0.0f), MIN_WEIGHT_SUM);
        return value * w.scale;
    }
};

// A token's experts and their weights by one warp: lane `u` returns number `u`.
template <int N> __device__ __forceinline__ Routed route_by_lanes(const RouteWork &w, const float *logits) {
    LaneLogits<N> of_lane(w, logits);
    int expert = of_lane.select(w, w.used);
    return {expert, of_lane.weight(w, logits, expert)};
}

__device__ __forceinline__ Routed route_in_registers(const RouteWork &w, const float *logits) {
    if (w.experts <= 4 * WARP) return route_by_lanes<4>(w, logits);
    return route_by_lanes<ROUTE_PER_LANE>(w, logits);
}

// The token's expert number `slot` alone, by one warp; all lanes get it.
__device__ __forceinline__ int route_slot(const RouteWork &w, const float *logits, int slot) {
    int selected;
    if (w.experts <= 4 * WARP) selected = LaneLogits<4>(w, logits).select(w, slot + 1);
    else selected = LaneLogits<ROUTE_PER_LANE>(w, logits).select(w, slot + 1);
    return __shfl_sync(FULL, selected, slot);
}

// Writes what lane `u` has of the token's expert number `u`.
__device__ __forceinline__ void write_routed(const RouteWork &w, i64 token, Routed routed) {
    int lane = threadIdx.x % WARP;
    if (lane >= w.used) return;
    ((int *)w.ids)[token * w.used + lane] = routed.expert;
    if (w.weights) ((float *)w.weights)[token * w.used + lane] = routed.weight;
}
