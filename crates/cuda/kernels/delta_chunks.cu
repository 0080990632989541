// The gated delta rule of many tokens, in chunks of 64 on tensor cores (mma; compute capability 8.0 and newer).
//
// With decays a(t), let D(t, i) be the product of those after token i up to t, and F(t) that of all of the chunk up to t. What
// the state learns from token t of a chunk, whose state before it is S, is
//   u(t) = b(t) (v(t) - F(t) Sᵀ k(t) - Σ D(t, i) (k(i) · k(t)) u(i))   over i < t,
// a triangular system: (1 + A) U = b (V - F K S), with A(t, i) = b(t) D(t, i) (k(t) · k(i)). Then
//   results = scale (F Q S + P U)   with P(t, i) = D(t, i) (q(t) · k(i)) for i ≤ t,   and S ← F(last) S + Kᵀ (D(last, ·) U).
// The first kernel computes T = (1 + A)⁻¹ b and P of all chunks and heads at once; the second goes through the chunks, with
// products of matrices in place of steps. Without the delta rule, A is 0.
//
// Products are of f32 accuracy: each operand is a sum of two bf16, and three of the four products count.

struct DeltaChunks {
    Tensor q, k, v, gates, betas, state;
    u64 out;         // f32: results [t, h, e], then the state [h, d, e]
    float scale;
    int tiled;       // which key head serves value head i of h: i mod g, else i / (h / g)
    int delta;       // whether the state learns the difference to what it yields for the key, else the value
    int chunks;
    u64 rows;        // bf16: keys and queries, each as two, of every key head and chunk [g, chunks, 4, CHUNK, DEPTH]
    u64 pairs;       // bf16: T and P, each as two [h, chunks, 4, CHUNK, CHUNK]
    u64 decays;      // f32: F(t), and D(last, t) [h, chunks, 2, CHUNK]
};

#define CHUNK 64
#define COLUMNS 32

#if __CUDA_ARCH__ >= 800

__device__ __forceinline__ i64 key_head_of(const DeltaChunks &w, i64 head) {
    return w.tiled ? head % w.k.d[2] : head / (w.v.d[2] / w.k.d[2]);
}

