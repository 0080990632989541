//! Writes the quantized file, or its parts.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use quadriga_gguf::{File, OwnedValue, SplitName, Value, ValueType};

use super::file_type::FileType;
use super::options::QuantizeOptions;
use super::pipeline::{Results, Work, matrices, run};
use super::plan::{QuantizePlan, TensorPlan};
use crate::error::{Error, QuantizeError, Result};
use crate::importance::ImportanceMatrix;
use crate::shards::{FolderError, WorkFolder, writer_like};

/// The version of the block formats, `general.quantization_version`.
const QUANTIZATION_VERSION: u32 = 2;

/// A tensor that was written.
#[derive(Clone, Debug)]
pub struct WrittenTensor {
    /// What was decided about it.
    pub plan: TensorPlan,
    /// Whether its importance was known.
    pub weighted: bool,
}

/// What is told about progress.
pub struct QuantizeHooks<'h> {
    /// Called after each tensor.
    pub progress: &'h mut dyn FnMut(&WrittenTensor),
    /// Asked between chunks; true ends the run.
    pub cancelled: &'h (dyn Fn() -> bool + Sync),
}

/// The files that [`quantize_file`] writes: the output, or with `keep_split` its parts. An error if one of them is an input.
pub fn output_paths(
    file: &File,
    output: &Path,
    options: &QuantizeOptions,
    importance: Option<&Path>,
) -> Result<Vec<PathBuf>> {
    let parts = if options.keep_split { file.part_count() } else { 1 };
    let paths = (0..parts).map(|part| part_path(output, part, parts)).collect::<Result<Vec<_>>>()?;
    for path in &paths {
        crate::check_output(path, file.paths().chain(importance))?;
    }
    Ok(paths)
}

/// Quantizes `file` to `output`, by a plan. The output appears under its name when it is complete; several parts get their names
/// when all are complete, the first of them last, so that old and new parts are never taken for one model.
pub fn quantize_file(
    file: &File,
    output: &Path,
    plan: &QuantizePlan,
    options: &QuantizeOptions,
    importance: Option<(&ImportanceMatrix, &Path)>,
    hooks: &mut QuantizeHooks<'_>,
) -> Result<()> {
    let columns = columns(plan, options, importance.map(|(matrix, _)| matrix))?;
    let weighted: Vec<bool> = columns.iter().map(Option::is_some).collect();
    let work = Work::new(file, plan, columns)?;
    let counts = work.chunk_counts();
    let paths = output_paths(file, output, options, importance.map(|(_, path)| path))?;
    let parts = paths.len();
    let waiting = if parts > 1 { Some(waiting_parts(&paths)?) } else { None };
    let part_of: Vec<usize> =
        plan.sources(file)?.iter().map(|tensor| if parts > 1 { tensor.part() } else { 0 }).collect();
    let metadata = metadata(file, plan.file_type(options.file_type), options, importance)?;
    run(&work, options.thread_count(), options.memory, hooks.cancelled, |results| {
        for (part, path) in paths.iter().enumerate() {
            let failure = Mutex::new(None);
            let progress = Mutex::new(&mut *hooks.progress);
            let mut writer = writer_like(file);
            if part == 0 {
                for (key, value) in &metadata {
                    writer.set(key, value.clone())?;
                }
            }
            if parts > 1 {
                writer.set("split.no", part as u16)?.set("split.count", parts as u16)?;
                writer.set("split.tensors.count", plan.tensors.len() as i32)?;
            }
            for (index, tensor) in plan.tensors.iter().enumerate() {
                if part_of.get(index) != Some(&part) {
                    continue;
                }
                let chunks = counts.get(index).copied().unwrap_or_default();
                let weighted = weighted.get(index).copied().unwrap_or_default();
                let (failure, progress) = (&failure, &progress);
                writer.tensor(&tensor.name, tensor.to, tensor.shape, move |out| {
                    write_tensor(results, chunks, out, failure)?;
                    if let Ok(mut progress) = progress.lock() {
                        progress(&WrittenTensor { plan: tensor.clone(), weighted });
                    }
                    Ok(())
                })?;
            }
            let written = match &waiting {
                Some(waiting) => writer.write(waiting.part(path)),
                None => writer.write(path),
            };
            if let Ok(Some(error)) = failure.into_inner() {
                return Err(Error::Quantize(error));
            }
            written?;
        }
        match waiting {
            Some(waiting) => Ok(waiting.publish(&paths).map_err(part_error)?),
            None => Ok(()),
        }
    })
}

/// The folder in which parts wait until all are complete.
fn waiting_parts(paths: &[PathBuf]) -> Result<WorkFolder, QuantizeError> {
    let first = paths.first().map_or(Path::new(""), PathBuf::as_path);
    let prefix = SplitName::of(first).map_or_else(|| "model".to_owned(), |name| name.prefix);
    WorkFolder::create(WorkFolder::parent(first), &prefix).map_err(part_error)
}

fn part_error(FolderError { action, path, source }: FolderError) -> QuantizeError {
    QuantizeError::Part { action, path, source }
}

fn write_tensor(
    results: &Results<'_>,
    chunks: usize,
    out: &mut dyn io::Write,
    failure: &Mutex<Option<QuantizeError>>,
) -> io::Result<()> {
    for _ in 0..chunks {
        match results.next() {
            Ok(chunk) => out.write_all(&chunk.0)?,
            Err(error) => {
                let other = io::Error::other(error.to_string());
                if let Ok(mut failure) = failure.lock() {
                    *failure = Some(error);
                }
                return Err(other);
            }
        }
    }
    Ok(())
}

