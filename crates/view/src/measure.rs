//! Measurement of a backend's peak speeds: memory and cache bandwidth, and matmuls with its own kernels.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use quadriga_graph::{DType, Data, GraphBuilder, Weight};
use quadriga_runtime::{
    Backend, BackendError, Detail, DeviceKind, ReadCurve, ReadPoint, Region, RuntimeError, Scheduler, Usage,
};

use crate::machine::{self, CpuTimes};
use crate::rounds::RateSummary;
use crate::{Conditions, Limits};

/// The least bytes that are read to measure memory, if there are as many free: more than most caches hold.
const MIN_WORKING_SET: u64 = 1 << 30;
/// Seconds after which a measurement is long enough.
const MIN_SECONDS: f64 = 0.03;
/// The largest number of rows and columns of a matmul.
const MAX_ROWS: usize = 512;
const MAX_COLUMNS: usize = 2048;
/// Repetitions of each measurement, after a warm-up.
const ROUNDS: usize = 7;
/// Bytes that are copied to measure uploads.
const UPLOAD_BYTES: u64 = 256 << 20;
/// Working sets of the curve of rates, in eighths of the last-level caches.
const CURVE_EIGHTHS: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// The most bytes of weights for that curve.
const MAX_CURVE_SET: u64 = 2 << 30;
/// The type of its weights: that of most bytes of most models.
const CURVE_TYPE: DType = DType::Q4_0;
/// Matmuls that follow each other, and their rows and columns, to measure what each takes beside its traffic.
const CHAIN: usize = 64;
const CHAIN_WIDTH: usize = 256;
/// The value of every weight byte: in all types a finite number other than zero.
const WEIGHT_BYTE: u8 = 0x3c;

/// Measures a backend's memory bandwidth and its matmul speed for each class of weight type.
///
/// Host memory is read with plain loads on `threads` threads and by the backend's own kernels, in a working set of four
/// times the last-level caches (of at least 1 GiB, and at most half of the free memory), so that caches do not count as
/// memory; their bandwidth is measured apart, and how fast the backend's own kernels read quantized weights that caches hold
/// some of. The memory of other devices is read by a matmul with one row. Each rate is
/// the fastest of several rounds; [`Limits::conditions`] tells how far they spread and what disturbed them.
pub fn measure(backend: &Arc<dyn Backend>, threads: usize) -> Result<Limits, RuntimeError> {
    let start = CpuTimes::now();
    let cache_bytes = machine::last_level_cache();
    let mut conditions = Conditions { cache_bytes, ..Conditions::default() };
    let (read_curve, launch) = match backend.device().kind {
        DeviceKind::Cpu => {
            let curve = read_curve(backend, cache_bytes, machine::free_memory())?;
            (curve, launch_seconds(backend, &curve)?)
        }
        _ => (ReadCurve::UNKNOWN, 0.0),
    };
    let (read, cache) = if backend.memory().host {
        conditions.working_set = working_set(cache_bytes, machine::free_memory());
        let read = read_rate(backend, threads, conditions.working_set, 1)?;
        let inner = cached_set(cache_bytes, threads);
        let passes = (MIN_WORKING_SET / inner.max(1)).clamp(1, 256) as usize;
        (read, read_rate(backend, threads, inner, passes)?)
    } else {
        // Caches of devices are small; their sizes are unknown here.
        conditions.cache_bytes = None;
        let (read, bytes) = device_read(backend)?;
        conditions.working_set = bytes;
        (read, RateSummary::default())
    };
    conditions.add(read);
    let mut peak = |dtype| -> Result<f64, RuntimeError> {
        let (mut rows, mut columns) = (MAX_ROWS / 16, MAX_COLUMNS / 8);
        loop {
            let seconds = matmul_seconds(backend, dtype, rows, columns, columns)?;
            let operations = 2.0 * (rows * columns * columns) as f64;
            let rates = summarize(operations, &seconds);
            if operations / rates.peak.max(1e-9) > MIN_SECONDS || (rows >= MAX_ROWS && columns >= MAX_COLUMNS)
            {
                conditions.add(rates);
                return Ok(rates.peak);
            }
            rows = (rows * 4).min(MAX_ROWS);
            columns = (columns * 2).min(MAX_COLUMNS);
        }
    };
    let upload = if backend.memory().host { 0.0 } else { upload_rate(&**backend)? };
    let [int8, bf16, f32] = [peak(DType::Q8_0)?, peak(DType::BF16)?, peak(DType::F32)?];
    if let (Some(start), Some(end)) = (start, CpuTimes::now()) {
        (conditions.others, conditions.stolen) = end.others_since(start);
    }
    Ok(Limits {
        backend: backend.name().to_owned(),
        device: backend.device().description,
        read: read.peak,
        cache: cache.peak,
        read_curve,
        launch,
        int8,
        bf16,
        f32,
        upload,
        measured: true,
        conditions,
    })
}

