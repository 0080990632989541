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

// Sorts the indices of a row of at most 4096 elements by bitonic exchanges; equals keep their order. Writes the
// first `out.d[3]`.
extern "C" __global__ void k_argsort(Tensor x, Tensor out, int descending, int padded) {
    extern __shared__ float keys[];
    int *order = (int *)(keys + padded);
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    int cols = (int)x.d[3];
    for (int c = threadIdx.x; c < padded; c += blockDim.x) {
        keys[c] = c < cols ? element(x, i0, i1, i2, c) : 0.0f;
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
                               : keys[a] == keys[b] ? a > b
                               : descending ? keys[a] < keys[b] : keys[a] > keys[b];
                    if (after == ((c & size) == 0)) { order[c] = b; order[other] = a; }
                }
            }
            __syncthreads();
        }
    }
    for (int c = threadIdx.x; c < out.d[3]; c += blockDim.x) ((int *)row_at(out, i0, i1, i2))[c] = order[c];
}
