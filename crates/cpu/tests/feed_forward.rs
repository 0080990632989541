//! The feed-forward of a mixture of experts as one step: the bits of unfused steps whatever the number of threads, and errors
//! that neither deadlock nor spoil the next run.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_cpu::Backend;
use quadriga_graph::{DType, Gate, Graph, GraphBuilder, Unary, Value, Weight, blocks};
use quadriga_runtime::{Scheduler, Session};

/// What a feed-forward consists of.
#[derive(Clone, Copy, Debug)]
struct FeedForward {
    dtypes: [DType; 2],
    tokens: usize,
    used: usize,
    /// Experts that the router knows, and experts that are here.
    experts: [usize; 2],
    width: usize,
    hidden: usize,
    activation: Activation,
    biases: bool,
    /// Whether each expert reads a row of its own.
    own_rows: bool,
    /// Whether the result is added to the input.
    residual: bool,
    /// Whether the hidden activations are an output, too.
    keeps_hidden: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Activation {
    Gated(Gate),
    /// Gate and up are one matrix.
    Halves(Gate),
    /// Up alone.
    Unary(Unary),
}

const ACTIVATIONS: [Activation; 7] = [
    Activation::Gated(Gate::Swiglu),
    Activation::Gated(Gate::SwigluOai),
    Activation::Gated(Gate::Geglu),
    Activation::Gated(Gate::Reglu),
    Activation::Halves(Gate::Swiglu),
    Activation::Halves(Gate::Geglu),
    Activation::Unary(Unary::Relu),
];

fn weight<'g>(g: &'g GraphBuilder, rng: &mut Rng, name: &str, dtype: DType, dims: [usize; 3]) -> Value<'g> {
    let count = dims.iter().product();
    let mut bytes = vec![0; dtype.row_bytes(count).unwrap()];
    if matches!(dtype, DType::Q4_K | DType::Q6_K | DType::MXFP4) {
        // Random quants, and scales that are small numbers.
        bytes.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            match dtype {
                DType::Q4_K => block[..4].copy_from_slice(&[0, 0x10, 0, 0x90]),
                DType::Q6_K => *block.last_mut().unwrap() = 0x08,
                _ => block[0] = 118,
            }
        }
    } else {
        let values: Vec<f32> = (0..count).map(|_| rng.uniform(-0.1, 0.1) as f32).collect();
        blocks::quantize(dtype, &values, &mut bytes).unwrap();
    }
    g.weight(name, Weight::with_data(dtype, dims, bytes))
}

impl FeedForward {
    fn random(rng: &mut Rng) -> FeedForward {
        let types = [
            DType::Q4_0,
            DType::Q8_0,
            DType::Q4_K,
            DType::Q6_K,
            DType::MXFP4,
            DType::F16,
            DType::BF16,
            DType::F32,
        ];
        let mut below = |count: usize| rng.below(count);
        let dtypes = [types[below(8)], types[below(8)]];
        let known = 1 + below(12);
        let used = 1 + below(known.min(8));
        let here = if below(3) == 0 { 1 + below(known) } else { known };
        let (width, hidden) = (256 * (1 + below(2)), [256, 512, 768][below(3)]);
        // Rows that are no whole groups, where types allow it.
        let odd = dtypes.iter().all(|dtype| dtype.block_len() == 1) && below(2) == 0;
        let odd = |n: usize| if odd { n - 29 } else { n };
        FeedForward {
            dtypes,
            tokens: [1, 1, 1, 2, 3, 4, 8][below(7)],
            used,
            experts: [known, here],
            width: odd(width),
            hidden: odd(hidden),
            activation: ACTIVATIONS[below(ACTIVATIONS.len())],
            biases: below(2) == 0,
            own_rows: below(4) == 0,
            residual: below(3) > 0,
            keeps_hidden: below(8) == 0,
        }
    }

