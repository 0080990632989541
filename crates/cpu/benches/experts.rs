//! The feed-forward of a mixture of experts against a dense one that reads as many bytes of weights: the shapes of
//! Qwen3-30B-A3B (8 of 128 experts, Q4_K) and of gpt-oss-20b (4 of 32, MXFP4), with synthetic weights.
//!
//! Every layer of the mixture uses other experts of the same weights, so that both read all of them once in a run.
//!
//! `cargo bench -p quadriga-cpu --bench experts -- [threads] [tokens] [profile]`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a benchmark")]

use std::sync::Arc;
use std::time::Instant;

use quadriga_cpu::Backend;
use quadriga_graph::{DType, Gate, Graph, GraphBuilder, Shape, Value, Weight};
use quadriga_runtime::{Scheduler, Session};

/// The sizes of a mixture.
#[derive(Clone, Copy)]
struct Mixture {
    name: &'static str,
    dtype: DType,
    experts: usize,
    used: usize,
    width: usize,
    hidden: usize,
    gate: Gate,
    biases: bool,
}

const MIXTURES: [Mixture; 2] = [
    Mixture {
        name: "Qwen3-30B-A3B",
        dtype: DType::Q4_K,
        experts: 128,
        used: 8,
        width: 2048,
        hidden: 768,
        gate: Gate::Swiglu,
        biases: false,
    },
    Mixture {
        name: "gpt-oss-20b",
        dtype: DType::MXFP4,
        experts: 32,
        used: 4,
        width: 2880,
        hidden: 2880,
        gate: Gate::SwigluOai,
        biases: true,
    },
];

impl Mixture {
    /// Layers that use each expert once in a run of one token.
    fn layers(&self) -> usize {
        self.experts / self.used
    }

    fn weight<const N: usize>(&self, shape: [usize; N]) -> Weight
    where
        Shape: From<[usize; N]>,
    {
        let rows: usize = shape.iter().product();
        let mut bytes = vec![0x33; self.dtype.row_bytes(rows).unwrap()];
        if self.dtype == DType::Q4_K {
            // Scale and minimum: small f16 numbers.
            for block in bytes.chunks_exact_mut(self.dtype.block_bytes()) {
                block[..4].copy_from_slice(&[0, 0x10, 0, 0x90]);
            }
        } else {
            bytes.chunks_exact_mut(self.dtype.block_bytes()).for_each(|block| block[0] = 118);
        }
        Weight::with_data(self.dtype, shape, bytes)
    }

    /// Bytes of weights that one token reads in all layers.
    fn bytes(&self) -> usize {
        3 * self.dtype.row_bytes(self.experts * self.width * self.hidden).unwrap()
    }

    fn mixture(&self, tokens: usize) -> Graph {
        let Mixture { experts, used, width, hidden, .. } = *self;
        let g = GraphBuilder::new();
        let mut x = g.input("x", DType::F32, [tokens, 1, width]);
        let weights = g.input("weights", DType::F32, [tokens, used]);
        let w = |name: &str, n, k| g.weight(name, self.weight([experts, n, k]));
        let (gate, up, down) = (w("gate", hidden, width), w("up", hidden, width), w("down", width, hidden));
        let bias = |name: &str, n: usize| {
            g.weight(name, Weight::with_data(DType::F32, [experts, n], vec![0.1_f32; experts * n].as_slice()))
        };
        let biases = self
            .biases
            .then(|| [bias("gate_bias", hidden), bias("up_bias", hidden), bias("down_bias", width)]);
        for layer in 0..self.layers() {
            let ids = g.input(&format!("ids{layer}"), DType::I32, [tokens, used]);
            let normed = x.rms_norm(1e-5);
            let gates = biased(gate.mul_mat_id(normed, ids), biases, 0, ids);
            let ups = biased(up.mul_mat_id(normed, ids), biases, 1, ids);
            let downs = biased(down.mul_mat_id(gates.gated(self.gate, ups), ids), biases, 2, ids);
            x = x.add(downs.sum_experts(weights).reshape([tokens, 1, width]));
        }
        g.output("y", x);
        g.finish().unwrap()
    }

