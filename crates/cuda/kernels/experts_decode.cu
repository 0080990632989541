// Matrices of experts times one token, streamed through shared memory by bulk copies (compute capability 9.0 and newer).
//
// A block takes some rows of an expert's gate and up, or some rows of the last matrix of all experts: everything that it
// multiplies fits into its shared memory, so all copies start as soon as the experts are known, and the grid fits the
// device at once.
//
// Directly after the router's logits, both kernels route for themselves (`routes`): a warp of each block, in registers,
// sooner than a kernel could that routes for all. The kernel of gate and up writes ids and weights for others. It lets the next kernel
// start only after its own wait: the logits are complete then. So the kernel of the last matrix, which shares the SMs with
// it, routes and starts its copies before it waits for the activations.

// Warps of a block of gate and up, and of a block of the last matrix.
#define GATED_WARPS 16
#define SUMMED_WARPS 8
// Rows of gate and up that a warp multiplies at once, with a mbarrier of their own; the most such parts of a warp.
#define PART_ROWS 3
#define MAX_PARTS 2
// The most rows of the last matrix that a warp multiplies.
#define MAX_LINES 2
// The most experts of a token.
#define MAX_USED 64
// float4s of the activations that a thread loads at once.
#define BATCH 6

__device__ __forceinline__ void wait_for_writes() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Activations that are quantized into shared memory. Every warp takes part in every round, because eight lanes quantize a
// block of 32 together.
template <int F, int THREADS> struct Activations {
    const float4 *x;
    u32 quads;
    float4 v[BATCH];

    __device__ __forceinline__ Activations(const float4 *x, u32 quads) : x(x), quads(quads) { load(0); }

    __device__ __forceinline__ void load(u32 first) {
        const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            u32 i = first + j * THREADS + threadIdx.x;
            v[j] = i < quads ? x[i] : zero;
        }
    }

    __device__ __forceinline__ void quantize(const Row &row) {
        for (u32 first = 0; first < quads; first += BATCH * THREADS) {
            if (first > 0) load(first);
#pragma unroll
            for (int j = 0; j < BATCH; j++)
                if (first + j * THREADS < quads)
                    store_activations<F>(row, (int)(first + j * THREADS + threadIdx.x), (int)quads, v[j]);
        }
    }
};

