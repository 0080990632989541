//! Low-rank adapters: opening and converting those of PEFT, and merging them into a model file.
//!
//! Adapters can also be used without merging: [`quadriga_llm::Model::with_adapters`] adds their products while the model runs.

use std::cell::RefCell;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use quadriga_gguf::{File, Tensor, Writer};
use quadriga_graph::{DType, blocks};
use quadriga_llm::{Adapter, AdapterMatrix, Model};

use crate::convert::{is_peft, read_peft};
use crate::quantize::{RowsError, first_not_finite, is_target, quantize_in_range};
use crate::shards::writer_like;

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
    #[error(
        "row {row} of {name} would have a value that is not finite: the model is damaged, or the scale too large"
    )]
    NotFinite { name: String, row: usize },
    #[error(
        "row {row} of {name} would have the value {value}, which {dtype} cannot hold; use a smaller scale, or a model file of a \
         larger type"
    )]
    Overflow { name: String, row: usize, value: f32, dtype: DType },
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

/// Writes an adapter that PEFT saved as a GGUF file, for the model in another. How many matrices of the model it changes.
pub fn convert(adapter: &Path, model: &Path, output: &Path) -> Result<usize, LoraError> {
    let base = File::open(model)?;
    let inputs = match adapter.is_dir() {
        true => {
            std::fs::read_dir(adapter).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        }
        false => vec![adapter.to_owned()],
    };
    crate::check_output(output, base.paths().map(Path::to_owned).chain(inputs))?;
    // Names, shapes and factors are checked before anything is written.
    let opened = open(adapter, 1.0, &base)?;
    let file = read_peft(adapter, &base)?;
    Model::from_file(base)?.with_adapters(&[opened])?;
    let mut writer = Writer::new();
    for (key, value) in file.metadata() {
        writer.set(key, value)?;
    }
    for tensor in file.tensors() {
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes())?;
    }
    writer.write(output)?;
    Ok(file.tensor_count() / 2)
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

/// The tensor of the token embedding, and that of the output matrix, without which the embedding is used as one.
const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";

/// What the writers of all tensors share.
struct MergeState<'p> {
    progress: RefCell<&'p mut dyn FnMut(usize, usize) -> ControlFlow<()>>,
    total: usize,
    failure: RefCell<Option<LoraError>>,
}

impl MergeState<'_> {
    /// Tells of the tensor that is being written; an error if the user gave up.
    fn check(&self, index: usize) -> io::Result<()> {
        match (self.progress.borrow_mut())(index, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(self.fail(LoraError::Cancelled)),
        }
    }

    /// Keeps an error, of which the writer of a file only needs to know that there is one.
    fn fail(&self, error: LoraError) -> io::Error {
        let other = io::Error::other(error.to_string());
        *self.failure.borrow_mut() = Some(error);
        other
    }

    /// Writes a tensor as it is.
    fn copy(&self, index: usize, tensor: &Tensor<'_>, out: &mut dyn Write) -> io::Result<()> {
        for piece in tensor.bytes().chunks(COPIED) {
            self.check(index)?;
            out.write_all(piece)?;
        }
        Ok(())
    }
}

