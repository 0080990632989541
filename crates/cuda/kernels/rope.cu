// Rotary position embedding: a thread per pair of elements; alone, or with the writing of keys and values to the cache.

// One of the pairs of a tensor of heads, or an element beyond the turned part.
struct Pair { i64 i0, i1, i2, a, b; bool turned; i64 number; };

__device__ __forceinline__ Pair pair_of(const Tensor &x, const Rope &rope, i64 n) {
    Pair p;
    u32 pairs = (u32)(x.d[3] - rope.dims / 2), r = (u32)(n / pairs);
    p.number = n % pairs;
    p.i2 = r % (u32)x.d[2];
    r /= (u32)x.d[2];
    p.i1 = r % (u32)x.d[1];
    p.i0 = r / (u32)x.d[1];
    p.turned = p.number < rope.dims / 2;
    p.a = p.turned ? (rope.half_split ? p.number : 2 * p.number) : p.number + rope.dims / 2;
    p.b = p.turned ? (rope.half_split ? p.number + rope.dims / 2 : 2 * p.number + 1) : p.a;
    return p;
}

__device__ __forceinline__ float2 turned(const Tensor &x, const Pair &p, float s, float c) {
    float a = element(x, p.i0, p.i1, p.i2, p.a), b = element(x, p.i0, p.i1, p.i2, p.b);
    return p.turned ? make_float2(a * c - b * s, a * s + b * c) : make_float2(a, a);
}

extern "C" __global__ void k_rope(Tensor x, Tensor positions, Tensor factors, Tensor out, Rope rope) {
    after_kernel_before();
    FOR_EACH(n, x.d[0] * x.d[1] * x.d[2] * (x.d[3] - rope.dims / 2)) {
        Pair p = pair_of(x, rope, n);
        float s = 0.0f, c = 1.0f;
        int at = *(const int *)(positions.address + p.i1 * positions.s[3]);
        if (p.turned) angle(turn_of(rope, factors, p.number), rope.scale, at, &s, &c);
        float2 v = turned(x, p, s, c);
        put(out, p.i0, p.i1, p.i2, p.a, v.x);
        if (p.turned) put(out, p.i0, p.i1, p.i2, p.b, v.y);
    }
}

// Queries turned; keys turned into rows of a cache; values into rows of another. Thread by thread: pairs of queries,
// pairs of keys, values.
struct RopeCache {
    Tensor q, out, k, v;             // queries and keys [1, tokens, heads, d]; values [1, 1, tokens, width]
    Tensor keys, values;             // caches [1, 1, rows, width]
    Tensor positions, ids, factors;
    Rope rope;
    u64 faults;
    u32 fault_keys, fault_values;
};

extern "C" __global__ void k_rope_cache(const __grid_constant__ RopeCache w) {
    i64 queries = w.q.d[1] * w.q.d[2] * (w.q.d[3] - w.rope.dims / 2);
    i64 keys = w.k.d[1] * w.k.d[2] * (w.k.d[3] - w.rope.dims / 2), values = w.v.d[2] * w.v.d[3];
    i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    bool is_query = n < queries, is_key = !is_query && n < queries + keys;
    const Tensor &x = is_query ? w.q : w.k;
    Pair p;
    Turn turn;
    if (is_query || is_key) {
        p = pair_of(x, w.rope, is_query ? n : n - queries);
        if (p.turned) turn = turn_of(w.rope, w.factors, p.number);
    }
    after_kernel_before();
    if (n >= queries + keys + values) return;
    if (!is_query && !is_key) {
        n -= queries + keys;
        i64 t = n / w.v.d[3], c = n % w.v.d[3], id = *(const int *)(w.ids.address + t * w.ids.s[3]);
        if (id < 0 || id >= w.values.d[2]) {
            if (c == 0) report(w.faults, w.fault_values);
            return;
        }
        put(w.values, 0, 0, id, c, element(w.v, 0, 0, t, c));
        return;
    }
    float s = 0.0f, c = 1.0f;
    if (p.turned) angle(turn, w.rope.scale, *(const int *)(w.positions.address + p.i1 * w.positions.s[3]), &s, &c);
    float2 v = turned(x, p, s, c);
    if (is_query) {
        put(w.out, 0, p.i1, p.i2, p.a, v.x);
        if (p.turned) put(w.out, 0, p.i1, p.i2, p.b, v.y);
        return;
    }
    i64 id = *(const int *)(w.ids.address + p.i1 * w.ids.s[3]), head = p.i2 * w.k.d[3];
    if (id < 0 || id >= w.keys.d[2]) {
        if (p.i2 == 0 && p.number == 0) report(w.faults, w.fault_keys);
        return;
    }
    put(w.keys, 0, 0, id, head + p.a, v.x);
    if (p.turned) put(w.keys, 0, 0, id, head + p.b, v.y);
}

// The same for many tokens: a block of threads for each, which finds an angle once for several heads.
extern "C" __global__ void k_rope_cache_many(const __grid_constant__ RopeCache w) {
    after_kernel_before();
    int t = blockIdx.x, half = w.rope.dims / 2, pairs = (int)w.q.d[3] - half;
    i64 id = *(const int *)(w.ids.address + t * w.ids.s[3]);
    bool keys_exist = id >= 0 && id < w.keys.d[2], values_exist = id >= 0 && id < w.values.d[2];
    if (threadIdx.x == 0 && !keys_exist) report(w.faults, w.fault_keys);
    if (threadIdx.x == 0 && !values_exist) report(w.faults, w.fault_values);
    int n = threadIdx.x % pairs, a = n + half, b = a;
    bool turns = n < half;
    float s = 0.0f, c = 1.0f;
    if (turns) {
        a = w.rope.half_split ? n : 2 * n;
        b = w.rope.half_split ? n + half : 2 * n + 1;
        int at = *(const int *)(w.positions.address + t * w.positions.s[3]);
        angle(turn_of(w.rope, w.factors, n), w.rope.scale, at, &s, &c);
    }
    // Threads that are no whole set of pairs turn nothing.
    int sets = blockDim.x / pairs, set = threadIdx.x / pairs;
    for (i64 h = set; set < sets && h < w.q.d[2]; h += sets) {
        float x = element(w.q, 0, t, h, a), y = element(w.q, 0, t, h, b);
        put(w.out, 0, t, h, a, turns ? x * c - y * s : x);
        if (turns) put(w.out, 0, t, h, b, x * s + y * c);
    }
    for (i64 h = set; set < sets && keys_exist && h < w.k.d[2]; h += sets) {
        float x = element(w.k, 0, t, h, a), y = element(w.k, 0, t, h, b);
        i64 head = h * w.k.d[3];
        put(w.keys, 0, 0, id, head + a, turns ? x * c - y * s : x);
        if (turns) put(w.keys, 0, 0, id, head + b, x * s + y * c);
    }
    for (i64 i = threadIdx.x; values_exist && i < w.v.d[3]; i += blockDim.x)
        put(w.values, 0, 0, id, i, element(w.v, 0, 0, t, i));
}
