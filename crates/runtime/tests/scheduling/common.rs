//! Devices and graphs for several tests.

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Data, Graph, GraphBuilder, Value, Weight};
use quadriga_runtime::Backend;
use quadriga_sim::Sim;

/// A synchronous device with host memory, like a CPU.
pub(crate) fn host(name: &str) -> Arc<dyn Backend> {
    Sim::new(name).synchronous().host().build()
}

/// An asynchronous device with memory of its own.
pub(crate) fn device(name: &str) -> Arc<dyn Backend> {
    Sim::new(name).alignment(256).padding(32).build()
}

/// Random numbers between -1 and 1.
pub(crate) fn numbers(rng: &mut Rng, count: usize) -> Data {
    let values: Vec<f32> = (0..count).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
    Data::from(values.as_slice())
}

/// A chain of matmuls and activations: `weights` of 8 × 8, input "x" of 4 × 8, output "y".
pub(crate) fn chain(weights: usize) -> Graph {
    let mut rng = Rng::new(7);
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [4, 8]);
    for index in 0..weights {
        let _scope = g.scope(&format!("blk.{index}"));
        let w = g.weight(&format!("w.{index}"), Weight::with_data(DType::F32, [8, 8], numbers(&mut rng, 64)));
        x = g.mul_mat(w, x).tanh();
    }
    g.output("y", x);
    g.finish().unwrap()
}

pub(crate) fn chain_input() -> Vec<f32> {
    (0..32).map(|i| (i as f32 - 16.0) / 16.0).collect()
}

/// A random graph with many operations: matmuls, views, concatenations, writes into states and results.
pub(crate) fn random_graph(rng: &mut Rng, nodes: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 8]);
    let z = g.input("z", DType::F32, [4, 8]);
    let ids = g.input("ids", DType::I32, [1]);
    let mut states: Vec<Value<'_>> =
        (0..rng.range(1, 3)).map(|i| g.state(&format!("s{i}"), DType::F32, [6, 8])).collect();
    let weights: Vec<Value<'_>> = (0..rng.range(1, 5))
        .map(|i| g.weight(&format!("w{i}"), Weight::with_data(DType::F32, [8, 8], numbers(rng, 64))))
        .collect();
    let mut values = vec![x, z];
    for _ in 0..nodes {
        let recent = values.len().saturating_sub(6);
        let a = if rng.chance(0.7) {
            values[rng.range(recent, values.len() - 1)]
        } else {
            *rng.pick(&values).unwrap()
        };
        let b = *rng.pick(&values).unwrap();
        let value = match rng.below(14) {
            0 => a.tanh(),
            1 => a.add(b).scale(0.5),
            2 => a.mul(b),
            3 | 4 => rng.pick(&weights).unwrap().mul_mat(a).scale(0.4),
            5 => a.transpose().cont().reshape([4, 8]),
            6 => a.reshape([2, 16]).reshape([4, 8]).neg(),
            7 => a.slice(0, 0, 2).concat(0, &[b.slice(0, 2, 2)]),
            8 | 9 => {
                let state = rng.below(states.len());
                states[state] = states[state].set_rows(a.slice(0, rng.below(4), 1), ids);
                states[state].slice(0, rng.below(3), 4).add(b).scale(0.5)
            }
            10 => {
                let fresh = a.scale(0.9);
                let before = fresh.sigmoid();
                b.copy_into(fresh).add(before)
            }
            11 => a.rms_norm(1e-5),
            12 => a.soft_max(1.0, None, None),
            _ => a.get_rows(ids).repeat([4, 8]),
        };
        values.push(value);
    }
    for (index, value) in values.iter().rev().take(3).enumerate() {
        g.output(&format!("out{index}"), *value);
    }
    for (index, state) in states.iter().enumerate() {
        g.output(&format!("state{index}"), *state);
    }
    g.finish().unwrap()
}
