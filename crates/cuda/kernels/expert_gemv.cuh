// Matrices of experts times few tokens: what the kernels of experts_gemv.cu and experts_decode.cu take.

struct ExpertGemv {
    Tensor ids;              // i32 [t, used]
    u64 quants[2];           // packed matrices [experts, rows, cols]: one, or gate and up
    u64 scales[2];
    u64 bias[2];             // f32 [experts, rows]; 0: none
    u64 x;                   // f32, contiguous: [t, x_rows, cols]
    u64 weights;             // f32 [t, used]: the result is the weighted sum over the experts
    u64 add;                 // f32 [t, rows], added to that; 0: none
    u64 out;                 // f32, contiguous
    i64 weights_stride;      // from token to token
    u64 fault_word;
    u32 fault;
    u32 experts, used, rows, cols;
    u32 x_rows;              // 1, or one for each used expert
    u32 first_token;
    int gate;                // one of GATE_…
    u32 block_rows;          // rows of a block of experts_decode.cu
    u32 routes;              // 1: ids and weights come from the logits (experts_decode.cu)
};

// The expert of a slot; −1 for one that is elsewhere, whose results are 0. One that does not exist is reported.
__device__ __forceinline__ int expert_of(const ExpertGemv &w, u32 token, u32 slot) {
    int expert = __ldcg((const int *)(w.ids.address + token * w.ids.s[2] + slot * w.ids.s[3]));
    if (expert >= 0 && expert < (int)w.experts) return expert;
    if (expert != -1) report(w.fault_word, w.fault);
    return -1;
}
