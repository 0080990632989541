// The token of decode attention, shared by attention.cu and attention_decode.cu: the host puts this before both.

// Decode attention with fused RoPE and KV-cache write: a kernel rotates the current token's query and key, writes key
// and value to the cache, and attends to all of it. Only the three rows depend on the previous kernel; all else here,
// and the cache of earlier tokens, can be read before that one is complete.
struct DecodeToken {
    u64 q, k, v;             // f32: [heads, d], [heads of the keys, d] twice
    u64 position, row;       // of the token; KV-cache row of its key and value
    Tensor factors;
    Rope rope;
    u32 fault_keys, fault_values;
    u64 query_norm, key_norm; // f32 [d]: weights of an RMS norm of each head ahead of RoPE; 0: none
    float query_eps, key_eps;
};
