//! Each operation of the oracle, compared with results computed by hand.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::unreachable, reason = "tests")]

use quadriga_conformance::{EvalError, Oracle, OracleError, compute_node};
use quadriga_graph::{
    AttentionOptions, Binary, DType, DeltaRuleInputs, ExpertWeights, Gate, GatedDeltaRule, GraphBuilder,
    GroupScore, Interpolation, Op, Order, Pairing, Pooling, Rope, SelectExperts, Unary, Value, Weight,
    Window, blocks,
};

/// The result of an operation on F32 inputs `a`, `b`, … with the given shapes and values.
fn eval(
    inputs: &[(&[usize], &[f32])],
    build: impl for<'g> FnOnce(&'g GraphBuilder, &[Value<'g>]) -> Value<'g>,
) -> Vec<f64> {
    let g = GraphBuilder::new();
    let names: Vec<String> = (0..inputs.len()).map(|i| format!("in{i}")).collect();
    let values: Vec<Value<'_>> = names
        .iter()
        .zip(inputs)
        .map(|(n, (shape, _))| g.input(n, DType::F32, quadriga_graph::Shape::new(shape).unwrap()))
        .collect();
    let y = build(&g, &values);
    g.output("y", y);
    drop(values);
    let graph = g.finish().unwrap();
    let mut oracle = Oracle::new(&graph).unwrap();
    for (name, (_, data)) in names.iter().zip(inputs) {
        oracle.set_f32(name, data).unwrap();
    }
    oracle.run().unwrap();
    oracle.read("y").unwrap()
}

fn ints<'g>(g: &'g GraphBuilder, name: &str, values: &[i32]) -> Value<'g> {
    g.constant(name, DType::I32, [values.len()], values)
}

#[track_caller]
fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (f, e) in found.iter().zip(expected) {
        assert!((f - e).abs() <= 1e-9 * e.abs().max(1.0) || f == e, "{found:?} is not {expected:?}");
    }
}

