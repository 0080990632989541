//! Cases of softmax, rotary embedding and attention.

use quadriga_graph::{AttentionOptions, DType, Pairing, Rope, Value};

use super::builder::{CaseBuilder, InputLayout};
use super::fill::{Fill, UNIT};
use super::{CaseList, WIDTHS};
use crate::Tolerance;

pub(super) fn list(list: &mut CaseList) {
    soft_max(list);
    rope(list);
    attention(list);
}

fn soft_max(list: &mut CaseList) {
    // Mask type, whether all heads share the mask, additional rows, probability of −∞.
    type Mask = Option<(DType, bool, usize, f64)>;
    let masks: [Mask; 5] = [
        None,
        Some((DType::F32, true, 0, 0.3)),
        Some((DType::F16, true, 2, 0.3)),
        Some((DType::F32, false, 0, 0.9)),
        Some((DType::F16, false, 1, 1.0)),
    ];
    let empty = [[1, 2, 0, 8], [1, 2, 3, 0]];
    let dims = WIDTHS.iter().flat_map(|w| [[1, 1, 1, *w], [1, 2, 5, *w], [2, 3, 4, *w]]).chain(empty);
    for dims in dims {
        for mask in masks {
            for sinks in [false, true] {
                for (scale, fill) in [(0.125, Fill::Range(-30.0, 30.0)), (1.0, UNIT)] {
                    let [b, h, t, n] = dims;
                    let layout = InputLayout::any(list.len());
                    let with = if sinks { " with sinks" } else { "" };
                    let details = format!("{dims:?}{layout} · {scale} mask {mask:?}{with}");
                    list.push("soft_max", details, Tolerance::DEFAULT, move |s| {
                        let x = s.strided_input(DType::F32, dims, layout, fill);
                        let mask = mask.map(|(dtype, shared, more, chance)| {
                            let lead = if shared { [1, 1] } else { [b, h] };
                            s.input(dtype, [lead[0], lead[1], t + more, n], Fill::Mask(chance))
                        });
                        let sinks = sinks.then(|| s.input(DType::F32, [1, 1, 1, h], UNIT));
                        s.out(x.soft_max(scale, mask, sinks));
                    });
                }
            }
        }
    }
}

fn rope(list: &mut CaseList) {
    for pairing in [Pairing::Adjacent, Pairing::Half] {
        for dims in [2, 4, 16, 32, 64, 80, 128] {
            for rest in [0, 6] {
                for factors in [false, true] {
                    for yarn in [false, true] {
                        for dtype in [DType::F32, DType::F16] {
                            for (tokens, heads) in [(1, 1), (1, 9), (7, 3), (33, 2)] {
                                let mut rope = Rope::new(dims, pairing, if dims > 64 { 5e5 } else { 1e4 });
                                if yarn {
                                    rope.scale = 0.25;
                                    rope.ext_factor = 1.0;
                                    rope.attn_factor = 0.9;
                                    rope.original_context = 2048;
                                } else if heads == 3 {
                                    rope.scale = 0.5;
                                }
                                one_rope(list, rope, dtype, [1, tokens, heads, dims + rest], factors);
                            }
                        }
                    }
                }
            }
        }
        let plain = Rope::new(8, pairing, 1e4);
        one_rope(list, plain, DType::F32, [2, 3, 2, 8], false);
        one_rope(list, plain, DType::F32, [1, 0, 2, 8], false);
        one_rope(list, plain, DType::F32, [0, 2, 2, 8], true);
    }
}

fn one_rope(list: &mut CaseList, rope: Rope, dtype: DType, dims: [usize; 4], factors: bool) {
    let layout = InputLayout::any(list.len());
    let yarn = if rope.ext_factor != 0.0 { " YaRN" } else { "" };
    let with = if factors { " factors" } else { "" };
    let details =
        format!("{:?} {} of {dtype} {dims:?}{layout} · {}{yarn}{with}", rope.pairing, rope.dims, rope.scale);
    list.push("rope", details, Tolerance::of_result(dtype), move |s| {
        let x = s.strided_input(dtype, dims, layout, UNIT);
        let positions = s.positions(dims[1], 2000);
        let factors = factors.then(|| s.input(DType::F32, [1, 1, 1, rope.dims / 2], Fill::Range(1.0, 8.0)));
        s.out(x.rope(rope, positions, factors));
    });
}

/// Which keys are visible to a query.
#[derive(Clone, Copy, Debug)]
enum Visible {
    All,
    Mask(DType),
    MaskPerHead,
    Spans,
    MaskAndSpans,
}

#[derive(Clone, Copy)]
struct AttentionShape {
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    value_depth: usize,
}

