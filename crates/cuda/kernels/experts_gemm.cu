// Matrices of experts times many tokens, on tensor cores (mma; compute capability 8.0 and newer).
//
// A token and one of its experts make a row. Rows are sorted by expert on the device, and cut into tiles of at most 64
// rows of one expert; a block multiplies a tile with 128 rows of the expert's matrix, and writes each row where its token
// has it. Weights stay quantized in shared memory and become bf16 in registers, just before they are multiplied.

// Rows of a tile, rows of a matrix for a block, columns of a slot of the ring in shared memory.
#define TILE 64
#define MATRIX_ROWS 128
#define COLS 64
#define SLOTS 4
#define THREADS 256

// Rows of one expert: `count` of the sorted rows from `first` on. Expert −1: one that is elsewhere, whose results are 0.
struct ExpertTile { int expert, first, count, reserved; };

#define MAX_EXPERTS 1024

// The sum of `v` over all threads before this one; `total` is that over all 1024.
__device__ __forceinline__ int sum_before(int v, int *shared, int &total) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, sum = v;
    for (int o = 1; o < WARP; o <<= 1) {
        int other = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += other;
    }
    if (lane == WARP - 1) shared[warp] = sum;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < 32; i++) {
        if (i < warp) before += shared[i];
        total += shared[i];
    }
    __syncthreads();
    return before + sum - v;
}

// Sorts rows by expert, and cuts them into tiles: one block. `tiles` has their number, then the tiles.
extern "C" __global__ void __launch_bounds__(1024, 1)
    k_sort_by_expert(Tensor ids, u32 experts, u64 sorted, u64 tiles, u64 fault_word, u32 fault) {
    __shared__ int counts[MAX_EXPERTS], cursors[MAX_EXPERTS], shared[32];
    wait_for_previous_kernel();
    i64 used = ids.d[3], all = ids.d[2] * used;
    counts[threadIdx.x] = 0;
    __syncthreads();
    // Rows without an expert come last.
    auto expert_of = [&](i64 n) {
        int expert = *(const int *)(ids.address + n / used * ids.s[2] + n % used * ids.s[3]);
        return expert == -1 ? (int)experts : expert;
    };
    auto exists = [&](int expert) { return expert >= 0 && expert <= (int)experts; };
    for (i64 n = threadIdx.x; n < all; n += blockDim.x) {
        int expert = expert_of(n);
        if (exists(expert)) atomicAdd(&counts[expert], 1);
        else report(fault_word, fault);
    }
    __syncthreads();
    int count = counts[threadIdx.x], own_tiles = (count + TILE - 1) / TILE, rows, tile_count;
    int first = sum_before(count, shared, rows), first_tile = sum_before(own_tiles, shared, tile_count);
    cursors[threadIdx.x] = first;
    ExpertTile *list = (ExpertTile *)tiles + 1;
    for (int i = 0; i < own_tiles; i++) {
        ExpertTile tile = {threadIdx.x == experts ? -1 : (int)threadIdx.x, first + i * TILE, min(TILE, count - i * TILE), 0};
        list[first_tile + i] = tile;
    }
    if (threadIdx.x == 0) *(int *)tiles = tile_count;
    __syncthreads();
    for (i64 n = threadIdx.x; n < all; n += blockDim.x) {
        int expert = expert_of(n);
        if (exists(expert)) ((int *)sorted)[atomicAdd(&cursors[expert], 1)] = (int)n;
    }
}

#if __CUDA_ARCH__ >= 800

// Both operands have the columns of each 32 in this order: 0 1 2 3 16 17 18 19, 4 5 6 7 20 21 22 23, and so on. A lane
// then has its elements of two steps of mma in 16 adjacent bytes, which a quantized block has in four.
__device__ __forceinline__ u32 column_at(u32 place) { return place % 32 / 8 * 4 + place % 4 + (place / 4 % 2) * 16; }

