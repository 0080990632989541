//! Skipping the rows of inactive neurons changes no bit, whatever the threads, the fusion and the share of active neurons.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_cpu::Backend;
use quadriga_cpu::isa::Isa;
use quadriga_graph::{DType, Graph, GraphBuilder, Unary, Value, Weight, blocks};
use quadriga_runtime::{Scheduler, Session};

fn session(graph: &Graph, isa: Isa, threads: usize, fuse: bool, skip: bool) -> Session {
    let backend = Backend::builder().isa(isa).threads(threads).fuse(fuse).skip(skip).build().unwrap();
    Scheduler::new(backend).plan(graph).unwrap().session().unwrap()
}

fn weight<'g>(g: &'g GraphBuilder, name: &str, dtype: DType, dims: [usize; 2], rng: &mut Rng) -> Value<'g> {
    let values: Vec<f32> = (0..dims[0] * dims[1]).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
    let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
    blocks::quantize(dtype, &values, &mut bytes).unwrap();
    g.weight(name, Weight::with_data(dtype, dims, bytes))
}

/// A feed-forward with a bias that decides how many neurons are active.
fn feed_forward(dtype: DType, [tokens, neurons, width]: [usize; 3], rng: &mut Rng) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [tokens, width]);
    let bias = g.input("bias", DType::F32, [neurons]);
    let normed = x.rms_norm(1e-5);
    let gates = weight(&g, "gate", dtype, [neurons, width], rng).mul_mat(normed);
    let gates = gates.add(bias).unary(Unary::Relu);
    let inner = weight(&g, "up", dtype, [neurons, width], rng).mul_mat_sparse(normed, gates, None);
    g.output("inner", inner);
    g.output("y", weight(&g, "down_t", dtype, [neurons, width], rng).axpy_sparse(inner).add(x));
    g.finish().unwrap()
}

fn bits(session: &mut Session, name: &str) -> Vec<u32> {
    session.read::<f32>(name).unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn skipping_inactive_neurons_changes_no_bit() {
    let seed = 19;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for isa in Isa::available() {
        for (case, dtype) in [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q8_0, DType::Q5_1]
            .into_iter()
            .enumerate()
        {
            let shape = [[1, 37, 32], [1, 1500, 192], [3, 200, 288], [70, 90, 64]][(case + rng.below(4)) % 4];
            let [tokens, neurons, width] = shape;
            let graph = feed_forward(dtype, shape, &mut rng);
            let mut plain = session(&graph, isa, 1, false, false);
            let mut others = [(1, true, true), (2, false, true), (3, true, true), (4, true, false)]
                .map(|(threads, fuse, skip)| session(&graph, isa, threads, fuse, skip));
            // No neuron is active with the first shift, every one with the last.
            for shift in [-1e6_f32, -8.0, 0.0, 1e6] {
                let x: Vec<f32> = (0..tokens * width).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
                let bias = vec![shift; neurons];
                plain.run(&[("x", &x), ("bias", &bias)]).unwrap();
                let (inner, right) = (bits(&mut plain, "inner"), bits(&mut plain, "y"));
                let active = inner.iter().filter(|bits| **bits != 0).count();
                match shift {
                    -1e6 => assert_eq!(active, 0),
                    1e6 => assert_eq!(active, tokens * neurons),
                    _ => {}
                }
                for other in &mut others {
                    other.run(&[("x", &x), ("bias", &bias)]).unwrap();
                    let same = bits(other, "inner") == inner && bits(other, "y") == right;
                    assert!(same, "{isa} {dtype} {shape:?} shift {shift}");
                }
            }
        }
    }
}

/// A result is written in any case: its memory holds what another operation has left there.
#[test]
fn products_with_rows_of_no_columns_are_zero() {
    for (tokens, neurons) in [(1, 9), (2, 5), (7, 130)] {
        let g = GraphBuilder::new();
        let (x, none) =
            (g.input("x", DType::F32, [tokens, neurons]), g.input("none", DType::F32, [tokens, 0]));
        let sums = x.scale(3.0).sum_rows();
        let w = g.weight("w", Weight::with_data(DType::F32, [neurons, 0], Vec::new()));
        g.output("y", w.mul_mat_sparse(none, x.add(sums), None).scale(2.0));
        let mut session = session(&g.finish().unwrap(), Isa::detect(), 2, true, true);
        let x: Vec<f32> = (0..tokens * neurons).map(|i| 1.0 + i as f32).collect();
        session.run(&[("x", &x), ("none", &Vec::<f32>::new())]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), vec![0.0; tokens * neurons]);
    }
}

