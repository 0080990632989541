// Attention through page tables: what its kernels share.

#define PAGE 64              // rows of a page
#define TILE_QUERIES 64

struct PagedWork {
    AttentionWork w;         // spans: first position, one past the last, row of the page table
    Tensor pages;
    u32 fault_table;         // codes of faults
    u32 fault_page;
    u32 has_tiles;           // whether k_attention_mma_paged computes the tiles of queries that have one table
    u32 unused;
};

// Whether all queries of a tile that see keys have the same row of the page table: the tokens of a prompt. All 128 threads of
// a block call it, and get the same answer.
__device__ __forceinline__ bool has_one_table(const PagedWork &p, i64 first_query) {
    __shared__ int one;
    i64 t = first_query + threadIdx.x % TILE_QUERIES;
    int table = -1;
    if (t < p.w.q.d[2]) {
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

// The first row of keys and values of a page of a sequence; −1, with a fault report, where there is none.
__device__ __forceinline__ i64 page_rows(const PagedWork &p, const int *table, i64 page) {
    i64 place = table[page];
    if (place >= 0 && (place + 1) * PAGE <= p.w.k.d[2]) return place * PAGE;
    report(p.w.fault_word, p.fault_page);
    return -1;
}
