//! A small model of the llama family, from token to logits: close to the oracle, and the same bit for bit whatever the
//! number of threads, with or without fusion.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Placed, bytes_of_i32, floats};
use quadriga_conformance::{Oracle, Rng};
use quadriga_cpu::Backend;
use quadriga_cpu::isa::Isa;
use quadriga_graph::{Attention, DType, Gate, Graph, GraphBuilder, Op, Pairing, Rope, Weight, blocks};

const WIDTH: usize = 96;
const HEAD: usize = 32;
const HEADS: usize = 3;
const GROUPS: usize = 1;
const HIDDEN: usize = 160;
const CONTEXT: usize = 40;
const VOCABULARY: usize = 70;

fn random_weight(rng: &mut Rng, dtype: DType, shape: [usize; 2]) -> Weight {
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| rng.uniform(-0.3, 0.3) as f32).collect();
    let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
    blocks::quantize(dtype, &values, &mut bytes).unwrap();
    Weight::with_data(dtype, shape, bytes)
}

fn model(tokens: usize, dtype: DType, cache: DType) -> Graph {
    let mut rng = Rng::new(7);
    let g = GraphBuilder::new();
    let ids = g.input("ids", DType::I32, [tokens]);
    let positions = g.input("positions", DType::I32, [tokens]);
    let spans = g.input("spans", DType::I32, [tokens, 2]);
    let embedding = g.weight("embedding", random_weight(&mut rng, dtype, [VOCABULARY, WIDTH]));
    let mut x = embedding.get_rows(ids);
    for layer in 0..2 {
        let _scope = g.scope(&format!("blk.{layer}"));
        let mut weight = |name: &str, shape| {
            g.weight(&format!("blk.{layer}.{name}"), random_weight(&mut rng, dtype, shape))
        };
        let [wq, wk] = [("q", HEADS), ("k", GROUPS)].map(|(name, h)| weight(name, [h * HEAD, WIDTH]));
        let wv = weight("v", [GROUPS * HEAD, WIDTH]);
        let wo = weight("o", [WIDTH, HEADS * HEAD]);
        let [gate, up] = ["gate", "up"].map(|name| weight(name, [HIDDEN, WIDTH]));
        let down = weight("down", [WIDTH, HIDDEN]);
        let norms = ["norm1", "norm2"].map(|name| {
            let values: Vec<f32> = (0..WIDTH).map(|_| rng.uniform(0.5, 1.5) as f32).collect();
            let name = format!("blk.{layer}.{name}");
            g.weight(&name, Weight::with_data(DType::F32, [WIDTH], values.as_slice()))
        });
        let values: Vec<f32> = (0..GROUPS * HEAD).map(|_| rng.uniform(-0.5, 0.5) as f32).collect();
        let bias = Weight::with_data(DType::F32, [GROUPS * HEAD], values.as_slice());
        let bias = g.weight(&format!("blk.{layer}.bias"), bias);
        let caches = ["keys", "values"]
            .map(|name| g.state(&format!("blk.{layer}.{name}"), cache, [GROUPS, CONTEXT, HEAD]));
        let n = x.rms_norm(1e-5).mul(norms[0]);
        let rope = Rope::new(HEAD, Pairing::Adjacent, 1e4);
        let q = g.mul_mat(wq, n).reshape([tokens, HEADS, HEAD]).rope(rope, positions, None);
        let k = g.mul_mat(wk, n).reshape([tokens, GROUPS, HEAD]).rope(rope, positions, None);
        let v = g.mul_mat(wv, n).add(bias).reshape([tokens, GROUPS, HEAD]);
        let heads_first = [1, 0, 2];
        let keys = caches[0].set_rows(k.permute(heads_first), positions.reshape([1, tokens]));
        let values = caches[1].set_rows(v.permute(heads_first), positions.reshape([1, tokens]));
        let attention =
            Attention { scale: 0.17, soft_cap: None, mask: false, spans: true, sinks: false, pages: false };
        let a = g.apply(Op::Attention(attention), &[q.permute(heads_first), keys, values, spans]);
        x = x.add(g.mul_mat(wo, a.reshape([tokens, HEADS * HEAD])));
        let n = x.rms_norm(1e-5).mul(norms[1]);
        let h = g
            .apply(Op::Gated { gate: Gate::Swiglu, swapped: false }, &[g.mul_mat(gate, n), g.mul_mat(up, n)]);
        x = x.add(g.mul_mat(down, h));
    }
    g.output("scores", g.mul_mat(embedding, x.rms_norm(1e-5)));
    g.finish().unwrap()
}

