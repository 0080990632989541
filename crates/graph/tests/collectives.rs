//! Collectives: what their rules accept, what distinguishes them, and the bytes that they send.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{BuildError, DType, Graph, GraphBuilder, Op, Ranks, Value};

const OF_THREE: Ranks = Ranks { group: 0, rank: 1, count: 3 };

fn graph(
    dtype: DType,
    dims: &[usize],
    build: impl for<'g> Fn(Value<'g>) -> Value<'g>,
) -> Result<Graph, BuildError> {
    let g = GraphBuilder::new();
    let x = g.input("x", dtype, quadriga_graph::Shape::new(dims).unwrap());
    g.output("y", build(x));
    g.finish()
}

fn shape(graph: &Graph) -> Vec<usize> {
    graph[graph.output("y").unwrap()].shape().dims().to_vec()
}

#[test]
fn results_have_the_columns_of_all_ranks_or_of_this_one() {
    let f32 = |build: for<'g> fn(Value<'g>) -> Value<'g>| shape(&graph(DType::F32, &[4, 5], build).unwrap());
    assert_eq!(f32(|x| x.all_reduce(OF_THREE)), [4, 5]);
    assert_eq!(f32(|x| x.all_gather(OF_THREE, [2, 5, 0])), [4, 7]);
    assert_eq!(f32(|x| x.reduce_scatter(OF_THREE, [2, 3, 0])), [4, 3]);
    assert_eq!(f32(|x| x.reduce_scatter(OF_THREE, [5, 0, 0])), [4, 0], "a rank may have none");
    assert_eq!(f32(|x| x.broadcast(OF_THREE, 1)), [4, 5]);
    assert_eq!(f32(|x| x.send(OF_THREE, 2, 7, &[x])), [4, 5]);
    assert_eq!(f32(|x| x.receive(OF_THREE, (0, 7), DType::F16, [2, 9])), [2, 9]);
    // Data that is only moved may have any type without blocks.
    for dtype in [DType::F16, DType::BF16, DType::I32] {
        assert!(graph(dtype, &[4, 5], |x| x.all_gather(OF_THREE, [1, 5, 1])).is_ok());
        assert!(graph(dtype, &[4, 5], |x| x.broadcast(OF_THREE, 0)).is_ok());
    }
}

#[test]
fn ranks_types_and_columns_that_cannot_be_right_are_refused() {
    type Build = for<'g> fn(Value<'g>) -> Value<'g>;
    let wrong: [(Build, &str); 10] = [
        (|x| x.all_reduce(Ranks { group: 0, rank: 3, count: 3 }), "no rank 3 of 3"),
        (|x| x.all_gather(OF_THREE, [5, 5]), "columns of 2 ranks for 3"),
        (|x| x.all_gather(OF_THREE, [5, 4, 5]), "4 columns on rank 1"),
        (|x| x.reduce_scatter(OF_THREE, [5, 4, 5]), "14 columns"),
        (|x| x.all_gather(OF_THREE, [usize::MAX, 5, 5]), "overflows"),
        (|x| x.broadcast(OF_THREE, 3), "no rank 3"),
        (|x| x.send(OF_THREE, 1, 0, &[]), "no peer 1"),
        (|x| x.receive(OF_THREE, (3, 0), DType::F32, [2]), "no peer 3"),
        (|x| x.receive(OF_THREE, (0, 0), DType::Q8_0, [32]), "blocks"),
        (|x| x.transpose().all_reduce(OF_THREE), "contiguous"),
    ];
    for (build, text) in wrong {
        let error = graph(DType::F32, &[4, 5], build).unwrap_err().to_string();
        assert!(error.contains(text), "{error} does not contain {text}");
    }
    for dtype in [DType::F16, DType::I32] {
        assert!(graph(dtype, &[4, 5], |x| x.all_reduce(OF_THREE)).is_err(), "only F32 is summed");
        assert!(graph(dtype, &[4, 5], |x| x.reduce_scatter(OF_THREE, [5, 0, 0])).is_err());
    }
    assert!(graph(DType::Q8_0, &[4, 32], |x| x.broadcast(OF_THREE, 0)).is_err());
    assert!(graph(DType::F32, &[2, 4, 5], |x| x.all_gather(OF_THREE, [5, 5, 5])).is_err(), "matrices only");
}

#[test]
fn everything_that_ranks_must_agree_on_is_in_the_fingerprint() {
    type Build = for<'g> fn(Value<'g>) -> Value<'g>;
    let all: [Build; 10] = [
        |x| x.all_reduce(OF_THREE),
        |x| x.all_reduce(Ranks { group: 1, ..OF_THREE }),
        |x| x.all_reduce(Ranks { rank: 0, ..OF_THREE }),
        |x| x.all_reduce(Ranks { count: 4, ..OF_THREE }),
        |x| x.broadcast(OF_THREE, 0),
        |x| x.broadcast(OF_THREE, 2),
        |x| x.all_gather(OF_THREE, [3, 5, 4]),
        |x| x.all_gather(OF_THREE, [4, 5, 3]),
        |x| x.send(OF_THREE, 2, 7, &[]),
        |x| x.send(OF_THREE, 2, 8, &[]),
    ];
    let prints: Vec<_> =
        all.iter().map(|build| graph(DType::F32, &[4, 5], build).unwrap().fingerprint()).collect();
    for (at, print) in prints.iter().enumerate() {
        assert_eq!(*print, graph(DType::F32, &[4, 5], all[at]).unwrap().fingerprint());
        assert!(!prints[..at].contains(print), "{at}");
    }
}

#[test]
fn bytes_are_those_of_ring_algorithms() {
    type Build = for<'g> fn(Value<'g>) -> Value<'g>;
    let sent = |build: Build| {
        let graph = graph(DType::F32, &[3, 8], build).unwrap();
        let node = graph.node_ids().last().unwrap();
        let Op::Collective(collective) = graph[node].op() else { panic!("no collective") };
        collective.sent_bytes(&graph[graph.inputs(node)[0]], &graph[graph[node].output()])
    };
    assert_eq!(sent(|x| x.all_reduce(OF_THREE)), 2 * 96 * 2 / 3);
    assert_eq!(sent(|x| x.all_reduce(Ranks { group: 0, rank: 0, count: 1 })), 0);
    assert_eq!(sent(|x| x.all_gather(OF_THREE, [8, 8, 8])), 288 * 2 / 3);
    assert_eq!(sent(|x| x.reduce_scatter(OF_THREE, [4, 2, 2])), 96 * 2 / 3);
    assert_eq!(sent(|x| x.broadcast(OF_THREE, 0)), 96);
    assert_eq!(sent(|x| x.broadcast(OF_THREE, 2)), 0, "the last of a ring passes nothing on");
    assert_eq!(sent(|x| x.send(OF_THREE, 0, 1, &[])), 96);
    assert_eq!(sent(|x| x.receive(OF_THREE, (0, 1), DType::F32, [3, 8])), 0);
}
