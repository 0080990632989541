//! Two models that name their tensors alike, as two fine-tunes of one model do, compute with their own weights on one
//! scheduler. Says so and passes where there is no device.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Scheduler, Session};

const N: usize = 64;

/// y = w x, where every element of w has this value: in each type that has a layout or kernels of its own.
fn model(value: f32, dtype: DType, rows: usize) -> Graph {
    let bytes: Vec<u8> = match dtype {
        DType::F32 => vec![value.to_le_bytes(); N * N].concat(),
        // A scale, and quants of 1.
        _ => vec![[half(value).as_slice(), &[1; 32]].concat(); N * N / 32].concat(),
    };
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, N]);
    let w = g.weight("w", Weight::with_data(dtype, [N, N], Data::from(bytes)));
    g.output("y", w.mul_mat(x));
    g.finish().unwrap()
}

/// A small power of two as f16.
fn half(value: f32) -> [u8; 2] {
    ((((value.to_bits() >> 23) as u16) - 127 + 15) << 10).to_le_bytes()
}

fn run(session: &mut Session, rows: usize) -> Vec<f32> {
    session.run(&[("x", &vec![1.0f32; rows * N])]).unwrap();
    session.read::<f32>("y").unwrap()
}

#[test]
fn two_models_on_one_scheduler_have_their_own_weights() {
    let backend: Arc<dyn Backend> = match quadriga_cuda::Backend::new(0) {
        Ok(backend) => Arc::new(backend),
        Err(reason) => {
            println!("skipped, there is no GPU: {reason}");
            return;
        }
    };
    for dtype in [DType::F32, DType::Q8_0] {
        for rows in [1, 4, 40] {
            let scheduler = Scheduler::new([Arc::clone(&backend)]);
            let plan = |value| scheduler.plan(model(value, dtype, rows)).unwrap().session().unwrap();
            let mut one = plan(1.0);
            let alone = run(&mut one, rows);
            let (mut two, mut four) = (plan(2.0), plan(4.0));
            for _ in 0..2 {
                for (session, value) in [(&mut one, 1.0f32), (&mut two, 2.0), (&mut four, 4.0)] {
                    let found = run(session, rows);
                    assert!(found.iter().all(|y| (y - 64.0 * value).abs() < 1.0), "{dtype:?} {rows} {value}");
                }
            }
            drop(two);
            assert_eq!(run(&mut one, rows), alone, "{dtype:?}, {rows} rows");
        }
    }
}
