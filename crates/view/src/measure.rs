//! Measurement of a backend's peak speeds: memory bandwidth, and matmuls with its own kernels.

use std::sync::Arc;
use std::time::Instant;

use quadriga_graph::{DType, Data, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Detail, RuntimeError, Scheduler};

use crate::Limits;

/// Bytes read per measurement: more than caches hold.
const READ_BYTES: usize = 256 << 20;
/// Seconds after which a measurement is long enough.
const MIN_SECONDS: f64 = 0.03;
/// The largest number of rows and columns of a matmul.
const MAX_ROWS: usize = 512;
const MAX_COLUMNS: usize = 2048;
/// Repetitions of each measurement; the fastest counts.
const ROUNDS: usize = 5;
/// The value of every weight byte: in all types a finite number other than zero.
const WEIGHT_BYTE: u8 = 0x3c;

/// Measures a backend's memory bandwidth and its matmul speed for each class of weight type.
///
/// Host-addressable memory is also read with plain loads on `threads` threads. Sizes grow until a run is long enough to
/// be measured, so that it takes a second or two even on slow devices.
pub fn measure(backend: &Arc<dyn Backend>, threads: usize) -> Result<Limits, RuntimeError> {
    let mut read: f64 = 0.0;
    for dtype in [DType::F32, DType::Q8_0] {
        let row = bytes_of(dtype, MAX_COLUMNS);
        let mut columns = MAX_COLUMNS;
        loop {
            let seconds = matmul_seconds(backend, dtype, 1, columns, MAX_COLUMNS)?;
            read = read.max((columns * row) as f64 / seconds);
            if seconds > MIN_SECONDS || columns * row >= READ_BYTES / 2 {
                break;
            }
            columns *= 4;
        }
    }
    if backend.memory().host {
        read = read.max(host_read(threads));
    }
    let peak = |dtype| -> Result<f64, RuntimeError> {
        let (mut rows, mut columns) = (MAX_ROWS / 16, MAX_COLUMNS / 8);
        let mut best: f64 = 0.0;
        loop {
            let seconds = matmul_seconds(backend, dtype, rows, columns, columns)?;
            best = best.max(2.0 * (rows * columns * columns) as f64 / seconds);
            if seconds > MIN_SECONDS || (rows >= MAX_ROWS && columns >= MAX_COLUMNS) {
                return Ok(best);
            }
            rows = (rows * 4).min(MAX_ROWS);
            columns = (columns * 2).min(MAX_COLUMNS);
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

/// Seconds of a matmul of `rows × inner` activations with `columns × inner` weights: the fastest of [`ROUNDS`].
fn matmul_seconds(
    backend: &Arc<dyn Backend>,
    dtype: DType,
    rows: usize,
    columns: usize,
    inner: usize,
) -> Result<f64, RuntimeError> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, inner]);
    let data = Data::from(vec![WEIGHT_BYTE; bytes_of(dtype, columns * inner)]);
    let w = g.weight("w", Weight::with_data(dtype, [columns, inner], data));
    g.output("y", w.mul_mat(x));
    let graph = g.finish().map_err(|error| RuntimeError::BadPlan(error.to_string()))?;
    let mut session = Scheduler::new([Arc::clone(backend)]).plan(graph)?.session()?;
    session.set("x", vec![0.5f32; rows * inner].as_slice())?;
    let mut best = f64::INFINITY;
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let trace = session.debug().trace(Detail::Splits)?;
        let taken = trace.splits.iter().map(|split| split.seconds).sum::<f64>();
        // A device without a clock of its own is timed by the host.
        let seconds = if taken > 0.0 { taken } else { started.elapsed().as_secs_f64() };
        if round > 0 || seconds > MIN_SECONDS {
            best = best.min(seconds);
        }
        if seconds > 10.0 * MIN_SECONDS {
            break;
        }
    }
    Ok(best.max(1e-9))
}

/// Bytes per second of plain loads by several threads.
fn host_read(threads: usize) -> f64 {
    let numbers = vec![1u64; READ_BYTES / size_of::<u64>()];
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
    READ_BYTES as f64 / best.max(1e-9)
}
