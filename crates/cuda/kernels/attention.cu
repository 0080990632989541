// Attention with an online softmax over the visible keys: one block per query, head and key partition. Through page tables
// too, where no other kernel takes heads or caches.

// Read before the previous kernel is complete: the visible keys, the token's own KV-cache row, and sine and cosine for
// the pair that this thread rotates.
struct TokenPosition {
    int begin, end, own;
    float s, c;
};

__device__ __forceinline__ TokenPosition token_position(const AttentionWork &w, const DecodeToken &f) {
    TokenPosition token;
    i64 begin, end;
    visible(w, 0, &begin, &end);
    token.begin = (int)begin;
    token.end = (int)end;
    token.own = *(const int *)f.row;
    token.s = 0.0f;
    token.c = 1.0f;
    if (threadIdx.x < f.rope.dims / 2)
        angle(rotation_of(f.rope, f.factors, threadIdx.x), f.rope.scale, *(const int *)f.position, &token.s, &token.c);
    return token;
}

// The share of a block: a partition of the keys of one query and head.
struct Partition {
    i64 b, h, t, g;          // batch, head, query, KV head
    i64 begin, end;          // keys
    i64 number, count;       // among the partitions with visible keys
};

// `false` for a partition without visible keys. Where the query sees no key at all, one partition remains, which writes
// the zeros.
__device__ __forceinline__ bool cut_partition(const AttentionWork &w, i64 begin, i64 end, Partition *p) {
    p->h = blockIdx.y;
    p->g = p->h / (w.q.d[1] / w.k.d[1]);
    i64 first = begin / w.a.partition, last = end > begin ? (end - 1) / w.a.partition : first;
    p->number = (i64)blockIdx.x - first;
    p->count = last - first + 1;
    p->begin = max(begin, (i64)blockIdx.x * w.a.partition);
    p->end = min(end, ((i64)blockIdx.x + 1) * w.a.partition);
    return p->number >= 0 && p->number < p->count;
}

__device__ __forceinline__ bool find_partition(const AttentionWork &w, Partition *p) {
    p->t = blockIdx.z % w.q.d[2];
    p->b = blockIdx.z / w.q.d[2];
    i64 begin, end;
    visible(w, p->t, &begin, &end);
    return cut_partition(w, begin, end, p);
}

// Merges the results of a block's warps, in order, then those of the blocks: for each warp a maximum in `tops`, a sum
// in `sums` and `e` weighted values in `values`.
__device__ __forceinline__ void finish(const AttentionWork &w, const Partition &p, const float *tops, const float *sums,
                                       const float *values) {
    __shared__ bool is_last;
    int warps = blockDim.x / WARP, e = (int)w.v.d[3];
    i64 line = (p.b * w.q.d[2] + p.t) * w.q.d[1] + p.h;
    float *mine = partial_of(w, line, p.number);
    __syncthreads();
    float top = -INF, sum = 0.0f;
    for (int i = 0; i < warps; i++) top = fmaxf(top, tops[i]);
    float base = finite_top(top);
    for (int i = 0; i < warps; i++) sum += sums[i] * fast_exp(tops[i] - base);
    float factor = p.count == 1 ? normalizer(w, p.h, top, sum) : 1.0f;
    for (int c = threadIdx.x; c < e; c += blockDim.x) {
        float total = 0.0f;
        for (int i = 0; i < warps; i++) total += values[i * e + c] * fast_exp(tops[i] - base);
        if (p.count == 1) put(w.out, p.b, p.t, p.h, c, total * factor);
        else mine[c] = total;
    }
    if (p.count == 1) return;
    if (threadIdx.x == 0) {
        mine[e] = top;
        mine[e + 1] = sum;
    }
    __threadfence();
    __syncthreads();
    u32 *counter = (u32 *)w.counters + (i64)blockIdx.z * w.q.d[1] + p.h;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == (u32)p.count - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    merge(w, line, p.b, p.h, p.t, p.count, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) *counter = 0;
}

