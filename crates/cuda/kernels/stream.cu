// One row times a matrix, the matrix streaming through shared memory (compute capability 9.0 and newer).
//
// The grid fills the device once: with blocks that leave room for the next kernel's where there is little to multiply,
// with larger ones where there is much, since more warps hide more of what each one waits for. Each warp has pairs of
// rows of its own (a *unit*) and a small ring in shared memory,
// which the copy engine fills while the warp multiplies what came before: no warp waits for another, and far more
// bytes are under way than registers could hold. Weights are known before the kernel starts, so the rings are filled
// while the kernel before is still running; only then does it wait for that kernel's results (programmatic dependent
// launch).
//
// Before: the row is normed, if asked for, and quantized to 8 bits, by each block of threads for itself.
// After: a residual or bias is added, or two products become a gated unit.

struct Part {
    u64 quants, scales;   // or the f16 elements
    u64 out;              // f32
    u64 add;              // f32 to be added; 0: none
    u32 rows;
    u32 first;            // its first unit
};

struct Job {
    Part part[3];
    u64 x;                // the row, f32
    u64 norm;             // weights of a root-mean-square norm of the row; 0: none
    u32 count;            // parts
    u32 gated;            // 1: the result is silu(part 0) · part 1; a unit is a row of each
    u32 units;
    u32 cols;
    u32 slots;            // of a warp's ring
    float eps;
};

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ int dot_unsigned(u32 a, int b, int c) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ int dot_signed(int a, int b, int c) {
    int r;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

template <int F> struct Form {
    static const u32 CHUNK = F == HALF ? 1024 : F == EIGHT ? 2048 : 4096;   // elements of a row that a slot holds
    __device__ static u32 quant_bytes(u32 n) { return F == HALF ? 2 * n : F == EIGHT ? n : n / 2; }
    // Scales of a row, in whole 16 bytes.
    __device__ static u32 scale_bytes(u32 n) {
        return F == HALF ? 0 : ((F == SHIFTED ? n / 8 : n / 16) + 15) / 16 * 16;
    }
};

// Where a unit's two rows are.
struct Rows { const Part *first, *second; u32 row, other; bool both; };

__device__ __forceinline__ Rows rows_of(const Job &job, u32 unit) {
    Rows r;
    if (job.gated) {
        r.first = &job.part[0];
        r.second = &job.part[1];
        r.row = r.other = unit;
        r.both = true;
        return r;
    }
    int p = 0;
    if (job.count > 1 && unit >= job.part[1].first) p = 1;
    if (job.count > 2 && unit >= job.part[2].first) p = 2;
    r.first = r.second = &job.part[p];
    r.row = 2 * (unit - r.first->first);
    r.other = r.row + 1;
    r.both = r.other < r.first->rows;
    return r;
}

// Fills a slot with a chunk of a unit's rows, by up to four copies: quants and scales of one row, then of the other. Each of
// four lanes makes one of them, the first says what is to come.
template <int F>
__device__ __forceinline__ void fetch(const Job &job, u32 unit, u32 chunk, u32 slot, u32 barrier, u32 which) {
    Rows r = rows_of(job, unit);
    bool other = which >= 2, scale = which & 1;
    u32 start = chunk * Form<F>::CHUNK, n = min(job.cols - start, Form<F>::CHUNK);
    u32 widest = min(job.cols, Form<F>::CHUNK);
    u32 quants = Form<F>::quant_bytes(n), scales = Form<F>::scale_bytes(n);
    if (which == 0) barrier_expect(barrier, (quants + scales) * (r.both ? 2 : 1));
    bool neighbours = r.both && !job.gated && n == job.cols;   // in memory
    if ((scale && F == HALF) || (other && (!r.both || neighbours))) return;
    const Part *part = other ? r.second : r.first;
    u64 row = other ? r.other : r.row;
    u64 from = scale ? part->scales + row * Form<F>::scale_bytes(job.cols) + Form<F>::scale_bytes(start)
                     : part->quants + row * Form<F>::quant_bytes(job.cols) + Form<F>::quant_bytes(start);
    u32 to = slot + (other ? scale ? Form<F>::scale_bytes(widest) : Form<F>::quant_bytes(widest) : 0) +
             (scale ? 2 * Form<F>::quant_bytes(widest) : 0);
    bulk_copy(to, from, (scale ? scales : quants) * (neighbours ? 2 : 1), barrier);
}

// The row, in shared memory: halves of each 32 elements apart, so that neighbouring lanes read neighbouring words.
struct Row {
    int4 *low, *high;       // 8-bit elements 0..16 and 16..32 of each block
    float2 *scales;         // scale, and scale times the sum of the elements
    float4 *even, *odd;     // f32 elements 0..4 and 4..8 of each eight, where the matrix is f16
};

// Quantizes four elements of the row, with those of seven other lanes; or keeps them as they are.
template <int F> __device__ __forceinline__ void keep(const Row &row, int i, int quads, float4 v) {
    if (F == HALF) {
        if (i < quads) (i % 2 ? row.odd : row.even)[i / 2] = v;
        return;
    }
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int o = 4; o > 0; o >>= 1) most = fmaxf(most, __shfl_xor_sync(FULL, most, o));
    float step = most * (1.0f / 127.0f), inverse = step > 0.0f ? __fdividef(127.0f, most) : 0.0f;
    int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse), c = __float2int_rn(v.z * inverse),
        d = __float2int_rn(v.w * inverse);
    int sum = a + b + c + d;
    if (F != EIGHT)   // which have no shift
        for (int o = 4; o > 0; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
    if (i < quads) {
        int part = i % 8;
        ((u32 *)((part < 4 ? row.low : row.high) + i / 8))[part % 4] =
            (u32)(a & 255) | (u32)(b & 255) << 8 | (u32)(c & 255) << 16 | (u32)d << 24;
        if (part == 0) row.scales[i / 8] = make_float2(step, step * sum);
    }
}

