// Element types and weight formats. This file alone knows how blocks and packed matrices are laid out on the device;
// src/lower/formats.rs has the sizes and kernel names for the host. A new type is added in these two files; those with
// code books are in code_books.cuh.

// Ids of element types, as in GGUF files.
enum {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I32 = 26,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
};

// Bytes of a block: of 32 elements in types of one scale, of 64 in NVFP4, of 256 in all others.
enum {
    Q4_0_BYTES = 18,
    Q4_1_BYTES = 20,
    Q5_0_BYTES = 22,
    Q5_1_BYTES = 24,
    Q8_0_BYTES = 34,
    Q2_K_BYTES = 84,
    Q3_K_BYTES = 110,
    Q4_K_BYTES = 144,
    Q5_K_BYTES = 176,
    Q6_K_BYTES = 210,
    IQ4_NL_BYTES = 18,
    IQ4_XS_BYTES = 136,
    MXFP4_BYTES = 17,
    NVFP4_BYTES = 36,
    TQ1_0_BYTES = 54,
    TQ2_0_BYTES = 66,
    IQ1_S_BYTES = 50,
    IQ1_M_BYTES = 56,
    IQ2_XXS_BYTES = 66,
    IQ2_XS_BYTES = 74,
    IQ2_S_BYTES = 82,
    IQ3_XXS_BYTES = 98,
    IQ3_S_BYTES = 110,
};

// Whether a type is stored element by element. A macro, because the compiler branches better on it than on a function.
#define IS_PLAIN(type) ((type) == F32 || (type) == F16 || (type) == BF16 || (type) == I32)

// ---- Reading blocks ----

__device__ const i8 IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
__device__ const i8 MXFP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The scale of an MXFP4 block, halved, because MXFP4_LEVELS holds doubled values.
__device__ __forceinline__ float mxfp4_scale(u8 e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (u32)(e - 1) << 23);
}

// The scale of 16 elements of an NVFP4 block, halved likewise: the bits are those of an f16 that is 2⁸ times smaller.
__device__ __forceinline__ float nvfp4_scale(u8 s) {
    return s == 0x7f ? 0.0f : half_to_float((u16)((s & 0x7f) << 7)) * 128.0f;
}

// Scale and minimum of group `g` of a Q4_K or Q5_K block, six bits each.
__device__ __forceinline__ void k_scale_min(const u8 *scales, int g, int *scale, int *minimum) {
    if (g < 4) {
        *scale = scales[g] & 63;
        *minimum = scales[g + 4] & 63;
    } else {
        *scale = (scales[g + 4] & 15) | (scales[g - 4] >> 6) << 4;
        *minimum = (scales[g + 4] >> 4) | (scales[g] >> 6) << 4;
    }
}

__device__ __forceinline__ int q3_k_scale(const u8 *scales, int g) {
    int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4;
    int high = (scales[8 + g % 4] >> (2 * (g / 4))) & 3;
    return (low | high << 4) - 32;
}

