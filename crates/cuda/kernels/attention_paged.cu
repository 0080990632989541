// Attention through page tables (mma; compute capability 8.0 and newer): each query has a sequence of its own, whose keys
// and values are in pages of 64 rows of a pool.
//
// A block takes a query, a head of the keys with all query heads that share it, as rows of a tensor-core tile, and
// partitions of its keys, 512 of them or more: so much, and the order of sums, does not depend on the other queries. A page
// of keys and values at a time is in shared memory as f16, double-buffered; each of four warps takes 16 of its keys, and
// the states of the four are added in order. The last block of a query and head merges the partitions.
//
// Of many queries, tiles that have one page table are left to attention_mma.cu.

#define KEYS PAGE
#define THREADS 128
#define WARPS (THREADS / WARP)

#if __CUDA_ARCH__ >= 800

// Starts to load rows of a page into shared memory; those outside `begin..end` are zero.
template <int D>
__device__ __forceinline__ void load_page(const Tensor &from, i64 g, i64 first, int begin, int end, u8 *to) {
    const int parts = D / 8;
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * parts; i += THREADS) {
        int row = i / parts, part = i % parts;
        u8 *at = to + row * pitch<D>() + part * 16;
        const u8 *source = row_at(from, 0, g, first + row);
        if (row < begin || row >= end)
            *(uint4 *)at = make_uint4(0, 0, 0, 0);
        else if (from.type == F16)
            copy_16((u32)__cvta_generic_to_shared(at), source + part * 16, true);
        else
            *(uint4 *)at = cache_to_f16x8(from.type, source, part);
    }
}

template <int D> __device__ __forceinline__ void attend_pages(const PagedWork &p, u8 *memory) {
    const AttentionWork &w = p.w;
    // Of each warp and row: the largest score and the sum of weights.
    __shared__ float tops[WARPS][16], sums[WARPS][16];
    __shared__ u32 finished;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, pair = lane % 4 * 2;
    i64 g = blockIdx.y, t = blockIdx.z;
    int heads = (int)(w.q.d[1] / w.k.d[1]);
    wait_for_previous_kernel();
    if (p.has_tiles && has_one_table(p, t / TILE_QUERIES * TILE_QUERIES)) return;
    i64 begin, end, table;
    visible_in_pages(p, t, &begin, &end, &table);
    const int *pages = (const int *)(p.pages.address + (begin < end ? table : 0) * p.pages.s[2]);
    i64 first_partition = begin / w.a.partition;
    i64 count = end > begin ? (end - 1) / w.a.partition - first_partition + 1 : 1;
    if (blockIdx.x >= count) return;

    // This lane's two heads, divided by a power of two each where they are too large for f16. Rows beyond the last are zero.
    u32 query[D / 16][4];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int head = lane / 4 + 8 * r;
        const float *row = (const float *)row_at(w.q, 0, g * heads + min(head, heads - 1), t);
        float2 v[D / 8];
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < D / 8; k++) {
            v[k] = *(const float2 *)(row + 8 * k + pair);
            v[k].x *= w.a.scale;
            v[k].y *= w.a.scale;
            largest = fmaxf(largest, fmaxf(fabsf(v[k].x), fabsf(v[k].y)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
        factor[r] = 1.0f;
        while (largest > 32768.0f * factor[r] && factor[r] < 1e30f) factor[r] *= 2.0f;
        float inverse = head < heads ? 1.0f / factor[r] : 0.0f;
#pragma unroll
        for (int k = 0; k < D / 8; k++)
            query[k / 2][k % 2 * 2 + r] = head < heads ? floats_to_f16x2(v[k].x * inverse, v[k].y * inverse) : 0;
    }
    const int bytes = KEYS * pitch<D>();
    u32 base = (u32)__cvta_generic_to_shared(memory), matrix = lane / 8;
    u32 key_at = base + (warp * 16 + matrix / 2 * 8 + lane % 8) * pitch<D>() + matrix % 2 * 16;
    u32 value_at = base + bytes + (warp * 16 + matrix % 2 * 8 + lane % 8) * pitch<D>() + matrix / 2 * 16;

    u32 done = 0;
    for (i64 number = blockIdx.x; number < count; number += gridDim.x, done++) {
        i64 from = max(begin, (first_partition + number) * w.a.partition);
        i64 to = min(end, (first_partition + number + 1) * w.a.partition);
        float top[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, values[D / 8][4];
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0.0f;
        auto start = [&](i64 page, int buffer) {
            i64 first = page * KEYS, rows = page_rows(p, pages, page);
            int low = (int)max(from - first, (i64)0), high = rows < 0 ? low : (int)min(to - first, (i64)KEYS);
            load_page<D>(w.k, g, max(rows, (i64)0), low, high, memory + 2 * buffer * bytes);
            load_page<D>(w.v, g, max(rows, (i64)0), low, high, memory + (2 * buffer + 1) * bytes);
        };
        i64 page = from / KEYS, last = to > from ? (to - 1) / KEYS : page - 1;
        int buffer = 0;
        if (page <= last) start(page, 0);
        commit_copies();
        for (; page <= last; page++, buffer ^= 1) {
            if (page < last) start(page + 1, buffer ^ 1);
            commit_copies();
            wait_for_copies<1>();
            __syncthreads();
            i64 first = page * KEYS + warp * 16;
            if (first < to && first + 16 > from) {
                float score[2][4];
#pragma unroll
                for (int i = 0; i < 8; i++) score[i / 4][i % 4] = 0.0f;
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    u32 keys[4];
                    load_matrices(keys, key_at + 2 * buffer * bytes + k * 32);
                    mma<false>(score[0], query[k], keys[0], keys[1]);
                    mma<false>(score[1], query[k], keys[2], keys[3]);
                }
                u32 weights[4];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float highest = top[r];
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float &one = score[n][2 * r + i];
                            i64 key = first + 8 * n + pair + i;
                            one *= factor[r];
                            if (w.a.soft_cap > 0.0f) one = w.a.soft_cap * tanhf(one / w.a.soft_cap);
                            if (key < from || key >= to) one = -INF;
                            highest = fmaxf(highest, one);
                        }
                    highest = fmaxf(highest, __shfl_xor_sync(FULL, highest, 1));
                    highest = fmaxf(highest, __shfl_xor_sync(FULL, highest, 2));
                    float shift = finite_top(highest) * LOG2E, fade = fast_exp2(top[r] * LOG2E - shift), part = 0.0f;
                    top[r] = highest;
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        float one = fast_exp2(score[n][2 * r] * LOG2E - shift);
                        float two = fast_exp2(score[n][2 * r + 1] * LOG2E - shift);
                        part += one + two;
                        weights[2 * n + r] = floats_to_f16x2(one, two);
                    }
                    sum[r] = sum[r] * fade + part;
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        values[n][2 * r] *= fade;
                        values[n][2 * r + 1] *= fade;
                    }
                }
#pragma unroll
                for (int n = 0; n < D / 16; n++) {
                    u32 part[4];
                    load_transposed(part, value_at + 2 * buffer * bytes + n * 32);
                    mma<false>(values[2 * n], weights, part[0], part[1]);
                    mma<false>(values[2 * n + 1], weights, part[2], part[3]);
                }
            }
            __syncthreads();
        }
        wait_for_copies<0>();
        // Adds the warps' states: their values take the place of keys and values.
        float *shared = (float *)memory;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            sum[r] += __shfl_xor_sync(FULL, sum[r], 1);
            sum[r] += __shfl_xor_sync(FULL, sum[r], 2);
            int head = lane / 4 + 8 * r;
            if (pair == 0) {
                tops[warp][head] = top[r];
                sums[warp][head] = sum[r];
            }
            if (head < heads)
