// Matrix multiplications with the rows of active neurons. Rows stay as they are in the file, a neuron's row in one piece; rows
// of inactive neurons are not read. Sums are taken in an order that depends on neither: skipping changes no bit. So many tokens
// that nearly every row is active for one of them are multiplied with all rows by GEMM (lower/sparse.rs).

#define SPARSE_ROWS 32     // rows of a block of k_mul_mat_sparse, one for each lane while their gates are read
#define SPARSE_WARPS 8
#define SPARSE_TOKENS 8    // tokens that a block takes one after the other
#define CHUNK_ROWS 128     // rows that a block of k_axpy_sparse sums, one for each thread
#define CHUNK_COLUMNS 8    // columns of a thread
#define ADD_WARPS 8        // shares of the chunks that a block of k_axpy_chunks sums

// Eight elements of a row from column `c` on, a multiple of eight; rows of floats are aligned to 16 bytes.
template <u32 TYPE> __device__ __forceinline__ void eight_elements(const u8 *row, i64 c, float v[8]) {
    if (TYPE == F32) {
        float4 a = __ldcs((const float4 *)(row + 4 * c)), b = __ldcs((const float4 *)(row + 4 * c) + 1);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else if (TYPE == F16 || TYPE == BF16) {
        uint4 pairs = __ldcs((const uint4 *)(row + 2 * c));
        u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u16 low = (u16)words[i], high = (u16)(words[i] >> 16);
            v[2 * i] = TYPE == F16 ? half_to_float(low) : bf16_to_float(low);
            v[2 * i + 1] = TYPE == F16 ? half_to_float(high) : bf16_to_float(high);
        }
    } else if (TYPE == Q8_0) {
        const u16 *block = (const u16 *)(row + c / 32 * Q8_0_BYTES), *quants = block + 1 + c % 32 / 2;
        float scale = half_to_float(block[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u16 pair = quants[i];
            v[2 * i] = scale * (i8)pair;
            v[2 * i + 1] = scale * (i8)(pair >> 8);
        }
    } else {
        const u16 *block = (const u16 *)(row + c / 32 * Q4_0_BYTES), *quants = block + 1 + c % 16 / 2;
        float scale = half_to_float(block[0]);
        int shift = c % 32 < 16 ? 0 : 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 pair = (u32)quants[i] >> shift;
            v[2 * i] = scale * ((int)(pair & 15) - 8);
            v[2 * i + 1] = scale * ((int)(pair >> 8 & 15) - 8);
        }
    }
}

// The product of a row and `x`, which the lanes of a warp have parts of. The loads of many columns are in flight at once.
template <u32 TYPE> __device__ __forceinline__ float row_product(const u8 *row, const u8 *x, i64 columns, int lane) {
    float sum = 0.0f;
#pragma unroll 8
    for (i64 c = 8 * lane; c < columns; c += 8 * WARP) {
        float v[8];
        eight_elements<TYPE>(row, c, v);
        float4 a = *(const float4 *)(x + 4 * c), b = *(const float4 *)(x + 4 * c + 16);
        sum += v[0] * a.x + v[1] * a.y + v[2] * a.z + v[3] * a.w + v[4] * b.x + v[5] * b.y + v[6] * b.z + v[7] * b.w;
    }
    return sum;
}

// The same for any type and address.
__device__ __forceinline__ float any_row_product(u32 type, const u8 *row, const u8 *x, i64 columns, int lane) {
    float sum = 0.0f;
    for (i64 c = lane; c < columns; c += WARP) sum += row_element(type, row, c) * ((const float *)x)[c];
    return sum;
}

