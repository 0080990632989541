// Rotary position embedding, one thread per rotated pair: alone, or fused with the KV-cache write.

// The two elements of a head that a thread rotates, or one element (a = b) beyond the rotated dimensions.
struct Pair { i64 i0, i1, i2, a, b; bool is_rotated; i64 number; };

__device__ __forceinline__ Pair pair_of(const Tensor &x, const Rope &rope, i64 n) {
    Pair p;
    u32 pairs = (u32)(x.d[3] - rope.dims / 2), r = (u32)(n / pairs);
    p.number = n % pairs;
    p.i2 = r % (u32)x.d[2];
    r /= (u32)x.d[2];
    p.i1 = r % (u32)x.d[1];
    p.i0 = r / (u32)x.d[1];
    p.is_rotated = p.number < rope.dims / 2;
    p.a = p.is_rotated ? (rope.half_split ? p.number : 2 * p.number) : p.number + rope.dims / 2;
    p.b = p.is_rotated ? (rope.half_split ? p.number + rope.dims / 2 : 2 * p.number + 1) : p.a;
    return p;
}

__device__ __forceinline__ float2 rotated(const Tensor &x, const Pair &p, float s, float c) {
    float a = element(x, p.i0, p.i1, p.i2, p.a), b = element(x, p.i0, p.i1, p.i2, p.b);
    return p.is_rotated ? make_float2(a * c - b * s, a * s + b * c) : make_float2(a, a);
}

extern "C" __global__ void k_rope(Tensor x, Tensor positions, Tensor factors, Tensor out, Rope rope) {
    wait_for_previous_kernel();
    FOR_EACH(n, x.d[0] * x.d[1] * x.d[2] * (x.d[3] - rope.dims / 2)) {
        Pair p = pair_of(x, rope, n);
        float s = 0.0f, c = 1.0f;
        int at = *(const int *)(positions.address + p.i1 * positions.s[3]);
        if (p.is_rotated) angle(rotation_of(rope, factors, p.number), rope.scale, at, &s, &c);
        float2 v = rotated(x, p, s, c);
        put(out, p.i0, p.i1, p.i2, p.a, v.x);
        if (p.is_rotated) put(out, p.i0, p.i1, p.i2, p.b, v.y);
    }
}

// RoPE on queries; RoPE on keys, written to rows of the key cache; values written to rows of the value cache. Threads
// take pairs of the queries, then pairs of the keys, then values.
struct RopeSetRows {
    Tensor q, out, k, v;             // queries and keys [1, tokens, heads, d]; values [1, 1, tokens, width]
    Tensor keys, values;             // caches [1, 1, rows, width]
    Tensor positions, ids, factors;
    Rope rope;
    u64 fault_word;
    u32 fault_keys, fault_values;
};

extern "C" __global__ void k_rope_set_rows(const __grid_constant__ RopeSetRows w) {
    i64 queries = w.q.d[1] * w.q.d[2] * (w.q.d[3] - w.rope.dims / 2);
    i64 keys = w.k.d[1] * w.k.d[2] * (w.k.d[3] - w.rope.dims / 2), values = w.v.d[2] * w.v.d[3];
    i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    bool is_query = n < queries, is_key = !is_query && n < queries + keys;
    const Tensor &x = is_query ? w.q : w.k;
    Pair p;
    Rotation rotation;
    if (is_query || is_key) {
        p = pair_of(x, w.rope, is_query ? n : n - queries);
        if (p.is_rotated) rotation = rotation_of(w.rope, w.factors, p.number);
    }
    wait_for_previous_kernel();
    if (n >= queries + keys + values) return;
    if (!is_query && !is_key) {
        n -= queries + keys;
        i64 t = n / w.v.d[3], c = n % w.v.d[3], id = *(const int *)(w.ids.address + t * w.ids.s[3]);
        if (id < 0 || id >= w.values.d[2]) {
            if (c == 0) report(w.fault_word, w.fault_values);
            return;
        }
        put(w.values, 0, 0, id, c, element(w.v, 0, 0, t, c));
        return;
    }
    float s = 0.0f, c = 1.0f;
    if (p.is_rotated)
        angle(rotation, w.rope.scale, *(const int *)(w.positions.address + p.i1 * w.positions.s[3]), &s, &c);
    float2 v = rotated(x, p, s, c);
    if (is_query) {
        put(w.out, 0, p.i1, p.i2, p.a, v.x);
        if (p.is_rotated) put(w.out, 0, p.i1, p.i2, p.b, v.y);
        return;
    }
    i64 id = *(const int *)(w.ids.address + p.i1 * w.ids.s[3]), head = p.i2 * w.k.d[3];
    if (id < 0 || id >= w.keys.d[2]) {
        if (p.i2 == 0 && p.number == 0) report(w.fault_word, w.fault_keys);
        return;
    }
    put(w.keys, 0, 0, id, head + p.a, v.x);
    if (p.is_rotated) put(w.keys, 0, 0, id, head + p.b, v.y);
}

