// Attention in one pass over the visible keys, cut into pieces that are merged at the end.
//
// A warp takes 32 keys at a time: the lanes share the elements of a query, so that a key's row is one whole load; the
// 32 scores then lie one in each lane, and the running maximum is brought up to date once for all of them.

struct Attention {
    float scale, soft_cap;   // soft cap 0: none
    i64 piece;               // keys in a piece
    i64 pieces;
};

#define MAX_PER_LANE 16      // rows of at most 512 elements

// Partial results: for each query, head and piece, `e` floats of weighted values, then the maximum and the sum.
extern "C" __global__ void k_attention(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor spans, u64 partial,
                                       Attention a, u64 faults, u32 fault) {
    i64 piece = blockIdx.x, h = blockIdx.y, bt = blockIdx.z, t = bt % q.d[2], b = bt / q.d[2];
    i64 g = h / (q.d[1] / k.d[1]), d = q.d[3], e = v.d[3], n = k.d[2];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    i64 begin = 0, end = n;
    if (spans.address) {
        const int *span = (const int *)(spans.address + t * spans.s[2]);
        begin = span[0];
        end = span[1];
        if (begin < 0 || end > n || begin > end) {
            if (threadIdx.x == 0) report(faults, fault);
            begin = end = 0;
        }
    }
    begin = max(begin, piece * a.piece);
    end = min(end, (piece + 1) * a.piece);
    float query[MAX_PER_LANE], acc[MAX_PER_LANE];
    for (int i = 0; i < MAX_PER_LANE; i++) {
        i64 c = lane + i * WARP;
        query[i] = c < d ? element(q, b, h, t, c) * a.scale : 0.0f;
        acc[i] = 0.0f;
    }
    float highest = -INF, sum = 0.0f;
    for (i64 first = begin + warp * WARP; first < end; first += warps * WARP) {
        int tile = (int)min((i64)WARP, end - first);
        float score = -INF;
        for (int j = 0; j < tile; j++) {
            const u8 *row = row_at(k, b, g, first + j);
            float part = 0.0f;
            for (int i = 0; i < MAX_PER_LANE; i++) {
                i64 c = lane + i * WARP;
                if (c < d) part += query[i] * row_element(k.type, row, c);
            }
            part = warp_sum(part);
            if (lane == j) score = part;
        }
        if (lane < tile) {
            if (a.soft_cap > 0.0f) score = a.soft_cap * tanhf(score / a.soft_cap);
            if (mask.address) score += element(mask, b % mask.d[0], h % mask.d[1], t, first + lane);
        }
        float top = fmaxf(highest, warp_max(score));
        if (top == -INF) continue;
        float fade = expf(highest - top), p = expf(score - top);
        sum = sum * fade + warp_sum(p);
        highest = top;
        for (int i = 0; i < MAX_PER_LANE; i++) acc[i] *= fade;
        for (int j = 0; j < tile; j++) {
            float weight = __shfl_sync(FULL, p, j);
            if (weight == 0.0f) continue;
            const u8 *row = row_at(v, b, g, first + j);
            for (int i = 0; i < MAX_PER_LANE; i++) {
                i64 c = lane + i * WARP;
                if (c < e) acc[i] += weight * row_element(v.type, row, c);
            }
        }
    }
    // The warps of the block bring their parts together, in order.
    extern __shared__ float shared[];
    float *tops = shared, *sums = shared + warps, *values = shared + 2 * warps;
    if (lane == 0) { tops[warp] = highest; sums[warp] = sum; }
    for (int i = 0; i < MAX_PER_LANE; i++) {
        i64 c = lane + i * WARP;
        if (c < e) values[warp * e + c] = acc[i];
    }
    __syncthreads();
    float top = -INF;
    for (int w = 0; w < warps; w++) top = fmaxf(top, tops[w]);
    float *out = (float *)partial + ((bt * q.d[1] + h) * a.pieces + piece) * (e + 2);
    for (i64 c = threadIdx.x; c < e; c += blockDim.x) {
        float total = 0.0f;
        for (int w = 0; w < warps; w++) if (tops[w] > -INF) total += values[w * e + c] * expf(tops[w] - top);
        out[c] = total;
    }
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int w = 0; w < warps; w++) if (tops[w] > -INF) total += sums[w] * expf(tops[w] - top);
        out[e] = top;
        out[e + 1] = total;
    }
}

// The same for f16 keys and values of 32 × N elements: each lane has N neighbours of every row, and eight rows are under
// way at once.
template <int N> struct Word;
template <> struct Word<2> { typedef u32 type; };
template <> struct Word<4> { typedef uint2 type; };
template <> struct Word<8> { typedef uint4 type; };

