//! `set_rows` on any number of threads: of several rows with the same index the last wins, whatever the order of indices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Placed, bytes_of, bytes_of_i32};
use half::f16;
use quadriga_conformance::Rng;
use quadriga_cpu::Backend;
use quadriga_cpu::isa::Isa;
use quadriga_graph::{DType, GraphBuilder};

#[test]
fn of_several_rows_with_one_index_the_last_wins() {
    let seed = 71;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let (rows, columns, count) = (50, 1100, 45);
    let orders: [Vec<i32>; 3] = [
        (0..count).collect(),
        (0..count).rev().collect(),
        (0..count).map(|_| (rng.next_u64() % rows as u64) as i32).collect(),
    ];
    let isas = Isa::available();
    for (dtype, isa) in [DType::F16, DType::F32].into_iter().flat_map(|d| isas.iter().map(move |i| (d, *i))) {
        let g = GraphBuilder::new();
        let target = g.state("cache", dtype, [rows, columns]);
        let x = g.input("x", DType::F32, [count as usize, columns]);
        let ids = g.input("ids", DType::I32, [count as usize]);
        let y = target.set_rows(x, ids);
        g.output("y", y);
        let graph = g.finish().unwrap();
        for (threads, ids) in [1, 2, 3, 8].into_iter().flat_map(|t| orders.iter().map(move |ids| (t, ids))) {
            let backend = Backend::builder().isa(isa).threads(threads).build().unwrap();
            let mut placed = Placed::new(&graph, &backend, true).unwrap();
            let new: Vec<f32> =
                (0..count as usize * columns).map(|_| (rng.next_u64() % 512) as f32).collect();
            let mut want = vec![-1.0_f32; rows * columns];
            for (row, id) in new.chunks_exact(columns).zip(ids) {
                want[*id as usize * columns..][..columns].copy_from_slice(row);
            }
            // Small integers are exact in both types.
            let bytes = |values: &[f32]| match dtype {
                DType::F32 => bytes_of(values),
                _ => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            };
            placed.set("cache", &bytes(&vec![-1.0; rows * columns])).unwrap();
            placed.set("x", &bytes_of(&new)).unwrap();
            placed.set("ids", &bytes_of_i32(ids)).unwrap();
            placed.run().unwrap();
            let got = placed.read(graph.leaf("cache").unwrap());
            assert!(got == bytes(&want), "{dtype}, {isa}, {threads} threads, indices {ids:?}");
        }
    }
}