// Four elements to a row of a cache, from element `c` on.
__device__ __forceinline__ void put_four(const Tensor &to, i64 row, i64 c, float4 v) {
    u8 *at = row_at(to, 0, 0, row);
    if (to.type == F16 && to.s[3] == 2 && ((u64)at + c * 2) % 8 == 0) {
        *(uint2 *)(at + c * 2) =
            make_uint2((u32)float_to_half(v.x) | (u32)float_to_half(v.y) << 16, (u32)float_to_half(v.z) | (u32)float_to_half(v.w) << 16);
        return;
    }
    put(to, 0, 0, row, c, v.x);
    put(to, 0, 0, row, c + 1, v.y);
    put(to, 0, 0, row, c + 2, v.z);
    put(to, 0, 0, row, c + 3, v.w);
}

// The same for many tokens: one block per token, which computes each angle once for all heads. Heads have at most 256
// elements. Where all of a head is rotated and its elements are adjacent, a thread takes eight elements at a time: four pairs.
extern "C" __global__ void k_rope_set_rows_batch(const __grid_constant__ RopeSetRows w) {
    __shared__ float2 angles[128];
    int t = blockIdx.x, d = (int)w.q.d[3], half = w.rope.dims / 2, pairs = d - half;
    Rotation rotation;
    if (threadIdx.x < half) rotation = rotation_of(w.rope, w.factors, threadIdx.x);
    wait_for_previous_kernel();
    i64 id = *(const int *)(w.ids.address + t * w.ids.s[3]);
    bool keys_exist = id >= 0 && id < w.keys.d[2], values_exist = id >= 0 && id < w.values.d[2];
    if (threadIdx.x == 0 && !keys_exist) report(w.fault_word, w.fault_keys);
    if (threadIdx.x == 0 && !values_exist) report(w.fault_word, w.fault_values);
    if (threadIdx.x < half) {
        float s, c;
        angle(rotation, w.rope.scale, *(const int *)(w.positions.address + t * w.positions.s[3]), &s, &c);
        angles[threadIdx.x] = make_float2(s, c);
    }
    __syncthreads();
    auto is_in_fours = [&](const Tensor &x) {
        return x.type == F32 && x.s[3] == 4 && (x.address | (u64)x.s[1] | (u64)x.s[2]) % 16 == 0;
    };
    if (2 * half == d && d % 8 == 0 && is_in_fours(w.q) && is_in_fours(w.k) && is_in_fours(w.out)) {
        // Four pairs of a head, rotated; elements `a` and four further, `b` and four further.
        auto rotate = [&](const Tensor &x, i64 h, int n, float4 &one, float4 &two) {
            int a = w.rope.half_split ? n : 2 * n, b = w.rope.half_split ? n + half : 2 * n + 4;
            const u8 *row = row_at(x, 0, t, h);
            one = *(const float4 *)(row + a * 4);
            two = *(const float4 *)(row + b * 4);
            float4 from = *(const float4 *)(angles + n), further = *(const float4 *)(angles + n + 2);
            float s[4] = {from.x, from.z, further.x, further.z}, c[4] = {from.y, from.w, further.y, further.w};
            if (w.rope.half_split) {
                float4 x0 = one, x1 = two;
                one = make_float4(x0.x * c[0] - x1.x * s[0], x0.y * c[1] - x1.y * s[1], x0.z * c[2] - x1.z * s[2], x0.w * c[3] - x1.w * s[3]);
                two = make_float4(x0.x * s[0] + x1.x * c[0], x0.y * s[1] + x1.y * c[1], x0.z * s[2] + x1.z * c[2], x0.w * s[3] + x1.w * c[3]);
            } else {
                one = make_float4(one.x * c[0] - one.y * s[0], one.x * s[0] + one.y * c[0], one.z * c[1] - one.w * s[1], one.z * s[1] + one.w * c[1]);
                two = make_float4(two.x * c[2] - two.y * s[2], two.x * s[2] + two.y * c[2], two.z * c[3] - two.w * s[3], two.z * s[3] + two.w * c[3]);
            }
        };
        int groups = d / 8;
        for (int i = threadIdx.x; i < w.q.d[2] * groups; i += blockDim.x) {
            int h = i / groups, n = i % groups * 4;
            float4 one, two;
            rotate(w.q, h, n, one, two);
            u8 *to = row_at(w.out, 0, t, h);
            *(float4 *)(to + (w.rope.half_split ? n : 2 * n) * 4) = one;
            *(float4 *)(to + (w.rope.half_split ? n + half : 2 * n + 4) * 4) = two;
        }
        for (int i = threadIdx.x; keys_exist && i < w.k.d[2] * groups; i += blockDim.x) {
            int h = i / groups, n = i % groups * 4;
            float4 one, two;
            rotate(w.k, h, n, one, two);
            put_four(w.keys, id, (i64)h * d + (w.rope.half_split ? n : 2 * n), one);
            put_four(w.keys, id, (i64)h * d + (w.rope.half_split ? n + half : 2 * n + 4), two);
        }
    } else {
        // A set of threads covers one head; threads beyond the last whole set are idle.
        int sets = blockDim.x / pairs, set = threadIdx.x / pairs, n = threadIdx.x % pairs, a = n + half, b = a;
        bool rotates = n < half;
        float s = 0.0f, c = 1.0f;
        if (rotates) {
            a = w.rope.half_split ? n : 2 * n;
            b = w.rope.half_split ? n + half : 2 * n + 1;
            s = angles[n].x;
            c = angles[n].y;
        }
        for (i64 h = set; set < sets && h < w.q.d[2]; h += sets) {
            float x = element(w.q, 0, t, h, a), y = element(w.q, 0, t, h, b);
            put(w.out, 0, t, h, a, rotates ? x * c - y * s : x);
            if (rotates) put(w.out, 0, t, h, b, x * s + y * c);
        }
        for (i64 h = set; set < sets && keys_exist && h < w.k.d[2]; h += sets) {
            float x = element(w.k, 0, t, h, a), y = element(w.k, 0, t, h, b);
            i64 head = h * d;
            put(w.keys, 0, 0, id, head + a, rotates ? x * c - y * s : x);
            if (rotates) put(w.keys, 0, 0, id, head + b, x * s + y * c);
        }
    }
    if (!values_exist) return;
    const u8 *from = row_at(w.v, 0, 0, t);
    if (w.v.type == F32 && w.v.s[3] == 4 && (u64)from % 16 == 0 && w.v.d[3] % 4 == 0) {
        for (i64 i = threadIdx.x * 4; i < w.v.d[3]; i += blockDim.x * 4) put_four(w.values, id, i, *(const float4 *)(from + i * 4));
    } else {
        for (i64 i = threadIdx.x; i < w.v.d[3]; i += blockDim.x) put(w.values, 0, 0, id, i, element(w.v, 0, 0, t, i));
    }
}