// The generic kernel, for all types: a warp takes 32 keys at a time, and its lanes share the elements of each row. The
// 32 scores end up one per lane, and the running maximum is updated once for all of them. Heads have at most
// 32 · `PER_LANE` elements. With PAGED, `of` is the work of pages.
template <int PER_LANE, bool PAGED>
__device__ __forceinline__ void attend(const AttentionWork &w, const PagedWork &of, float *shared) {
    wait_for_previous_kernel();
    Partition p;
    KeyRows<PAGED> rows = {of, nullptr};
    if (PAGED) {
        p.b = 0;
        p.t = of.first + blockIdx.z;
        i64 begin, end, table;
        visible_in_pages(of, p.t, &begin, &end, &table);
        rows.table = (const int *)(of.pages.address + table * of.pages.s[2]);
        if (!cut_partition(w, begin, end, &p)) return;
    } else if (!find_partition(w, &p)) {
        return;
    }
    i64 d = w.q.d[3], e = w.v.d[3];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    float query[PER_LANE], acc[PER_LANE];
    for (int i = 0; i < PER_LANE; i++) {
        i64 c = lane + i * WARP;
        query[i] = c < d ? element(w.q, p.b, p.h, p.t, c) * w.a.scale : 0.0f;
        acc[i] = 0.0f;
    }
    float highest = -INF, sum = 0.0f;
    for (i64 first = p.begin + warp * WARP; first < p.end; first += warps * WARP) {
        int tile = (int)min((i64)WARP, p.end - first);
        i64 own = -1;   // the row of this lane's key
        if (!PAGED || lane < tile) own = rows(first + lane);
        float score = -INF;
        for (int j = 0; j < tile; j++) {
            i64 at = PAGED ? __shfl_sync(FULL, own, j) : first + j;
            if (PAGED && at < 0) continue;
            const u8 *row = row_at(w.k, p.b, p.g, at);
            float part = 0.0f;
            for (int i = 0; i < PER_LANE; i++) {
                i64 c = lane + i * WARP;
                if (c < d) part += query[i] * row_element(w.k.type, row, c);
            }
            part = warp_sum(part);
            if (lane == j) score = part;
        }
        if (lane < tile && own >= 0) score = adjusted(w, p.b, p.h, p.t, score, first + lane);
        float top = fmaxf(highest, warp_max(score)), base = finite_top(top);
        float fade = fast_exp(highest - base), weight = fast_exp(score - base);
        sum = sum * fade + warp_sum(weight);
        highest = top;
        for (int i = 0; i < PER_LANE; i++) acc[i] *= fade;
        for (int j = 0; j < tile; j++) {
            float one = __shfl_sync(FULL, weight, j);
            i64 at = PAGED ? __shfl_sync(FULL, own, j) : first + j;
            if (one == 0.0f) continue;
            const u8 *row = row_at(w.v, p.b, p.g, at);
            for (int i = 0; i < PER_LANE; i++) {
                i64 c = lane + i * WARP;
                if (c < e) acc[i] += one * row_element(w.v.type, row, c);
            }
        }
    }
    float *tops = shared, *sums = shared + warps, *values = shared + 2 * warps;
    if (lane == 0) {
        tops[warp] = highest;
        sums[warp] = sum;
    }
    for (int i = 0; i < PER_LANE; i++) {
        i64 c = lane + i * WARP;
        if (c < e) values[warp * e + c] = acc[i];
    }
    finish(w, p, tops, sums, values);
}

#define ATTENTION(name, per_lane)                                                                  \
    extern "C" __global__ void name(const __grid_constant__ AttentionWork w) {                     \
        extern __shared__ float shared[];                                                          \
        attend<per_lane, false>(w, *(const PagedWork *)nullptr, shared);                           \
    }
ATTENTION(k_attention, 4)
ATTENTION(k_attention_wide, 18)

#define ATTENTION_PAGED(name, per_lane)                                    \
    extern "C" __global__ void name(const __grid_constant__ PagedWork p) { \
        extern __shared__ float shared[];                                  \
        attend<per_lane, true>(p.w, p, shared);                            \
    }
ATTENTION_PAGED(k_attention_plain_paged, 4)
ATTENTION_PAGED(k_attention_plain_paged_wide, 18)

// Keys and values that eight lanes have in flight: a lane's 16-byte parts of each.
template <int N, int AT_ONCE> struct Tile { uint4 key[AT_ONCE][N], value[AT_ONCE][N]; };

// Loads keys and values from `base` on, except the current token's row `own`.
template <int N, int AT_ONCE>
__device__ __forceinline__ void load(Tile<N, AT_ONCE> &tile, const AttentionWork &w, const Partition &p, i64 base,
                                     i64 own) {
    int group = threadIdx.x / 8, groups = blockDim.x / 8, part = threadIdx.x % 8;
    const u8 *keys = row_at(w.k, p.b, p.g, 0) + part * 16, *values = row_at(w.v, p.b, p.g, 0) + part * 16;
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        i64 at = min(base + group + u * groups, p.end - 1);
#pragma unroll
        for (int i = 0; i < N; i++)
            tile.key[u][i] = at == own ? zero : *(const uint4 *)(keys + at * w.k.s[2] + i * 128);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
        i64 at = min(base + group + u * groups, p.end - 1);
#pragma unroll
        for (int i = 0; i < N; i++)
            tile.value[u][i] = at == own ? zero : *(const uint4 *)(values + at * w.v.s[2] + i * 128);
    }
}

