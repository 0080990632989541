// Attention of many queries on tensor cores (compute capability 8.0 and newer).
//
// A block of threads takes 64 queries of a head, a warp 16 of them, and goes over the keys that any of them sees, a
// tile of 64 at a time. Keys and values lie in shared memory as f16, the next tile on its way while one is multiplied;
// scores stay in registers, where the product with the keys leaves them in just the places from which the product with
// the values takes them. Keys can be cut into pieces as in attention.cu.
//
// In a product of a tile, what a query does not see still takes part, with weight 0: a value there that is no number
// would spoil the sum. So where a result is no number, or a query too large for f16, the warp computes again, key by
// key.

#define QUERIES 64
#define KEYS 64
#define THREADS 128

#if __CUDA_ARCH__ >= 800

__device__ __forceinline__ u32 two_halves(float one, float two) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(two), "f"(one));
    return both;
}

// Adds the product of a 16 × 16 and a 16 × 8 matrix. A lane has rows `lane / 4` and that + 8 of the first matrix and of
// the sum.
__device__ __forceinline__ void multiply(float sum[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 × 8 matrices of halves, whose rows the lanes point to, eight for each.
__device__ __forceinline__ void load_matrices(u32 to[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void load_transposed(u32 to[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
}

// Eight elements of a row of Q8_0 as halves; `part` counts eights.
__device__ __forceinline__ uint4 eight_halves(const u8 *row, int part) {
    const u16 *block = (const u16 *)(row + part / 4 * 34);
    float scale = half_to_float(block[0]);
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u16 pair = block[1 + part % 4 * 4 + i];
        words[i] = two_halves(scale * (i8)(pair & 255), scale * (i8)(pair >> 8));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// An element of a key or value: f16 or Q8_0. All other types of row_element would be compiled along, a hundred times.
__device__ __forceinline__ float cached(const Tensor &t, const u8 *row, int i) {
    if (t.type == F16) return half_to_float(((const u16 *)row)[i]);
    const u8 *block = row + i / 32 * 34;
    return ((const i8 *)block)[2 + i % 32] * half_to_float(*(const u16 *)block);
}

// Rows of a tile lie so far apart that the eight rows of a matrix fall into different banks.
template <int D> __device__ __forceinline__ constexpr int pitch() { return 2 * D + 16; }

// Starts to bring a tile of keys or values into shared memory; rows from `end` on are zero.
template <int D>
__device__ __forceinline__ void bring(const Tensor &from, i64 b, i64 g, i64 first, i64 end, u8 *to) {
    const int parts = D / 8;
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * parts; i += THREADS) {
        int row = i / parts, part = i % parts;
        u8 *at = to + row * pitch<D>() + part * 16;
        const u8 *source = row_at(from, b, g, first + row);
        if (first + row >= end)
            *(uint4 *)at = make_uint4(0, 0, 0, 0);
        else if (from.type == F16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(at)),
                         "l"(source + part * 16) : "memory");
        else
            *(uint4 *)at = eight_halves(source, part);
    }
}

// Two queries, as the lanes that share them have them: four lanes together have the sum, and each has its columns of
// the values, two of every eight.
template <int D> struct Found { float top[2], sum[2], values[D / 8][4]; };

// What is found of the keys `begin..end`, one after another; each lane has a fourth of the sum of weights.
template <int D>
__device__ __forceinline__ void one_by_one(const Work &w, i64 b, i64 h, i64 g, const i64 t[2], const int begin[2],
                                           const int end[2], Found<D> &found) {
    int pair = threadIdx.x % 4 * 2;
    u32 four = 0xfu << (threadIdx.x % WARP / 4 * 4);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *query = (const float *)row_at(w.q, b, h, t[r]);
        float top = -INF, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) found.values[n][2 * r] = found.values[n][2 * r + 1] = 0.0f;
        for (int key = begin[r]; key < end[r]; key++) {
            const u8 *row = row_at(w.k, b, g, key);
            float score = 0.0f;
#pragma unroll 1
            for (int c = threadIdx.x % 4; c < D; c += 4) score += query[c] * w.a.scale * cached(w.k, row, c);
            score += __shfl_xor_sync(four, score, 1);
            score += __shfl_xor_sync(four, score, 2);
            score = adjusted(w, b, h, t[r], score, key);
            if (score == -INF) continue;
            float higher = fmaxf(top, score), fade = fast_exp(top - higher), weight = fast_exp(score - higher);
            top = higher;
            sum = sum * fade + 0.25f * weight;
            row = row_at(w.v, b, g, key);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &value = found.values[n][2 * r + i];
                    value = value * fade + weight * cached(w.v, row, 8 * n + pair + i);
                }
        }
        found.top[r] = top;
        found.sum[r] = sum;
    }
}

template <int D> __device__ __forceinline__ void tiles(const Work &w, u8 *memory) {
    __shared__ int lowest[THREADS / WARP], highest[THREADS / WARP];
    __shared__ bool is_last;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    i64 h = blockIdx.x, b = blockIdx.z / w.a.pieces, number = blockIdx.z % w.a.pieces, g = h / (w.q.d[1] / w.k.d[1]);
    // Later queries see more keys, mostly: they come first.
    i64 first_query = (i64)(gridDim.y - 1 - blockIdx.y) * QUERIES;
    after_kernel_before();

    // This lane's queries, and what each sees. Beyond the last query, it is that one again.
    i64 t[2];
    int begin[2], end[2], low = 0x7fffffff, high = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        t[r] = min(first_query + warp * 16 + lane / 4 + 8 * r, w.q.d[2] - 1);
        i64 from, to;
        visible(w, t[r], &from, &to);
        begin[r] = (int)from;
        end[r] = (int)to;
        if (from < to) {
            low = min(low, begin[r]);
            high = max(high, end[r]);
        }
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
    }
    if (low > high) low = high;
    // This block's piece of them.
    i64 first_piece = low / w.a.piece, count = high > low ? (high - 1) / w.a.piece - first_piece + 1 : 1;
    if (number < first_piece || number >= first_piece + count) return;
    low = max(low, (int)(number * w.a.piece));
    high = (int)min((i64)high, (number + 1) * w.a.piece);
    number -= first_piece;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        begin[r] = max(begin[r], low);
        end[r] = min(end[r], high);
    }
    int all_from = __reduce_max_sync(FULL, max(begin[0], begin[1]));   // all of the warp's queries see these keys,
    int all_to = __reduce_min_sync(FULL, min(end[0], end[1]));
    bool simple = !w.mask.address && w.a.soft_cap <= 0.0f;             // and a score is what the product says

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
            query[k / 2][k % 2 * 2 + r] = two_halves(v.x, v.y);
        }
    }
    Found<D> found;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        found.top[r] = -INF;
        found.sum[r] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) found.values[n][i] = 0.0f;

    const int bytes = KEYS * pitch<D>();
    int count_tiles = (high - low + KEYS - 1) / KEYS;
    auto sees = [&](int tile, int r) {
        int first = low + tile * KEYS;
        return begin[r] < end[r] && begin[r] < first + KEYS && end[r] > first;
    };
    // The next tile that any query of the block sees. All threads pass a barrier on the way, if there is another tile.
    auto next = [&](int tile) {
        do tile++;
        while (tile < count_tiles && !__syncthreads_or(sees(tile, 0) || sees(tile, 1)));
        return tile;
    };
    auto start = [&](int tile, int buffer) {
        int first = low + tile * KEYS;
        bring<D>(w.k, b, g, first, high, memory + 2 * buffer * bytes);
        bring<D>(w.v, b, g, first, high, memory + (2 * buffer + 1) * bytes);
    };
    // Where a lane points to for the products: a row of one of four matrices.
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
                    multiply(score[2 * n], query[k], keys[0], keys[1]);
                    multiply(score[2 * n + 1], query[k], keys[2], keys[3]);
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
                float top = found.top[r];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(score[n][2 * r], score[n][2 * r + 1]));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                float from = finite_top(top) * LOG2E;
                float fade = power_of_two(found.top[r] * LOG2E - from), sum = 0.0f;
                found.top[r] = top;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    float one = power_of_two(score[n][2 * r] * LOG2E - from);
                    float two = power_of_two(score[n][2 * r + 1] * LOG2E - from);
                    sum += one + two;
                    weight[n][r] = two_halves(one, two);
                }
                found.sum[r] = found.sum[r] * fade + sum;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    found.values[n][2 * r] *= fade;
                    found.values[n][2 * r + 1] *= fade;
                }
            }
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
                u32 weights[4] = {weight[2 * k][0], weight[2 * k][1], weight[2 * k + 1][0], weight[2 * k + 1][1]};
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    u32 values[4];
                    load_transposed(values, value_at + 2 * buffer * bytes + k * 16 * pitch<D>() + n * 32);
                    multiply(found.values[2 * n], weights, values[0], values[1]);
                    multiply(found.values[2 * n + 1], weights, values[2], values[3]);
                }
            }
        }
        buffer ^= 1;
        tile = then;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) again |= !(fabsf(found.sum[r]) < INF);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) again |= !(fabsf(found.values[n][i]) < INF);
    if (__any_sync(FULL, again)) one_by_one<D>(w, b, h, g, t, begin, end, found);

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = found.sum[r] + __shfl_xor_sync(FULL, found.sum[r], 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
        i64 line = (b * w.q.d[2] + t[r]) * w.q.d[1] + h;
        if (first_query + warp * 16 + lane / 4 + 8 * r >= w.q.d[2]) continue;
        float *to = count == 1 ? (float *)row_at(w.out, b, t[r], h) : partial_of(w, line, number);
        float scale = count > 1 ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2 *)(to + 8 * n + pair) =
                make_float2(found.values[n][2 * r] * scale, found.values[n][2 * r + 1] * scale);
        if (count > 1 && pair == 0) {
            to[D] = found.top[r];
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

#define TILES(name, d, blocks)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const __grid_constant__ Work w) { \
        extern __shared__ __align__(16) u8 memory[];                                                              \
        tiles<d>(w, memory);                                                                                      \
    }
TILES(k_attention_tiles_64, 64, 3)
TILES(k_attention_tiles_80, 80, 2)
TILES(k_attention_tiles_96, 96, 2)
TILES(k_attention_tiles_128, 128, 2)

#endif
