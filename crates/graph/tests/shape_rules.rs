//! The shape rules of the operations: for each a call that is accepted with its result, and calls that differ from it in
//! one place and are refused.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{
    Attention, DType, GraphBuilder, GraphErrorKind, Interpolation, Op, Pairing, Pooling, Rope, Shape, Window,
};

use DType::{F16, F32, I32, Q8_0};

/// The largest extent that kernels compute positions in.
const LARGEST: usize = i32::MAX as usize;

/// Type and extents of an input.
type Input = (DType, &'static [usize]);

/// The type and extents of an operation's result, or the rule that the inputs break.
fn infer(op: Op, inputs: &[Input]) -> Result<(DType, Vec<usize>), GraphErrorKind> {
    let g = GraphBuilder::new();
    let name = |index: usize| format!("input {index}");
    // States, because some operations write their first input.
    let leaf =
        |(index, (dtype, dims)): (usize, &Input)| g.state(&name(index), *dtype, Shape::new(dims).unwrap());
    let values: Vec<_> = inputs.iter().enumerate().map(leaf).collect();
    let result = g.apply(op, &values);
    g.output("result", result);
    let id = result.id();
    let graph = g.finish().map_err(|error| error.kind)?;
    Ok((graph[id].dtype(), graph[id].shape().dims().to_vec()))
}

/// Checks an accepted call, and that it is refused for its shapes once any of the `refused` inputs replaces its own.
fn check(op: Op, inputs: &[Input], result: Input, refused: &[(usize, &'static [usize])]) {
    assert_eq!(infer(op.clone(), inputs), Ok((result.0, result.1.to_vec())), "{op:?} of {inputs:?}");
    for (place, dims) in refused {
        let mut changed = inputs.to_vec();
        changed[*place].1 = dims;
        let found = infer(op.clone(), &changed);
        assert!(matches!(found, Err(GraphErrorKind::Shape(_))), "{op:?} of {changed:?}: {found:?}");
    }
}

/// Checks that the parameters of an operation are accepted, or refused as such.
fn check_parameters(inputs: &[Input], accepted: &[Op], refused: &[Op]) {
    for op in accepted {
        assert!(infer(op.clone(), inputs).is_ok(), "{op:?} of {inputs:?}");
    }
    for op in refused {
        let found = infer(op.clone(), inputs);
        assert!(matches!(found, Err(GraphErrorKind::Parameter(_))), "{op:?} of {inputs:?}: {found:?}");
    }
}

#[test]
fn sparse_matrix_multiplications() {
    let refused: &[(usize, &[usize])] =
        &[(0, &[9, 32]), (0, &[8, 64]), (1, &[3, 64]), (2, &[2, 8]), (0, &[2, 9, 64])];
    let inputs: [Input; 3] = [(Q8_0, &[9, 64]), (F32, &[2, 64]), (F32, &[2, 9])];
    check(Op::MulMatSparse { ids: false }, &inputs, (F32, &[2, 9]), refused);
    let inputs: [Input; 4] = [(F16, &[5, 64]), (F32, &[2, 64]), (F32, &[2, 9]), (I32, &[5])];
    let refused: &[(usize, &[usize])] = &[(0, &[9, 64]), (3, &[4]), (3, &[5, 5]), (2, &[1, 9])];
    check(Op::MulMatSparse { ids: true }, &inputs, (F32, &[2, 5]), refused);
    let refused: &[(usize, &[usize])] = &[(0, &[8, 64]), (1, &[2, 8]), (1, &[3, 2, 9])];
    check(Op::AxpySparse, &[(Q8_0, &[9, 64]), (F32, &[2, 9])], (F32, &[2, 64]), refused);
    for (op, inputs) in [
        (Op::MulMatSparse { ids: false }, vec![(F16, &[9, 64][..]), (F16, &[2, 64]), (F32, &[2, 9])]),
        (Op::MulMatSparse { ids: false }, vec![(F16, &[9, 64]), (F32, &[2, 64]), (I32, &[2, 9])]),
        (Op::AxpySparse, vec![(I32, &[9, 64]), (F32, &[2, 9])]),
    ] {
        assert!(matches!(infer(op, &inputs), Err(GraphErrorKind::Type { .. })));
    }
    assert!(matches!(infer(Op::MulMatSparse { ids: true }, &[]), Err(GraphErrorKind::Arity { .. })));
}

#[test]
fn matrix_multiplications() {
    let x: Input = (F32, &[2, 4, 5, 64]);
    let refused: &[(usize, &[usize])] = &[(0, &[1, 2, 3, 32]), (0, &[3, 2, 3, 64]), (0, &[1, 3, 3, 64])];
    check(Op::MulMat, &[(Q8_0, &[1, 2, 3, 64]), x], (F32, &[2, 4, 5, 3]), refused);
    check(Op::MulMat, &[(F16, &[3, 64]), (F32, &[64])], (F32, &[1, 3]), &[]);
    // No weights fit no batches only.
    check(
        Op::MulMat,
        &[(F32, &[0, 1, 3, 8]), (F32, &[0, 1, 2, 8])],
        (F32, &[0, 1, 2, 3]),
        &[(1, &[2, 1, 2, 8])],
    );

    let experts: [Input; 3] = [(Q8_0, &[1, 6, 3, 64]), (F32, &[1, 5, 2, 64]), (I32, &[1, 1, 5, 2])];
    check(
        Op::MulMatId,
        &experts,
        (F32, &[5, 2, 3]),
        &[
            (0, &[2, 6, 3, 64]),
            (0, &[1, 6, 3, 32]),
            (1, &[2, 5, 2, 64]),
            (1, &[1, 5, 3, 64]),
            (2, &[2, 1, 5, 2]),
            (2, &[1, 2, 5, 2]),
            (2, &[1, 1, 4, 2]),
            (2, &[1, 1, 5, 3]),
        ],
    );
    // One row for all experts of a token.
    check(Op::MulMatId, &[experts[0], (F32, &[5, 1, 64]), experts[2]], (F32, &[5, 2, 3]), &[]);

    let columns: [Input; 2] = [(F32, &[2, 3, 5, 7]), (F32, &[2, 3, 5, 4])];
    check(
        Op::OutProd,
        &columns,
        (F32, &[2, 3, 4, 7]),
        &[(1, &[1, 3, 5, 4]), (1, &[2, 1, 5, 4]), (1, &[2, 3, 6, 4])],
    );
}

#[test]
fn rows_by_index() {
    check(
        Op::GetRows,
        &[(Q8_0, &[2, 3, 9, 32]), (I32, &[1, 2, 3, 4])],
        (F32, &[2, 3, 4, 32]),
        &[(1, &[2, 2, 3, 4]), (1, &[1, 1, 3, 4]), (1, &[1, 2, 1, 4])],
    );
    check(Op::GetRows, &[(I32, &[9, 5]), (I32, &[4])], (I32, &[4, 5]), &[]);
    check(Op::GetRows, &[(F32, &[9, 5]), (I32, &[1, 4])], (F32, &[1, 4, 5]), &[]);

    let rows: [Input; 3] = [(F16, &[2, 4, 9, 8]), (F32, &[2, 4, 3, 8]), (I32, &[1, 2, 4, 3])];
    check(
        Op::SetRows,
        &rows,
        (F16, &[2, 4, 9, 8]),
        &[
            (1, &[1, 4, 3, 8]),
            (1, &[2, 2, 3, 8]),
            (1, &[2, 4, 3, 4]),
            (1, &[2, 4, 2, 8]),
            (2, &[2, 2, 4, 3]),
            (2, &[1, 3, 4, 3]),
            (2, &[1, 2, 2, 3]),
        ],
    );
    // The same ids for all batches and heads.
    check(Op::SetRows, &[rows[0], rows[1], (I32, &[3])], (F16, &[2, 4, 9, 8]), &[]);
}

#[test]
fn softmax_with_mask_and_sinks() {
    let soft_max = |mask, sinks| Op::SoftMax { scale: 0.5, mask, sinks };
    let scores: Input = (F32, &[2, 4, 3, 8]);
    check(soft_max(false, false), &[scores], scores, &[]);
    let masks: [&'static [usize]; 4] = [&[2, 4, 3, 8], &[1, 4, 3, 8], &[2, 1, 3, 8], &[1, 1, 5, 8]];
    for mask in masks {
        let inputs = [scores, (F16, mask), (F32, &[4])];
        check(
            soft_max(true, true),
            &inputs,
            scores,
            &[
                (1, &[3, 4, 3, 8]),
                (1, &[2, 2, 3, 8]),
                (1, &[2, 4, 2, 8]),
                (1, &[2, 4, 3, 7]),
                (2, &[3]),
                (2, &[4, 1]),
            ],
        );
    }
    check(soft_max(false, true), &[scores, (F32, &[4])], scores, &[(1, &[8])]);
    for (op, count) in [(soft_max(true, true), 2), (soft_max(true, false), 3), (soft_max(false, true), 1)] {
        let inputs = &[scores, (F32, &[4]), (F32, &[4])][..count];
        assert!(matches!(infer(op, inputs), Err(GraphErrorKind::Arity { found, .. }) if found == count));
    }
    let scaled = |scale| Op::SoftMax { scale, mask: false, sinks: false };
    check_parameters(&[scores], &[scaled(0.0)], &[scaled(f32::NAN), scaled(f32::INFINITY)]);
}

#[test]
fn rotary_embeddings() {
    let rope = |rope, factors| Op::Rope { rope, factors };
    let plain = Rope::new(6, Pairing::Half, 1e4);
    let x: Input = (F16, &[2, 5, 3, 8]);
    check(rope(plain, false), &[x, (I32, &[5])], x, &[(1, &[3]), (1, &[2, 5])]);
    let with_factors: [Input; 3] = [x, (I32, &[5]), (F32, &[3])];
    check(rope(plain, true), &with_factors, x, &[(2, &[6]), (2, &[2, 3])]);
    let arity = |op, inputs: &[Input]| matches!(infer(op, inputs), Err(GraphErrorKind::Arity { .. }));
    assert!(arity(rope(plain, true), &with_factors[..2]) && arity(rope(plain, false), &with_factors));

    let yarn = Rope { scale: 0.25, ext_factor: 1.0, original_context: 64, ..plain };
    let accepted = [plain, yarn, Rope { dims: 8, ..plain }, Rope { base: 1.0, ..plain }];
    let refused = [
        Rope { dims: 0, ..plain },
        Rope { dims: 5, ..plain },
        Rope { dims: 10, ..plain },
        Rope { base: 0.0, ..plain },
        Rope { base: f32::NAN, ..plain },
        Rope { scale: 0.0, ..plain },
        Rope { scale: f32::INFINITY, ..plain },
        Rope { attn_factor: f32::NAN, ..plain },
        Rope { original_context: 0, ..yarn },
        Rope { base: 1.0, ..yarn },
        Rope { beta_fast: 0.0, ..yarn },
        Rope { beta_slow: -1.0, ..yarn },
    ];
    check_parameters(
        &[x, (I32, &[5])],
        &accepted.map(|accepted| rope(accepted, false)),
        &refused.map(|refused| rope(refused, false)),
    );
}

#[test]
fn attention() {
    let plain =
        Attention { scale: 0.5, soft_cap: None, mask: false, spans: false, sinks: false, pages: false };
    let op = |mask, spans| Op::Attention(Attention { mask, spans, ..plain });
    let [q, k, v]: [Input; 3] = [(F32, &[2, 6, 5, 32]), (Q8_0, &[2, 3, 7, 32]), (F16, &[2, 3, 7, 4])];
    let result: Input = (F32, &[2, 5, 6, 4]);
    check(
        op(false, false),
        &[q, k, v],
        result,
        &[
            (0, &[2, 4, 5, 32]),
            (0, &[1, 6, 5, 32]),
            (1, &[1, 3, 7, 32]),
            (1, &[2, 2, 7, 32]),
            (1, &[2, 3, 6, 32]),
            (1, &[2, 3, 7, 64]),
            (2, &[1, 3, 7, 4]),
            (2, &[2, 6, 7, 4]),
            (2, &[2, 3, 8, 4]),
        ],
    );
    let (mask, spans): (Input, Input) = ((F32, &[1, 6, 5, 7]), (I32, &[5, 2]));
    check(op(true, false), &[q, k, v, mask], result, &[(3, &[1, 6, 5, 6]), (3, &[3, 6, 5, 7])]);
    check(op(false, true), &[q, k, v, spans], result, &[(3, &[5, 3]), (3, &[4, 2]), (3, &[2, 5, 2])]);
    check(op(true, true), &[q, k, v, mask, spans], result, &[(3, &[1, 2, 5, 7]), (4, &[1, 2])]);
    for (op, inputs) in [(op(true, true), &[q, k, v, mask][..]), (op(false, false), &[q, k, v, mask])] {
        assert!(matches!(infer(op, inputs), Err(GraphErrorKind::Arity { .. })));
    }
    // An error names the input that is wrong.
    let wrong = [
        (op(false, false), vec![(F16, q.1), k, v], 0),
        (op(false, false), vec![q, (I32, k.1), v], 1),
        (op(false, false), vec![q, k, (I32, v.1)], 2),
        (op(true, true), vec![q, k, v, (I32, mask.1), spans], 3),
        (op(false, true), vec![q, k, v, (F32, spans.1)], 3),
        (op(true, true), vec![q, k, v, mask, (F32, spans.1)], 4),
    ];
    for (op, inputs, place) in wrong {
        let found = infer(op, &inputs);
        assert!(matches!(found, Err(GraphErrorKind::Type { input, .. }) if input == place), "{found:?}");
    }
    let capped = |soft_cap| Op::Attention(Attention { soft_cap, ..plain });
    let scaled = |scale| Op::Attention(Attention { scale, ..plain });
    check_parameters(
        &[q, k, v],
        &[capped(Some(30.0)), scaled(0.0)],
        &[capped(Some(0.0)), capped(Some(-1.0)), capped(Some(f32::INFINITY)), scaled(f32::NAN)],
    );
    let paged = |mask, spans| Op::Attention(Attention { mask, spans, pages: true, ..plain });
    let [q, k, v]: [Input; 3] = [(F32, &[1, 6, 5, 32]), (Q8_0, &[1, 3, 128, 32]), (F16, &[1, 3, 128, 4])];
    let result: Input = (F32, &[1, 5, 6, 4]);
    let (spans, pages): (Input, Input) = ((I32, &[5, 3]), (I32, &[2, 9]));
    check(
        paged(false, true),
        &[q, k, v, spans, pages],
        result,
        &[(3, &[5, 2]), (3, &[4, 3]), (4, &[2, 2, 9])],
    );
    let mask: Input = (F32, &[1, 1, 5, 128]);
    check_parameters(&[q, k, v, pages], &[], &[paged(false, false)]);
    check_parameters(&[q, k, v, mask, spans, pages], &[], &[paged(true, true)]);
    let [q, k, v]: [Input; 3] = [(F32, &[2, 6, 5, 32]), (Q8_0, &[2, 3, 64, 32]), (F16, &[2, 3, 64, 4])];
    check_parameters(&[q, k, v, spans, pages], &[], &[paged(false, true)]);
}

#[test]
fn elementwise_operations() {
    let gated = Op::Gated { gate: quadriga_graph::Gate::Swiglu, swapped: false };
    check(gated.clone(), &[(F16, &[3, 10])], (F16, &[3, 5]), &[(0, &[3, 9])]);
    check(gated.clone(), &[(F32, &[3, 5]), (F32, &[3, 5])], (F32, &[3, 5]), &[(1, &[1, 5])]);
    assert!(matches!(infer(gated, &[(F32, &[4]), (F16, &[4])]), Err(GraphErrorKind::Type { input: 1, .. })));
    check(Op::Add1, &[(F16, &[3, 5]), (F32, &[1, 1])], (F16, &[3, 5]), &[(1, &[2]), (1, &[0])]);

    let clamp = |min, max| Op::Clamp { min, max };
    let accepted = [clamp(1.0, 1.0), clamp(f32::NEG_INFINITY, 0.0)];
    check_parameters(
        &[(F32, &[4])],
        &accepted,
        &[clamp(1.0, 0.5), clamp(f32::NAN, 1.0), clamp(0.0, f32::NAN)],
    );
    let norm = |eps| Op::Norm { eps };
    let refused = [norm(-1e-6), norm(f32::INFINITY), norm(f32::NAN)];
    check_parameters(&[(F32, &[4])], &[norm(0.0), norm(1e-6)], &refused);
    let groups = |groups, eps| Op::GroupNorm { groups, eps };
    check_parameters(
        &[(F32, &[2, 6, 3, 4])],
        &[groups(3, 0.0), groups(6, 1e-5)],
        &[groups(4, 0.0), groups(0, 0.0), groups(3, -1.0)],
    );
    // Norms, masks and reductions take 32-bit floats only.
    let f32_only = [
        norm(0.0),
        groups(1, 0.0),
        Op::DiagMaskInf { past: 0 },
        Op::Sum,
        Op::SumRows,
        Op::ArgMax,
        Op::TopK { k: 1 },
        Op::SoftMax { scale: 1.0, mask: false, sinks: false },
    ];
    for op in f32_only {
        let found = infer(op, &[(F16, &[4])]);
        assert!(matches!(found, Err(GraphErrorKind::Type { input: 0, .. })), "{found:?}");
    }
}

#[test]
fn reductions_and_sorts() {
    let x: Input = (F32, &[2, 3, 5]);
    check(Op::Sum, &[x], (F32, &[1]), &[]);
    check(Op::Mean, &[x], (F32, &[2, 3, 1]), &[]);
    check(Op::ArgMax, &[x], (I32, &[2, 3]), &[(0, &[2, 0])]);
    check(Op::TopK { k: 5 }, &[x], (I32, &[2, 3, 5]), &[]);
    check_parameters(&[x], &[Op::TopK { k: 0 }], &[Op::TopK { k: 6 }]);
    // Indices are 32-bit; nothing is allocated for a graph, so rows may have any length.
    let longest: Input = (F32, &[i32::MAX as usize]);
    for op in [Op::ArgMax, Op::ArgSort { order: quadriga_graph::Order::Ascending }, Op::TopK { k: 1 }] {
        assert!(infer(op.clone(), &[longest]).is_ok());
        assert!(matches!(infer(op, &[(F32, &[1 << 31])]), Err(GraphErrorKind::Shape(_))));
    }
    check(Op::CrossEntropyLoss, &[(F32, &[3, 5]), (F32, &[3, 5])], (F32, &[1]), &[(1, &[5, 3])]);
    let empty: Input = (F32, &[0, 5]);
    assert!(matches!(infer(Op::CrossEntropyLoss, &[empty, empty]), Err(GraphErrorKind::Shape(_))));
}

#[test]
fn copies_and_casts() {
    let castable = |from, to| infer(Op::Cast { to }, &[(from, &[2, 256])]).is_ok();
    for (from, to) in [(F32, Q8_0), (Q8_0, F16), (I32, I32), (DType::Q4_K, F32), (DType::IQ1_S, DType::IQ1_S)]
    {
        assert!(castable(from, to), "{from} to {to}");
    }
    for (from, to) in [(F32, I32), (I32, F32), (F32, DType::Q4_K), (DType::Q8_K, F32)] {
        assert!(!castable(from, to), "{from} to {to}");
    }
    check(Op::CopyInto, &[(F16, &[6, 4]), (F32, &[2, 12])], (F16, &[6, 4]), &[(1, &[2, 11])]);
    check(Op::CopyInto, &[(Q8_0, &[6, 64]), (F32, &[2, 3, 64])], (Q8_0, &[6, 64]), &[(1, &[12, 32])]);
    check(Op::CopyInto, &[(F32, &[6, 64]), (Q8_0, &[2, 3, 64])], (F32, &[6, 64]), &[(1, &[12, 32])]);

    let concat = |axis4| Op::Concat { axis4 };
    check(concat(3), &[(F16, &[2, 3]), (F16, &[2, 5])], (F16, &[2, 8]), &[(1, &[3, 5]), (1, &[2, 2, 5])]);
    check(concat(2), &[(I32, &[5]), (I32, &[2, 5])], (I32, &[3, 5]), &[(0, &[4])]);
    // The result has the concatenated dimension, even if no input does.
    check(concat(1), &[(F32, &[4]), (F32, &[4])], (F32, &[2, 1, 4]), &[]);
    for inputs in [[(F32, &[4][..]), (F16, &[4])], [(Q8_0, &[32]), (Q8_0, &[32])]] {
        assert!(matches!(infer(concat(2), &inputs), Err(GraphErrorKind::Type { .. })));
    }
    check_parameters(&[(F32, &[4])], &[concat(0)], &[concat(4)]);

    let permute = |axes| Op::Permute { axes };
    check_parameters(
        &[(Q8_0, &[2, 3, 4, 32])],
        &[permute([2, 0, 1, 3])],
        &[permute([0, 1, 3, 2]), permute([0, 1, 1, 3]), permute([0, 1, 2, 4])],
    );
    check(permute([0, 3, 1, 2]), &[(F32, &[2, 3, 4, 5])], (F32, &[2, 5, 3, 4]), &[]);
}

#[test]
fn windows() {
    let pool = |window| Op::Pool { pooling: Pooling::Max, window };
    let window = Window::new([2, 3]);
    // Positions: (extent + 2 · padding − reach) / stride + 1.
    check(
        pool(window),
        &[(F16, &[2, 5, 7, 9])],
        (F32, &[2, 5, 6, 7]),
        &[(0, &[1, 3]), (0, &[2, 2]), (0, &[0, 9])],
    );
    check(pool(window.stride([2, 4]).padding([1, 2])), &[(F32, &[7, 9])], (F32, &[4, 3]), &[]);
    check(pool(window.stride([2, 4]).padding([1, 2])), &[(F32, &[8, 10])], (F32, &[5, 3]), &[(0, &[8, 0])]);
    check_parameters(
        &[(F32, &[7, 9])],
        &[pool(window.padding([1, 2]))],
        &[
            pool(window.padding([2, 0])),
            pool(window.padding([0, 3])),
            pool(window.dilation([1, 2])),
            pool(window.stride([0, 1])),
            pool(window.stride([1, LARGEST + 1])),
        ],
    );
    assert!(infer(pool(Window::new([1, 1]).stride([LARGEST, 1])), &[(F32, &[1, LARGEST])]).is_ok());
    check(pool(Window::new([1, LARGEST])), &[(F32, &[1, LARGEST])], (F32, &[1, 1]), &[]);
    let long = infer(pool(Window::new([1, 1])), &[(F32, &[1, LARGEST + 1])]);
    assert!(matches!(long, Err(GraphErrorKind::Parameter(_))), "{long:?}");

    let im2col = |window| Op::Im2Col { window, to: F16 };
    let dilated = Window::new([3, 2]).dilation([2, 4]);
    check(im2col(dilated), &[(F32, &[2, 5, 7, 9])], (F16, &[2, 3, 5, 30]), &[(0, &[2, 5, 4, 9])]);
    check_parameters(
        &[(F32, &[2, 5, 7, 9])],
        &[],
        &[
            im2col(window.dilation([0, 1])),
            im2col(Window::new([0, 1])),
            im2col(Window::new([1, LARGEST + 1])),
            Op::Im2Col { window, to: Q8_0 },
        ],
    );

    let depthwise = Op::ConvDepthwise { window };
    check(
        depthwise,
        &[(F16, &[5, 1, 2, 3]), (F32, &[2, 5, 7, 9])],
        (F32, &[2, 5, 6, 7]),
        &[(0, &[4, 1, 2, 3]), (0, &[5, 2, 2, 3]), (0, &[5, 1, 3, 2])],
    );
    let transposed = |stride| Op::ConvTranspose { stride };
    let inputs: [Input; 2] = [(F32, &[4, 5, 2, 3]), (F32, &[2, 4, 7, 9])];
    // (extent − 1) · stride + kernel.
    check(transposed([2, 3]), &inputs, (F32, &[2, 5, 14, 27]), &[(0, &[5, 5, 2, 3])]);
    check_parameters(&inputs, &[], &[transposed([0, 1]), transposed([1, 0])]);
    let empty = infer(transposed([1, 1]), &[inputs[0], (F32, &[2, 4, 0, 9])]);
    assert!(matches!(empty, Err(GraphErrorKind::Parameter(_))), "{empty:?}");
    assert_eq!(infer(transposed([1, LARGEST]), &inputs), Err(GraphErrorKind::Overflow));

    let upscale =
        |dims: [usize; 2]| Op::Upscale { shape: dims.into(), interpolation: Interpolation::Nearest };
    check(upscale([6, 8]), &[(F32, &[3, 4])], (F32, &[6, 8]), &[(0, &[0, 4]), (0, &[3, 0])]);
    check(upscale([0, 8]), &[(F32, &[3, 4])], (F32, &[0, 8]), &[]);
    check(upscale([0, 8]), &[(F32, &[0, 4])], (F32, &[0, 8]), &[(0, &[0, LARGEST + 1])]);
}

#[test]
fn ranges_have_the_numbers_before_their_end() {
    let count = |start, stop, step| {
        let g = GraphBuilder::new();
        let range = g.arange(start, stop, step).shape();
        g.finish().map(|_| range.dims().to_vec()).map_err(|error| error.kind)
    };
    for (start, stop, step, expected) in [
        (0.0, 5.0, 1.0, 5),
        (1.0, 5.0, 1.5, 3),
        (5.0, 1.0, -2.0, 2),
        (2.0, 2.0, 1.0, 0),
        (1.0, 5.0, -1.0, 0),
        (-3.0, 3.0, 0.5, 12),
    ] {
        assert_eq!(count(start, stop, step), Ok(vec![expected]), "{start} to {stop} by {step}");
    }
    for (start, stop, step) in [(0.0, 1.0, 0.0), (0.0, f32::NAN, 1.0), (f32::INFINITY, 1.0, 1.0)] {
        assert!(matches!(count(start, stop, step), Err(GraphErrorKind::Parameter(_))));
    }
    let range = |start, step| Op::Arange { start, step, count: 3 };
    check_parameters(&[], &[range(0.0, 0.0)], &[range(f32::NAN, 1.0), range(0.0, f32::INFINITY)]);
}
