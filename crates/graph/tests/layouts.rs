//! Views, copies and in-place results: which layout a value has, which nodes are added, and when its memory is reused.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{
    AttentionOptions, DType, Data, Graph, GraphBuilder, GraphErrorKind, NodeId, OrderError, Pooling, Shape,
    Value, Weight, Window,
};

/// A graph whose one output is built from an input `[4, 6]`.
fn build(
    build: impl for<'g> FnOnce(&'g GraphBuilder, Value<'g>) -> Value<'g>,
) -> Result<Graph, GraphErrorKind> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 6]);
    let y = build(&g, x);
    g.output("y", y);
    g.finish().map_err(|error| error.kind)
}

/// The names of a graph's operations.
fn operations(graph: &Graph) -> Vec<&'static str> {
    graph.nodes().iter().map(|node| node.op().name()).collect()
}

#[test]
fn the_result_may_reuse_an_input_of_its_own_layout_only() {
    // Which inputs the last node may overwrite.
    let in_place = |graph: Graph| graph.nodes().last().unwrap().in_place_inputs().collect::<Vec<_>>();
    let cases: [(Graph, &[usize]); 7] = [
        (build(|_, x| x.sqr().add(x.sqrt())).unwrap(), &[0, 1]),
        // A repeated input is smaller than the result.
        (build(|g, x| x.add(g.input("b", DType::F32, [1, 6]).sqr())).unwrap(), &[0]),
        // The same strides, since the outermost extent is in none of them.
        (
            build(|g, x| x.reshape([4, 1, 1, 6]).add(g.input("b", DType::F32, [1, 1, 1, 6]).sqr())).unwrap(),
            &[0],
        ),
        // Equal shapes, other strides: of the four by four elements of a transposed copy.
        (build(|_, x| x.slice(1, 0, 4).transpose().sqr()).unwrap(), &[]),
        (build(|_, x| x.slice(1, 0, 4).cont().add(x.slice(1, 0, 4).transpose())).unwrap(), &[0]),
        (build(|g, x| x.add(g.input("h", DType::F16, [4, 6]).scale(2.0))).unwrap(), &[0]),
        (build(|g, x| g.input("w", DType::F32, [5, 6]).mul_mat(x)).unwrap(), &[]),
    ];
    for (graph, expected) in cases {
        assert_eq!(in_place(graph.clone()), expected, "{graph}");
    }
}

#[test]
fn slices_of_blocks_start_and_end_between_blocks() {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::new(DType::Q8_0, [3, 96]));
    let (columns, rows) = (w.slice(1, 32, 64), w.slice(0, 1, 2));
    g.output("columns", columns);
    g.output("rows", rows);
    let (columns, rows) = (columns.id(), rows.id());
    let graph = g.finish().unwrap();
    // A block of 32 elements has 34 bytes, a row three blocks.
    assert_eq!((graph[columns].offset(), graph[columns].shape().dims()), (34, &[3, 64][..]));
    assert_eq!((graph[rows].offset(), graph[rows].shape().dims()), (102, &[2, 96][..]));
    for start in [1, 16, 33] {
        let g = GraphBuilder::new();
        g.weight("w", Weight::new(DType::Q8_0, [3, 96])).slice(1, start, 32);
        assert!(matches!(g.finish().unwrap_err().kind, GraphErrorKind::Parameter(_)), "from {start}");
    }
}

#[test]
fn every_rank_is_permuted_and_sliced_by_its_own_axes() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 3, 4, 5]);
    assert_eq!(x.permute([3, 0, 2, 1]).shape().dims(), [5, 2, 4, 3]);
    assert_eq!(x.slice(0, 1, 1).shape().dims(), [1, 3, 4, 5]);
    let y = g.input("y", DType::F32, [3, 4, 5]);
    assert_eq!(y.permute([2, 0, 1]).shape().dims(), [5, 3, 4]);
    let z = g.input("z", DType::F32, [4]);
    assert_eq!(z.permute([0]).shape().dims(), [4]);
    assert_eq!(z.slice(0, 1, 3).shape().dims(), [3]);
    assert!(g.finish().is_ok());
}

#[test]
fn a_zero_extent_hides_no_overflow() {
    for dims in [[usize::MAX, 2, 0], [0, usize::MAX, 2], [usize::MAX, 0, 2]] {
        assert_eq!(Shape::from(dims).contiguous(DType::F32), None, "{dims:?}");
    }
    assert_eq!(Shape::from([7, 0, 3]).contiguous(DType::F32).unwrap().1, 0);
}

#[test]
fn convolutions_copy_a_kernel_only_if_its_type_or_layout_needs_it() {
    let operations_with = |dtype, kernel: for<'g> fn(Value<'g>) -> Value<'g>| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [2, 3, 8, 8]);
        let k = kernel(g.weight("k", Weight::new(dtype, [4, 3, 2, 2])));
        g.output("y", x.conv_2d(k, Window::new([2, 2])));
        operations(&g.finish().unwrap()).into_iter().filter(|name| *name == "cast").count()
    };
    assert_eq!(operations_with(DType::F32, |k| k), 0);
    assert_eq!(operations_with(DType::F32, |k| k.permute([0, 1, 3, 2])), 1);
    assert_eq!(operations_with(DType::F16, |k| k), 1);
}