// f16 keys and values of 64 · N elements, f32 queries. Eight lanes share a row, so a warp takes four keys at once, with
// AT_ONCE times as many keys and values in flight; each group of eight lanes keeps its own running maximum. With
// DECODE, `f` is the current token, and with NORMED its query or key has a norm.
template <int N, int AT_ONCE, bool DECODE, bool NORMED>
__device__ __forceinline__ void attend_f16(const AttentionWork &w, const DecodeToken *f, float *shared) {
    const int d = 64 * N;
    __shared__ __align__(16) float own_query[d];
    __shared__ __align__(16) u16 own_key[d], own_value[d];
    __shared__ float norms[NORMED ? 2 * d : 1];
    __shared__ float2 squares[NORMED ? 8 : 1];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    int group = threadIdx.x / 8, groups = blockDim.x / 8, part = threadIdx.x % 8;
    Partition p;
    Tile<N, AT_ONCE> tile;
    i64 own = -1;
    if (DECODE) {
        launch_dependents();
        TokenPosition token = token_position(w, *f);
        p.t = p.b = 0;
        bool sees = cut_partition(w, token.begin, token.end, &p);
        // One block per KV head writes the cache.
        bool writes = blockIdx.x == 0 && p.h % (w.q.d[1] / w.k.d[1]) == 0;
        if (!sees && !writes) return;
        own = token.own;
        bool exists = own >= 0 && own < w.k.d[2];
        int n = threadIdx.x, half = f->rope.dims / 2, a = n + half, b = a;
        bool holds = n < d - half, rotates = n < half;
        float s = token.s, c = token.c;
        if (rotates) {
            a = f->rope.half_split ? n : 2 * n;
            b = f->rope.half_split ? n + half : 2 * n + 1;
        }
        if (sees && p.begin < p.end) load(tile, w, p, p.begin, own);
        // A thread reads here what it has written itself: `a` and `b`.
        if (NORMED && holds) {
            const float *q = (const float *)f->query_norm, *k = (const float *)f->key_norm;
            norms[a] = q ? q[a] : 1.0f;
            norms[b] = q ? q[b] : 1.0f;
            norms[d + a] = k ? k[a] : 1.0f;
            norms[d + b] = k ? k[b] : 1.0f;
        }
        wait_for_previous_kernel();
        float qa = 0.0f, qb = 0.0f, ka = 0.0f, kb = 0.0f;
        if (holds) {
            const float *q = (const float *)f->q + p.h * d, *k = (const float *)f->k + p.g * d;
            qa = q[a];
            qb = q[b];
            ka = k[a];
            kb = k[b];
        }
        if (NORMED) {
            // One that does not rotate has the same element twice.
            float2 sum = make_float2(warp_sum(qa * qa + (rotates ? qb * qb : 0.0f)),
                                     warp_sum(ka * ka + (rotates ? kb * kb : 0.0f)));
            if (lane == 0) squares[warp] = sum;
            __syncthreads();
            sum = make_float2(0.0f, 0.0f);
            for (int i = 0; i < warps; i++) {
                sum.x += squares[i].x;
                sum.y += squares[i].y;
            }
            float of_query = f->query_norm ? 1.0f / sqrtf(sum.x / d + f->query_eps) : 1.0f;
            float of_key = f->key_norm ? 1.0f / sqrtf(sum.y / d + f->key_eps) : 1.0f;
            if (holds) {
                qa *= of_query * norms[a];
                qb *= of_query * norms[b];
                ka *= of_key * norms[d + a];
                kb *= of_key * norms[d + b];
            }
        }
        if (holds) {
            own_query[a] = rotates ? qa * c - qb * s : qa;
            own_key[a] = float_to_half(rotates ? ka * c - kb * s : ka);
            if (rotates) {
                own_query[b] = qa * s + qb * c;
                own_key[b] = float_to_half(ka * s + kb * c);
            }
        }
        for (int i = threadIdx.x; i < d; i += blockDim.x)
            own_value[i] = float_to_half(((const float *)f->v)[p.g * d + i]);
        __syncthreads();
        if (writes && !exists && threadIdx.x == 0) {
            report(w.fault_word, f->fault_keys);
            report(w.fault_word, f->fault_values);
        }
        if (writes && exists && threadIdx.x < d / 8) {
            ((uint4 *)row_at(w.k, 0, p.g, own))[threadIdx.x] = ((const uint4 *)own_key)[threadIdx.x];
            ((uint4 *)row_at(w.v, 0, p.g, own))[threadIdx.x] = ((const uint4 *)own_value)[threadIdx.x];
        }
        if (!sees) return;
    } else {
        wait_for_previous_kernel();
        if (!find_partition(w, &p)) return;
    }
    float query[8 * N], acc[8 * N];
    const float4 *from = DECODE ? (const float4 *)own_query : (const float4 *)row_at(w.q, p.b, p.h, p.t);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float4 a = from[2 * (8 * i + part)], b = from[2 * (8 * i + part) + 1];
        float eight[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        for (int j = 0; j < 8; j++) {
            query[8 * i + j] = eight[j] * w.a.scale;
            acc[8 * i + j] = 0.0f;
        }
    }
    float highest = -INF, sum = 0.0f;
    for (i64 base = p.begin; base < p.end; base += groups * AT_ONCE) {
        if (!DECODE || base > p.begin) load(tile, w, p, base, own);
        if (DECODE) {
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (base + group + u * groups != own) continue;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    tile.key[u][i] = ((const uint4 *)own_key)[8 * i + part];
                    tile.value[u][i] = ((const uint4 *)own_value)[8 * i + part];
                }
            }
        }
        float score[AT_ONCE], top = highest;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const u16 *halves = (const u16 *)&tile.key[u][i];
                for (int j = 0; j < 8; j++) sum += query[8 * i + j] * half_to_float(halves[j]);
            }
            for (int o = 4; o > 0; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
            i64 at = base + group + u * groups;
            score[u] = at < p.end ? adjusted(w, p.b, p.h, p.t, sum, at) : -INF;
            top = fmaxf(top, score[u]);
        }
        float from_top = finite_top(top), fade = fast_exp(highest - from_top);
        sum *= fade;
        highest = top;
        for (int i = 0; i < 8 * N; i++) acc[i] *= fade;
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            float weight = fast_exp(score[u] - from_top);
            if (weight == 0.0f) continue;   // masked: the value may be anything, even NaN
            sum += weight;
