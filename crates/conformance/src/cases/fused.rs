//! Small graphs of several operations that backends fuse or compute in place.

use quadriga_graph::{AttentionOptions, DType, Gate, Pairing, Rope, Unary, Value};

use super::builder::{CaseBuilder, InputLayout};
use super::fill::{Fill, UNIT};
use super::{CaseList, WEIGHT_TYPES, WIDTHS};
use crate::Tolerance;

fn tolerance(dtype: DType) -> Tolerance {
    if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED }
}

pub(super) fn list(list: &mut CaseList) {
    norms(list);
    chains(list);
    for dtype in WEIGHT_TYPES {
        matmuls(list, dtype);
    }
    caches(list);
    blocks(list);
}

/// A norm with its weight; a residual sum, also as an output, and its norm.
fn norms(list: &mut CaseList) {
    for width in WIDTHS {
        for rows in [1, 5] {
            let dims = [1, 1, rows, width];
            list.push("norm_mul", format!("rms {dims:?}"), Tolerance::DEFAULT, move |s| {
                let x = s.input(DType::F32, dims, UNIT);
                s.out(x.rms_norm(1e-5).mul(s.weight(DType::F32, [1, 1, 1, width])));
            });
            list.push("norm_mul", format!("mean {dims:?} and bias"), Tolerance::DEFAULT, move |s| {
                let x = s.input(DType::F32, dims, UNIT);
                let row = [1, 1, 1, width];
                s.out(x.norm(1e-5).mul(s.weight(DType::F32, row)).add(s.weight(DType::F32, row)));
            });
            for kept in [false, true] {
                let mark = if kept { ", sum kept" } else { "" };
                list.push("add_norm", format!("{dims:?}{mark}"), Tolerance::DEFAULT, move |s| {
                    let sum = s.input(DType::F32, dims, UNIT).add(s.input(DType::F32, dims, UNIT));
                    s.out(sum.rms_norm(1e-5).mul(s.weight(DType::F32, [1, 1, 1, width])));
                    if kept {
                        s.out(sum);
                    }
                });
            }
        }
    }
}

/// Chains whose results can reuse the memory of their inputs, and some that must not.
fn chains(list: &mut CaseList) {
    for width in WIDTHS {
        let dims = [1, 2, 3, width];
        let layout = InputLayout::any(list.len());
        list.push("in_place", format!("long chain {dims:?}{layout}"), Tolerance::DEFAULT, move |s| {
            let x = s.strided_input(DType::F32, dims, layout, UNIT);
            let y = x.scale(2.0).silu().add(x).sqr().scale_bias(0.5, 1.0).sqrt().neg();
            s.out(y.clamp(-3.0, 3.0).soft_max(1.0, None, None));
        });
        list.push("in_place", format!("read again {dims:?}"), Tolerance::DEFAULT, move |s| {
            let x = s.input(DType::F32, dims, UNIT).scale(3.0);
            let y = x.tanh();
            let z = y.mul(y).add(x);
            s.out(z.sub(y.abs()));
            s.out(x.add(x));
        });
        list.push("in_place", format!("broadcast {dims:?}"), Tolerance::DEFAULT, move |s| {
            let x = s.input(DType::F32, dims, UNIT).scale(3.0);
            let row = s.input(DType::F32, [1, 1, 1, width], UNIT).exp();
            s.out(x.mul(row).add(row).div(row));
        });
        list.push("in_place", format!("through views {dims:?}"), Tolerance::DEFAULT, move |s| {
            let x = s.input(DType::F32, dims, UNIT).scale(3.0).reshape([6, width]);
            let (top, bottom) = (x.slice(0, 0, 3), x.slice(0, 3, 3));
            s.out(top.silu().mul(bottom).add(top));
            s.out(bottom.relu());
        });
    }
}

