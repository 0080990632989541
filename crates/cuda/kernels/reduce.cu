// Reductions of rows: sum, mean, argmax, argsort.

extern "C" __global__ void k_sum_rows(Tensor x, Tensor out, int mean) {
    __shared__ float shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    float sum = 0.0f;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) sum += element(x, i0, i1, i2, c);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) put(out, i0, i1, i2, 0, mean ? sum / x.d[3] : sum);
}

// The sum of all elements by one block, always in the same order.
extern "C" __global__ void k_sum(Tensor x, Tensor out) {
    __shared__ double partial[1024];
    double sum = 0.0;
    for (i64 n = threadIdx.x; n < count(x); n += blockDim.x) {
        Position i = position(x, n);
        sum += element(x, i.i0, i.i1, i.i2, i.i3);
    }
    partial[threadIdx.x] = sum;
    __syncthreads();
    for (int o = blockDim.x / 2; o > 0; o >>= 1) {
        if (threadIdx.x < o) partial[threadIdx.x] += partial[threadIdx.x + o];
        __syncthreads();
    }
    if (threadIdx.x == 0) *(float *)out.address = (float)partial[0];
}

// The maximum over a block, in thread 0. `shared` holds 32 elements.
__device__ __forceinline__ u64 block_max_u64(u64 best, u64 *shared) {
    for (int o = 16; o > 0; o >>= 1) best = max(best, __shfl_xor_sync(FULL, best, o));
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
    __syncthreads();
    best = threadIdx.x < (blockDim.x + WARP - 1) / WARP ? shared[threadIdx.x] : 0;
    if (threadIdx.x < WARP)
        for (int o = 16; o > 0; o >>= 1) best = max(best, __shfl_xor_sync(FULL, best, o));
    return best;
}

extern "C" __global__ void k_argmax(Tensor x, Tensor out) {
    __shared__ u64 shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    u64 best = 0;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) best = max(best, ranked(element(x, i0, i1, i2, c), (int)c));
    best = block_max_u64(best, shared);
    if (threadIdx.x == 0) ((int *)out.address)[r] = (int)~(u32)best;
}

// What a block of `k_argmax_sum` found, where several share a row.
struct ArgmaxPart { u64 best; float sum; u32 unused; };

// Argmax and sum of contiguous f32 rows of whole float4s. Several blocks (y) may share one row: the last of them merges what
// all found, in order.
extern "C" __global__ void __launch_bounds__(1024, 1)
    k_argmax_sum(u64 x, int quads, u64 indices, u64 sums, u64 parts, u64 counter) {
    __shared__ u64 shared[32];
    __shared__ float floats[32];
    wait_for_previous_kernel();
    const float4 *row = (const float4 *)x + (i64)blockIdx.x * quads;
    u64 best = 0;
    float sum = 0.0f;
    int share = (quads + gridDim.y - 1) / gridDim.y, end = min(quads, (int)(blockIdx.y + 1) * share);
    for (int first = blockIdx.y * share + threadIdx.x; first < end; first += 6 * blockDim.x) {
        float4 v[6];
#pragma unroll
        for (int j = 0; j < 6; j++) {
            int i = first + j * blockDim.x;
            if (i < end) v[j] = row[i];
        }
#pragma unroll
        for (int j = 0; j < 6; j++) {
            int i = first + j * blockDim.x;
            if (i >= end) break;
            best = max(max(best, max(ranked(v[j].x, 4 * i), ranked(v[j].y, 4 * i + 1))),
                       max(ranked(v[j].z, 4 * i + 2), ranked(v[j].w, 4 * i + 3)));
            sum += (v[j].x + v[j].y) + (v[j].z + v[j].w);
        }
    }
    best = block_max_u64(best, shared);
    sum = block_sum(sum, floats);
    if (gridDim.y > 1) {
        if (threadIdx.x > 0) return;
        ArgmaxPart *all = (ArgmaxPart *)parts;
        all[blockIdx.y].best = best;
        all[blockIdx.y].sum = sum;
        __threadfence();
        if (atomicAdd((u32 *)counter, 1) != gridDim.y - 1) return;
        __threadfence();
        *(u32 *)counter = 0;
        best = 0;
        sum = 0.0f;
        for (u32 i = 0; i < gridDim.y; i++) {
            best = max(best, __ldcg(&all[i].best));
            sum += __ldcg(&all[i].sum);
        }
    }
    if (threadIdx.x == 0) {
        ((int *)indices)[blockIdx.x] = (int)~(u32)best;
        ((float *)sums)[blockIdx.x] = sum;
    }
}

