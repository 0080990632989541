// GEMV whose matrix is streamed through shared memory by bulk copies (cp.async.bulk; compute capability 9.0 and newer).
//
// Each warp owns a range of row pairs and a ring of slots in shared memory. Bulk copies fill the slots, each with an
// mbarrier, while the warp multiplies the ones that are full: no warp waits for another, and far more bytes are in
// flight than registers could hold. The grid fills the device once: with blocks that leave room on their SM for a block
// of the next kernel where a matrix is small, with blocks of twice as many warps where it is large.
//
// Weights do not depend on earlier kernels, so the rings are filled while the previous kernel still runs (programmatic
// dependent launch); only then does the kernel wait for that one's results.
//
// Prologue: each block normalises the row (RMS norm, optional) and quantizes it to 8 bits for itself.
// Epilogue: adds a residual or bias, or computes SwiGLU of two matrices' results.

// One matrix of a launch.
struct StreamPart {
    u64 quants, scales;   // or the f16 elements
    u64 out;              // f32
    u64 add;              // f32 to be added; 0: none
    u32 rows;
    u32 first;            // its first row pair
};

struct StreamedGemv {
    StreamPart part[3];
    u64 x;                // the row, f32
    u64 norm;             // weights of the RMS norm of the row; 0: none
    u32 count;            // parts
    u32 gated;            // 1: the result is silu(part 0) · part 1, and a row pair is a row of each
    u32 pairs;
    u32 cols;
    u32 slots;            // of a warp's ring
    float eps;
};

// The two rows of a row pair; the last pair of a part may have one row only.
struct Rows { const StreamPart *first, *second; u32 row, other; bool both; };

__device__ __forceinline__ Rows rows_of(const StreamedGemv &job, u32 pair) {
    Rows r;
    if (job.gated) {
        r.first = &job.part[0];
        r.second = &job.part[1];
        r.row = r.other = pair;
        r.both = true;
        return r;
    }
    int p = 0;
    if (job.count > 1 && pair >= job.part[1].first) p = 1;
    if (job.count > 2 && pair >= job.part[2].first) p = 2;
    r.first = r.second = &job.part[p];
    r.row = 2 * (pair - r.first->first);
    r.other = r.row + 1;
    r.both = r.other < r.first->rows;
    return r;
}

// Fills a slot with a chunk of a row pair, by up to four bulk copies: quants and scales of one row, then of the other.
// Each of four lanes issues one of them; the first also announces the bytes to the mbarrier.
template <int F>
__device__ __forceinline__ void fetch(const StreamedGemv &job, u32 pair, u32 chunk, u32 slot, u32 barrier, u32 which) {
    Rows r = rows_of(job, pair);
    bool other = which >= 2, scale = which & 1;
    u32 start = chunk * Matrix<F>::CHUNK, n = min(job.cols - start, Matrix<F>::CHUNK);
    u32 widest = min(job.cols, Matrix<F>::CHUNK);
    u32 quants = Matrix<F>::quant_bytes(n), scales = Matrix<F>::scale_bytes(n);
    if (which == 0) barrier_expect(barrier, (quants + scales) * (r.both ? 2 : 1));
    bool adjacent = r.both && !job.gated && n == job.cols;   // both rows in one copy
    if ((scale && F == MATRIX_F16) || (other && (!r.both || adjacent))) return;
    const StreamPart *part = other ? r.second : r.first;
    u64 row = other ? r.other : r.row;
    u64 from = scale ? part->scales + row * Matrix<F>::scale_bytes(job.cols) + Matrix<F>::scale_bytes(start)
                     : part->quants + row * Matrix<F>::quant_bytes(job.cols) + Matrix<F>::quant_bytes(start);
    u32 to = slot + (other ? scale ? Matrix<F>::scale_bytes(widest) : Matrix<F>::quant_bytes(widest) : 0) +
             (scale ? 2 * Matrix<F>::quant_bytes(widest) : 0);
    bulk_copy(to, from, (scale ? scales : quants) * (adjacent ? 2 : 1), barrier);
}