/// The rates of rounds that did this much work in these seconds.
fn summarize(work: f64, seconds: &[f64]) -> RateSummary {
    let rates: Vec<f64> = seconds.iter().map(|seconds| work / seconds.max(1e-9)).collect();
    RateSummary::of(&rates)
}

/// Bytes to read so that caches hold no more than a quarter of them, as far as half of the free memory allows.
fn working_set(cache: Option<u64>, free: Option<u64>) -> u64 {
    let wanted = cache.unwrap_or(0).saturating_mul(4).max(MIN_WORKING_SET);
    wanted.min(free.map_or(u64::MAX, |free| free / 2)).max(1 << 20)
}

/// Bytes that the caches hold easily: an eighth of them, at most 16 MiB per thread.
fn cached_set(cache: Option<u64>, threads: usize) -> u64 {
    (cache.unwrap_or(8 << 20) / 8).min((16 << 20) * threads.max(1) as u64).max(64 << 10)
}

/// Bandwidth of reading a working set in host memory: with plain loads, or by a matmul of one row if that is faster,
/// since the backend's own kernels may keep more loads in flight.
fn read_rate(
    backend: &Arc<dyn Backend>,
    threads: usize,
    working_set: u64,
    passes: usize,
) -> Result<RateSummary, RuntimeError> {
    let plain = host_read(threads, working_set, passes);
    let row = bytes_of(DType::F32, MAX_COLUMNS);
    let columns = (working_set as usize / row).max(1);
    let own =
        summarize((columns * row) as f64, &matmul_seconds(backend, DType::F32, 1, columns, MAX_COLUMNS)?);
    Ok(if own.peak > plain.peak { own } else { plain })
}

/// How fast a matmul of one row reads weights, by their bytes.
fn read_curve(
    backend: &Arc<dyn Backend>,
    cache: Option<u64>,
    free: Option<u64>,
) -> Result<ReadCurve, RuntimeError> {
    let row = bytes_of(CURVE_TYPE, MAX_COLUMNS);
    let mut points: Vec<ReadPoint> = Vec::new();
    for bytes in curve_sets(cache, free) {
        let columns = (bytes as usize / row.max(1)).max(1);
        let bytes = (columns * row) as f64;
        let rates = summarize(bytes, &matmul_seconds(backend, CURVE_TYPE, 1, columns, MAX_COLUMNS)?);
        points.push(ReadPoint { working_set: bytes, rate: rates.peak });
    }
    Ok(ReadCurve::new(&points))
}

/// Bytes of weights to read for the curve: more and more, as far as the weights and their packed form take half of the free memory.
fn curve_sets(cache: Option<u64>, free: Option<u64>) -> Vec<u64> {
    let most = free.map_or(MAX_CURVE_SET, |free| (free / 4).min(MAX_CURVE_SET)).max(64 << 10);
    let eighth = (cache.unwrap_or(32 << 20) / 8).max(64 << 10);
    let mut sets: Vec<u64> =
        CURVE_EIGHTHS.iter().map(|count| eighth.saturating_mul(*count).min(most)).collect();
    sets.dedup();
    sets
}