// Gate and up of one expert: blocks over rows (x) and the token's experts (y). In shared memory each warp has its rows of
// gate, then of up, then the scales of both in the same order.
template <int F> __device__ __forceinline__ void gated_experts(const ExpertGemv &w, const RouteWork &route) {
    const int WARPS = GATED_WARPS;
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[WARPS * MAX_PARTS];
    __shared__ int routed_expert;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, slot = blockIdx.y, blocks = w.cols / 32;
    u32 quant_bytes = Matrix<F>::quant_bytes(w.cols), scale_bytes = Matrix<F>::scale_bytes(w.cols);
    u32 own = w.block_rows / WARPS, parts = (own + PART_ROWS - 1) / PART_ROWS;
    u32 first = blockIdx.x * w.block_rows + warp * own, count = first < w.rows ? min(own, w.rows - first) : 0;
    u8 *quants = memory + warp * own * 2 * (quant_bytes + scale_bytes), *scales = quants + 2 * own * quant_bytes;
    Row row(memory + WARPS * own * 2 * (quant_bytes + scale_bytes), w.cols);
    u32 barrier = shared_address(barriers + warp * MAX_PARTS);
    if (lane < parts) {
        barrier_init(barrier + 8 * lane, 1);
        barriers_are_ready();
    }
    __syncwarp();
    wait_for_writes();
    launch_dependents();
    // Activations are on their way while the first warp routes.
    Activations<F, WARPS * WARP> activations((const float4 *)w.x + (u64)(w.x_rows == 1 ? 0 : slot) * (w.cols / 4),
                                             w.cols / 4);
    const float *logits = (const float *)route.logits.address;
    if (w.routes) {
        if (warp == 0) routed_expert = route_slot(route, logits, slot);
        __syncthreads();
    }
    int expert = w.routes ? routed_expert : expert_of(w, 0, slot);
    if (expert < 0) {
        for (u32 r = lane; r < count; r += WARP) ((float *)w.out)[(u64)slot * w.rows + first + r] = 0.0f;
        return;
    }
    // Four lanes for each part: quants and scales of gate, then of up.
    u32 part = lane / 4, begin = part * PART_ROWS;
    if (part < parts && begin < count) {
        u32 n = min(count - begin, PART_ROWS), m = lane / 2 % 2;
        u64 line = (u64)expert * w.rows + first + begin;
        if (lane % 4 == 0) barrier_expect(barrier + 8 * part, 2 * n * (quant_bytes + scale_bytes));
        if (lane % 2 == 0)
            bulk_copy(shared_address(quants + (m * own + begin) * quant_bytes), w.quants[m] + line * quant_bytes,
                      n * quant_bytes, barrier + 8 * part);
        else
            bulk_copy(shared_address(scales + (m * own + begin) * scale_bytes), w.scales[m] + line * scale_bytes,
                      n * scale_bytes, barrier + 8 * part);
    }
    activations.quantize(row);
    // For other kernels.
    if (w.routes && blockIdx.x == 0 && slot == 0 && warp == 0)
        write_routed(route, 0, route_in_registers(route, logits));
    __syncthreads();
    for (part = 0; part < parts; part++) {
        begin = part * PART_ROWS;
        if (begin >= count) break;
        u32 n = min(count - begin, PART_ROWS);
        barrier_wait(barrier + 8 * part, 0);
        float acc[PART_ROWS][2];
#pragma unroll
        for (int r = 0; r < PART_ROWS; r++) acc[r][0] = acc[r][1] = 0.0f;
#pragma unroll 2
        for (u32 i = lane; i < blocks; i += WARP) {
            int4 low = row.low[i], high = row.high[i];
            float2 e = row.scales[i];
#pragma unroll
            for (int r = 0; r < PART_ROWS; r++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    u32 at = m * own + min(begin + r, own - 1);
                    Matrix<F>::add_dot((const int4 *)(quants + at * quant_bytes), scales + at * scale_bytes, i, low, high,
                                       e, acc[r][m]);
                }
        }
        // Lane 0 gets the sum of gate, lane 16 that of up.
#pragma unroll
        for (int r = 0; r < PART_ROWS; r++) {
            float sum = lane < 16 ? acc[r][0] : acc[r][1];
            sum += __shfl_xor_sync(FULL, lane < 16 ? acc[r][1] : acc[r][0], 16);
            for (int o = 8; o > 0; o >>= 1) sum += __shfl_xor_sync(FULL, sum, o);
            float up = __shfl_down_sync(FULL, sum, 16);
            if (lane != 0 || r >= n) continue;
            u32 at = first + begin + r;
            u64 biased = (u64)expert * w.rows + at;
            if (w.bias[0]) sum += ((const float *)w.bias[0])[biased];
            if (w.bias[1]) up += ((const float *)w.bias[1])[biased];
            ((float *)w.out)[(u64)slot * w.rows + at] = gated(w.gate, sum, up);
        }
    }
}

