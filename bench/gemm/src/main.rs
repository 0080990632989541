//! f32 GEMM of 1024³ on one thread: quadriga-cpu beside the crate `gemm`, alternating, the fastest run of each.
//!
//! `cargo run --release --manifest-path bench/gemm/Cargo.toml -- [size] [seconds]`
//!
//! Weights are packed once, as when a model is loaded; the last row counts the packing as well.

use std::error::Error;
use std::time::Instant;

use quadriga_cpu::internals::kernels::matmul::{Activations, Input, Matmul, Output, PackedLayout, multiply};
use quadriga_cpu::internals::pool::Pool;
use quadriga_cpu::isa::Isa;
use quadriga_graph::DType;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let n: usize = arguments.next().map_or(Ok(1024), |size| size.parse())?;
    let seconds: f64 = arguments.next().map_or(Ok(5.0), |seconds| seconds.parse())?;
    let number = |i: usize| ((i * 7919) % 1013) as f32 / 506.0 - 1.0;
    let x: Vec<f32> = (0..n * n).map(number).collect();
    let w: Vec<f32> = (0..n * n).map(|i| number(i + 17)).collect();
    let (mut ours, mut theirs) = (vec![0.0_f32; n * n], vec![0.0_f32; n * n]);

    let isa = Isa::from_environment()?;
    let pool = Pool::new(1)?;
    let layout = PackedLayout::new(DType::F32, n, n)?;
    let file: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
    // Aligned as weights are in a model's memory.
    let mut memory = vec![0; layout.bytes() + 64];
    let start = memory.as_ptr().align_offset(64);
    let packed = &mut memory[start..start + layout.bytes()];
    layout.pack(&file, packed)?;
    let mut work = vec![0; Activations::work_bytes(isa, DType::F32, n, n, 1)?];

    let mut best = [f64::INFINITY; 3];
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        let input = Input::f32(&x, n, n, n)?;
        let output = Output::new(&mut ours, n, n, n)?;
        let activations = Activations::new(isa, DType::F32, n, n, 1, &mut work)?;
        pool.run(&|worker| {
            // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
            unsafe {
                activations.prepare(worker, &input)?;
                worker.barrier()?;
                let matmul = Matmul { layout: &layout, packed: &*packed, output: &output, first_row: 0 };
                multiply(worker, &activations, &[matmul])
            }
        })?;
        let multiplying = start.elapsed().as_secs_f64();
        let start = Instant::now();
        layout.pack(&file, packed)?;
        let packing = start.elapsed().as_secs_f64();

        let start = Instant::now();
        // SAFETY: the three matrices are n × n; columns of the transposed weights are rows of `w`.
        unsafe {
            let strides = n as isize;
            gemm::gemm(
                n,
                n,
                n,
                theirs.as_mut_ptr(),
                1,
                strides,
                false,
                x.as_ptr(),
                1,
                strides,
                w.as_ptr(),
                strides,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
        let gemm = start.elapsed().as_secs_f64();
        for (best, time) in best.iter_mut().zip([multiplying, gemm, multiplying + packing]) {
            *best = best.min(time);
        }
    }
    let largest = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let speed = |seconds: f64| 2.0 * (n as f64).powi(3) / seconds / 1e9;
    println!("f32 {n}³, one thread, {isa}; largest difference of results {largest:.1e}");
    println!("quadriga          {:8.1} GFLOP/s, {:.2} × gemm", speed(best[0]), best[1] / best[0]);
    println!("gemm              {:8.1} GFLOP/s", speed(best[1]));
    println!("quadriga, packing {:8.1} GFLOP/s", speed(best[2]));
    Ok(())
}