fn attention(list: &mut CaseList) {
    let visible = [
        Visible::All,
        Visible::Spans,
        Visible::Mask(DType::F32),
        Visible::Mask(DType::F16),
        Visible::MaskPerHead,
        Visible::MaskAndSpans,
    ];
    for types in [
        [DType::F32, DType::F32],
        [DType::F16, DType::F16],
        [DType::Q8_0, DType::Q8_0],
        [DType::F16, DType::Q8_0],
        [DType::Q8_0, DType::F32],
    ] {
        let depths: &[usize] =
            if types.contains(&DType::Q8_0) { &[32, 64, 96, 128] } else { &[16, 40, 64, 80, 128] };
        for depth in depths {
            for (heads, groups) in [(1, 1), (4, 2), (9, 3), (5, 1)] {
                for queries in [1, 2, 7, 33] {
                    for keys in [1, 7, 32, 65, 257] {
                        let batch = 1 + usize::from(queries == 2 && keys == 7);
                        let shape = AttentionShape {
                            batch,
                            heads,
                            groups,
                            queries,
                            keys,
                            depth: *depth,
                            value_depth: *depth,
                        };
                        let index = list.len();
                        let soft_cap = index.is_multiple_of(4).then_some(3.0);
                        let visible = visible.get(index % visible.len()).copied().unwrap_or(Visible::All);
                        one_attention(list, types, shape, visible, Scores { soft_cap, sinks: false });
                    }
                }
            }
        }
        let odd = AttentionShape {
            batch: 1,
            heads: 2,
            groups: 2,
            queries: 3,
            keys: 40,
            depth: 64,
            value_depth: 96,
        };
        for visible in visible {
            one_attention(list, types, odd, visible, PLAIN);
            one_attention(list, types, AttentionShape { keys: 0, ..odd }, visible, PLAIN);
            one_attention(list, types, AttentionShape { queries: 0, ..odd }, visible, PLAIN);
            one_attention(
                list,
                types,
                AttentionShape { batch: 2, queries: 17, keys: 33, ..odd },
                visible,
                Scores { soft_cap: Some(10.0), sinks: false },
            );
        }
    }
}

/// More queries and keys than fit one tile, so that kernels combine tiles and partial results.
pub(super) fn many(list: &mut CaseList) {
    for types in [[DType::F16, DType::F16], [DType::Q8_0, DType::Q8_0], [DType::F16, DType::Q8_0]] {
        for depth in [64, 96, 128] {
            for (queries, keys) in [(16, 700), (64, 64), (65, 129), (130, 300), (200, 200)] {
                let shape = AttentionShape {
                    batch: 1,
                    heads: 4,
                    groups: 2,
                    queries,
                    keys,
                    depth,
                    value_depth: depth,
                };
                one_attention(list, types, shape, Visible::Spans, PLAIN);
                let visible = match list.len() % 3 {
                    0 => Visible::All,
                    1 => Visible::MaskAndSpans,
                    _ => Visible::MaskPerHead,
                };
                let capped = Scores { soft_cap: Some(3.0), sinks: false };
                one_attention(list, types, AttentionShape { batch: 2, ..shape }, visible, capped);
            }
        }
    }
    // NaN and infinity in keys or values that are not visible to a query must not affect its result.
    for dtype in [DType::F32, DType::F16] {
        for depth in [64, 80, 128] {
            for (queries, keys) in [(1, 40), (7, 40), (40, 100), (130, 300)] {
                let shape = AttentionShape {
                    batch: 1,
                    heads: 4,
                    groups: 2,
                    queries,
                    keys,
                    depth,
                    value_depth: depth,
                };
                for (of_keys, of_values) in [(0.002, 0.0), (0.0, 0.002)] {
                    non_finite(list, dtype, shape, of_keys, of_values);
                }
            }
        }
    }
}

/// NaN and infinite queries, also of all scores, must reach the result.
pub(super) fn non_finite_queries(list: &mut CaseList) {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        for (queries, keys) in [(1, 1), (1, 40), (1, 700), (5, 40), (40, 100)] {
            for (depth, chance) in [(64, 1.0), (96, 0.02), (128, 0.005)] {
                for soft_cap in [None, Some(3.0)] {
                    for sinks in [false, true] {
                        let details = format!(
                            "[1, 4, {queries}, {depth}] × {dtype} [2, {keys}], not finite: queries {chance}, \
                             cap {soft_cap:?}, sinks {sinks}"
                        );
                        list.push("attention", details, Tolerance::QUANTIZED, move |s| {
                            let q = s.input(DType::F32, [1, 4, queries, depth], Fill::NonFinite(chance));
                            let k = s.input(dtype, [1, 2, keys, depth], UNIT);
                            let v = s.input(dtype, [1, 2, keys, depth], UNIT);
                            let sinks = sinks.then(|| s.input(DType::F32, [1, 1, 1, 4], UNIT));
                            let spans = Some(s.spans(queries, keys));
                            let options =
                                AttentionOptions { soft_cap, spans, sinks, ..AttentionOptions::new() };
                            s.out(q.attention(k, v, options));
                        });
                    }
                }
            }
        }
    }
}

