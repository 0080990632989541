//! Low-rank adapters: merging them into a model file.
//!
//! Adapters can also be used without merging: [`quadriga_llm::Model::with_adapters`] adds their products while the model runs.

use std::cell::{Cell, RefCell};
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use quadriga_gguf::{File, Tensor, Writer};
use quadriga_graph::{DType, blocks};
use quadriga_llm::{Adapter, AdapterMatrix};

use crate::convert::{is_peft, read_peft};
use crate::quantize::{is_target, quantize_rows};

/// Why adapters could not be merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum LoraError {
    #[error(transparent)]
    Gguf(#[from] quadriga_gguf::Error),
    #[error(transparent)]
    Model(#[from] quadriga_llm::Error),
    #[error(transparent)]
    Peft(#[from] crate::convert::ConvertError),
    #[error("the adapter belongs to architecture {adapter}, the model is {model}")]
    Architecture { adapter: String, model: String },
    #[error("the model has no tensor {name:?}, which the adapter changes")]
    MissingTensor { name: String },
    #[error("{name} is {found}, but the adapter's product is {rows} × {columns}")]
    Shape { name: String, found: String, rows: usize, columns: usize },
    #[error(
        "{name} is {dtype}, to which this program cannot quantize; convert the model to another type first"
    )]
    Type { name: String, dtype: DType },
    #[error(transparent)]
    Output(#[from] crate::OutputIsInput),
    #[error("{}: the adapter's alpha or scale makes factors that are not finite: the file is damaged", path.display())]
    Factor { path: PathBuf },
    #[error("the elements of {name} cannot be read: {reason}")]
    Elements { name: String, reason: String },
    #[error("cancelled")]
    Cancelled,
}

/// Opens an adapter for a model: a GGUF file, or what PEFT saves, a folder with `adapter_config.json` and
/// `adapter_model.safetensors` (or the path of the latter).
///
/// ```no_run
/// use quadriga_llm::Model;
///
/// let model = Model::open("model.gguf")?;
/// let adapter = quadriga_models::lora::open("checkpoint-500".as_ref(), 1.0, model.file())?;
/// let model = model.with_adapters(&[adapter])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn open(path: &Path, scale: f32, model: &File) -> Result<Adapter, LoraError> {
    let adapter = match is_peft(path) {
        true => Adapter::from_file(&read_peft(path, model)?, scale)?,
        false => Adapter::open(path, scale)?,
    };
    let finite = adapter.pairs().all(|(_, pair)| adapter.factor(pair).is_finite());
    if finite { Ok(adapter) } else { Err(LoraError::Factor { path: path.to_owned() }) }
}

/// The elements of a matrix as f32.
fn elements(name: &str, dtype: DType, bytes: &[u8], count: usize) -> Result<Vec<f32>, LoraError> {
    let mut values = vec![0.0; count];
    let failed =
        |error: blocks::FormatError| LoraError::Elements { name: name.to_owned(), reason: error.to_string() };
    blocks::dequantize(dtype, bytes, &mut values).map_err(failed)?;
    Ok(values)
}

/// An adapter's matrices for one tensor, with the factor of their product.
struct Update {
    /// One after another, those of experts.
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
    /// Rows of the tensor, of one expert.
    rows: usize,
    factor: f32,
}

impl Update {
    fn new(name: &str, adapter: &Adapter, tensor: &Tensor<'_>) -> Result<Option<Update>, LoraError> {
        let Some(pair) = adapter.pair(name) else { return Ok(None) };
        let (rows, columns) = (pair.b.dims[0], pair.a.dims[1]);
        let fits = match pair.experts() {
            Some(experts) => *tensor.shape().dims() == [experts, rows, columns],
            None => *tensor.shape().dims() == [rows, columns],
        };
        if !fits {
            let (name, found) = (name.to_owned(), tensor.shape().to_string());
            return Err(LoraError::Shape { name, found, rows, columns });
        }
        let values = |matrix: &AdapterMatrix| {
            let bytes = matrix.data.bytes();
            elements(name, matrix.dtype, &bytes, matrix.count * matrix.dims[0] * matrix.dims[1])
        };
        Ok(Some(Update {
            a: values(&pair.a)?,
            b: values(&pair.b)?,
            rank: pair.rank(),
            rows,
            factor: adapter.factor(pair),
        }))
    }

