//! Experts that are uploaded one by one, into weights that the device packs, give what the whole weight gives. Says so and passes
//! where there is no device.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Scheduler, Session, WeightSlice};

use common::device;

const EXPERTS: usize = 5;
const ROWS: usize = 64;
const COLUMNS: usize = 256;

/// Bytes of matrices whose blocks have small scales.
fn matrices(dtype: DType, seed: u32) -> Data {
    let bytes = dtype.row_bytes(COLUMNS).unwrap() * ROWS * EXPERTS;
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 16) as u8
    };
    let mut data: Vec<u8> = (0..bytes).map(|_| random()).collect();
    for block in data.chunks_mut(dtype.block_bytes()) {
        match dtype {
            DType::F32 => block.copy_from_slice(&(f32::from(random()) / 256.0 - 0.5).to_le_bytes()),
            // All begin with a scale in f16.
            _ => block[..2].copy_from_slice(&[random(), 0x20]),
        }
    }
    Data::from(data)
}

/// Each token uses another expert; few tokens, and so many that matrices are unpacked for all rows.
fn graph(weight: Weight, tokens: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [tokens, 1, COLUMNS]);
    let ids: Vec<u8> = (0..tokens).flat_map(|token| ((token % EXPERTS) as i32).to_le_bytes()).collect();
    let ids = g.constant("ids", DType::I32, [tokens, 1], ids);
    g.output("y", g.weight("w", weight).mul_mat_id(x, ids));
    g.finish().unwrap()
}

fn session(backend: &Arc<dyn Backend>, weight: Weight, tokens: usize) -> Session {
    let mut session = Session::new(&Scheduler::new([Arc::clone(backend)])).unwrap();
    session.use_graph(graph(weight, tokens)).unwrap();
    session
}

fn run(session: &mut Session, tokens: usize) -> Vec<u32> {
    let x: Vec<f32> = (0..tokens * COLUMNS).map(|i| (i % 17) as f32 / 17.0 - 0.4).collect();
    session.run(&[("x", &x)]).unwrap();
    session.read::<f32>("y").unwrap().into_iter().map(f32::to_bits).collect()
}

#[test]
fn uploaded_experts_give_the_bits_of_the_whole_weight() {
    let Some(cuda) = device() else { return };
    let shape = [EXPERTS, ROWS, COLUMNS];
    for dtype in [DType::F32, DType::Q4_0, DType::Q4_1, DType::Q8_0] {
        for tokens in [EXPERTS, 40 * EXPERTS] {
            let context = format!("{dtype}, {tokens} tokens");
            let (before, after) = (matrices(dtype, 1), matrices(dtype, 2));
            let slice = before.len() / EXPERTS;
            let mut uploaded = session(&cuda, Weight::new(dtype, shape), tokens);
            let mut load = |from: &Data, order: &[usize]| {
                for index in order {
                    let range = index * slice..(index + 1) * slice;
                    let one = WeightSlice { weight: "w", index: *index, data: from, range };
                    assert!(uploaded.upload(&[one]).unwrap().is_some(), "{context}");
                }
                let applied = uploaded.apply_uploads(true);
                assert_eq!(applied.len(), order.len(), "{context}");
                assert!(applied.iter().all(|(_, result)| result.is_ok()), "{context}: {applied:?}");
                run(&mut uploaded, tokens)
            };
            let whole =
                |data: Data| run(&mut session(&cuda, Weight::with_data(dtype, shape, data), tokens), tokens);
            assert_eq!(load(&before, &[4, 0, 1, 2, 3]), whole(before.clone()), "{context}");
            // Some of them anew: the others stay.
            let found = load(&after, &[3, 1]);
            let part = |data: &Data, index: usize| data.slice(index * slice, slice).unwrap();
            let mixed: Vec<Data> =
                (0..EXPERTS).map(|i| part(if i == 1 || i == 3 { &after } else { &before }, i)).collect();
            let mixed = Data::joined(mixed).bytes().into_owned();
            assert_eq!(found, whole(Data::from(mixed)), "{context}");
        }
    }
}