// Element `i` of a row of any type that starts at `row`.
__device__ __forceinline__ float row_element(u32 type, const u8 *row, i64 i) {
    switch (type) {
    case F32: return ((const float *)row)[i];
    case F16: return half_to_float(((const u16 *)row)[i]);
    case BF16: return bf16_to_float(((const u16 *)row)[i]);
    case I32: return (float)((const int *)row)[i];
    case Q4_0: {
        const u8 *b = row + i / 32 * Q4_0_BYTES;
        int l = i % 32, q = b[2 + l % 16];
        return ((l < 16 ? q & 15 : q >> 4) - 8) * read_half(b);
    }
    case Q4_1: {
        const u8 *b = row + i / 32 * Q4_1_BYTES;
        int l = i % 32, q = b[4 + l % 16];
        return (l < 16 ? q & 15 : q >> 4) * read_half(b) + read_half(b + 2);
    }
    case Q5_0: {
        const u8 *b = row + i / 32 * Q5_0_BYTES;
        int l = i % 32, q = b[6 + l % 16];
        int high = (read32(b + 2) >> l) & 1;
        return (((l < 16 ? q & 15 : q >> 4) | high << 4) - 16) * read_half(b);
    }
    case Q5_1: {
        const u8 *b = row + i / 32 * Q5_1_BYTES;
        int l = i % 32, q = b[8 + l % 16];
        int high = (read32(b + 4) >> l) & 1;
        return ((l < 16 ? q & 15 : q >> 4) | high << 4) * read_half(b) + read_half(b + 2);
    }
    case Q8_0: {
        const u8 *b = row + i / 32 * Q8_0_BYTES;
        return ((const i8 *)b)[2 + i % 32] * read_half(b);
    }
    case Q2_K: {
        const u8 *b = row + i / 256 * Q2_K_BYTES;
        int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32;
        int sc = b[8 * n + 2 * j + l / 16];
        int q = (b[16 + 32 * n + l] >> (2 * j)) & 3;
        return read_half(b + 80) * (sc & 15) * q - read_half(b + 82) * (sc >> 4);
    }
    case Q3_K: {
        const u8 *b = row + i / 256 * Q3_K_BYTES;
        int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32;
        int q = ((b[32 + 32 * n + l] >> (2 * j)) & 3) - ((b[l] >> (4 * n + j)) & 1 ? 0 : 4);
        return read_half(b + 108) * q3_k_scale(b + 96, 8 * n + 2 * j + l / 16) * q;
    }
    case Q4_K: {
        const u8 *b = row + i / 256 * Q4_K_BYTES;
        int e = i % 256, c = e / 64, l = e % 64, scale, minimum;
        k_scale_min(b + 4, 2 * c + l / 32, &scale, &minimum);
        int q = b[16 + 32 * c + l % 32];
        q = l < 32 ? q & 15 : q >> 4;
        return read_half(b) * scale * q - read_half(b + 2) * minimum;
    }
    case Q5_K: {
        const u8 *b = row + i / 256 * Q5_K_BYTES;
        int e = i % 256, c = e / 64, l = e % 64, g = 2 * c + l / 32, scale, minimum;
        k_scale_min(b + 4, g, &scale, &minimum);
        int q = b[48 + 32 * c + l % 32];
        q = (l < 32 ? q & 15 : q >> 4) | ((b[16 + l % 32] >> g) & 1) << 4;
        return read_half(b) * scale * q - read_half(b + 2) * minimum;
    }
    case Q6_K: {
        const u8 *b = row + i / 256 * Q6_K_BYTES;
        int e = i % 256, n = e / 128, j = e % 128 / 32, l = e % 32;
        int low = b[64 * n + l + 32 * (j & 1)];
        low = j < 2 ? low & 15 : low >> 4;
        int q = (low | ((b[128 + 32 * n + l] >> (2 * j)) & 3) << 4) - 32;
        return read_half(b + 208) * ((const i8 *)b)[192 + 8 * n + 2 * j + l / 16] * q;
    }
    case IQ4_NL: {
        const u8 *b = row + i / 32 * IQ4_NL_BYTES;
        int l = i % 32, q = b[2 + l % 16];
        return IQ4_LEVELS[l < 16 ? q & 15 : q >> 4] * read_half(b);
    }
    case IQ4_XS: {
        const u8 *b = row + i / 256 * IQ4_XS_BYTES;
        int e = i % 256, g = e / 32, l = e % 32;
        int scale = ((b[4 + g / 2] >> (4 * (g % 2))) & 15) | ((read16(b + 2) >> (2 * g)) & 3) << 4;
        int q = b[8 + 16 * g + l % 16];
        return read_half(b) * (scale - 32) * IQ4_LEVELS[l < 16 ? q & 15 : q >> 4];
    }
    case MXFP4: {
        const u8 *b = row + i / 32 * MXFP4_BYTES;
        int l = i % 32, q = b[1 + l % 16];
        return mxfp4_scale(b[0]) * MXFP4_LEVELS[l < 16 ? q & 15 : q >> 4];
    }
    case NVFP4: {
        const u8 *b = row + i / 64 * NVFP4_BYTES;
        int e = i % 64, q = b[4 + 8 * (e / 16) + e % 8];
        return nvfp4_scale(b[e / 16]) * MXFP4_LEVELS[e % 16 < 8 ? q & 15 : q >> 4];
    }
    case TQ1_0: return tq1_0_element(row + i / 256 * TQ1_0_BYTES, i % 256);
    case TQ2_0: return tq2_0_element(row + i / 256 * TQ2_0_BYTES, i % 256);
    case IQ1_S: return iq1_s_element(row + i / 256 * IQ1_S_BYTES, i % 256);
    case IQ1_M: return iq1_m_element(row + i / 256 * IQ1_M_BYTES, i % 256);
    case IQ2_XXS: return iq2_xxs_element(row + i / 256 * IQ2_XXS_BYTES, i % 256);
    case IQ2_XS: return iq2_xs_element(row + i / 256 * IQ2_XS_BYTES, i % 256);
    case IQ2_S: return iq2_s_element(row + i / 256 * IQ2_S_BYTES, i % 256);
    case IQ3_XXS: return iq3_xxs_element(row + i / 256 * IQ3_XXS_BYTES, i % 256);
    case IQ3_S: return iq3_s_element(row + i / 256 * IQ3_S_BYTES, i % 256);
    }
    return 0.0f;
}

