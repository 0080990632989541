// Multiplication of a weight matrix with up to eight rows (GEMV and small batches), straight from packed or float
// weights; and the generic kernels for all types and strides.

// Quantizes rows to 8 bits: eight lanes per block of 32, four elements each.
extern "C" __global__ void k_quantize_q8(Tensor x, u64 quants, u64 scales, i64 blocks) {
    i64 n = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    i64 rows = x.d[0] * x.d[1] * x.d[2];
    if (n >= rows * blocks) return;
    int lane = threadIdx.x % 8;
    i64 b = n % blocks, r = n / blocks;
    i64 i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    float v[4];
    float largest = 0.0f;
    for (int i = 0; i < 4; i++) {
        v[i] = element(x, i0, i1, i2, b * 32 + lane * 4 + i);
        largest = fmaxf(largest, fabsf(v[i]));
    }
    u32 group = 0xffu << (threadIdx.x % 32 / 8 * 8);
    for (int o = 4; o > 0; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(group, largest, o));
    float scale = largest / 127.0f, inverse = scale > 0.0f ? 127.0f / largest : 0.0f;
    int sum = 0;
    u32 word = 0;
    for (int i = 0; i < 4; i++) {
        int q = __float2int_rn(v[i] * inverse);
        sum += q;
        word |= (u32)(q & 255) << (8 * i);
    }
    for (int o = 4; o > 0; o >>= 1) sum += __shfl_xor_sync(group, sum, o);
    ((u32 *)quants)[n * 8 + lane] = word;
    if (lane == 0) {
        float2 s;
        s.x = scale;
        s.y = scale * sum;
        ((float2 *)scales)[n] = s;
    }
}

// Up to three weight matrices that one launch multiplies with the same rows.
struct Segment {
    u64 quants, scales;    // packed weights
    u64 out;               // f32, `stride` elements from row to row
    u64 add;               // f32 to be added, laid out as `out`; 0: none
    u32 rows;              // rows of this matrix
    u32 first;             // the first block of the grid for this matrix
    i64 stride;
};
struct Segments { Segment s[3]; u32 count; u32 blocks; };

#define WARPS 4       // warps of a block
#define ROWS 2        // matrix rows per warp

