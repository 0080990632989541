// Attention on tensor cores where the query heads of a group share their keys and values (mma; compute capability 8.0 and
// newer): few queries over caches of any type, and heads that are too wide for the registers of attention_mma.cu.
//
// The rows of a block are pairs of query and query head of one group, 16 · M of them, so that each tile of keys and
// values is loaded once for all. Tiles are in shared memory as f16, double-buffered. The eight warps share the work three
// times per tile: scores of eight keys each, the softmax of some rows each, then some columns of the values each.
//
// As in attention_mma.cu, where a result is not finite, or a query is too large for f16, the block computes its rows
// again, key by key.
//
// Through page tables, the rows of a block are heads of one query, or of the queries of a tile that has one table. A tile of
// keys lies inside a page. Heads may have fewer elements than the kernel has room for: the others are zero.

#define WARPS 8
#define THREADS (WARPS * WARP)

#if __CUDA_ARCH__ >= 800

// The rows of a block.
template <int ROWS> struct Rows {
    int t[ROWS], h[ROWS];              // query and head
    int begin[ROWS], end[ROWS];        // visible keys of this block's partition
    float top[ROWS], sum[ROWS];        // of the softmax so far
    float fade[ROWS];                  // factor on the values so far
};

// Starts to load a tile of keys or values of `d` elements, at most `D`. Of its rows, from row `first` of the tensor on,
// those outside `begin..end` are zero.
template <int D, int KEYS>
__device__ __forceinline__ void load_tile(const Tensor &from, int d, i64 b, i64 g, i64 first, int begin, int end, u8 *to) {
    const int parts = D / 8;
    for (int i = threadIdx.x; i < KEYS * parts; i += THREADS) {
        int row = i / parts, part = i % parts;
        u8 *at = to + row * pitch<D>() + part * 16;
        bool exists = row >= begin && row < end && part * 8 < d;
        const u8 *source = row_at(from, b, g, exists ? first + row : first);
        if (from.type == F16)
            copy_16((u32)__cvta_generic_to_shared(at), source + part * 16, exists);
        else
            *(uint4 *)at = exists ? cache_to_f16x8(from.type, source, part) : make_uint4(0, 0, 0, 0);
    }
}

// Writes a row's results: of a single partition the final ones, otherwise the partial ones.
struct RowResult {
    float *to, factor;
    __device__ RowResult(const AttentionWork &w, i64 b, i64 t, i64 h, i64 number, i64 count, float top, float sum) {
        bool last = count == 1;
        to = last ? (float *)row_at(w.out, b, t, h) : partial_of(w, (b * w.q.d[2] + t) * w.q.d[1] + h, number);
        factor = last ? normalizer(w, h, top, sum) : 1.0f;
    }
};

// The exact version of a row: a warp takes its keys one after another.
template <int E, bool PAGED>
__device__ __noinline__ void attend_key_by_key(const AttentionWork &w, const KeyRows<PAGED> &rows, i64 b, i64 g, int t,
                                               int h, int begin, int end, i64 number, i64 count) {
    int lane = threadIdx.x % WARP, d = (int)w.k.d[3], e = (int)w.v.d[3];
    const float *query = (const float *)row_at(w.q, b, h, t);
    float top = -INF, sum = 0.0f, values[E / WARP];
#pragma unroll
    for (int i = 0; i < E / WARP; i++) values[i] = 0.0f;
    for (int key = begin; key < end; key++) {
        i64 at = rows(key);
        if (PAGED && at < 0) continue;
        const u8 *row = row_at(w.k, b, g, at);
        float score = 0.0f;
        for (int c = lane; c < d; c += WARP) score += query[c] * w.a.scale * cache_element(w.k.type, row, c);
        score = adjusted(w, b, h, t, warp_sum(score), key);
        if (score == -INF) continue;
        float higher = fmaxf(top, score), fade = fast_exp(top - higher), weight = fast_exp(score - higher);
        top = higher;
        sum = sum * fade + weight;
        row = row_at(w.v, b, g, at);
#pragma unroll
        for (int i = 0; i < E / WARP; i++)
            if (lane + i * WARP < e)
                values[i] = values[i] * fade + weight * cache_element(w.v.type, row, lane + i * WARP);
    }
    RowResult result(w, b, t, h, number, count, top, sum);
#pragma unroll
    for (int i = 0; i < E / WARP; i++)
        if (lane + i * WARP < e) result.to[lane + i * WARP] = values[i] * result.factor;
    if (count > 1 && lane == 0) {
        result.to[e] = top;
        result.to[e + 1] = sum;
    }
}

