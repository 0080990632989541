// One value, or one list of indices, of each row.

extern "C" __global__ void k_sum_rows(Tensor x, Tensor out, int mean) {
    __shared__ float shared[32];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    float sum = 0.0f;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) sum += element(x, i0, i1, i2, c);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) put(out, i0, i1, i2, 0, mean ? sum / x.d[3] : sum);
}

// One block adds everything, always in the same order.
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

extern "C" __global__ void k_argmax(Tensor x, Tensor out) {
    __shared__ float values[256];
    __shared__ int indices[256];
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    float best = -INF;
    int at = 0x7fffffff;
    for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) {
        float v = element(x, i0, i1, i2, c);
        if (v > best || at == 0x7fffffff) { best = v; at = (int)c; }
    }
    values[threadIdx.x] = best;
    indices[threadIdx.x] = at;
    __syncthreads();
    for (int o = blockDim.x / 2; o > 0; o >>= 1) {
        if (threadIdx.x < o) {
            float v = values[threadIdx.x + o];
            int i = indices[threadIdx.x + o];
            bool better = v > values[threadIdx.x] || (v == values[threadIdx.x] && i < indices[threadIdx.x]);
            if (i != 0x7fffffff && (better || indices[threadIdx.x] == 0x7fffffff)) {
                values[threadIdx.x] = v;
                indices[threadIdx.x] = i;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) ((int *)out.address)[r] = indices[0];
}

// A number whose order is that of the values, equal for both zeros and the same for every value that is no number.
__device__ __forceinline__ u32 sortable(float v, int descending) {
    u32 bits = __float_as_uint(v != v ? __uint_as_float(0x7fffffffu) : v + 0.0f);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return descending ? ~bits : bits;
}

// Sorts the indices of a row, or of each piece of `padded` elements of it, by bitonic exchanges; equals keep their order.
// A row that is one piece gives its first `out.d[3]`; pieces go to `pieces`, rows of `x.d[3]` indices.
extern "C" __global__ void k_argsort(Tensor x, Tensor out, u64 pieces, int descending, int padded) {
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
                    // Whether `a` belongs after `b`: padding comes last, then by value, then by position.
                    bool after = a >= cols ? b < cols || a > b
                               : b >= cols ? false
                               : keys[a] == keys[b] ? a > b : keys[a] > keys[b];
                    if (after == ((c & size) == 0)) { order[c] = b; order[other] = a; }
                }
            }
            __syncthreads();
        }
    }
    if (pieces) {
        int *to = (int *)pieces + r * x.d[3] + start;
        for (int c = threadIdx.x; c < cols; c += blockDim.x) to[c] = (int)start + order[c];
    } else {
        for (int c = threadIdx.x; c < out.d[3]; c += blockDim.x) ((int *)row_at(out, i0, i1, i2))[c] = order[c];
    }
}

// Merges neighbouring sorted runs of `width` indices: each finds its new place by counting what the other run has before
// it. `to` is 0 in the last step, which gives the first `out.d[3]` of each row.
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
