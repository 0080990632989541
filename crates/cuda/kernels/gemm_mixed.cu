// GEMM with weights that are packed, f16 or bf16 (gemm_mixed.cuh).

#if __CUDA_ARCH_FEAT_SM90_ALL

// Packed formats. For each 64 rows, a stage has the quants of 256 columns in boxes of 128 bytes, then the scales.
template <int F> struct Packed {
    static const bool IN_PLACE = false, IS_BF16 = F == MATRIX_MXFP4, IS_LEAN = true;
    static const u32 BOXES = F == MATRIX_Q8 ? 2 : 1;
    static const u32 BOX_BYTES = 64 * 128;
    static const u32 SCALES = F == MATRIX_Q4_MIN ? 32 : 16;        // bytes of a row
    static const u32 GROUP_BYTES = BOXES * BOX_BYTES + 64 * SCALES;

    __device__ static __forceinline__ void load_stage(const MixedTile &t, u32 to, u32 stage, u32 barrier) {
        u32 lane = threadIdx.x % WARP, group = lane % GROUPS, box = lane / GROUPS;
        u32 p = t.part_of(group), line = t.line_of(group);
        if (lane == 0) barrier_expect(barrier, GROUPS * GROUP_BYTES);
        __syncwarp();
        to += group * GROUP_BYTES + box * BOX_BYTES;
        if (box < BOXES) load_box(to, t.maps.weight[p], (stage * BOXES + box) * 128, line, barrier);
        else if (box == BOXES) load_box(to, t.maps.scales[p], stage * SCALES, line, barrier);
    }

    // The quants of a lane's block of two rows, 8 bits each in two words of four.
    struct Quants { uint4 words[2][BOXES]; };
    // Of two rows: scales, and minima, of two blocks.
    u32 scale[2][2], minimum[2][2];
    // An instruction takes one constant only; the others are in registers.
    u32 low_mask, high_mask;

    __device__ __forceinline__ void start(const MixedTile &, u32 stage, u32 row) {
        low_mask = 0x000f000f;
        high_mask = 0x00f000f0;
        asm volatile("" : "+r"(low_mask), "+r"(high_mask));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 at = stage + BOXES * BOX_BYTES + (row + 8 * half) * SCALES + threadIdx.x % 4 * (SCALES / 4);
            if (F == MATRIX_Q4_MIN) {
                uint2 both = shared_pair(at);
                scale[half][0] = __byte_perm(both.x, 0, 0x1010);
                scale[half][1] = __byte_perm(both.y, 0, 0x1010);
                minimum[half][0] = __byte_perm(both.x, 0, 0x3232);
                minimum[half][1] = __byte_perm(both.y, 0, 0x3232);
            } else {
                u32 both = shared_word(at);
                scale[half][0] = __byte_perm(both, 0, 0x1010);
                scale[half][1] = __byte_perm(both, 0, 0x3232);
            }
        }
    }

    // Loads block `h` of the lane's two.
    __device__ __forceinline__ void load(const MixedTile &, u32 stage, u32 row, u32 h, u32, Quants &q) const {
        u32 block = threadIdx.x % 4 * 2 + h;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = row + 8 * half;
            if (F == MATRIX_Q8) {
                u32 box = stage + block / 4 * BOX_BYTES;
                q.words[half][0] = shared_words(box + part_at(r, block % 4 * 2));
                q.words[half][BOXES - 1] = shared_words(box + part_at(r, block % 4 * 2 + 1));
            } else {
                q.words[half][0] = shared_words(stage + part_at(r, block));
            }
        }
    }

    // Quants less their offset, exactly, as operands of two steps of wgmma: of word `w` of the rows.
    __device__ __forceinline__ void prepare(const Quants &q, u32, u32 w, u32 *to) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 &one = q.words[half][0], &two = q.words[half][BOXES - 1];
            u32 word = w == 0 ? one.x : w == 1 ? one.y : w == 2 ? one.z : one.w;
            if (F == MATRIX_Q8) {
                // 1024 + quant + 128, exactly.
                u32 second = (w == 0 ? two.x : w == 1 ? two.y : w == 2 ? two.z : two.w) ^ 0x80808080;
                word ^= 0x80808080;
                to[half] = add_f16x2(__byte_perm(word, 0x64646464, 0x4240), 0xe480e480);
                to[2 + half] = add_f16x2(__byte_perm(word, 0x64646464, 0x4341), 0xe480e480);
                to[4 + half] = add_f16x2(__byte_perm(second, 0x64646464, 0x4240), 0xe480e480);
                to[6 + half] = add_f16x2(__byte_perm(second, 0x64646464, 0x4341), 0xe480e480);
            } else if (F == MATRIX_MXFP4) {
                // Sign, exponent and mantissa in their places are the element times 2⁻¹²⁶; the levels are doubled elements.
                const u32 none = 0x80008000;   // −0
                to[half] = fma_bf16x2((word << 12 & 0x80008000) | (word << 6 & 0x01c001c0), 0x7f007f00, none);
                to[2 + half] = fma_bf16x2((word << 4 & 0x80008000) | (word >> 2 & 0x01c001c0), 0x7f007f00, none);
                to[4 + half] = fma_bf16x2((word << 8 & 0x80008000) | (word << 2 & 0x01c001c0), 0x7f007f00, none);
                to[6 + half] = fma_bf16x2((word & 0x80008000) | (word >> 6 & 0x01c001c0), 0x7f007f00, none);
            } else {
                // 1024 + quant and 1024 + 16 · quant, exactly.
                const u32 low = F == MATRIX_Q4 ? 0xe408e408 : 0xe400e400, high = F == MATRIX_Q4 ? 0xd480d480 : 0xd400d400;
                u32 odd = word >> 8;
                to[half] = add_f16x2(masked(word, low_mask, 0x64006400), low);
                to[2 + half] = add_f16x2(masked(odd, low_mask, 0x64006400), low);
                to[4 + half] = fma_f16x2(masked(word, high_mask, 0x64006400), 0x2c002c00, high);
                to[6 + half] = fma_f16x2(masked(odd, high_mask, 0x64006400), 0x2c002c00, high);
            }
        }
    }

    // The element that operand `j` of a step has.
    __device__ __forceinline__ u32 finish(u32 quants, u32 h, u32 j) const {
        if (F == MATRIX_Q4_MIN) return fma_f16x2(quants, scale[j % 2][h], minimum[j % 2][h]);
        if (F == MATRIX_MXFP4) return fma_bf16x2(quants, scale[j % 2][h], 0x80008000);
        return mul_f16x2(quants, scale[j % 2][h]);
    }
};