// `out[t, i]` = gate of row i's neuron × (w[i] · x[t]). A block takes 32 rows of `w` for up to eight tokens; its warps take the
// active ones in turn. With `rectify`, gates are those before ReLU.
extern "C" __global__ void __launch_bounds__(SPARSE_WARPS *WARP)
    k_mul_mat_sparse(Tensor w, Tensor x, Tensor gates, Tensor ids, Tensor out, int fast, int skip, int rectify,
                     u64 fault_word, u32 fault) {
    wait_for_previous_kernel();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 first_row = (i64)blockIdx.x * SPARSE_ROWS, own = first_row + lane, neuron = own;
    bool exists = own < w.d[2];
    if (ids.address && exists) {
        neuron = *(const int *)(ids.address + own * ids.s[3]);
        if (neuron < -1 || neuron >= gates.d[3]) {
            if (warp == 0) report(fault_word, fault);
            neuron = -1;
        }
    }
    i64 first = (i64)blockIdx.y * SPARSE_TOKENS, last = min(first + SPARSE_TOKENS, (i64)out.d[2]), columns = w.d[3];
    for (i64 t = first; t < last; t++) {
        float gate = 0.0f;
        if (exists && neuron >= 0) gate = ((const float *)row_at(gates, 0, 0, t))[neuron];
        if (rectify) gate = fmaxf(gate, 0.0f);
        bool active = exists && (gate != 0.0f || !skip);
        u32 left = __ballot_sync(FULL, active);
        float *to = (float *)row_at(out, 0, 0, t) + first_row;
        if (warp == 0 && exists && !active) to[lane] = 0.0f;
        const u8 *input = row_at(x, 0, 0, t);
        for (int number = 0; left; left &= left - 1, number++) {
            int row = __ffs((int)left) - 1;
            if (number % SPARSE_WARPS != warp) continue;
            const u8 *weights = row_at(w, 0, 0, first_row + row);
            float sum;
            switch (fast ? w.type : ~0u) {
            case F32: sum = row_product<F32>(weights, input, columns, lane); break;
            case F16: sum = row_product<F16>(weights, input, columns, lane); break;
            case BF16: sum = row_product<BF16>(weights, input, columns, lane); break;
            case Q8_0: sum = row_product<Q8_0>(weights, input, columns, lane); break;
            case Q4_0: sum = row_product<Q4_0>(weights, input, columns, lane); break;
            default: sum = any_row_product(w.type, weights, input, columns, lane);
            }
            float factor = __shfl_sync(FULL, gate, row);
            sum = factor * warp_sum(sum);
            if (lane == 0) to[row] = factor != 0.0f ? sum : 0.0f;
        }
    }
}

// Adds rows times their factors, in the order of the list.
template <u32 TYPE>
__device__ __forceinline__ void add_rows(const Tensor &w, i64 first, const int *rows, const float *factors, int count,
                                         i64 c, float sum[CHUNK_COLUMNS]) {
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        float v[8], f = factors[i];
        eight_elements<TYPE>(row_at(w, 0, 0, first + rows[i]), c, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = fmaf(f, v[j], sum[j]);
    }
}

// Sums of up to 128 rows times their factors, for eight columns a thread: `out` is f32 `[tokens, chunks, columns]`. Blocks:
// columns, chunks of rows, tokens.
extern "C" __global__ void __launch_bounds__(CHUNK_ROWS)
    k_axpy_sparse(Tensor w, Tensor factors, u64 out, i64 first_token, int fast, int skip) {
    __shared__ float factor_of[CHUNK_ROWS];
    __shared__ int row_of[CHUNK_ROWS];
    __shared__ int counts[CHUNK_ROWS / WARP];
    wait_for_previous_kernel();
    i64 columns = w.d[3], first = (i64)blockIdx.y * CHUNK_ROWS, row = first + threadIdx.x;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float factor = 0.0f;
    if (row < w.d[2]) factor = ((const float *)row_at(factors, 0, 0, first_token + blockIdx.z))[row];
    // The active rows, in their order.
    bool active = row < w.d[2] && (factor != 0.0f || !skip);
    u32 mask = __ballot_sync(FULL, active);
    if (lane == 0) counts[warp] = __popc(mask);
    __syncthreads();
    int before = 0, count = 0;
    for (int i = 0; i < CHUNK_ROWS / WARP; i++) {
        before += i < warp ? counts[i] : 0;
        count += counts[i];
    }
    if (active) {
        int place = before + __popc(mask & ((1u << lane) - 1));
        factor_of[place] = factor;
        row_of[place] = threadIdx.x;
    }
    __syncthreads();
    i64 c = CHUNK_COLUMNS * ((i64)blockIdx.x * CHUNK_ROWS + threadIdx.x);
    if (c >= columns) return;
    float sum[CHUNK_COLUMNS] = {};
    switch (fast ? w.type : ~0u) {
    case F32: add_rows<F32>(w, first, row_of, factor_of, count, c, sum); break;
    case F16: add_rows<F16>(w, first, row_of, factor_of, count, c, sum); break;
    case BF16: add_rows<BF16>(w, first, row_of, factor_of, count, c, sum); break;
    case Q8_0: add_rows<Q8_0>(w, first, row_of, factor_of, count, c, sum); break;
    case Q4_0: add_rows<Q4_0>(w, first, row_of, factor_of, count, c, sum); break;
    default:
        for (int i = 0; i < count; i++) {
            const u8 *from = row_at(w, 0, 0, first + row_of[i]);
            for (int j = 0; j < CHUNK_COLUMNS; j++)
                if (c + j < columns) sum[j] = fmaf(factor_of[i], row_element(w.type, from, c + j), sum[j]);
        }
    }
    float *to = (float *)out + ((i64)blockIdx.z * gridDim.y + blockIdx.y) * columns + c;
    for (int j = 0; j < CHUNK_COLUMNS; j++)
        if (c + j < columns) to[j] = sum[j];
}

