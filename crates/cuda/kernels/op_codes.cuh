// Operation codes that the host passes to kernels. src/lower/op_codes.rs has the same table, and a test compares the
// two.

enum {
    UNARY_SQR = 0,
    UNARY_SQRT = 1,
    UNARY_LOG = 2,
    UNARY_EXP = 3,
    UNARY_SIN = 4,
    UNARY_COS = 5,
    UNARY_ABS = 6,
    UNARY_NEG = 7,
    UNARY_SIGN = 8,
    UNARY_STEP = 9,
    UNARY_RELU = 10,
    UNARY_GELU = 11,
    UNARY_GELU_ERF = 12,
    UNARY_GELU_QUICK = 13,
    UNARY_SILU = 14,
    UNARY_SIGMOID = 15,
    UNARY_TANH = 16,
    UNARY_ELU = 17,
    UNARY_HARD_SWISH = 18,
    UNARY_HARD_SIGMOID = 19,
    UNARY_SOFTPLUS = 20,
    // With parameters p and q.
    UNARY_SCALE = 100,   // x · p + q
    UNARY_CLAMP = 101,   // p ≤ x ≤ q
};

enum {
    BINARY_ADD = 0,
    BINARY_SUB = 1,
    BINARY_MUL = 2,
    BINARY_DIV = 3,
};

enum {
    GATE_SWIGLU = 0,
    GATE_GEGLU = 1,
    GATE_REGLU = 2,
    GATE_SWIGLU_OAI = 3,
};

enum {
    NORM_MEAN_VARIANCE = 0,
    NORM_RMS = 1,
    NORM_L2 = 2,
};

enum {
    CONVERT_TO_BF16 = 0,
    CONVERT_TO_F32 = 1,
};

// What is done to a token's logits before experts are selected.
enum {
    ROUTE_PLAIN = 0,
    ROUTE_SOFTMAX = 1,
    ROUTE_SIGMOID = 2,
};