// An element of a row of a KV cache, of the types that attention on tensor cores reads. With row_element, the code of all
// other types would be instantiated along, a hundred times.
__device__ __forceinline__ float cache_element(u32 type, const u8 *row, int i) {
    if (type == F16) return half_to_float(((const u16 *)row)[i]);
    if (type == BF16) return bf16_to_float(((const u16 *)row)[i]);
    if (type == Q4_0) return row_element(Q4_0, row, i);
    if (type == Q5_1) return row_element(Q5_1, row, i);
    const u8 *block = row + i / 32 * Q8_0_BYTES;
    return ((const i8 *)block)[2 + i % 32] * half_to_float(*(const u16 *)block);
}

#if __CUDA_ARCH__ >= 800
// Elements `8 · part ..` of a row of a KV cache as eight f16; rows of BF16 are aligned to 16 bytes, others to 2.
__device__ __forceinline__ uint4 cache_to_f16x8(u32 type, const u8 *row, int part) {
    u32 words[4];
    if (type == BF16) {
        uint4 eight = *(const uint4 *)(row + part * 16);
        u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = floats_to_f16x2(bf16_to_float((u16)pairs[i]), bf16_to_float((u16)(pairs[i] >> 16)));
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    int quarter = part % 4;
    if (type == Q8_0) {
        const u16 *block = (const u16 *)(row + part / 4 * Q8_0_BYTES);
        float scale = half_to_float(block[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u16 pair = block[1 + quarter * 4 + i];
            words[i] = floats_to_f16x2(scale * (i8)(pair & 255), scale * (i8)(pair >> 8));
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    // Four bits of each element: low nibbles of elements 0..16, high ones of 16..32; Q5_1 has the fifth apart.
    bool five = type == Q5_1;
    const u16 *block = (const u16 *)(row + part / 4 * (five ? Q5_1_BYTES : Q4_0_BYTES));
    float scale = half_to_float(block[0]), offset = five ? half_to_float(block[1]) : -8.0f * scale;
    u32 fifth = five ? ((u32)block[2] | (u32)block[3] << 16) >> (8 * quarter) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 pair = (u32)block[(five ? 4 : 1) + quarter % 2 * 4 + i] >> (quarter / 2 * 4);
        u32 one = (pair & 15) | (fifth >> (2 * i) & 1) << 4, two = (pair >> 8 & 15) | (fifth >> (2 * i + 1) & 1) << 4;
        words[i] = floats_to_f16x2(scale * one + offset, scale * two + offset);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
#endif

// Types with a kernel that converts rows to bf16 for cuBLAS: name in the kernel, type.
#define FOR_EACH_TYPE_TO_BF16(X) \
    X(q4_0, Q4_0) X(q4_1, Q4_1) X(q5_0, Q5_0) X(q5_1, Q5_1) X(q8_0, Q8_0) X(q4_k, Q4_K) X(q5_k, Q5_K) X(q6_k, Q6_K)

// ---- Packed matrices ----
//
// Weights that GEMV kernels read are packed on upload (k_pack) into two arrays, so that every load is whole and
// aligned:
//
//   MATRIX_Q4      quants   rows × blocks × 16 bytes   byte j: elements j (low nibble) and j + 16 (high nibble)
//                  scales   rows × padded × 1 f16      value = scale · (quant − 8)
//   MATRIX_Q4_MIN  quants   as above
//                  scales   rows × padded × 2 f16      value = scale · quant + minimum
//   MATRIX_Q8      quants   rows × blocks × 32 bytes   byte j: element j
//                  scales   rows × padded × 1 f16      value = scale · quant
//   MATRIX_F16     elements as in the file: never packed
//   MATRIX_MXFP4   quants   as MATRIX_Q4
//                  scales   rows × padded × 1 bf16     value = scale · MXFP4_LEVELS[quant]
//
// A block is 32 elements. `padded` is the number of blocks of a row, rounded up so that the scales of a row fill whole
// 16-byte words.
enum {
    MATRIX_Q4 = 0,
    MATRIX_Q4_MIN = 1,
    MATRIX_Q8 = 2,
    MATRIX_F16 = 3,
    MATRIX_MXFP4 = 4,
};

// Packed formats: name in kernels, format.
#define FOR_EACH_PACKED_FORMAT(X) \
    X(q4, MATRIX_Q4) X(q4min, MATRIX_Q4_MIN) X(q8, MATRIX_Q8) \
    X(mxfp4, MATRIX_MXFP4)

// Scales from the start of one row to that of the next.
__device__ __forceinline__ i64 scale_stride(int format, i64 blocks) {
    return format == MATRIX_Q4_MIN ? (blocks + 3) / 4 * 4 : (blocks + 7) / 8 * 8;
}

// Packs block `b` of a row: quants to `to`, scale and minimum as f16 bits. Q4_0 becomes MATRIX_Q4, Q4_1 and Q4_K become
// MATRIX_Q4_MIN, Q8_0 becomes MATRIX_Q8, MXFP4 becomes MATRIX_MXFP4.
__device__ __forceinline__ void pack_block(u32 type, int format, const u8 *row, i64 b, u8 *to, u16 *scale,
                                           u16 *minimum) {
    if (type == Q4_K) {
        const u8 *from = row + b / 8 * Q4_K_BYTES;
        int g = b % 8, s, m;
        k_scale_min(from + 4, g, &s, &m);
        *scale = float_to_half(read_half(from) * s);
        *minimum = float_to_half(-read_half(from + 2) * m);
        for (int j = 0; j < 16; j++) {
            int lo = from[16 + 32 * (g / 2) + j], hi = from[16 + 32 * (g / 2) + j + 16];
            to[j] = g % 2 ? (lo >> 4) | (hi & 0xf0) : (lo & 15) | (hi & 15) << 4;
        }
    } else if (type == MXFP4) {
        const u8 *from = row + b * MXFP4_BYTES;
        *scale = (u16)(__float_as_uint(mxfp4_scale(from[0])) >> 16);
        for (int j = 0; j < 16; j++) to[j] = from[1 + j];
    } else {
        int head = type == Q4_1 ? 4 : 2, body = format == MATRIX_Q8 ? 32 : 16;
        const u8 *from = row + b * (head + body);
        *scale = read16(from);
        if (format == MATRIX_Q4_MIN) *minimum = read16(from + 2);
        for (int j = 0; j < body; j++) to[j] = from[head + j];
    }
}

// Bytes of a packed block's quants.
__device__ __forceinline__ int packed_quant_bytes(int format) { return format == MATRIX_Q8 ? 32 : 16; }

// Stores a packed block's scale, and its minimum where the format has one.
__device__ __forceinline__ void store_scale(int format, u64 scales, i64 at, u16 scale, u16 minimum) {
    if (format == MATRIX_Q4_MIN) ((u32 *)scales)[at] = (u32)scale | (u32)minimum << 16;
    else ((u16 *)scales)[at] = scale;
}

// Element `j` of block `b` of a row.
__device__ __forceinline__ float packed_element(u64 quants, u64 scales, int format, i64 row, i64 blocks, i64 b, int j) {
    i64 at = row * blocks + b, scale_at = row * scale_stride(format, blocks) + b;
    if (format == MATRIX_Q8) return ((const i8 *)quants)[at * 32 + j] * half_to_float(((const u16 *)scales)[scale_at]);
    int q = ((const u8 *)quants)[at * 16 + j % 16];
    q = j < 16 ? q & 15 : q >> 4;
    if (format == MATRIX_Q4) return (q - 8) * half_to_float(((const u16 *)scales)[scale_at]);
    if (format == MATRIX_MXFP4) return MXFP4_LEVELS[q] * bf16_to_float(((const u16 *)scales)[scale_at]);
    u32 both = ((const u32 *)scales)[scale_at];
    return q * half_to_float((u16)both) + half_to_float((u16)(both >> 16));
}

// Elements `8 · part .. 8 · part + 8` of block number `at`.
__device__ __forceinline__ void packed_eight(u64 quants, u64 scales, int format, i64 at, i64 scale_at, u32 part,
                                             float v[8]) {
    float scale, minimum = 0.0f;
    if (format == MATRIX_Q4_MIN) {
        u32 both = ((const u32 *)scales)[scale_at];
        scale = half_to_float((u16)both);
        minimum = half_to_float((u16)(both >> 16));
    } else {
        u16 bits = ((const u16 *)scales)[scale_at];
        scale = format == MATRIX_MXFP4 ? bf16_to_float(bits) : half_to_float(bits);
    }
    if (format == MATRIX_Q8) {
        uint2 q = ((const uint2 *)quants)[at * 4 + part];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = (int)(i8)((i < 4 ? q.x : q.y) >> (8 * (i % 4))) * scale;
    } else {
        uint2 q = ((const uint2 *)quants)[at * 2 + part % 2];
        u32 low = q.x >> (part / 2 * 4) & 0x0f0f0f0f, high = q.y >> (part / 2 * 4) & 0x0f0f0f0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int one = (int)((i < 4 ? low : high) >> (8 * (i % 4)) & 15);
            v[i] = format == MATRIX_MXFP4 ? MXFP4_LEVELS[one] * scale
                   : format == MATRIX_Q4  ? (one - 8) * scale
                                          : one * scale + minimum;
        }
    }
}

// Each byte's sign bit, eight times: 255 for negative bytes, 0 for others. (__byte_perm has no such selectors.)
__device__ __forceinline__ u32 signs_of_bytes(u32 bytes) {
    u32 signs;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(signs) : "r"(bytes));
    return signs;
}

// The levels of eight MXFP4 quants, as bytes: those of the low nibbles of four bytes, and of the high ones. A nibble is
// the index of a magnitude, which selects a byte of a table, and a sign.
__device__ __forceinline__ void mxfp4_levels(u32 quants, int &low, int &high) {
    const u32 small = 0x03020100, large = 0x0c080604, small_negative = 0xfdfeff00, large_negative = 0xf4f8fafc;
    u32 first = quants & 0x7777, second = quants >> 16 & 0x7777;
    u32 plus[2] = {__byte_perm(small, large, first), __byte_perm(small, large, second)};
    u32 minus[2] = {__byte_perm(small_negative, large_negative, first),
                    __byte_perm(small_negative, large_negative, second)};
    // Bytes of all ones where the sign is set.
    u32 low_signs = signs_of_bytes(quants << 4), high_signs = signs_of_bytes(quants);
    u32 low_plus = __byte_perm(plus[0], plus[1], 0x6420), low_minus = __byte_perm(minus[0], minus[1], 0x6420);
    u32 high_plus = __byte_perm(plus[0], plus[1], 0x7531), high_minus = __byte_perm(minus[0], minus[1], 0x7531);
    low = (int)((low_plus & ~low_signs) | (low_minus & low_signs));
    high = (int)((high_plus & ~high_signs) | (high_minus & high_signs));
}

// Dot products of a packed matrix with activations. Activations are quantized to 8 bits with a scale for each 32
// elements; scale · (sum of the elements) is stored beside the scale, so that an offset costs one multiply-add:
//
//   Σ (scale·q + minimum) · (xs·x)  =  scale·xs · Σ q·x  +  minimum · (xs · Σ x)
template <int FORMAT> struct Matrix {
    // Elements of a row in one ring slot of the streamed GEMV.
    static const u32 CHUNK = FORMAT == MATRIX_F16 ? 1024 : FORMAT == MATRIX_Q8 ? 2048 : 4096;
    // Whether the dot product needs the sum of the activations.
    static const bool HAS_OFFSET = FORMAT == MATRIX_Q4 || FORMAT == MATRIX_Q4_MIN;

    // Bytes of the quants of `n` elements.
    __device__ static u32 quant_bytes(u32 n) {
        return FORMAT == MATRIX_F16 ? 2 * n : FORMAT == MATRIX_Q8 ? n : n / 2;
    }

    // Bytes of the scales of a row of `n` elements, in whole 16-byte words.
    __device__ static u32 scale_bytes(u32 n) {
        return FORMAT == MATRIX_F16 ? 0 : ((FORMAT == MATRIX_Q4_MIN ? n / 8 : n / 16) + 15) / 16 * 16;
    }

    // Loads block number `at` from global memory, past the caches: quants as eight words of four bytes, scale and
    // offset.
    __device__ static __forceinline__ void load_block(u64 quants, u64 scales, i64 at, i64 scale_at, int q[8],
                                                      float2 &d) {
        if (FORMAT == MATRIX_Q8) {
            int4 lo = __ldcs((const int4 *)quants + 2 * at), hi = __ldcs((const int4 *)quants + 2 * at + 1);
            q[0] = lo.x; q[1] = lo.y; q[2] = lo.z; q[3] = lo.w;
            q[4] = hi.x; q[5] = hi.y; q[6] = hi.z; q[7] = hi.w;
        } else {
            int4 w = __ldcs((const int4 *)quants + at);
            int words[4] = {w.x, w.y, w.z, w.w};
            for (int i = 0; i < 4; i++) {
                if (FORMAT == MATRIX_MXFP4) {
                    mxfp4_levels((u32)words[i], q[i], q[4 + i]);
                    continue;
                }
                q[i] = words[i] & 0x0f0f0f0f;
                q[4 + i] = (words[i] >> 4) & 0x0f0f0f0f;
            }
        }
        if (FORMAT == MATRIX_Q4_MIN) {
            u32 both = __ldcs((const u32 *)scales + scale_at);
            d.x = half_to_float((u16)both);
            d.y = half_to_float((u16)(both >> 16));
        } else {
            u16 bits = __ldcs((const u16 *)scales + scale_at);
            d.x = FORMAT == MATRIX_MXFP4 ? bf16_to_float(bits) : half_to_float(bits);
            d.y = FORMAT == MATRIX_Q4 ? -8.0f * d.x : 0.0f;
        }
    }

    // Adds the dot product of block `i` of a row in shared memory with 32 activations: elements 0..16 in `low`, 16..32
    // in `high`, scale and scaled sum in `e`.
    __device__ static __forceinline__ void add_dot(const int4 *quants, const u8 *scales, u32 i, int4 low, int4 high,
                                                   float2 e, float &acc) {
        if (FORMAT == MATRIX_Q8) {
            int4 a = quants[2 * i], b = quants[2 * i + 1];
            int sum = dp4a_signed(a.x, low.x, 0);
            sum = dp4a_signed(a.y, low.y, sum);
            sum = dp4a_signed(a.z, low.z, sum);
            sum = dp4a_signed(a.w, low.w, sum);
            sum = dp4a_signed(b.x, high.x, sum);
            sum = dp4a_signed(b.y, high.y, sum);
            sum = dp4a_signed(b.z, high.z, sum);
            sum = dp4a_signed(b.w, high.w, sum);
            acc += half_to_float(((const u16 *)scales)[i]) * e.x * sum;
            return;
        }
        int4 w = quants[i];
        if (FORMAT == MATRIX_MXFP4) {
            int words[4] = {w.x, w.y, w.z, w.w}, x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            int sum = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int a, b;
                mxfp4_levels((u32)words[j], a, b);
                sum = dp4a_signed(b, x[4 + j], dp4a_signed(a, x[j], sum));
            }
            acc += bf16_to_float(((const u16 *)scales)[i]) * e.x * sum;
            return;
        }
        int lower = dp4a_unsigned((u32)w.x & 0x0f0f0f0f, low.x, 0);
        int upper = dp4a_unsigned((u32)w.x & 0xf0f0f0f0, high.x, 0);   // of quants times 16
        lower = dp4a_unsigned((u32)w.y & 0x0f0f0f0f, low.y, lower);
        upper = dp4a_unsigned((u32)w.y & 0xf0f0f0f0, high.y, upper);
        lower = dp4a_unsigned((u32)w.z & 0x0f0f0f0f, low.z, lower);
        upper = dp4a_unsigned((u32)w.z & 0xf0f0f0f0, high.z, upper);
        lower = dp4a_unsigned((u32)w.w & 0x0f0f0f0f, low.w, lower);
        upper = dp4a_unsigned((u32)w.w & 0xf0f0f0f0, high.w, upper);
        float sum = lower + (upper >> 4);
        if (FORMAT == MATRIX_Q4) {
            acc += half_to_float(((const u16 *)scales)[i]) * (e.x * sum - 8.0f * e.y);
        } else {
            u32 both = ((const u32 *)scales)[i];
            acc += half_to_float((u16)both) * e.x * sum + half_to_float((u16)(both >> 16)) * e.y;
        }
    }
};
