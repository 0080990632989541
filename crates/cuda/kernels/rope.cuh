// Rotary position embedding (RoPE), shared by rope.cu and attention.cu: the host puts this before both.

struct Rope {
    int dims, half_split;
    float base, scale, ext_factor, attn_factor;
    float low, high;   // YaRN's correction range
};

// The rotation of pair number `pair` per position, which is known before the position is: radians per position, the
// share of extrapolation (YaRN), and the factor on both elements.
struct Rotation { double step, mix; float magnitude; };

__device__ __forceinline__ Rotation rotation_of(const Rope &rope, const Tensor &factors, i64 pair) {
    Rotation rotation;
    double factor = factors.address ? (double)*(const float *)(factors.address + pair * factors.s[3]) : 1.0;
    rotation.step = exp2(-2.0 * pair / rope.dims * log2((double)rope.base)) / factor;
    rotation.magnitude = rope.attn_factor;
    rotation.mix = 0.0;
    if (rope.ext_factor != 0.0f) {
        double ramp = (pair - rope.low) / fmax(0.001, (double)rope.high - rope.low);
        rotation.mix = (1.0 - fmin(1.0, fmax(0.0, ramp))) * rope.ext_factor;
        rotation.magnitude *= 1.0f + 0.1f * logf(1.0f / rope.scale);
    }
    return rotation;
}

// Sine and cosine of the rotation at position `at`, times its magnitude.
__device__ __forceinline__ void angle(const Rotation &rotation, float scale, int at, float *s, float *c) {
    double unscaled = at * rotation.step, theta = scale * unscaled;
    theta = theta * (1.0 - rotation.mix) + unscaled * rotation.mix;
    theta -= rint(theta * 0.15915494309189533577) * 6.283185307179586477;
    sincosf((float)theta, s, c);
    *s *= rotation.magnitude;
    *c *= rotation.magnitude;
}