/// The rows of a large matrix are added by groups of active rows, which threads and skipping must not change.
#[test]
fn rows_of_a_large_matrix_are_added_in_the_same_groups_by_any_threads() {
    let seed = 21;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let (neurons, width) = (1100, 4096);
    for dtype in [DType::F16, DType::Q4_0] {
        let g = GraphBuilder::new();
        let factors = g.input("factors", DType::F32, [1, neurons]);
        let x = g.input("x", DType::F32, [1, width]);
        g.output("y", weight(&g, "w", dtype, [neurons, width], &mut rng).axpy_sparse(factors).add(x));
        let graph = g.finish().unwrap();
        let bytes = graph.data(graph.leaf("w").unwrap()).unwrap().bytes();
        let mut exact = vec![0.0_f32; neurons * width];
        blocks::dequantize(dtype, &bytes, &mut exact).unwrap();
        let isa = Isa::detect();
        let mut sessions =
            [(1, false, false), (1, true, true), (2, true, false), (3, false, true), (16, true, true)]
                .map(|(threads, fuse, skip)| session(&graph, isa, threads, fuse, skip));
        let x: Vec<f32> = (0..width).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
        // None, one, fewer than groups, some and all neurons are active; and all in one place.
        for active in [0.0, 0.001, 0.01, 0.2, 1.0, -1.0] {
            let is_active = |n: usize, chance: f64| if active < 0.0 { n / 40 == 3 } else { chance < active };
            let factors: Vec<f32> = (0..neurons)
                .map(
                    |n| if is_active(n, rng.uniform(0.0, 1.0)) { rng.uniform(-1.0, 1.0) as f32 } else { 0.0 },
                )
                .collect();
            let mut found = sessions.iter_mut().map(|session| {
                session.run(&[("factors", &factors), ("x", &x)]).unwrap();
                bits(session, "y")
            });
            let first = found.next().unwrap();
            assert!(found.all(|other| other == first), "{dtype}, {active} active");
            for (c, found) in first.iter().enumerate() {
                let sum: f64 =
                    (0..neurons).map(|n| f64::from(factors[n]) * f64::from(exact[n * width + c])).sum();
                let right = sum + f64::from(x[c]);
                assert!(
                    (f64::from(f32::from_bits(*found)) - right).abs() < 1e-4,
                    "{dtype}, {active} active, {c}"
                );
            }
        }
    }
}

