//! Building graphs: shapes, views, names, operators, and the first error with its location.
#![allow(clippy::unwrap_used, reason = "tests")]

use quadriga_graph::{
    AttentionOptions, BuildError, DType, GraphBuilder, GraphErrorKind, Op, Pairing, Rope, TensorKind, Value,
    Weight,
};

fn error_of(build: impl for<'g> FnOnce(&'g GraphBuilder)) -> BuildError {
    let g = GraphBuilder::new();
    build(&g);
    g.finish().unwrap_err()
}

#[test]
fn views_know_the_storage_and_the_offset() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 6]);
    let row = x.slice(0, 1, 2);
    let corner = row.slice(1, 3, 2);
    let transposed = corner.transpose();
    g.output("transposed", transposed);
    let (x, transposed) = (x.id(), transposed.id());
    let graph = g.finish().unwrap();
    assert_eq!(graph[transposed].storage(), x);
    assert_eq!(graph[transposed].offset(), 24 + 12);
    assert_eq!(graph[transposed].shape().dims(), &[2, 2]);
    assert_eq!(graph[transposed].strides()[2..], [4, 24]);
    assert!(!graph[transposed].is_contiguous());
    assert!(!graph[transposed].has_dense_rows());
}

#[test]
fn writing_a_state_returns_the_written_value() {
    let g = GraphBuilder::new();
    let cache = g.state("cache", DType::F16, [32, 8]);
    let rows = g.input("rows", DType::F32, [2, 8]);
    let ids = g.input("ids", DType::I32, [2]);
    let written = cache.set_rows(rows, ids);
    g.output("cache", written);
    let (cache, written) = (cache.id(), written.id());
    let graph = g.finish().unwrap();
    assert_eq!(graph[written].storage(), cache);
    assert!(matches!(graph[written].kind(), TensorKind::Computed(_)));
}

#[test]
fn reading_a_stale_value_of_a_state_is_an_error() {
    let error = error_of(|g| {
        let cache = g.state("cache", DType::F32, [32, 8]);
        let rows = g.input("rows", DType::F32, [2, 8]);
        let ids = g.input("ids", DType::I32, [2]);
        let view = cache.slice(0, 0, 4);
        cache.set_rows(rows, ids).named("write");
        view.silu();
    });
    assert_eq!(error.kind, GraphErrorKind::Stale { input: 0, writer: "write".into() });
    assert!(error.to_string().contains("use the value that write returned"), "{error}");
}

#[test]
fn weights_inputs_and_overlapping_sources_are_never_written() {
    let error = error_of(|g| {
        let w = g.weight("w", Weight::new(DType::F32, [4, 8]));
        g.input("x", DType::F32, [4, 8]).copy_into(w);
    });
    assert_eq!(error.kind, GraphErrorKind::ReadOnly { input: 0 });
    let error = error_of(|g| {
        let s = g.state("s", DType::F32, [4, 8]);
        s.slice(0, 0, 2).copy_into(s.slice(0, 1, 2));
    });
    assert!(error.to_string().contains("overlap"), "{error}");
}

#[test]
fn the_first_error_is_kept_with_location_scope_and_inputs() {
    let line = line!() + 5;
    let error = error_of(|g| {
        let x = g.input("x", DType::F32, [2, 3]);
        let w = g.weight("w", Weight::new(DType::F32, [5, 4]));
        let blk = g.scope("blk.3");
        let y = blk.scope("ffn").mul_mat(w, x);
        y.add(x).reshape([7]).silu();
    });
    assert_eq!(error.location.line(), line);
    assert!(error.location.file().ends_with("building.rs"));
    assert_eq!(error.scope, "blk.3.ffn");
    assert_eq!(error.inputs, ["w F32 [5, 4]", "x F32 [2, 3]"]);
    assert!(error.to_string().starts_with("mul_mat in blk.3.ffn"), "{error}");
}