/// The importance of each tensor's columns; an error where a matrix of another model was given.
pub(crate) fn columns(
    plan: &QuantizePlan,
    options: &QuantizeOptions,
    importance: Option<&ImportanceMatrix>,
) -> Result<Vec<Option<Vec<f32>>>> {
    let columns = plan.tensors.iter().map(|tensor| {
        let Some(matrix) = importance.filter(|_| options.uses_importance(&tensor.name)) else {
            return Ok(None);
        };
        let Some(entry) = matrix.entries.get(&tensor.source) else { return Ok(None) };
        let (matrices, _) = matrices(tensor);
        let weights = matrix.weights(&tensor.source, tensor.row_len(), matrices);
        if weights.is_none() {
            let (found, expected) = (entry.sums.len(), tensor.row_len());
            let tensor = tensor.name.clone();
            return Err(QuantizeError::Importance { tensor, found, expected, matrices }.into());
        }
        Ok(weights)
    });
    columns.collect()
}

/// The metadata of the output: that of the input, with what has changed.
fn metadata(
    file: &File,
    file_type: FileType,
    options: &QuantizeOptions,
    importance: Option<(&ImportanceMatrix, &Path)>,
) -> Result<Vec<(String, OwnedValue)>> {
    let mut changed: Vec<(String, OwnedValue)> =
        vec![("general.quantization_version".to_owned(), QUANTIZATION_VERSION.into())];
    if !options.only_copy {
        changed.push(("general.file_type".to_owned(), file_type.id().into()));
    }
    changed.extend(options.pruned.keys(file));
    if let Some((matrix, path)) = importance {
        let path = path.to_string_lossy().into_owned();
        changed.push(("quantize.imatrix.file".to_owned(), path.into()));
        if let Some(dataset) = matrix.datasets.first() {
            changed.push(("quantize.imatrix.dataset".to_owned(), dataset.as_str().into()));
        }
        changed.push(("quantize.imatrix.entries_count".to_owned(), (matrix.entries.len() as u32).into()));
        changed.push(("quantize.imatrix.chunks_count".to_owned(), matrix.chunk_count.into()));
    }
    for (key, value) in &options.overrides {
        // A value takes the type that the key has in the input. Floats of new keys have 32 bits, as all readers expect them.
        let is_float = value.value().kind() == ValueType::F64;
        let kind = file.value(key).map(|old| old.kind()).or(is_float.then_some(ValueType::F32));
        let value = match kind {
            Some(kind) if kind != value.value().kind() => {
                convert(value, kind).ok_or_else(|| QuantizeError::OverrideType { key: key.clone(), kind })?
            }
            _ => value.clone(),
        };
        changed.retain(|(other, _)| other != key);
        changed.push((key.clone(), value));
    }
    let mut metadata = Vec::new();
    for (key, value) in file.metadata() {
        if key.starts_with("split.") {
            continue;
        }
        let place = changed.iter().position(|(other, _)| other == key);
        metadata.push(match place {
            Some(place) => changed.remove(place),
            None => (key.to_owned(), value.into()),
        });
    }
    metadata.extend(changed);
    Ok(metadata)
}

/// An integer or float as another type of number, if it fits.
fn convert(value: &OwnedValue, kind: ValueType) -> Option<OwnedValue> {
    if let Some(number) = value.value().integer() {
        return Some(match kind {
            ValueType::U8 => u8::try_from(number).ok()?.into(),
            ValueType::I8 => i8::try_from(number).ok()?.into(),
            ValueType::U16 => u16::try_from(number).ok()?.into(),
            ValueType::I16 => i16::try_from(number).ok()?.into(),
            ValueType::U32 => u32::try_from(number).ok()?.into(),
            ValueType::I32 => i32::try_from(number).ok()?.into(),
            ValueType::U64 => u64::try_from(number).ok()?.into(),
            ValueType::I64 => i64::try_from(number).ok()?.into(),
            ValueType::F32 => (number as f32).into(),
            ValueType::F64 => (number as f64).into(),
            _ => return None,
        });
    }
    match (value.value(), kind) {
        (Value::F64(number), ValueType::F32) => {
            let short = number as f32;
            (short.is_finite() || !number.is_finite()).then(|| short.into())
        }
        _ => None,
    }
}

/// The name of a part of the output.
fn part_path(output: &Path, part: usize, parts: usize) -> Result<PathBuf> {
    if parts == 1 {
        return Ok(output.to_owned());
    }
    let wrong = || QuantizeError::SplitName { path: output.to_owned() };
    let name = output.file_name().and_then(|name| name.to_str()).ok_or_else(wrong)?;
    let stem = name.strip_suffix(".gguf").ok_or_else(wrong)?;
    // A name that is already that of a part.
    let stem = match stem.rsplit_once("-of-").and_then(|(rest, _)| rest.rsplit_once('-')) {
        Some((prefix, number)) if number.len() == 5 && number.parse::<u32>().is_ok() => prefix,
        _ => stem,
    };
    Ok(output.with_file_name(format!("{stem}-{:05}-of-{parts:05}.gguf", part + 1)))
}