__device__ __forceinline__ float squares_of(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 times(float4 v, float4 w) {
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
}

// float4s that a thread loads before it uses the first; of a norm's row and its weights, those that it keeps.
#define BATCH 12
#define KEPT 4
// Warps of a block that shares its multiprocessor with the next kernel's, and of one that has it for itself.
#define FEW_WARPS 8
#define MANY_WARPS 16

// Waits for the kernel before, then brings its row into shared memory, and returns what products with it are to be
// multiplied with: the scale of a norm, which quantizing need not wait for. Loops go round with whole warps, since eight
// lanes work together on a block of 32.
template <int F, int WARPS> __device__ __forceinline__ float prepare(const Job &job, const Row &row, float *reduce) {
    const int threads = WARPS * WARP;
    const float4 *x = (const float4 *)job.x, *weights = (const float4 *)job.norm, zero = {0.0f, 0.0f, 0.0f, 0.0f};
    int quads = job.cols / 4, rounds = (quads + threads - 1) / threads;
    float squares = 0.0f;
    if (job.norm && rounds <= KEPT) {
        float4 v[KEPT], w[KEPT];
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int i = j * threads + threadIdx.x;
            w[j] = i < quads ? weights[i] : zero;
        }
        after_kernel_before();
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int i = j * threads + threadIdx.x;
            v[j] = i < quads ? x[i] : zero;
        }
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            squares += squares_of(v[j]);
            if (j < rounds) keep<F>(row, j * threads + threadIdx.x, quads, times(v[j], w[j]));
        }
    } else {
        after_kernel_before();
        for (int first = 0; first < rounds; first += BATCH) {
            float4 v[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                int i = (first + j) * threads + threadIdx.x;
                v[j] = i < quads ? x[i] : zero;
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                if (first + j >= rounds) break;
                int i = (first + j) * threads + threadIdx.x;
                if (job.norm) {
                    squares += squares_of(v[j]);
                    v[j] = times(v[j], i < quads ? weights[i] : zero);
                }
                keep<F>(row, i, quads, v[j]);
            }
        }
    }
    if (job.norm) {
        squares = warp_sum(squares);
        if (threadIdx.x % WARP == 0) reduce[threadIdx.x / WARP] = squares;
    }
    __syncthreads();
    if (!job.norm) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += reduce[i];
    return rsqrtf(__fdividef(sum, (float)job.cols) + job.eps);
}