// Sums a row's scores into its softmax, and stores its weights as f16. All lanes of a warp; `KEYS` is 32 or 64.
template <int KEYS>
__device__ __forceinline__ void softmax_row(const float *scores, u16 *weights, float &top, float &sum, float &fade) {
    int lane = threadIdx.x % WARP;
    float one = scores[lane], two = KEYS > WARP ? scores[lane + KEYS - WARP] : -INF;
    float higher = fmaxf(top, warp_max(fmaxf(one, two))), base = finite_top(higher);
    one = fast_exp(one - base);
    two = KEYS > WARP ? fast_exp(two - base) : 0.0f;
    float added = warp_sum(one + two);
    weights[lane] = float_to_half(one);
    if (KEYS > WARP) weights[lane + KEYS - WARP] = float_to_half(two);
    __syncwarp();
    if (lane == 0) {
        fade = fast_exp(top - base);
        sum = sum * fade + added;
        top = higher;
    }
}

// The rows `first..end` of a block's group: pairs of query and head.
struct BlockRows { i64 first, end; };

template <int ROWS>
__device__ __forceinline__ BlockRows rows_in_order(i64 block, i64 all_rows) {
    return {block * ROWS, min((block + 1) * ROWS, all_rows)};
}

// Through page tables: heads of one query, or a tile of queries. Empty where the other launch takes the tile.
template <int ROWS>
__device__ __forceinline__ BlockRows rows_in_pages(const PagedWork &p, i64 block, i64 heads) {
    if (p.takes_tiles) {
        i64 rows = p.tile * heads;
        if (!has_one_table(p, block)) return {0, 0};
        return {block * rows, min((block + 1) * rows, p.w.q.d[2] * heads)};
    }
    i64 blocks = (heads + ROWS - 1) / ROWS, t = block / blocks, first = t * heads + block % blocks * ROWS;
    if (p.tile && has_one_table(p, t / p.tile)) return {0, 0};
    return {first, min(first + ROWS, (t + 1) * heads)};
}

// Keys of `D` elements, values of `E`; with PAGED of at most so many. `p` is the work of pages if there are some.
template <int D, int E, int M, int KEYS, bool PAGED>
__device__ __forceinline__ void attend_grouped(const AttentionWork &w, const PagedWork &p, u8 *memory) {
    const int ROWS = 16 * M, SCORES = KEYS + 4, WEIGHTS = pitch<KEYS>(), TILES = (E / 8 + WARPS - 1) / WARPS;
    const int tile_bytes = KEYS * (pitch<D>() + pitch<E>());
    __shared__ Rows<ROWS> rows;
    __shared__ int lowest, highest, one_table;
    __shared__ bool is_last;
    u8 *queries = memory, *tiles = queries + ROWS * pitch<D>();
    float *scores = (float *)(tiles + 2 * tile_bytes);
    u8 *weights = (u8 *)(scores + ROWS * SCORES);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    i64 g = blockIdx.x, b = blockIdx.z / w.a.partitions, number = blockIdx.z % w.a.partitions;
    const int d = PAGED ? (int)w.k.d[3] : D, e = PAGED ? (int)w.v.d[3] : E;
    i64 heads = w.q.d[1] / w.k.d[1];
    // With a causal mask, later queries see more keys: the longest blocks start first.
    i64 block = gridDim.y - 1 - blockIdx.y;
    if (threadIdx.x == 0) {
        lowest = 0x7fffffff;
        highest = one_table = 0;
    }
    wait_for_previous_kernel();
    BlockRows part = PAGED ? rows_in_pages<ROWS>(p, p.first + block, heads)
                           : rows_in_order<ROWS>(block, w.q.d[2] * heads);
    if (PAGED && part.first == part.end) return;
    __syncthreads();
    // Rows beyond the last repeat it.
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
        i64 row = min(part.first + r, part.end - 1), from, to, table;
        rows.t[r] = (int)(row / heads);
        rows.h[r] = (int)(g * heads + row % heads);
        if (PAGED)
            visible_in_pages(p, rows.t[r], &from, &to, &table);
        else
            visible(w, rows.t[r], &from, &to);
        rows.begin[r] = (int)from;
        rows.end[r] = (int)to;
        rows.top[r] = -INF;
        rows.sum[r] = 0.0f;
        if (from < to) {
            atomicMin(&lowest, (int)from);
            atomicMax(&highest, (int)to);
            if (PAGED) atomicMax(&one_table, (int)table);
        }
    }
    __syncthreads();
    int low = min(lowest, highest), high = highest;
    // This block's partition of the keys.
    i64 first_partition = low / w.a.partition;
    i64 count = high > low ? (high - 1) / w.a.partition - first_partition + 1 : 1;
    if (number < first_partition || number >= first_partition + count) return;
    low = max(low, (int)(number * w.a.partition));
    high = (int)min((i64)high, (number + 1) * w.a.partition);
    number -= first_partition;
    KeyRows<PAGED> key_rows = {p, PAGED ? (const int *)(p.pages.address + one_table * p.pages.s[2]) : nullptr};

    bool same = w.v.address == w.k.address && w.v.s[1] == w.k.s[1] && w.v.s[2] == w.k.s[2] && w.v.s[0] == w.k.s[0] &&
                w.v.type == w.k.type && e <= d;   // values are the first elements of the keys
    int first_tile = PAGED ? low / KEYS * KEYS : low;
    int place = PAGED && low < high ? key_rows.table[low / PAGE] : 0;   // the next tile's page: read one tile ahead
    auto start = [&](int first, int buffer) {
        u8 *to = tiles + buffer * tile_bytes;
        i64 row = first;
        int begin = low - first, end = high - first;
        if (PAGED) {
            row = place_rows(p, place);
            if (row < 0) end = 0;
            row = max(row, (i64)0) + first % PAGE;
            if (first + KEYS < high) place = key_rows.table[(first + KEYS) / PAGE];
        }
        load_tile<D, KEYS>(w.k, d, b, g, row, begin, end, to);
        if (!same) load_tile<E, KEYS>(w.v, e, b, g, row, begin, end, to + KEYS * pitch<D>());
        commit_copies();
    };
    if (low < high) start(first_tile, 0);
    bool again = false;
    for (int i = threadIdx.x; i < ROWS * (D / 2); i += THREADS) {
        int r = i / (D / 2), c = i % (D / 2) * 2;
        float2 v = make_float2(0.0f, 0.0f);
        if (c < d) v = *(const float2 *)((const float *)row_at(w.q, b, rows.h[r], rows.t[r]) + c);
        v.x *= w.a.scale;
        v.y *= w.a.scale;
        again |= fmaxf(fabsf(v.x), fabsf(v.y)) > 65504.0f;
        *(u32 *)(queries + r * pitch<D>() + c * 2) = floats_to_f16x2(v.x, v.y);
    }
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
        rows.begin[r] = max(rows.begin[r], low);
        rows.end[r] = min(rows.end[r], high);
    }

    float values[M][TILES][4];