// T and P of a chunk and head.
template <int DEPTH> __device__ __forceinline__ void chunk_pairs(const DeltaChunks &w, u8 *memory) {
    const int threads = 128, line = CHUNK + 1, half = CHUNK / 2;
    const int tile = CHUNK * tile_pitch<DEPTH>();
    __shared__ float gates[CHUNK], betas[CHUNK];
    int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, pair = lane % 4 * 2, matrix = lane / 8;
    i64 chunk = blockIdx.x, head = blockIdx.y, key_head = key_head_of(w, head), first = chunk * CHUNK;
    i64 depth = w.k.d[3], heads_each = w.v.d[2] / w.k.d[2];
    bool is_first = w.tiled ? head < w.k.d[2] : head % heads_each == 0;
    int count = (int)min((i64)CHUNK, w.v.d[1] - first);
    wait_for_previous_kernel();

    if (tid < CHUNK) {
        gates[tid] = tid < count ? ((const float *)row_at(w.gates, 0, 0, first + tid))[head] : 0.0f;
        betas[tid] = tid < count ? ((const float *)row_at(w.betas, 0, 0, first + tid))[head] : 0.0f;
    }
    u8 *rows = (u8 *)w.rows + (key_head * w.chunks + chunk) * (4 * CHUNK * DEPTH * 2);
    for (int n = tid; n < CHUNK * DEPTH / 2; n += threads) {
        int t = n / (DEPTH / 2), c = n % (DEPTH / 2) * 2;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const float *row = (const float *)row_at(which ? w.q : w.k, 0, first + t, key_head);
            float a = t < count && c < depth ? row[c] : 0.0f, b = t < count && c + 1 < depth ? row[c + 1] : 0.0f;
            u32 high, low;
            split_floats(a, b, &high, &low);
            u8 *at = memory + 2 * which * tile + t * tile_pitch<DEPTH>() + 2 * c;
            *(u32 *)at = high;
            *(u32 *)(at + tile) = low;
            if (!is_first) continue;
            u8 *to = rows + (2 * which * CHUNK + t) * (2 * DEPTH) + 2 * c;
            *(u32 *)to = high;
            *(u32 *)(to + CHUNK * DEPTH * 2) = low;
        }
    }
    __syncthreads();

    // A warp has 16 rows; columns after them are not needed.
    u32 base = (u32)__cvta_generic_to_shared(memory);
    u32 own_at = base + (16 * warp + matrix % 2 * 8 + lane % 8) * tile_pitch<DEPTH>() + matrix / 2 * 16;
    u32 other_at = base + (matrix / 2 * 8 + lane % 8) * tile_pitch<DEPTH>() + matrix % 2 * 16;
    float keys[CHUNK / 8][4], queries[CHUNK / 8][4];
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) keys[n][i] = queries[n][i] = 0.0f;
    for (int k = 0; k < DEPTH / 16; k++) {
        u32 key_high[4], key_low[4], query_high[4], query_low[4];
        load_matrices(key_high, own_at + k * 32);
        load_matrices(key_low, own_at + tile + k * 32);
        load_matrices(query_high, own_at + 2 * tile + k * 32);
        load_matrices(query_low, own_at + 3 * tile + k * 32);
#pragma unroll
        for (int n = 0; n < CHUNK / 16; n++) {
            if (n > warp) continue;
            u32 high[4], low[4];
            load_matrices(high, other_at + n * 16 * tile_pitch<DEPTH>() + k * 32);
            load_matrices(low, other_at + tile + n * 16 * tile_pitch<DEPTH>() + k * 32);
            mma_split(keys[2 * n], key_high, key_low, high, low);
            mma_split(keys[2 * n + 1], key_high, key_low, high + 2, low + 2);
            mma_split(queries[2 * n], query_high, query_low, high, low);
            mma_split(queries[2 * n + 1], query_high, query_low, high + 2, low + 2);
        }
    }
    __syncthreads();

    // The tiles are no longer needed.
    float *decay = (float *)memory, *a = decay + CHUNK * line, *inverse = a + CHUNK * line;
    float *decays = (float *)w.decays + (head * w.chunks + chunk) * (2 * CHUNK);
    if (tid < CHUNK) {
        // Sums from the diagonal on, not differences of sums: a gate may be very large, or infinite.
        float sum = 0.0f;
        for (int i = tid; i >= 0; i--) {
            decay[tid * line + i] = expf(sum);
            sum += gates[i];
        }
        decays[tid] = expf(sum);
    }
    __syncthreads();
    if (tid < CHUNK) decays[CHUNK + tid] = tid < count ? decay[(count - 1) * line + tid] : 0.0f;
    u32 *pairs = (u32 *)((u8 *)w.pairs + (head * w.chunks + chunk) * (4 * CHUNK * CHUNK * 2));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int t = 16 * warp + lane / 4 + 8 * r;
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
            int i = 8 * n + pair;
            float p[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float fade = i + j <= t ? decay[t * line + i + j] : 0.0f;
                p[j] = i + j <= t ? fade * queries[n][2 * r + j] : 0.0f;
                a[t * line + i + j] = w.delta && i + j < t ? betas[t] * fade * keys[n][2 * r + j] : 0.0f;
            }
            u32 high, low;
            split_floats(p[0], p[1], &high, &low);
            pairs[(2 * CHUNK + t) * (CHUNK / 2) + i / 2] = high;
            pairs[(3 * CHUNK + t) * (CHUNK / 2) + i / 2] = low;
        }
    }
    __syncthreads();

    // The inverse of a triangular matrix by halves: those on the diagonal column by column, a thread for each.
    if (tid < CHUNK) {
        int begin = tid / half * half;
        for (int t = 0; t < CHUNK; t++) {
            float sum = t == tid ? 1.0f : 0.0f, odd = 0.0f;
            for (int i = begin; t > tid && t < begin + half && i < t; i += 2) {
                sum -= a[t * line + i] * inverse[i * line + tid];
                if (i + 1 < t) odd -= a[t * line + i + 1] * inverse[(i + 1) * line + tid];
            }
            inverse[t * line + tid] = sum + odd;
        }
    }
    __syncthreads();
    float *product = decay;
    for (int n = tid; n < half * half; n += threads) {
        int r = n / half, c = n % half;
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < half; i++) sum += a[(half + r) * line + i] * inverse[i * line + c];
        product[r * line + c] = sum;
    }
    __syncthreads();
    for (int n = tid; n < half * half; n += threads) {
        int r = n / half, c = n % half;
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < half; i++) sum += inverse[(half + r) * line + half + i] * product[i * line + c];
        // Columns of the other half are read above, these are not.
        inverse[(half + r) * line + c] = -sum;
    }
    __syncthreads();
    for (int n = tid; n < CHUNK * CHUNK / 2; n += threads) {
        int t = n / (CHUNK / 2), i = n % (CHUNK / 2) * 2;
        u32 high, low;
        split_floats(inverse[t * line + i] * betas[i], inverse[t * line + i + 1] * betas[i + 1], &high, &low);
        pairs[n] = high;
        pairs[CHUNK * CHUNK / 2 + n] = low;
    }
}

