//! Counts of how often each neuron of a model is active: which rows are worth the memory of an accelerator.
//!
//! Counts belong to the model that they were collected with, whose identity their file has; those of another model are
//! refused. PowerInfer's files of hot neurons are read as counts of 1 and 0.

use std::io;
use std::path::Path;

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;

use crate::{Error, Model, Result};

/// The key of the model's identity.
const MODEL_KEY: &str = "quadriga.neurons.model";
/// The key of the number of tokens.
const TOKENS_KEY: &str = "quadriga.neurons.tokens";

/// For each layer and neuron, the number of tokens for which it was active.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NeuronCounts {
    /// The tokens that were counted.
    pub tokens: u64,
    /// The counts of each layer's neurons; empty for layers without such neurons.
    pub layers: Vec<Vec<u32>>,
}

impl NeuronCounts {
    /// No counts for a model yet.
    pub fn new(model: &Model) -> NeuronCounts {
        let layers = &model.hyperparameters().layers;
        NeuronCounts { tokens: 0, layers: layers.iter().map(|layer| vec![0; layer.feed_forward]).collect() }
    }

    /// Reads the counts of a model, or PowerInfer's file of its hot neurons.
    ///
    /// # Errors
    /// The file is not one of counts, or belongs to another model; the error names what does not fit.
    pub fn open(path: impl AsRef<Path>, model: &Model) -> Result<NeuronCounts> {
        NeuronCounts::from_file(&File::open(path)?, model)
    }

    /// The counts in an opened file.
    pub fn from_file(file: &File, model: &Model) -> Result<NeuronCounts> {
        let Some(identity) = file.find::<&str>(MODEL_KEY)? else { return hot_neurons(file, model) };
        let own = hexadecimal(&model.identity());
        if identity != own {
            return Err(Error::ForeignCounts { found: identity.to_owned(), wanted: own });
        }
        let mut counts = NeuronCounts::new(model);
        counts.tokens = file.get::<u64>(TOKENS_KEY)?;
        for (layer, own) in counts.layers.iter_mut().enumerate() {
            let name = format!("blk.{layer}.neuron_counts");
            for (at, (count, value)) in
                own.iter_mut().zip(integers(file, &name, Some(own_len(model, layer)))?).enumerate()
            {
                *count = u32::try_from(value).map_err(|_| wrong_value(&name, at, value))?;
            }
        }
        Ok(counts)
    }

    /// Writes the counts of a model.
    pub fn write(&self, path: impl AsRef<Path>, model: &Model) -> Result<()> {
        Ok(self.writer(model)?.write(path)?)
    }

    fn writer(&self, model: &Model) -> Result<Writer<'_>> {
        let mut writer = Writer::new();
        writer.set("general.architecture", "neurons")?;
        writer.set(MODEL_KEY, hexadecimal(&model.identity()))?.set(TOKENS_KEY, self.tokens)?;
        for (layer, counts) in self.layers.iter().enumerate().filter(|(_, counts)| !counts.is_empty()) {
            let name = format!("blk.{layer}.neuron_counts");
            writer.tensor(&name, DType::I32, [counts.len()], move |out: &mut dyn io::Write| {
                counts.iter().try_for_each(|count| {
                    out.write_all(&i32::try_from(*count).unwrap_or(i32::MAX).to_ne_bytes())
                })
            })?;
        }
        Ok(writer)
    }

    /// The share of all activations that some neurons of each layer make, if these are the `share` most active ones.
    pub fn share_of_most_active(&self, share: f64) -> f64 {
        let (mut all, mut most) = (0u64, 0u64);
        for layer in &self.layers {
            let mut sorted = layer.clone();
            sorted.sort_unstable_by(|a, b| b.cmp(a));
            let count = (share * sorted.len() as f64).round() as usize;
            all += sorted.iter().map(|count| u64::from(*count)).sum::<u64>();
            most += sorted.iter().take(count).map(|count| u64::from(*count)).sum::<u64>();
        }
        most as f64 / (all as f64).max(1.0)
    }

    /// The share of all activations that the `share` most active neurons of each layer by `others` make. It is at most
    /// [`share_of_most_active`](NeuronCounts::share_of_most_active): how far it falls behind says how well counts of one text
    /// serve another.
    pub fn share_of_most_active_by(&self, others: &NeuronCounts, share: f64) -> f64 {
        let (mut all, mut most) = (0u64, 0u64);
        for (own, others) in self.layers.iter().zip(&others.layers) {
            let mut order: Vec<(u32, u32)> = others.iter().copied().zip(own.iter().copied()).collect();
            order.sort_by_key(|(other, _)| std::cmp::Reverse(*other));
            let count = (share * order.len() as f64).round() as usize;
            all += order.iter().map(|(_, own)| u64::from(*own)).sum::<u64>();
            most += order.iter().take(count).map(|(_, own)| u64::from(*own)).sum::<u64>();
        }
        most as f64 / (all as f64).max(1.0)
    }

    /// The share of neurons that a token activates, over all layers.
    pub fn active_share(&self) -> f64 {
        let neurons: u64 = self.layers.iter().map(|layer| layer.len() as u64).sum();
        let active: u64 = self.layers.iter().flatten().map(|count| u64::from(*count)).sum();
        active as f64 / (neurons.saturating_mul(self.tokens) as f64).max(1.0)
    }
}

