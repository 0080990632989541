//! Writes a planned conversion, piece by piece.

use std::cell::RefCell;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

use quadriga_gguf::Writer;
use quadriga_graph::{DType, Shape};

use super::encode::encode;
use super::error::{ConvertError, ConvertResult};
use super::output::{OutputTensor, ReadBuffers};
use super::plan::ConversionPlan;
use super::source::TensorStore;
use super::{ConvertObserver, ConvertOptions, ConvertProgress};
use crate::quantize::{RowsError, check_range, first_not_finite};

/// Elements of a piece that one thread converts.
const MAX_PIECE: usize = 1 << 22;

/// The state that the writers of all tensors share.
struct Progress<'o, 'f> {
    observer: &'o mut ConvertObserver<'f>,
    done: u64,
    total: u64,
    cancelled: bool,
    /// What is wrong with the source.
    failure: Option<ConvertError>,
}

/// Why a piece could not be converted.
enum PieceError {
    Io(io::Error),
    Value(ConvertError),
}

impl From<io::Error> for PieceError {
    fn from(error: io::Error) -> PieceError {
        PieceError::Io(error)
    }
}

/// Writes the file.
pub(super) fn write(
    plan: ConversionPlan,
    output: &Path,
    options: &ConvertOptions,
    observer: &mut ConvertObserver<'_>,
) -> ConvertResult<()> {
    let ConversionPlan { keys, tensors, store, .. } = plan;
    let elements = |tensor: &OutputTensor| tensor.dims.iter().product::<usize>() as u64;
    let total = tensors.iter().map(|(tensor, _)| elements(tensor)).sum();
    let progress = RefCell::new(Progress { observer, done: 0, total, cancelled: false, failure: None });
    let mut writer = Writer::new();
    for (key, value) in keys {
        writer.set(&key, value)?;
    }
    for (tensor, dtype) in tensors {
        let shape = Shape::new(&tensor.dims).unwrap_or(Shape::from([0]));
        let name = tensor.name.clone();
        let (store, progress) = (&store, &progress);
        writer.tensor(&name, dtype, shape, move |out| {
            write_tensor(&tensor, dtype, store, options, progress, out)
        })?;
    }
    let written = writer.write(output);
    if let Some(failure) = progress.borrow_mut().failure.take() {
        return Err(failure);
    }
    match written {
        Err(_) if progress.borrow().cancelled => Err(ConvertError::Cancelled),
        written => Ok(written?),
    }
}

/// The rows of a piece, and how many threads have one at once, within the memory of the options. Each thread also reads a matrix
/// of `across` elements as a whole.
fn pieces(options: &ConvertOptions, length: usize, across: usize) -> (usize, usize) {
    let budget = usize::try_from(options.memory).unwrap_or(usize::MAX);
    // The values of the matrix and its bytes in the file; half of the memory is for pieces.
    let matrix = across.saturating_mul(8);
    let most = (budget / 2).checked_div(matrix).unwrap_or(usize::MAX).max(1);
    let wanted = options.threads.clamp(1, 256).min(most);
    let budget = budget.saturating_sub(wanted.saturating_mul(matrix)).max(budget / 2);
    // Values, source bytes and result of each thread's piece.
    let piece = (budget / wanted / 12).clamp(length, MAX_PIECE.max(length)) / length;
    (piece, wanted.min((budget / (12 * piece * length).max(1)).max(1)))
}

