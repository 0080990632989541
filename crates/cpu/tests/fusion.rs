//! Fused steps give the same bits as unfused ones: chains of elementwise, row and matmul operations over shapes around
//! the boundaries of the work partition, on several numbers of threads, again and again, since a race shows only
//! sometimes.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_cpu::Backend;
use quadriga_graph::{
    DType, ExpertWeights, Gate, Graph, GraphBuilder, Op, SelectExperts, Shape, Unary, Value, Weight, blocks,
};
use quadriga_runtime::{Scheduler, Session};

fn session(graph: &Graph, threads: usize, fuse: bool) -> Session {
    let backend = Backend::builder().threads(threads).fuse(fuse).build().unwrap();
    Scheduler::new(backend).plan(graph).unwrap().session().unwrap()
}

/// Runs a graph of the input `x` and the output `y` on fused and unfused sessions.
fn compare(name: &str, graph: &Graph, elements: usize, rounds: usize) {
    let mut unfused = session(graph, 1, false);
    let mut fused: Vec<(usize, Session)> = [1, 2, 3, 5].map(|t| (t, session(graph, t, true))).into();
    for round in 0..rounds {
        let x: Vec<f32> = (0..elements).map(|i| ((i + 7 * round) % 97) as f32 * 0.03 - 1.0).collect();
        let run = |session: &mut Session| -> Vec<u32> {
            session.run(&[("x", &x)]).unwrap();
            session.read::<f32>("y").unwrap().into_iter().map(f32::to_bits).collect()
        };
        let right = run(&mut unfused);
        for (threads, session) in &mut fused {
            assert!(run(session) == right, "{name}: {threads} threads, round {round}");
        }
    }
}

fn graph(shape: impl Into<Shape>, build: impl for<'g> FnOnce(Value<'g>) -> Value<'g>) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, shape);
    g.output("y", build(x));
    g.finish().unwrap()
}

#[test]
fn pieces_of_a_long_row_and_rows_of_another_shape_are_not_fused_across_their_boundaries() {
    // 12,288 elements are pieces of 8,192 and 4,096 elementwise, and two rows of 6,144 to the norm.
    let norm = graph([12288], |x| x.unary(Unary::GeluErf).reshape([2, 6144]).rms_norm(1e-5));
    compare("gelu, then norm", &norm, 12288, 60);
    let softmax = graph([20000], |x| x.unary(Unary::GeluErf).reshape([4, 5000]).rms_norm(1e-5));
    compare("gelu, then norm of four rows", &softmax, 20000, 30);
    let back = graph([2, 6144], |x| x.rms_norm(1e-5).reshape([12288]).unary(Unary::GeluErf));
    compare("norm, then gelu", &back, 12288, 60);
}

/// The number of elements as `rows` rows, or as one.
fn rows_of(elements: usize, rows: usize) -> [usize; 2] {
    if elements.is_multiple_of(rows) { [rows, elements / rows] } else { [1, elements] }
}

#[test]
fn random_chains_give_the_bits_of_unfused_steps() {
    let seed = 31;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let sizes = [4096, 8192, 8190, 12288, 16384, 16386, 18432, 24576, 30720, 49152, 65536, 65550];
    for case in 0..60 {
        let mut pick = |count: usize| (rng.next_u64() % count as u64) as usize;
        let elements = sizes[pick(sizes.len())];
        let [first, next] = [0, 1].map(|_| rows_of(elements, [1, 2, 3, 4, 6, 12, 15, 16, 24][pick(9)]));
        let steps: Vec<usize> = (0..2 + pick(4)).map(|_| pick(7)).collect();
        let shapes: Vec<[usize; 2]> = steps.iter().map(|_| if pick(2) == 0 { first } else { next }).collect();
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, first);
        let mut y = x;
        for (step, shape) in steps.iter().zip(&shapes) {
            y = y.reshape(*shape);
            y = match step {
                0 => y.unary(Unary::GeluErf),
                1 => y.rms_norm(1e-5),
                2 => y.add(x.reshape(*shape)),
                3 => y.silu(),
                4 => y.soft_max(1.0, None, None),
                5 => g.apply(Op::Gated { gate: Gate::Swiglu, swapped: false }, &[y, x.reshape(*shape)]),
                _ => y.mul(x.reshape(*shape)),
            };
        }
        g.output("y", y);
        let name = format!("case {case}: {elements} elements, steps {steps:?}, shapes {shapes:?}");
        compare(&name, &g.finish().unwrap(), elements, 6);
    }
}

/// A feed-forward of experts with biases on top of a norm, and the residual.
fn mixture(rng: &mut Rng, dtype: DType, tokens: usize, gate: Gate) -> Graph {
    let (experts, used, width, hidden) = (6, 3, 256, 96);
    let g = GraphBuilder::new();
    let weight = |rng: &mut Rng, name: &str, dtype: DType, dims: [usize; 3]| {
        let values: Vec<f32> = (0..dims.iter().product()).map(|_| rng.uniform(-0.1, 0.1) as f32).collect();
        let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
        blocks::quantize(dtype, &values, &mut bytes).unwrap();
        g.weight(name, Weight::with_data(dtype, dims, bytes))
    };
    let x = g.input("x", DType::F32, [tokens, width]);
    let router = weight(rng, "router", DType::F32, [1, experts, width]).reshape([experts, width]);
    let normed = x.rms_norm(1e-5);
    let logits = router.mul_mat(normed);
    let ids = logits.select_experts(SelectExperts::ungrouped(used));
    let weights = logits.expert_weights(ids, ExpertWeights { softmax: true, normalize: false, scale: 1.0 });
    let mut product = |name: &str, x, n, k| {
        let w = weight(rng, name, dtype, [experts, n, k]);
        let bias = weight(rng, &format!("{name}_bias"), DType::F32, [1, experts, n]).reshape([experts, n]);
        w.mul_mat_id(x, ids).add_id(bias, ids)
    };
    let rows = normed.reshape([tokens, 1, width]);
    let (gates, ups) = (product("gate", rows, hidden, width), product("up", rows, hidden, width));
    let downs = product("down", gates.gated(gate, ups), width, hidden);
    g.output("y", x.add(downs.sum_experts(weights)));
    g.finish().unwrap()
}

#[test]
fn experts_give_the_bits_of_unfused_steps() {
    let seed = 33;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for dtype in [DType::Q4_0, DType::Q8_0, DType::F16, DType::F32] {
        for (tokens, gate) in
            [(1, Gate::Swiglu), (1, Gate::SwigluOai), (2, Gate::Swiglu), (33, Gate::SwigluOai)]
        {
            let graph = mixture(&mut rng, dtype, tokens, gate);
            compare(&format!("{tokens} tokens, {dtype} {gate:?}"), &graph, tokens * 256, 4);
        }
    }
}
