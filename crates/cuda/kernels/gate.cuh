// The activations of gated units.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// By the tanh approximation: x/2 (1 + tanh u) = x · sigmoid(2u), where nothing cancels for negative x.
__device__ __forceinline__ float gelu(float x) {
    return x * sigmoid(1.59576912160573071176f * x * (1.0f + 0.044715f * x * x));
}

// activation(gate) · up; `op` is one of GATE_….
__device__ __forceinline__ float gated(int op, float g, float u) {
    if (op == GATE_SWIGLU_OAI) {   // gpt-oss: both bounded by 7, and 1 added to `up`
        g = g > 7.0f ? 7.0f : g;   // comparisons that let NaN through
        u = u > 7.0f ? 7.0f : u < -7.0f ? -7.0f : u;
        return g * sigmoid(1.702f * g) * (u + 1.0f);
    }
    return (op == GATE_SWIGLU ? g * sigmoid(g) : op == GATE_GEGLU ? gelu(g) : fmaxf(g, 0.0f)) * u;
}