// Rows of any tensor as bf16, columns in that order: eight elements per thread.
extern "C" __global__ void k_rows_for_experts(Tensor x, u64 out) {
    wait_for_previous_kernel();
    i64 eighths = x.d[3] / 8;
    FOR_EACH(n, x.d[0] * x.d[1] * x.d[2] * eighths) {
        i64 r = n / eighths, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
        i64 c = n % eighths / 4 * 32 + n % 4 * 4;
        __align__(16) float v[8];
        const u8 *row = row_at(x, i0, i1, i2);
        if (x.type == F32 && x.s[3] == 4 && (u64)row % 16 == 0) {
            *(float4 *)v = *(const float4 *)((const float *)row + c);
            *(float4 *)(v + 4) = *(const float4 *)((const float *)row + c + 16);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = element(x, i0, i1, i2, c + i % 4 + i / 4 * 16);
        }
        ((uint4 *)out)[n] = make_uint4(floats_to_bf16x2(v[0], v[1]), floats_to_bf16x2(v[2], v[3]),
                                       floats_to_bf16x2(v[4], v[5]), floats_to_bf16x2(v[6], v[7]));
    }
}

struct ExpertGemm {
    Tensor w;                // [experts, n, k]: of a type that is not packed
    u64 quants, scales;      // of a packed one
    u64 x;                   // bf16 rows of `k` elements
    u64 sorted, tiles;
    u64 out;                 // f32: a row of `n` for each row
    u32 n, k;
    u32 rows_per_x;          // how many rows share a row of `x`
};

// Not a packed format: any type, read element by element.
#define MATRIX_ANY 5

// Where 16 bytes of a row of bf16 are in a slot: swapped in every other row, so that two rows fall into different banks.
__device__ __forceinline__ u32 part_at(u32 row, u32 part) { return row * (COLS * 2) + (part ^ (row % 2 * 4)) * 16; }

// Bytes of a slot: rows of `x`; quants of the matrix, padded so that eight rows fall into different banks; scales.
template <int F> struct Slot {
    static const u32 QUANTS = F == MATRIX_ANY ? COLS * 2 : F == MATRIX_Q8 ? COLS : COLS / 2;
    static const u32 PITCH = F == MATRIX_ANY ? QUANTS : QUANTS + 16;
    static const u32 SCALES = F == MATRIX_ANY ? 0 : F == MATRIX_Q4_MIN ? COLS / 8 : COLS / 16;
    static const u32 X_BYTES = TILE * COLS * 2;
    static const u32 SCALES_AT = X_BYTES + MATRIX_ROWS * PITCH;
    static const u32 BYTES = SCALES_AT + MATRIX_ROWS * SCALES;
};

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 twice(float v) { return floats_to_bf16x2(v, v); }

// Two elements of four bytes of nibbles as bf16x2: `bytes` has one byte in each half, `shift` is 0 for low nibbles and 4
// for high ones.
template <int F> __device__ __forceinline__ u32 nibbles_to_bf16x2(u32 bytes, int shift, u32 scale, u32 minimum) {
    const u32 one = 0x3f803f80, none = 0x80008000;   // 1 and −0
    if (F == MATRIX_MXFP4) {
        // Sign, exponent and mantissa in their places are the element times 2⁻¹²⁶; the levels are doubled elements.
        u32 bits = (bytes << (12 - shift) & 0x80008000) | (bytes << (6 - shift) & 0x01c001c0);
        return fma_bf16x2(fma_bf16x2(bits, 0x7f007f00, none), scale, none);
    }
    // 128 + quant, exactly.
    u32 biased = (bytes >> shift & 0x000f000f) | 0x43004300;
    if (F == MATRIX_Q4) return fma_bf16x2(fma_bf16x2(biased, one, 0xc308c308), scale, none);   // − 136
    return fma_bf16x2(fma_bf16x2(biased, one, 0xc300c300), scale, minimum);                    // − 128
}

