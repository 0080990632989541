// Decode attention over long caches of f16 (mma; compute capability 8.0 and newer): a token's query against thousands of
// keys, with RoPE and the cache write, as in attention.cu.
//
// A block takes a partition of the keys of one head, and all query heads that share it: keys and values are read once.
// Each of its four warps has a ring of tiles of 16 keys and their values in shared memory, which cp.async fills, and no
// warp waits for another: so many bytes are in flight that memory is never idle. The rings are filled while the previous
// kernel still runs. The grid fills the device; how many keys a block takes follows from the span that is visible.
//
// Tensor cores compute the transposed products: keys are the rows of the first, elements of the values those of the
// second, and the query heads are the eight columns of both.

#define KEYS 16
#define THREADS 128
#define WARPS (THREADS / WARP)
#define COLUMNS 8            // the most query heads that share a head of the keys

#if __CUDA_ARCH__ >= 800

// The transposed 8 × 8 matrix of 16-bit elements.
__device__ __forceinline__ u32 transposed(u32 part) {
    u32 to;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(part));
    return to;
}

// What a block has in shared memory besides the rings.
template <int D> struct __align__(16) DecodeShared {
    float query[COLUMNS][D];             // with RoPE, times the scale
    u16 halves[COLUMNS][D + 8];          // the same as f16, divided by `factor`
    float norms[2][D];
    u16 key[D], value[D];                // of the token
    float factor[COLUMNS], tops[WARPS][COLUMNS], sums[WARPS][COLUMNS];
    u32 is_last;
};

// Norm, RoPE and scale of the token's queries, a warp for each, and its key where `holds_own`.
template <int D, bool NORMED>
__device__ __forceinline__ void rotate_heads(const AttentionWork &w, const DecodeToken &f, const float *sine,
                                             const float *cosine, i64 g, int heads, bool holds_own,
                                             DecodeShared<D> &shared) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = f.rope.dims / 2;
    for (int v = warp; v < heads + holds_own; v += WARPS) {
        bool is_key = v == heads;
        const float *row = is_key ? (const float *)f.k + g * D : (const float *)f.q + (g * heads + v) * D;
        // Pairs that rotate, then elements that do not.
        float first[D / 32], second[D / 32], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            int n = lane + i * WARP;
            bool rotates = n < half;
            int a = !rotates ? n + half : f.rope.half_split ? n : 2 * n, b = f.rope.half_split ? n + half : 2 * n + 1;
            first[i] = n < D - half ? row[a] : 0.0f;
            second[i] = rotates ? row[b] : 0.0f;
        }
        if (NORMED) {
#pragma unroll
            for (int i = 0; i < D / 32; i++) squares += first[i] * first[i] + second[i] * second[i];
            squares = warp_sum(squares);
            bool has_norm = is_key ? f.key_norm : f.query_norm;
            float by = has_norm ? 1.0f / sqrtf(squares / D + (is_key ? f.key_eps : f.query_eps)) : 1.0f;
#pragma unroll
            for (int i = 0; i < D / 32; i++) {
                int n = lane + i * WARP;
                bool rotates = n < half;
                int a = !rotates ? n + half : f.rope.half_split ? n : 2 * n;
                int b = f.rope.half_split ? n + half : 2 * n + 1;
                if (n < D - half) first[i] *= by * shared.norms[is_key][a];
                if (rotates) second[i] *= by * shared.norms[is_key][b];
            }
        }
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            if (i < D / 64 && lane + i * WARP < half) {
                float s = sine[i < D / 64 ? i : 0], c = cosine[i < D / 64 ? i : 0], x = first[i], y = second[i];
                first[i] = x * c - y * s;
                second[i] = x * s + y * c;
            }
            if (!is_key) {
                first[i] *= w.a.scale;
                second[i] *= w.a.scale;
            }
            largest = fmaxf(largest, fmaxf(fabsf(first[i]), fabsf(second[i])));
        }
        // A query that is too large for f16 is divided by a power of two.
        largest = warp_max(largest);
        float factor = 1.0f;
        if (!is_key)
            while (largest > 32768.0f * factor && factor < 1e30f) factor *= 2.0f;
        float inverse = 1.0f / factor;
        auto put_element = [&](int c, float x) {
            if (is_key) {
                shared.key[c] = float_to_half(x);
            } else {
                shared.query[v][c] = x;
                shared.halves[v][c] = float_to_half(x * inverse);
            }
        };
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            int n = lane + i * WARP;
            bool rotates = n < half;
            int a = !rotates ? n + half : f.rope.half_split ? n : 2 * n, b = f.rope.half_split ? n + half : 2 * n + 1;
            if (n < D - half) put_element(a, first[i]);
            if (rotates) put_element(b, second[i]);
        }
        if (lane == 0 && !is_key) shared.factor[v] = factor;
    }
}