/// Values that are the first elements of the keys, as in latent attention: one tensor is read as both.
pub(super) fn values_in_keys(list: &mut CaseList) {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        for (heads, depth, value_depth) in [(1, 64, 32), (5, 160, 128), (16, 576, 512)] {
            for size in [[1, 1], [1, 200], [4, 33], [40, 130]] {
                one_values_in_keys(list, dtype, heads, [depth, value_depth], size);
            }
        }
    }
}

fn one_values_in_keys(
    list: &mut CaseList,
    dtype: DType,
    heads: usize,
    [depth, value_depth]: [usize; 2],
    [queries, keys]: [usize; 2],
) {
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    let details =
        format!("[1, {heads}, {queries}, {depth}] × {dtype} [1, {keys}], {value_depth} of them values");
    list.push("attention", details, tolerance, move |s| {
        let q = s.input(DType::F32, [1, heads, queries, depth], Fill::Range(-2.0, 2.0));
        let k = s.input(dtype, [1, 1, keys, depth], UNIT);
        let v = k.slice(k.shape().dims().len() - 1, 0, value_depth);
        s.out(q.attention(k, v, AttentionOptions::new().spans(s.spans(queries, keys))));
    });
}

fn non_finite(list: &mut CaseList, dtype: DType, shape: AttentionShape, of_keys: f64, of_values: f64) {
    let AttentionShape { batch, heads, groups, queries, keys, depth, .. } = shape;
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    let details = format!(
        "[{batch}, {heads}, {queries}, {depth}] × {dtype} [{groups}, {keys}], \
         not finite: keys {of_keys}, values {of_values}"
    );
    list.push("attention", details, tolerance, move |s| {
        let q = s.input(DType::F32, [batch, heads, queries, depth], Fill::Range(-2.0, 2.0));
        let k = s.input(dtype, [batch, groups, keys, depth], Fill::NonFinite(of_keys));
        let v = s.input(dtype, [batch, groups, keys, depth], Fill::NonFinite(of_values));
        s.out(q.attention(k, v, AttentionOptions::new().spans(s.spans(queries, keys))));
    });
}

/// What is done to the scores besides the mask.
#[derive(Clone, Copy)]
struct Scores {
    soft_cap: Option<f32>,
    sinks: bool,
}

const PLAIN: Scores = Scores { soft_cap: None, sinks: false };

/// Sinks, for single queries and for more than fit a tile; with keys that are not visible at all.
pub(super) fn sinks(list: &mut CaseList) {
    for types in [[DType::F32; 2], [DType::F16; 2], [DType::Q8_0; 2]] {
        for depth in [64, 96, 128] {
            for (heads, groups) in [(1, 1), (8, 1), (9, 3)] {
                for (queries, keys) in [(1, 1), (1, 70), (1, 700), (5, 33), (40, 40), (130, 300)] {
                    let shape = square(1, [heads, groups], [queries, keys], depth);
                    let visible =
                        if list.len().is_multiple_of(3) { Visible::MaskPerHead } else { Visible::Spans };
                    let soft_cap = list.len().is_multiple_of(5).then_some(4.0);
                    one_attention(list, types, shape, visible, Scores { soft_cap, sinks: true });
                }
            }
        }
    }
}

/// Every type that a KV cache can have, of keys and values apart.
pub(super) fn cache_types(list: &mut CaseList) {
    use DType::{BF16, F16, F32, Q4_0, Q5_1, Q8_0};
    for types in
        [[BF16, BF16], [Q4_0, Q4_0], [Q5_1, Q5_1], [Q8_0, Q4_0], [F16, Q5_1], [BF16, F16], [Q4_0, F32]]
    {
        for depth in [32, 64, 128] {
            for (heads, groups) in [(1, 1), (4, 2), (9, 3)] {
                for (queries, keys) in [(1, 1), (1, 300), (5, 33), (70, 130)] {
                    let shape = square(1, [heads, groups], [queries, keys], depth);
                    one_attention(list, types, shape, Visible::Spans, PLAIN);
                }
            }
        }
    }
}

/// Heads of 256 elements, and those of multi-head latent attention: one wide key for all heads, expanded or not.
pub(super) fn latent(list: &mut CaseList) {
    for types in [[DType::F16; 2], [DType::F32; 2], [DType::BF16; 2], [DType::Q8_0; 2]] {
        for (heads, groups, depth, value_depth) in
            [(4, 1, 256, 256), (16, 1, 576, 512), (5, 1, 160, 128), (4, 4, 192, 128)]
        {
            for (queries, keys) in [(1, 1), (1, 200), (4, 33), (40, 130)] {
                let shape =
                    AttentionShape { value_depth, ..square(1, [heads, groups], [queries, keys], depth) };
                one_attention(list, types, shape, Visible::Spans, PLAIN);
            }
        }
    }
}