#[test]
fn invalid_operations_are_errors_and_never_panics() {
    type Build = for<'g> fn(&'g GraphBuilder, Value<'g>) -> Value<'g>;
    let cases: &[(&str, Build)] = &[
        ("overflow", |g, _| g.input("big", DType::F32, [usize::MAX, 2])),
        ("overflow behind a zero", |g, _| g.input("big", DType::F32, [0, usize::MAX, 8])),
        ("half a block", |g, _| g.input("q", DType::Q4_0, [33])),
        ("duplicate name", |g, _| g.input("x", DType::F32, [1])),
        ("view past the end", |_, x| x.view([4], [0, 0, 0, 4], 84)),
        ("misaligned view", |_, x| x.view([2], [0, 0, 0, 4], 2)),
        ("view stride overflow", |_, x| x.view([3], [0, 0, 0, usize::MAX - 3], 4)),
        ("slice past the end", |_, x| x.slice(0, 3, 2)),
        ("slice axis", |_, x| x.slice(7, 0, 1)),
        ("permute with a duplicate axis", |_, x| x.permute([1, 1])),
        ("permute rank", |_, x| x.permute([0, 1, 2])),
        ("reshape count", |_, x| x.reshape([23])),
        ("reshape strided", |_, x| x.transpose().reshape([24])),
        ("broadcast", |g, x| x.add(g.input("b", DType::F32, [5]))),
        ("integer arithmetic", |g, x| g.input("i", DType::I32, [4, 6]).add(x)),
        ("add1 of many", |_, x| x.add1(x)),
        ("empty clamp", |_, x| x.clamp(1.0, -1.0)),
        ("bad epsilon", |_, x| x.rms_norm(f32::NAN)),
        ("odd halves", |g, _| g.input("o", DType::F32, [3]).gated_halves(quadriga_graph::Gate::Reglu, false)),
        ("groups", |_, x| x.group_norm(0, 1e-5)),
        ("rope dims", |g, x| {
            let p = g.input("p", DType::I32, [1]);
            x.reshape([1, 4, 6]).rope(Rope::new(7, Pairing::Half, 1e4), p, None)
        }),
        ("rope positions", |g, x| {
            let p = g.input("p", DType::I32, [3]);
            x.reshape([1, 4, 6]).rope(Rope::new(6, Pairing::Half, 1e4), p, None)
        }),
        ("strided mul_mat", |g, x| x.transpose().mul_mat(g.input("y", DType::F32, [1, 4]))),
        ("ids of the wrong type", |g, x| x.get_rows(g.input("f", DType::F32, [2]))),
        ("top_k larger than the row", |_, x| x.top_k(7)),
        ("concat axis", |_, x| x.concat(2, &[x])),
        ("concat extents", |g, x| x.concat(0, &[g.input("c", DType::F32, [4, 5])])),
        ("padding overflow", |_, x| x.pad([usize::MAX])),
        ("cast to a type that cannot be quantized to", |_, x| x.cast(DType::IQ1_S)),
        ("wrong arity", |g, x| g.apply(Op::MulMat, &[x])),
        ("data length", |g, _| g.constant("k", DType::F32, [3], vec![0u8; 11])),
        ("duplicate output", |g, x| {
            g.output("y", x);
            g.output("y", x);
            x
        }),
        ("attention heads", |g, _| {
            let q = g.input("q", DType::F32, [1, 3, 2, 8]);
            let k = g.input("k", DType::F32, [1, 2, 5, 8]);
            q.attention(k, k, AttentionOptions::new())
        }),
        ("mask", |g, x| x.soft_max(1.0, Some(g.input("m", DType::F32, [3, 6])), None)),
    ];
    for (name, build) in cases {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [4, 6]);
        build(&g, x);
        assert!(g.finish().is_err(), "{name} was accepted");
    }
}

#[test]
fn operators_add_the_same_nodes_as_methods() {
    type Build = for<'g> fn(Value<'g>, Value<'g>) -> Value<'g>;
    let cases: &[(Build, Build)] = &[
        (|x, y| x + y, |x, y| x.add(y)),
        (|x, y| x - y, |x, y| x.sub(y)),
        (|x, y| x * y, |x, y| x.mul(y)),
        (|x, y| x / y, |x, y| x.div(y)),
        (|x, _| -x, |x, _| x.neg()),
        (|x, _| x + 3.0, |x, _| x.scale_bias(1.0, 3.0)),
        (|x, _| x - 3.0, |x, _| x.scale_bias(1.0, -3.0)),
        (|x, _| x * 3.0, |x, _| x.scale(3.0)),
        (|x, _| x / 4.0, |x, _| x.scale(0.25)),
        (|x, _| 3.0 + x, |x, _| x.scale_bias(1.0, 3.0)),
        (|x, _| 3.0 - x, |x, _| x.scale_bias(-1.0, 3.0)),
        (|x, _| 3.0 * x, |x, _| x.scale(3.0)),
    ];
    let build = |build: Build| {
        let g = GraphBuilder::new();
        let (x, y) = (g.input("x", DType::F32, [2, 8]), g.input("y", DType::F32, [8]));
        g.output("z", build(x, y));
        g.finish().unwrap().fingerprint()
    };
    for (operator, method) in cases {
        assert_eq!(build(*operator), build(*method));
    }
}