    /// A graph with the inputs `x`, `ids` and `weights`; biases are for `biased` experts.
    fn graph(&self, rng: &mut Rng, biased: usize) -> Graph {
        let FeedForward { tokens, used, experts: [_, experts], width, hidden, .. } = *self;
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [tokens, width]);
        let (ids, weights) =
            (g.input("ids", DType::I32, [tokens, used]), g.input("weights", DType::F32, [tokens, used]));
        let mut matmul = |name: &str, dtype: DType, x, n: usize, k: usize| {
            let made = weight(&g, rng, name, dtype, [experts, n, k]).mul_mat_id(x, ids);
            if !self.biases {
                return made;
            }
            let bias =
                weight(&g, rng, &format!("{name}_bias"), DType::F32, [1, biased, n]).reshape([biased, n]);
            made.add_id(bias, ids)
        };
        let normed = x.rms_norm(1e-5);
        let mut rows = normed.reshape([tokens, 1, width]);
        if self.own_rows {
            rows = rows.repeat([tokens, used, width]).mul(weights.reshape([tokens, used, 1]));
        }
        let [first, last] = self.dtypes;
        let inner = match self.activation {
            Activation::Gated(gate) => {
                let gates = matmul("gate", first, rows, hidden, width);
                gates.gated(gate, matmul("up", first, rows, hidden, width))
            }
            Activation::Halves(gate) => {
                matmul("gate_up", first, rows, 2 * hidden, width).gated_halves(gate, false)
            }
            Activation::Unary(unary) => matmul("up", first, rows, hidden, width).unary(unary),
        };
        if self.keeps_hidden {
            g.output("hidden", inner);
        }
        let mut y = matmul("down", last, inner, width, hidden).sum_experts(weights);
        if self.residual {
            y = x.add(y);
        }
        g.output("y", y);
        g.finish().unwrap()
    }

    /// The experts of each token, of which some are not here.
    fn ids(&self, rng: &mut Rng) -> Vec<i32> {
        let [known, here] = self.experts;
        let mut ids = Vec::new();
        for _ in 0..self.tokens {
            let mut of_token: Vec<usize> = (0..known).collect();
            for place in 0..self.used {
                of_token.swap(place, place + rng.below(known - place));
            }
            let number = |id: &usize| if *id < here { *id as i32 } else { -1 };
            ids.extend(of_token[..self.used].iter().map(number));
        }
        ids
    }

    fn floats(count: usize, rng: &mut Rng) -> Vec<f32> {
        (0..count).map(|_| rng.uniform(-1.0, 1.0) as f32).collect()
    }
}

struct Running {
    backend: Arc<Backend>,
    session: Session,
}

impl Running {
    fn new(graph: &Graph, threads: usize, fuse: bool) -> Running {
        let backend = Arc::new(Backend::builder().threads(threads).fuse(fuse).profile(true).build().unwrap());
        let session = Scheduler::new(Arc::clone(&backend)).plan(graph).unwrap().session().unwrap();
        Running { backend, session }
    }

    fn run(&mut self, x: &[f32], ids: &[i32], weights: &[f32]) -> Result<Vec<u32>, String> {
        self.session.set("x", x).unwrap();
        self.session.set("ids", ids).unwrap();
        self.session.set("weights", weights).unwrap();
        self.session.run(&[]).map_err(|error| error.to_string())?;
        let mut found = self.session.read::<f32>("y").unwrap();
        if let Ok(hidden) = self.session.read::<f32>("hidden") {
            found.extend(hidden);
        }
        Ok(found.into_iter().map(f32::to_bits).collect())
    }

    /// The steps since the last call, by label.
    fn steps(&self) -> Vec<(String, u64)> {
        self.backend.take_profile().0.into_iter().map(|(label, totals)| (label, totals.steps)).collect()
    }
}

#[test]
fn random_feed_forwards_give_the_bits_of_unfused_steps() {
    let seed = std::env::var("QUADRIGA_SEED").map_or(71, |text| text.parse().unwrap());
    let cases = std::env::var("QUADRIGA_GRAPHS").map_or(80, |text| text.parse().unwrap());
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let (mut fused_cases, mut eligible) = ([0, 0], 0);
    for case in 0..cases {
        let shape = FeedForward::random(&mut rng);
        let graph = shape.graph(&mut rng, shape.experts[1]);
        let mut plain = Running::new(&graph, 1, false);
        let mut fused: Vec<(usize, Running)> =
            [1, 2, 3, 5, 8].map(|threads| (threads, Running::new(&graph, threads, true))).into();
        for round in 0..3 {
            let x = FeedForward::floats(shape.tokens * shape.width, &mut rng);
            let weights = FeedForward::floats(shape.tokens * shape.used, &mut rng);
            let ids = shape.ids(&mut rng);
            let right = plain.run(&x, &ids, &weights).unwrap();
            for (threads, running) in &mut fused {
                let found = running.run(&x, &ids, &weights).unwrap();
                assert!(found == right, "case {case}, round {round}, {threads} threads: {shape:?}, {ids:?}");
            }
        }
        let is_one = |(label, _): &(String, u64)| label.starts_with("expert feed-forward");
        fused_cases[usize::from(shape.keeps_hidden)] += usize::from(fused[1].1.steps().iter().any(is_one));
        eligible += usize::from(!shape.keeps_hidden);
    }
    let [of_eligible, of_others] = fused_cases;
    assert!(of_eligible * 10 >= eligible * 9, "{of_eligible} of {eligible} feed-forwards were one step");
    assert_eq!(of_others, 0, "results that are read later are computed by steps of their own");
}