// Adds a chunk's part of two products.
template <int F>
__device__ __forceinline__ void multiply(const u8 *slot, u32 n, u32 widest, u32 start, const Row &row, float acc[2]) {
    int lane = threadIdx.x % WARP;
    const u8 *scales = slot + 2 * Form<F>::quant_bytes(widest);
    if (F == HALF) {
        u32 first = start / 8;
#pragma unroll 2
        for (u32 i = lane; i < n / 8; i += WARP) {
            float4 a = row.even[first + i], b = row.odd[first + i];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 w = ((const uint4 *)(slot + r * Form<F>::quant_bytes(widest)))[i];
                acc[r] += half_to_float((u16)w.x) * a.x + half_to_float((u16)(w.x >> 16)) * a.y +
                          half_to_float((u16)w.y) * a.z + half_to_float((u16)(w.y >> 16)) * a.w +
                          half_to_float((u16)w.z) * b.x + half_to_float((u16)(w.z >> 16)) * b.y +
                          half_to_float((u16)w.w) * b.z + half_to_float((u16)(w.w >> 16)) * b.w;
            }
        }
        return;
    }
    u32 first = start / 32;
#pragma unroll 4
    for (u32 i = lane; i < n / 32; i += WARP) {
        int4 low = row.low[first + i], high = row.high[first + i];
        float2 e = row.scales[first + i];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int4 *quants = (const int4 *)(slot + r * Form<F>::quant_bytes(widest));
            const u8 *s = scales + r * Form<F>::scale_bytes(widest);
            if (F == EIGHT) {
                int4 a = quants[2 * i], b = quants[2 * i + 1];
                int sum = dot_signed(a.x, low.x, 0);
                sum = dot_signed(a.y, low.y, sum);
                sum = dot_signed(a.z, low.z, sum);
                sum = dot_signed(a.w, low.w, sum);
                sum = dot_signed(b.x, high.x, sum);
                sum = dot_signed(b.y, high.y, sum);
                sum = dot_signed(b.z, high.z, sum);
                sum = dot_signed(b.w, high.w, sum);
                acc[r] += half_to_float(((const u16 *)s)[i]) * e.x * sum;
                continue;
            }
            int4 w = quants[i];
            int lower = dot_unsigned((u32)w.x & 0x0f0f0f0f, low.x, 0);
            int upper = dot_unsigned((u32)w.x & 0xf0f0f0f0, high.x, 0);   // sixteen times what it should be
            lower = dot_unsigned((u32)w.y & 0x0f0f0f0f, low.y, lower);
            upper = dot_unsigned((u32)w.y & 0xf0f0f0f0, high.y, upper);
            lower = dot_unsigned((u32)w.z & 0x0f0f0f0f, low.z, lower);
            upper = dot_unsigned((u32)w.z & 0xf0f0f0f0, high.z, upper);
            lower = dot_unsigned((u32)w.w & 0x0f0f0f0f, low.w, lower);
            upper = dot_unsigned((u32)w.w & 0xf0f0f0f0, high.w, upper);
            float sum = lower + (upper >> 4);
            if (F == FOUR) {
                acc[r] += half_to_float(((const u16 *)s)[i]) * (e.x * sum - 8.0f * e.y);
            } else {
                u32 both = ((const u32 *)s)[i];
                acc[r] += half_to_float((u16)both) * e.x * sum + half_to_float((u16)(both >> 16)) * e.y;
            }
        }
    }
}

