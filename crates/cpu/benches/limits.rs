//! Limits of the machine: the throughput of one thread and of several independent ones, which bounds the scaling of
//! the other benchmarks.
//!
//! `cargo bench -p quadriga-cpu --bench limits -- [threads]`
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a benchmark")]

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use quadriga_cpu::internals::kernels::matmul::{Activations, Input, Matmul, Output, PackedLayout, multiply};
use quadriga_cpu::internals::kernels::{KernelError, vec};
use quadriga_cpu::internals::pool::Pool;
use quadriga_cpu::isa::Isa;
use quadriga_graph::DType;

/// Units of work a second, all threads together: each prepares its own work and then repeats it for a third of a second,
/// all at the same time. The best of five.
fn rate<W: FnMut()>(threads: usize, units: f64, prepare: impl Fn(usize) -> W + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let run = |index: usize| {
        let mut work = prepare(index);
        work();
        let mut most = 0.0_f64;
        for _ in 0..5 {
            barrier.wait();
            let (start, mut count) = (Instant::now(), 0);
            while start.elapsed().as_secs_f64() < 0.066 {
                work();
                count += 1;
            }
            most = most.max(f64::from(count) * units / start.elapsed().as_secs_f64());
        }
        most
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|i| scope.spawn(move || run(i))).collect();
        run(0) + others.into_iter().map(|other| other.join().unwrap()).sum::<f64>()
    })
}

/// Sums over the same floats again and again.
fn read(isa: Isa, bytes: usize) -> impl FnMut() {
    let floats = vec![0.5_f32; bytes / 4];
    move || {
        std::hint::black_box(vec::sum(isa, &floats));
    }
}

/// A GEMM that stays in the L2 cache.
fn gemm(isa: Isa, dtype: DType, rows: usize) -> (f64, impl Fn(usize) -> Box<dyn FnMut()> + Sync) {
    let (n, k) = (256, 512);
    let work = move |_| {
        let layout = PackedLayout::new(dtype, n, k).unwrap();
        let packed = vec![0x11_u8; layout.bytes()];
        let x = vec![0.25_f32; rows * k];
        let mut y = vec![0.0_f32; rows * n];
        let pool = Pool::new(1).unwrap();
        let mut memory = vec![0; Activations::work_bytes(isa, dtype, rows, k, 1).unwrap()];
        Box::new(move || {
            let input = Input::f32(&x, rows, k, k).unwrap();
            let output = Output::new(&mut y, rows, n, n).unwrap();
            let activations = Activations::new(isa, dtype, rows, k, 1, &mut memory).unwrap();
            pool.run(&|worker| {
                // SAFETY: every thread of the run prepares, waits at the barrier and multiplies.
                unsafe {
                    activations.prepare(worker, &input)?;
                    multiply(
                        worker,
                        &activations,
                        &[Matmul { layout: &layout, packed: &packed, output: &output, first_row: 0 }],
                    )
                }
            })
            .unwrap();
        }) as Box<dyn FnMut()>
    };
    (2.0 * (n * k * rows) as f64, work)
}

/// The cost of a barrier, alone and after a step of one tiny chunk.
fn barriers(threads: usize) {
    let pool = Pool::new(threads).unwrap();
    let taken = AtomicU32::new(0);
    let time = |tiny: bool| {
        let mut least = f64::INFINITY;
        for _ in 0..50 {
            let start = Instant::now();
            pool.run(&|worker| {
                for _ in 0..1000 {
                    if tiny {
                        worker.chunks(1, |_| {
                            taken.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                    worker.barrier()?;
                }
                Ok::<(), KernelError>(())
            })
            .unwrap();
            least = least.min(start.elapsed().as_secs_f64() / 1000.0);
        }
        least * 1e9
    };
    println!(
        "{threads} threads: a barrier {:.0} ns, with a step of one chunk {:.0} ns",
        time(false),
        time(true)
    );
    let start = Instant::now();
    for _ in 0..10_000 {
        pool.run(&|_| Ok::<(), KernelError>(())).unwrap();
    }
    println!("{threads} threads: an empty run {:.0} ns", start.elapsed().as_secs_f64() * 1e9 / 1e4);
}

fn main() {
    let most = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(2);
    let isa = Isa::detect();
    println!("{isa}; rates of one thread, of {most} threads, and their ratio");
    let line = |name: &str, unit: &str, one: f64, all: f64| {
        println!("{name:<44} {:8.1} {:8.1} {unit:<8} {:5.2} ×", one / 1e9, all / 1e9, all / one);
    };
    for (dtype, rows) in [(DType::F32, 240), (DType::BF16, 256), (DType::Q4_1, 256)] {
        let (units, work) = gemm(isa, dtype, rows);
        let name = format!("GEMM of {rows} rows with {dtype}, separate");
        line(&name, "GFLOP/s", rate(1, units, &work), rate(most, units, &work));
    }
    for (name, bytes) in
        [("24 KiB", 24 << 10), ("1 MiB", 1 << 20), ("48 MiB", 48 << 20), ("400 MiB", 400 << 20)]
    {
        let work = |_| read(isa, bytes);
        let name = format!("plain read of {name} a thread, separate");
        line(&name, "GB/s", rate(1, bytes as f64, work), rate(most, bytes as f64, work));
    }
    barriers(1);
    barriers(most);
}
