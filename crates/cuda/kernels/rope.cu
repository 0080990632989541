// Rotary position embedding: a thread per pair of elements.

struct Rope {
    int dims, half_split;
    float base, scale, ext_factor, attn_factor;
    float low, high;   // YaRN's correction range
};

extern "C" __global__ void k_rope(Tensor x, Tensor positions, Tensor factors, Tensor out, Rope rope) {
    i64 pairs = x.d[3] - rope.dims / 2, rows = x.d[0] * x.d[1] * x.d[2];
    FOR_EACH(n, rows * pairs) {
        i64 pair = n % pairs, r = n / pairs;
        i64 i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
        if (pair >= rope.dims / 2) {   // beyond the turned part: one element each
            i64 c = pair + rope.dims / 2;
            put(out, i0, i1, i2, c, element(x, i0, i1, i2, c));
            continue;
        }
        int at = *(const int *)(positions.address + i1 * positions.s[3]);
        double factor = factors.address ? (double)*(const float *)(factors.address + pair * factors.s[3]) : 1.0;
        double turned = at * exp2(-2.0 * pair / rope.dims * log2((double)rope.base)) / factor;
        double theta = rope.scale * turned;
        float magnitude = rope.attn_factor;
        if (rope.ext_factor != 0.0f) {
            double ramp = (pair - rope.low) / fmax(0.001, (double)rope.high - rope.low);
            double mix = (1.0 - fmin(1.0, fmax(0.0, ramp))) * rope.ext_factor;
            theta = theta * (1.0 - mix) + turned * mix;
            magnitude *= 1.0f + 0.1f * logf(1.0f / rope.scale);
        }
        theta -= rint(theta * 0.15915494309189533577) * 6.283185307179586477;
        float s, c;
        sincosf((float)theta, &s, &c);
        s *= magnitude;
        c *= magnitude;
        i64 a = rope.half_split ? pair : 2 * pair, b = rope.half_split ? pair + rope.dims / 2 : 2 * pair + 1;
        float p = element(x, i0, i1, i2, a), q = element(x, i0, i1, i2, b);
        put(out, i0, i1, i2, a, p * c - q * s);
        put(out, i0, i1, i2, b, p * s + q * c);
    }
}