/// Converts a tensor, several pieces at once, and writes them in order.
fn write_tensor(
    tensor: &OutputTensor,
    dtype: DType,
    store: &TensorStore,
    options: &ConvertOptions,
    progress: &RefCell<Progress<'_, '_>>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let (rows, length) = (tensor.row_count(), tensor.row_len().max(1));
    let row_bytes = dtype.row_bytes(length).ok_or(io::ErrorKind::InvalidInput)?;
    let (piece, threads) = pieces(options, length, tensor.matrix_read_across());
    let exact = tensor.is_mxfp4();
    let mut buffers: Vec<ReadBuffers> = (0..threads).map(|_| ReadBuffers::default()).collect();
    let mut first = 0;
    while first < rows {
        let results: Vec<Result<Vec<u8>, PieceError>> = std::thread::scope(|scope| {
            let mut running = Vec::new();
            for (thread, buffers) in buffers.iter_mut().enumerate() {
                let start = first + thread * piece;
                let count = piece.min(rows.saturating_sub(start));
                if count == 0 {
                    break;
                }
                running.push(scope.spawn(move || {
                    let mut values = vec![0.0; count * length];
                    tensor.read_rows(store, start, &mut values, buffers)?;
                    let row = |place: usize| start + place / length;
                    if let Some(place) = first_not_finite(&values) {
                        let tensor = tensor.name.clone();
                        return Err(PieceError::Value(ConvertError::NotFinite { tensor, row: row(place) }));
                    }
                    let mut bytes = vec![0; count * row_bytes];
                    encode(dtype, exact, &values, length, &mut bytes)?;
                    // Blocks that are repacked have the same exponents.
                    let checked = match exact {
                        true => Ok(()),
                        false => check_range(dtype, &values, length, None, &bytes),
                    };
                    match checked {
                        Ok(()) => Ok(bytes),
                        Err(RowsError::Format(error)) => Err(io::Error::other(error.to_string()).into()),
                        Err(RowsError::Beyond { place, value }) => {
                            let (tensor, row) = (tensor.name.clone(), row(place));
                            Err(PieceError::Value(ConvertError::Overflow { tensor, row, value, dtype }))
                        }
                    }
                }));
            }
            let failed = || io::Error::other("a thread of the conversion failed");
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(failed().into()))).collect()
        });
        for bytes in results {
            let bytes = match bytes {
                Ok(bytes) => bytes,
                Err(PieceError::Io(error)) => return Err(error),
                Err(PieceError::Value(failure)) => {
                    let error = io::Error::new(io::ErrorKind::InvalidData, failure.to_string());
                    progress.borrow_mut().failure = Some(failure);
                    return Err(error);
                }
            };
            out.write_all(&bytes)?;
            let count = (bytes.len() / row_bytes.max(1)) as u64;
            first += count as usize;
            let mut progress = progress.borrow_mut();
            progress.done += count * length as u64;
            let report = ConvertProgress { tensor: &tensor.name, done: progress.done, total: progress.total };
            if (progress.observer)(report) == ControlFlow::Break(()) {
                progress.cancelled = true;
                return Err(io::Error::other("cancelled"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::output::RowSource;
    use super::*;

    #[test]
    fn matrices_that_are_read_across_are_within_the_memory() {
        let store = TensorStore::of_shapes([("w".to_owned(), vec![3, 1 << 10, 1 << 12])]);
        let source = store.find("w").unwrap().unwrap();
        let plain = OutputTensor::whole("w", source.clone());
        let across = OutputTensor::rows("w", vec![3, 1 << 12, 1 << 10], vec![source], |row| RowSource {
            source: 0,
            start: row,
            step: 1 << 12,
        });
        assert_eq!((plain.matrix_read_across(), across.matrix_read_across()), (0, 1 << 22));
        for (memory, most) in [(512 << 20, 8), (100 << 20, 1), (1 << 20, 1)] {
            let options = ConvertOptions { memory, threads: 16, ..ConvertOptions::default() };
            let (rows, threads) = pieces(&options, 1 << 10, across.matrix_read_across());
            assert_eq!(threads, most, "{memory}");
            let (matrix, piece) = (8 << 22, 12 * (rows << 10));
            // One matrix may have to be larger than the memory.
            let allowed = (memory as usize).max(matrix + memory as usize / 2);
            assert!(rows > 0 && threads * (matrix + piece) <= allowed, "{memory}: {rows} rows, {threads}");
        }
        let options = ConvertOptions { memory: 1 << 20, threads: 16, ..ConvertOptions::default() };
        assert_eq!(pieces(&options, 1 << 10, 0).1, 16);
    }
}
