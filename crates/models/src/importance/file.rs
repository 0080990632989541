//! Files of importance matrices: GGUF, and the older format for reading.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use quadriga_gguf::{File, Writer};
use quadriga_graph::{DType, blocks};

use super::legacy;
use super::matrix::{ImportanceEntry, ImportanceMatrix};
use crate::error::{ImportanceError, Result};

/// The suffixes of the two tensors that a GGUF file has for each weight.
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
/// The key of what tells the text from others.
const TEXT: &str = "quadriga.imatrix.text";
/// The key of the number of its chunks.
const TEXT_CHUNKS: &str = "quadriga.imatrix.text_chunks";
/// The key of the first of them.
const TEXT_START: &str = "quadriga.imatrix.text_start";

/// How GGUF files begin.
const MAGIC: &[u8] = b"GGUF";
/// The longest file that is read into memory: one of the older format, or a pipe.
const MAX_BYTES: u64 = 4 << 30;

impl ImportanceMatrix {
    /// Reads a file, GGUF or the older format. A GGUF file is mapped: it may be a model by mistake, larger than memory.
    pub fn read(path: &Path) -> Result<ImportanceMatrix> {
        let failed = |source| ImportanceError::Read { path: path.to_owned(), source };
        let mut input = std::fs::File::open(path).map_err(failed)?;
        let metadata = input.metadata().map_err(failed)?;
        let mut bytes = Vec::new();
        input.by_ref().take(MAGIC.len() as u64).read_to_end(&mut bytes).map_err(failed)?;
        if metadata.is_file() && bytes == MAGIC {
            return ImportanceMatrix::from_file(&File::open(path)?, path);
        }
        if metadata.len() <= MAX_BYTES {
            input.take(MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        }
        if metadata.len().max(bytes.len() as u64) > MAX_BYTES {
            let (path, place) = (path.to_owned(), "the file".to_owned());
            let reason = format!("it is longer than {MAX_BYTES} bytes");
            return Err(ImportanceError::Format { path, place, reason }.into());
        }
        ImportanceMatrix::from_bytes(bytes, path)
    }

    /// Reads the bytes of a file; the path is for errors.
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<ImportanceMatrix> {
        if !bytes.starts_with(MAGIC) {
            return Ok(legacy::parse(&bytes, path)?);
        }
        ImportanceMatrix::from_file(&File::from_bytes(bytes)?, path)
    }

    /// The matrix of a GGUF file; the path is for errors.
    fn from_file(file: &File, path: &Path) -> Result<ImportanceMatrix> {
        let wrong = |place: String, reason: &str| ImportanceError::Format {
            path: path.to_owned(),
            place,
            reason: reason.to_owned(),
        };
        let mut matrix = ImportanceMatrix {
            datasets: file
                .find::<Vec<&str>>("imatrix.datasets")?
                .unwrap_or_default()
                .into_iter()
                .map(str::to_owned)
                .collect(),
            chunk_count: file.find("imatrix.chunk_count")?.unwrap_or_default(),
            chunk_size: file.find("imatrix.chunk_size")?.unwrap_or_default(),
            text: file.find::<&str>(TEXT)?.map(str::to_owned),
            text_chunks: 0,
            text_start: file.find(TEXT_START)?,
            entries: BTreeMap::new(),
        };
        if matrix.text.is_some() {
            // Older files have one number for all texts.
            matrix.text_chunks = file.find(TEXT_CHUNKS)?.unwrap_or(matrix.chunk_count);
        }
        for tensor in file.tensors() {
            let place = || format!("tensor {:?}", tensor.name());
            if ![SUMS, COUNTS].iter().any(|end| tensor.name().ends_with(end)) {
                return Err(wrong(place(), "its name ends in neither .in_sum2 nor .counts").into());
            }
            if tensor.dtype() != DType::F32 {
                return Err(wrong(place(), "its type is not F32").into());
            }
            let mut values = vec![0.0; tensor.element_count() as usize];
            if blocks::dequantize(DType::F32, tensor.bytes(), &mut values).is_err() {
                return Err(wrong(place(), "its length does not fit to its shape").into());
            }
            if values.iter().any(|value| !value.is_finite() || *value < 0.0) {
                return Err(wrong(place(), "it has a number that is negative or not finite").into());
            }
            let empty = || ImportanceEntry { sums: Vec::new(), counts: Vec::new() };
            if let Some(name) = tensor.name().strip_suffix(SUMS) {
                matrix.entries.entry(name.to_owned()).or_insert_with(empty).sums = values;
            } else if let Some(name) = tensor.name().strip_suffix(COUNTS) {
                matrix.entries.entry(name.to_owned()).or_insert_with(empty).counts = values;
            }
        }
        for (name, entry) in &matrix.entries {
            let place = format!("weight {name:?}");
            if entry.sums.is_empty() || entry.counts.is_empty() {
                return Err(wrong(place, "it has only one of .in_sum2 and .counts").into());
            }
            if !entry.sums.len().is_multiple_of(entry.counts.len()) {
                return Err(wrong(place, "the sums are not divided evenly among the counts").into());
            }
        }
        if matrix.entries.is_empty() {
            return Err(wrong("the file".to_owned(), "it has no tensors").into());
        }
        Ok(matrix)
    }

    /// Writes a GGUF file that llama.cpp's tools read, too; it replaces an older one when it is complete.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut writer = Writer::new();
        let datasets: Vec<&str> = self.datasets.iter().map(String::as_str).collect();
        writer.set("general.type", "imatrix")?;
        writer.set("imatrix.datasets", datasets)?;
        writer.set("imatrix.chunk_count", self.chunk_count)?;
        writer.set("imatrix.chunk_size", self.chunk_size)?;
        if let Some(text) = &self.text {
            writer.set(TEXT, text.as_str())?;
            writer.set(TEXT_CHUNKS, self.text_chunks)?;
        }
        if let Some(start) = self.text_start {
            writer.set(TEXT_START, start)?;
        }
        for (name, entry) in &self.entries {
            let matrices = entry.counts.len().max(1);
            let shape = [matrices, entry.sums.len() / matrices];
            for (suffix, shape, values) in
                [(SUMS, shape, &entry.sums), (COUNTS, [matrices, 1], &entry.counts)]
            {
                writer.tensor(&format!("{name}{suffix}"), DType::F32, shape, |out| {
                    values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
                })?;
            }
        }
        Ok(writer.write(path)?)
    }
}