/// Merges adapters into a model; each tensor keeps its type. `progress` is told of the tensors that are written and can
/// cancel. How many tensors were changed.
///
/// Adapters of the token embedding do not change the output matrix. Where that is the embedding itself, the file gets an
/// `output.weight` with what it was.
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
    let mut changed = 0;
    let state = MergeState {
        progress: RefCell::new(progress),
        total: file.tensor_count(),
        failure: RefCell::default(),
    };
    let mut writer = writer_like(&file);
    for (key, value) in file.metadata().filter(|(key, _)| !key.starts_with("split.")) {
        writer.set(key, value)?;
    }
    for (index, tensor) in file.tensors().enumerate() {
        let name = tensor.name();
        let mut updates = Vec::new();
        for adapter in adapters {
            updates.extend(Update::new(name, adapter, &tensor)?);
        }
        // A scale of 0 adds nothing: the tensor keeps its bytes.
        updates.retain(|update| update.factor != 0.0);
        let (is_changed, state) = (!updates.is_empty(), &state);
        if is_changed {
            changed += 1;
            check_target(name, tensor.dtype())?;
        }
        writer.tensor(name, tensor.dtype(), tensor.shape(), move |out| match updates.is_empty() {
            true => state.copy(index, &tensor, out),
            false => write_merged(&tensor, &updates, (state, index), out),
        })?;
        if is_changed && name == EMBEDDING && is_tied(&file) {
            writer
                .tensor(OUTPUT, tensor.dtype(), tensor.shape(), move |out| state.copy(index, &tensor, out))?;
        }
    }
    let written = writer.write(output);
    if let Some(failure) = state.failure.take() {
        return Err(failure);
    }
    written?;
    Ok(changed)
}

/// Whether a model computes its logits with the token embedding.
fn is_tied(file: &File) -> bool {
    let uses_output = || {
        let has = |name: &str| name == OUTPUT || file.find_tensor(name).is_some();
        quadriga_llm::models::tensors(file, &has)
            .is_ok_and(|tensors| tensors.iter().any(|tensor| tensor.name == OUTPUT))
    };
    file.find_tensor(OUTPUT).is_none() && uses_output()
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

/// Bytes that are copied between two looks at whether the user gave up.
const COPIED: usize = 4 << 20;

/// Writes the rows of a tensor with what adapters add, quantized again to its type.
fn write_merged(
    tensor: &Tensor<'_>,
    updates: &[Update],
    (state, index): (&MergeState<'_>, usize),
    out: &mut dyn Write,
) -> io::Result<()> {
    let columns = tensor.shape().dims().last().copied().unwrap_or(1).max(1);
    let row_bytes = tensor.dtype().row_bytes(columns).unwrap_or(1).max(1);
    let rows = (AT_ONCE / columns).max(1);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for (step, source) in tensor.bytes().chunks(threads * rows * row_bytes).enumerate() {
        state.check(index)?;
        let mut merged = source.to_vec();
        let results: Vec<_> = std::thread::scope(|scope| {
            let parts = merged.chunks_mut(rows * row_bytes).enumerate();
            let parts: Vec<_> = parts
                .map(|(part, bytes)| {
                    let first = (step * threads + part) * rows;
                    scope.spawn(move || merge_rows(tensor, columns, first, updates, bytes))
                })
                .collect();
            parts.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for result in results {
            match result {
                Ok(result) => result.map_err(|error| state.fail(error))?,
                Err(_) => return Err(io::Error::other("a thread has failed")),
            }
        }
        out.write_all(&merged)?;
    }
    Ok(())
}

/// Adds updates to rows from `first` on.
fn merge_rows(
    tensor: &Tensor<'_>,
    columns: usize,
    first: usize,
    updates: &[Update],
    bytes: &mut [u8],
) -> Result<(), LoraError> {
    let (dtype, name) = (tensor.dtype(), tensor.name());
    let count = bytes.len() / dtype.row_bytes(columns).unwrap_or(1).max(1) * columns;
    let mut values = elements(name, dtype, bytes, count)?;
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        updates.iter().for_each(|update| update.add_row(first + row, values));
    }
    let row = |place: usize| first + place / columns;
    if let Some(place) = first_not_finite(&values) {
        return Err(LoraError::NotFinite { name: name.to_owned(), row: row(place) });
    }
    quantize_in_range(dtype, &values, columns, None, bytes).map_err(|error| match error {
        RowsError::Format(error) => LoraError::Elements { name: name.to_owned(), reason: error.to_string() },
        RowsError::Beyond { place, value } => {
            LoraError::Overflow { name: name.to_owned(), row: row(place), value, dtype }
        }
    })
}