#pragma unroll
    for (int i = 0; i < M * TILES * 4; i++) values[i / (TILES * 4)][i / 4 % TILES][i % 4] = 0.0f;
    u32 query_at = (u32)__cvta_generic_to_shared(queries) + lane % 16 * pitch<D>() + lane / 16 * 16;
    u32 weight_at = (u32)__cvta_generic_to_shared(weights) + lane % 16 * WEIGHTS + lane / 16 * 16;
    u32 tiles_at = (u32)__cvta_generic_to_shared(tiles);
    u32 value_pitch = same ? pitch<D>() : pitch<E>(), values_from = same ? 0 : KEYS * pitch<D>();
    int buffer = 0;
    for (int first = first_tile; first < high; first += KEYS) {
        if (first + KEYS < high) {
            start(first + KEYS, buffer ^ 1);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        __syncthreads();
        // Scores: eight keys and some of the groups of 16 rows for each warp.
        const int of_keys = KEYS / 8;
        u32 key_at = tiles_at + buffer * tile_bytes + (warp % of_keys * 8 + lane % 8) * pitch<D>() + lane / 8 * 16;
        for (int m = warp / of_keys; m < M; m += WARPS / of_keys) {
            float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int k = 0; k < D / 32; k++) {
                u32 keys[4], one[4], two[4];
                load_matrices(keys, key_at + k * 64);
                load_matrices(one, query_at + m * 16 * pitch<D>() + k * 64);
                load_matrices(two, query_at + m * 16 * pitch<D>() + k * 64 + 32);
                mma<false>(even, one, keys[0], keys[1]);
                mma<false>(odd, two, keys[2], keys[3]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int r = m * 16 + lane / 4 + i / 2 * 8, c = warp % of_keys * 8 + pair + i % 2, key = first + c;
                bool sees = key >= rows.begin[r] && key < rows.end[r];
                scores[r * SCORES + c] = sees ? adjusted(w, b, rows.h[r], rows.t[r], even[i] + odd[i], key) : -INF;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ROWS / WARPS; i++) {
            int r = warp * (ROWS / WARPS) + i;
            softmax_row<KEYS>(scores + r * SCORES, (u16 *)(weights + r * WEIGHTS), rows.top[r], rows.sum[r],
                              rows.fade[r]);
        }
        __syncthreads();
        // Values: groups of eight columns for each warp.
#pragma unroll
        for (int m = 0; m < M; m++) {
            float fade[2] = {rows.fade[m * 16 + lane / 4], rows.fade[m * 16 + lane / 4 + 8]};
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) values[m][n][i] *= fade[i / 2];
        }
#pragma unroll
        for (int k = 0; k < KEYS / 32; k++) {
            u32 one[M][4], two[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
                load_matrices(one[m], weight_at + m * 16 * WEIGHTS + k * 64);
                load_matrices(two[m], weight_at + m * 16 * WEIGHTS + k * 64 + 32);
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                int column = (warp + n * WARPS) * 8;
                if ((PAGED || E % (8 * WARPS)) && column >= e) continue;
                u32 of_keys[4];
                load_transposed(of_keys, tiles_at + buffer * tile_bytes + values_from + (k * 32 + lane) * value_pitch +
                                             column * 2);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma<false>(values[m][n], one[m], of_keys[0], of_keys[1]);
                    mma<false>(values[m][n], two[m], of_keys[2], of_keys[3]);
                }
            }
        }
        buffer ^= 1;
        __syncthreads();
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M * TILES * 4; i++)
        again |= !(fabsf(values[i / (TILES * 4)][i / 4 % TILES][i % 4]) < INF);
    for (int r = threadIdx.x; r < ROWS; r += THREADS) again |= !(fabsf(rows.sum[r]) < INF);
    if (__syncthreads_or(again)) {
        for (int r = warp; r < ROWS && part.first + r < part.end; r += WARPS)
            attend_key_by_key<E, PAGED>(w, key_rows, b, g, rows.t[r], rows.h[r], rows.begin[r], rows.end[r], number,
                                        count);
    } else {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int r = m * 16 + lane / 4 + half * 8;
                if (part.first + r >= part.end) continue;
                RowResult result(w, b, rows.t[r], rows.h[r], number, count, rows.top[r], rows.sum[r]);
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    int column = (warp + n * WARPS) * 8;
                    if ((PAGED || E % (8 * WARPS)) && column >= e) continue;
                    result.to[column + pair] = values[m][n][2 * half] * result.factor;
                    result.to[column + pair + 1] = values[m][n][2 * half + 1] * result.factor;
                }
                if (count > 1 && warp == 0 && pair == 0) {
                    result.to[e] = rows.top[r];
                    result.to[e + 1] = rows.sum[r];
                }
            }
    }
    if (count == 1) return;
    __threadfence();
    __syncthreads();
    u32 *counter = (u32 *)w.counters + (b * gridDim.y + blockIdx.y) * gridDim.x + g;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == (u32)count - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int r = warp; r < ROWS && part.first + r < part.end; r += WARPS)
        merge(w, (b * w.q.d[2] + rows.t[r]) * w.q.d[1] + rows.h[r], b, rows.h[r], rows.t[r], count, lane, WARP);
    if (threadIdx.x == 0) *counter = 0;
}

