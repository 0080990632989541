// What the two files of attention share. It is put before each of them by the host.

struct Attention {
    float scale, soft_cap;   // soft cap 0: none
    i64 piece;               // keys in a piece
    i64 pieces;
};

struct Work {
    Tensor q, k, v, mask, spans, out;
    u64 partial;             // for each query, head and piece: `e` weighted values, the maximum, the sum
    u64 counters;            // for each query, or tile of them, and head: pieces that are done; 0 between launches
    Attention a;
    u64 faults;
    u32 fault;
};

// The keys that query `t` of a batch element sees; none, and a fault, where its span is out of range.
__device__ __forceinline__ void visible(const Work &w, i64 t, i64 *begin, i64 *end) {
    *begin = 0;
    *end = w.k.d[2];
    if (!w.spans.address) return;
    const int *span = (const int *)(w.spans.address + t * w.spans.s[2]);
    *begin = span[0];
    *end = span[1];
    if (*begin < 0 || *end > w.k.d[2] || *begin > *end) {
        report(w.faults, w.fault);
        *begin = *end = 0;
    }
}

// A score with its soft cap and mask.
__device__ __forceinline__ float adjusted(const Work &w, i64 b, i64 h, i64 t, float score, i64 key) {
    if (w.a.soft_cap > 0.0f) score = w.a.soft_cap * tanhf(score / w.a.soft_cap);
    if (w.mask.address) score += element(w.mask, b % w.mask.d[0], h % w.mask.d[1], t, key);
    return score;
}

// What scores are taken relative to: where nothing is visible, weights become 0 and not NaN.
__device__ __forceinline__ float finite_top(float top) { return top == -INF ? 0.0f : top; }

// Where piece number `number` of a query and head leaves what it found.
__device__ __forceinline__ float *partial_of(const Work &w, i64 line, i64 number) {
    return (float *)w.partial + (line * w.a.pieces + number) * (w.v.d[3] + 2);
}

// Brings together what the pieces of a query and head found, in order, by so many threads.
__device__ __forceinline__ void merge(const Work &w, i64 line, i64 b, i64 h, i64 t, i64 count, int thread, int threads) {
    int e = (int)w.v.d[3];
    const float *all = partial_of(w, line, 0);
    float top = -INF, sum = 0.0f;
    for (i64 i = 0; i < count; i++) top = fmaxf(top, __ldcg(all + i * (e + 2) + e));
    top = finite_top(top);
    for (i64 i = 0; i < count; i++)
        sum += __ldcg(all + i * (e + 2) + e + 1) * fast_exp(__ldcg(all + i * (e + 2) + e) - top);
    for (int c = thread; c < e; c += threads) {
        float total = 0.0f;
        for (i64 i = 0; i < count; i++)
            total += __ldcg(all + i * (e + 2) + c) * fast_exp(__ldcg(all + i * (e + 2) + e) - top);
        put(w.out, b, t, h, c, sum == 0.0f ? 0.0f : __fdividef(total, sum));
    }
}