#[test]
fn one_dimensional_windows_move_along_rows_only() {
    let pooled = |window| {
        let graph = build(|_, x| x.pool_1d(Pooling::Max, window))?;
        Ok::<_, GraphErrorKind>(graph[graph.output("y").unwrap()].shape().dims().to_vec())
    };
    let window = Window::one_dimensional(2);
    assert_eq!(pooled(window.stride([1, 2])), Ok(vec![4, 3]));
    // What a window says of columns is ignored.
    assert_eq!(pooled(window.stride([3, 2]).padding([1, 1])), Ok(vec![4, 4]));
    assert!(matches!(pooled(Window::new([2, 2])), Err(GraphErrorKind::Parameter(_))));

    let convolved = |dims: &[usize]| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, Shape::new(dims).unwrap());
        let y = x.conv_1d(g.weight("k", Weight::new(DType::F32, [5, 3, 2])), window);
        let dims = y.shape().dims().to_vec();
        g.finish().map(|_| dims).map_err(|error| error.kind)
    };
    assert_eq!(convolved(&[2, 3, 8]), Ok(vec![2, 5, 7]));
    assert_eq!(convolved(&[3, 8]), Ok(vec![1, 5, 7]));
    assert!(matches!(convolved(&[1, 2, 3, 8]), Err(GraphErrorKind::Shape(_))));
}

#[test]
fn a_value_is_stale_after_any_later_write() {
    let g = GraphBuilder::new();
    let cache = g.state("cache", DType::F32, [8, 2]);
    let (rows, ids) = (g.input("rows", DType::F32, [1, 2]), g.input("ids", DType::I32, [1]));
    let first = cache.set_rows(rows, ids);
    let second = first.set_rows(rows, ids).named("second");
    second.set_rows(rows, ids).named("third");
    second.silu();
    assert_eq!(g.finish().unwrap_err().kind, GraphErrorKind::Stale { input: 0, writer: "third".into() });
}

#[test]
fn parts_of_a_state_are_copied_to_parts_that_do_not_overlap_them() {
    let copied = |from: usize, to: usize| {
        let g = GraphBuilder::new();
        let cache = g.state("cache", DType::F32, [8, 2]);
        g.output("y", cache.slice(0, from, 2).copy_into(cache.slice(0, to, 2)));
        g.finish().is_ok()
    };
    for (from, to) in [(0, 2), (2, 0), (1, 6), (6, 1)] {
        assert!(copied(from, to), "rows from {from} to {to}");
    }
    for (from, to) in [(0, 0), (0, 1), (4, 3), (6, 5)] {
        assert!(!copied(from, to), "rows from {from} to {to}");
    }
}

#[test]
fn strided_rows_are_refused_by_the_number_of_their_input() {
    let error = build(|g, x| {
        let spans = g.input("spans", DType::I32, [2, 4]).transpose();
        x.attention(x, x, AttentionOptions::new().spans(spans))
    });
    assert_eq!(error.unwrap_err(), GraphErrorKind::Strided { input: 3 });
    let error = build(|g, x| {
        let (mask, spans) =
            (g.input("mask", DType::F32, [4, 4]), g.input("spans", DType::I32, [2, 4]).transpose());
        x.attention(x, x, AttentionOptions::new().mask(mask).spans(spans))
    });
    assert_eq!(error.unwrap_err(), GraphErrorKind::Strided { input: 4 });
}

#[test]
fn types_are_floats_integers_or_blocks() {
    use DType::*;
    let named = |is: fn(DType) -> bool| DType::all().filter(|dtype| is(*dtype)).collect::<Vec<_>>();
    assert_eq!(named(DType::is_float), [F32, F16, F64, BF16]);
    assert_eq!(named(DType::is_integer), [I8, I16, I32, I64]);
    for dtype in DType::all() {
        let kinds = [dtype.is_float(), dtype.is_integer(), dtype.is_quantized()];
        assert_eq!(kinds.into_iter().filter(|is| *is).count(), 1, "{dtype}");
    }
}

#[test]
fn data_knows_its_length_and_its_owner() {
    let data = Data::from(vec![1u8, 2, 3, 4]);
    let empty = data.slice(4, 0).unwrap();
    assert_eq!((data.len(), data.is_empty(), empty.len(), empty.is_empty()), (4, false, 0, true));
    let (left, right) = (data.slice(0, 2).unwrap(), data.slice(2, 2).unwrap());
    assert!(left.same(&data.slice(0, 2).unwrap()));
    assert!(!left.same(&right) && !left.same(&data.slice(0, 1).unwrap()));
    assert!(!left.same(&Data::from(vec![1u8, 2])), "equal bytes of another owner");
}

