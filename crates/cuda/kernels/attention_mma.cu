// Attention of many queries on tensor cores (mma; compute capability 8.0 and newer).
//
// A block takes 64 queries of a head, a warp 16 of them, and walks the keys that any of them sees in tiles of 64. Keys
// and values are in shared memory as f16, double-buffered with cp.async. Scores stay in registers: the accumulator
// layout of the first mma is the operand layout of the second. Keys can be partitioned among blocks as in attention.cu.
//
// In the mma of a tile, masked keys take part with weight 0, and a value there that is not finite would spoil the sum.
// So where a result is not finite, or a query is too large for f16, the warp computes its queries again, key by key.
//
// Through a page table, a tile of keys is a page: only where it begins is looked up. A tile of queries with several page
// tables is left to attention_paged.cu.

#define QUERIES 64
#define KEYS 64
#define THREADS 128

#if __CUDA_ARCH__ >= 800

// Starts to load a tile of keys or values into shared memory; rows from `end` on are zero.
template <int D>
__device__ __forceinline__ void load_tile(const Tensor &from, i64 b, i64 g, i64 first, i64 end, u8 *to) {
    const int parts = D / 8;
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * parts; i += THREADS) {
        int row = i / parts, part = i % parts;
        u8 *at = to + row * pitch<D>() + part * 16;
        const u8 *source = row_at(from, b, g, first + row);
        if (first + row >= end)
            *(uint4 *)at = make_uint4(0, 0, 0, 0);
        else if (from.type == F16)
            copy_16((u32)__cvta_generic_to_shared(at), source + part * 16, true);
        else
            *(uint4 *)at = cache_to_f16x8(from.type, source, part);
    }
}

// Running softmax state of two queries, which four lanes share: each lane has a share of the sum, and two of every
// eight columns of the values.
template <int D> struct Softmax { float top[2], sum[2], values[D / 8][4]; };

// The exact version: keys `begin..end` one after another. Each lane gets a quarter of the sum of weights.
template <int D, bool PAGED>
__device__ __forceinline__ void attend_key_by_key(const AttentionWork &w, const KeyRows<PAGED> &rows, i64 b, i64 h,
                                                  i64 g, const i64 t[2], const int begin[2], const int end[2],
                                                  Softmax<D> &state) {
    int pair = threadIdx.x % 4 * 2;
    u32 four = 0xfu << (threadIdx.x % WARP / 4 * 4);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *query = (const float *)row_at(w.q, b, h, t[r]);
        float top = -INF, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) state.values[n][2 * r] = state.values[n][2 * r + 1] = 0.0f;
        for (int key = begin[r]; key < end[r]; key++) {
            i64 at = rows(key);
            if (PAGED && at < 0) continue;
            const u8 *row = row_at(w.k, b, g, at);
            float score = 0.0f;
#pragma unroll 1
            for (int c = threadIdx.x % 4; c < D; c += 4)
                score += query[c] * w.a.scale * cache_element(w.k.type, row, c);
            score += __shfl_xor_sync(four, score, 1);
            score += __shfl_xor_sync(four, score, 2);
            score = adjusted(w, b, h, t[r], score, key);
            if (score == -INF) continue;
            float higher = fmaxf(top, score), fade = fast_exp(top - higher), weight = fast_exp(score - higher);
            top = higher;
            sum = sum * fade + 0.25f * weight;
            row = row_at(w.v, b, g, at);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &value = state.values[n][2 * r + i];
                    value = value * fade + weight * cache_element(w.v.type, row, 8 * n + pair + i);
                }
        }
        state.top[r] = top;
        state.sum[r] = sum;
    }
}