// The exact version of what a warp computes: one key after another, for where a result is not finite. Keys without weight
// do not count, whatever their values are.
template <int D>
__device__ __forceinline__ void attend_keys(const AttentionWork &w, const DecodeShared<D> &shared, i64 g, int head,
                                            int first, int to, int own, float *top, float *sum, float *values) {
    int lane = threadIdx.x % WARP;
    float highest = -INF, total = 0.0f, acc[D / 32];
    for (int i = 0; i < D / 32; i++) acc[i] = 0.0f;
    for (; first < to; first += WARPS * KEYS)
        for (int at = first; at < min(first + KEYS, to); at++) {
            const u16 *key = at == own ? shared.key : (const u16 *)row_at(w.k, 0, g, at);
            const u16 *value = at == own ? shared.value : (const u16 *)row_at(w.v, 0, g, at);
            float score = 0.0f;
            for (int i = 0; i < D / 32; i++)
                score += shared.query[head][lane + i * WARP] * half_to_float(key[lane + i * WARP]);
            score = warp_sum(score);
            if (w.a.soft_cap > 0.0f) score = w.a.soft_cap * tanhf(score / w.a.soft_cap);
            float higher = fmaxf(highest, score), base = finite_top(higher);
            float fade = fast_exp(highest - base), weight = fast_exp(score - base);
            highest = higher;
            total *= fade;
            for (int i = 0; i < D / 32; i++) acc[i] *= fade;
            if (weight == 0.0f) continue;
            total += weight;
            for (int i = 0; i < D / 32; i++) acc[i] += weight * half_to_float(value[lane + i * WARP]);
        }
    if (lane == 0) {
        *top = highest;
        *sum = total;
    }
    for (int i = 0; i < D / 32; i++) values[lane + i * WARP] = acc[i];
}

// Merges the partitions of a head, in order, by a warp. `fades` has room for one float of each.
template <int D>
__device__ __forceinline__ void merge_partitions(const AttentionWork &w, i64 h, int count, const float *values,
                                                 const float2 *marks, float *fades) {
    const int width = D / WARP, at_once = 16;
    int lane = threadIdx.x % WARP;
    float top = -INF, sum = 0.0f, total[width];
    for (int i = lane; i < count; i += WARP) top = fmaxf(top, __ldcg(marks + i).x);
    top = warp_max(top);
    float shift = finite_top(top) * LOG2E;
    for (int i = lane; i < count; i += WARP) {
        float2 mark = __ldcg(marks + i);
        float fade = fast_exp2(mark.x * LOG2E - shift);
        sum += mark.y * fade;
        fades[i] = fade;
    }
    sum = warp_sum(sum);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < width; j++) total[j] = 0.0f;
    for (int first = 0; first < count; first += at_once) {
        float2 part[at_once][width / 2];
#pragma unroll
        for (int u = 0; u < at_once; u++)
#pragma unroll
            for (int j = 0; j < width / 2; j++)
                part[u][j] = __ldcg((const float2 *)(values + min(first + u, count - 1) * D + lane * width) + j);
#pragma unroll
        for (int u = 0; u < at_once; u++) {
            if (first + u >= count) break;
            float fade = fades[first + u];
#pragma unroll
            for (int j = 0; j < width / 2; j++) {
                total[2 * j] += part[u][j].x * fade;
                total[2 * j + 1] += part[u][j].y * fade;
            }
        }
    }
    float factor = normalizer(w, h, top, sum);