#define GEMM_MIXED_OF_EACH_SIZE(name, source) \
    GEMM_MIXED(name, source, 8) GEMM_MIXED(name, source, 16) GEMM_MIXED(name, source, 32) GEMM_MIXED(name, source, 64) \
    GEMM_MIXED(name, source, 128) GEMM_MIXED_PAIR(name, source, 128)
#define GEMM_MIXED_PACKED(name, format) GEMM_MIXED_OF_EACH_SIZE(k_gemm_mixed_##name, Packed<format>)
FOR_EACH_PACKED_FORMAT(GEMM_MIXED_PACKED)

// f16 and bf16, loaded to the slots as they are.
template <bool BF16> struct InPlace {
    static const bool IN_PLACE = true, IS_BF16 = BF16, IS_LEAN = true;
    static const u32 GROUP_BYTES = 0;
};
GEMM_MIXED_OF_EACH_SIZE(k_gemm_mixed_f16, InPlace<false>)
GEMM_MIXED_OF_EACH_SIZE(k_gemm_mixed_bf16, InPlace<true>)
GEMM_MIXED_PAIR(k_gemm_mixed_f16, InPlace<false>, 256)
GEMM_MIXED_PAIR(k_gemm_mixed_bf16, InPlace<true>, 256)

// The power of two that a row is divided by before it becomes f16: its largest element is then at least 2¹⁴ and less than
// 2¹⁵, so that nothing overflows, and small elements keep as many bits as they can.
__device__ __forceinline__ float f16_row_scale(float largest) {
    u32 exponent = __float_as_uint(largest) >> 23;
    return __uint_as_float((exponent > 15 ? exponent - 14 : largest > 0.0f ? 1 : 127) << 23);
}