// Starts to load two tiles, one after the other, with 256 threads.
template <int COLS> __device__ __forceinline__ void load_tiles(const u8 *from, u8 *to) {
    const int parts = COLS / 8;
    for (int i = threadIdx.x; i < 2 * CHUNK * parts; i += 256) {
        u8 *at = to + i / parts * tile_pitch<COLS>() + i % parts * 16;
        copy_16((u32)__cvta_generic_to_shared(at), from + i * 16, true);
    }
}

// All chunks, for 32 columns of a head's state, which warps keep in registers: 16 rows each.
template <int DEPTH> __device__ __forceinline__ void chunk_states(const DeltaChunks &w, u8 *memory) {
    const int row_tile = CHUNK * tile_pitch<DEPTH>(), pair_tile = CHUNK * tile_pitch<CHUNK>();
    const int state_tile = DEPTH * tile_pitch<COLUMNS>(), column_tile = CHUNK * tile_pitch<COLUMNS>();
    const int narrow = tile_pitch<COLUMNS>();
    u8 *keys = memory, *queries = keys + 4 * row_tile, *solve = queries + 2 * row_tile, *attend = solve + 2 * pair_tile;
    u8 *before = attend + 2 * pair_tile, *values = before + 2 * state_tile;
    u8 *learned = values + 2 * column_tile, *faded = learned + 2 * column_tile;
    int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP, pair = lane % 4 * 2, matrix = lane / 8;
    i64 head = blockIdx.y, heads = w.v.d[2], depth = w.k.d[3], width = w.v.d[3], tokens = w.v.d[1];
    i64 first_column = (i64)blockIdx.x * COLUMNS, key_head = key_head_of(w, head);
    // The rows of a chunk and the columns that this warp computes.
    int rows = warp % 4 * 16, side = warp / 4 * 16;
    wait_for_previous_kernel();

    const u8 *all_rows = (const u8 *)w.rows + key_head * w.chunks * (4 * CHUNK * DEPTH * 2);
    const u8 *all_pairs = (const u8 *)w.pairs + head * w.chunks * (4 * CHUNK * CHUNK * 2);
    const float *all_decays = (const float *)w.decays + head * w.chunks * (2 * CHUNK);
    auto rows_of = [&](int chunk, int which) { return all_rows + ((i64)chunk * 4 + which) * (CHUNK * DEPTH * 2); };
    auto pairs_of = [&](int chunk, int which) { return all_pairs + ((i64)chunk * 4 + which) * (CHUNK * CHUNK * 2); };
    load_tiles<DEPTH>(rows_of(0, 0), keys);
    load_tiles<DEPTH>(rows_of(0, 2), queries);
    load_tiles<CHUNK>(pairs_of(0, 0), solve);
    commit_copies();

    float state[COLUMNS / 8][4];
    bool has_state = warp < DEPTH / 16;
    auto put_state = [&]() {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                u8 *at = before + (16 * warp + lane / 4 + 8 * r) * narrow + (8 * n + pair) * 2;
                put_split(at, state_tile, state[n][2 * r], state[n][2 * r + 1]);
            }
    };
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 row = 16 * warp + lane / 4 + i / 2 * 8, column = first_column + 8 * n + pair + i % 2;
            bool exists = has_state && row < depth && column < width;
            state[n][i] = exists ? ((const float *)row_at(w.state, 0, head, row))[column] : 0.0f;
        }
    if (has_state) put_state();

    u32 base = (u32)__cvta_generic_to_shared(memory);
    auto offset = [&](const u8 *tile) { return base + (u32)(tile - memory); };
    // The row of one of four matrices whose address this lane passes to ldmatrix: of a left operand, of a right one whose
    // rows are those of the sum, and of a left one that is transposed.
    u32 left = matrix % 2 * 8 + lane % 8, left_side = matrix / 2 * 16;
    u32 turned = matrix / 2 * 8 + lane % 8, turned_side = matrix % 2 * 16;
    u32 keys_at = offset(keys) + (rows + left) * tile_pitch<DEPTH>() + left_side;
    u32 queries_at = offset(queries) + (rows + left) * tile_pitch<DEPTH>() + left_side;
    u32 solve_at = offset(solve) + (rows + left) * tile_pitch<CHUNK>() + left_side;
    u32 attend_at = offset(attend) + (rows + left) * tile_pitch<CHUNK>() + left_side;
    u32 turned_at = offset(keys) + turned * tile_pitch<DEPTH>() + 32 * warp + turned_side;
    u32 right = left * narrow + left_side;
    u32 before_at = offset(before) + right + 2 * side, values_at = offset(values) + right + 2 * side;
    u32 learned_at = offset(learned) + right + 2 * side, faded_at = offset(faded) + right;

    for (int chunk = 0; chunk < w.chunks; chunk++) {
        int buffer = chunk % 2 * 2 * row_tile, next = chunk + 1;
        const float *decays = all_decays + chunk * (2 * CHUNK);
        int last = (int)min((i64)CHUNK, tokens - (i64)chunk * CHUNK) - 1;
        wait_for_copies<0>();
        __syncthreads();
        if (next < w.chunks) load_tiles<DEPTH>(rows_of(next, 0), keys + next % 2 * 2 * row_tile);
        load_tiles<CHUNK>(pairs_of(chunk, 2), attend);
        commit_copies();

        // What the state yields for keys and queries.
        float known[2][4], result[2][4], from[2], to[2];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) known[n][i] = result[n][i] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            from[r] = decays[rows + lane / 4 + 8 * r];
            to[r] = decays[CHUNK + rows + lane / 4 + 8 * r];
        }
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            u32 high[4], low[4], b_high[4], b_low[4];
            load_transposed(b_high, before_at + k * 16 * narrow);
            load_transposed(b_low, before_at + state_tile + k * 16 * narrow);
            if (w.delta) {
                load_matrices(high, keys_at + buffer + k * 32);
                load_matrices(low, keys_at + buffer + row_tile + k * 32);
                mma_split(known[0], high, low, b_high, b_low);
                mma_split(known[1], high, low, b_high + 2, b_low + 2);
            }
            load_matrices(high, queries_at + k * 32);
            load_matrices(low, queries_at + row_tile + k * 32);
            mma_split(result[0], high, low, b_high, b_low);
            mma_split(result[1], high, low, b_high + 2, b_low + 2);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int t = rows + lane / 4 + 8 * r;
            i64 token = (i64)chunk * CHUNK + t;
            const float *row = (const float *)row_at(w.v, 0, token, head);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float x[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    i64 column = first_column + side + 8 * n + pair + j;
                    x[j] = token < tokens && column < width ? row[column] : 0.0f;
                    if (w.delta) x[j] -= from[r] * known[n][2 * r + j];
                    result[n][2 * r + j] *= from[r];
                }
                put_split(values + t * narrow + (side + 8 * n + pair) * 2, column_tile, x[0], x[1]);
            }
        }
        __syncthreads();
        if (next < w.chunks) load_tiles<DEPTH>(rows_of(next, 2), queries);
        commit_copies();

        // What the state learns from each token.
        float learn[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) learn[n][i] = 0.0f;
        for (int k = 0; k <= warp % 4; k++) {
            u32 high[4], low[4], b_high[4], b_low[4];
            load_matrices(high, solve_at + k * 32);
            load_matrices(low, solve_at + pair_tile + k * 32);
            load_transposed(b_high, values_at + k * 16 * narrow);
            load_transposed(b_low, values_at + column_tile + k * 16 * narrow);
            mma_split(learn[0], high, low, b_high, b_low);
            mma_split(learn[1], high, low, b_high + 2, b_low + 2);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                int at = (rows + lane / 4 + 8 * r) * narrow + (side + 8 * n + pair) * 2;
                float a = learn[n][2 * r], b = learn[n][2 * r + 1];
                put_split(learned + at, column_tile, a, b);
                put_split(faded + at, column_tile, to[r] * a, to[r] * b);
            }
        // All but the queries of the next chunk.
        wait_for_copies<1>();
        __syncthreads();
        if (next < w.chunks) load_tiles<CHUNK>(pairs_of(next, 0), solve);
        commit_copies();

        for (int k = 0; k <= warp % 4; k++) {
            u32 high[4], low[4], b_high[4], b_low[4];
            load_matrices(high, attend_at + k * 32);
            load_matrices(low, attend_at + pair_tile + k * 32);
            load_transposed(b_high, learned_at + k * 16 * narrow);
            load_transposed(b_low, learned_at + column_tile + k * 16 * narrow);
            mma_split(result[0], high, low, b_high, b_low);
            mma_split(result[1], high, low, b_high + 2, b_low + 2);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                i64 token = (i64)chunk * CHUNK + rows + lane / 4 + i / 2 * 8;
                i64 column = first_column + side + 8 * n + pair + i % 2;
                if (token < tokens && column < width)
                    ((float *)w.out)[(token * heads + head) * width + column] = w.scale * result[n][i];
            }

        if (!has_state) continue;
        float total = decays[last];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[n][i] *= total;
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++) {
            u32 high[4], low[4];
            load_transposed(high, turned_at + buffer + k * 16 * tile_pitch<DEPTH>());
            load_transposed(low, turned_at + buffer + row_tile + k * 16 * tile_pitch<DEPTH>());
#pragma unroll
            for (int n = 0; n < COLUMNS / 16; n++) {
                u32 b_high[4], b_low[4];
                load_transposed(b_high, faded_at + k * 16 * narrow + n * 32);
                load_transposed(b_low, faded_at + column_tile + k * 16 * narrow + n * 32);
                mma_split(state[2 * n], high, low, b_high, b_low);
                mma_split(state[2 * n + 1], high, low, b_high + 2, b_low + 2);
            }
        }
        put_state();
    }
    if (!has_state) return;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 row = 16 * warp + lane / 4 + i / 2 * 8, column = first_column + 8 * n + pair + i % 2;
            if (row < depth && column < width)
                ((float *)w.out)[(tokens * heads + head * depth + row) * width + column] = state[n][i];
        }
}

#define DELTA_CHUNKS(depth)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128) k_delta_pairs_##depth(const __grid_constant__ DeltaChunks w) {  \
        extern __shared__ __align__(16) u8 memory[];                                                           \
        chunk_pairs<depth>(w, memory);                                                                         \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) k_delta_states_##depth(const __grid_constant__ DeltaChunks w) { \
        extern __shared__ __align__(16) u8 memory[];                                                           \
        chunk_states<depth>(w, memory);                                                                        \
    }
DELTA_CHUNKS(64) DELTA_CHUNKS(128)

#endif
