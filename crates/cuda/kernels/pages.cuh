// Attention through page tables: what its kernels share.

#define PAGE 64              // rows of a page

struct PagedWork {
    AttentionWork w;         // spans: first position, one past the last, row of the page table
    Tensor pages;
    u32 fault_table;         // codes of faults
    u32 fault_page;
    u32 tile;                // queries of a tile, which one kernel computes where they have one table, and another where not; 0: no tiles
    u32 takes_tiles;         // whether this launch is the one for tiles
    u32 first;               // blocks, or queries, that launches before this one take
    u32 unused;
};

// Whether all queries of a tile that see keys have the same row of the page table: the tokens of a prompt. All threads of
// a block, no fewer than queries of a tile, call it, and get the same answer.
__device__ __forceinline__ bool has_one_table(const PagedWork &p, i64 tile) {
    __shared__ int one;
    i64 t = tile * p.tile + threadIdx.x;
    int table = -1;
    if (threadIdx.x < p.tile && t < p.w.q.d[2]) {
        const int *span = (const int *)(p.w.spans.address + t * p.w.spans.s[2]);
        if (span[0] < span[1]) table = span[2];
    }
    if (threadIdx.x == 0) one = -1;
    __syncthreads();
    if (table >= 0) atomicMax(&one, table);
    __syncthreads();
    return !__syncthreads_or(table >= 0 && table != one);
}

// The span of keys that query `t` sees through the page table; empty, with a fault report, where something is out of range.
__device__ __forceinline__ void visible_in_pages(const PagedWork &p, i64 t, i64 *begin, i64 *end, i64 *table) {
    const int *span = (const int *)(p.w.spans.address + t * p.w.spans.s[2]);
    *begin = span[0];
    *end = span[1];
    *table = span[2];
    bool is_wrong = *begin < 0 || *end > p.pages.d[3] * PAGE || *begin > *end;
    if (!is_wrong && (*begin == *end || (*table >= 0 && *table < p.pages.d[2]))) return;
    report(p.w.fault_word, is_wrong ? p.w.fault : p.fault_table);
    *begin = *end = *table = 0;
}

// The first row of keys and values of the page at a place of the pool; −1, with a fault report, where there is none.
__device__ __forceinline__ i64 place_rows(const PagedWork &p, i64 place) {
    if (place >= 0 && (place + 1) * PAGE <= p.w.k.d[2]) return place * PAGE;
    report(p.w.fault_word, p.fault_page);
    return -1;
}

// The same of a page of a sequence.
__device__ __forceinline__ i64 page_rows(const PagedWork &p, const int *table, i64 page) {
    return place_rows(p, table[page]);
}

// Where the rows of keys and values are: in order, or in the pages of a sequence.
template <bool PAGED> struct KeyRows {
    const PagedWork &p;
    const int *table;
    // The row of a key, whose 64 neighbours follow if the key is the first of a page; negative if there is none.
    __device__ __forceinline__ i64 operator()(i64 key) const {
        if (!PAGED) return key;
        i64 rows = page_rows(p, table, key / PAGE);
        return rows < 0 ? rows : rows + key % PAGE;
    }
};