// The sums of all chunks, by equal shares of them, and `add` if it is not 0. Blocks: 32 columns, tokens.
extern "C" __global__ void __launch_bounds__(ADD_WARPS *WARP)
    k_axpy_chunks(u64 parts, u64 out, u64 add, i64 chunks, i64 columns) {
    __shared__ float shares[ADD_WARPS][WARP];
    wait_for_previous_kernel();
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 c = (i64)blockIdx.x * WARP + lane, share = (chunks + ADD_WARPS - 1) / ADD_WARPS;
    i64 first = min(warp * share, chunks), last = min(first + share, chunks);
    const float *part = (const float *)parts + (i64)blockIdx.y * chunks * columns + c;
    float sum = 0.0f;
    if (c < columns) {
#pragma unroll 8
        for (i64 i = first; i < last; i++) sum += part[i * columns];
    }
    shares[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= columns) return;
    for (int i = 1; i < ADD_WARPS; i++) sum += shares[i][lane];
    i64 at = (i64)blockIdx.y * columns + c;
    if (add) sum += ((const float *)add)[at];
    ((float *)out)[at] = sum;
}

// Products with all rows: times the gates of active neurons, and 0 for the others.
extern "C" __global__ void k_gate_products(Tensor gates, u64 out, int rectify) {
    i64 neurons = gates.d[3];
    FOR_EACH(n, gates.d[2] * neurons) {
        float gate = ((const float *)row_at(gates, 0, 0, n / neurons))[n % neurons];
        if (rectify) gate = fmaxf(gate, 0.0f);
        float *product = (float *)out + n;
        *product = gate != 0.0f ? gate * *product : 0.0f;
    }
}

#define TRANSPOSE_TILE 32

// `count` columns from `first` on as rows, in an operand type of GEMM. A block transposes a tile. What is infinite or NaN becomes
// 0, since GEMM multiplies it with the factor 0, too; `odd` says of each tile of the whole matrix, by columns, whether it has any.
extern "C" __global__ void __launch_bounds__(TRANSPOSE_TILE * 8)
    k_transpose_rows(Tensor w, i64 first, i64 count, u64 out, u32 operand, u64 odd) {
    __shared__ float tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 1];
    int lane = threadIdx.x % TRANSPOSE_TILE, line = threadIdx.x / TRANSPOSE_TILE;
    i64 rows = w.d[2], row = (i64)blockIdx.y * TRANSPOSE_TILE, column = (i64)blockIdx.x * TRANSPOSE_TILE;
    bool any = false;
    for (int i = line; i < TRANSPOSE_TILE; i += 8) {
        if (row + i >= rows || column + lane >= count) continue;
        float v = row_element(w.type, row_at(w, 0, 0, row + i), first + column + lane);
        bool finite = (__float_as_uint(v) & 0x7f800000) != 0x7f800000;
        any |= !finite;
        tile[i][lane] = finite ? v : 0.0f;
    }
    int found = __syncthreads_or(any);
    if (threadIdx.x == 0) ((u8 *)odd)[(first / TRANSPOSE_TILE + blockIdx.x) * gridDim.y + blockIdx.y] = found != 0;
    for (int i = line; i < TRANSPOSE_TILE; i += 8) {
        if (column + i >= count || row + lane >= rows) continue;
        i64 to = (column + i) * rows + row + lane;
        float v = tile[lane][i];
        if (operand == F16) ((u16 *)out)[to] = float_to_half(v);
        else if (operand == BF16) ((u16 *)out)[to] = float_to_bf16(v);
        else ((float *)out)[to] = v;
    }
}

#define ODD_WARPS 8
#define ODD_TOKENS 64

// Sums again, row by row, the columns in which k_transpose_rows found an element that is infinite or NaN. Blocks: tiles of
// columns, 64 tokens. Usually there is none, and all blocks end at once.
extern "C" __global__ void __launch_bounds__(ODD_WARPS *WARP)
    k_add_odd_rows(Tensor w, Tensor factors, u64 out, u64 odd, i64 tokens) {
    i64 rows = w.d[2], columns = w.d[3], tiles = (rows + TRANSPOSE_TILE - 1) / TRANSPOSE_TILE;
    bool any = false;
    for (i64 i = threadIdx.x; i < tiles; i += ODD_WARPS * WARP) any |= ((const u8 *)odd)[blockIdx.x * tiles + i] != 0;
    if (!__syncthreads_or(any)) return;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 column = (i64)blockIdx.x * TRANSPOSE_TILE + lane, first = (i64)blockIdx.y * ODD_TOKENS;
    if (column >= columns) return;
    for (i64 t = first + warp; t < min(first + ODD_TOKENS, tokens); t += ODD_WARPS) {
        const float *of_token = (const float *)row_at(factors, 0, 0, t);
        float sum = 0.0f;
        for (i64 row = 0; row < rows; row++) {
            float factor = of_token[row];
            if (factor != 0.0f) sum = fmaf(factor, row_element(w.type, row_at(w, 0, 0, row), column), sum);
        }
        ((float *)out)[t * columns + column] = sum;
    }
}