template <int N>
__device__ __forceinline__ void half_rows(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor spans, u64 partial,
                                          Attention a, u64 faults, u32 fault) {
    const int AT_ONCE = 8;
    typedef typename Word<N>::type Load;
    i64 piece = blockIdx.x, h = blockIdx.y, bt = blockIdx.z, t = bt % q.d[2], b = bt / q.d[2];
    i64 g = h / (q.d[1] / k.d[1]), n = k.d[2];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    i64 begin = 0, end = n;
    if (spans.address) {
        const int *span = (const int *)(spans.address + t * spans.s[2]);
        begin = span[0];
        end = span[1];
        if (begin < 0 || end > n || begin > end) {
            if (threadIdx.x == 0) report(faults, fault);
            begin = end = 0;
        }
    }
    begin = max(begin, piece * a.piece);
    end = min(end, (piece + 1) * a.piece);
    float query[N], acc[N];
    for (int i = 0; i < N; i++) {
        query[i] = element(q, b, h, t, lane * N + i) * a.scale;
        acc[i] = 0.0f;
    }
    const u8 *keys = row_at(k, b, g, 0) + lane * N * 2, *values = row_at(v, b, g, 0) + lane * N * 2;
    float highest = -INF, sum = 0.0f;
    for (i64 first = begin + warp * WARP; first < end; first += warps * WARP) {
        int tile = (int)min((i64)WARP, end - first);
        float score = -INF;
        for (int j = 0; j < tile; j += AT_ONCE) {
            Load rows[AT_ONCE];
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) rows[r] = *(const Load *)(keys + (first + min(j + r, tile - 1)) * k.s[2]);
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                const u16 *halves = (const u16 *)&rows[r];
                float part = 0.0f;
                for (int i = 0; i < N; i++) part += query[i] * half_to_float(halves[i]);
                part = warp_sum(part);
                if (lane == j + r && j + r < tile) score = part;
            }
        }
        if (lane < tile) {
            if (a.soft_cap > 0.0f) score = a.soft_cap * tanhf(score / a.soft_cap);
            if (mask.address) score += element(mask, b % mask.d[0], h % mask.d[1], t, first + lane);
        }
        float top = fmaxf(highest, warp_max(score));
        if (top == -INF) continue;
        float fade = expf(highest - top), p = lane < tile ? expf(score - top) : 0.0f;
        sum = sum * fade + warp_sum(p);
        highest = top;
        for (int i = 0; i < N; i++) acc[i] *= fade;
        for (int j = 0; j < tile; j += AT_ONCE) {
            Load rows[AT_ONCE];
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) rows[r] = *(const Load *)(values + (first + min(j + r, tile - 1)) * v.s[2]);
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                // Lanes past the tile hold a weight of 0.
                float weight = __shfl_sync(FULL, p, j + r);
                const u16 *halves = (const u16 *)&rows[r];
                if (weight != 0.0f)
                    for (int i = 0; i < N; i++) acc[i] += weight * half_to_float(halves[i]);
            }
        }
    }
    extern __shared__ float shared[];
    const int e = 32 * N;
    float *tops = shared, *sums = shared + warps, *parts = shared + 2 * warps;
    if (lane == 0) { tops[warp] = highest; sums[warp] = sum; }
    for (int i = 0; i < N; i++) parts[warp * e + lane * N + i] = acc[i];
    __syncthreads();
    float top = -INF;
    for (int w = 0; w < warps; w++) top = fmaxf(top, tops[w]);
    float *out = (float *)partial + ((bt * q.d[1] + h) * a.pieces + piece) * (e + 2);
    for (int c = threadIdx.x; c < e; c += blockDim.x) {
        float total = 0.0f;
        for (int w = 0; w < warps; w++) if (tops[w] > -INF) total += parts[w * e + c] * expf(tops[w] - top);
        out[c] = total;
    }
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int w = 0; w < warps; w++) if (tops[w] > -INF) total += sums[w] * expf(tops[w] - top);
        out[e] = top;
        out[e + 1] = total;
    }
}

#define HALF_ROWS(name, n)                                                                                            \
    extern "C" __global__ void name(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor spans, u64 partial, Attention a, \
                                    u64 faults, u32 fault) {                                                           \
        half_rows<n>(q, k, v, mask, spans, partial, a, faults, fault);                                                 \
    }
HALF_ROWS(k_attention_64, 2)
HALF_ROWS(k_attention_128, 4)
HALF_ROWS(k_attention_256, 8)

// Merges the pieces of each query and head into `out [b, t, h, e]`.
extern "C" __global__ void k_attention_merge(u64 partial, Tensor out, i64 pieces) {
    i64 h = blockIdx.x, bt = blockIdx.y, t = bt % out.d[1], b = bt / out.d[1], e = out.d[3];
    const float *from = (const float *)partial + (bt * out.d[2] + h) * pieces * (e + 2);
    float top = -INF;
    for (i64 p = 0; p < pieces; p++) top = fmaxf(top, from[p * (e + 2) + e]);
    float sum = 0.0f;
    for (i64 p = 0; p < pieces; p++) {
        float m = from[p * (e + 2) + e];
        if (m > -INF) sum += from[p * (e + 2) + e + 1] * expf(m - top);
    }
    for (i64 c = threadIdx.x; c < e; c += blockDim.x) {
        float total = 0.0f;
        for (i64 p = 0; p < pieces; p++) {
            float m = from[p * (e + 2) + e];
            if (m > -INF) total += from[p * (e + 2) + c] * expf(m - top);
        }
        put(out, b, t, h, c, sum > 0.0f ? total / sum : 0.0f);
    }
}