    /// Adds a row of the product.
    fn add_row(&self, row: usize, values: &mut [f32]) {
        let columns = values.len();
        let own = self.b.get(row * self.rank..(row + 1) * self.rank).unwrap_or_default();
        let expert = row / self.rows.max(1);
        let a = self.a.chunks_exact(columns.max(1)).skip(expert * self.rank);
        for (weight, a) in own.iter().zip(a) {
            let weight = weight * self.factor;
            values.iter_mut().zip(a).for_each(|(value, a)| *value += weight * a);
        }
    }
}

/// Merges adapters into a model; each tensor keeps its type. `progress` is told of the tensors that are written and can
/// cancel. How many tensors were changed.
pub fn merge(
    model: &Path,
    adapters: &[Adapter],
    output: &Path,
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<usize, LoraError> {
    let file = File::open(model)?;
    let architecture: &str = file.get("general.architecture")?;
    for adapter in adapters {
        if adapter.architecture() != architecture {
            let adapter = adapter.architecture().to_owned();
            return Err(LoraError::Architecture { adapter, model: architecture.to_owned() });
        }
        if let Some((name, _)) = adapter.pairs().find(|(name, _)| file.find_tensor(name).is_none()) {
            return Err(LoraError::MissingTensor { name: name.to_owned() });
        }
    }
    crate::check_output(output, file.paths())?;
    let (total, cancelled, mut changed) = (file.tensor_count(), Cell::new(false), 0);
    let progress = RefCell::new(progress);
    let mut writer = Writer::new();
    for (key, value) in file.metadata().filter(|(key, _)| !key.starts_with("split.")) {
        writer.set(key, value)?;
    }
    for (index, tensor) in file.tensors().enumerate() {
        let name = tensor.name();
        let mut updates = Vec::new();
        for adapter in adapters {
            updates.extend(Update::new(name, adapter, &tensor)?);
        }
        if !updates.is_empty() {
            changed += 1;
            check_target(name, tensor.dtype())?;
        }
        let (progress, cancelled) = (&progress, &cancelled);
        writer.tensor(name, tensor.dtype(), tensor.shape(), move |out| {
            if (progress.borrow_mut())(index, total) == ControlFlow::Break(()) {
                cancelled.set(true);
                return Err(io::Error::other("cancelled"));
            }
            if updates.is_empty() {
                out.write_all(tensor.bytes())
            } else {
                write_merged(&tensor, &updates, out)
            }
        })?;
    }
    let written = writer.write(output);
    if cancelled.get() {
        return Err(LoraError::Cancelled);
    }
    written?;
    Ok(changed)
}

/// An error if a type cannot be quantized to.
fn check_target(name: &str, dtype: DType) -> Result<(), LoraError> {
    match is_target(dtype) {
        true => Ok(()),
        false => Err(LoraError::Type { name: name.to_owned(), dtype }),
    }
}

/// Elements that a thread changes at once.
const AT_ONCE: usize = 64 << 10;

/// Writes the rows of a tensor with what adapters add, quantized again to its type.
fn write_merged(tensor: &Tensor<'_>, updates: &[Update], out: &mut dyn Write) -> io::Result<()> {
    let columns = tensor.shape().dims().last().copied().unwrap_or(1).max(1);
    let row_bytes = tensor.dtype().row_bytes(columns).unwrap_or(1).max(1);
    let rows = (AT_ONCE / columns).max(1);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for (index, source) in tensor.bytes().chunks(threads * rows * row_bytes).enumerate() {
        let mut merged = source.to_vec();
        let results: Vec<_> = std::thread::scope(|scope| {
            let parts = merged.chunks_mut(rows * row_bytes).enumerate();
            let parts: Vec<_> = parts
                .map(|(part, bytes)| {
                    let first = (index * threads + part) * rows;
                    scope.spawn(move || merge_rows(tensor.dtype(), columns, first, updates, bytes))
                })
                .collect();
            parts.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for result in results {
            let failed = |error: String| io::Error::new(io::ErrorKind::InvalidData, error);
            match result {
                Ok(result) => result.map_err(|error| failed(error.to_string()))?,
                Err(_) => return Err(failed("a thread has failed".to_owned())),
            }
        }
        out.write_all(&merged)?;
    }
    Ok(())
}

/// Adds updates to rows from `first` on.
fn merge_rows(
    dtype: DType,
    columns: usize,
    first: usize,
    updates: &[Update],
    bytes: &mut [u8],
) -> Result<(), blocks::FormatError> {
    let count = bytes.len() / dtype.row_bytes(columns).unwrap_or(1).max(1) * columns;
    let mut values = vec![0.0; count];
    blocks::dequantize(dtype, bytes, &mut values)?;
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        updates.iter().for_each(|update| update.add_row(first + row, values));
    }
    quantize_rows(dtype, &values, columns, None, bytes)
}
