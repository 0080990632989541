// Attention through page tables (mma; compute capability 8.0 and newer): each query has a sequence of its own, whose keys
// and values are in pages of 64 rows of a pool.
//
// A block takes a query, a head of the keys with all query heads that share it, as rows of a tensor-core tile, and
// partitions of its keys, 512 of them or more: so much, and the order of sums, does not depend on the other queries. A page
// of keys and values at a time is in shared memory as f16, double-buffered. Each of four warps loads and takes 16 of its
// keys, and waits for no other; the states of the four are added in order. The last block of a query and head merges the
// partitions.
//
// Most of a short sequence's time is latency: nothing is waited for that is not needed yet, and pages are loaded first.
//
// Of many queries, tiles that have one page table are left to attention_mma.cu.

#define KEYS PAGE
#define THREADS 128
#define WARPS (THREADS / WARP)
#define WARP_KEYS (KEYS / WARPS)

#if __CUDA_ARCH__ >= 800

// Converts this warp's rows of a page. Not inline: most caches are f16, and a kernel without this code starts sooner.
template <int D>
__device__ __noinline__ void convert_rows(u32 type, const u8 *page, i64 stride, int begin, int end, u8 *to) {
    const int parts = D / 8;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int i = lane; i < WARP_KEYS * parts; i += WARP) {
        int row = warp * WARP_KEYS + i / parts, part = i % parts;
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (row >= begin && row < end) eight = cache_to_f16x8(type, page + row * stride, part);
        *(uint4 *)(to + row * pitch<D>() + part * 16) = eight;
    }
}

// Starts to load this warp's rows of a page into shared memory; those outside `begin..end` are zero.
template <int D>
__device__ __forceinline__ void load_rows(const Tensor &from, i64 g, i64 first, int begin, int end, u8 *to) {
    const int parts = D / 8;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u8 *page = row_at(from, 0, g, first);
    if (from.type == F16) {
#pragma unroll
        for (int i = lane; i < WARP_KEYS * parts; i += WARP) {
            int row = warp * WARP_KEYS + i / parts, part = i % parts;
            u8 *at = to + row * pitch<D>() + part * 16;
            copy_16((u32)__cvta_generic_to_shared(at), page + row * from.s[2] + part * 16, row >= begin && row < end);
        }
        return;
    }
    convert_rows<D>(from.type, page, from.s[2], begin, end, to);
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
    if (p.tile && has_one_table(p, t / p.tile)) return;
    // Loads of this lane's two heads.
    float2 row[2][D / 8];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *from = (const float *)row_at(w.q, 0, g * heads + min(lane / 4 + 8 * r, heads - 1), t);
#pragma unroll
        for (int k = 0; k < D / 8; k++)
            row[r][k] = 8 * r < heads ? *(const float2 *)(from + 8 * k + pair) : make_float2(0.0f, 0.0f);
    }
    i64 begin, end, table;
    visible_in_pages(p, t, &begin, &end, &table);
    const int *pages = (const int *)(p.pages.address + (begin < end ? table : 0) * p.pages.s[2]);
    i64 first_partition = begin / w.a.partition;
    i64 count = end > begin ? (end - 1) / w.a.partition - first_partition + 1 : 1;
    if (blockIdx.x >= count) return;

    const int bytes = KEYS * pitch<D>();
    u32 base = (u32)__cvta_generic_to_shared(memory), matrix = lane / 8;
    u32 key_at = base + (warp * 16 + matrix / 2 * 8 + lane % 8) * pitch<D>() + matrix % 2 * 16;
    u32 value_at = base + bytes + (warp * 16 + matrix % 2 * 8 + lane % 8) * pitch<D>() + matrix / 2 * 16;

    // The keys of a partition, its next page and its last.
    i64 from, to, page, last, looked_up;
    int entry = 0;
    auto start = [&](i64 page, int buffer) {
        if (page <= last) {
            // Of 32 pages, each lane looks up one.
            if (page == looked_up + WARP) {
                looked_up = page;
                entry = page + lane <= last ? pages[page + lane] : 0;
            }
            i64 first = page * KEYS, place = __shfl_sync(FULL, entry, (int)(page - looked_up));
            bool exists = place >= 0 && (place + 1) * PAGE <= w.k.d[2];
            if (!exists) report(w.fault_word, p.fault_page);
            int low = (int)max(from - first, (i64)0), high = exists ? (int)min(to - first, (i64)KEYS) : low;
            i64 rows = exists ? place * PAGE : 0;
            load_rows<D>(w.k, g, rows, low, high, memory + 2 * buffer * bytes);
            load_rows<D>(w.v, g, rows, low, high, memory + (2 * buffer + 1) * bytes);
        }
        commit_copies();
    };
    auto start_partition = [&](i64 number) {
        from = max(begin, (first_partition + number) * w.a.partition);
        to = min(end, (first_partition + number + 1) * w.a.partition);
        page = from / KEYS;
        last = to > from ? (to - 1) / KEYS : page - 1;
        looked_up = page - WARP;
#pragma unroll 1
        for (int i = 0; i < 2; i++) start(page + i, i);
    };
    start_partition(blockIdx.x);

    // This lane's two heads as f16, divided by a power of two each where they are too large for it. Rows beyond the last
    // are zero.
    u32 query[D / 16][4];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < D / 8; k++) {
            row[r][k].x *= w.a.scale;
            row[r][k].y *= w.a.scale;
            largest = fmaxf(largest, fmaxf(fabsf(row[r][k].x), fabsf(row[r][k].y)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
        factor[r] = 1.0f;
        while (largest > 32768.0f * factor[r] && factor[r] < 1e30f) factor[r] *= 2.0f;
        float inverse = 1.0f / factor[r];
        bool is_head = lane / 4 + 8 * r < heads;
#pragma unroll
        for (int k = 0; k < D / 8; k++)
            query[k / 2][k % 2 * 2 + r] = is_head ? floats_to_f16x2(row[r][k].x * inverse, row[r][k].y * inverse) : 0;
    }
    u32 done = 0;
    for (i64 number = blockIdx.x; number < count; number += gridDim.x, done++) {
        if (done > 0) start_partition(number);
        float top[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f}, values[D / 8][4];
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0.0f;
        for (int buffer = 0; page <= last; page++, buffer ^= 1) {
            wait_for_copies<1>();
            __syncwarp();
            i64 first = page * KEYS + warp * 16;
            if (first < to && first + 16 > from) {
                // Of odd steps apart, so that fewer depend on each other.
                float score[2][4], odd[2][4];
#pragma unroll
                for (int i = 0; i < 8; i++) score[i / 4][i % 4] = odd[i / 4][i % 4] = 0.0f;
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    u32 keys[4];
                    load_matrices(keys, key_at + 2 * buffer * bytes + k * 32);
                    mma<false>(k % 2 ? odd[0] : score[0], query[k], keys[0], keys[1]);
                    mma<false>(k % 2 ? odd[1] : score[1], query[k], keys[2], keys[3]);
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
                            one = (one + odd[n][2 * r + i]) * factor[r];
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
            __syncwarp();
            start(page + 2, buffer);
        }
        wait_for_copies<0>();
        __syncthreads();
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
