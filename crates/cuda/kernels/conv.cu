// Patches, convolutions, pooling, upscaling, ranges and the cross-entropy loss: plain kernels, one thread per element.

// A window over two dimensions, vertical first: size, stride, padding, dilation.
struct Window {
    int kernel[2], stride[2], padding[2], dilation[2];
};

// The input position of an element of the window; negative or too large where that is padding.
__device__ __forceinline__ i64 source(const Window &w, int axis, i64 position, i64 element) {
    return position * w.stride[axis] + element * w.dilation[axis] - w.padding[axis];
}

extern "C" __global__ void k_im2col(Tensor x, Tensor out, Window w) {
    int area = w.kernel[0] * w.kernel[1];
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        i64 c = i.i3 / area, e = i.i3 % area;
        i64 y = source(w, 0, i.i1, e / w.kernel[1]), z = source(w, 1, i.i2, e % w.kernel[1]);
        bool inside = y >= 0 && y < x.d[2] && z >= 0 && z < x.d[3];
        put(out, i.i0, i.i1, i.i2, i.i3, inside ? element(x, i.i0, c, y, z) : 0.0f);
    }
}

extern "C" __global__ void k_conv_depthwise(Tensor kernel, Tensor x, Tensor out, Window w) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float sum = 0.0f;
        for (int ky = 0; ky < w.kernel[0]; ky++) {
            i64 y = source(w, 0, i.i2, ky);
            if (y < 0 || y >= x.d[2]) continue;
            for (int kx = 0; kx < w.kernel[1]; kx++) {
                i64 z = source(w, 1, i.i3, kx);
                if (z < 0 || z >= x.d[3]) continue;
                sum += element(kernel, i.i1, 0, ky, kx) * element(x, i.i0, i.i1, y, z);
            }
        }
        put(out, i.i0, i.i1, i.i2, i.i3, sum);
    }
}

extern "C" __global__ void k_conv_transpose(Tensor kernel, Tensor x, Tensor out, int down, int across) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float sum = 0.0f;
        for (i64 ky = 0; ky < kernel.d[2]; ky++) {
            i64 y = i.i2 - ky;
            if (y < 0 || y % down || y / down >= x.d[2]) continue;
            for (i64 kx = 0; kx < kernel.d[3]; kx++) {
                i64 z = i.i3 - kx;
                if (z < 0 || z % across || z / across >= x.d[3]) continue;
                for (i64 c = 0; c < x.d[1]; c++)
                    sum += element(kernel, c, i.i1, ky, kx) * element(x, i.i0, c, y / down, z / across);
            }
        }
        put(out, i.i0, i.i1, i.i2, i.i3, sum);
    }
}

// `mode`: 0 for the maximum, 1 for the mean over the whole window, 2 for the mean over the elements inside.
extern "C" __global__ void k_pool(Tensor x, Tensor out, Window w, int mode) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        float value = mode == 0 ? -INF : 0.0f;
        int seen = 0;
        for (int ky = 0; ky < w.kernel[0]; ky++) {
            i64 y = source(w, 0, i.i2, ky);
            if (y < 0 || y >= x.d[2]) continue;
            for (int kx = 0; kx < w.kernel[1]; kx++) {
                i64 z = source(w, 1, i.i3, kx);
                if (z < 0 || z >= x.d[3]) continue;
                float v = element(x, i.i0, i.i1, y, z);
                value = mode == 0 ? fmaxf(value, v) : value + v;
                seen++;
            }
        }
        if (mode == 1) value /= (float)w.kernel[0] * w.kernel[1];
        if (mode == 2) value /= seen;
        put(out, i.i0, i.i1, i.i2, i.i3, value);
    }
}

// The neighbours of a pixel centre, and the weight of the second.
__device__ __forceinline__ float between(i64 i, i64 from, i64 to, i64 &first, i64 &second) {
    double centre = ((double)i + 0.5) * (double)from / (double)to - 0.5;
    centre = centre < 0.0 ? 0.0 : centre;
    first = (i64)centre;
    first = first < from - 1 ? first : from - 1;
    second = first + 1 < from - 1 ? first + 1 : from - 1;
    double weight = centre - (double)first;
    return (float)(weight > 1.0 ? 1.0 : weight);
}

extern "C" __global__ void k_upscale(Tensor x, Tensor out, int bilinear) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        i64 a = i.i0 * x.d[0] / out.d[0], b = i.i1 * x.d[1] / out.d[1];
        float value;
        if (bilinear) {
            i64 y0, y1, x0, x1;
            float dy = between(i.i2, x.d[2], out.d[2], y0, y1), dx = between(i.i3, x.d[3], out.d[3], x0, x1);
            float upper = (1.0f - dx) * element(x, a, b, y0, x0) + dx * element(x, a, b, y0, x1);
            float lower = (1.0f - dx) * element(x, a, b, y1, x0) + dx * element(x, a, b, y1, x1);
            value = (1.0f - dy) * upper + dy * lower;
        } else {
            value = element(x, a, b, i.i2 * x.d[2] / out.d[2], i.i3 * x.d[3] / out.d[3]);
        }
        put(out, i.i0, i.i1, i.i2, i.i3, value);
    }
}

extern "C" __global__ void k_arange(Tensor out, float start, float step) {
    FOR_EACH(n, count(out)) ((float *)out.address)[n] = (float)((double)start + (double)n * (double)step);
}

// One block; each warp takes rows, and the losses are added in a fixed order.
extern "C" __global__ void __launch_bounds__(1024, 1) k_cross_entropy(Tensor x, Tensor labels, Tensor out) {
    __shared__ double partial[32];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 rows = x.d[0] * x.d[1] * x.d[2];
    double total = 0.0;
    for (i64 r = warp; r < rows; r += 32) {
        i64 i2 = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
        float most = -INF;
        for (i64 c = lane; c < x.d[3]; c += WARP) most = fmaxf(most, element(x, i0, i1, i2, c));
        most = warp_max(most);
        float sum = 0.0f, product = 0.0f, weight = 0.0f;
        for (i64 c = lane; c < x.d[3]; c += WARP) {
            float v = element(x, i0, i1, i2, c) - most, label = element(labels, i0, i1, i2, c);
            sum += expf(v);
            product += label * v;
            weight += label;
        }
        sum = warp_sum(sum);
        product = warp_sum(product);
        weight = warp_sum(weight);
        total += (double)weight * log((double)sum) - (double)product;
    }
    if (lane == 0) partial[warp] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        double all = 0.0;
        for (int i = 0; i < 32; i++) all += partial[i];
        *(float *)out.address = (float)(all / (double)rows);
    }
}