#[test]
fn operators_report_the_line_of_the_caller() {
    let error = error_of(|g| {
        let (x, y) = (g.input("x", DType::F32, [2, 8]), g.input("y", DType::F32, [3]));
        let _ = x + y;
    });
    assert_eq!(error.location.line(), line!() - 2);
}

#[test]
fn tensors_are_found_by_name() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 8]);
    let (first, second, unnamed) = {
        let _scope = g.scope("blk.0");
        (x.silu().named("act"), x.tanh().named("act"), x.exp())
    };
    // A label that is also the name of a leaf.
    let shadowed = x.sqr().named("x");
    g.output("y", shadowed);
    let ids = (x.id(), first.id(), second.id(), unnamed.id());
    let graph = g.finish().unwrap();
    assert_eq!(graph.tensor("x"), Some(ids.0));
    assert_eq!(graph.tensor("blk.0.act"), Some(ids.1));
    assert_eq!(graph.name(ids.2), "blk.0.act");
    assert_eq!(graph.tensor(&graph.name(ids.3)), Some(ids.3));
    assert_eq!(graph.tensor("y"), None);
    assert_eq!(graph.tensor("act"), None);
}

#[test]
fn attention_scales_by_the_row_length_by_default() {
    let build = |scale: Option<f32>| {
        let g = GraphBuilder::new();
        let q = g.input("q", DType::F32, [1, 2, 3, 64]);
        g.output("y", q.attention(q, q, AttentionOptions { scale, ..Default::default() }));
        g.finish().unwrap().fingerprint()
    };
    assert_eq!(build(None), build(Some(0.125)));
    assert_ne!(build(None), build(Some(1.0)));
}

#[test]
fn tensors_of_another_builder_are_refused() {
    let other = GraphBuilder::new();
    let foreign = other.input("x", DType::F32, [2]);
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2]);
    x.add(foreign);
    assert_eq!(g.finish().unwrap_err().kind, GraphErrorKind::Foreign { input: 1 });
}

#[test]
fn fingerprints_are_equal_exactly_for_equal_graphs() {
    let build = |scale: f32, cols: usize, name: &str, swap: bool| {
        let g = GraphBuilder::new();
        let x = g.input(name, DType::F32, [2, cols]);
        let y = x.scale(scale);
        let (a, b) = if swap { (y, x) } else { (x, y) };
        g.output("z", a.sub(b));
        g.finish().unwrap().fingerprint()
    };
    let base = build(2.0, 8, "x", false);
    assert_eq!(base, build(2.0, 8, "x", false));
    for other in [
        build(2.5, 8, "x", false),
        build(2.0, 9, "x", false),
        build(2.0, 8, "y", false),
        build(2.0, 8, "x", true),
    ] {
        assert_ne!(base, other);
    }
    // The fingerprint is stable across runs and machines.
    assert_eq!(base.to_string(), "be630f27969bd8a8819972f06959088c");
}

#[test]
fn a_graph_prints_as_a_table_and_as_dot() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 8]);
    let y = { g.scope("blk.0").mul_mat(g.weight("w \"quoted\"", Weight::new(DType::F32, [3, 8])), x) };
    g.output("y", y.named("matmul"));
    let graph = g.finish().unwrap();
    let table = graph.to_string();
    assert!(table.contains("blk.0.matmul"), "{table}");
    assert!(table.contains("mul_mat(w \"quoted\", x)"), "{table}");
    let dot = graph.to_dot();
    assert!(dot.contains("t0 -> t2") && dot.contains("w \\\"quoted\\\""), "{dot}");
}

#[test]
fn every_unary_operation_has_a_unique_name_and_a_description() {
    let mut names = std::collections::HashSet::new();
    for unary in quadriga_graph::Unary::ALL {
        let d = Op::Unary(unary).declaration();
        assert!(names.insert(d.name) && !d.description.is_empty());
    }
}

#[test]
fn an_output_cannot_be_overwritten_later() {
    let error = error_of(|g| {
        let cache = g.state("cache", DType::F32, [4, 2]);
        let rows = g.input("rows", DType::F32, [1, 2]);
        let ids = g.input("ids", DType::I32, [1]);
        let first = cache.set_rows(rows, ids);
        g.output("first", first.slice(0, 1, 1));
        g.output("second", first.set_rows(rows, ids));
    });
    assert_eq!(error.kind, GraphErrorKind::OutputLost("first".into()));
}
