//! The speed of a mixture of experts on a CUDA device, against a dense feed-forward that reads as many bytes of weights:
//! the shapes of Qwen3-30B-A3B (8 of 128 experts) and of gpt-oss-20b (4 of 32), with synthetic weights. Layers have
//! weights of their own, and a router, as in a model: `experts [ordinal] [tokens] [layers]`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a measurement")]

use std::sync::Arc;
use std::time::Instant;

use quadriga_graph::{DType, ExpertWeights, Gate, Graph, GraphBuilder, SelectExperts, Shape, Value, Weight};
use quadriga_runtime::{Backend, Scheduler, Session};

/// The sizes of a mixture.
#[derive(Clone, Copy)]
struct Mixture {
    name: &'static str,
    dtype: DType,
    experts: usize,
    used: usize,
    width: usize,
    hidden: usize,
    /// gpt-oss's: biases, its own activation, weights by softmax of the selected logits.
    oai: bool,
}

const QWEN: Mixture = Mixture {
    name: "Qwen3-30B-A3B Q4_0",
    dtype: DType::Q4_0,
    experts: 128,
    used: 8,
    width: 2048,
    hidden: 768,
    oai: false,
};
const MIXTURES: [Mixture; 4] = [
    QWEN,
    Mixture { name: "Qwen3-30B-A3B Q4_K", dtype: DType::Q4_K, ..QWEN },
    Mixture { name: "Qwen3-30B-A3B Q8_0", dtype: DType::Q8_0, ..QWEN },
    Mixture {
        name: "gpt-oss-20b MXFP4",
        dtype: DType::MXFP4,
        experts: 32,
        used: 4,
        width: 2880,
        hidden: 2880,
        oai: true,
    },
];

/// A weight of pseudo-random quants with small scales.
fn weight<const N: usize>(dtype: DType, shape: [usize; N], seed: usize) -> Weight
where
    Shape: From<[usize; N]>,
{
    let elements: usize = shape.iter().product();
    let mut state = seed as u32 * 2 + 1;
    // Some blocks, repeated.
    let mut blocks = vec![0; 4099 * dtype.block_bytes()];
    for byte in &mut blocks {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = (state >> 24) as u8;
    }
    for block in blocks.chunks_exact_mut(dtype.block_bytes()) {
        match dtype {
            DType::MXFP4 => block[0] = 118,
            DType::Q4_K => block[..4].copy_from_slice(&[0, 0x08, 0, 0x08]),
            _ => block[..2].copy_from_slice(&[0, 0x10]),
        }
    }
    let mut bytes = blocks.repeat(dtype.row_bytes(elements).unwrap().div_ceil(blocks.len()));
    bytes.truncate(dtype.row_bytes(elements).unwrap());
    Weight::with_data(dtype, shape, bytes)
}

