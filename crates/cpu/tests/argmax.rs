//! Argmax: the first of equal elements; a NaN counts as larger than any number.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Placed, bytes_of};
use quadriga_cpu::Backend;
use quadriga_graph::{DType, GraphBuilder};

#[test]
fn the_first_of_equal_elements_wins_and_nan_is_the_largest() {
    let columns = 1000;
    let mut rows = vec![vec![0.0_f32; columns]; 5];
    (rows[0][700], rows[0][900]) = (2.0, 2.0);
    (rows[1][300], rows[1][600], rows[1][601]) = (9.0, f32::NAN, f32::NAN);
    rows[2].fill(f32::NEG_INFINITY);
    (rows[3][3], rows[3][4]) = (-0.0, f32::INFINITY);
    rows[4].fill(-1.0);
    (rows[4][10], rows[4][20]) = (-0.0, 0.0);
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows.len(), columns]);
    g.output("y", x.argmax());
    let graph = g.finish().unwrap();
    for threads in [1, 3] {
        let backend = Backend::builder().threads(threads).build().unwrap();
        let mut placed = Placed::new(&graph, &backend, true).unwrap();
        placed.set("x", &bytes_of(&rows.concat())).unwrap();
        placed.run().unwrap();
        let bytes = placed.read(graph.output("y").unwrap());
        let got: Vec<i32> = bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        assert_eq!(got, [700, 600, 0, 4, 10], "{threads} threads");
    }
}