/// Seconds that a small matmul takes beside reading its weights.
fn launch_seconds(backend: &Arc<dyn Backend>, curve: &ReadCurve) -> Result<f64, RuntimeError> {
    let g = GraphBuilder::new();
    let bytes = bytes_of(CURVE_TYPE, CHAIN_WIDTH * CHAIN_WIDTH);
    let data = Data::from(vec![WEIGHT_BYTE; bytes]);
    let w = g.weight("w", Weight::with_data(CURVE_TYPE, [CHAIN_WIDTH, CHAIN_WIDTH], data));
    let mut y = g.input("x", DType::F32, [1, CHAIN_WIDTH]);
    for _ in 0..CHAIN {
        // Values stay finite: the norm of every input is the same.
        y = w.mul_mat(y.rms_norm(1e-5));
    }
    g.output("y", y);
    let fastest = run_seconds(backend, g, CHAIN_WIDTH)?.into_iter().fold(f64::INFINITY, f64::min);
    let reading = curve.rate(bytes as f64).map_or(0.0, |rate| bytes as f64 / rate);
    let each = fastest / CHAIN as f64 - reading;
    Ok(if each.is_finite() { each.max(0.0) } else { 0.0 })
}

/// Bandwidth of a device's memory: matmuls of one row with more and more weights. Returns the rate with the most weights,
/// and their bytes.
fn device_read(backend: &Arc<dyn Backend>) -> Result<(RateSummary, u64), RuntimeError> {
    let free = [backend.device().free_bytes, machine::free_memory()].into_iter().flatten().min();
    // The weights are in host memory and, maybe repacked, on the device.
    let largest = (free.unwrap_or(u64::MAX) / 4).min(MIN_WORKING_SET) as usize;
    let mut best = (RateSummary::default(), 0);
    for dtype in [DType::F32, DType::Q8_0] {
        let row = bytes_of(dtype, MAX_COLUMNS);
        let mut columns = MAX_COLUMNS;
        loop {
            let bytes = columns * row;
            let rates = summarize(bytes as f64, &matmul_seconds(backend, dtype, 1, columns, MAX_COLUMNS)?);
            let is_long = bytes as f64 / rates.peak.max(1e-9) > MIN_SECONDS;
            let next = (columns * 4).min(largest / row.max(1));
            if is_long || next <= columns {
                if rates.peak > best.0.peak {
                    best = (rates, bytes as u64);
                }
                break;
            }
            columns = next;
        }
    }
    Ok(best)
}

/// Bytes per second of copies from pinned host memory to a device: the fastest of several rounds.
fn upload_rate(backend: &dyn Backend) -> Result<f64, RuntimeError> {
    let free = [backend.device().free_bytes, machine::free_memory()].into_iter().flatten().min();
    let bytes = (free.unwrap_or(u64::MAX) / 8).min(UPLOAD_BYTES) as usize;
    let mut seconds = Vec::new();
    let mut measure = || -> Result<(), BackendError> {
        let from = Region::new(backend.staging(bytes)?, 0, bytes)?;
        let to = Region::new(backend.allocate(bytes, Usage::Compute)?, 0, bytes)?;
        let mut queue = backend.queue()?;
        for _ in 0..=ROUNDS {
            let started = Instant::now();
            if queue.copy(&from, &to)? {
                queue.synchronize()?;
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        Ok(())
    };
    let name = backend.name().to_owned();
    measure().map_err(|error| RuntimeError::Device {
        backend: name,
        split: None,
        node: None,
        error: Box::new(error),
    })?;
    Ok(summarize(bytes as f64, &seconds).peak)
}

fn bytes_of(dtype: DType, elements: usize) -> usize {
    elements / dtype.block_len().max(1) * dtype.block_bytes()
}

/// Seconds of a matmul of `rows × inner` activations with `columns × inner` weights, of each round.
fn matmul_seconds(
    backend: &Arc<dyn Backend>,
    dtype: DType,
    rows: usize,
    columns: usize,
    inner: usize,
) -> Result<Vec<f64>, RuntimeError> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, inner]);
    let data = Data::from(vec![WEIGHT_BYTE; bytes_of(dtype, columns * inner)]);
    let w = g.weight("w", Weight::with_data(dtype, [columns, inner], data));
    g.output("y", w.mul_mat(x));
    run_seconds(backend, g, rows * inner)
}