#pragma unroll
    for (int j = 0; j < width; j++) put(w.out, 0, 0, h, lane * width + j, total[j] * factor);
    __syncwarp();
}

template <int D, int STAGES, bool NORMED>
__device__ __forceinline__ void attend_long(const AttentionWork &w, const DecodeToken &f, u8 *dynamic) {
    const int pitch = 2 * D, bytes = KEYS * pitch, parts = D / 8;   // of a tile of keys, or of values
    __shared__ DecodeShared<D> shared;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    launch_dependents();
    i64 g = blockIdx.y;
    int heads = (int)(w.q.d[1] / w.k.d[1]), own = *(const int *)f.row;
    i64 all_begin, all_end;
    visible(w, 0, &all_begin, &all_end);
    int begin = (int)all_begin, end = (int)all_end, keys = end - begin;
    // Whole tiles, and at least one for each warp.
    int share = (keys + (int)gridDim.x - 1) / (int)gridDim.x;
    share = max((share + KEYS - 1) / KEYS * KEYS, WARPS * KEYS);
    int count = max((keys + share - 1) / share, 1), number = blockIdx.x;
    if (number >= count) return;
    int from = begin + number * share, to = min(from + share, end);
    // The block that sees the token's own key writes it to the cache, or the first.
    bool exists = own >= 0 && own < w.k.d[2];
    bool writes = own >= begin && own < end ? own >= from && own < to : number == 0;

    u8 *memory = dynamic + (256 - (u32)__cvta_generic_to_shared(dynamic) % 256) % 256;
    u8 *ring = memory + warp * STAGES * 2 * bytes;
    u32 ring_at = (u32)__cvta_generic_to_shared(ring);
    int first = from + warp * KEYS;      // of this warp's tiles
    int tiles = first < to ? (to - first + WARPS * KEYS - 1) / (WARPS * KEYS) : 0;
    // A row's 16-byte parts are permuted so that those of eight rows fall into different banks.
    int row = lane / parts, part = lane % parts;
    const u8 *key_from = row_at(w.k, 0, g, first + row) + part * 16, *value_from = row_at(w.v, 0, g, first + row) + part * 16;
    auto start = [&](int tile) {
        if (tile < tiles) {
            u32 slot = ring_at + tile % STAGES * 2 * bytes;
            int key = first + tile * WARPS * KEYS + row;
            i64 skipped = (i64)tile * WARPS * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS * parts / WARP; i++) {
                int r = row + i * (WARP / parts), at = key + i * (WARP / parts);
                u32 place = slot + r * pitch + (part ^ r % 8) * 16;
                i64 rows = skipped + i * (WARP / parts);
                copy_16(place, key_from + rows * w.k.s[2], at < to && at != own);
                copy_16(place + bytes, value_from + rows * w.v.s[2], at < to && at != own);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) start(i);

    float sine[D / 64], cosine[D / 64];
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        int n = lane + i * WARP;
        sine[i] = 0.0f;
        cosine[i] = 1.0f;
        if (n < f.rope.dims / 2)
            angle(rotation_of(f.rope, f.factors, n), f.rope.scale, *(const int *)f.position, &sine[i], &cosine[i]);
    }
    if (NORMED) {
        const float *of_query = (const float *)f.query_norm, *of_key = (const float *)f.key_norm;
        for (int i = threadIdx.x; i < D; i += THREADS) {
            shared.norms[0][i] = of_query ? of_query[i] : 1.0f;
            shared.norms[1][i] = of_key ? of_key[i] : 1.0f;
        }
    }
    for (int i = heads * D + threadIdx.x; i < COLUMNS * D; i += THREADS) shared.halves[i / D][i % D] = 0;
    if (threadIdx.x >= heads && threadIdx.x < COLUMNS) shared.factor[threadIdx.x] = 1.0f;
    if (NORMED) __syncthreads();
    wait_for_previous_kernel();
    rotate_heads<D, NORMED>(w, f, sine, cosine, g, heads, writes, shared);
    if (writes)
        for (int i = threadIdx.x; i < D; i += THREADS) shared.value[i] = float_to_half(((const float *)f.v)[g * D + i]);
    __syncthreads();
    if (writes && !exists && threadIdx.x == 0) {
        report(w.fault_word, f.fault_keys);
        report(w.fault_word, f.fault_values);
    }
    if (writes && exists && threadIdx.x < parts) {
        ((uint4 *)row_at(w.k, 0, g, own))[threadIdx.x] = ((const uint4 *)shared.key)[threadIdx.x];
        ((uint4 *)row_at(w.v, 0, g, own))[threadIdx.x] = ((const uint4 *)shared.value)[threadIdx.x];
    }

    u32 query[D / 16][2];
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        query[k][0] = *(const u32 *)&shared.halves[lane / 4][16 * k + pair];
        query[k][1] = *(const u32 *)&shared.halves[lane / 4][16 * k + 8 + pair];
    }
    float factor[2] = {shared.factor[pair], shared.factor[pair + 1]};
    float top[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, values[D / 16][4];
#pragma unroll
    for (int n = 0; n < D / 16; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) values[n][i] = 0.0f;
    // The row of one of four matrices whose address this lane passes to ldmatrix.
    u32 matrix = lane / 8, r = lane % 8;
    u32 key_at = ring_at + (matrix % 2 * 8 + r) * pitch + (matrix / 2 ^ r) * 16;
    u32 value_at = ring_at + bytes + (matrix / 2 * 8 + r) * pitch + (matrix % 2 ^ r) * 16;
    for (int tile = 0; tile < tiles; tile++) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        int at = first + tile * WARPS * KEYS;
        u32 slot = tile % STAGES * 2 * bytes;
        if (own >= at && own < min(at + KEYS, to)) {
            if (lane < 2 * parts) {
                const u16 *from = lane < parts ? shared.key : shared.value;
                u8 *line = ring + slot + lane / parts * bytes + (own - at) * pitch;
                *(uint4 *)(line + (part ^ (own - at) % 8) * 16) = ((const uint4 *)from)[part];
            }
            __syncwarp();
        }
        float scores[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) scores[i / 4][i % 4] = 0.0f;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            u32 rows[4];
            load_matrices(rows, (key_at + slot) ^ k * 32);
            mma<false>(scores[k % 2], rows, query[k][0], query[k][1]);
        }
        float weight[4];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float score[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                score[i] = (scores[0][2 * i + c] + scores[1][2 * i + c]) * factor[c];
                if (w.a.soft_cap > 0.0f) score[i] = w.a.soft_cap * tanhf(score[i] / w.a.soft_cap);
                if (at + lane / 4 + 8 * i >= to) score[i] = -INF;
            }
            float highest = fmaxf(top[c], fmaxf(score[0], score[1]));
            for (int o = 4; o < WARP; o *= 2) highest = fmaxf(highest, __shfl_xor_sync(FULL, highest, o));
            float shift = finite_top(highest) * LOG2E, fade = fast_exp2(top[c] * LOG2E - shift);
            top[c] = highest;
