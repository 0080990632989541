// GEMM of f16 or bf16 rows and a weight that becomes f16 or bf16 on the way to the tensor cores (wgmma, Hopper):
// out [m, n] = x [m, k] · (w [n, k])ᵀ, sums and result f32.
//
// The weight is the left operand: a block takes 128 of its rows, and N rows of `x`, 8 to 256. Each warp group
// multiplies 64 rows of the weight. `x` passes a ring of slots of 64 columns in shared memory, in the 128-byte swizzle that
// wgmma reads, which a warp has the tensor copy engine fill; weights that already are f16 or bf16 are in the slots, too.
// Others pass a ring of stages of 256 columns, as they are in memory, which another warp fills; the warp groups convert
// them in registers, from where wgmma takes them, while the tensor cores are busy with the columns before. Slots and
// stages have two mbarriers each: `full` counts what arrives, `empty` those who are done.
//
// wgmma adds up products in any order of columns, as long as both operands have the same. For weights that are converted,
// `x` has each 256 columns in an order in which a lane has whole blocks of 32 columns: place `128 h + 32 w + 16 s + p` has
// column `32 (2 (p % 8 / 2) + h) + 16 s + 4 w + 2 (p % 2) + p / 8`. Rows of `x` are padded to whole 256 columns with zeros.
//
// Clusters: with few rows of `x`, their blocks share a tile of the result; each multiplies a part of the columns, then
// each adds the parts of all for some rows. How many there are depends on the weight alone, and a sum has the same order
// whatever the number of rows: with up to 256, a row's result does not depend on the others. With more, PAIR, two
// blocks take tiles of the same rows of `x`, load half of them each and send it to both.
//
// Epilogue: a factor for each row; an addend, or an activation of one matrix's results times those of another.

#if __CUDA_ARCH_FEAT_SM90_ALL

