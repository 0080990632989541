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