// The column that a place of a row has, in the order for weights that are converted (gemm_mixed.cuh).
__device__ __forceinline__ u32 column_at(u32 place) {
    u32 p = place % 16;
    return place / 256 * 256 + 32 * (2 * (p % 8 / 2) + place % 256 / 128) + place % 32 / 16 * 16 + place % 128 / 32 * 4 +
           2 * (p % 2) + p / 8;
}

// Rows of any tensor as f16, each divided by a power of two, or as bf16: the right operand. A block per row, eight elements
// per thread and round. With a norm's weight, rows are normalised (RMS norm) and multiplied with it first. For many rows:
// blocks hide each other's latency, and stores are adjacent.
extern "C" __global__ void __launch_bounds__(512)
    k_mixed_rows(Tensor x, u64 norm, float eps, u32 pitch, u64 out, u64 scales, u32 is_ordered, u32 is_bf16) {
    __shared__ float shared[32];
    wait_for_previous_kernel();
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    u32 k = (u32)x.d[3];
    const u8 *row = row_at(x, i0, i1, i2);
    bool is_dense = x.type == F32 && x.s[3] == 4;
    auto at = [&](u32 c) { return is_dense ? ((const float *)row)[c] : element(x, i0, i1, i2, c); };
    float largest = 0.0f, squares = 0.0f;
    if (!is_bf16 || norm) {
        for (u32 c = threadIdx.x; c < k; c += blockDim.x) {
            float v = at(c);
            squares += v * v;
            largest = fmaxf(largest, fabsf(norm ? v * ((const float *)norm)[c] : v));
        }
        largest = block_max(largest, shared);
    }
    float factor = norm ? 1.0f / sqrtf(block_sum(squares, shared) / k + eps) : 1.0f;
    float scale = is_bf16 ? 1.0f : f16_row_scale(largest * factor), inverse = 1.0f / scale;
    if (threadIdx.x == 0 && !is_bf16) ((float *)scales)[r] = scale;
    for (u32 n = threadIdx.x; n < pitch / 8; n += blockDim.x) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 c = is_ordered ? column_at(8 * n + i) : 8 * n + i;
            v[i] = c < k ? at(c) : 0.0f;
            if (norm && c < k) v[i] = v[i] * factor * ((const float *)norm)[c];
            v[i] *= inverse;
        }
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = is_bf16 ? floats_to_bf16x2(v[2 * i], v[2 * i + 1]) : floats_to_f16x2(v[2 * i], v[2 * i + 1]);
        ((uint4 *)out)[r * (pitch / 8) + n] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// The same for few rows, which wait for every load and reduction: each element is loaded once, and one reduction has both
// sum and maximum.
//
// A thread takes 16 columns at a time, four from each quarter of 256, so that neighbours load adjacent columns; they are
// adjacent in the order for weights that are converted (gemm_mixed.cuh). It keeps the first two sixteens in registers.
extern "C" __global__ void __launch_bounds__(512)
    k_mixed_few_rows(Tensor x, u64 norm, float eps, u32 pitch, u64 out, u64 scales, u32 is_ordered, u32 is_bf16) {
    const u32 KEPT = 2;
    __shared__ float largest_of[32], squares_of[32];
    wait_for_previous_kernel();
    i64 r = blockIdx.x, i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    u32 k = (u32)x.d[3], units = (pitch + 255) / 256 * 16, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const u8 *row = row_at(x, i0, i1, i2);
    bool has_fours = x.type == F32 && x.s[3] == 4 && k % 4 == 0 && ((u64)row | norm) % 16 == 0;
    float largest = 0.0f, squares = 0.0f;
    // Loads a unit, multiplied with the norm's weight.
    auto load = [&](u32 unit, float4 (&v)[4], bool counts) {
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            u32 c = unit / 16 * 256 + 64 * q + unit % 16 * 4;
            float4 weight = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            v[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (has_fours && c < k) {
                v[q] = *(const float4 *)(row + c * 4);
                if (norm) weight = *(const float4 *)(norm + c * 4);
            } else if (!has_fours) {
                const float *w = (const float *)norm;
                if (c < k) v[q].x = element(x, i0, i1, i2, c), weight.x = norm ? w[c] : 1.0f;
                if (c + 1 < k) v[q].y = element(x, i0, i1, i2, c + 1), weight.y = norm ? w[c + 1] : 1.0f;
                if (c + 2 < k) v[q].z = element(x, i0, i1, i2, c + 2), weight.z = norm ? w[c + 2] : 1.0f;
                if (c + 3 < k) v[q].w = element(x, i0, i1, i2, c + 3), weight.w = norm ? w[c + 3] : 1.0f;
            }
            if (counts) squares += v[q].x * v[q].x + v[q].y * v[q].y + v[q].z * v[q].z + v[q].w * v[q].w;
            v[q] = make_float4(v[q].x * weight.x, v[q].y * weight.y, v[q].z * weight.z, v[q].w * weight.w);
            if (counts)
                largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v[q].x), fabsf(v[q].y)), fmaxf(fabsf(v[q].z), fabsf(v[q].w))));
        }
    };
    float4 kept[KEPT][4];