template <int F, int WARPS> __device__ __forceinline__ void stream(const Job &job) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float reduce[32];
    __shared__ u64 barriers[WARPS * 8];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 widest = min(job.cols, Form<F>::CHUNK);
    u32 slot_bytes = 2 * (Form<F>::quant_bytes(widest) + Form<F>::scale_bytes(widest));
    u8 *ring = memory + warp * job.slots * slot_bytes;
    u8 *behind = memory + WARPS * job.slots * slot_bytes;
    Row row;
    row.low = (int4 *)behind;
    row.high = row.low + job.cols / 32;
    row.scales = (float2 *)(row.high + job.cols / 32);
    row.even = (float4 *)behind;
    row.odd = row.even + job.cols / 8;

    u32 warps = gridDim.x * WARPS, number = blockIdx.x * WARPS + warp;
    u32 unit = number * job.units / warps, end = (number + 1) * job.units / warps;   // below 2³², the host sees to it
    u32 chunks = (job.cols + Form<F>::CHUNK - 1) / Form<F>::CHUNK, items = (end - unit) * chunks;
    u32 barrier = shared_address(barriers + warp * 8), base = shared_address(ring);
    let_next_start();
    // A lane for each: of a loop, racecheck takes a round that is not gone through for a write.
    if (lane < job.slots) {
        barrier_init(barrier + 8 * lane);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    u32 ahead = lane / 4;
    if (ahead < min(items, job.slots))
        fetch<F>(job, unit + ahead / chunks, ahead % chunks, base + ahead * slot_bytes, barrier + 8 * ahead, lane % 4);
    __syncwarp();
    float scale = prepare<F, WARPS>(job, row, reduce);

    u32 slot = 0, parity = 0, item = 0, ahead_unit = unit + job.slots / chunks, ahead_chunk = job.slots % chunks;
    for (; unit < end; unit++) {
        float acc[2] = {0.0f, 0.0f};
        Rows r = rows_of(job, unit);
        // Lane 0 has the sum of one row in the end, lane 16 that of the other. What is to be added is on its way already.
        u32 mine = lane / 16;
        bool gives = lane % 16 == 0 && (mine == 0 || (r.both && !job.gated));
        float plus = gives && !job.gated && r.first->add ? ((const float *)r.first->add)[r.row + mine] : 0.0f;
        for (u32 chunk = 0; chunk < chunks; chunk++, item++) {
            u32 start = chunk * Form<F>::CHUNK, n = min(job.cols - start, Form<F>::CHUNK);
            barrier_wait(barrier + 8 * slot, parity);
            multiply<F>(ring + slot * slot_bytes, n, widest, start, row, acc);
            __syncwarp();
            if (lane < 4 && item + job.slots < items)
                fetch<F>(job, ahead_unit, ahead_chunk, base + slot * slot_bytes, barrier + 8 * slot, lane);
            if (++ahead_chunk == chunks) {
                ahead_chunk = 0;
                ahead_unit++;
            }
            if (++slot == job.slots) {
                slot = 0;
                parity ^= 1;
            }
        }
        float sum = lane < 16 ? acc[0] : acc[1];
        sum += __shfl_xor_sync(FULL, lane < 16 ? acc[1] : acc[0], 16);
        for (int o = 8; o > 0; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
        sum *= scale;
        if (job.gated) {
            float up = __shfl_down_sync(FULL, sum, 16);
            if (gives) ((float *)r.first->out)[r.row] = __fdividef(sum, 1.0f + fast_exp(-sum)) * up;
        } else if (gives) {
            ((float *)r.first->out)[r.row + mine] = sum + plus;
        }
    }
}

#define STREAM(name, form, warps, blocks) \
    extern "C" __global__ void __launch_bounds__(warps * WARP, blocks) name(const __grid_constant__ Job job) { \
        stream<form, warps>(job); \
    }
#if __CUDA_ARCH__ >= 900
STREAM(k_stream_four, FOUR, FEW_WARPS, 2)
STREAM(k_stream_shifted, SHIFTED, FEW_WARPS, 2)
STREAM(k_stream_eight, EIGHT, FEW_WARPS, 2)
STREAM(k_stream_half, HALF, FEW_WARPS, 2)
STREAM(k_stream_four_alone, FOUR, MANY_WARPS, 1)
STREAM(k_stream_shifted_alone, SHIFTED, MANY_WARPS, 1)
STREAM(k_stream_eight_alone, EIGHT, MANY_WARPS, 1)
STREAM(k_stream_half_alone, HALF, MANY_WARPS, 1)
#endif
