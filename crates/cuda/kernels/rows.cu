// Copies, casts, get_rows and set_rows.

// `out` in row-major order takes the elements of `x` in row-major order; shapes may differ.
extern "C" __global__ void k_copy(Tensor x, Tensor out) {
    FOR_EACH(n, count(out)) {
        Position to = position(out, n), from = position(x, n);
        if (x.type == I32 && out.type == I32) {
            *(int *)(row_at(out, to.i0, to.i1, to.i2) + to.i3 * out.s[3]) =
                *(const int *)(row_at(x, from.i0, from.i1, from.i2) + from.i3 * x.s[3]);
        } else {
            put(out, to.i0, to.i1, to.i2, to.i3, any_element(x, from.i0, from.i1, from.i2, from.i3));
        }
    }
}

// The same into a quantized type, one thread per block of 32; rows of both tensors have the same length.
extern "C" __global__ void k_copy_quantized(Tensor x, Tensor out) {
    i64 blocks = out.d[3] / 32;
    FOR_EACH(n, out.d[0] * out.d[1] * out.d[2] * blocks) {
        i64 b = n % blocks, r = n / blocks;
        i64 t2 = r % out.d[2], t1 = r / out.d[2] % out.d[1], t0 = r / out.d[2] / out.d[1];
        i64 f2 = r % x.d[2], f1 = r / x.d[2] % x.d[1], f0 = r / x.d[2] / x.d[1];
        float v[32];
        for (int i = 0; i < 32; i++) v[i] = any_element(x, f0, f1, f2, b * 32 + i);
        quantize_block(out.type, v, row_at(out, t0, t1, t2) + b * quantized_block_bytes(out.type));
    }
}

// Copies blocks between tensors of the same quantized type.
extern "C" __global__ void k_copy_blocks(Tensor x, Tensor out, int block_len, int block_bytes) {
    i64 per_row = out.d[3] / block_len * block_bytes;
    FOR_EACH(n, out.d[0] * out.d[1] * out.d[2] * per_row) {
        i64 b = n % per_row, r = n / per_row;
        i64 t2 = r % out.d[2], t1 = r / out.d[2] % out.d[1], t0 = r / out.d[2] / out.d[1];
        i64 f2 = r % x.d[2], f1 = r / x.d[2] % x.d[1], f0 = r / x.d[2] / x.d[1];
        row_at(out, t0, t1, t2)[b] = row_at(x, f0, f1, f2)[b];
    }
}

extern "C" __global__ void k_get_rows(Tensor x, Tensor ids, Tensor out, u64 fault_word, u32 fault) {
    i64 r = blockIdx.x, t = r % out.d[2], i1 = r / out.d[2] % out.d[1], i0 = r / out.d[2] / out.d[1];
    i64 id = *(const int *)(ids.address + i0 * ids.s[1] + i1 * ids.s[2] + t * ids.s[3]);
    if (id < 0 || id >= x.d[2]) {
        if (threadIdx.x == 0) report(fault_word, fault);
        return;
    }
    for (i64 c = (i64)blockIdx.y * blockDim.x + threadIdx.x; c < out.d[3]; c += (i64)gridDim.y * blockDim.x) {
        if (x.type == I32)
            ((int *)row_at(out, i0, i1, t))[c] = ((const int *)row_at(x, i0, i1, id))[c];
        else
            ((float *)row_at(out, i0, i1, t))[c] = row_element(x.type, row_at(x, i0, i1, id), c);
    }
}

// Overwrites rows of `target` with rows of `x`; with a quantized target, one thread per block of 32.
extern "C" __global__ void k_set_rows(Tensor target, Tensor x, Tensor ids, u64 fault_word, u32 fault) {
    i64 r = blockIdx.x, t = r % x.d[2], i1 = r / x.d[2] % x.d[1], i0 = r / x.d[2] / x.d[1];
    i64 id = *(const int *)(ids.address + i0 % ids.d[1] * ids.s[1] + i1 % ids.d[2] * ids.s[2] + t * ids.s[3]);
    if (id < 0 || id >= target.d[2]) {
        if (threadIdx.x == 0) report(fault_word, fault);
        return;
    }
    if (!IS_PLAIN(target.type)) {
        for (i64 b = threadIdx.x; b < x.d[3] / 32; b += blockDim.x) {
            float v[32];
            for (int i = 0; i < 32; i++) v[i] = element(x, i0, i1, t, b * 32 + i);
            quantize_block(target.type, v, row_at(target, i0, i1, id) + b * quantized_block_bytes(target.type));
        }
    } else {
        for (i64 c = threadIdx.x; c < x.d[3]; c += blockDim.x) put(target, i0, i1, id, c, element(x, i0, i1, t, c));
    }
}

// set_rows of contiguous f32 rows into f16 rows, four elements per thread.
extern "C" __global__ void k_set_rows_f16(u64 target, i64 stride, i64 rows, u64 x, u64 ids, int quads, u64 fault_word,
                                          u32 fault) {
    i64 t = blockIdx.y, id = ((const int *)ids)[t];
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (id < 0 || id >= rows) {
        if (c == 0) report(fault_word, fault);
        return;
    }
    if (c >= quads) return;
    float4 v = ((const float4 *)x)[t * quads + c];
    uint2 halves;
    halves.x = (u32)float_to_half(v.x) | (u32)float_to_half(v.y) << 16;
    halves.y = (u32)float_to_half(v.z) | (u32)float_to_half(v.w) << 16;
    ((uint2 *)(target + id * stride))[c] = halves;
}

// Rows of f32 from a table, or to it with `store`, 16 bytes per thread: a block per row.
extern "C" __global__ void k_move_rows(u64 table, i64 stride, i64 rows, u64 dense, u64 ids, int quads, int store,
                                       u64 fault_word, u32 fault) {
    i64 t = blockIdx.x, id = ((const int *)ids)[t];
    if (id < 0 || id >= rows) {
        if (threadIdx.x == 0) report(fault_word, fault);
        return;
    }
    uint4 *here = (uint4 *)dense + t * quads, *there = (uint4 *)(table + id * stride);
    const uint4 *from = store ? here : there;
    uint4 *to = store ? there : here;
    for (int c = threadIdx.x; c < quads; c += blockDim.x) to[c] = from[c];
}

extern "C" __global__ void k_repeat(Tensor x, Tensor out) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        i64 a = i.i0 % x.d[0], b = i.i1 % x.d[1], c = i.i2 % x.d[2], d = i.i3 % x.d[3];
        if (x.type == I32)
            *(int *)(row_at(out, i.i0, i.i1, i.i2) + i.i3 * out.s[3]) = *(const int *)(row_at(x, a, b, c) + d * x.s[3]);
        else
            put(out, i.i0, i.i1, i.i2, i.i3, element(x, a, b, c, d));
    }
}

extern "C" __global__ void k_pad(Tensor x, Tensor out, i64 b0, i64 b1, i64 b2, i64 b3) {
    FOR_EACH(n, count(out)) {
        Position i = position(out, n);
        i64 a = i.i0 - b0, b = i.i1 - b1, c = i.i2 - b2, d = i.i3 - b3;
        bool inside = a >= 0 && a < x.d[0] && b >= 0 && b < x.d[1] && c >= 0 && c < x.d[2] && d >= 0 && d < x.d[3];
        put(out, i.i0, i.i1, i.i2, i.i3, inside ? element(x, a, b, c, d) : 0.0f);
    }
}