// `p` is the work of pages if there are some.
template <int D, bool PAGED>
__device__ __forceinline__ void attend_tiles(const AttentionWork &w, const PagedWork &p, u8 *memory) {
    __shared__ int lowest[THREADS / WARP], highest[THREADS / WARP], tables[THREADS / WARP];
    __shared__ bool is_last;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    i64 h = blockIdx.x, b = blockIdx.z / w.a.partitions, number = blockIdx.z % w.a.partitions;
    i64 g = h / (w.q.d[1] / w.k.d[1]);
    // With a causal mask, later queries see more keys: the longest blocks start first.
    i64 first_query = (i64)(gridDim.y - 1 - blockIdx.y) * QUERIES;
    wait_for_previous_kernel();
    if (PAGED && !has_one_table(p, gridDim.y - 1 - blockIdx.y)) return;

    // This lane's queries and their spans. Lanes beyond the last query repeat it.
    i64 t[2];
    int begin[2], end[2], low = 0x7fffffff, high = 0, table = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        t[r] = min(first_query + warp * 16 + lane / 4 + 8 * r, w.q.d[2] - 1);
        i64 from, to, one;
        if (PAGED)
            visible_in_pages(p, t[r], &from, &to, &one);
        else
            visible(w, t[r], &from, &to);
        begin[r] = (int)from;
        end[r] = (int)to;
        if (from < to) {
            low = min(low, begin[r]);
            high = max(high, end[r]);
            if (PAGED) table = (int)one;
        }
    }
    // Those without keys have table 0, the others the same one.
    if (PAGED) {
        table = __reduce_max_sync(FULL, table);
        if (lane == 0) tables[warp] = table;
    }
    low = __reduce_min_sync(FULL, low);
    high = __reduce_max_sync(FULL, high);
    if (lane == 0) {
        lowest[warp] = low;
        highest[warp] = high;
    }
    __syncthreads();
    for (int i = 0; i < THREADS / WARP; i++) {
        low = min(low, lowest[i]);
        high = max(high, highest[i]);
        if (PAGED) table = max(table, tables[i]);
    }
    if (low > high) low = high;
    KeyRows<PAGED> rows = {p, PAGED ? (const int *)(p.pages.address + table * p.pages.s[2]) : nullptr};
    // This block's partition of the keys.
    i64 first_partition = low / w.a.partition;
    i64 count = high > low ? (high - 1) / w.a.partition - first_partition + 1 : 1;
    if (number < first_partition || number >= first_partition + count) return;
    low = max(low, (int)(number * w.a.partition));
    high = (int)min((i64)high, (number + 1) * w.a.partition);
    number -= first_partition;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        begin[r] = max(begin[r], low);
        end[r] = min(end[r], high);
    }
    if (PAGED) low = low / PAGE * PAGE;
    int all_from = __reduce_max_sync(FULL, max(begin[0], begin[1]));   // all queries of the warp see these keys
    int all_to = __reduce_min_sync(FULL, min(end[0], end[1]));
    bool simple = !w.mask.address && w.a.soft_cap <= 0.0f;             // neither mask nor soft cap

    u32 query[D / 16][4];
    bool again = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *row = (const float *)row_at(w.q, b, h, t[r]);
