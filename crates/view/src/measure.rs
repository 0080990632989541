//! Measuring what a backend can do: plain reads, and products with its own kernels.

use std::sync::Arc;
use std::time::Instant;

use quadriga_graph::{DType, Data, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Detail, RuntimeError, Scheduler};

use crate::Limits;

/// Bytes that are read: more than caches hold.
const READ: usize = 256 << 20;
/// A run this long is long enough to be measured.
const LONG: f64 = 0.03;
/// The most rows, and the most columns, of a product.
const ROWS: usize = 512;
const COLUMNS: usize = 2048;
/// Each thing is measured so often; the fastest counts.
const ROUNDS: usize = 5;
/// Bytes of weights: in every type a number that is neither zero nor special.
const BYTE: u8 = 0x3c;

/// Measures a backend: how fast it reads its memory, and how fast its products are for each kind of weight. Memory that
/// the host can address is also read with plain loads, on so many threads. Takes a second or two; sizes grow until a run
/// can be measured, so that slow devices are not waited for.
pub fn measure(backend: &Arc<dyn Backend>, threads: usize) -> Result<Limits, RuntimeError> {
    let mut read: f64 = 0.0;
    for dtype in [DType::F32, DType::Q8_0] {
        let row = bytes_of(dtype, COLUMNS);
        let mut columns = COLUMNS;
        loop {
            let seconds = fastest(backend, dtype, 1, columns, COLUMNS)?;
            read = read.max((columns * row) as f64 / seconds);
            if seconds > LONG || columns * row >= READ / 2 {
                break;
            }
            columns *= 4;
        }
    }
    if backend.memory().host {
        read = read.max(plain_read(threads));
    }
    let peak = |dtype| -> Result<f64, RuntimeError> {
        let (mut rows, mut columns) = (ROWS / 16, COLUMNS / 8);
        let mut best: f64 = 0.0;
        loop {
            let seconds = fastest(backend, dtype, rows, columns, columns)?;
            best = best.max(2.0 * (rows * columns * columns) as f64 / seconds);
            if seconds > LONG || (rows >= ROWS && columns >= COLUMNS) {
                return Ok(best);
            }
            rows = (rows * 4).min(ROWS);
            columns = (columns * 2).min(COLUMNS);
        }
    };
    Ok(Limits {
        backend: backend.name().to_owned(),
        device: backend.device().description,
        read,
        int8: peak(DType::Q8_0)?,
        bf16: peak(DType::BF16)?,
        f32: peak(DType::F32)?,
        measured: true,
    })
}

fn bytes_of(dtype: DType, elements: usize) -> usize {
    elements / dtype.block_len().max(1) * dtype.block_bytes()
}

/// Seconds of a product of `rows × inner` activations with `columns × inner` weights.
fn fastest(
    backend: &Arc<dyn Backend>,
    dtype: DType,
    rows: usize,
    columns: usize,
    inner: usize,
) -> Result<f64, RuntimeError> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, inner]);
    let data = Data::from(vec![BYTE; bytes_of(dtype, columns * inner)]);
    let w = g.weight("w", Weight::with_data(dtype, [columns, inner], data));
    g.output("y", w.mul_mat(x));
    let graph = g.finish().map_err(|error| RuntimeError::BadPlan(error.to_string()))?;
    let mut session = Scheduler::new([Arc::clone(backend)]).plan(graph)?.session()?;
    session.set("x", vec![0.5f32; rows * inner].as_slice())?;
    let mut best = f64::INFINITY;
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let trace = session.trace(Detail::Splits)?;
        let taken = trace.splits.iter().map(|split| split.seconds).sum::<f64>();
        // A device without a clock of its own is judged by the host's.
        let seconds = if taken > 0.0 { taken } else { started.elapsed().as_secs_f64() };
        if round > 0 || seconds > LONG {
            best = best.min(seconds);
        }
        if seconds > 10.0 * LONG {
            break;
        }
    }
    Ok(best.max(1e-9))
}

/// Bytes a second of plain loads by several threads.
fn plain_read(threads: usize) -> f64 {
    let numbers = vec![1u64; READ / size_of::<u64>()];
    let share = numbers.len().div_ceil(threads.max(1));
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let parts: Vec<_> = numbers
                .chunks(share)
                .map(|part| {
                    scope.spawn(move || part.iter().fold(0u64, |sum, number| sum.wrapping_add(*number)))
                })
                .collect();
            parts.into_iter().filter_map(|part| part.join().ok()).fold(0, u64::wrapping_add)
        });
        if std::hint::black_box(sum) > 0 {
            best = best.min(started.elapsed().as_secs_f64());
        }
    }
    READ as f64 / best.max(1e-9)
}