__device__ __forceinline__ float squares_of(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

__device__ __forceinline__ float4 times(float4 v, float4 w) {
    return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
}

// float4s of the row that a thread loads before it uses the first; and, with a norm, that it keeps in registers.
#define BATCH 12
#define KEPT 4
// Warps of a block that shares its SM with a block of the next kernel, and of one that has the SM for itself.
#define FEW_WARPS 8
#define MANY_WARPS 16

// Waits for the previous kernel, loads its row into shared memory, and returns the factor on all dot products: the
// scale of the RMS norm, which quantizing need not wait for. All lanes of a warp take part in every round of a loop,
// because eight lanes quantize a block of 32 together.
template <int F, int WARPS>
__device__ __forceinline__ float prepare(const StreamedGemv &job, const Row &row, float *reduce) {
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
        wait_for_previous_kernel();
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            int i = j * threads + threadIdx.x;
            v[j] = i < quads ? x[i] : zero;
        }
#pragma unroll
        for (int j = 0; j < KEPT; j++) {
            squares += squares_of(v[j]);
            if (j < rounds) store_activations<F>(row, j * threads + threadIdx.x, quads, times(v[j], w[j]));
        }
    } else {
        wait_for_previous_kernel();
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
                store_activations<F>(row, i, quads, v[j]);
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

// Adds a chunk's share of the dot products of two rows.
template <int F>
__device__ __forceinline__ void multiply(const u8 *slot, u32 n, u32 widest, u32 start, const Row &row, float acc[2]) {
    int lane = threadIdx.x % WARP;
    const u8 *scales = slot + 2 * Matrix<F>::quant_bytes(widest);
    if (F == MATRIX_F16) {
        u32 first = start / 8;
#pragma unroll 2
        for (u32 i = lane; i < n / 8; i += WARP) {
            float4 a = row.even[first + i], b = row.odd[first + i];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4 w = ((const uint4 *)(slot + r * Matrix<F>::quant_bytes(widest)))[i];
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
            const int4 *quants = (const int4 *)(slot + r * Matrix<F>::quant_bytes(widest));
            const u8 *s = scales + r * Matrix<F>::scale_bytes(widest);
            Matrix<F>::add_dot(quants, s, i, low, high, e, acc[r]);
        }
    }
}

template <int F, int WARPS> __device__ __forceinline__ void gemv_streamed(const StreamedGemv &job) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float reduce[32];
    __shared__ u64 barriers[WARPS * 8];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 widest = min(job.cols, Matrix<F>::CHUNK);
    u32 slot_bytes = 2 * (Matrix<F>::quant_bytes(widest) + Matrix<F>::scale_bytes(widest));
    u8 *ring = memory + warp * job.slots * slot_bytes;
    u8 *behind = memory + WARPS * job.slots * slot_bytes;
    Row row(behind, job.cols);

    u32 warps = gridDim.x * WARPS, number = blockIdx.x * WARPS + warp;
    u32 pair = number * job.pairs / warps, end = (number + 1) * job.pairs / warps;   // the host checks for overflow
    u32 chunks = (job.cols + Matrix<F>::CHUNK - 1) / Matrix<F>::CHUNK, items = (end - pair) * chunks;
    u32 barrier = shared_address(barriers + warp * 8), base = shared_address(ring);
    launch_dependents();
    // One lane per barrier: in a loop, racecheck counts the predicated-off rounds as writes.
    if (lane < job.slots) {
        barrier_init(barrier + 8 * lane, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    u32 ahead = lane / 4;
    if (ahead < min(items, job.slots))
        fetch<F>(job, pair + ahead / chunks, ahead % chunks, base + ahead * slot_bytes, barrier + 8 * ahead, lane % 4);
    __syncwarp();
    float scale = prepare<F, WARPS>(job, row, reduce);

    u32 slot = 0, parity = 0, item = 0, ahead_pair = pair + job.slots / chunks, ahead_chunk = job.slots % chunks;
    for (; pair < end; pair++) {
        float acc[2] = {0.0f, 0.0f};
        Rows r = rows_of(job, pair);
        // Lane 0 ends up with the sum of one row, lane 16 with that of the other. The addend is loaded ahead of use.
        u32 mine = lane / 16;
        bool stores = lane % 16 == 0 && (mine == 0 || (r.both && !job.gated));
        float addend = stores && !job.gated && r.first->add ? ((const float *)r.first->add)[r.row + mine] : 0.0f;
        for (u32 chunk = 0; chunk < chunks; chunk++, item++) {
            u32 start = chunk * Matrix<F>::CHUNK, n = min(job.cols - start, Matrix<F>::CHUNK);
            barrier_wait(barrier + 8 * slot, parity);
            multiply<F>(ring + slot * slot_bytes, n, widest, start, row, acc);
            __syncwarp();
            if (lane < 4 && item + job.slots < items)
                fetch<F>(job, ahead_pair, ahead_chunk, base + slot * slot_bytes, barrier + 8 * slot, lane);
            if (++ahead_chunk == chunks) {
                ahead_chunk = 0;
                ahead_pair++;
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
            if (stores) ((float *)r.first->out)[r.row] = __fdividef(sum, 1.0f + fast_exp(-sum)) * up;
        } else if (stores) {
            ((float *)r.first->out)[r.row + mine] = sum + addend;
        }
    }
}

#define GEMV_STREAMED(name, format, warps, blocks) \
    extern "C" __global__ void __launch_bounds__(warps * WARP, blocks) \
        name(const __grid_constant__ StreamedGemv job) { \
        gemv_streamed<format, warps>(job); \
    }
#define GEMV_STREAMED_OF_EACH_SIZE(name, format) \
    GEMV_STREAMED(k_gemv_##name##_streamed, format, FEW_WARPS, 2) \
    GEMV_STREAMED(k_gemv_##name##_streamed_wide, format, MANY_WARPS, 1)
#if __CUDA_ARCH__ >= 900
FOR_EACH_PACKED_FORMAT(GEMV_STREAMED_OF_EACH_SIZE)
GEMV_STREAMED_OF_EACH_SIZE(f16, MATRIX_F16)
#endif