#pragma unroll
            for (int i = 0; i < N; i++) {
                const u16 *halves = (const u16 *)&tile.value[u][i];
                for (int j = 0; j < 8; j++) acc[8 * i + j] += weight * half_to_float(halves[j]);
            }
        }
    }
    // Merges the four groups of a warp, then the warps.
    float top = fmaxf(highest, __shfl_xor_sync(FULL, highest, 8));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 16));
    float fade = fast_exp(highest - finite_top(top));
    sum *= fade;
    sum += __shfl_xor_sync(FULL, sum, 8);
    sum += __shfl_xor_sync(FULL, sum, 16);
    float *tops = shared, *sums = shared + warps, *lines = shared + 2 * warps + warp * 64 * N;
    for (int i = 0; i < 8 * N; i++) {
        float v = acc[i] * fade;
        v += __shfl_xor_sync(FULL, v, 8);
        v += __shfl_xor_sync(FULL, v, 16);
        if (lane < 8) lines[64 * (i / 8) + 8 * part + i % 8] = v;
    }
    if (lane == 0) {
        tops[warp] = top;
        sums[warp] = sum;
    }
    finish(w, p, tops, sums, shared + 2 * warps);
}

#define ATTENTION_F16(name, n, at_once, threads, blocks)                                                          \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ AttentionWork w) { \
        extern __shared__ float shared[];                                                                         \
        attend_f16<n, at_once, false, false>(w, 0, shared);                                                           \
    }
// Few queries: all loads of a partition at once, and room on the SM for a block of the GEMV that follows.
ATTENTION_F16(k_attention_f16_64, 1, 4, 256, 2)
ATTENTION_F16(k_attention_f16_128, 2, 4, 256, 2)
ATTENTION_F16(k_attention_f16_256, 4, 2, 256, 1)
// Many queries: latency is hidden by occupancy, with more blocks per SM.
ATTENTION_F16(k_attention_f16_64_many, 1, 2, 128, 6)
ATTENTION_F16(k_attention_f16_128_many, 2, 2, 128, 4)
ATTENTION_F16(k_attention_f16_256_many, 4, 1, 128, 3)

// Decode attention. Few threads, so that a block fits on an SM beside blocks of the previous GEMV.
#define ATTENTION_DECODE(name, n, at_once, threads, blocks, normed)                           \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                             \
        name(const __grid_constant__ AttentionWork w, const __grid_constant__ DecodeToken f) { \
        extern __shared__ float shared[];                                                     \
        attend_f16<n, at_once, true, normed>(w, &f, shared);                                  \
    }
ATTENTION_DECODE(k_attention_decode_64, 1, 4, 128, 4, false)
ATTENTION_DECODE(k_attention_decode_128, 2, 4, 128, 4, false)
ATTENTION_DECODE(k_attention_decode_256, 4, 2, 256, 1, false)
ATTENTION_DECODE(k_attention_decode_64_normed, 1, 4, 128, 4, true)
ATTENTION_DECODE(k_attention_decode_128_normed, 2, 4, 128, 4, true)
ATTENTION_DECODE(k_attention_decode_256_normed, 4, 2, 256, 1, true)