// `M` is `used`, the number of activation rows, rounded up.
template <int M, int FORMAT>
__device__ __forceinline__ void packed_gemv(const Segments &all, u64 xq, u64 xs, u32 used) {
    int which = 0;
    if (all.count > 1 && blockIdx.x >= all.s[1].first) which = 1;
    if (all.count > 2 && blockIdx.x >= all.s[2].first) which = 2;
    const Segment &s = all.s[which];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, blocks = all.blocks;
    i64 stride = scale_stride(FORMAT, blocks);
    u32 row = (blockIdx.x - s.first) * (WARPS * ROWS) + warp * ROWS;
    if (row >= s.rows) return;
    float acc[ROWS][M];
    for (int r = 0; r < ROWS; r++) for (int m = 0; m < M; m++) acc[r][m] = 0.0f;
#pragma unroll(M == 1 ? 4 : 1)
    for (int b = lane; b < blocks; b += WARP) {
        float2 d[ROWS];
        int q[ROWS][8];
        for (int r = 0; r < ROWS; r++) {
            i64 line = min(row + r, s.rows - 1), at = line * blocks + b, scale_at = line * stride + b;
            Matrix<FORMAT>::load_block(s.quants, s.scales, at, scale_at, q[r], d[r]);
        }
        for (int m = 0; m < M; m++) {
            i64 at = (i64)(m < used ? m : 0) * blocks + b;
            int4 lo = ((const int4 *)xq)[2 * at], hi = ((const int4 *)xq)[2 * at + 1];
            float2 e = ((const float2 *)xs)[at];
            for (int r = 0; r < ROWS; r++) {
                int sum = dp4a_signed(q[r][0], lo.x, 0);
                sum = dp4a_signed(q[r][1], lo.y, sum);
                sum = dp4a_signed(q[r][2], lo.z, sum);
                sum = dp4a_signed(q[r][3], lo.w, sum);
                sum = dp4a_signed(q[r][4], hi.x, sum);
                sum = dp4a_signed(q[r][5], hi.y, sum);
                sum = dp4a_signed(q[r][6], hi.z, sum);
                sum = dp4a_signed(q[r][7], hi.w, sum);
                acc[r][m] += d[r].x * e.x * sum;
                if (Matrix<FORMAT>::HAS_OFFSET) acc[r][m] += d[r].y * e.y;
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int m = 0; m < M; m++) {
            float v = warp_sum(acc[r][m]);
            if (lane == 0 && m < used && row + r < s.rows) {
                i64 at = m * s.stride + row + r;
                if (s.add) v += ((const float *)s.add)[at];
                ((float *)s.out)[at] = v;
            }
        }
}

#define GEMV(name, format, m)                                                                                       \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP)                                                      \
        k_gemv_##name##_m##m(Segments all, u64 xq, u64 xs, u32 used) {                                              \
        packed_gemv<m, format>(all, xq, xs, used);                                                                  \
    }
#define GEMV_OF_EACH_BATCH(name, format) \
    GEMV(name, format, 1) GEMV(name, format, 2) GEMV(name, format, 4) GEMV(name, format, 8)
FOR_EACH_PACKED_FORMAT(GEMV_OF_EACH_BATCH)

// f16, bf16 and f32 weights times few rows: a warp per matrix row, eight elements per load.
template <int M>
__device__ __forceinline__ void float_gemv(Tensor w, Tensor x, Tensor out, u64 add, u32 used) {
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= w.d[2]) return;
    float acc[M];
    for (int m = 0; m < M; m++) acc[m] = 0.0f;
    const u8 *weights = row_at(w, 0, 0, row);
    i64 k = w.d[3];
    if (w.type != F32) {
        for (i64 c = lane * 8; c < k; c += WARP * 8) {
            int4 load = __ldcs((const int4 *)(weights + 2 * c));
            u32 words[4] = {(u32)load.x, (u32)load.y, (u32)load.z, (u32)load.w};
            float v[8];
            for (int i = 0; i < 4; i++) {
                v[2 * i] = w.type == F16 ? half_to_float((u16)words[i]) : bf16_to_float((u16)words[i]);
                v[2 * i + 1] =
                    w.type == F16 ? half_to_float((u16)(words[i] >> 16)) : bf16_to_float((u16)(words[i] >> 16));
            }
            for (int m = 0; m < M; m++) {
                const float4 *p = (const float4 *)(x.address + (m < used ? m : 0) * 4 * k + 4 * c);
                float4 a = p[0], b = p[1];
                acc[m] += v[0] * a.x + v[1] * a.y + v[2] * a.z + v[3] * a.w + v[4] * b.x + v[5] * b.y + v[6] * b.z +
                          v[7] * b.w;
            }
        }
    } else {
        for (i64 c = lane * 4; c < k; c += WARP * 4) {
            float4 v = __ldcs((const float4 *)(weights + 4 * c));
            for (int m = 0; m < M; m++) {
                float4 a = *(const float4 *)(x.address + (m < used ? m : 0) * 4 * k + 4 * c);
                acc[m] += v.x * a.x + v.y * a.y + v.z * a.z + v.w * a.w;
            }
        }
    }
    for (int m = 0; m < M; m++) {
        float v = warp_sum(acc[m]);
        if (lane == 0 && m < used) {
            i64 at = m * out.d[3] + row;
            if (add) v += ((const float *)add)[at];
            ((float *)out.address)[at] = v;
        }
    }
}

#define FLOAT_GEMV(m) \
    extern "C" __global__ void k_gemv_float_m##m(Tensor w, Tensor x, Tensor out, u64 add, u32 used) { \
        float_gemv<m>(w, x, out, add, used); \
    }
FLOAT_GEMV(1) FLOAT_GEMV(2) FLOAT_GEMV(4) FLOAT_GEMV(8)