#pragma unroll
        for (int k = 0; k < D / 8; k++) {
            float2 v = *(const float2 *)(row + 8 * k + pair);
            v.x *= w.a.scale;
            v.y *= w.a.scale;
            again |= fmaxf(fabsf(v.x), fabsf(v.y)) > 65504.0f;
            query[k / 2][k % 2 * 2 + r] = floats_to_f16x2(v.x, v.y);
        }
    }
    Softmax<D> state;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        state.top[r] = -INF;
        state.sum[r] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) state.values[n][i] = 0.0f;

    const int bytes = KEYS * pitch<D>();
    int count_tiles = (high - low + KEYS - 1) / KEYS;
    auto sees = [&](int tile, int r) {
        int first = low + tile * KEYS;
        return begin[r] < end[r] && begin[r] < first + KEYS && end[r] > first;
    };
    // The next tile that any query of the block sees. Where there is one, all threads pass a barrier on the way.
    auto next = [&](int tile) {
        do tile++;
        while (tile < count_tiles && !__syncthreads_or(sees(tile, 0) || sees(tile, 1)));
        return tile;
    };
    auto start = [&](int tile, int buffer) {
        i64 first = low + tile * KEYS, row = rows(first), end = row < 0 ? 0 : row + high - first;
        load_tile<D>(w.k, b, g, max(row, (i64)0), end, memory + 2 * buffer * bytes);
        load_tile<D>(w.v, b, g, max(row, (i64)0), end, memory + (2 * buffer + 1) * bytes);
    };
    // The row of one of four matrices whose address this lane passes to ldmatrix.
    u32 base = (u32)__cvta_generic_to_shared(memory), matrix = lane / 8;
    u32 key_at = base + (matrix / 2 * 8 + lane % 8) * pitch<D>() + matrix % 2 * 16;
    u32 value_at = base + bytes + (matrix % 2 * 8 + lane % 8) * pitch<D>() + matrix / 2 * 16;
    int buffer = 0, tile = next(-1);
    if (tile < count_tiles) start(tile, 0);
    asm volatile("cp.async.commit_group;" ::: "memory");
    while (tile < count_tiles) {
        int then = next(tile);
        if (then < count_tiles) start(then, buffer ^ 1);
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        if (__any_sync(FULL, sees(tile, 0) || sees(tile, 1))) {
            float score[KEYS / 8][4];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) score[n][i] = 0.0f;
#pragma unroll
            for (int k = 0; k < D / 16; k++)
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 keys[4];
                    load_matrices(keys, key_at + 2 * buffer * bytes + n * 16 * pitch<D>() + k * 32);
                    mma<false>(score[2 * n], query[k], keys[0], keys[1]);
                    mma<false>(score[2 * n + 1], query[k], keys[2], keys[3]);
                }
            int first = low + tile * KEYS;
            if (!simple || first < all_from || first + KEYS > all_to) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int key = first + 8 * n + pair + i % 2;
                        if (key < begin[i / 2] || key >= end[i / 2])
                            score[n][i] = -INF;
                        else if (!simple)
                            score[n][i] = adjusted(w, b, h, t[i / 2], score[n][i], key);
                    }
            }
            u32 weight[KEYS / 8][2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = state.top[r];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                float from = finite_top(top) * LOG2E;
                float fade = fast_exp2(state.top[r] * LOG2E - from), sum = 0.0f;
                state.top[r] = top;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    float one = fast_exp2(score[n][2 * r] * LOG2E - from);
                    float two = fast_exp2(score[n][2 * r + 1] * LOG2E - from);
                    sum += one + two;
                    weight[n][r] = floats_to_f16x2(one, two);
                }
                state.sum[r] = state.sum[r] * fade + sum;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    state.values[n][2 * r] *= fade;
                    state.values[n][2 * r + 1] *= fade;
                }
            }
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
                u32 weights[4] = {weight[2 * k][0], weight[2 * k][1], weight[2 * k + 1][0], weight[2 * k + 1][1]};
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    u32 values[4];
                    load_transposed(values, value_at + 2 * buffer * bytes + k * 16 * pitch<D>() + n * 32);
                    mma<false>(state.values[2 * n], weights, values[0], values[1]);
                    mma<false>(state.values[2 * n + 1], weights, values[2], values[3]);
                }
            }
        }
        buffer ^= 1;
        tile = then;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) again |= !(fabsf(state.sum[r]) < INF);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) again |= !(fabsf(state.values[n][i]) < INF);
    if (__any_sync(FULL, again)) attend_key_by_key<D, PAGED>(w, rows, b, h, g, t, begin, end, state);

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = state.sum[r] + __shfl_xor_sync(FULL, state.sum[r], 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        i64 line = (b * w.q.d[2] + t[r]) * w.q.d[1] + h;
        if (first_query + warp * 16 + lane / 4 + 8 * r >= w.q.d[2]) continue;
        float *to = count == 1 ? (float *)row_at(w.out, b, t[r], h) : partial_of(w, line, number);
        float scale = count > 1 ? 1.0f : normalizer(w, h, state.top[r], sum);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2 *)(to + 8 * n + pair) =
                make_float2(state.values[n][2 * r] * scale, state.values[n][2 * r + 1] * scale);
        if (count > 1 && pair == 0) {
            to[D] = state.top[r];
            to[D + 1] = sum;
        }
    }
    if (count == 1) return;
    __threadfence();
    __syncthreads();
    u32 *counter = (u32 *)w.counters + (b * gridDim.y + blockIdx.y) * gridDim.x + h;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == (u32)count - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = 0; i < 16; i++) {
        i64 at = first_query + warp * 16 + i;
        if (at < w.q.d[2]) merge(w, (b * w.q.d[2] + at) * w.q.d[1] + h, b, h, at, count, lane, WARP);
    }
    if (threadIdx.x == 0) *counter = 0;
}

#define ATTENTION_MMA(d, blocks)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)                         \
        k_attention_mma_##d(const __grid_constant__ AttentionWork w) {                    \
        extern __shared__ __align__(16) u8 memory[];                                      \
        attend_tiles<d, false>(w, *(const PagedWork *)nullptr, memory);                   \
    }                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)                         \
        k_attention_mma_paged_##d(const __grid_constant__ PagedWork p) {                  \
        extern __shared__ __align__(16) u8 memory[];                                      \
        attend_tiles<d, true>(p.w, p, memory);                                            \
    }
ATTENTION_MMA(64, 3)
ATTENTION_MMA(80, 2)
ATTENTION_MMA(96, 2)
ATTENTION_MMA(128, 2)

#endif
