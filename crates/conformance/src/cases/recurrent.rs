//! Cases of recurrent layers.

use quadriga_graph::{DType, DeltaRuleInputs, GatedDeltaRule, Shape, Value};

use super::CaseList;
use super::builder::CaseBuilder;
use super::fill::{Fill, UNIT};
use crate::Tolerance;

pub(super) fn list(list: &mut CaseList) {
    for channels in [1, 7, 32, 65, 256, 1000] {
        for (tokens, taps) in [(0, 4), (1, 1), (1, 4), (2, 3), (7, 4), (65, 4)] {
            let details = format!("{tokens} tokens, {channels} channels, {taps} taps");
            list.push("ssm_conv", details, Tolerance::DEFAULT, move |s| {
                let x = s.shaped_input(DType::F32, Shape::from([taps - 1 + tokens, channels]), UNIT);
                s.out(x.ssm_conv(s.shaped_input(DType::F32, Shape::from([channels, taps]), UNIT)));
            });
        }
    }
    for (key_heads, heads) in [(1, 1), (2, 2), (2, 6), (3, 6)] {
        for (depth, width) in [(1, 1), (16, 16), (33, 17), (64, 64), (128, 128), (128, 64)] {
            for tokens in [0, 1, 2, 7, 64, 65, 130] {
                let tiled = list.len().is_multiple_of(2);
                let scale = 1.0 / (depth as f32).sqrt();
                let shape = DeltaShape { tokens, key_heads, heads, depth, width };
                let delta = list.len() % 5 < 3;
                delta_rule(list, shape, GatedDeltaRule { scale, tiled, delta }, GATES);
            }
        }
    }
    // What is computed in chunks: lengths beside multiples of them, states that hardly fade or vanish at once.
    for (tokens, gates) in [
        (9, GATES),
        (15, GATES),
        (16, GATES),
        (33, NEAR_ONE),
        (100, NEAR_ZERO),
        (127, NEAR_ONE),
        (128, NEAR_ZERO),
        (129, NEAR_ONE),
        (191, (-20.0, 0.0)),
        (192, GATES),
        (193, NEAR_ONE),
        (320, (-0.1, 0.0)),
        (1000, NEAR_ONE),
        (1025, GATES),
    ] {
        for (depth, width) in [(128, 128), (100, 33), (64, 40), (48, 96)] {
            if tokens >= 1000 && depth > 64 {
                continue;
            }
            for delta in [true, false] {
                let shape = DeltaShape { tokens, key_heads: 1, heads: 2, depth, width };
                delta_rule(list, shape, GatedDeltaRule { scale: 0.25, tiled: false, delta }, gates);
            }
        }
    }
}

/// The least and the largest logarithm of a decay.
type Gates = (f32, f32);

const GATES: Gates = (-3.0, 0.0);
const NEAR_ONE: Gates = (-1e-3, 0.0);
const NEAR_ZERO: Gates = (-300.0, -20.0);

#[derive(Clone, Copy, Debug)]
struct DeltaShape {
    tokens: usize,
    key_heads: usize,
    heads: usize,
    depth: usize,
    width: usize,
}

fn delta_rule(list: &mut CaseList, shape: DeltaShape, parameters: GatedDeltaRule, gates: Gates) {
    let DeltaShape { tokens, key_heads, heads, depth, width } = shape;
    // Queries, keys and values of models are views of one projection.
    let packed = list.len().is_multiple_of(3);
    let details = format!(
        "{tokens} tokens, keys [{key_heads}, {depth}], values [{heads}, {width}]{}{}{}{}",
        if parameters.tiled { " tiled" } else { "" },
        if packed { " packed" } else { "" },
        if parameters.delta { "" } else { " without correction" },
        if gates == GATES { String::new() } else { format!(" gates {:?}", gates) }
    );
    list.push("gated_delta_rule", details, Tolerance::DEFAULT, move |s| {
        let [q, k, values] = if packed { packed_inputs(s, shape) } else { separate_inputs(s, shape) };
        // Keys of length 1, so that the state stays bounded.
        let (q, keys) = (q.l2_norm(1e-6), k.l2_norm(1e-6));
        let per_head = |fill| s.shaped_input(DType::F32, Shape::from([tokens, heads]), fill);
        let inputs = DeltaRuleInputs {
            keys,
            values,
            gates: per_head(Fill::Range(gates.0, gates.1)),
            betas: per_head(Fill::Range(0.0, 1.0)),
            state: s.shaped_input(DType::F32, Shape::from([heads, depth, width]), UNIT),
        };
        let (results, state) = q.gated_delta_rule(inputs, parameters);
        s.out(results.cont());
        s.out(state.cont());
    });
}

fn separate_inputs<'g>(s: &CaseBuilder<'g>, shape: DeltaShape) -> [Value<'g>; 3] {
    let DeltaShape { tokens, key_heads, heads, depth, width } = shape;
    let input = |heads, width| s.shaped_input(DType::F32, Shape::from([tokens, heads, width]), UNIT);
    [input(key_heads, depth), input(key_heads, depth), input(heads, width)]
}

fn packed_inputs<'g>(s: &CaseBuilder<'g>, shape: DeltaShape) -> [Value<'g>; 3] {
    let DeltaShape { tokens, key_heads, heads, depth, width } = shape;
    let (keys, values) = (key_heads * depth, heads * width);
    let all = s.shaped_input(DType::F32, Shape::from([tokens, 2 * keys + values]), UNIT);
    let part = |first: usize, heads: usize, width: usize| {
        let row = (2 * keys + values) * 4;
        let offset = if tokens == 0 { 0 } else { first * 4 };
        all.view([tokens, heads, width], [tokens * row, row, width * 4, 4], offset)
    };
    [part(0, key_heads, depth), part(keys, key_heads, depth), part(2 * keys, heads, width)]
}
