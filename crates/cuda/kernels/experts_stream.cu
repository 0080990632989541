// Streams slices of a weight, the matrices of experts, from pinned host memory to the device: those that indices on the
// device select, so that the host need not know which they are. Unlike a copy engine, the kernel packs them on the way.
//
// A few blocks are enough for the link: it transfers as many bytes as are in flight in a round trip, some hundred KiB. The
// other multiprocessors compute meanwhile.

// Bytes that a block loads at once, into shared memory where they are packed; threads of a block; 16-byte loads of a
// thread.
#define UNIT 32768
#define THREADS 512
#define LOADS (UNIT / 16 / THREADS)
#define MAX_SLICES 1024
#define WORDS (MAX_SLICES / 32)

// Not packed: any type, as in the file.
#define MATRIX_PLAIN -1

struct SliceStream {
    u64 from[3];             // byte `n` of the weight is at `from[i] + n`, where i counts the borders up to n
    u64 border[2];           // multiples of 16
    u64 bytes;               // of the weight
    u64 slice_bytes;
    u64 ids, id_count;       // i32
    u64 last;                // a counter, then a bit for each slice that was selected last
    u64 to;                  // the weight, or its packed quants
    u64 scales;
    u32 slices;
    u32 rows, row_bytes;     // of a slice
    u32 blocks;              // of a row
    u32 prefetch;            // 1: copies the slices that were selected last
    u32 prefetched;          // 1: those are there already
};

struct SliceList {
    u32 selected[WORDS], needed[WORDS];
    u32 count;
    u16 slices[MAX_SLICES];
};

// Lists the slices to copy, in the same order in every block.
__device__ __forceinline__ void list_slices(const SliceStream &w, SliceList &list) {
    const u32 *last = (const u32 *)w.last + 1;
    u32 words = (w.slices + 31) / 32, tid = threadIdx.x;
    for (u32 i = tid; i < WORDS; i += THREADS) list.selected[i] = 0;
    __syncthreads();
    if (!w.prefetch) {
        for (u64 i = tid; i < w.id_count; i += THREADS) {
            int id = ((const int *)w.ids)[i];
            if (id < 0 || id >= (int)w.slices) continue;
            u32 bit = 1u << (id % 32);
            if (!(*(volatile u32 *)&list.selected[id / 32] & bit)) atomicOr(&list.selected[id / 32], bit);
        }
        __syncthreads();
    }
    for (u32 i = tid; i < WORDS; i += THREADS) {
        u32 before = i < words ? last[i] : 0;
        list.needed[i] = w.prefetch ? before : list.selected[i] & ~(w.prefetched ? before : 0);
    }
    __syncthreads();
    for (u32 i = tid; i < MAX_SLICES; i += THREADS) {
        u32 place = 0, word = list.needed[i / 32];
        for (u32 j = 0; j < i / 32; j++) place += __popc(list.needed[j]);
        place += __popc(word & ((1u << (i % 32)) - 1));
        if (word >> (i % 32) & 1) list.slices[place] = (u16)i;
        if (i == MAX_SLICES - 1) list.count = place + (word >> 31);
    }
    __syncthreads();
}