fn own_len(model: &Model, layer: usize) -> usize {
    model.hyperparameters().layers.get(layer).map_or(0, |layer| layer.feed_forward)
}

/// PowerInfer's file: for each layer `gpu_idx`, 1 for each neuron that is hot, and `gpu_bucket`, the neurons of the rows on
/// the GPU, unless all or none are there.
fn hot_neurons(file: &File, model: &Model) -> Result<NeuronCounts> {
    let mut counts = NeuronCounts::new(model);
    counts.tokens = 1;
    for (layer, own) in counts.layers.iter_mut().enumerate() {
        let (index, bucket) = (format!("blk.{layer}.gpu_idx"), format!("blk.{layer}.gpu_bucket"));
        for (at, (count, value)) in
            own.iter_mut().zip(integers(file, &index, Some(own_len(model, layer)))?).enumerate()
        {
            *count = u32::try_from(value)
                .ok()
                .filter(|hot| *hot <= 1)
                .ok_or_else(|| wrong_value(&index, at, value))?;
        }
        if file.find_tensor(&bucket).is_none() {
            continue;
        }
        let rows = integers(file, &bucket, None)?;
        let hot = own.iter().filter(|hot| **hot == 1).count();
        if rows.len() != hot {
            return Err(Error::TensorShape { name: bucket, found: vec![rows.len()], wanted: vec![hot] });
        }
        let mut seen = vec![false; own.len()];
        for (at, neuron) in rows.into_iter().enumerate() {
            let place = usize::try_from(neuron).ok().filter(|place| own.get(*place) == Some(&1));
            match place.and_then(|place| seen.get_mut(place)).filter(|seen| !**seen) {
                Some(seen) => *seen = true,
                None => return Err(wrong_value(&bucket, at, neuron)),
            }
        }
    }
    Ok(counts)
}

fn wrong_value(name: &str, index: usize, value: i32) -> Error {
    Error::TensorInteger { name: name.to_owned(), index, value }
}

/// The elements of a vector of integers, of this length if one is given.
fn integers(file: &File, name: &str, len: Option<usize>) -> Result<Vec<i32>> {
    if len == Some(0) {
        return Ok(Vec::new());
    }
    let tensor = file.tensor(name)?;
    let (dtype, found) = (tensor.dtype(), tensor.shape().dims().to_vec());
    if dtype != DType::I32 {
        return Err(Error::TensorType { name: name.to_owned(), dtype });
    }
    let wanted = len.map_or_else(|| vec![found.iter().product()], |len| vec![len]);
    if found != wanted {
        return Err(Error::TensorShape { name: name.to_owned(), found, wanted });
    }
    Ok(tensor.bytes().as_chunks().0.iter().map(|bytes| i32::from_ne_bytes(*bytes)).collect())
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