/// Matrix multiplications with a fused prologue or epilogue.
fn matmuls(list: &mut CaseList, dtype: DType) {
    let block = dtype.block_len();
    for k in [block.max(32), if block == 1 { 66 } else { 2 * block }] {
        for n in [16, 33, 64] {
            for m in [1, 4, 17] {
                let (w, x) = ([1, 1, n, k], [1, 1, m, k]);
                let size = format!("{dtype} {w:?} × {x:?}");
                list.push("gate_up", size.clone(), tolerance(dtype), move |s| {
                    let x = s.input(DType::F32, x, UNIT);
                    let gate = s.weight(dtype, w).mul_mat(x);
                    s.out(gate.gated(Gate::Swiglu, s.weight(dtype, w).mul_mat(x)));
                });
                for unary in [Unary::Gelu, Unary::Silu, Unary::Relu] {
                    list.push("mul_mat_bias", format!("{size} {unary:?}"), tolerance(dtype), move |s| {
                        let y = s.weight(dtype, w).mul_mat(s.input(DType::F32, x, UNIT));
                        s.out(y.add(s.weight(DType::F32, [1, 1, 1, n])).unary(unary));
                    });
                }
                list.push("norm_mul_mat", size.clone(), tolerance(dtype), move |s| {
                    let x =
                        s.input(DType::F32, x, UNIT).rms_norm(1e-5).mul(s.weight(DType::F32, [1, 1, 1, k]));
                    s.out(s.weight(dtype, w).mul_mat(x));
                    s.out(s.weight(dtype, w).mul_mat(x));
                });
                list.push("mul_mat_add", size, tolerance(dtype), move |s| {
                    let y = s.weight(dtype, w).mul_mat(s.input(DType::F32, x, UNIT));
                    s.out(y.add(s.input(DType::F32, [1, 1, m, n], UNIT)));
                });
            }
        }
    }
}

/// RoPE of keys, then the write to the KV cache.
fn caches(list: &mut CaseList) {
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        for pairing in [Pairing::Adjacent, Pairing::Half] {
            for (tokens, heads, depth) in [(1, 1, 32), (1, 3, 64), (5, 2, 64), (17, 3, 96)] {
                // RoPE is rounded differently than in the oracle, so no result is exact.
                let tolerance = match dtype {
                    DType::F32 => Tolerance::DEFAULT,
                    DType::F16 => Tolerance::HALF,
                    _ => Tolerance::written(dtype),
                };
                let details = format!("{dtype} {pairing:?} [{tokens}, {heads}, {depth}]");
                list.push("rope_set_rows", details, tolerance, move |s| {
                    let x =
                        s.input(DType::F32, [1, tokens, heads, depth], UNIT).reshape([tokens, heads, depth]);
                    let rotated = x.rope(Rope::new(depth, pairing, 1e4), s.positions(tokens, 1000), None);
                    let rows = rotated.reshape([tokens, heads * depth]);
                    let cache = s.state(dtype, [1, 1, 40, heads * depth]);
                    s.out(cache.set_rows(rows, s.distinct_ids([1, 1, 1, tokens], 40)));
                });
            }
        }
    }
}

/// An attention block: projections, RoPE, KV cache, attention over a view of the cache, output projection, residual.
fn blocks(list: &mut CaseList) {
    for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0, DType::Q4_K] {
        for cache_type in [DType::F32, DType::F16, DType::Q8_0] {
            for (tokens, heads, groups, depth, norms) in [
                (1, 4, 2, 64, ""),
                (3, 4, 4, 64, ""),
                (9, 4, 1, 64, ""),
                (1, 4, 2, 64, "qk"),
                (1, 4, 1, 128, "qk"),
                (1, 4, 2, 256, "qk"),
                (1, 4, 2, 128, "k"),
                (3, 4, 2, 64, "qk"),
            ] {
                let exact = dtype == DType::F32 && cache_type == DType::F32;
                let tolerance = if exact { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
                let mut details =
                    format!("{dtype}, cache {cache_type}, {tokens} tokens, heads {heads}/{groups}");
                if !norms.is_empty() {
                    details += &format!(" of {depth}, norms of {norms}");
                }
                list.push("attention_block", details, tolerance, move |s| {
                    let (width, length) = (heads * 64, 32);
                    let x = s.input(DType::F32, [1, 1, tokens, width], UNIT);
                    let h = x.rms_norm(1e-5).mul(s.weight(DType::F32, [1, 1, 1, width]));
                    let positions = s.positions(tokens, 100);
                    // Where only keys have a norm, half of a head is rotated.
                    let (rotated, pairing) = match norms {
                        "" => (depth, Pairing::Adjacent),
                        "k" => (depth / 2, Pairing::Half),
                        _ => (depth, Pairing::Half),
                    };
                    let rope = Rope::new(rotated, pairing, 1e4);
                    let project = |heads: usize| {
                        let w = s.weight(dtype, [1, 1, heads * depth, width]);
                        // Scaled: random weights would make scores larger than those of any model.
                        w.mul_mat(h).scale(0.2).reshape([tokens, heads, depth])
                    };
                    let (q, k) = (project(heads), project(groups));
                    let v = project(groups).reshape([tokens, groups * depth]);
                    let q = if norms.contains('q') { head_norm(s, q) } else { q };
                    let q = q.rope(rope, positions, None).permute([1, 0, 2]);
                    let k = if norms.contains('k') { head_norm(s, k) } else { k };
                    let k = k.rope(rope, positions, None).reshape([tokens, groups * depth]);
                    let ids = s.distinct_ids([1, 1, 1, tokens], length);
                    let write = |rows| {
                        let cache = s.state(cache_type, [1, 1, length, groups * depth]).set_rows(rows, ids);
                        cache.reshape([length, groups, depth]).permute([1, 0, 2])
                    };
                    let attended = q.attention(
                        write(k),
                        write(v),
                        AttentionOptions::new().spans(s.spans(tokens, length)).scale(0.125),
                    );
                    let inner = heads * depth;
                    let y = s.weight(dtype, [1, 1, width, inner]).mul_mat(attended.reshape([tokens, inner]));
                    s.out(y.scale(0.2).add(x));
                });
            }
        }
    }
}