/// The shape of a mixture's decode.
fn decode(activation: Activation) -> FeedForward {
    FeedForward {
        dtypes: [DType::Q4_0; 2],
        tokens: 1,
        used: 4,
        experts: [8; 2],
        width: 512,
        hidden: 256,
        activation,
        biases: true,
        own_rows: false,
        residual: true,
        keeps_hidden: false,
    }
}

#[test]
fn a_decoded_token_has_one_step_for_all_matmuls_the_sum_and_the_residual() {
    let mut rng = Rng::new(5);
    for activation in ACTIVATIONS {
        for tokens in [1, 8] {
            let shape = FeedForward { tokens, ..decode(activation) };
            let mut running = Running::new(&shape.graph(&mut rng, 8), 2, true);
            let (x, weights) = (vec![0.5; tokens * 512], vec![0.25; tokens * 4]);
            running.run(&x, &shape.ids(&mut rng), &weights).unwrap();
            let steps = running.steps();
            let one = steps.iter().find(|(label, _)| label.starts_with("expert feed-forward")).unwrap();
            assert!(one.0.ends_with("sum_experts + add"), "{activation:?}: {}", one.0);
            let total: u64 = steps.iter().map(|(_, count)| count).sum();
            assert_eq!(total, 2, "the norm and the feed-forward, not {steps:?}");
        }
    }
}

#[test]
fn an_expert_without_a_bias_fails_the_run_in_the_middle_and_the_next_run_is_right() {
    let seed = 9;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for tokens in [1, 3] {
        // Biases of six experts for matrices of eight: a chunk of the seventh fails while others compute.
        let shape = FeedForward { tokens, ..decode(Activation::Gated(Gate::Swiglu)) };
        let graph = shape.graph(&mut rng, 6);
        let (x, weights) = (FeedForward::floats(tokens * 512, &mut rng), vec![0.25; tokens * 4]);
        let good: Vec<i32> = [5, 1, 0, 3].repeat(tokens);
        let right = Running::new(&graph, 1, false).run(&x, &good, &weights).unwrap();
        for threads in [1, 2, 3, 8] {
            let mut running = Running::new(&graph, threads, true);
            for round in 0..20 {
                let mut bad = good.clone();
                let place = round % bad.len();
                bad[place] = if round % 5 == 4 { 8 } else { 6 + (round % 2) as i32 };
                let error = running.run(&x, &bad, &weights).unwrap_err();
                assert!(error.contains("is outside 0.."), "{error}");
                let found = running.run(&x, &good, &weights).unwrap();
                assert!(found == right, "{threads} threads, {tokens} tokens, round {round}");
            }
        }
    }
}

#[test]
fn the_forecast_of_a_plan_has_the_scratch_memory_of_feed_forwards() {
    let mut rng = Rng::new(13);
    for (tokens, fuse) in [(1, true), (8, true), (8, false), (40, true)] {
        let shape = FeedForward { tokens, ..decode(Activation::Gated(Gate::Swiglu)) };
        let graph = shape.graph(&mut rng, 8);
        let cpu = Arc::new(Backend::builder().threads(3).fuse(fuse).build().unwrap());
        let plan = Scheduler::new(Arc::clone(&cpu)).plan(&graph).unwrap();
        let session = plan.session().unwrap();
        let mut running = Running { backend: Arc::clone(&cpu), session };
        running.run(&vec![0.5; tokens * 512], &shape.ids(&mut rng), &vec![0.25; tokens * 4]).unwrap();
        let bytes = &plan.bytes()[0];
        assert_eq!(bytes.work as usize, cpu.work_bytes(), "{tokens} tokens: {bytes:?}");
        assert_eq!(bytes.total() as usize, cpu.allocated_bytes(), "{tokens} tokens: {bytes:?}");
    }
}

#[test]
fn the_number_of_threads_can_change_between_runs() {
    let mut rng = Rng::new(11);
    let shape = FeedForward { tokens: 2, ..decode(Activation::Gated(Gate::Swiglu)) };
    let graph = shape.graph(&mut rng, 8);
    let (x, weights, ids) = (FeedForward::floats(1024, &mut rng), vec![0.25; 8], shape.ids(&mut rng));
    let mut running = Running::new(&graph, 1, true);
    let right = running.run(&x, &ids, &weights).unwrap();
    for threads in [8, 2, 5, 1, 3] {
        running.backend.set_threads(threads).unwrap();
        assert!(running.run(&x, &ids, &weights).unwrap() == right, "{threads} threads");
    }
}
