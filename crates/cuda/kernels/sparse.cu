// Matrix multiplications with the rows of active neurons. Rows stay as they are in the file, a neuron's row in one piece; rows
// of inactive neurons are not read. Sums are taken in an order that depends on neither: skipping changes no bit.

#define ROW_WARPS 8        // rows of a block of k_mul_mat_sparse
#define SPARSE_TOKENS 8    // tokens that a warp takes one after the other
#define CHUNK_ROWS 256     // rows that a block of k_axpy_sparse sums
#define AXPY_THREADS 256

// Four elements of a row from column `c` on, a multiple of four. With `fast`, rows are aligned to four elements.
__device__ __forceinline__ float4 four_elements(u32 type, const u8 *row, i64 c, i64 columns, bool fast) {
    if (fast) {
        switch (type) {
        case F32: return __ldcs((const float4 *)(row + 4 * c));
        case F16: {
            uint2 pairs = __ldcs((const uint2 *)(row + 2 * c));
            return make_float4(half_to_float((u16)pairs.x), half_to_float((u16)(pairs.x >> 16)),
                               half_to_float((u16)pairs.y), half_to_float((u16)(pairs.y >> 16)));
        }
        case BF16: {
            uint2 pairs = __ldcs((const uint2 *)(row + 2 * c));
            return make_float4(bf16_to_float((u16)pairs.x), bf16_to_float((u16)(pairs.x >> 16)),
                               bf16_to_float((u16)pairs.y), bf16_to_float((u16)(pairs.y >> 16)));
        }
        case Q8_0: {
            const u16 *block = (const u16 *)(row + c / 32 * Q8_0_BYTES);
            float scale = half_to_float(block[0]);
            u32 low = block[1 + c % 32 / 2], high = block[2 + c % 32 / 2];
            return make_float4(scale * (i8)low, scale * (i8)(low >> 8), scale * (i8)high, scale * (i8)(high >> 8));
        }
        case Q4_0: {
            const u16 *block = (const u16 *)(row + c / 32 * Q4_0_BYTES);
            float scale = half_to_float(block[0]);
            int at = (int)(c % 32), shift = at < 16 ? 0 : 4;
            u32 low = block[1 + at % 16 / 2] >> shift, high = block[2 + at % 16 / 2] >> shift;
            return make_float4(scale * ((int)(low & 15) - 8), scale * ((int)(low >> 8 & 15) - 8),
                               scale * ((int)(high & 15) - 8), scale * ((int)(high >> 8 & 15) - 8));
        }
        }
    }
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    v.x = row_element(type, row, c);
    if (c + 1 < columns) v.y = row_element(type, row, c + 1);
    if (c + 2 < columns) v.z = row_element(type, row, c + 2);
    if (c + 3 < columns) v.w = row_element(type, row, c + 3);
    return v;
}

// Four elements of a dense row of f32, at any address.
__device__ __forceinline__ float4 four_floats(const u8 *row, i64 c, i64 columns, bool fast) {
    if (fast) return *(const float4 *)(row + 4 * c);
    const float *x = (const float *)row;
    return make_float4(x[c], c + 1 < columns ? x[c + 1] : 0.0f, c + 2 < columns ? x[c + 2] : 0.0f,
                       c + 3 < columns ? x[c + 3] : 0.0f);
}