// A float weight of few rows, as a router's, times one row: a block per matrix row. The first elements of the weight are
// loaded before the previous kernel is complete.
extern "C" __global__ void __launch_bounds__(128) k_gemv_float_block(Tensor w, u64 x, u64 out, u64 add) {
    __shared__ float shared[32];
    const int ahead = 4;
    const u8 *weights = row_at(w, 0, 0, blockIdx.x);
    int quads = (int)(w.d[3] / 4);
    auto four = [&](int i) {
        if (w.type == F32) return __ldcs((const float4 *)weights + i);
        uint2 pairs = __ldcs((const uint2 *)weights + i);
        u16 h[4] = {(u16)pairs.x, (u16)(pairs.x >> 16), (u16)pairs.y, (u16)(pairs.y >> 16)};
        if (w.type == F16)
            return make_float4(half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3]));
        return make_float4(bf16_to_float(h[0]), bf16_to_float(h[1]), bf16_to_float(h[2]), bf16_to_float(h[3]));
    };
    auto dot = [&](float4 v, int i) {
        float4 a = ((const float4 *)x)[i];
        return v.x * a.x + v.y * a.y + v.z * a.z + v.w * a.w;
    };
    float4 v[ahead];
#pragma unroll
    for (int j = 0; j < ahead; j++)
        if (j * 128 + threadIdx.x < quads) v[j] = four(j * 128 + threadIdx.x);
    wait_for_previous_kernel();
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < ahead; j++)
        if (j * 128 + threadIdx.x < quads) sum += dot(v[j], j * 128 + threadIdx.x);
    for (int i = ahead * 128 + threadIdx.x; i < quads; i += 128) sum += dot(four(i), i);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) ((float *)out)[blockIdx.x] = sum + (add ? ((const float *)add)[blockIdx.x] : 0.0f);
}

// The generic matrix multiplication: all types, any strides of whole rows; a warp per result.
extern "C" __global__ void k_mul_mat(Tensor w, Tensor x, Tensor out) {
    i64 n = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (n >= count(out)) return;
    Position i = position(out, n);
    i64 w0 = i.i0 / (x.d[0] / w.d[0]), w1 = i.i1 / (x.d[1] / w.d[1]);
    const u8 *row = row_at(w, w0, w1, i.i3);
    float sum = 0.0f;
    for (i64 c = threadIdx.x % WARP; c < w.d[3]; c += WARP)
        sum += row_element(w.type, row, c) * element(x, i.i0, i.i1, i.i2, c);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) put(out, i.i0, i.i1, i.i2, i.i3, sum);
}

extern "C" __global__ void k_mul_mat_id(Tensor w, Tensor x, Tensor ids, Tensor out, u64 fault_word, u32 fault) {
    i64 n = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (n >= count(out)) return;
    Position i = position(out, n);
    int expert = *(const int *)(ids.address + i.i1 * ids.s[2] + i.i2 * ids.s[3]);
    if (expert < 0 || expert >= w.d[1]) {
        // −1 is an expert that is elsewhere.
        if (threadIdx.x % WARP == 0) {
            if (expert == -1) put(out, 0, i.i1, i.i2, i.i3, 0.0f);
            else report(fault_word, fault);
        }
        return;
    }
    const u8 *row = row_at(w, 0, expert, i.i3);
    float sum = 0.0f;
    for (i64 c = threadIdx.x % WARP; c < w.d[3]; c += WARP)
        sum += row_element(w.type, row, c) * element(x, 0, i.i1, i.i2 % x.d[2], c);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) put(out, 0, i.i1, i.i2, i.i3, sum);
}

extern "C" __global__ void k_out_prod(Tensor a, Tensor b, Tensor out) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float sum = 0.0f;
        for (i64 k = 0; k < a.d[2]; k++) sum += any_element(a, i.i0, i.i1, k, i.i3) * element(b, i.i0, i.i1, k, i.i2);
        put(out, i.i0, i.i1, i.i2, i.i3, sum);
    }
}