#[test]
fn binary_functions_repeat_the_second_tensor() {
    let a: (&[usize], &[f32]) = (&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b: (&[usize], &[f32]) = (&[2], &[10.0, 20.0]);
    let apply = |kind| eval(&[a, b], |g, v| g.apply(Op::Binary(kind), v));
    close(&apply(Binary::Add), &[11.0, 22.0, 13.0, 24.0]);
    close(&apply(Binary::Sub), &[-9.0, -18.0, -7.0, -16.0]);
    close(&apply(Binary::Mul), &[10.0, 40.0, 30.0, 80.0]);
    close(&apply(Binary::Div), &[0.1, 0.1, 0.3, 0.2]);
    let one: (&[usize], &[f32]) = (&[1], &[0.5]);
    close(&eval(&[a, one], |_, v| v[0].add1(v[1])), &[1.5, 2.5, 3.5, 4.5]);
    // Repeated as a whole: rows 0, 1, 0, 1.
    let tall: (&[usize], &[f32]) = (&[4, 1], &[0.0, 0.0, 0.0, 0.0]);
    let two: (&[usize], &[f32]) = (&[2, 1], &[1.0, 2.0]);
    close(&eval(&[tall, two], |_, v| v[0].add(v[1])), &[1.0, 2.0, 1.0, 2.0]);
}

#[test]
fn unary_functions() {
    use Unary::*;
    let at = |kind, x: f32| eval(&[(&[1], &[x])], |_, v| v[0].unary(kind))[0];
    let cases: &[(Unary, f32, f64)] = &[
        (Sqr, -3.0, 9.0),
        (Sqrt, 2.25, 1.5),
        (Log, 1.0, 0.0),
        (Exp, 1.0, std::f64::consts::E),
        (Sin, 0.5, 0.479_425_538_604_203),
        (Cos, 0.5, 0.877_582_561_890_372_8),
        (Abs, -2.0, 2.0),
        (Neg, 2.0, -2.0),
        (Sign, -7.0, -1.0),
        (Sign, 0.0, 0.0),
        (Step, 0.0, 0.0),
        (Step, 0.1, 1.0),
        (Relu, -1.0, 0.0),
        (Relu, 1.5, 1.5),
        (Gelu, 1.0, 0.841_191_990_608_302_9),
        (GeluErf, 1.0, 0.841_344_746_068_542_9),
        (GeluErf, -2.0, -0.045_500_263_896_358_42),
        (GeluErf, 20.0, 20.0),
        (GeluQuick, 1.0, 0.845_795_765_932_821_2),
        (Silu, 1.0, 0.731_058_578_630_004_9),
        (Sigmoid, 0.0, 0.5),
        (Tanh, 1.0, 0.761_594_155_955_764_9),
        (Elu, 2.0, 2.0),
        (Elu, -1.0, -0.632_120_558_828_557_7),
        (HardSwish, 1.0, 4.0 / 6.0),
        (HardSwish, -4.0, 0.0),
        (HardSigmoid, 0.0, 0.5),
        (HardSigmoid, 9.0, 1.0),
        (Softplus, 0.0, std::f64::consts::LN_2),
        (Softplus, 100.0, 100.0),
    ];
    for (kind, x, expected) in cases {
        let found = at(*kind, *x);
        assert!((found - expected).abs() < 1e-12, "{kind:?}({x}) = {found}, not {expected}");
    }
    for kind in Unary::ALL {
        assert!(cases.iter().any(|c| c.0 == kind), "{kind:?} has no case");
    }
}

#[test]
fn scale_clamp_and_diagonals() {
    let x: (&[usize], &[f32]) = (&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    close(&eval(&[x], |_, v| v[0].scale_bias(2.0, 1.0)), &[3.0, 5.0, 7.0, 9.0, 11.0, 13.0]);
    close(&eval(&[x], |_, v| v[0].clamp(2.0, 5.0)), &[2.0, 2.0, 3.0, 4.0, 5.0, 5.0]);
    close(&eval(&[x], |_, v| v[0].diag_mask_zero(0)), &[1.0, 0.0, 0.0, 4.0, 5.0, 0.0]);
    let inf = f64::NEG_INFINITY;
    close(&eval(&[x], |_, v| v[0].diag_mask_inf(1)), &[1.0, 2.0, inf, 4.0, 5.0, 6.0]);
}

#[test]
fn gated_units_of_two_tensors_or_two_halves() {
    let gate: (&[usize], &[f32]) = (&[2], &[1.0, -1.0]);
    let up: (&[usize], &[f32]) = (&[2], &[2.0, 3.0]);
    close(&eval(&[gate, up], |_, v| v[0].gated(Gate::Reglu, v[1])), &[2.0, 0.0]);
    let silu = [0.731_058_578_630_004_9, -0.268_941_421_369_995_1];
    close(&eval(&[gate, up], |_, v| v[0].swiglu(v[1])), &[2.0 * silu[0], 3.0 * silu[1]]);
    let swapped = Op::Gated { gate: Gate::Reglu, swapped: true };
    close(&eval(&[gate, up], |g, v| g.apply(swapped, v)), &[2.0, -3.0]);
    let both: (&[usize], &[f32]) = (&[1, 4], &[1.0, -1.0, 2.0, 3.0]);
    close(&eval(&[both], |_, v| v[0].gated_halves(Gate::Reglu, false)), &[2.0, 0.0]);
    close(&eval(&[both], |_, v| v[0].gated_halves(Gate::Reglu, true)), &[2.0, -3.0]);
    close(&eval(&[both], |_, v| v[0].gated_halves(Gate::Geglu, false))[..1], &[1.682_383_981_216_605_8]);
}

#[test]
fn norms() {
    let x: (&[usize], &[f32]) = (&[1, 2], &[3.0, 5.0]);
    close(&eval(&[x], |_, v| v[0].norm(0.0)), &[-1.0, 1.0]);
    close(&eval(&[x], |_, v| v[0].norm(3.0)), &[-0.5, 0.5]);
    let y: (&[usize], &[f32]) = (&[1, 2], &[1.0, 7.0]);
    close(&eval(&[y], |_, v| v[0].rms_norm(0.0)), &[0.2, 1.4]);
    let z: (&[usize], &[f32]) = (&[1, 2], &[3.0, -4.0]);
    close(&eval(&[z], |_, v| v[0].l2_norm(0.0)), &[0.6, -0.8]);
    close(&eval(&[z], |_, v| v[0].l2_norm(10.0)), &[0.3, -0.4]);
    // Two groups of one channel of 1 × 2, each normalized to mean 0 and variance 1.
    let image: (&[usize], &[f32]) = (&[1, 2, 1, 2], &[3.0, 5.0, 10.0, 30.0]);
    close(&eval(&[image], |_, v| v[0].group_norm(2, 0.0)), &[-1.0, 1.0, -1.0, 1.0]);
}

#[test]
fn soft_max_with_mask_and_sinks() {
    let third: (&[usize], &[f32]) = (&[1, 3], &[7.0, 7.0, 7.0]);
    close(&eval(&[third], |_, v| v[0].soft_max(1.0, None, None)), &[1.0 / 3.0; 3]);
    let mask: (&[usize], &[f32]) = (&[1, 3], &[0.0, f32::NEG_INFINITY, 0.0]);
    close(&eval(&[third, mask], |_, v| v[0].soft_max(1.0, Some(v[1]), None)), &[0.5, 0.0, 0.5]);
    let sinks: (&[usize], &[f32]) = (&[1], &[7.0]);
    close(&eval(&[third, sinks], |_, v| v[0].soft_max(1.0, None, Some(v[1]))), &[0.25; 3]);
    let nothing: (&[usize], &[f32]) = (&[1, 3], &[f32::NEG_INFINITY; 3]);
    close(&eval(&[third, nothing], |_, v| v[0].soft_max(1.0, Some(v[1]), None)), &[0.0; 3]);
    let scaled: (&[usize], &[f32]) = (&[1, 2], &[0.0, 2.0]);
    let e = std::f64::consts::E;
    let expected = [1.0 / (1.0 + e), e / (1.0 + e)];
    close(&eval(&[scaled], |_, v| v[0].soft_max(0.5, None, None)), &expected);
}

#[test]
fn rope_rotates_pairs() {
    let x: (&[usize], &[f32]) = (&[2, 1, 6], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let rotate = |pairing| {
        eval(&[x], |g, v| v[0].rope(Rope::new(4, pairing, 100.0), ints(g, "positions", &[0, 1]), None))
    };
    let (s, c) = (1f64.sin(), 1f64.cos());
    let (s1, c1) = (0.1f64.sin(), 0.1f64.cos());
    let still = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let adjacent = [c - 2.0 * s, s + 2.0 * c, 3.0 * c1 - 4.0 * s1, 3.0 * s1 + 4.0 * c1, 5.0, 6.0];
    close(&rotate(Pairing::Adjacent), &[still, adjacent].concat());
    let half = [c - 3.0 * s, 2.0 * c1 - 4.0 * s1, s + 3.0 * c, 2.0 * s1 + 4.0 * c1, 5.0, 6.0];
    close(&rotate(Pairing::Half), &[still, half].concat());
    // A factor of 2 halves the angle of its pair.
    let factors: (&[usize], &[f32]) = (&[2], &[2.0, 1.0]);
    let rotated = eval(&[x, factors], |g, v| {
        v[0].rope(Rope::new(4, Pairing::Adjacent, 100.0), ints(g, "positions", &[0, 1]), Some(v[1]))
    });
    let (s, c) = (0.5f64.sin(), 0.5f64.cos());
    close(&rotated[6..8], &[c - 2.0 * s, s + 2.0 * c]);
}

#[test]
fn matrix_multiplications() {
    let w: (&[usize], &[f32]) = (&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let x: (&[usize], &[f32]) = (&[1, 3], &[1.0, 0.0, -1.0]);
    close(&eval(&[w, x], |_, v| v[0].mul_mat(v[1])), &[-2.0, -2.0]);
    // Four heads of x, two of w: heads 0 and 1 use the first, 2 and 3 the second.
    let w: (&[usize], &[f32]) = (&[2, 1, 1], &[10.0, 100.0]);
    let x: (&[usize], &[f32]) = (&[4, 1, 1], &[1.0, 2.0, 3.0, 4.0]);
    close(&eval(&[w, x], |_, v| v[0].mul_mat(v[1])), &[10.0, 20.0, 300.0, 400.0]);
    let experts: (&[usize], &[f32]) = (&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    let rows: (&[usize], &[f32]) = (&[1, 1, 2], &[1.0, 10.0]);
    let chosen = eval(&[experts, rows], |g, v| {
        v[0].mul_mat_id(v[1], g.constant("ids", DType::I32, [1, 2], &[1, 0][..]))
    });
    close(&chosen, &[43.0, 21.0]);
    let a: (&[usize], &[f32]) = (&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b: (&[usize], &[f32]) = (&[2, 1], &[10.0, 1.0]);
    close(&eval(&[a, b], |_, v| v[0].out_prod(v[1])), &[13.0, 24.0]);
}

#[test]
fn rows_by_index() {
    let x: (&[usize], &[f32]) = (&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    close(&eval(&[x], |g, v| v[0].get_rows(ints(g, "ids", &[2, 0]))), &[5.0, 6.0, 1.0, 2.0]);
    let rows: (&[usize], &[f32]) = (&[1, 2], &[8.0, 9.0]);
    let set = eval(&[x, rows], |g, v| v[0].cont().set_rows(v[1], ints(g, "ids", &[1])));
    close(&set, &[1.0, 2.0, 8.0, 9.0, 5.0, 6.0]);
}

#[test]
fn moving_elements() {
    let x: (&[usize], &[f32]) = (&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    close(&eval(&[x], |_, v| v[0].transpose().cont()), &[1.0, 3.0, 2.0, 4.0]);
    close(&eval(&[x], |_, v| v[0].slice(1, 1, 1).cont()), &[2.0, 4.0]);
    let y: (&[usize], &[f32]) = (&[1, 2], &[5.0, 6.0]);
    close(&eval(&[x, y], |_, v| v[0].concat(0, &[v[1]])), &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let z: (&[usize], &[f32]) = (&[2, 1], &[5.0, 6.0]);
    close(&eval(&[x, z], |_, v| v[0].concat(1, &[v[1]])), &[1.0, 2.0, 5.0, 3.0, 4.0, 6.0]);
    close(&eval(&[y], |_, v| v[0].repeat([2, 4])), &[5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0, 6.0]);
    close(&eval(&[y], |_, v| v[0].pad([1, 1])), &[5.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
    let around = Op::Pad { before: [0, 0, 1, 1], after: [0; 4] };
    close(&eval(&[y], |g, v| g.apply(around, v)), &[0.0, 0.0, 0.0, 0.0, 5.0, 6.0]);
    let copied = eval(&[x, y], |_, v| {
        let target = v[0].cont();
        v[1].copy_into(target.slice(0, 1, 1)).cont()
    });
    close(&copied, &[5.0, 6.0]);
}

#[test]
fn reductions() {
    let x: (&[usize], &[f32]) = (&[2, 3], &[1.0, 3.0, 2.0, 6.0, 4.0, 6.0]);
    close(&eval(&[x], |_, v| v[0].sum()), &[22.0]);
    close(&eval(&[x], |_, v| v[0].sum_rows()), &[6.0, 16.0]);
    close(&eval(&[x], |_, v| v[0].mean()), &[2.0, 16.0 / 3.0]);
    close(&eval(&[x], |_, v| v[0].argmax()), &[1.0, 0.0]);
    close(&eval(&[x], |_, v| v[0].argsort(Order::Ascending)), &[0.0, 2.0, 1.0, 1.0, 0.0, 2.0]);
    close(&eval(&[x], |_, v| v[0].argsort(Order::Descending)), &[1.0, 2.0, 0.0, 0.0, 2.0, 1.0]);
    close(&eval(&[x], |_, v| v[0].top_k(2)), &[1.0, 2.0, 0.0, 2.0]);
}

#[test]
fn convolutions_and_pooling() {
    let x: (&[usize], &[f32]) = (&[1, 1, 3, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    let k: (&[usize], &[f32]) = (&[1, 1, 2, 2], &[1.0, 10.0, 100.0, 1000.0]);
    let two = Window::new([2, 2]);
    // As in PyTorch, a convolution is a correlation: the kernel is not flipped.
    close(&eval(&[x, k], |_, v| v[0].conv_2d(v[1], two)), &[5421.0, 6532.0, 8754.0, 9865.0]);
    close(&eval(&[x, k], |_, v| v[0].conv_2d_depthwise(v[1], two)), &[5421.0, 6532.0, 8754.0, 9865.0]);
    let padded = two.padding([1, 0]).stride([3, 1]);
    close(&eval(&[x, k], |_, v| v[0].conv_2d(v[1], padded)), &[2100.0, 3200.0, 87.0, 98.0]);
    let dilated = two.dilation([2, 2]);
    close(&eval(&[x, k], |_, v| v[0].conv_2d(v[1], dilated)), &[9731.0]);
    let patches = eval(&[x], |_, v| v[0].im2col(two.stride([1, 1]), DType::F32));
    close(&patches[..8], &[1.0, 2.0, 4.0, 5.0, 2.0, 3.0, 5.0, 6.0]);
    let row: (&[usize], &[f32]) = (&[1, 2, 3], &[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]);
    let three = Window::one_dimensional(2).padding([0, 1]).stride([1, 2]);
    close(
        &eval(&[row], |_, v| v[0].im2col_1d(three, DType::F32)),
        &[0.0, 1.0, 0.0, 10.0, 2.0, 3.0, 20.0, 30.0],
    );
    let kernel: (&[usize], &[f32]) = (&[1, 2, 2], &[1.0, 1.0, 1.0, 2.0]);
    close(&eval(&[row, kernel], |_, v| v[0].conv_1d(v[1], Window::one_dimensional(2))), &[53.0, 85.0]);
    // Each input adds a scaled kernel: [1, 2, 3] with kernel [1, 10] and stride 2.
    let line: (&[usize], &[f32]) = (&[1, 1, 3], &[1.0, 2.0, 3.0]);
    let ten: (&[usize], &[f32]) = (&[1, 1, 2], &[1.0, 10.0]);
    close(&eval(&[line, ten], |_, v| v[0].conv_transpose_1d(v[1], 2)), &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0]);
    close(&eval(&[line, ten], |_, v| v[0].conv_transpose_1d(v[1], 1)), &[1.0, 12.0, 23.0, 30.0]);
    close(&eval(&[x], |_, v| v[0].pool_2d(Pooling::Max, two)), &[5.0, 6.0, 8.0, 9.0]);
    let corner = two.stride([2, 2]).padding([1, 1]);
    // Padding counts in two dimensions by default, as in ggml; PyTorch's count_include_pad=True.
    close(&eval(&[x], |_, v| v[0].pool_2d(Pooling::Average, corner)), &[0.25, 1.25, 2.75, 7.0]);
    close(&eval(&[x], |_, v| v[0].pool_2d(Pooling::AverageInside, corner)), &[1.0, 2.5, 5.5, 7.0]);
    let pairs = Window::one_dimensional(2).stride([1, 2]).padding([0, 1]);
    close(&eval(&[line], |_, v| v[0].pool_1d(Pooling::AverageInside, pairs)), &[1.0, 2.5]);
}

#[test]
fn upscaling_ranges_and_losses() {
    let x: (&[usize], &[f32]) = (&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let nearest = eval(&[x], |_, v| v[0].upscale([3, 4], Interpolation::Nearest));
    close(&nearest, &[1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]);
    // PyTorch's align_corners=False.
    let linear = eval(&[x], |_, v| v[0].upscale([2, 4], Interpolation::Bilinear));
    close(&linear, &[1.0, 1.25, 1.75, 2.0, 3.0, 3.25, 3.75, 4.0]);
    close(&eval(&[], |g, _| g.arange(1.0, 3.0, 0.75)), &[1.0, 1.75, 2.5]);
    close(&eval(&[], |g, _| g.arange(3.0, 0.0, -1.0)), &[3.0, 2.0, 1.0]);
    let logits: (&[usize], &[f32]) = (&[2, 2], &[0.0, 0.0, 0.0, 2.0]);
    let labels: (&[usize], &[f32]) = (&[2, 2], &[0.5, 0.5, 0.0, 1.0]);
    let expected = (2f64.ln() + (1.0 + (-2f64).exp()).ln()) / 2.0;
    close(&eval(&[logits, labels], |_, v| v[0].cross_entropy_loss(v[1])), &[expected]);
}

#[test]
fn attention_over_spans_masks_and_groups() {
    // Two heads share one key head; both keys have the same score, so the result is the mean of the visible values.
    let q: (&[usize], &[f32]) = (&[1, 2, 2, 1], &[0.0, 0.0, 0.0, 0.0]);
    let k: (&[usize], &[f32]) = (&[1, 1, 2, 1], &[1.0, 2.0]);
    let v: (&[usize], &[f32]) = (&[1, 1, 2, 1], &[10.0, 20.0]);
    let all = eval(&[q, k, v], |_, t| t[0].attention(t[1], t[2], AttentionOptions::new().scale(1.0)));
    close(&all, &[15.0; 4]);
    let causal = eval(&[q, k, v], |g, t| {
        let spans = g.constant("spans", DType::I32, [2, 2], &[0, 1, 2, 2][..]);
        t[0].attention(t[1], t[2], AttentionOptions::new().spans(spans).scale(1.0))
    });
    close(&causal, &[10.0, 10.0, 0.0, 0.0]);
    let mask: (&[usize], &[f32]) =
        (&[1, 2, 2, 2], &[0.0, 0.0, f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0]);
    let masked = eval(&[q, k, v, mask], |_, t| {
        t[0].attention(t[1], t[2], AttentionOptions::new().mask(t[3]).scale(1.0))
    });
    close(&masked, &[15.0, 20.0, 20.0, 15.0]);
    // Position 64 of table row 1 is the first row of page 0; the other entries of the table are not read.
    let q: (&[usize], &[f32]) = (&[1, 1, 3, 1], &[0.0; 3]);
    let pool: Vec<f32> = (0..128).map(|row| row as f32).collect();
    let pool: (&[usize], &[f32]) = (&[1, 1, 128, 1], &pool);
    let paged = eval(&[q, pool, pool], |g, t| {
        let spans = g.constant("spans", DType::I32, [3, 3], &[62, 66, 1, 0, 2, 0, 5, 5, 0][..]);
        let pages = g.constant("pages", DType::I32, [2, 3], &[1, -1, 7, 1, 0, -1][..]);
        t[0].attention(t[1], t[2], AttentionOptions::new().spans(spans).pages(pages))
    });
    close(&paged, &[(126.0 + 127.0 + 0.0 + 1.0) / 4.0, 64.5, 0.0]);
    // Scores 2 and 4, scaled to 1 and 2, capped at tanh(1) and tanh(2).
    let q: (&[usize], &[f32]) = (&[1, 1, 1, 1], &[2.0]);
    let capped =
        eval(&[q, k, v], |_, t| t[0].attention(t[1], t[2], AttentionOptions::new().scale(0.5).soft_cap(1.0)));
    let (a, b) = (1f64.tanh().exp(), 2f64.tanh().exp());
    close(&capped, &[(10.0 * a + 20.0 * b) / (a + b)]);
}

#[test]
fn states_persist_and_round_to_their_type() {
    let g = GraphBuilder::new();
    let cache = g.state("cache", DType::F16, [2, 1]);
    let rows = g.input("rows", DType::F32, [1, 1]);
    let ids = g.input("ids", DType::I32, [1]);
    g.output("cache", cache.set_rows(rows, ids));
    let graph = g.finish().unwrap();
    let mut oracle = Oracle::new(&graph).unwrap();
    for (id, value) in [(1, 0.1f32), (0, 2.0)] {
        oracle.set_f32("rows", &[value]).unwrap();
        oracle.set_i32("ids", &[id]).unwrap();
        oracle.run().unwrap();
    }
    assert_eq!(oracle.read("cache").unwrap(), [2.0, 0.099_975_585_937_5]);
    assert_eq!(oracle.bytes(graph.output("cache").unwrap()).unwrap(), [0, 0x40, 0x66, 0x2e]);
}

#[test]
fn quantized_rows_agree_with_the_block_formats() {
    let row: Vec<f32> = (0..32).map(|i| i as f32 - 7.5).collect();
    let mut stored = vec![0; 34];
    blocks::quantize(DType::Q8_0, &row, &mut stored).unwrap();
    let mut expected = vec![0.0; 32];
    blocks::dequantize(DType::Q8_0, &stored, &mut expected).unwrap();
    let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();

    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 32]);
    let w = g.weight("w", Weight::with_data(DType::Q8_0, [1, 32], stored.clone()));
    g.output("cast", x.cast(DType::Q8_0));
    g.output("rows", w.get_rows(ints(&g, "ids", &[0])));
    g.output("dot", w.mul_mat(x));
    let graph = g.finish().unwrap();
    let mut oracle = Oracle::new(&graph).unwrap();
    oracle.set_f32("x", &row).unwrap();
    oracle.run().unwrap();
    assert_eq!(oracle.bytes(graph.output("cast").unwrap()).unwrap(), stored);
    assert_eq!(oracle.read("rows").unwrap(), expected);
    let dot: f64 = expected.iter().zip(&row).map(|(w, x)| w * f64::from(*x)).sum();
    close(&oracle.read("dot").unwrap(), &[dot]);
}

#[test]
fn ids_out_of_range_are_errors_that_name_node_and_index() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [3, 2]);
    let ids = g.input("ids", DType::I32, [2]);
    g.output("y", x.get_rows(ids).named("lookup"));
    let graph = g.finish().unwrap();
    let mut oracle = Oracle::new(&graph).unwrap();
    assert_eq!(oracle.run().unwrap_err(), OracleError::Unset("x".into()));
    oracle.set_f32("x", &[0.0; 6]).unwrap();
    for bad in [3, -1] {
        oracle.set_i32("ids", &[0, bad]).unwrap();
        let error = EvalError::Id { id: bad.into(), at: [0, 0, 0, 1], count: 3 };
        assert_eq!(oracle.run().unwrap_err(), OracleError::Node { node: "lookup".into(), error });
    }
    assert!(matches!(oracle.set_f32("x", &[0.0]), Err(OracleError::Length { expected: 24, found: 4, .. })));
    assert_eq!(oracle.read("nothing"), Err(OracleError::NoSuchName("nothing".into())));
    oracle.set_i32("ids", &[0, 2]).unwrap();
    oracle.run().unwrap();
}

#[test]
fn tensors_without_elements_are_evaluated() {
    let empty: (&[usize], &[f32]) = (&[0, 4], &[]);
    let w: (&[usize], &[f32]) = (&[2, 4], &[0.0; 8]);
    assert!(eval(&[w, empty], |_, v| v[0].mul_mat(v[1])).is_empty());
    assert!(eval(&[empty], |_, v| v[0].rms_norm(1e-5).silu()).is_empty());
    close(&eval(&[empty], |_, v| v[0].sum()), &[0.0]);
    let no_depth: (&[usize], &[f32]) = (&[2, 0], &[]);
    close(&eval(&[no_depth, no_depth], |_, v| v[0].mul_mat(v[1])), &[0.0; 4]);
    close(&eval(&[no_depth], |_, v| v[0].sum_rows()), &[0.0; 2]);
}

#[test]
fn one_node_is_computed_in_memory_of_the_caller() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 2]);
    let scaled = x.transpose().scale(3.0);
    let ids = g.input("ids", DType::I32, [1]);
    let written = scaled.set_rows(x.slice(0, 1, 1), ids);
    g.output("y", written);
    let graph = g.finish().unwrap();
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let nodes: Vec<_> = graph.node_ids().filter(|n| !graph[*n].op().is_view()).collect();

    let input = floats(&[1.0, 2.0, 3.0, 4.0]);
    let mut y = vec![0; 16];
    compute_node(&graph, nodes[0], &[&input], &mut y).unwrap();
    assert_eq!(y, floats(&[3.0, 9.0, 6.0, 12.0]));
    compute_node(&graph, nodes[1], &[&[], &input[8..], &1i32.to_le_bytes()], &mut y).unwrap();
    assert_eq!(y, floats(&[3.0, 9.0, 3.0, 4.0]));

    // Missing or short memory is an error.
    let error = |result: Result<(), OracleError>| match result {
        Err(OracleError::Node { error, .. }) => error,
        other => unreachable!("{other:?}"),
    };
    assert_eq!(error(compute_node(&graph, nodes[0], &[], &mut y)), EvalError::Arity(0));
    assert_eq!(error(compute_node(&graph, nodes[0], &[&input[1..]], &mut y)), EvalError::Memory);
    assert_eq!(error(compute_node(&graph, nodes[0], &[&input], &mut y[1..])), EvalError::Memory);
    let far = compute_node(&graph, nodes[1], &[&[], &input[8..], &2i32.to_le_bytes()], &mut y);
    assert_eq!(error(far), EvalError::Id { id: 2, at: [0; 4], count: 2 });
}

#[test]
fn a_view_with_too_many_elements_is_an_error() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1]);
    g.output("y", x.view([1 << 40, 1], [0, 0, 0, 4], 0).sum());
    let graph = g.finish().unwrap();
    let mut oracle = Oracle::new(&graph).unwrap();
    oracle.set_f32("x", &[1.0]).unwrap();
    assert!(oracle.run().unwrap_err().to_string().contains("too many"));
}

#[test]
fn an_attention_sink_takes_its_share_of_the_softmax() {
    let q: (&[usize], &[f32]) = (&[2, 1, 1], &[1.0, 1.0]);
    let k: (&[usize], &[f32]) = (&[1, 2, 1], &[0.0, 2.0]);
    let v: (&[usize], &[f32]) = (&[1, 2, 1], &[10.0, 20.0]);
    let sinks: (&[usize], &[f32]) = (&[2], &[1.0, f32::NEG_INFINITY]);
    // The sink is not scaled, and has no value.
    let found = eval(&[q, k, v, sinks], |_, t| {
        t[0].attention(t[1], t[2], AttentionOptions::new().scale(0.5).sinks(t[3]))
    });
    let e = 1f64.exp();
    close(&found, &[(10.0 + 20.0 * e) / (1.0 + e + e), (10.0 + 20.0 * e) / (1.0 + e)]);
}

#[test]
fn the_clamped_swiglu_of_gpt_oss() {
    let gate: (&[usize], &[f32]) = (&[4], &[1.0, 9.0, -2.0, 0.0]);
    let up: (&[usize], &[f32]) = (&[4], &[2.0, 8.0, -9.0, 3.0]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-f64::from(1.702f32) * x).exp());
    let expected = [3.0 * sigmoid(1.0), 8.0 * 7.0 * sigmoid(7.0), 12.0 * sigmoid(-2.0), 0.0];
    close(&eval(&[gate, up], |_, v| v[0].gated(Gate::SwigluOai, v[1])), &expected);
}

#[test]
fn experts_are_selected_by_score_and_by_group() {
    let scores: (&[usize], &[f32]) = (&[2, 6], &[1.0, 5.0, 5.0, 0.0, 2.0, 3.0, 9.0, 0.0, 4.0, 4.0, 3.0, 5.5]);
    let select_by = |group_score, used, groups, groups_used| {
        let parameters = SelectExperts { used, groups, groups_used, group_score };
        eval(&[scores], |_, v| v[0].select_experts(parameters))
    };
    let select = |used, groups, groups_used| select_by(GroupScore::TopTwo, used, groups, groups_used);
    // Of equal scores the first.
    close(&select(3, 1, 1), &[1.0, 2.0, 5.0, 0.0, 5.0, 2.0]);
    // Groups of two: sums 6, 5, 5 and 9, 8, 8.5.
    close(&select(2, 3, 1), &[1.0, 0.0, 0.0, 1.0]);
    close(&select(2, 3, 2), &[1.0, 2.0, 0.0, 5.0]);
    // Groups of three: the two best sum to 10, 5 and 13, 9.5.
    close(&select(2, 2, 1), &[1.0, 2.0, 0.0, 2.0]);
    // Largest scores of groups of two: 5, 5, 3 and 9, 4, 5.5.
    close(&select_by(GroupScore::Max, 2, 3, 1), &[1.0, 0.0, 0.0, 1.0]);
    close(&select_by(GroupScore::Max, 2, 3, 2), &[1.0, 2.0, 0.0, 5.0]);
    // Sums 8, 7 and 3; largest scores 4, 7 and 3.
    let scores: (&[usize], &[f32]) = (&[1, 6], &[4.0, 4.0, 0.0, 7.0, 0.0, 3.0]);
    for (group_score, expected) in [(GroupScore::TopTwo, [0.0, 1.0]), (GroupScore::Max, [3.0, 2.0])] {
        let parameters = SelectExperts { used: 2, groups: 3, groups_used: 1, group_score };
        close(&eval(&[scores], |_, v| v[0].select_experts(parameters)), &expected);
    }
}

#[test]
fn weights_of_experts() {
    let p: (&[usize], &[f32]) = (&[1, 4], &[0.1, 0.2, 0.3, 0.5]);
    let weigh = |softmax, normalize, scale| {
        eval(&[p], |g, v| {
            let ids = g.constant("ids", DType::I32, [1, 2], &[3, 1][..]);
            v[0].expert_weights(ids, ExpertWeights { softmax, normalize, scale })
        })
    };
    let (a, b) = (0.5, f64::from(0.2f32));
    close(&weigh(false, false, 2.0), &[2.0 * a, 2.0 * b]);
    close(&weigh(false, true, 1.0), &[a / (a + b), b / (a + b)]);
    let e = (b - a).exp();
    close(&weigh(true, false, 1.0), &[1.0 / (1.0 + e), e / (1.0 + e)]);
    // A sum that is too small is not divided by.
    let tiny: (&[usize], &[f32]) = (&[1, 1], &[1e-6]);
    let found = eval(&[tiny], |g, v| {
        let ids = g.constant("ids", DType::I32, [1, 1], &[0][..]);
        v[0].expert_weights(ids, ExpertWeights { softmax: false, normalize: true, scale: 1.0 })
    });
    close(&found, &[f64::from(1e-6f32) / 6.103_515_625e-5]);
}

#[test]
fn biases_and_sums_of_experts() {
    let x: (&[usize], &[f32]) = (&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let biases: (&[usize], &[f32]) = (&[3, 2], &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    let added =
        eval(&[x, biases], |g, v| v[0].add_id(v[1], g.constant("ids", DType::I32, [1, 2], &[2, 0][..])));
    close(&added, &[51.0, 62.0, 13.0, 24.0]);
    let weights: (&[usize], &[f32]) = (&[1, 2], &[0.5, 2.0]);
    close(&eval(&[x, weights], |_, v| v[0].sum_experts(v[1])), &[6.5, 9.0]);
}

#[test]
fn causal_convolution_with_the_rows_before() {
    let x: (&[usize], &[f32]) = (&[4, 2], &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0]);
    let kernel: (&[usize], &[f32]) = (&[2, 3], &[1.0, 2.0, 3.0, 0.0, 0.0, 1.0]);
    close(&eval(&[x, kernel], |_, v| v[0].ssm_conv(v[1])), &[14.0, 30.0, 20.0, 40.0]);
}

#[test]
fn the_gated_delta_rule_by_hand() {
    // One head of depth 2 and width 1: S = (4, 6), decay 1/2, key (1, 0), value 5, beta 1/2.
    let q: (&[usize], &[f32]) = (&[1, 1, 2], &[1.0, 1.0]);
    let k: (&[usize], &[f32]) = (&[1, 1, 2], &[1.0, 0.0]);
    let v: (&[usize], &[f32]) = (&[1, 1, 1], &[5.0]);
    let gate: (&[usize], &[f32]) = (&[1, 1], &[0.5f32.ln()]);
    let beta: (&[usize], &[f32]) = (&[1, 1], &[0.5]);
    let state: (&[usize], &[f32]) = (&[1, 2, 1], &[4.0, 6.0]);
    let run = |which: usize, delta: bool| {
        let rule = GatedDeltaRule { scale: 2.0, tiled: false, delta };
        eval(&[q, k, v, gate, beta, state], |_, t| {
            let inputs = DeltaRuleInputs { keys: t[1], values: t[2], gates: t[3], betas: t[4], state: t[5] };
            let (result, state) = t[0].gated_delta_rule(inputs, rule);
            if which == 0 { result } else { state }
        })
    };
    // The decayed state is (2, 3); it predicts 2, so that half of the difference 3 is added for the key.
    let decayed = f64::from(0.5f32.ln()).exp();
    let first = 4.0 * decayed + 0.5 * (5.0 - 4.0 * decayed);
    close(&run(1, true), &[first, 6.0 * decayed]);
    close(&run(0, true), &[2.0 * (first + 6.0 * decayed)]);
    // Without the delta rule, half of the value is added for the key, whatever the state predicts.
    let first = 4.0 * decayed + 0.5 * 5.0;
    close(&run(1, false), &[first, 6.0 * decayed]);
    close(&run(0, false), &[2.0 * (first + 6.0 * decayed)]);
}

#[test]
fn key_heads_of_the_delta_rule_are_grouped_or_tiled() {
    // Two key heads, four value heads, no decay, beta 1, an empty state: the result is value times q · k of the key head.
    let q: (&[usize], &[f32]) = (&[1, 2, 1], &[1.0, 1.0]);
    let k: (&[usize], &[f32]) = (&[1, 2, 1], &[2.0, 3.0]);
    let v: (&[usize], &[f32]) = (&[1, 4, 1], &[1.0, 10.0, 100.0, 1000.0]);
    let zeros: (&[usize], &[f32]) = (&[1, 4], &[0.0; 4]);
    let ones: (&[usize], &[f32]) = (&[1, 4], &[1.0; 4]);
    let state: (&[usize], &[f32]) = (&[4, 1, 1], &[0.0; 4]);
    let run = |tiled| {
        eval(&[q, k, v, zeros, ones, state], |_, t| {
            let inputs = DeltaRuleInputs { keys: t[1], values: t[2], gates: t[3], betas: t[4], state: t[5] };
            t[0].gated_delta_rule(inputs, GatedDeltaRule { scale: 1.0, tiled, delta: true }).0
        })
    };
    close(&run(false), &[2.0, 20.0, 300.0, 3000.0]);
    close(&run(true), &[2.0, 30.0, 200.0, 3000.0]);
}