// `out[t, i]` = gate of row i's neuron × (w[i] · x[t]). A warp takes a row of `w` for up to eight tokens.
extern "C" __global__ void __launch_bounds__(ROW_WARPS *WARP)
    k_mul_mat_sparse(Tensor w, Tensor x, Tensor gates, Tensor ids, Tensor out, int fast, int skip, u64 fault_word,
                     u32 fault) {
    i64 row = (i64)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= w.d[2]) return;
    i64 neuron = row;
    if (ids.address) {
        neuron = *(const int *)(ids.address + row * ids.s[3]);
        if (neuron < -1 || neuron >= gates.d[3]) {
            if (lane == 0) report(fault_word, fault);
            return;
        }
    }
    const u8 *weights = row_at(w, 0, 0, row);
    i64 first = (i64)blockIdx.y * SPARSE_TOKENS, last = min(first + SPARSE_TOKENS, (i64)out.d[2]), columns = w.d[3];
    for (i64 t = first; t < last; t++) {
        float gate = neuron < 0 ? 0.0f : ((const float *)row_at(gates, 0, 0, t))[neuron];
        float result = 0.0f;
        if (gate != 0.0f || !skip) {
            const u8 *input = row_at(x, 0, 0, t);
            float sum = 0.0f;
#pragma unroll 4
            for (i64 c = 4 * lane; c < columns; c += 4 * WARP) {
                float4 v = four_elements(w.type, weights, c, columns, fast);
                float4 a = four_floats(input, c, columns, fast);
                sum += v.x * a.x + v.y * a.y + v.z * a.z + v.w * a.w;
            }
            sum = gate * warp_sum(sum);
            result = gate != 0.0f ? sum : 0.0f;
        }
        if (lane == 0) ((float *)row_at(out, 0, 0, t))[row] = result;
    }
}

// Sums of up to 256 rows times their factors, for four columns a thread: `out` is f32 `[tokens, chunks, columns]`. Blocks:
// columns, chunks of rows, tokens.
extern "C" __global__ void __launch_bounds__(AXPY_THREADS)
    k_axpy_sparse(Tensor w, Tensor factors, u64 out, i64 first_token, int fast, int skip) {
    __shared__ float factor_of[CHUNK_ROWS];
    __shared__ int row_of[CHUNK_ROWS];
    __shared__ int counts[AXPY_THREADS / WARP];
    i64 columns = w.d[3], row = (i64)blockIdx.y * CHUNK_ROWS + threadIdx.x;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float factor = 0.0f;
    if (row < w.d[2]) factor = ((const float *)row_at(factors, 0, 0, first_token + blockIdx.z))[row];
    // The active rows, in their order.
    bool active = row < w.d[2] && (factor != 0.0f || !skip);
    u32 mask = __ballot_sync(FULL, active);
    if (lane == 0) counts[warp] = __popc(mask);
    __syncthreads();
    int before = 0, count = 0;
    for (int i = 0; i < AXPY_THREADS / WARP; i++) {
        before += i < warp ? counts[i] : 0;
        count += counts[i];
    }
    if (active) {
        int place = before + __popc(mask & ((1u << lane) - 1));
        factor_of[place] = factor;
        row_of[place] = threadIdx.x;
    }
    __syncthreads();
    i64 c = 4 * ((i64)blockIdx.x * AXPY_THREADS + threadIdx.x);
    if (c >= columns) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        const u8 *from = row_at(w, 0, 0, (i64)blockIdx.y * CHUNK_ROWS + row_of[i]);
        float4 v = four_elements(w.type, from, c, columns, fast);
        float f = factor_of[i];
        sum.x = fmaf(f, v.x, sum.x);
        sum.y = fmaf(f, v.y, sum.y);
        sum.z = fmaf(f, v.z, sum.z);
        sum.w = fmaf(f, v.w, sum.w);
    }
    float *to = (float *)out + ((i64)blockIdx.z * gridDim.y + blockIdx.y) * columns + c;
    to[0] = sum.x;
    if (c + 1 < columns) to[1] = sum.y;
    if (c + 2 < columns) to[2] = sum.z;
    if (c + 3 < columns) to[3] = sum.w;
}

// The sums of all chunks, in their order.
extern "C" __global__ void k_axpy_chunks(u64 parts, u64 out, i64 chunks, i64 columns, i64 tokens) {
    FOR_EACH(n, tokens * columns) {
        const float *part = (const float *)parts + n / columns * chunks * columns + n % columns;
        float sum = 0.0f;
        for (i64 i = 0; i < chunks; i++) sum += part[i * columns];
        ((float *)out)[n] = sum;
    }
}