#pragma unroll
    for (u32 i = 0; i < KEPT; i++)
        if (threadIdx.x + i * blockDim.x < units) load(threadIdx.x + i * blockDim.x, kept[i], true);
    float factor = 1.0f, scale = 1.0f;
    if (!is_bf16 || norm) {
        float4 other[4];
        for (u32 unit = threadIdx.x + KEPT * blockDim.x; unit < units; unit += blockDim.x) load(unit, other, true);
        largest = warp_max(largest);
        squares = warp_sum(squares);
        if (lane == 0) {
            largest_of[warp] = largest;
            squares_of[warp] = squares;
        }
        __syncthreads();
        bool exists = lane < (blockDim.x + WARP - 1) / WARP;
        largest = warp_max(exists ? largest_of[lane] : 0.0f);
        squares = warp_sum(exists ? squares_of[lane] : 0.0f);
        if (norm) factor = 1.0f / sqrtf(squares / k + eps);
        if (!is_bf16) scale = f16_row_scale(largest * factor);
    }
    if (threadIdx.x == 0 && !is_bf16) ((float *)scales)[r] = scale;
    float inverse = 1.0f / scale;
    auto pair = [&](float low, float high) {
        low = low * factor * inverse;
        high = high * factor * inverse;
        return is_bf16 ? floats_to_bf16x2(low, high) : floats_to_f16x2(low, high);
    };
    auto store = [&](u32 unit, const float4 (&v)[4]) {
        u8 *to = (u8 *)(out + r * pitch * 2);
        if (is_ordered) {
            // Bits of the unit: h, s, w, w of place `128 h + 32 w + 16 s`.
            u32 u = unit % 16;
            uint4 *at = (uint4 *)(to + (unit / 16 * 256 + u / 8 * 128 + u % 4 * 32 + u / 4 % 2 * 16) * 2);
            at[0] = make_uint4(pair(v[0].x, v[0].z), pair(v[1].x, v[1].z), pair(v[2].x, v[2].z), pair(v[3].x, v[3].z));
            at[1] = make_uint4(pair(v[0].y, v[0].w), pair(v[1].y, v[1].w), pair(v[2].y, v[2].w), pair(v[3].y, v[3].w));
            return;
        }
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            u32 c = unit / 16 * 256 + 64 * q + unit % 16 * 4;
            if (c < pitch) *(uint2 *)(to + c * 2) = make_uint2(pair(v[q].x, v[q].y), pair(v[q].z, v[q].w));
        }
    };
#pragma unroll
    for (u32 i = 0; i < KEPT; i++)
        if (threadIdx.x + i * blockDim.x < units) store(threadIdx.x + i * blockDim.x, kept[i]);
    for (u32 unit = threadIdx.x + KEPT * blockDim.x; unit < units; unit += blockDim.x) {
        float4 other[4];
        load(unit, other, false);
        store(unit, other);
    }
}

#endif