#[test]
fn fingerprints_tell_optional_inputs_apart_and_are_stable() {
    let soft_max = |mask: bool, sinks: bool| {
        let g = GraphBuilder::new();
        // A mask and the sinks may have the same shape where there are as many heads as columns.
        let (x, extra) = (g.input("x", DType::F32, [6, 1, 6]), g.input("extra", DType::F32, [6]));
        g.output("y", x.soft_max(1.0, mask.then_some(extra), sinks.then_some(extra)));
        g.finish().unwrap().fingerprint()
    };
    assert_ne!(soft_max(true, false), soft_max(false, true));
    let attention = build(|g, x| {
        let (mask, spans) = (g.input("m", DType::F32, [4, 4]), g.input("s", DType::I32, [4, 2]));
        x.attention(x, x, AttentionOptions::new().mask(mask).spans(spans))
    });
    let recorded = [soft_max(true, false), soft_max(true, true), attention.unwrap().fingerprint()];
    assert_eq!(
        recorded.map(|fingerprint| fingerprint.to_string()),
        [
            "272baacde3a7cd6fa89ee21d317be7aa",
            "6cd79c5a418d94a54604ca1c6dfa391a",
            "74303018bdc3bc9519c6c89118058ebd"
        ]
    );
}

#[test]
fn messages_drawings_and_scopes_name_what_they_mean() {
    let error = build(|_, x| x.reshape([5])).unwrap_err();
    assert!(matches!(error, GraphErrorKind::Shape(_)));
    let g = GraphBuilder::new();
    g.input("x", DType::F32, [2]).add(g.input("y", DType::F32, [3]));
    let message = g.finish().unwrap_err().to_string();
    assert!(message.ends_with("; inputs: x F32 [2], y F32 [3]"), "{message}");
    let g = GraphBuilder::new();
    g.state("s", DType::Q4_0, [33]);
    let message = g.finish().unwrap_err().to_string();
    assert!(message.starts_with("state \"s\" Q4_0 [33]"), "{message}");

    let graph = build(|g, x| {
        let layer = g.scope("blk.1");
        let product = layer.scope("ffn").mul_mat(x, x);
        let square = product.sqr();
        drop(layer);
        square.sqrt()
    })
    .unwrap();
    let scopes: Vec<&str> = graph.nodes().iter().map(|node| graph.scope(node.output())).collect();
    assert_eq!(scopes, ["blk.1.ffn", "blk.1", ""]);
    let doubled: Vec<_> =
        graph.to_dot().lines().map(str::to_owned).filter(|l| l.contains("peripheries")).collect();
    assert_eq!(doubled.len(), 1);
    assert!(doubled[0].starts_with("  t3 [shape=ellipse, peripheries=2,"), "{doubled:?}");
}

#[test]
fn another_order_keeps_data_flow_and_barriers() {
    let graph = build(|g, x| {
        let cache = g.state("cache", DType::F32, [4, 6]);
        let (a, b) = (x.sqr().named("a"), x.sqrt().named("b"));
        let read = cache.scale(2.0).named("read");
        let written = a.copy_into(cache).named("write");
        b.add(read).add(written)
    })
    .unwrap();
    let [a, b, read, write, sum, y] = std::array::from_fn(NodeId::from_index);
    let names = |graph: &Graph| graph.node_ids().map(|node| graph.node_name(node)).collect::<Vec<_>>();
    let other = graph.with_order(&[&[], &[b], &[read, a], &[], &[sum, write, y]]).unwrap();
    assert_eq!(names(&other)[..3], ["b", "read", "a"]);
    assert_eq!(other.barriers(), [NodeId::from_index(1), NodeId::from_index(3)]);
    assert_ne!(other.fingerprint(), graph.fingerprint());
    for (node, id) in other.node_ids().zip(other.nodes()) {
        assert_eq!(other[id.output()].node(), Some(node));
    }
    let refused = |order: &[NodeId]| graph.with_order(&[order]).unwrap_err();
    assert!(matches!(refused(&[a, b, read, write, sum]), OrderError::Missing { .. }));
    assert!(matches!(refused(&[a, a, b, read, write, sum, y]), OrderError::Twice { .. }));
    assert!(matches!(refused(&[NodeId::from_index(6)]), OrderError::Unknown { node: 6, count: 6 }));
    assert!(matches!(refused(&[sum, a, b, read, write, y]), OrderError::BeforeInput { .. }));
    assert!(matches!(refused(&[a, b, write, read, sum, y]), OrderError::AcrossWrite { .. }));
}

#[test]
fn barriers_separate_nodes() {
    let graph = build(|g, x| {
        g.barrier();
        let y = x.sqr();
        g.barrier();
        g.barrier();
        let y = y.sqrt();
        g.barrier();
        y
    })
    .unwrap();
    assert_eq!(graph.barriers(), [NodeId::from_index(1)]);
}