/// One token over the KV cache of a long text: projections, norms, RoPE, cache write and attention.
pub(super) fn long_caches(list: &mut CaseList) {
    let shapes = [
        (1, 1, 64, 4096),
        (4, 1, 128, 4097),
        (8, 2, 128, 4500),
        (8, 1, 64, 5001),
        (5, 1, 128, 4160),
        (9, 1, 64, 4096),
        (4, 2, 256, 4096),
    ];
    for (heads, groups, depth, length) in shapes {
        for norms in [false, true] {
            for (soft_cap, sinks) in [(None, false), (Some(5.0), true)] {
                for of_values in [0.0, 0.0001] {
                    let details = format!(
                        "one token, heads {heads}/{groups} of {depth}, {length} rows, norms {norms}, cap {soft_cap:?}, \
                         sinks {sinks}, values not finite {of_values}"
                    );
                    list.push("attention_block", details, Tolerance::QUANTIZED, move |s| {
                        let x = s.input(DType::F32, [1, 1, 1, 64], UNIT);
                        let position = s.positions(1, 100);
                        let rope = Rope::new(depth, Pairing::Half, 1e4);
                        let project = |heads: usize| {
                            let w = s.weight(DType::F16, [1, 1, heads * depth, 64]);
                            w.mul_mat(x).scale(0.2).reshape([1, heads, depth])
                        };
                        let (q, k, v) = (project(heads), project(groups), project(groups));
                        let q = if norms { head_norm(s, q) } else { q }.rope(rope, position, None);
                        let k = if norms { head_norm(s, k) } else { k }.rope(rope, position, None);
                        let row = s.ids([1, 1, 1, 1], length);
                        let write = |rows, fill| {
                            let cache = s.filled_state(DType::F16, [1, 1, length, groups * depth], fill);
                            cache.set_rows(rows, row).reshape([length, groups, depth]).permute([1, 0, 2])
                        };
                        let sinks = sinks.then(|| s.input(DType::F32, [1, 1, 1, heads], UNIT));
                        let spans = Some(s.spans(1, length));
                        let flat = [1, groups * depth];
                        let keys = write(k.reshape(flat), UNIT);
                        let fill = if of_values > 0.0 { Fill::NonFinite(of_values) } else { UNIT };
                        let values = write(v.reshape(flat), fill);
                        let options = AttentionOptions { soft_cap, spans, sinks, ..AttentionOptions::new() };
                        s.out(q.permute([1, 0, 2]).attention(keys, values, options));
                        s.out(keys.cont());
                    });
                }
            }
        }
    }
}

/// The norm of each head.
fn head_norm<'g>(s: &CaseBuilder<'g>, heads: Value<'g>) -> Value<'g> {
    heads.rms_norm(1e-5).mul(s.weight(DType::F32, [1, 1, 1, heads.shape().cols()]))
}
