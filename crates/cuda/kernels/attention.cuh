// Shared by the attention kernels: the host puts this before their files.
//
// Keys are partitioned among blocks where there are too few queries to fill the device (flash-decoding). Each block
// leaves a partial result, and the last block of a query and head merges them.

struct Attention {
    float scale, soft_cap;   // soft cap 0: none
    i64 partition;           // keys of a partition
    i64 partitions;
};

struct AttentionWork {
    Tensor q, k, v, mask, spans, out;
    u64 partial;             // for each query, head and partition: `e` weighted values, the maximum, the sum
    u64 sinks;               // f32: an additional score of each head, without a value; 0: none
    u64 counters;            // for each query, or tile of queries, and head: finished partitions; 0 between launches
    Attention a;
    u64 fault_word;
    u32 fault;
};

// The span of keys that query `t` sees; empty, with a fault report, where it is out of range.
__device__ __forceinline__ void visible(const AttentionWork &w, i64 t, i64 *begin, i64 *end) {
    *begin = 0;
    *end = w.k.d[2];
    if (!w.spans.address) return;
    const int *span = (const int *)(w.spans.address + t * w.spans.s[2]);
    *begin = span[0];
    *end = span[1];
    if (*begin < 0 || *end > w.k.d[2] || *begin > *end) {
        report(w.fault_word, w.fault);
        *begin = *end = 0;
    }
}

// A score after soft cap and mask.
__device__ __forceinline__ float adjusted(const AttentionWork &w, i64 b, i64 h, i64 t, float score, i64 key) {
    if (w.a.soft_cap > 0.0f) score = w.a.soft_cap * tanhf(score / w.a.soft_cap);
    if (w.mask.address) score += element(w.mask, b % w.mask.d[0], h % w.mask.d[1], t, key);
    return score;
}

// The maximum that is subtracted from scores; 0 where all are masked, so that weights become 0 and not NaN.
__device__ __forceinline__ float finite_top(float top) { return top == -INF ? 0.0f : top; }

// The factor on the weighted values of a query and head: one over the sum of the weights, of which the head's sink is
// one more. `top` is the largest score.
__device__ __forceinline__ float normalizer(const AttentionWork &w, i64 h, float top, float sum) {
    if (!w.sinks) return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
    float sink = ((const float *)w.sinks)[h], base = finite_top(top), higher = fmaxf(base, sink);
    float fade = fast_exp(base - higher), total = sum * fade + fast_exp(sink - higher);
    return total == 0.0f ? 0.0f : __fdividef(fade, total);
}

#if __CUDA_ARCH__ >= 800
// Bytes from row to row of a tile of f16: padded so that the eight rows of an 8 × 8 matrix fall into different banks.
template <int D> __device__ __forceinline__ constexpr int pitch() { return 2 * D + 16; }
#endif

// The partial result of partition `number` of a query and head.
__device__ __forceinline__ float *partial_of(const AttentionWork &w, i64 line, i64 number) {
    return (float *)w.partial + (line * w.a.partitions + number) * (w.v.d[3] + 2);
}

// Merges the partial results of a query and head, in order, by `threads` threads.
__device__ __forceinline__ void merge(const AttentionWork &w, i64 line, i64 b, i64 h, i64 t, i64 count, int thread,
                                      int threads) {
    int e = (int)w.v.d[3];
    const float *all = partial_of(w, line, 0);
    float top = -INF, sum = 0.0f;
    for (i64 i = 0; i < count; i++) top = fmaxf(top, __ldcg(all + i * (e + 2) + e));
    float base = finite_top(top);
    for (i64 i = 0; i < count; i++)
        sum += __ldcg(all + i * (e + 2) + e + 1) * fast_exp(__ldcg(all + i * (e + 2) + e) - base);
    float factor = normalizer(w, h, top, sum);
    for (int c = thread; c < e; c += threads) {
        float total = 0.0f;
        for (i64 i = 0; i < count; i++)
            total += __ldcg(all + i * (e + 2) + c) * fast_exp(__ldcg(all + i * (e + 2) + e) - base);
        put(w.out, b, t, h, c, total * factor);
    }
}
