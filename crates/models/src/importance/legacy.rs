//! The older format of importance matrices: a list of names with numbers, without a header.

use std::collections::BTreeMap;
use std::path::Path;

use super::matrix::{ImportanceEntry, ImportanceMatrix};
use crate::error::ImportanceError;

/// Reads numbers and names, and says where a file is wrong.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    path: &'a Path,
}

impl<'a> Reader<'a> {
    fn wrong(&self, what: &str, reason: String) -> ImportanceError {
        let place = format!("{what} at byte {}", self.at);
        ImportanceError::Format { path: self.path.to_owned(), place, reason }
    }

    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], ImportanceError> {
        let left = self.bytes.len() - self.at;
        let found = self.at.checked_add(len).and_then(|end| self.bytes.get(self.at..end));
        let found =
            found.ok_or_else(|| self.wrong(what, format!("{len} bytes are needed, {left} are left")))?;
        self.at += len;
        Ok(found)
    }

    /// A 32-bit number from `least` that may be followed by that many items of `size` bytes.
    fn count(&mut self, least: i32, size: usize, what: &str) -> Result<usize, ImportanceError> {
        let start = self.at;
        let mut bytes = [0; 4];
        bytes.copy_from_slice(self.take(4, what)?);
        let number = i32::from_le_bytes(bytes);
        let left = self.bytes.len() - self.at;
        let valid = usize::try_from(number)
            .ok()
            .filter(|count| number >= least && count.checked_mul(size).is_some_and(|bytes| bytes <= left));
        valid.ok_or_else(|| {
            self.at = start;
            self.wrong(what, format!("{number} is not from {least} to what the file can hold"))
        })
    }

    fn text(&mut self, len: usize, what: &str) -> Result<String, ImportanceError> {
        let start = self.at;
        let bytes = self.take(len, what)?;
        String::from_utf8(bytes.to_owned()).map_err(|_| {
            self.at = start;
            self.wrong(what, "not valid UTF-8".to_owned())
        })
    }
}

/// Parses a file of the older format.
pub(super) fn parse(bytes: &[u8], path: &Path) -> Result<ImportanceMatrix, ImportanceError> {
    let mut reader = Reader { bytes, at: 0, path };
    let count = reader.count(1, 12, "the number of entries")?;
    let mut entries = BTreeMap::new();
    for i in 1..=count {
        let length = reader.count(1, 1, &format!("the length of name {i}"))?;
        let name = reader.text(length, &format!("name {i}"))?;
        let calls = reader.count(0, 0, &format!("the count of {name:?}"))?;
        let values = reader.count(1, 4, &format!("the number of values of {name:?}"))?;
        let what = format!("the values of {name:?}");
        let start = reader.at;
        let numbers = reader.take(values * 4, &what)?.as_chunks().0;
        let sums: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if let Some(place) = sums.iter().position(|sum| !sum.is_finite() || *sum < 0.0) {
            reader.at = start + 4 * place;
            return Err(reader.wrong(&what, "a number is negative or not finite".to_owned()));
        }
        let entry = ImportanceEntry { sums, counts: vec![calls.max(1) as f32] };
        if entries.insert(name.clone(), entry).is_some() {
            reader.at = start;
            return Err(reader.wrong(&what, "the name appears twice".to_owned()));
        }
    }
    let mut matrix = ImportanceMatrix { entries, ..ImportanceMatrix::default() };
    // The number of chunks and the name of the text may be left out.
    if reader.at < bytes.len() {
        matrix.chunk_count = reader.count(0, 0, "the number of chunks")? as u32;
        if reader.at < bytes.len() {
            let length = reader.count(0, 1, "the length of the text's name")?;
            matrix.datasets.push(reader.text(length, "the name of the text")?);
        }
    }
    Ok(matrix)
}