#pragma unroll
                for (int n = 0; n < D / 8; n++)
                    *(float2 *)(shared + (warp * 16 + head) * D + 8 * n + pair) =
                        make_float2(values[n][2 * r], values[n][2 * r + 1]);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < heads * D; i += THREADS) {
            int head = i / D, c = i % D;
            float highest = -INF, total = 0.0f, value = 0.0f;
#pragma unroll
            for (int j = 0; j < WARPS; j++) highest = fmaxf(highest, tops[j][head]);
            float shift = finite_top(highest) * LOG2E;
#pragma unroll
            for (int j = 0; j < WARPS; j++) {
                float fade = fast_exp2(tops[j][head] * LOG2E - shift);
                total += sums[j][head] * fade;
                value += shared[(j * 16 + head) * D + c] * fade;
            }
            i64 h = g * heads + head;
            if (count == 1) {
                ((float *)row_at(w.out, 0, t, h))[c] = value * normalizer(w, h, highest, total);
                continue;
            }
            float *partial = partial_of(w, t * w.q.d[1] + h, number);
            partial[c] = value;
            if (c == 0) {
                partial[D] = highest;
                partial[D + 1] = total;
            }
        }
        __syncthreads();
    }
    if (count == 1) return;
    __threadfence();
    __syncthreads();
    // With one block for all partitions, nothing is counted.
    if (gridDim.x > 1) {
        u32 *counter = (u32 *)w.counters + t * gridDim.y + g;
        if (threadIdx.x == 0) {
            finished = atomicAdd(counter, done) + done;
            if (finished == (u32)count) *counter = 0;
        }
        __syncthreads();
        if (finished != (u32)count) return;
        __threadfence();
    }
    for (int head = warp; head < heads; head += WARPS) {
        i64 h = g * heads + head;
        merge(w, t * w.q.d[1] + h, 0, h, t, count, lane, WARP);
    }
}

#define ATTENTION_PAGED(d) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) \
        k_attention_paged_##d(const __grid_constant__ PagedWork p) { \
        extern __shared__ __align__(16) u8 memory[]; \
        attend_pages<d>(p, memory); \
    }
ATTENTION_PAGED(64)
ATTENTION_PAGED(80)
ATTENTION_PAGED(96)
ATTENTION_PAGED(128)

#endif