    fn dense(&self, tokens: usize) -> Graph {
        let Mixture { used, width, hidden, .. } = *self;
        let g = GraphBuilder::new();
        let mut x = g.input("x", DType::F32, [tokens, width]);
        for layer in 0..self.layers() {
            let w = |name: &str, n, k| g.weight(&format!("{name}{layer}"), self.weight([n, k]));
            let (gate, up) = (w("gate", used * hidden, width), w("up", used * hidden, width));
            let down = w("down", width, used * hidden);
            let normed = x.rms_norm(1e-5);
            x = x.add(g.mul_mat(down, g.mul_mat(gate, normed).gated(self.gate, g.mul_mat(up, normed))));
        }
        g.output("y", x);
        g.finish().unwrap()
    }

    /// The experts of a layer's tokens: those of one token are distinct, and each layer's first token has its own.
    fn ids(&self, layer: usize, tokens: usize) -> Vec<i32> {
        let id = |t: usize, u: usize| ((layer + 5 * t) * self.used + u * (1 + 2 * (t % 3))) % self.experts;
        (0..tokens).flat_map(|t| (0..self.used).map(move |u| id(t, u) as i32)).collect()
    }

    fn run(&self, session: &mut Session, tokens: usize, mixture: bool) -> f64 {
        let x = vec![0.5_f32; tokens * self.width];
        let weights = vec![1.0 / self.used as f32; tokens * self.used];
        let ids: Vec<(String, Vec<i32>)> =
            (0..self.layers()).map(|layer| (format!("ids{layer}"), self.ids(layer, tokens))).collect();
        session.set("x", &x).unwrap();
        if mixture {
            session.set("weights", &weights).unwrap();
            for (name, ids) in &ids {
                session.set(name, ids).unwrap();
            }
        }
        let start = Instant::now();
        session.run(&[]).unwrap();
        start.elapsed().as_secs_f64()
    }
}

/// Adds the biases of the experts, if there are any.
fn biased<'g>(x: Value<'g>, biases: Option<[Value<'g>; 3]>, index: usize, ids: Value<'g>) -> Value<'g> {
    biases.map_or(x, |biases| x.add_id(biases[index], ids))
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let number = |i: usize| arguments.get(i).and_then(|a| a.parse::<usize>().ok());
    let (threads, tokens) = (number(0).unwrap_or(2), number(1).unwrap_or(1));
    let profile = arguments.get(2).is_some_and(|a| a == "profile");
    let backend = Arc::new(Backend::builder().threads(threads).profile(profile).build().unwrap());
    for mixture in MIXTURES {
        let mut sessions = [true, false].map(|of_experts| {
            let graph = if of_experts { mixture.mixture(tokens) } else { mixture.dense(tokens) };
            let devices = [Arc::clone(&backend) as Arc<dyn quadriga_runtime::Backend>];
            Scheduler::new(devices).plan(&graph).unwrap().session().unwrap()
        });
        let mut least = [f64::INFINITY; 2];
        // They alternate, so that both are measured under the same conditions.
        for _ in 0..if tokens < 8 { 30 } else { 5 } {
            for (i, session) in sessions.iter_mut().enumerate() {
                least[i] = least[i].min(mixture.run(session, tokens, i == 0));
            }
        }
        let speed = least.map(|seconds| mixture.bytes() as f64 / seconds / 1e9);
        println!(
            "{}, {tokens} tokens, {threads} threads, {}: {:.2} ms, {:.2} GB/s; dense {:.2} ms, {:.2} GB/s: {:.0} %",
            mixture.name,
            backend.isa(),
            least[0] * 1e3,
            speed[0],
            least[1] * 1e3,
            speed[1],
            least[1] / least[0] * 100.0
        );
        if profile {
            let _ = backend.take_profile();
            mixture.run(&mut sessions[0], tokens, true);
            println!("{}", backend.take_profile());
        }
    }
}