// Arithmetic on pairs of f16.
__device__ __forceinline__ u32 add_f16x2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// (a & mask) | bits in one instruction: the compiler makes two of it where both are constants.
__device__ __forceinline__ u32 masked(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// Shared memory by address.
__device__ __forceinline__ uint4 shared_words(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u32 shared_word(u32 at) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint2 shared_pair(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ u16 shared_half(u32 at) {
    u16 v;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}

// One matrix of a launch.
struct MixedPart {
    u64 weight;           // rows in a file's format
    u64 out;              // f32, rows of `rows` elements
    u64 add;              // to be added, laid out as `out`; 0: none
    u32 rows;
    u32 first;            // its first tile
};

struct MixedGemm {
    MixedPart part[3];
    u64 row_scales;       // factors on rows of `x`; 0: none
    u64 row_bytes;        // of a row in a file's format
    u32 count;            // parts
    int gate;             // one of GATE_…, of parts 0 and 1, half a tile of each; -1: none
    u32 m, k;
    u32 tiles;
    u32 waits;            // 1: an earlier kernel writes the weights
};

// Maps of `x`, and of each part's weight: elements, or quants; scales.
struct MixedMaps { TensorMap x, weight[3], scales[3]; };

// Rows of the weight in a tile, and warp groups that multiply them.
#define TILE 128
#define GROUPS 2
// Columns of a stage.
#define STAGE_COLS 256

template <class S, int N> struct Shape {
    static const u32 WEIGHT_BYTES = S::IN_PLACE ? TILE * SLOT_COLS * 2 : 0;
    static const u32 SLOT_BYTES = WEIGHT_BYTES + N * SLOT_COLS * 2;
    // Slots with a barrier in common, and their number: as much as is multiplied while a load takes its time.
    static const u32 PIECE = S::IN_PLACE ? 1 : N == 128 ? 2 : 4;
    static const u32 PIECES = S::IN_PLACE ? (N == 256 ? 4 : N == 128 ? 6 : 8) : N == 64 ? 3 : N == 32 ? 2 : 4;
    static const u32 STAGE_BYTES = GROUPS * S::GROUP_BYTES;
    static const u32 STAGES = S::IN_PLACE ? 1 : STAGE_BYTES > 40000 || (STAGE_BYTES > 24000 && N == 128) ? 2 : STAGE_BYTES > 24000 ? 3 : 4;
    // Steps of wgmma in a row.
    static const u32 STEPS = N == 128 && S::IS_LEAN ? 8 : 4;
    // Blocks that an SM has room for.
    static const u32 BLOCKS = !S::IN_PLACE && N <= 32 && STAGE_BYTES <= 20480 ? 2 : 1;
    static const u32 THREADS = GROUPS * GROUP + 2 * WARP;
    // Floats from one row of a tile's results to the next: padded, so that four rows fall into different banks.
    static const u32 PITCH = TILE + 4;
};

// What a block works on.
struct MixedTile {
    const MixedGemm &g;
    const MixedMaps &maps;
    u32 tile, first_row;     // of the weight and of `x`
    u32 first, rounds;       // pieces
    u32 slots, stages;       // addresses in shared memory
    u32 full, empty;         // barriers of slots
    u32 stage_full, stage_empty;
    u32 rank;

    // The part whose rows a group of the tile has, and the first of them.
    __device__ __forceinline__ u32 part_of(u32 group) const {
        if (g.gate >= 0) return group;
        return g.count > 2 && tile >= g.part[2].first ? 2 : g.count > 1 && tile >= g.part[1].first ? 1 : 0;
    }
    __device__ __forceinline__ u32 line_of(u32 group) const {
        if (g.gate >= 0) return tile * 64;
        return (tile - g.part[part_of(0)].first) * TILE + group * 64;
    }
};

// Where 16 bytes of a row of 128 are in a box with the 128-byte swizzle.
__device__ __forceinline__ u32 part_at(u32 row, u32 part) { return row * 128 + (part ^ row % 8) * 16; }

// Begins to load a piece when its slots are free: weights that are not converted. One thread.
template <class S, int N> __device__ __forceinline__ void begin_piece(const MixedTile &t, u32 round) {
    typedef Shape<S, N> Sizes;
    u32 piece = round % Sizes::PIECES, barrier = t.full + 8 * piece;
    barrier_wait(t.empty + 8 * piece, round / Sizes::PIECES % 2 ^ 1);
    barrier_expect(barrier, Sizes::PIECE * Sizes::SLOT_BYTES);
    if constexpr (S::IN_PLACE) {
        u32 at = t.slots + piece * Sizes::SLOT_BYTES, col = (t.first + round) * SLOT_COLS;
#pragma unroll
        for (u32 i = 0; i < GROUPS; i++)
            load_box(at + i * (64 * SLOT_COLS * 2), t.maps.weight[t.part_of(i)], col, t.line_of(i), barrier);
    }
}

// Loads the rows of `x` of the piece.
template <class S, int N, bool PAIR> __device__ __forceinline__ void load_rows(const MixedTile &t, u32 round) {
    typedef Shape<S, N> Sizes;
    u32 piece = round % Sizes::PIECES, barrier = t.full + 8 * piece;
#pragma unroll
    for (u32 slot = 0; slot < Sizes::PIECE; slot++) {
        u32 at = t.slots + (piece * Sizes::PIECE + slot) * Sizes::SLOT_BYTES + Sizes::WEIGHT_BYTES;
        u32 col = ((t.first + round) * Sizes::PIECE + slot) * SLOT_COLS;
        if (PAIR)
            load_box_to_all(at + t.rank * (N / 2 * SLOT_COLS * 2), t.maps.x, col, t.first_row + t.rank * (N / 2), barrier, 3);
        else load_box(at, t.maps.x, col, t.first_row, barrier);
    }
}

// Loads all pieces; one thread. The first weights are on their way before the previous kernel, which writes the rows, is
// complete.
template <class S, int N, bool PAIR> __device__ __forceinline__ void load_pieces(const MixedTile &t) {
    u32 early = 0;
    if (S::IN_PLACE && !t.g.waits)
        for (; early < min(t.rounds, Shape<S, N>::PIECES); early++) begin_piece<S, N>(t, early);
    wait_for_previous_kernel();
    for (u32 i = 0; i < t.rounds; i++) {
        if (i >= early) begin_piece<S, N>(t, i);
        load_rows<S, N, PAIR>(t, i);
    }
}

// Adds the parts of `blocks` blocks of the cluster for some rows of `x`, and stores the results: four elements per thread
// and round, some rounds at a time, so that their loads are under way together.
template <class S, int N, bool GATED> __device__ __forceinline__ void finish(const MixedTile &t, u32 blocks) {
    typedef Shape<S, N> Sizes;
    const MixedGemm &g = t.g;
    const u32 chunks = GATED ? TILE / 8 : TILE / 4, at_once = N >= 64 ? 4 : 1, threads = GROUPS * GROUP;
    u32 share = N / blocks, begin = blocks > 1 ? t.rank * share : 0, end = min(share, g.m - min(g.m, t.first_row + begin));
    const MixedPart &part = g.part[t.part_of(0)];
    u32 c = threadIdx.x % chunks * 4, col = t.line_of(0) + c;
    bool whole = part.rows % 4 == 0 && col + 4 <= part.rows;
    if (col >= part.rows) return;
    auto sum = [&](u32 r, u32 c) {
        u32 at = t.slots + (r * Sizes::PITCH + c) * 4;
        float4 v;
        if (blocks > 1) {
            v = load_from_block(at, 0);
            for (u32 b = 1; b < blocks; b++) {
                float4 other = load_from_block(at, b);
                v = make_float4(v.x + other.x, v.y + other.y, v.z + other.z, v.w + other.w);
            }
        } else {
            uint4 bits = shared_words(at);
            v = make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
        }
        return v;
    };
    for (u32 r0 = threadIdx.x / chunks; r0 < end; r0 += at_once * (threads / chunks)) {
        float4 added[at_once];
        float scale[at_once];
#pragma unroll
        for (u32 i = 0; i < at_once; i++) {
            u32 r = r0 + i * (threads / chunks), row = t.first_row + begin + r;
            bool exists = r < end;
            scale[i] = exists && g.row_scales ? ((const float *)g.row_scales)[row] : 1.0f;
            added[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (!GATED && exists && part.add && whole) added[i] = *(const float4 *)(part.add + ((u64)row * part.rows + col) * 4);
        }
#pragma unroll
        for (u32 i = 0; i < at_once; i++) {
            u32 r = r0 + i * (threads / chunks);
            if (r >= end) break;
            u64 place = ((u64)(t.first_row + begin + r) * part.rows + col) * 4;
            float4 v = sum(begin + r, c);
            v = make_float4(v.x * scale[i], v.y * scale[i], v.z * scale[i], v.w * scale[i]);
            if (GATED) {
                float4 up = sum(begin + r, c + TILE / 2);
                v = make_float4(gated(g.gate, v.x, up.x * scale[i]), gated(g.gate, v.y, up.y * scale[i]),
                                gated(g.gate, v.z, up.z * scale[i]), gated(g.gate, v.w, up.w * scale[i]));
            }
            if (whole) {
                *(float4 *)(part.out + place) =
                    make_float4(v.x + added[i].x, v.y + added[i].y, v.z + added[i].z, v.w + added[i].w);
                continue;
            }
            float one[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (col + j < part.rows)
                    ((float *)(part.out + place))[j] = one[j] + (!GATED && part.add ? ((const float *)(part.add + place))[j] : 0.0f);
        }
    }
}

template <class S, int N, bool PAIR>
__device__ __forceinline__ void gemm_mixed(const MixedMaps &maps, const MixedGemm &g) {
    typedef Shape<S, N> Sizes;
    extern __shared__ u8 memory[];
    __shared__ u64 barriers[2 * Sizes::PIECES + 2 * Sizes::STAGES];
    u32 base = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers);
    u32 group = threadIdx.x / GROUP, rank = block_of_cluster(), blocks = blocks_of_cluster(), split = PAIR ? 1 : blocks;
    u32 tile = PAIR ? blockIdx.y * 2 + rank : blockIdx.y;
    // Parts of the columns have whole stages.
    const u32 per_stage = STAGE_COLS / SLOT_COLS / Sizes::PIECE, pieces = (g.k + SLOT_COLS * Sizes::PIECE - 1) / (SLOT_COLS * Sizes::PIECE);
    u32 stages = (g.k + STAGE_COLS - 1) / STAGE_COLS, all = S::IN_PLACE ? pieces : stages * per_stage;
    u32 first = PAIR ? 0 : stages * rank / blocks * per_stage;
    u32 last = PAIR ? all : min(stages * (rank + 1) / blocks * per_stage, all);
    MixedTile t = {g, maps, min(tile, g.tiles - 1), blockIdx.x / blocks * N, first, last - first, base,
                         base + Sizes::PIECES * Sizes::PIECE * Sizes::SLOT_BYTES, full, full + 8 * Sizes::PIECES, full + 16 * Sizes::PIECES,
                         full + 16 * Sizes::PIECES + 8 * Sizes::STAGES, rank};
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < Sizes::PIECES; i++) {
            barrier_init(t.full + 8 * i, 1);
            barrier_init(t.empty + 8 * i, GROUPS * (PAIR ? 2 : 1));
        }
        for (u32 i = 0; i < Sizes::STAGES; i++) {
            barrier_init(t.stage_full + 8 * i, 1);
            barrier_init(t.stage_empty + 8 * i, GROUPS * GROUP / WARP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (PAIR) cluster_barrier();
    else __syncthreads();
    launch_dependents();
    if (group < GROUPS) {
        float d[N / 2];
        auto release = [&](u32 piece) {
            if (PAIR && threadIdx.x % GROUP < 2) barrier_arrive_at(t.empty + 8 * piece, threadIdx.x % GROUP);
            if (!PAIR && threadIdx.x % GROUP == 0) barrier_arrive(t.empty + 8 * piece);
        };
        u32 piece = 0, parity = 0, previous = 0;
        auto next = [&]() {
            previous = piece;
            if (++piece == Sizes::PIECES) {
                piece = 0;
                parity ^= 1;
            }
        };
        if constexpr (S::IN_PLACE) {
            for (u32 i = 0; i < t.rounds; i++) {
                barrier_wait(t.full + 8 * piece, parity);
                u32 at = base + piece * Sizes::SLOT_BYTES;
                u64 left = operand(at + group * (64 * SLOT_COLS * 2)), right = operand(at + Sizes::WEIGHT_BYTES);
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < SLOT_COLS / 16; step++)
                    wgmma<N, S::IS_BF16>(d, left + 2 * step, right + 2 * step, i > 0 || step > 0);
                wgmma_commit();
                // The multiplications of the round before are complete.
                wgmma_wait<1>();
                if (i > 0) release(previous);
                next();
            }
        } else {
            const u32 steps = Sizes::STEPS;
            u32 lane = threadIdx.x % WARP, row = threadIdx.x % GROUP / WARP * 16 + lane / 4, stage = 0, stage_parity = 0;
            S source;
            typename S::Quants quants;
            for (u32 i = 0; i < t.rounds; i += per_stage) {
                barrier_wait(t.stage_full + 8 * stage, stage_parity);
                u32 from = t.stages + stage * Sizes::STAGE_BYTES + group * S::GROUP_BYTES;
                source.start(t, from, row);
#pragma unroll
                for (u32 unit = 0; unit < 16 / steps; unit++) {
                    // Converted while the columns before are multiplied. The registers that wgmma reads are written while
                    // none runs: otherwise the compiler would have it wait after every step. So the last operation of
                    // the conversion is left for then.
                    u32 raw[steps * 4], left[steps * 4];
                    if (unit % (8 / steps) == 0) source.load(t, from, row, unit * steps / 8, (t.first + i) / per_stage, quants);
#pragma unroll
                    for (u32 w = 0; w < steps / 2; w++) source.prepare(quants, unit * steps / 8, (unit * steps / 2 + w) % 4, raw + 8 * w);
                    wgmma_wait<0>();
                    bool is_first = unit * steps % (Sizes::PIECE * 4) == 0;
                    if (is_first && i + unit > 0) release(previous);
#pragma unroll
                    for (u32 j = 0; j < steps * 4; j++) left[j] = source.finish(raw[j], unit * steps / 8, j);
                    if (is_first) barrier_wait(t.full + 8 * piece, parity);
                    u32 at = base + (piece * Sizes::PIECE + unit * steps / 4 % Sizes::PIECE) * Sizes::SLOT_BYTES;
                    u64 right = operand(at);
                    wgmma_fence();
#pragma unroll
                    for (u32 step = 0; step < steps; step++)
                        wgmma_from<N, S::IS_BF16>(d, left + 4 * step, right + step / 4 * (Sizes::SLOT_BYTES >> 4) + step % 4 * 2,
                                                  i + unit > 0 || step > 0);
                    wgmma_commit();
                    if ((unit + 1) * steps % (Sizes::PIECE * 4) == 0) next();
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(t.stage_empty + 8 * stage);
                if (++stage == Sizes::STAGES) {
                    stage = 0;
                    stage_parity ^= 1;
                }
            }
        }
        wgmma_wait<0>();
        wait_for_previous_kernel();
        // Slots and stages have no readers any more: the results take their place.
        asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * GROUP) : "memory");
        u32 to = base + (threadIdx.x % 4 * 2 * Sizes::PITCH + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4) * 4;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + ((8 * j + i % 2) * Sizes::PITCH + i / 2 * 8) * 4),
                             "f"(d[4 * j + i]) : "memory");
        if (split > 1) cluster_barrier_of_writes();
        else asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * GROUP) : "memory");
        if (tile < g.tiles) {
            if (g.gate >= 0) finish<S, N, true>(t, split);
            else finish<S, N, false>(t, split);
        }
        __syncwarp();
    } else {
        if (threadIdx.x < GROUPS * GROUP + WARP) {
            if (threadIdx.x % WARP == 0) load_pieces<S, N, PAIR>(t);
            __syncwarp();
        } else if constexpr (!S::IN_PLACE) {
            if (g.waits) wait_for_previous_kernel();
            for (u32 i = 0; i < t.rounds / per_stage; i++) {
                u32 place = i % Sizes::STAGES;
                barrier_wait(t.stage_empty + 8 * place, i / Sizes::STAGES % 2 ^ 1);
                S::load_stage(t, t.stages + place * Sizes::STAGE_BYTES, t.first / per_stage + i,
                                             t.stage_full + 8 * place);
                __syncwarp();
            }
        }
        if (split > 1) cluster_barrier_of_writes();
    }
    // A block ends only when no other one reads its shared memory, or sends to it.
    if (blocks > 1) cluster_barrier();
}

#define GEMM_MIXED(name, source, n) \
    extern "C" __global__ void __launch_bounds__(Shape<source, n>::THREADS, Shape<source, n>::BLOCKS) \
        name##_##n(const __grid_constant__ MixedMaps maps, const __grid_constant__ MixedGemm g) { \
        gemm_mixed<source, n, false>(maps, g); \
    }
#define GEMM_MIXED_PAIR(name, source, n) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Shape<source, n>::THREADS, 1) \
        name##_##n##_pair(const __grid_constant__ MixedMaps maps, const __grid_constant__ MixedGemm g) { \
        gemm_mixed<source, n, true>(maps, g); \
    }

#endif
