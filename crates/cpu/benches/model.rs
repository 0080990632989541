//! A profile of a small language model: the shapes of SmolLM2-135M with synthetic Q4_1 weights, one token and
//! many tokens at a time.
//!
//! `cargo bench -p quadriga-cpu --bench model -- [threads] [tokens] [context]`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a benchmark")]

use std::sync::Arc;
use std::time::Instant;

use quadriga_conformance::Rng;
use quadriga_cpu::Backend;
use quadriga_graph::{Attention, DType, Gate, Graph, GraphBuilder, Op, Pairing, Rope, Weight};
use quadriga_runtime::{Scheduler, Session};

const WIDTH: usize = 576;
const HEAD: usize = 64;
const HEADS: usize = 9;
const GROUPS: usize = 3;
const HIDDEN: usize = 1536;
const VOCABULARY: usize = 49152;
const LAYERS: usize = 30;

fn weight(rng: &mut Rng, dtype: DType, shape: [usize; 2]) -> Weight {
    let mut bytes = vec![0; dtype.row_bytes(shape[0] * shape[1]).unwrap()];
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        // Scale and minimum: small f16 numbers.
        block[..4].copy_from_slice(&[0, 0x18, 0, 0x98]);
        block[4..].iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
    }
    Weight::with_data(dtype, shape, bytes)
}

fn model(tokens: usize, context: usize) -> Graph {
    let mut rng = Rng::new(1);
    let g = GraphBuilder::new();
    let ids = g.input("ids", DType::I32, [tokens]);
    let positions = g.input("positions", DType::I32, [tokens]);
    let spans = g.input("spans", DType::I32, [tokens, 2]);
    let last = g.input("last", DType::I32, [1]);
    let ones = vec![1.0_f32; WIDTH];
    let embedding = g.weight("embedding", weight(&mut rng, DType::Q4_1, [VOCABULARY, WIDTH]));
    let mut x = embedding.get_rows(ids);
    for layer in 0..LAYERS {
        let mut w = |name: &str, shape| {
            g.weight(&format!("blk.{layer}.{name}"), weight(&mut rng, DType::Q4_1, shape))
        };
        let (wq, wk) = (w("q", [HEADS * HEAD, WIDTH]), w("k", [GROUPS * HEAD, WIDTH]));
        let (wv, wo) = (w("v", [GROUPS * HEAD, WIDTH]), w("o", [WIDTH, HEADS * HEAD]));
        let (gate, up, down) =
            (w("gate", [HIDDEN, WIDTH]), w("up", [HIDDEN, WIDTH]), w("down", [WIDTH, HIDDEN]));
        let norm = |name: &str| {
            let weight = Weight::with_data(DType::F32, [WIDTH], ones.as_slice());
            g.weight(&format!("blk.{layer}.{name}"), weight)
        };
        let cache =
            |name: &str| g.state(&format!("blk.{layer}.{name}"), DType::F16, [context, GROUPS * HEAD]);
        let n = x.rms_norm(1e-5).mul(norm("norm1"));
        let rope = Rope::new(HEAD, Pairing::Half, 1e4);
        let q = g.mul_mat(wq, n).reshape([tokens, HEADS, HEAD]).rope(rope, positions, None);
        let k = g.mul_mat(wk, n).reshape([tokens, GROUPS, HEAD]).rope(rope, positions, None);
        let v = g.mul_mat(wv, n);
        let keys = cache("keys").set_rows(k.reshape([tokens, GROUPS * HEAD]), positions);
        let values = cache("values").set_rows(v, positions);
        let (keys, values) = (
            keys.reshape([context, GROUPS, HEAD]).permute([1, 0, 2]),
            values.reshape([context, GROUPS, HEAD]).permute([1, 0, 2]),
        );
        let attention =
            Attention { scale: 0.125, soft_cap: None, mask: false, spans: true, sinks: false, pages: false };
        let a = g.apply(Op::Attention(attention), &[q.permute([1, 0, 2]), keys, values, spans]);
        x = x.add(g.mul_mat(wo, a.reshape([tokens, HEADS * HEAD])));
        let n = x.rms_norm(1e-5).mul(norm("norm2"));
        let h = g
            .apply(Op::Gated { gate: Gate::Swiglu, swapped: false }, &[g.mul_mat(gate, n), g.mul_mat(up, n)]);
        x = x.add(g.mul_mat(down, h));
    }
    g.output("scores", g.mul_mat(embedding, x.get_rows(last).rms_norm(1e-5)));
    g.finish().unwrap()
}

fn run(session: &mut Session, tokens: usize, first: usize) {
    let ids: Vec<i32> = (0..tokens).map(|i| (i * 31 % VOCABULARY) as i32).collect();
    let positions: Vec<i32> = (0..tokens).map(|i| (first + i) as i32).collect();
    let spans: Vec<i32> = positions.iter().flat_map(|p| [0, p + 1]).collect();
    let last = [tokens as i32 - 1];
    session.run(&[("ids", &ids), ("positions", &positions), ("spans", &spans), ("last", &last)]).unwrap();
    let _: Vec<f32> = session.read("scores").unwrap();
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|a| a.parse::<usize>().ok());
    let threads = arguments.next().unwrap_or(2);
    let only = arguments.next();
    let context = arguments.next().unwrap_or(1024);
    let backend = Arc::new(Backend::builder().threads(threads).profile(true).build().unwrap());
    for tokens in only.map_or(vec![1, 512], |only| vec![only]) {
        let graph = model(tokens, context);
        let devices = [Arc::clone(&backend) as Arc<dyn quadriga_runtime::Backend>];
        let mut session = Scheduler::new(devices).plan(&graph).unwrap().session().unwrap();
        let first = if tokens == 1 { context / 2 } else { 0 };
        for _ in 0..2 {
            run(&mut session, tokens, first);
        }
        let _ = backend.take_profile();
        let repeats = if tokens < 8 { 50 } else { 5 };
        let mut times: Vec<f64> = (0..repeats)
            .map(|_| {
                let start = Instant::now();
                run(&mut session, tokens, first);
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{tokens} tokens, context {context}, {threads} threads, {}: {:.3} ms, {:.1} tokens/s (median of {repeats})\n{}",
            backend.isa(),
            median * 1e3,
            tokens as f64 / median,
            backend.take_profile()
        );
    }
}