// Loads that the device's caches do not keep.
__device__ __forceinline__ uint4 load_16(u64 from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

__device__ __forceinline__ u64 source(const SliceStream &w, u64 at) {
    return (at < w.border[0] ? w.from[0] : at < w.border[1] ? w.from[1] : w.from[2]) + at;
}

// Copies bytes `start .. end` of the weight, and up to 15 more on both sides, so that all accesses are aligned; never
// those beyond the weight. Byte n goes to `to + n`.
__device__ __forceinline__ void copy_bytes(const SliceStream &w, u64 start, u64 end, u64 to) {
    u64 first = start / 16, last = min(end + 15, w.bytes) / 16;
    uint4 v[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        u64 n = first + threadIdx.x + i * THREADS;
        if (n < last) v[i] = load_16(source(w, n * 16));
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
        u64 n = first + threadIdx.x + i * THREADS;
        if (n < last) *(uint4 *)(to + n * 16) = v[i];
    }
    // A unit that does not start at a multiple of 16 has one load more.
    for (u64 n = first + threadIdx.x + LOADS * THREADS; n < last; n += THREADS)
        *(uint4 *)(to + n * 16) = load_16(source(w, n * 16));
    // The end of a weight whose size is no multiple of 16.
    for (u64 n = last * 16 + threadIdx.x; n < end; n += THREADS) *(u8 *)(to + n) = *(const u8 *)source(w, n);
}

template <int TYPE, int F> __device__ __forceinline__ void stream_slices(const SliceStream &w) {
    __shared__ SliceList list;
    extern __shared__ __align__(16) u8 memory[];
    list_slices(w, list);
    u32 rows_at_once = F == MATRIX_PLAIN ? 0 : UNIT / w.row_bytes;
    u32 of_slice = F == MATRIX_PLAIN ? (u32)((w.slice_bytes + UNIT - 1) / UNIT) : (w.rows + rows_at_once - 1) / rows_at_once;
    for (u64 unit = blockIdx.x; unit < (u64)list.count * of_slice; unit += gridDim.x) {
        u64 slice = list.slices[unit / of_slice], part = unit % of_slice;
        if (F == MATRIX_PLAIN) {
            u64 start = slice * w.slice_bytes + part * UNIT;
            copy_bytes(w, start, min(start + UNIT, (slice + 1) * w.slice_bytes), w.to);
            continue;
        }
        u32 rows = min(rows_at_once, w.rows - (u32)part * rows_at_once);
        u64 first_row = slice * w.rows + part * rows_at_once, start = first_row * w.row_bytes;
        u64 aligned = start / 16 * 16;
        copy_bytes(w, start, start + (u64)rows * w.row_bytes, (u64)memory - aligned);
        __syncthreads();
        const u8 *from = memory + (start - aligned);
        u32 stride = (u32)scale_stride(F, w.blocks);
        const int quant_bytes = F == MATRIX_Q8 ? 32 : 16;
        for (u32 n = threadIdx.x; n < rows * stride; n += THREADS) {
            u32 row = n / stride, b = n - row * stride;
            u16 scale = 0, minimum = 0;
            if (b < w.blocks) {
                __align__(16) u8 quants[quant_bytes];
                pack_block(TYPE, F, from + row * w.row_bytes, b, quants, &scale, &minimum);
                uint4 *to = (uint4 *)(w.to + ((first_row + row) * w.blocks + b) * quant_bytes);
#pragma unroll
                for (int i = 0; i < quant_bytes / 16; i++) to[i] = ((const uint4 *)quants)[i];
            }
            store_scale(F, w.scales, (i64)(first_row + row) * stride + b, scale, minimum);
        }
        __syncthreads();
    }
    if (w.prefetch) return;
    // The last block to finish notes what was selected: all others have read what was selected before.
    __syncthreads();
    __shared__ u32 done;
    u32 *last = (u32 *)w.last;
    if (threadIdx.x == 0) done = atomicAdd(last, 1u);
    __syncthreads();
    if (done + 1 != gridDim.x) return;
    for (u32 i = threadIdx.x; i < (w.slices + 31) / 32; i += THREADS) last[1 + i] = list.selected[i];
    if (threadIdx.x == 0) *last = 0;
}

#define STREAM_SLICES(name, type, format) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) k_stream_slices_##name(const __grid_constant__ SliceStream w) { \
        stream_slices<type, format>(w); \
    }
STREAM_SLICES(plain, 0, MATRIX_PLAIN)
STREAM_SLICES(q4_0, Q4_0, MATRIX_Q4)
STREAM_SLICES(q4_1, Q4_1, MATRIX_Q4_MIN)
STREAM_SLICES(q4_k, Q4_K, MATRIX_Q4_MIN)
STREAM_SLICES(q8_0, Q8_0, MATRIX_Q8)
STREAM_SLICES(mxfp4, MXFP4, MATRIX_MXFP4)
