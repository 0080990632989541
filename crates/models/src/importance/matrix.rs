//! The importance matrix of a model.

use std::collections::BTreeMap;
use std::path::Path;

use quadriga_gguf::File;

use crate::error::{ImportanceError, Result};

/// The importance of one weight's inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportanceEntry {
    /// The sum of squares of each input, per matrix (expert) of the weight.
    pub sums: Vec<f32>,
    /// How many activations went into each matrix's sums.
    pub counts: Vec<f32>,
}

impl ImportanceEntry {
    /// Makes the activations count as this many each.
    fn scale(&mut self, factor: f32) {
        // Files must not have infinite numbers.
        self.sums.iter_mut().chain(&mut self.counts).for_each(|own| *own = (*own * factor).min(f32::MAX));
    }
}

/// How much each input of each weight matters: the sums of squares of activations over a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    /// By the names of weights.
    pub entries: BTreeMap<String, ImportanceEntry>,
    /// The names of the texts.
    pub datasets: Vec<String>,
    /// Chunks of the texts that were computed.
    pub chunk_count: u32,
    /// Tokens of a chunk; 0 where sums and counts are those of the chunks' means, as in files of the older format, and not of
    /// all tokens.
    pub chunk_size: u32,
    /// What tells the text from others ([`text_id`](ImportanceMatrix::text_id)); `None` for several texts, and in files of other
    /// programs.
    pub text: Option<String>,
    /// Chunks of that text: fewer than all where matrices of other texts were added.
    pub text_chunks: u32,
    /// The first of these chunks, from 0; `None` where the file does not say.
    pub text_start: Option<u32>,
}

impl ImportanceMatrix {
    /// A number, as hexadecimal digits, that differs between texts.
    pub fn text_id(text: &str) -> String {
        // The hash FNV-1a: it needs to be the same everywhere, not to withstand an attack.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        format!("{hash:016x}")
    }

    /// An error unless the entries are those of weights of this model, with as many columns.
    pub fn check_model(&self, model: &File, path: &Path) -> Result<()> {
        for (name, entry) in &self.entries {
            let place = || format!("weight {name:?}");
            let wrong =
                |reason: String| ImportanceError::Format { path: path.to_owned(), place: place(), reason };
            let Some(tensor) = model.find_tensor(name) else {
                return Err(wrong(
                    "the model has no such weight: the file belongs to another model".to_owned(),
                )
                .into());
            };
            let (columns, matrices) = match tensor.shape().dims() {
                [outer @ .., _, columns] => (*columns, outer.iter().product()),
                _ => (1, 1),
            };
            let found = entry.sums.len();
            // Files of the older format may have one row for all experts.
            if found != columns && found != columns * matrices {
                return Err(wrong(format!(
                    "{found} numbers, but the weight has {columns} columns: the file belongs to another model"
                ))
                .into());
            }
        }
        Ok(())
    }

    /// An error unless chunks of this text and size, from chunk `from` on, can be added to those that the file at `path` has.
    /// Returns the chunk with which the file begins, which is `from` if that is given.
    pub fn check_resumable(
        &self,
        text: &str,
        dataset: &str,
        (chunk, from): (usize, Option<usize>),
        path: &Path,
    ) -> Result<usize> {
        let other = |what: String| ImportanceError::OtherText { path: path.to_owned(), what };
        let same = match &self.text {
            Some(id) => *id == ImportanceMatrix::text_id(text),
            // Files of other programs have no more than a name.
            None => self.datasets.len() == 1 && self.datasets.iter().any(|name| name == dataset),
        };
        if !same {
            let name = self.datasets.first().map_or("", String::as_str);
            return Err(other(format!("the text {name:?}, which is not the content of {dataset:?}")).into());
        }
        let size = self.chunk_size as usize;
        if size != 0 && size != chunk {
            return Err(other(format!("chunks of {size} tokens, not {chunk}")).into());
        }
        match (self.text_start.map(|start| start as usize), from) {
            (Some(start), Some(from)) if start != from => {
                Err(other(format!("the chunks from --from-chunk {start} on, not from {from}")).into())
            }
            (Some(start), _) => Ok(start),
            (None, Some(from)) => Ok(from),
            (None, None) => Err(ImportanceError::UnknownStart { path: path.to_owned() }.into()),
        }
    }