/// Rows of one token are multiplied straight from the file's type, those of several in tiles: both give the exact results.
#[test]
fn tokens_together_and_apart_are_near_the_exact_results() {
    let seed = 20;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for isa in Isa::available() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q8_0, DType::Q5_1, DType::Q4_K]
        {
            let block = dtype.block_len().max(32);
            for (tokens, neurons, width) in
                [(1, 70, 3 * block), (2, 64, block), (9, 131, 5 * block), (40, 300, 24 * block)]
            {
                let active = [0.0, 0.1, 0.6, 1.0][rng.below(4)];
                let values: Vec<f32> = (0..neurons * width).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
                let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
                blocks::quantize(dtype, &values, &mut bytes).unwrap();
                let mut exact = vec![0.0_f32; values.len()];
                blocks::dequantize(dtype, &bytes, &mut exact).unwrap();
                let g = GraphBuilder::new();
                let w = g.weight("w", Weight::with_data(dtype, [neurons, width], bytes));
                let (x, gates) = (
                    g.input("x", DType::F32, [tokens, width]),
                    g.input("gates", DType::F32, [tokens, neurons]),
                );
                let inner = w.mul_mat_sparse(x, gates, None);
                g.output("inner", inner);
                g.output("y", w.axpy_sparse(gates));
                let mut session = session(&g.finish().unwrap(), isa, 2, true, true);
                let x: Vec<f32> = (0..tokens * width).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
                let gates: Vec<f32> = (0..tokens * neurons)
                    .map(|_| if rng.uniform(0.0, 1.0) < active { rng.uniform(-2.0, 2.0) as f32 } else { 0.0 })
                    .collect();
                session.run(&[("x", &x), ("gates", &gates)]).unwrap();
                let context = format!("{isa} {dtype} {tokens} × [{neurons}, {width}], {active} active");
                let row = |n: usize| &exact[n * width..(n + 1) * width];
                let inner: Vec<f32> = session.read("inner").unwrap();
                for (i, found) in inner.iter().enumerate() {
                    let (token, n) = (i / neurons, i % neurons);
                    let pairs = row(n).iter().zip(&x[token * width..]);
                    let right =
                        pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * f64::from(gates[i]);
                    assert!(
                        (f64::from(*found) - right).abs() < 1e-4 * (1.0 + right.abs()),
                        "{context}: {found}, not {right}"
                    );
                }
                let y: Vec<f32> = session.read("y").unwrap();
                for (i, found) in y.iter().enumerate() {
                    let (token, c) = (i / width, i % width);
                    let factors =
                        (0..neurons).map(|n| f64::from(gates[token * neurons + n]) * f64::from(row(n)[c]));
                    let right: f64 = factors.sum();
                    assert!(
                        (f64::from(*found) - right).abs() < 1e-4 * (1.0 + right.abs()),
                        "{context}: {found}, not {right}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_that_no_token_needs_are_not_read() {
    // NaN in every row whose gates are all 0; each token has an active neuron that the others do not have.
    let (tokens, neurons, width) = (6, 200, 64);
    let g = GraphBuilder::new();
    let (x, gates) =
        (g.input("x", DType::F32, [tokens, width]), g.input("gates", DType::F32, [tokens, neurons]));
    let is_used = |row: usize| row % 7 == 3 && row / 7 < 2 * tokens;
    let rows = (0..neurons).flat_map(|row| vec![if is_used(row) { 0.5_f32 } else { f32::NAN }; width]);
    let bytes: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
    let w = g.weight("w", Weight::with_data(DType::F32, [neurons, width], bytes));
    let inner = w.mul_mat_sparse(x, gates, None);
    g.output("inner", inner);
    g.output("y", w.axpy_sparse(inner));
    let mut session = session(&g.finish().unwrap(), Isa::detect(), 2, true, true);
    let gate = |i: usize| {
        let (token, row) = (i / neurons, i % neurons);
        if is_used(row) && row / 7 % tokens == token { 2.0 } else { 0.0 }
    };
    let gates: Vec<f32> = (0..tokens * neurons).map(gate).collect();
    session.run(&[("x", &vec![1.0_f32; tokens * width]), ("gates", &gates)]).unwrap();
    let inner: Vec<f32> = session.read("inner").unwrap();
    assert!(inner.iter().zip(&gates).all(|(result, gate)| *result == 32.0 * gate), "{inner:?}");
    let y: Vec<f32> = session.read("y").unwrap();
    assert_eq!(y, vec![2.0 * 64.0 * 0.5; tokens * width]);
}

#[test]
fn rows_of_inactive_neurons_are_not_read() {
    // NaN in every row whose gate is 0.
    let g = GraphBuilder::new();
    let (x, gates) = (g.input("x", DType::F32, [1, 64]), g.input("gates", DType::F32, [1, 50]));
    let rows = (0..50).flat_map(|row| [if row % 7 == 3 { 0.5 } else { f32::NAN }; 64]);
    let bytes: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
    let w = g.weight("w", Weight::with_data(DType::F32, [50, 64], bytes));
    let inner = w.mul_mat_sparse(x, gates, None);
    g.output("inner", inner);
    g.output("y", w.axpy_sparse(inner));
    let mut session = session(&g.finish().unwrap(), Isa::detect(), 2, true, true);
    let gates: Vec<f32> = (0..50).map(|row| if row % 7 == 3 { 2.0 } else { 0.0 }).collect();
    session.run(&[("x", &vec![1.0_f32; 64]), ("gates", &gates)]).unwrap();
    let inner: Vec<f32> = session.read("inner").unwrap();
    assert!(inner.iter().zip(&gates).all(|(result, gate)| *result == 32.0 * gate), "{inner:?}");
    let y: Vec<f32> = session.read("y").unwrap();
    assert_eq!(y, vec![7.0 * 32.0; 64]);
}

#[test]
fn a_neuron_out_of_range_is_refused() {
    let g = GraphBuilder::new();
    let (x, gates) = (g.input("x", DType::F32, [1, 32]), g.input("gates", DType::F32, [1, 4]));
    let ids = g.input("ids", DType::I32, [2]);
    let w = g.weight("w", Weight::with_data(DType::F32, [2, 32], vec![0; 256]));
    g.output("y", w.mul_mat_sparse(x, gates, Some(ids)));
    let mut session = session(&g.finish().unwrap(), Isa::detect(), 1, true, true);
    for id in [4, -2, i32::MAX] {
        session.set("x", &[1.0_f32; 32][..]).unwrap();
        session.set("gates", &[1.0_f32; 4][..]).unwrap();
        session.set("ids", &[0, id][..]).unwrap();
        let error = session.run(&[]).unwrap_err().to_string();
        assert!(error.contains(&format!("neuron {id} of row 1 is outside 0..4")), "{error}");
    }
}