// Bitonic argsort of a row, or of each run of `padded` elements of it; equal elements keep their order. A row of one
// run writes its first `out.d[3]` indices to `out`; otherwise runs go to `runs`, rows of `x.d[3]` indices.
extern "C" __global__ void k_argsort(Tensor x, Tensor out, u64 runs, int descending, int padded) {
    extern __shared__ u32 keys[];
    int *order = (int *)(keys + padded);
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    i64 start = (i64)blockIdx.y * padded;
    int cols = (int)min((i64)padded, x.d[3] - start);
    for (int c = threadIdx.x; c < padded; c += blockDim.x) {
        keys[c] = c < cols ? sortable(element(x, i0, i1, i2, start + c), descending) : 0;
        order[c] = c;
    }
    __syncthreads();
    for (int size = 2; size <= padded; size <<= 1) {
        for (int gap = size >> 1; gap > 0; gap >>= 1) {
            for (int c = threadIdx.x; c < padded; c += blockDim.x) {
                int other = c ^ gap;
                if (other > c) {
                    int a = order[c], b = order[other];
                    // Whether `a` sorts after `b`: padding last, then by value, then by index.
                    bool after = a >= cols ? b < cols || a > b
                               : b >= cols ? false
                               : keys[a] == keys[b] ? a > b : keys[a] > keys[b];
                    if (after == ((c & size) == 0)) { order[c] = b; order[other] = a; }
                }
            }
            __syncthreads();
        }
    }
    if (runs) {
        int *to = (int *)runs + r * x.d[3] + start;
        for (int c = threadIdx.x; c < cols; c += blockDim.x) to[c] = (int)start + order[c];
    } else {
        for (int c = threadIdx.x; c < out.d[3]; c += blockDim.x) ((int *)row_at(out, i0, i1, i2))[c] = order[c];
    }
}

// Merges pairs of adjacent sorted runs of `width` indices: each index finds its place by binary search in the other
// run. `to` is 0 in the last pass, which writes the first `out.d[3]` of each row to `out`.
extern "C" __global__ void k_merge_runs(Tensor x, Tensor out, u64 from, u64 to, i64 width, int descending) {
    i64 cols = x.d[3];
    FOR_EACH(n, count(x)) {
        i64 r = n / cols, c = n % cols, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
        const int *row = (const int *)from + r * cols;
        i64 both = c / (2 * width) * 2 * width, middle = min(both + width, cols), end = min(both + 2 * width, cols);
        bool first = c < middle;
        int mine = row[c];
        u32 key = sortable(element(x, i0, i1, i2, mine), descending);
        i64 low = first ? middle : both, high = first ? end : middle, start = low;
        while (low < high) {
            i64 half = (low + high) / 2;
            int other = row[half];
            u32 theirs = sortable(element(x, i0, i1, i2, other), descending);
            if (theirs < key || (theirs == key && other < mine)) low = half + 1;
            else high = half;
        }
        i64 place = both + (c - (first ? both : middle)) + (low - start);
        if (to) ((int *)to)[r * cols + place] = mine;
        else if (place < out.d[3]) ((int *)row_at(out, i0, i1, i2))[place] = mine;
    }
}

// Steps of a bitonic sort of `n` keys, from the given distance on: blocks of `size` keys become sorted, up and down in turn.
__device__ __forceinline__ void merge_bitonic(u64 *keys, int n, int size, int gap) {
    for (; gap > 0; gap >>= 1) {
        for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
            int low = 2 * i - (i & (gap - 1));
            u64 a = keys[low], b = keys[low + gap];
            if ((a > b) == ((low & size) == 0)) {
                keys[low] = b;
                keys[low + gap] = a;
            }
        }
        __syncthreads();
    }
}

// The largest elements of each run of `padded` elements of a row, largest first, of equal ones the first: `keep` of them. The
// elements of a row are those of a list of `length` indices at `from`, or all of them if it is 0; negative indices are none.
// `to` gets the indices, a list of `keep` for each run, or `out` if it is 0. `half` is the next power of two from `keep` on, and
// `padded` at most eight times as many as there are threads.
//
// Blocks of `half` keys are sorted up and down in turn. The smaller one of each pair of keys of neighbouring blocks is among
// the first `half` of both, and these are sorted by one more merge: half of the keys are dropped each time.
extern "C" __global__ void __launch_bounds__(512)
    k_top_of_runs(Tensor x, Tensor out, u64 from, u64 to, int length, int keep, int half, int padded) {
    extern __shared__ u64 ordered[];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    int start = blockIdx.y * padded;
    for (int c = threadIdx.x; c < padded; c += blockDim.x) {
        int index = start + c >= length ? -1 : from ? ((const int *)from)[r * length + start + c] : start + c;
        ordered[c] = index < 0 ? ~0ull : (u64)sortable(element(x, i0, i1, i2, index), 1) << 32 | (u32)index;
    }
    __syncthreads();
    for (int size = 2; size <= half; size <<= 1) merge_bitonic(ordered, padded, size, size >> 1);
    for (int n = padded; n > half; n >>= 1) {
        u64 least[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = threadIdx.x + j * blockDim.x, at = 2 * i - (i & (half - 1));
            if (i < n / 2) least[j] = min(ordered[at], ordered[at + half]);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int i = threadIdx.x + j * blockDim.x;
            if (i < n / 2) ordered[i] = least[j];
        }
        __syncthreads();
        merge_bitonic(ordered, n / 2, half, half >> 1);
    }
    int *list = to ? (int *)to + (r * gridDim.y + blockIdx.y) * keep : (int *)row_at(out, i0, i1, i2);
    for (int c = threadIdx.x; c < keep; c += blockDim.x) list[c] = (int)(u32)ordered[c];
}