/// What the models with the widest heads have beside that: soft caps, as Gemma 2 on heads of 256, and caches of few bits, also of
/// latent attention, whose values may be a part of the keys.
pub(super) fn wide_heads(list: &mut CaseList) {
    use DType::{BF16, F16, F32, Q4_0, Q5_1, Q8_0};
    const SIZES: [[usize; 2]; 6] = [[1, 1], [1, 200], [1, 700], [4, 33], [40, 130], [130, 300]];
    for types in [[F32; 2], [F16; 2], [BF16; 2], [Q8_0; 2], [Q4_0; 2], [Q5_1; 2], [Q8_0, Q4_0]] {
        for heads in [[2, 1], [8, 4], [4, 1]] {
            for (size, soft_cap) in SIZES.into_iter().zip([Some(50.0), Some(3.0)].into_iter().cycle()) {
                let scores = Scores { soft_cap, sinks: false };
                one_attention(list, types, square(1, heads, size, 256), Visible::Spans, scores);
            }
        }
    }
    for types in [[Q4_0; 2], [Q5_1; 2], [Q8_0, Q4_0], [F16, Q5_1], [Q5_1, Q4_0]] {
        for size in SIZES {
            let plain = square(1, [4, 1], size, 256);
            one_attention(list, types, plain, Visible::Spans, PLAIN);
            let latent = AttentionShape { value_depth: 512, ..square(1, [16, 1], size, 576) };
            one_attention(list, types, latent, Visible::Spans, PLAIN);
        }
    }
    for dtype in [Q4_0, Q5_1] {
        for (heads, depth, value_depth) in [(5, 160, 128), (16, 576, 512)] {
            for size in SIZES {
                one_values_in_keys(list, dtype, heads, [depth, value_depth], size);
            }
        }
    }
}

fn square(
    batch: usize,
    [heads, groups]: [usize; 2],
    [queries, keys]: [usize; 2],
    depth: usize,
) -> AttentionShape {
    AttentionShape { batch, heads, groups, queries, keys, depth, value_depth: depth }
}

fn one_attention(
    list: &mut CaseList,
    types: [DType; 2],
    shape: AttentionShape,
    visible: Visible,
    scores: Scores,
) {
    let Scores { soft_cap, sinks } = scores;
    let [k_type, v_type] = types;
    let AttentionShape { batch, heads, groups, queries, keys, depth, value_depth } = shape;
    let layout = InputLayout::dense(list.len() / 3);
    let tolerance = if types == [DType::F32; 2] { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    let cap = soft_cap.map_or(String::new(), |c| format!(" cap {c}"));
    let with = if sinks { " sinks" } else { "" };
    let details = format!(
        "[{batch}, {heads}, {queries}, {depth}] × {k_type} {v_type} \
         [{groups}, {keys}, {value_depth}]{layout} {visible:?}{cap}{with}"
    );
    list.push("attention", details, tolerance, move |s| {
        let q = s.strided_input(DType::F32, [batch, heads, queries, depth], layout, Fill::Range(-2.0, 2.0));
        let k = s.strided_input(k_type, [batch, groups, keys, depth], layout, UNIT);
        let v = s.strided_input(v_type, [batch, groups, keys, value_depth], layout, UNIT);
        let (mask, spans) = mask_and_spans(s, visible, shape);
        let sinks = sinks.then(|| s.input(DType::F32, [1, 1, 1, heads], Fill::Range(-2.0, 4.0)));
        let options = AttentionOptions { soft_cap, mask, spans, sinks, ..AttentionOptions::new() };
        s.out(q.attention(k, v, options));
    });
}

fn mask_and_spans<'g>(
    s: &CaseBuilder<'g>,
    visible: Visible,
    shape: AttentionShape,
) -> (Option<Value<'g>>, Option<Value<'g>>) {
    let AttentionShape { batch, heads, queries, keys, .. } = shape;
    let mask = |dtype, [b, h]: [usize; 2]| Some(s.input(dtype, [b, h, queries, keys], Fill::Mask(0.3)));
    let spans = || Some(s.spans(queries, keys));
    match visible {
        Visible::All => (None, None),
        Visible::Mask(dtype) => (mask(dtype, [1, 1]), None),
        Visible::MaskPerHead => (mask(DType::F32, [batch, heads]), None),
        Visible::Spans => (None, spans()),
        Visible::MaskAndSpans => (mask(DType::F16, [1, 1]), spans()),
    }
}