fn inputs(tokens: usize, first: usize) -> [(&'static str, Vec<i32>); 3] {
    let ids = (0..tokens).map(|i| ((first + i) * 13 % VOCABULARY) as i32).collect();
    let positions: Vec<i32> = (0..tokens).map(|i| (first + i) as i32).collect();
    let spans = positions.iter().flat_map(|p| [0, p + 1]).collect();
    [("ids", ids), ("positions", positions), ("spans", spans)]
}

fn error(found: &[f32], right: &[f64]) -> f64 {
    assert_eq!(found.len(), right.len());
    let (mut error, mut energy) = (0.0, 0.0);
    for (f, r) in found.iter().zip(right) {
        error += (f64::from(*f) - r).powi(2);
        energy += r * r;
    }
    error / energy
}

fn run(graph: &Graph, backend: &Backend, packed: bool, runs: &[[(&'static str, Vec<i32>); 3]]) -> Vec<f32> {
    let mut placed = Placed::new(graph, backend, packed).unwrap();
    for inputs in runs {
        for (name, values) in inputs {
            placed.set(name, &bytes_of_i32(values)).unwrap();
        }
        placed.run().unwrap();
    }
    floats(&placed.read(graph.output("scores").unwrap()))
}

#[test]
fn a_model_agrees_with_the_oracle_whatever_the_threads_and_fusion() {
    for (tokens, dtype, cache) in [
        (1, DType::Q8_0, DType::F16),
        (1, DType::F32, DType::F32),
        (17, DType::Q4_0, DType::F16),
        (5, DType::F16, DType::Q8_0),
    ] {
        let graph = model(tokens, dtype, cache);
        let runs = [inputs(tokens, 0), inputs(tokens, tokens)];
        let mut oracle = Oracle::new(&graph).unwrap();
        for inputs in &runs {
            for (name, values) in inputs {
                oracle.set_i32(name, values).unwrap();
            }
            oracle.run().unwrap();
        }
        let right = oracle.read("scores").unwrap();
        for isa in Isa::available() {
            let mut first: Option<Vec<u32>> = None;
            for (threads, fuse) in [(1, true), (2, true), (3, true), (8, true), (1, false), (2, false)] {
                let backend = Backend::builder().isa(isa).threads(threads).fuse(fuse).build().unwrap();
                let scores = run(&graph, &backend, true, &runs);
                let nmse = error(&scores, &right);
                // With quantized weights, activations are rounded to 15 bits, or to bf16 for many rows on AMX, in each of
                // fourteen matmuls.
                let limit = match dtype {
                    DType::F32 | DType::F16 => 1e-9,
                    _ if isa.amx().is_some() && tokens > 12 => 2e-3,
                    _ => 1e-4,
                };
                assert!(nmse < limit, "{isa} {threads} threads, fuse {fuse}, {dtype}: {nmse:e}");
                let bits: Vec<u32> = scores.iter().map(|v| v.to_bits()).collect();
                let same = first.get_or_insert_with(|| bits.clone()) == &bits;
                assert!(same, "{isa} {threads} threads, fuse {fuse}, {dtype}: other bits");
            }
            let backend = Backend::builder().isa(isa).threads(2).build().unwrap();
            let nmse = error(&run(&graph, &backend, false, &runs), &right);
            // Only AMX rounds attention to bf16 tiles, and never over an f32 cache.
            let limit = if isa.amx().is_some() && cache != DType::F32 { 1e-3 } else { 1e-5 };
            assert!(nmse < limit, "{isa}, plain weights, {dtype}: {nmse:e}");
        }
    }
}

#[test]
fn fusion_changes_no_bit_where_tensors_share_memory() {
    use quadriga_runtime::{Scheduler, Values};
    for (tokens, dtype) in [(1, DType::Q8_0), (1, DType::F32), (3, DType::Q4_0), (1, DType::Q4_1)] {
        let graph = model(tokens, dtype, DType::F16);
        for isa in Isa::available() {
            let run = |threads, fuse| -> Vec<u32> {
                let backend = Backend::builder().isa(isa).threads(threads).fuse(fuse).build().unwrap();
                let scheduler = Scheduler::new(backend);
                let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
                for first in 0..3 {
                    let inputs = inputs(tokens, first * tokens);
                    let inputs = inputs.each_ref().map(|(name, values)| (*name, values as &dyn Values));
                    session.run(&inputs).unwrap();
                }
                session.read::<f32>("scores").unwrap().into_iter().map(f32::to_bits).collect()
            };
            let right = run(1, false);
            for threads in [1, 2, 5] {
                assert!(run(threads, true) == right, "{isa}, {tokens} × {dtype}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_weight_is_relaid_when_a_later_graph_needs_another_layout() {
    use quadriga_graph::BuildError;
    use quadriga_runtime::{Scheduler, Session};
    // A matmul packs the weight; a view of it needs the plain layout.
    let graph = |viewed: bool| -> Result<Graph, BuildError> {
        let g = GraphBuilder::new();
        let w = g.weight("w", random_weight(&mut Rng::new(3), DType::Q8_0, [64, 64]));
        let y = g.mul_mat(w, g.input("x", DType::F32, [4, 64]));
        g.output("y", if viewed { y.add(w.view([4, 64], w.strides(), 0).cast(DType::F32)) } else { y });
        g.finish()
    };
    let x: Vec<f32> = (0..4 * 64).map(|i| (i % 7) as f32 - 3.0).collect();
    let backend = Backend::builder().threads(2).build().unwrap();
    let mut session = Session::new(&Scheduler::new(backend)).unwrap();
    let mut run = |key: u64, viewed| {
        session.prepare(key, || graph(viewed)).unwrap();
        session.run(&[("x", &x)]).unwrap();
        session.read::<f32>("y").unwrap()
    };
    let (first, other, again) = (run(0, false), run(1, true), run(0, false));
    let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far(&first, &again) < 0.05, "{}", far(&first, &again));
    assert!(far(&first, &other) > 0.05, "the other graph adds something");
}