    /// The chunks of the text that the file has, from where a run that resumes goes on.
    pub fn resumed_chunks(&self) -> usize {
        // Files of other programs say no more than how many chunks there are.
        if self.text.is_some() { self.text_chunks as usize } else { self.chunk_count as usize }
    }

    /// Adds the sums of another matrix of the same model. Where only one of them counts chunks and not tokens, its chunks are
    /// taken to be as long as those of the other.
    pub fn merge(&mut self, other: &ImportanceMatrix) -> Result<()> {
        let size = self.chunk_size.max(other.chunk_size).max(1) as f32;
        if self.chunk_size == 0 {
            self.entries.values_mut().for_each(|entry| entry.scale(size));
        }
        for (name, theirs) in &other.entries {
            let mut theirs = theirs.clone();
            if other.chunk_size == 0 {
                theirs.scale(size);
            }
            let Some(ours) = self.entries.get_mut(name) else {
                self.entries.insert(name.clone(), theirs);
                continue;
            };
            if ours.sums.len() != theirs.sums.len() || ours.counts.len() != theirs.counts.len() {
                let (ours, theirs) = (ours.sums.len(), theirs.sums.len());
                return Err(ImportanceError::Merge { tensor: name.clone(), ours, theirs }.into());
            }
            let add = |ours: &mut Vec<f32>, theirs: &[f32]| {
                ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours += theirs);
            };
            add(&mut ours.sums, &theirs.sums);
            add(&mut ours.counts, &theirs.counts);
        }
        for name in &other.datasets {
            if !self.datasets.contains(name) {
                self.datasets.push(name.clone());
            }
        }
        match self.joined_start(other) {
            Some(start) => {
                self.text_start = start;
                self.text_chunks = self.text_chunks.saturating_add(other.text_chunks);
            }
            None => (self.text, self.text_chunks, self.text_start) = (None, 0, None),
        }
        self.chunk_count = self.chunk_count.saturating_add(other.chunk_count);
        self.chunk_size = self.chunk_size.max(other.chunk_size);
        Ok(())
    }

    /// The first chunk of two matrices of one text, of which one begins where the other ends; `None` for others.
    fn joined_start(&self, other: &ImportanceMatrix) -> Option<Option<u32>> {
        if self.text != other.text {
            return None;
        }
        match (self.text_start, other.text_start) {
            (Some(ours), Some(theirs)) if ours.saturating_add(self.text_chunks) == theirs => Some(Some(ours)),
            (Some(ours), Some(theirs)) if theirs.saturating_add(other.text_chunks) == ours => {
                Some(Some(theirs))
            }
            (None, None) => Some(None),
            _ => None,
        }
    }

    /// The importance of a weight's columns, per matrix (expert), around 1. Experts that no token used get 1 everywhere.
    /// `None` if there is no entry, or none of this size.
    pub fn weights(&self, name: &str, row_len: usize, matrices: usize) -> Option<Vec<f32>> {
        let entry = self.entries.get(name)?;
        // Files of the older format have one count for all experts.
        let stored = entry.sums.len().checked_div(row_len)?;
        if !entry.sums.len().is_multiple_of(row_len) || (stored != 1 && stored != matrices) {
            return None;
        }
        let mut weights = Vec::with_capacity(row_len * matrices);
        for matrix in 0..matrices {
            let index = if stored == 1 { 0 } else { matrix };
            let sums = entry.sums.get(index * row_len..(index + 1) * row_len)?;
            let count = entry.counts.get(if entry.counts.len() == 1 { 0 } else { index });
            let mean = sums.iter().map(|sum| f64::from(*sum)).sum::<f64>() / row_len as f64;
            if mean <= 0.0 || count.is_some_and(|count| *count <= 0.0) {
                weights.extend(std::iter::repeat_n(1.0, row_len));
                continue;
            }
            // A column that the text never used is still worth a little.
            weights.extend(sums.iter().map(|sum| (f64::from(*sum) / mean).max(1e-4) as f32));
        }
        Some(weights)
    }
}
