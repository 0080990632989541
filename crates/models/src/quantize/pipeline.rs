//! Quantizes chunks of rows on all threads, and hands the results on in the order of the file.
//!
//! Chunks of all tensors are numbered in one sequence. Threads take the next number, read, quantize and deliver; the
//! writer waits for the number that comes next. Only so many chunks are in flight as memory allows, whatever the model.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use quadriga_gguf::{File, Tensor};

use super::plan::{QuantizePlan, TensorPlan};
use super::range::{RowsError, quantize_in_range};
use super::rows::RowReader;
use crate::error::QuantizeError;

/// Values of a chunk: what a core's second-level cache holds with room to spare.
const CHUNK: usize = 64 << 10;

/// Rows of one tensor that are quantized together.
pub(crate) struct Chunk {
    /// The index of the tensor.
    pub(crate) tensor: usize,
    rows: Range<usize>,
    /// The matrix (expert) that the rows belong to.
    matrix: usize,
}

/// The bytes of a quantized chunk.
pub(crate) struct Quantized(pub(crate) Vec<u8>);

/// What all threads read.
pub(crate) struct Work<'a> {
    tensors: Vec<Tensor<'a>>,
    plan: &'a QuantizePlan,
    /// Per tensor: the importance of columns, of each matrix.
    importance: Vec<Option<Vec<f32>>>,
    reader: RowReader,
    chunks: Vec<Chunk>,
}

impl<'a> Work<'a> {
    pub(crate) fn new(
        file: &'a File,
        plan: &'a QuantizePlan,
        importance: Vec<Option<Vec<f32>>>,
    ) -> Result<Work<'a>, QuantizeError> {
        let tensors = plan.sources(file)?;
        let mut chunks = Vec::new();
        for (tensor, plan) in plan.tensors.iter().enumerate() {
            let (matrices, rows) = matrices(plan);
            let at_once = (CHUNK / plan.row_len().max(1)).max(1);
            for matrix in 0..matrices {
                for start in (0..rows).step_by(at_once) {
                    let end = (start + at_once).min(rows);
                    let rows = matrix * rows + start..matrix * rows + end;
                    chunks.push(Chunk { tensor, rows, matrix });
                }
            }
        }
        Ok(Work { tensors, plan, importance, reader: RowReader::new(file)?, chunks })
    }

    /// The number of chunks of each tensor.
    pub(crate) fn chunk_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.plan.tensors.len()];
        for chunk in &self.chunks {
            if let Some(count) = counts.get_mut(chunk.tensor) {
                *count += 1;
            }
        }
        counts
    }

    /// The bytes that one chunk takes while it is computed and until it is written.
    fn chunk_bytes(&self) -> usize {
        let longest = self.plan.tensors.iter().map(TensorPlan::row_len).max().unwrap_or_default();
        12 * longest.max(CHUNK)
    }

    fn quantize(&self, chunk: &Chunk, buffers: &mut Buffers) -> Result<Quantized, QuantizeError> {
        let (Some(tensor), Some(plan)) =
            (self.tensors.get(chunk.tensor), self.plan.tensors.get(chunk.tensor))
        else {
            return Err(QuantizeError::Cancelled);
        };
        let row_len = plan.row_len();
        let row_bytes = plan.to.row_bytes(row_len).unwrap_or_default();
        let mut bytes = vec![0; row_bytes * chunk.rows.len()];
        if plan.from == plan.to {
            self.reader.bytes(tensor, row_bytes * chunk.rows.start, &mut bytes)?;
            return Ok(Quantized(bytes));
        }
        let Buffers { raw, values } = buffers;
        self.reader.values(tensor, chunk.rows.clone(), raw, values)?;
        let importance = self.importance.get(chunk.tensor).and_then(Option::as_ref);
        let columns = |all: &'_ Vec<f32>| {
            all.get(chunk.matrix * row_len..(chunk.matrix + 1) * row_len).map(<[f32]>::to_vec)
        };
        let importance = importance.and_then(columns);
        let failed = |error: RowsError| match error {
            RowsError::Format(_) => QuantizeError::NotATarget { dtype: plan.to },
            RowsError::Beyond { place, value } => QuantizeError::Overflow {
                tensor: plan.name.clone(),
                row: chunk.rows.start + place / row_len.max(1),
                value,
                dtype: plan.to,
            },
        };
        quantize_in_range(plan.to, values, row_len, importance.as_deref(), &mut bytes).map_err(failed)?;
        Ok(Quantized(bytes))
    }
}

/// Matrices of a tensor (experts), and rows of each.
pub(crate) fn matrices(plan: &TensorPlan) -> (usize, usize) {
    match plan.shape.dims() {
        [outer @ .., rows, _] => (outer.iter().product(), *rows),
        _ => (1, 1),
    }
}

/// Memory that a thread uses for all its chunks.
#[derive(Default)]
struct Buffers {
    raw: Vec<u8>,
    values: Vec<f32>,
}

/// Chunks that are done and not yet written.
struct Delivered {
    /// The number of the chunk that is written next.
    next: usize,
    ready: BTreeMap<usize, Result<Quantized, QuantizeError>>,
    /// The writer has given up.
    stopped: bool,
}

/// Gives the writer the chunks in order.
pub(crate) struct Results<'w> {
    delivered: &'w Mutex<Delivered>,
    changed: &'w Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Results<'_> {
    /// Waits for the next chunk.
    pub(crate) fn next(&self) -> Result<Quantized, QuantizeError> {
        let mut delivered = lock(self.delivered);
        loop {
            let next = delivered.next;
            if let Some(result) = delivered.ready.remove(&next) {
                delivered.next += 1;
                self.changed.notify_all();
                return result;
            }
            delivered = self.changed.wait(delivered).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Quantizes all chunks on `threads` threads while `write` takes the results.
pub(crate) fn run<T>(
    work: &Work<'_>,
    threads: usize,
    memory: usize,
    cancelled: &(dyn Fn() -> bool + Sync),
    write: impl FnOnce(&Results<'_>) -> T,
) -> T {
    let window = (memory / work.chunk_bytes()).clamp(1, 64 * threads).max(threads);
    let taken = AtomicUsize::new(0);
    let delivered = Mutex::new(Delivered { next: 0, ready: BTreeMap::new(), stopped: false });
    let changed = Condvar::new();
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut buffers = Buffers::default();
                loop {
                    let number = taken.fetch_add(1, Ordering::Relaxed);
                    let Some(chunk) = work.chunks.get(number) else { return };
                    let mut state = lock(&delivered);
                    while !state.stopped && number >= state.next + window {
                        state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    }
                    if state.stopped {
                        return;
                    }
                    drop(state);
                    let result = match cancelled() {
                        true => Err(QuantizeError::Cancelled),
                        false => work.quantize(chunk, &mut buffers),
                    };
                    lock(&delivered).ready.insert(number, result);
                    changed.notify_all();
                }
            });
        }
        let guard = Stop { delivered: &delivered, changed: &changed };
        let result = write(&Results { delivered: &delivered, changed: &changed });
        drop(guard);
        result
    })
}

/// Ends the threads when the writer is done, also by a panic.
struct Stop<'w> {
    delivered: &'w Mutex<Delivered>,
    changed: &'w Condvar,
}

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        lock(self.delivered).stopped = true;
        self.changed.notify_all();
    }
}