fn floats<const N: usize>(shape: [usize; N], seed: usize) -> Weight
where
    Shape: From<[usize; N]>,
{
    let count = shape.iter().product();
    let value = |i: usize| {
        let mixed = (i as u64 + 1 + ((seed as u64) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    Weight::with_data(DType::F32, shape, (0..count).map(value).collect::<Vec<f32>>().as_slice())
}

impl Mixture {
    fn route<'g>(&self, logits: Value<'g>) -> (Value<'g>, Value<'g>) {
        let select = SelectExperts::ungrouped(self.used);
        let of = |softmax| ExpertWeights { softmax, normalize: !softmax, scale: 1.0 };
        let probabilities = if self.oai { logits } else { logits.soft_max(1.0, None, None) };
        let ids = probabilities.select_experts(select);
        (ids, probabilities.expert_weights(ids, of(self.oai)))
    }

    fn mixture(&self, tokens: usize, layers: usize) -> Graph {
        let Mixture { experts, used, width, hidden, dtype, .. } = *self;
        let g = GraphBuilder::new();
        let mut x = g.input("x", DType::F32, [tokens, width]);
        for layer in 0..layers {
            let w = |name: &str, n, k| {
                g.weight(&format!("{name}{layer}"), weight(dtype, [experts, n, k], layer + n))
            };
            let (gate, up, down) =
                (w("gate", hidden, width), w("up", hidden, width), w("down", width, hidden));
            let bias = |name: &str, n| g.weight(&format!("{name}{layer}"), floats([experts, n], n));
            let normed = x.rms_norm(1e-5).mul(g.weight(&format!("norm{layer}"), floats([width], layer)));
            let router = g.weight(&format!("router{layer}"), floats([experts, width], layer + 7));
            let (ids, weights) = self.route(router.mul_mat(normed));
            let rows = normed.reshape([tokens, 1, width]);
            let (mut gates, mut ups) = (gate.mul_mat_id(rows, ids), up.mul_mat_id(rows, ids));
            let mut activation = Gate::Swiglu;
            if self.oai {
                activation = Gate::SwigluOai;
                gates = gates.add_id(bias("gate_bias", hidden), ids);
                ups = ups.add_id(bias("up_bias", hidden), ids);
            }
            let mut downs = down.mul_mat_id(gates.gated(activation, ups), ids);
            if self.oai {
                downs = downs.add_id(bias("down_bias", width), ids);
            }
            debug_assert_eq!(downs.shape().dims4(), [1, tokens, used, width]);
            x = x.add(downs.sum_experts(weights));
        }
        g.output("y", x);
        g.finish().unwrap()
    }

    fn dense(&self, tokens: usize, layers: usize) -> Graph {
        let Mixture { used, width, hidden, dtype, .. } = *self;
        let g = GraphBuilder::new();
        let mut x = g.input("x", DType::F32, [tokens, width]);
        for layer in 0..layers {
            let w = |name: &str, n, k| g.weight(&format!("{name}{layer}"), weight(dtype, [n, k], layer));
            let (gate, up) = (w("gate", used * hidden, width), w("up", used * hidden, width));
            let down = w("down", width, used * hidden);
            let normed = x.rms_norm(1e-5).mul(g.weight(&format!("norm{layer}"), floats([width], layer)));
            x = x.add(down.mul_mat(gate.mul_mat(normed).gated(Gate::Swiglu, up.mul_mat(normed))));
        }
        g.output("y", x);
        g.finish().unwrap()
    }
}

fn session(backend: &Arc<dyn Backend>, graph: &Graph) -> Session {
    Scheduler::new([Arc::clone(backend)]).plan(graph).unwrap().session().unwrap()
}

/// Seconds of a run, the least of some.
fn seconds(session: &mut Session, tokens: usize, width: usize) -> f64 {
    let x: Vec<f32> = (0..tokens * width).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect();
    session.set("x", &x).unwrap();
    let mut least = f64::INFINITY;
    for _ in 0..if tokens < 16 { 40 } else { 10 } {
        let start = Instant::now();
        session.run(&[]).unwrap();
        let _: Vec<f32> = session.read("y").unwrap();
        least = least.min(start.elapsed().as_secs_f64());
    }
    least
}

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|a| a.parse::<usize>().ok());
    let ordinal = numbers.next().unwrap_or(0) as u32;
    let (only, layers) = (numbers.next(), numbers.next().unwrap_or(8));
    let backend: Arc<dyn Backend> = match quadriga_cuda::Backend::new(ordinal) {
        Ok(backend) => Arc::new(backend),
        Err(error) => {
            eprintln!("no device to measure: {error}");
            return;
        }
    };
    for mixture in MIXTURES {
        for tokens in only.map_or(vec![1, 4, 512], |only| vec![only]) {
            let times = [mixture.mixture(tokens, layers), mixture.dense(tokens, layers)]
                .map(|graph| seconds(&mut session(&backend, &graph), tokens, mixture.width) / layers as f64);
            let bytes = mixture.dtype.row_bytes(3 * mixture.used * mixture.width * mixture.hidden).unwrap();
            println!(
                "{}, {tokens} tokens: {:.1} µs a layer, {:.0} GB/s; dense {:.1} µs",
                mixture.name,
                times[0] * 1e6,
                bytes as f64 / times[0] / 1e9,
                times[1] * 1e6
            );
        }
    }
}