/// Seconds of each round of a graph with so many numbers of an input `x`.
fn run_seconds(
    backend: &Arc<dyn Backend>,
    g: GraphBuilder,
    numbers: usize,
) -> Result<Vec<f64>, RuntimeError> {
    let graph = g.finish().map_err(|error| RuntimeError::BadPlan(error.to_string()))?;
    let mut session = Scheduler::new([Arc::clone(backend)]).plan(graph)?.session()?;
    session.set("x", vec![0.5f32; numbers].as_slice())?;
    let mut all = Vec::new();
    for round in 0..=ROUNDS {
        let started = Instant::now();
        let trace = session.debug().trace(Detail::Splits)?;
        let taken = trace.splits.iter().map(|split| split.seconds).sum::<f64>();
        // A device without a clock of its own is timed by the host.
        let seconds = if taken > 0.0 { taken } else { started.elapsed().as_secs_f64() };
        if round > 0 || seconds > MIN_SECONDS {
            all.push(seconds);
        }
        if seconds > 10.0 * MIN_SECONDS {
            break;
        }
    }
    Ok(all)
}

/// Bytes per second of plain loads by several threads, each of which reads its part of the working set `passes` times a
/// round.
fn host_read(threads: usize, working_set: u64, passes: usize) -> RateSummary {
    let numbers = vec![1u64; (working_set / 8) as usize];
    let share = numbers.len().div_ceil(threads.max(1)).max(1);
    let parts: Vec<&[u64]> = numbers.chunks(share).collect();
    let barrier = Barrier::new(parts.len());
    // The times at which each thread began and ended each round.
    let times: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let read = |part: &'_ [u64]| {
            let mut times = Vec::with_capacity(ROUNDS + 1);
            for _ in 0..=ROUNDS {
                barrier.wait();
                let started = Instant::now();
                for _ in 0..passes {
                    let part = std::hint::black_box(part);
                    std::hint::black_box(sum(part));
                }
                times.push((started, Instant::now()));
            }
            times
        };
        let threads: Vec<_> = parts.iter().map(|part| scope.spawn(move || read(part))).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let seconds = (1..=ROUNDS).filter_map(|round| {
        let of_round = times.iter().filter_map(|times| times.get(round));
        let start = of_round.clone().map(|(start, _)| *start).min()?;
        Some(of_round.map(|(_, end)| *end).max()?.saturating_duration_since(start).as_secs_f64())
    });
    let seconds: Vec<f64> = seconds.collect();
    summarize((numbers.len() * 8 * passes) as f64, &seconds)
}

/// The sum of all numbers, in many independent parts.
fn sum(numbers: &[u64]) -> u64 {
    let (chunks, rest) = numbers.as_chunks::<16>();
    let mut sums = [0u64; 16];
    for chunk in chunks {
        for (sum, number) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*number);
        }
    }
    sums.iter().chain(rest).fold(0, |sum, number| sum.wrapping_add(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_set_exceeds_the_caches_and_fits_the_memory() {
        let gib = 1u64 << 30;
        assert_eq!(working_set(Some(260 << 20), Some(20 * gib)), 1040 << 20);
        assert_eq!(working_set(Some(32 << 20), Some(20 * gib)), gib);
        assert_eq!(working_set(None, None), gib);
        assert_eq!(working_set(Some(gib), Some(2 * gib)), gib);
        assert_eq!(cached_set(Some(32 << 20), 2), 4 << 20);
        assert_eq!(cached_set(Some(260 << 20), 1), 16 << 20);
        let mib = |sets: Vec<u64>| sets.iter().map(|bytes| bytes >> 20).collect::<Vec<_>>();
        assert_eq!(mib(curve_sets(Some(32 << 20), Some(20 * gib))), [4, 8, 16, 32, 64, 128, 256, 512]);
        assert_eq!(mib(curve_sets(Some(gib), Some(4 * gib))), [128, 256, 512, 1024]);
        assert!(!curve_sets(None, Some(0)).is_empty());
    }

    #[test]
    fn all_numbers_are_read() {
        let numbers: Vec<u64> = (1..=200).collect();
        assert_eq!(sum(&numbers), 200 * 201 / 2);
    }

    #[test]
    fn rates_are_work_per_second_of_the_fastest_round() {
        let rates = summarize(100.0, &[4.0, 5.0, 4.0]);
        assert_eq!((rates.peak, rates.spread), (25.0, 0.0));
    }
}
