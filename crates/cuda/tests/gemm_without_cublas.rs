//! Matrix products of many rows without cuBLAS: sizes at and around the kernels' tiles, in every operand type. Elements
//! are small integers, so that every kernel's result is exact. Says so and passes where there is no device.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga_cuda::KernelOrigin;
use quadriga_graph::{DType, Data, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Scheduler};

/// An integer from -3 to 3 for each position.
fn element(seed: usize, row: usize, col: usize) -> i32 {
    let mixed = (row * 31 + col * 17 + seed * 7 + row * col % 13) as u32;
    (mixed.wrapping_mul(2_654_435_761) >> 16) as i32 % 7 - 3
}

/// An integer as bf16: the high half of the f32.
fn bf16(value: i32) -> [u8; 2] {
    ((value as f32).to_bits() >> 16).to_le_bytes()[..2].try_into().unwrap()
}

/// An integer up to 3 as f16.
fn f16(value: i32) -> [u8; 2] {
    let magnitude: u16 = [0, 0x3c00, 0x4000, 0x4200][value.unsigned_abs() as usize];
    (magnitude | if value < 0 { 0x8000 } else { 0 }).to_le_bytes()
}

fn weight(dtype: DType, n: usize, k: usize) -> Vec<u8> {
    let rows = |bytes: &dyn Fn(usize) -> Vec<u8>| (0..n).flat_map(bytes).collect();
    let quants = |row: usize, block: usize| (0..32).map(move |i| element(1, row, block * 32 + i));
    match dtype {
        DType::F32 => rows(&|r| (0..k).flat_map(|c| (element(1, r, c) as f32).to_le_bytes()).collect()),
        DType::F16 => rows(&|r| (0..k).flat_map(|c| f16(element(1, r, c))).collect()),
        DType::BF16 => rows(&|r| (0..k).flat_map(|c| bf16(element(1, r, c))).collect()),
        // Blocks of 32 with a scale of 1.
        _ => rows(&|r| {
            let block = |b| f16(1).into_iter().chain(quants(r, b).map(|q| q as i8 as u8));
            (0..k / 32).flat_map(block).collect()
        }),
    }
}

fn check(backend: &Arc<dyn Backend>, what: &str) {
    let sizes = [
        (9, 1, 32),
        (16, 130, 64),
        (127, 128, 96),
        (128, 515, 160),
        (129, 128, 32),
        (300, 257, 1056),
        (513, 129, 64),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        for (m, n, k) in sizes.into_iter().chain([(40, 70, 72), (150, 64, 24)]) {
            if dtype == DType::Q8_0 && k % 32 != 0 {
                continue;
            }
            let g = GraphBuilder::new();
            let x = g.input("x", DType::F32, [m, k]);
            let w = g.weight("w", Weight::with_data(dtype, [n, k], Data::from(weight(dtype, n, k))));
            g.output("y", w.mul_mat(x));
            let scheduler = Scheduler::new([Arc::clone(backend)]);
            let mut session = scheduler.plan(g.finish().unwrap()).unwrap().session().unwrap();
            let rows: Vec<f32> = (0..m * k).map(|i| element(2, i / k, i % k) as f32).collect();
            session.run(&[("x", &rows)]).unwrap();
            let found = session.read::<f32>("y").unwrap();
            for row in 0..m {
                for col in 0..n {
                    let exact: i32 = (0..k).map(|c| element(2, row, c) * element(1, col, c)).sum();
                    assert_eq!(
                        found[row * n + col],
                        exact as f32,
                        "{what}: {dtype:?}, {m} × {n} × {k}, row {row}, column {col}"
                    );
                }
            }
        }
    }
}

#[test]
fn products_are_exact_at_every_tile_boundary() {
    for origin in [KernelOrigin::Shipped, KernelOrigin::Ptx] {
        let opened = quadriga_cuda::Backend::builder(0).cublas(false).kernels(origin).build();
        match opened {
            Ok(backend) => check(&(Arc::new(backend) as Arc<dyn Backend>), &format!("{origin:?}")),
            Err(reason) => {
                println!("skipped, there is no GPU: {reason}");
                return;
            }
        }
    }
}
