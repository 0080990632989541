//! The importance matrix of a model.

use std::collections::BTreeMap;

use crate::error::{ImportanceError, Result};

/// The importance of one weight's inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportanceEntry {
    /// The sum of squares of each input, per matrix (expert) of the weight.
    pub sums: Vec<f32>,
    /// How many activations went into each matrix's sums.
    pub counts: Vec<f32>,
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
    /// Tokens of a chunk.
    pub chunk_size: u32,
}

impl ImportanceMatrix {
    /// Adds the sums of another matrix of the same model.
    pub fn merge(&mut self, other: &ImportanceMatrix) -> Result<()> {
        for (name, theirs) in &other.entries {
            let Some(ours) = self.entries.get_mut(name) else {
                self.entries.insert(name.clone(), theirs.clone());
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
        self.chunk_count = self.chunk_count.saturating_add(other.chunk_count);
        self.chunk_size = self.chunk_size.max(other.chunk_size);
        Ok(())
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