#pragma unroll
            for (int i = 0; i < 2; i++) weight[2 * i + c] = fast_exp2(score[i] * LOG2E - shift);
            sum[c] = sum[c] * fade + (weight[c] + weight[2 + c]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                values[n][c] *= fade;
                values[n][2 + c] *= fade;
            }
        }
        u32 low = transposed(floats_to_f16x2(weight[0], weight[1]));
        u32 high = transposed(floats_to_f16x2(weight[2], weight[3]));
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 rows[4];
            load_transposed(rows, (value_at + slot) ^ n * 32);
            mma<false>(values[n], rows, low, high);
        }
        __syncwarp();
        start(tile + STAGES);
    }
    wait_for_copies<0>();

    bool again = false;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        for (int o = 4; o < WARP; o *= 2) sum[c] += __shfl_xor_sync(FULL, sum[c], o);
        bool is_finite = fabsf(sum[c]) < INF;
#pragma unroll
        for (int n = 0; n < D / 16; n++)
            is_finite = is_finite && fabsf(values[n][c]) < INF && fabsf(values[n][2 + c]) < INF;
        again |= pair + c < heads && !is_finite;
    }
    // The warps' values take the place of the rings.
    __syncthreads();
    const int wide = D + 4;
    float *lines = (float *)memory, *mine = lines + warp * COLUMNS * wide;
    if (__any_sync(FULL, again)) {
        for (int head = 0; head < heads; head++)
            attend_keys<D>(w, shared, g, head, first, to, own, &shared.tops[warp][head], &shared.sums[warp][head],
                           mine + head * wide);
    } else {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (lane / 4 == 0) {
                shared.tops[warp][pair + c] = top[c];
                shared.sums[warp][pair + c] = sum[c];
            }
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                float *line = mine + (pair + c) * wide + 16 * n + lane / 4;
                line[0] = values[n][c];
                line[8] = values[n][2 + c];
            }
        }
    }
    __syncthreads();
    // A partition has its values, then come the maximum and the sum of each.
    i64 lines_before = g * heads * w.a.partitions;
    float *partial = (float *)w.partial;
    float2 *marks = (float2 *)(partial + w.q.d[1] * w.a.partitions * D);
    for (int i = threadIdx.x; i < heads * D; i += THREADS) {
        int head = i / D, c = i % D;
        float highest = -INF, total = 0.0f, value = 0.0f;
#pragma unroll
        for (int j = 0; j < WARPS; j++) highest = fmaxf(highest, shared.tops[j][head]);
        float shift = finite_top(highest) * LOG2E;
#pragma unroll
        for (int j = 0; j < WARPS; j++) {
            float fade = fast_exp2(shared.tops[j][head] * LOG2E - shift);
            total += shared.sums[j][head] * fade;
            value += lines[(j * COLUMNS + head) * wide + c] * fade;
        }
        if (count == 1) {
            put(w.out, 0, 0, g * heads + head, c, value * normalizer(w, g * heads + head, highest, total));
            continue;
        }
        i64 line = lines_before + head * w.a.partitions + number;
        partial[line * D + c] = value;
        if (c == 0) marks[line] = make_float2(highest, total);
    }
    if (count == 1) return;
    __threadfence();
    __syncthreads();
    u32 *counter = (u32 *)w.counters + g;
    if (threadIdx.x == 0) shared.is_last = atomicAdd(counter, 1) == (u32)count - 1;
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    for (int head = warp; head < heads; head += WARPS) {
        i64 line = lines_before + head * w.a.partitions;
        merge_partitions<D>(w, g * heads + head, count, partial + line * D, marks + line,
                            (float *)memory + warp * w.a.partitions);
    }
    if (threadIdx.x == 0) *counter = 0;
}

#define ATTENTION_LONG(name, d, stages, normed)                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                  \
        name(const __grid_constant__ AttentionWork w, const __grid_constant__ DecodeToken f) { \
        extern __shared__ __align__(16) u8 memory[];                                          \
        attend_long<d, stages, normed>(w, f, memory);                                         \
    }
ATTENTION_LONG(k_attention_long_64, 64, 6, false)
ATTENTION_LONG(k_attention_long_128, 128, 3, false)
ATTENTION_LONG(k_attention_long_64_normed, 64, 6, true)
ATTENTION_LONG(k_attention_long_128_normed, 128, 3, true)

#endif
