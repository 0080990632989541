//! Cases of softmax, rotary embedding and attention.

use quadriga_graph::{AttentionOptions, DType, Pairing, Rope, Value};

use super::fill::{Fill, UNIT};
use super::sketch::{Lay, Sketch};
use super::{List, WIDTHS};
use crate::Tolerance;

pub(super) fn list(list: &mut List) {
    soft_max(list);
    rope(list);
    attention(list);
}

fn soft_max(list: &mut List) {
    // Mask type, leading dimensions shared or not, rows beyond those needed, chance of −∞.
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
                    let lay = Lay::any(list.turn());
                    let with = if sinks { " with sinks" } else { "" };
                    let details = format!("{dims:?}{lay} · {scale} mask {mask:?}{with}");
                    list.push("soft_max", details, Tolerance::DEFAULT, move |s| {
                        let x = s.laid(DType::F32, dims, lay, fill);
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

fn rope(list: &mut List) {
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

fn one_rope(list: &mut List, rope: Rope, dtype: DType, dims: [usize; 4], factors: bool) {
    let lay = Lay::any(list.turn());
    let yarn = if rope.ext_factor != 0.0 { " YaRN" } else { "" };
    let with = if factors { " factors" } else { "" };
    let details =
        format!("{:?} {} of {dtype} {dims:?}{lay} · {}{yarn}{with}", rope.pairing, rope.dims, rope.scale);
    list.push("rope", details, Tolerance::of_result(dtype), move |s| {
        let x = s.laid(dtype, dims, lay, UNIT);
        let positions = s.positions(dims[1], 2000);
        let factors = factors.then(|| s.input(DType::F32, [1, 1, 1, rope.dims / 2], Fill::Range(1.0, 8.0)));
        s.out(x.rope(rope, positions, factors));
    });
}

/// What a query sees of the keys.
#[derive(Clone, Copy, Debug)]
enum Seen {
    All,
    Mask(DType),
    MaskPerHead,
    Spans,
    MaskAndSpans,
}

#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    depth: usize,
    value_depth: usize,
}

fn attention(list: &mut List) {
    let seen = [
        Seen::All,
        Seen::Spans,
        Seen::Mask(DType::F32),
        Seen::Mask(DType::F16),
        Seen::MaskPerHead,
        Seen::MaskAndSpans,
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
                        let shape =
                            Shape { batch, heads, groups, queries, keys, depth: *depth, value_depth: *depth };
                        let turn = list.turn();
                        let soft_cap = turn.is_multiple_of(4).then_some(3.0);
                        let seen = seen.get(turn % seen.len()).copied().unwrap_or(Seen::All);
                        one_attention(list, types, shape, seen, soft_cap);
                    }
                }
            }
        }
        let odd = Shape { batch: 1, heads: 2, groups: 2, queries: 3, keys: 40, depth: 64, value_depth: 96 };
        for seen in seen {
            one_attention(list, types, odd, seen, None);
            one_attention(list, types, Shape { keys: 0, ..odd }, seen, None);
            one_attention(list, types, Shape { queries: 0, ..odd }, seen, None);
            one_attention(list, types, Shape { batch: 2, queries: 17, keys: 33, ..odd }, seen, Some(10.0));
        }
    }
}

/// More queries and keys than a kernel takes at once, so that tiles and pieces of both meet.
pub(super) fn many(list: &mut List) {
    for types in [[DType::F16, DType::F16], [DType::Q8_0, DType::Q8_0], [DType::F16, DType::Q8_0]] {
        for depth in [64, 96, 128] {
            for (queries, keys) in [(16, 700), (64, 64), (65, 129), (130, 300), (200, 200)] {
                let shape = Shape { batch: 1, heads: 4, groups: 2, queries, keys, depth, value_depth: depth };
                one_attention(list, types, shape, Seen::Spans, None);
                let seen = match list.turn() % 3 {
                    0 => Seen::All,
                    1 => Seen::MaskAndSpans,
                    _ => Seen::MaskPerHead,
                };
                one_attention(list, types, Shape { batch: 2, ..shape }, seen, Some(3.0));
            }
        }
    }
    // What a query does not see may be anything.
    for dtype in [DType::F32, DType::F16] {
        for depth in [64, 80, 128] {
            for (queries, keys) in [(1, 40), (7, 40), (40, 100), (130, 300)] {
                let shape = Shape { batch: 1, heads: 4, groups: 2, queries, keys, depth, value_depth: depth };
                for (of_keys, of_values) in [(0.002, 0.0), (0.0, 0.002)] {
                    holes(list, dtype, shape, of_keys, of_values);
                }
            }
        }
    }
}

fn holes(list: &mut List, dtype: DType, shape: Shape, of_keys: f64, of_values: f64) {
    let Shape { batch, heads, groups, queries, keys, depth, .. } = shape;
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    let details = format!(
        "[{batch}, {heads}, {queries}, {depth}] × {dtype} [{groups}, {keys}], holes {of_keys} {of_values}"
    );
    list.push("attention", details, tolerance, move |s| {
        let q = s.input(DType::F32, [batch, heads, queries, depth], Fill::Range(-2.0, 2.0));
        let k = s.input(dtype, [batch, groups, keys, depth], Fill::Holes(of_keys));
        let v = s.input(dtype, [batch, groups, keys, depth], Fill::Holes(of_values));
        s.out(q.attention(k, v, AttentionOptions::new().spans(s.spans(queries, keys))));
    });
}

fn one_attention(list: &mut List, types: [DType; 2], shape: Shape, seen: Seen, soft_cap: Option<f32>) {
    let [k_type, v_type] = types;
    let Shape { batch, heads, groups, queries, keys, depth, value_depth } = shape;
    let lay = Lay::dense(list.turn() / 3);
    let tolerance = if types == [DType::F32; 2] { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    let cap = soft_cap.map_or(String::new(), |c| format!(" cap {c}"));
    let details = format!(
        "[{batch}, {heads}, {queries}, {depth}] × {k_type} {v_type} [{groups}, {keys}, {value_depth}]{lay} {seen:?}{cap}"
    );
    list.push("attention", details, tolerance, move |s| {
        let q = s.laid(DType::F32, [batch, heads, queries, depth], lay, Fill::Range(-2.0, 2.0));
        let k = s.laid(k_type, [batch, groups, keys, depth], lay, UNIT);
        let v = s.laid(v_type, [batch, groups, keys, value_depth], lay, UNIT);
        let (mask, spans) = sight(s, seen, shape);
        s.out(q.attention(k, v, AttentionOptions { scale: None, soft_cap, mask, spans }));
    });
}

fn sight<'g>(s: &Sketch<'g>, seen: Seen, shape: Shape) -> (Option<Value<'g>>, Option<Value<'g>>) {
    let Shape { batch, heads, queries, keys, .. } = shape;
    let mask = |dtype, [b, h]: [usize; 2]| Some(s.input(dtype, [b, h, queries, keys], Fill::Mask(0.3)));
    let spans = || Some(s.spans(queries, keys));
    match seen {
        Seen::All => (None, None),
        Seen::Mask(dtype) => (mask(dtype, [1, 1]), None),
        Seen::MaskPerHead => (mask(DType::F32, [batch, heads]), None),
        Seen::Spans => (None, spans()),
        Seen::MaskAndSpans => (mask(DType::F16, [1, 1]), spans()),
    }
}