// A lane's eight elements of a block of a matrix's row, in the order of the columns, as operands of two steps of mma.
template <int F> __device__ __forceinline__ void weights_of(const u8 *slot, u32 row, u32 block, u32 b[4]) {
    u32 lane = threadIdx.x % 4;
    const u8 *quants = slot + Slot<F>::X_BYTES + row * Slot<F>::PITCH;
    if (F == MATRIX_ANY) {
        uint4 eight = *(const uint4 *)(slot + Slot<F>::X_BYTES + part_at(row, block * 4 + lane));
        b[0] = eight.x, b[1] = eight.y, b[2] = eight.z, b[3] = eight.w;
        return;
    }
    const u8 *scales = slot + Slot<F>::SCALES_AT + row * Slot<F>::SCALES;
    if (F == MATRIX_Q8) {
        float scale = half_to_float(((const u16 *)scales)[block]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 word = *(const u32 *)(quants + block * 32 + half * 16 + lane * 4) ^ 0x80808080;
            float v[4];
            // 2²³ + quant + 128, exactly.
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = (__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + i)) - 8388736.0f) * scale;
            b[2 * half] = floats_to_bf16x2(v[0], v[1]);
            b[2 * half + 1] = floats_to_bf16x2(v[2], v[3]);
        }
        return;
    }
    u32 scale, minimum = 0;
    if (F == MATRIX_Q4_MIN) {
        u32 both = ((const u32 *)scales)[block];
        scale = twice(half_to_float((u16)both));
        minimum = twice(half_to_float((u16)(both >> 16)));
    } else if (F == MATRIX_MXFP4) {
        scale = (u32)((const u16 *)scales)[block] * 0x10001;
    } else {
        scale = twice(half_to_float(((const u16 *)scales)[block]));
    }
    u32 word = *(const u32 *)(quants + block * 16 + lane * 4);
    u32 first = __byte_perm(word, 0, 0x4140), second = __byte_perm(word, 0, 0x4342);
    b[0] = nibbles_to_bf16x2<F>(first, 0, scale, minimum);
    b[1] = nibbles_to_bf16x2<F>(second, 0, scale, minimum);
    b[2] = nibbles_to_bf16x2<F>(first, 4, scale, minimum);
    b[3] = nibbles_to_bf16x2<F>(second, 4, scale, minimum);
}

// Starts to copy four or eight bytes to shared memory; zeros where there is nothing to copy.
template <int BYTES> __device__ __forceinline__ void copy_few(u32 to, u64 from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(exists ? BYTES : 0) : "memory");
}

// A thread's 16-byte copies of rows of an operand: every round takes the next columns of the same rows.
template <u32 ROWS, u32 PARTS> struct Copies {
    static const u32 COUNT = ROWS * PARTS / THREADS;
    u64 from[COUNT];
    u32 to[COUNT], row[COUNT], part;

    // `source` is the address of a row, `place` where a part of it is in a slot.
    template <class Source, class Place> __device__ __forceinline__ Copies(Source source, Place place) {
        part = threadIdx.x % PARTS;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            row[i] = (threadIdx.x + i * THREADS) / PARTS;
            from[i] = source(row[i]) + part * 16;
            to[i] = place(row[i], part);
        }
    }

    // Starts those of a round, at `slot`; rows from `rows` on, and parts from `parts` on, are zeros.
    __device__ __forceinline__ void start(u32 slot, u32 round, u32 rows, u32 parts) const {
        u32 number = round * PARTS + part;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++)
            copy_16(slot + to[i], (const u8 *)(from[i] + (number < parts ? round * PARTS * 16 : 0)),
                    row[i] < rows && number < parts);
    }
};

// Converts the matrix's rows `first ..`, columns `col ..`, of an expert, of any type.
__device__ __forceinline__ void convert_matrix(const ExpertGemm &g, int expert, u32 first, u32 col, u8 *to) {
    for (u32 i = threadIdx.x; i < MATRIX_ROWS * (COLS / 8); i += THREADS) {
        u32 row = i / (COLS / 8), part = i % (COLS / 8), c = col + part * 8;
        float v[8];
        const u8 *from = row_at(g.w, 0, expert, min(first + row, g.n - 1));
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] = c < g.k ? row_element(g.w.type, from, c / 32 * 32 + column_at(c % 32 + j)) : 0.0f;
        *(uint4 *)(to + part_at(row, part)) = make_uint4(floats_to_bf16x2(v[0], v[1]), floats_to_bf16x2(v[2], v[3]),
                                                         floats_to_bf16x2(v[4], v[5]), floats_to_bf16x2(v[6], v[7]));
    }
}

