//! The fingerprint of a graph depends on every parameter of every operation: two graphs with one fingerprint share a plan.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;

use quadriga_graph::{
    Attention, DType, ExpertWeights, Fingerprint, Gate, GatedDeltaRule, GraphBuilder, GroupScore, NodeId, Op,
    Order, Pairing, Rope, SelectExperts, Shape, Strides, Value,
};

/// Applies an operation to inputs of these types and shapes.
fn of(op: Op, inputs: &[(DType, &[usize])]) -> Fingerprint {
    let g = GraphBuilder::new();
    let declare = |(i, (dtype, dims)): (usize, &(DType, &[usize]))| {
        g.input(&format!("x{i}"), *dtype, Shape::new(dims).unwrap())
    };
    let inputs: Vec<Value<'_>> = inputs.iter().enumerate().map(declare).collect();
    g.output("y", g.apply(op, &inputs));
    g.finish().unwrap().fingerprint()
}

#[test]
fn every_attribute_of_every_operation_changes_the_fingerprint() {
    type Leaf = (DType, &'static [usize]);
    const X: (DType, &[usize]) = (DType::F32, &[4, 8]);
    const HEADS: (DType, &[usize]) = (DType::F32, &[2, 4, 8]);
    const POSITIONS: (DType, &[usize]) = (DType::I32, &[2]);
    let mut all: Vec<(String, Fingerprint)> = Vec::new();
    let mut add = |op: Op, inputs: &[(DType, &[usize])]| all.push((format!("{op:?}"), of(op, inputs)));
    for (a, b) in [(1.0, 0.0), (2.0, 0.0), (1.0, 1.0), (0.0, 1.0)] {
        add(Op::Scale { scale: a, bias: b }, &[X]);
        add(Op::Clamp { min: a - 3.0, max: b + 3.0 }, &[X]);
    }
    for eps in [1e-5, 1e-6] {
        add(Op::Norm { eps }, &[X]);
        add(Op::RmsNorm { eps }, &[X]);
        add(Op::L2Norm { eps }, &[X]);
        for groups in [1, 2] {
            add(Op::GroupNorm { groups, eps }, &[(DType::F32, &[4, 2, 8])]);
        }
    }
    for gate in Gate::ALL {
        for swapped in [false, true] {
            add(Op::Gated { gate, swapped }, &[X, X]);
        }
    }
    const SCORES: Leaf = (DType::F32, &[3, 8]);
    const IDS: Leaf = (DType::I32, &[3, 2]);
    for (groups, groups_used) in [(1, 1), (4, 2), (4, 4), (2, 2)] {
        for group_score in GroupScore::ALL {
            let select = SelectExperts { used: 2, groups, groups_used, group_score };
            add(Op::SelectExperts(select), &[SCORES]);
        }
    }
    for (softmax, normalize, scale) in
        [(false, false, 1.0), (true, false, 1.0), (false, true, 1.0), (false, true, 2.0)]
    {
        add(Op::ExpertWeights(ExpertWeights { softmax, normalize, scale }), &[SCORES, IDS]);
    }
    const TOKEN_HEADS: Leaf = (DType::F32, &[3, 2, 4]);
    const PER_HEAD: Leaf = (DType::F32, &[3, 2]);
    for (scale, tiled, delta) in
        [(1.0, false, true), (0.5, false, true), (1.0, true, true), (1.0, false, false)]
    {
        let inputs = [TOKEN_HEADS, TOKEN_HEADS, TOKEN_HEADS, PER_HEAD, PER_HEAD, (DType::F32, &[2, 4, 4])];
        add(Op::GatedDeltaRule(GatedDeltaRule { scale, tiled, delta }), &inputs);
    }
    for scale in [1.0, 0.5] {
        add(Op::SoftMax { scale, mask: false, sinks: false }, &[X]);
        add(Op::SoftMax { scale, mask: true, sinks: false }, &[X, X]);
    }
    let rope = Rope { original_context: 2048, ..Rope::new(8, Pairing::Half, 1e4) };
    let ropes = [
        rope,
        Rope { dims: 4, ..rope },
        Rope { pairing: Pairing::Adjacent, ..rope },
        Rope { base: 5e5, ..rope },
        Rope { scale: 0.5, ..rope },
        Rope { ext_factor: 1.0, ..rope },
        Rope { attn_factor: 1.5, ..rope },
        Rope { beta_fast: 16.0, ..rope },
        Rope { beta_slow: 2.0, ..rope },
        Rope { original_context: 4096, ..rope },
    ];
    for rope in ropes {
        add(Op::Rope { rope, factors: false }, &[HEADS, POSITIONS]);
    }
    add(Op::Rope { rope, factors: true }, &[HEADS, POSITIONS, (DType::F32, &[4])]);
    for past in [0, 1, 2] {
        add(Op::DiagMaskInf { past }, &[X]);
        add(Op::DiagMaskZero { past }, &[X]);
    }
    for axis4 in [2, 3] {
        add(Op::Concat { axis4 }, &[(DType::F32, &[4, 4]), (DType::F32, &[4, 4])]);
    }
    add(Op::Pad { before: [0; 4], after: [0, 0, 0, 1] }, &[X]);
    add(Op::Pad { before: [0, 0, 0, 1], after: [0; 4] }, &[X]);
    add(Op::Pad { before: [0, 0, 1, 0], after: [0; 4] }, &[X]);
    for order in [Order::Ascending, Order::Descending] {
        add(Op::ArgSort { order }, &[X]);
    }
    for k in [1, 2] {
        add(Op::TopK { k }, &[X]);
    }
    for to in [DType::F32, DType::F16, DType::BF16] {
        add(Op::Cast { to }, &[X]);
    }
    add(Op::Repeat { shape: Shape::from([8, 8]) }, &[X]);
    add(Op::Repeat { shape: Shape::from([4, 16]) }, &[X]);
    add(Op::Reshape { shape: Shape::from([8, 4]) }, &[X]);
    add(Op::Reshape { shape: Shape::from([2, 16]) }, &[X]);
    for (offset, stride) in [(0, 32), (4, 32), (0, 16)] {
        let strides = Strides([128, 128, stride, 4]);
        add(Op::View { shape: Shape::from([2, 4]), strides, offset }, &[X]);
    }
    for axes in [[0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3]] {
        add(Op::Permute { axes }, &[HEADS]);
    }
    add(Op::Transpose, &[HEADS]);
    let attention =
        Attention { scale: 1.0, soft_cap: None, mask: false, spans: false, sinks: false, pages: false };
    let (q, kv) = ((DType::F32, &[2usize, 4, 8][..]), (DType::F32, &[2usize, 3, 8][..]));
    for attention in [
        attention,
        Attention { scale: 0.5, ..attention },
        Attention { soft_cap: Some(30.0), ..attention },
        Attention { soft_cap: Some(50.0), ..attention },
    ] {
        add(Op::Attention(attention), &[q, kv, kv]);
    }
    let mut seen: HashMap<Fingerprint, String> = HashMap::new();
    for (name, fingerprint) in all {
        if let Some(other) = seen.insert(fingerprint, name.clone()) {
            panic!("{name} and {other} have one fingerprint");
        }
    }
}

#[test]
fn names_inputs_order_and_barriers_change_the_fingerprint() {
    let build = |name: &str, output: &str, swapped: bool, barrier: bool| {
        let g = GraphBuilder::new();
        let (x, z) = (g.input(name, DType::F32, [8]), g.input("z", DType::F32, [8]));
        let (a, b) = (x.sqr(), z.sqrt());
        if barrier {
            g.barrier();
        }
        g.output(output, if swapped { b.sub(a) } else { a.sub(b) });
        g.finish().unwrap()
    };
    let graph = build("x", "y", false, false);
    assert_eq!(graph.fingerprint(), build("x", "y", false, false).fingerprint());
    let order: Vec<NodeId> = [1, 0, 2].map(NodeId::from_index).to_vec();
    let others = [
        build("w", "y", false, false),
        build("x", "v", false, false),
        build("x", "y", true, false),
        build("x", "y", false, true),
        graph.with_order(&[&order]).unwrap(),
    ];
    for (number, other) in others.iter().enumerate() {
        assert_ne!(graph.fingerprint(), other.fingerprint(), "{number}");
    }
}
