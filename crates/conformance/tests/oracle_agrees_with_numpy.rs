//! A two-layer llama with random weights: the oracle's logits equal those of an independent NumPy implementation.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::{Fixture, Oracle};
use quadriga_graph::{AttentionOptions, DType, Graph, GraphBuilder, Pairing, Rope, Value, Weight};

const LAYERS: usize = 2;
const DIM: usize = 48;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD: usize = 8;
const HIDDEN: usize = 80;
const VOCAB: usize = 40;
/// The length of the KV cache.
const LENGTH: usize = 16;

/// The content of `fixtures/two_layer_llama.bin`, written by `make_two_layer_llama.py`.
struct Model {
    tokens: Vec<i32>,
    weights: Vec<u8>,
    logits: Vec<f64>,
}

fn read_model() -> Model {
    let mut fixture = Fixture::new(include_bytes!("fixtures/two_layer_llama.bin").to_vec());
    let count = fixture.u32() as usize;
    let tokens = fixture.i32s(count);
    let weights = fixture.bytes(fixture.remaining() - 8 * count * VOCAB).to_vec();
    Model { tokens, weights, logits: fixture.f64s(count * VOCAB) }
}

#[derive(Clone, Copy, Debug)]
enum Path {
    /// The fused attention operation, with spans.
    OnePass,
    /// Separate matrix multiplications, mask and softmax.
    StepByStep,
}

/// The graph of a batch of `count` tokens. The cache has a row per position.
fn build(weights: &[u8], count: usize, path: Path) -> Graph {
    let g = GraphBuilder::new();
    let mut rest = weights;
    let mut weight = |name: String, rows: usize, columns: usize| {
        let (mine, others) = rest.split_at(4 * rows * columns);
        rest = others;
        g.weight(&name, Weight::with_data(DType::F32, [rows, columns], mine.to_vec()))
    };
    let tokens = g.input("tokens", DType::I32, [count]);
    let positions = g.input("positions", DType::I32, [count]);
    let spans = g.input("spans", DType::I32, [count, 2]);
    let mask = g.input("mask", DType::F32, [count, LENGTH]);
    let rope = Rope::new(HEAD, Pairing::Adjacent, 10_000.0);
    let scale = 1.0 / (HEAD as f32).sqrt();
    let mut x = weight("token_embd".into(), VOCAB, DIM).get_rows(tokens);
    for i in 0..LAYERS {
        let mut weight = |name: &str, rows, columns| weight(format!("blk.{i}.{name}"), rows, columns);
        let h = x.rms_norm(1e-5).mul(weight("attn_norm", 1, DIM));
        let q = weight("attn_q", HEADS * HEAD, DIM).mul_mat(h).reshape([count, HEADS, HEAD]);
        let k = weight("attn_k", KV_HEADS * HEAD, DIM).mul_mat(h).reshape([count, KV_HEADS, HEAD]);
        let v = weight("attn_v", KV_HEADS * HEAD, DIM).mul_mat(h);
        let q = q.rope(rope, positions, None).permute([1, 0, 2]);
        let k = k.rope(rope, positions, None).reshape([count, KV_HEADS * HEAD]);
        let k = cached(&g, &format!("blk.{i}.k"), k, positions);
        let v = cached(&g, &format!("blk.{i}.v"), v, positions);
        let attended = match path {
            Path::OnePass => q.attention(k, v, AttentionOptions::new().spans(spans).scale(scale)),
            Path::StepByStep => {
                let weights = k.mul_mat(q).soft_max(scale, Some(mask), None);
                v.transpose().cont().mul_mat(weights).permute([1, 0, 2]).cont()
            }
        };
        let attended = attended.reshape([count, HEADS * HEAD]);
        x = x.add(weight("attn_output", DIM, HEADS * HEAD).mul_mat(attended));
        let h = x.rms_norm(1e-5).mul(weight("ffn_norm", 1, DIM));
        let gate = weight("ffn_gate", HIDDEN, DIM).mul_mat(h);
        let up = weight("ffn_up", HIDDEN, DIM).mul_mat(h);
        x = x.add(weight("ffn_down", DIM, HIDDEN).mul_mat(gate.swiglu(up)));
    }
    let x = x.rms_norm(1e-5).mul(weight("output_norm".into(), 1, DIM));
    g.output("logits", weight("output".into(), VOCAB, DIM).mul_mat(x));
    g.finish().unwrap()
}

/// Writes rows to a KV cache and returns the cache as `[heads, positions, HEAD]`.
fn cached<'g>(g: &'g GraphBuilder, name: &str, rows: Value<'g>, positions: Value<'g>) -> Value<'g> {
    let cache = g.state(name, DType::F32, [LENGTH, KV_HEADS * HEAD]).set_rows(rows, positions);
    cache.reshape([LENGTH, KV_HEADS, HEAD]).permute([1, 0, 2])
}

/// The logits of all tokens, computed `step` tokens at a time.
fn logits(model: &Model, step: usize, path: Path) -> Vec<f64> {
    let graph = build(&model.weights, step, path);
    let mut oracle = Oracle::new(&graph).unwrap();
    let mut logits = Vec::new();
    let positions: Vec<i32> = (0..model.tokens.len() as i32).collect();
    for (tokens, positions) in model.tokens.chunks(step).zip(positions.chunks(step)) {
        oracle.set_i32("tokens", tokens).unwrap();
        oracle.set_i32("positions", positions).unwrap();
        oracle.set_i32("spans", &positions.iter().flat_map(|p| [0, p + 1]).collect::<Vec<_>>()).unwrap();
        let sees = |position: i32, key: usize| if key as i32 <= position { 0.0 } else { f32::NEG_INFINITY };
        let mask = positions.iter().flat_map(|p| (0..LENGTH).map(|key| sees(*p, key)));
        oracle.set_f32("mask", &mask.collect::<Vec<_>>()).unwrap();
        oracle.run().unwrap();
        logits.extend(oracle.read("logits").unwrap());
    }
    logits
}

#[test]
fn a_two_layer_model_has_the_logits_of_numpy() {
    let model = read_model();
    for path in [Path::OnePass, Path::StepByStep] {
        for step in [model.tokens.len(), 1] {
            let found = logits(&model, step, path);
            assert_eq!(found.len(), model.logits.len());
            let size = model.logits.iter().fold(0f64, |most, l| most.max(l.abs()));
            for (found, right) in found.iter().zip(&model.logits) {
                assert!((found - right).abs() < 1e-11 * size, "{path:?} by {step}: {found} is not {right}");
            }
        }
    }
}