template <int F> __device__ __forceinline__ void expert_gemm(const ExpertGemm &g) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ int rows[TILE];
    wait_for_previous_kernel();
    if ((int)blockIdx.y >= *(const int *)g.tiles) return;
    ExpertTile tile = ((const ExpertTile *)g.tiles)[1 + blockIdx.y];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first_row = blockIdx.x * MATRIX_ROWS;
    u32 rounds = (g.k + COLS - 1) / COLS;
    if (tile.expert < 0) {
        for (u32 i = threadIdx.x; i < tile.count * MATRIX_ROWS; i += THREADS) {
            u32 col = first_row + i % MATRIX_ROWS;
            if (col < g.n) ((float *)g.out)[(u64)(u32)((const int *)g.sorted)[tile.first + i / MATRIX_ROWS] * g.n + col] = 0.0f;
        }
        return;
    }
    for (int i = threadIdx.x; i < TILE; i += THREADS)
        rows[i] = ((const int *)g.sorted)[tile.first + min(i, tile.count - 1)];
    __syncthreads();
    u32 base = (u32)__cvta_generic_to_shared(memory), blocks = g.k / 32;
    Copies<TILE, COLS / 8> of_x([&](u32 row) { return g.x + (u64)((u32)rows[row] / g.rows_per_x) * g.k * 2; }, part_at);
    const u32 quants = Slot<F>::QUANTS, scales = Slot<F>::SCALES ? Slot<F>::SCALES : 4;
    // Rows beyond the matrix are never read.
    auto line_of = [&](u32 row) { return (u64)tile.expert * g.n + min(first_row + row, g.n - 1); };
    Copies<MATRIX_ROWS, quants / 16> of_matrix(
        [&](u32 row) { return g.quants + line_of(row) * (blocks * packed_quant_bytes(F)); },
        [](u32 row, u32 part) { return Slot<F>::X_BYTES + row * Slot<F>::PITCH + part * 16; });
    u64 of_scales = g.scales + line_of(threadIdx.x) * scale_stride(F, blocks) * (F == MATRIX_Q4_MIN ? 4 : 2);
    auto load = [&](u32 round) {
        if (round < rounds) {
            u32 slot = round % SLOTS * Slot<F>::BYTES;
            of_x.start(base + slot, round, tile.count, g.k / 8);
            if (F == MATRIX_ANY) {
                convert_matrix(g, tile.expert, first_row, round * COLS, memory + slot + Slot<F>::X_BYTES);
            } else {
                of_matrix.start(base + slot, round, g.n - first_row, blocks * packed_quant_bytes(F) / 16);
                if (threadIdx.x < MATRIX_ROWS)
                    copy_few<scales>(base + slot + Slot<F>::SCALES_AT + threadIdx.x * scales, of_scales + round * scales,
                                     first_row + threadIdx.x < g.n);
            }
        }
        commit_copies();
    };
    for (u32 i = 0; i < SLOTS - 1; i++) load(i);
    // A warp has all rows of the tile, and 16 of the matrix.
    float sum[TILE / 16][2][4];
#pragma unroll
    for (int i = 0; i < TILE / 16 * 8; i++) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
    for (u32 round = 0; round < rounds; round++) {
        wait_for_copies<SLOTS - 2>();
        // All have loaded this slot, and are done with the one that is loaded next.
        __syncthreads();
        load(round + SLOTS - 1);
        const u8 *slot = memory + round % SLOTS * Slot<F>::BYTES;
#pragma unroll
        for (int block = 0; block < COLS / 32; block++) {
            u32 b[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) weights_of<F>(slot, warp * 16 + n * 8 + lane / 4, block, b[n]);
#pragma unroll
            for (int m = 0; m < TILE / 16; m++) {
                if (m * 16 >= tile.count) continue;
                uint4 upper = *(const uint4 *)(slot + part_at(m * 16 + lane / 4, block * 4 + lane % 4));
                uint4 lower = *(const uint4 *)(slot + part_at(m * 16 + lane / 4 + 8, block * 4 + lane % 4));
                u32 one[4] = {upper.x, lower.x, upper.y, lower.y}, two[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    mma<true>(sum[m][n], one, b[n][0], b[n][1]);
                    mma<true>(sum[m][n], two, b[n][2], b[n][3]);
                }
            }
        }
    }
    bool pairs = g.n % 2 == 0;
#pragma unroll
    for (int m = 0; m < TILE / 16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = m * 16 + half * 8 + lane / 4;
            if (row >= tile.count) continue;
            float *to = (float *)g.out + (u64)(u32)rows[row] * g.n;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 col = first_row + warp * 16 + n * 8 + lane % 4 * 2;
                float a = sum[m][n][2 * half], b = sum[m][n][2 * half + 1];
                if (pairs && col + 1 < g.n) {
                    *(float2 *)(to + col) = make_float2(a, b);
                } else {
                    if (col < g.n) to[col] = a;
                    if (col + 1 < g.n) to[col + 1] = b;
                }
            }
        }
}

#define EXPERT_GEMM(name, format) \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) k_expert_gemm_##name(const __grid_constant__ ExpertGemm g) { \
        expert_gemm<format>(g); \
    }
FOR_EACH_PACKED_FORMAT(EXPERT_GEMM)
EXPERT_GEMM(any, MATRIX_ANY)

#endif