#define ATTENTION_GROUPED(name, d, e, m, keys)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ AttentionWork w) { \
        extern __shared__ __align__(16) u8 memory[];                                                        \
        attend_grouped<d, e, m, keys, false>(w, *(const PagedWork *)nullptr, memory);                       \
    }
ATTENTION_GROUPED(k_attention_grouped_64_m1, 64, 64, 1, 64)
ATTENTION_GROUPED(k_attention_grouped_96_m1, 96, 96, 1, 64)
ATTENTION_GROUPED(k_attention_grouped_128_m1, 128, 128, 1, 64)
ATTENTION_GROUPED(k_attention_grouped_192_m1, 192, 128, 1, 64)
ATTENTION_GROUPED(k_attention_grouped_192_m4, 192, 128, 4, 64)
ATTENTION_GROUPED(k_attention_grouped_256_m1, 256, 256, 1, 64)
ATTENTION_GROUPED(k_attention_grouped_256_m4, 256, 256, 4, 64)
ATTENTION_GROUPED(k_attention_grouped_576_m1, 576, 512, 1, 32)
ATTENTION_GROUPED(k_attention_grouped_576_m4, 576, 512, 4, 32)

#define ATTENTION_GROUPED_PAGED(name, d, e, m, keys)                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ PagedWork p) { \
        extern __shared__ __align__(16) u8 memory[];                                                    \
        attend_grouped<d, e, m, keys, true>(p.w, p, memory);                                            \
    }
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_128_m1, 128, 128, 1, 64)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_128_m4, 128, 128, 4, 64)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_192_m1, 192, 128, 1, 64)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_192_m4, 192, 128, 4, 64)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_256_m1, 256, 256, 1, 64)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_256_m4, 256, 256, 4, 64)
// With less shared memory, as devices of compute capability 8.6 have.
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_256_m1_small, 256, 256, 1, 32)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_576_m1, 576, 512, 1, 32)
ATTENTION_GROUPED_PAGED(k_attention_grouped_paged_576_m4, 576, 512, 4, 32)

#endif