// The last matrix, summed over the token's experts: blocks over rows. In shared memory: the rows of each expert, then their
// scales.
template <int F> __device__ __forceinline__ void summed_experts(const ExpertGemv &w, const RouteWork &route) {
    const int WARPS = SUMMED_WARPS;
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u64 barriers[MAX_USED];
    __shared__ int experts[MAX_USED];
    __shared__ float factors[MAX_USED];
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, blocks = w.cols / 32, all = w.used * blocks;
    u32 quant_bytes = Matrix<F>::quant_bytes(w.cols), scale_bytes = Matrix<F>::scale_bytes(w.cols);
    u32 first = blockIdx.x * w.block_rows, count = min(w.block_rows, w.rows - first), lines = w.block_rows / WARPS;
    u8 *scales = memory + w.used * w.block_rows * quant_bytes;
    Row row(scales + w.used * w.block_rows * scale_bytes, w.x_rows * w.cols);
    launch_dependents();
    u32 u = threadIdx.x, barrier = shared_address(barriers + min(u, MAX_USED - 1));
    if (u < w.used) {
        barrier_init(barrier, 1);
        barriers_are_ready();
    }
    __syncthreads();
    if (!w.routes) wait_for_writes();
    Routed routed = {0, 0.0f};
    if (w.routes && warp == 0) routed = route_in_registers(route, (const float *)route.logits.address);
    // The thread of an expert starts its copies.
    if (u < w.used) {
        if (!w.routes) {
            routed.expert = expert_of(w, 0, u);
            routed.weight = routed.expert < 0 ? 0.0f : __ldcg((const float *)w.weights + u);
        }
        int expert = routed.expert;
        u64 line = (u64)max(expert, 0) * w.rows + first;
        if (expert >= 0) {
            barrier_expect(barrier, count * (quant_bytes + scale_bytes));
            bulk_copy(shared_address(memory + u * w.block_rows * quant_bytes), w.quants[0] + line * quant_bytes,
                      count * quant_bytes, barrier);
            bulk_copy(shared_address(scales + u * w.block_rows * scale_bytes), w.scales[0] + line * scale_bytes,
                      count * scale_bytes, barrier);
        }
        experts[u] = expert;
        factors[u] = routed.weight;
    }
    if (w.routes) wait_for_writes();
    Activations<F, WARPS * WARP>((const float4 *)w.x, w.x_rows * w.cols / 4).quantize(row);
    // Lane `r` writes row `r` of the warp; what is added to it is loaded ahead.
    u32 at = first + warp * lines + lane;
    bool stores = lane < lines && warp * lines + lane < count;
    float addend = stores && w.add ? ((const float *)w.add)[at] : 0.0f;
    __syncthreads();
    for (u = 0; u < w.used; u++)
        if (experts[u] >= 0) barrier_wait(shared_address(barriers + u), 0);
    float inverse = 1.0f / blocks, acc[MAX_LINES];
#pragma unroll
    for (int line = 0; line < MAX_LINES; line++) acc[line] = 0.0f;
#pragma unroll 3
    for (u32 i = lane; i < all; i += WARP) {
        u32 u = (u32)((i + 0.5f) * inverse), b = i - u * blocks, x = w.x_rows == 1 ? b : i;
        int4 low = row.low[x], high = row.high[x];
        float2 e = row.scales[x];
        float factor = factors[u];
        if (experts[u] < 0) continue;
#pragma unroll
        for (int line = 0; line < MAX_LINES; line++) {
            u32 r = u * w.block_rows + warp * lines + min((u32)line, lines - 1);
            float part = 0.0f;
            Matrix<F>::add_dot((const int4 *)(memory + r * quant_bytes), scales + r * scale_bytes, b, low, high, e, part);
            acc[line] += factor * part;
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int line = 0; line < MAX_LINES; line++) {
        float of_line = warp_sum(acc[line]);
        if (lane == line) sum = of_line;
    }
    if (!stores) return;
    if (w.bias[0])
        for (u = 0; u < w.used; u++)
            if (experts[u] >= 0) sum += factors[u] * ((const float *)w.bias[0])[(u64)experts[u] * w.rows + at];
    ((float *)w.out)[at] = sum + addend;
}

#define EXPERTS_STREAMED(name, format) \
    extern "C" __global__ void __launch_bounds__(GATED_WARPS * WARP, 1) \
        k_experts_##name##_gated_streamed(const __grid_constant__ ExpertGemv w, const __grid_constant__ RouteWork route) { \
        gated_experts<format>(w, route); \
    } \
    extern "C" __global__ void __launch_bounds__(SUMMED_WARPS * WARP, 2) \
        k_experts_##name##_summed_streamed(const __grid_constant__ ExpertGemv w, const __grid_constant__ RouteWork route) { \
        summed_experts<format>(w, route); \
    }
#if __CUDA_ARCH__ >= 900
FOR_EACH_PACKED_FORMAT(EXPERTS_STREAMED)
#endif
