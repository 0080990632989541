//! How much the predictions of a model react to an error of its tensors: measured by running it.
//!
//! Tensors of the same role in neighbouring layers are a group. Random low-rank matrices are added to the tensors of one group
//! at a time, as adapters, so that no file is written. They change the outputs of each tensor by a known share, as the
//! error of a quantized type does; the KL divergence from the model itself, on a short text, is what the group reacts
//! with. It grows with the square of the error, so that one measurement is enough for all types.

use std::collections::BTreeMap;

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_llm::{Adapter, BatchToken, Engine, Model};

use super::mix::layer_of;
use super::plan::QuantizePlan;
use super::rows::{RowReader, squared_error};
use crate::divergence::row_divergence;
use crate::error::{Error, QualityError, QuantizeError, Result};
use crate::importance::{ImportanceMatrix, collect};

/// The relative error of outputs in a measurement: about that of four bits.
const SHARE: f64 = 0.08;

/// The rank of the random matrices.
const RANK: usize = 16;

/// Rows of a tensor that are read for its size.
const SAMPLED_ROWS: usize = 64;

/// Measured sensitivities of a model's tensors.
#[derive(Clone, Debug)]
pub struct Sensitivities {
    /// By name: nats of KL divergence for a relative squared error of 1, which is an extrapolation from small ones.
    tensors: BTreeMap<String, f64>,
    /// The importance of inputs on the same text.
    importance: ImportanceMatrix,
}

/// Tensors that are measured together.
struct Group {
    tensors: Vec<NoisyTensor>,
}

struct NoisyTensor {
    name: String,
    rows: usize,
    columns: usize,
    /// The size of the elements of the noise.
    noise: f64,
    /// The energy of the outputs, for a mean square of 1 of the inputs.
    energy: f64,
}

impl Sensitivities {
    /// The sensitivity of a tensor; for one that could not be measured, the median of those that were.
    pub fn of(&self, name: &str) -> f64 {
        self.tensors.get(name).copied().unwrap_or_else(|| {
            let mut all: Vec<f64> = self.tensors.values().copied().collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(1.0)
        })
    }

    /// The importance of inputs on the text of the measurement.
    pub fn importance(&self) -> &ImportanceMatrix {
        &self.importance
    }

    /// Measures a model on a text. `engine` makes an engine whose outputs are all tokens of a batch; `each` is called after
    /// each group with its number and the number of all, and returns false to stop.
    pub fn measure<E: From<Error>>(
        model: &Model,
        plan: &QuantizePlan,
        tokens: &[u32],
        engine: &mut dyn FnMut(Model) -> std::result::Result<Engine, E>,
        each: &mut dyn FnMut(usize, usize) -> bool,
    ) -> std::result::Result<Sensitivities, E> {
        let mut own = engine(model.clone())?;
        let importance = collect(&mut own, tokens, tokens.len(), "", &mut |_, _| true)?;
        let reference = predictions(&mut own, tokens)?;
        drop(own);
        let groups = groups(model, plan, &importance)?;
        let mut tensors = BTreeMap::new();
        let mut first_layer = None;
        for (index, group) in groups.iter().enumerate() {
            let Some(noisy) = noisy(model, group, index as u64)? else { continue };
            let found = predictions(&mut engine(noisy)?, tokens)?;
            let divergence = mean_divergence(&reference, &found)?;
            let share = divergence / (SHARE * SHARE) / group.tensors.len() as f64;
            for tensor in &group.tensors {
                tensors.insert(tensor.name.clone(), share);
            }
            // What a layer adds to the residual stream: per unit of energy, for the embedding.
            let outputs = group.tensors.iter().filter(|tensor| {
                tensor.name == "blk.0.ffn_down.weight" || tensor.name == "blk.0.attn_output.weight"
            });
            for tensor in outputs {
                if let Some(square) = mean_square(&importance, &tensor.name).filter(|square| *square > 0.0) {
                    first_layer = Some(share / (square * tensor.energy).max(f64::MIN_POSITIVE));
                }
            }
            if !each(index + 1, groups.len()) {
                return Err(E::from(QuantizeError::Cancelled.into()));
            }
        }
        let output = output_sensitivity(&reference);
        let embedding = embedding_sensitivity(model, first_layer)?;
        let is_tied = model.file().find_tensor("output.weight").is_none();
        tensors.insert("output.weight".to_owned(), output);
        tensors.insert("token_embd.weight".to_owned(), embedding + if is_tied { output } else { 0.0 });
        Ok(Sensitivities { tensors, importance })
    }
}

/// Groups of tensors that adapters can change.
fn groups(model: &Model, plan: &QuantizePlan, importance: &ImportanceMatrix) -> Result<Vec<Group>> {
    let file = model.file();
    let layers = model.hyperparameters().layers.len().max(1);
    let weights: u64 = plan.tensors.iter().map(|tensor| tensor.shape.elements() as u64).sum();
    // Few runs for a large model, each of which takes long.
    let bands = match weights {
        0..500_000_000 => 8,
        500_000_000..3_000_000_000 => 4,
        _ => 2,
    };
    let reader = RowReader::new(file)?;
    let mut groups: BTreeMap<(String, usize), Group> = BTreeMap::new();
    for tensor in plan.tensors.iter().filter(|tensor| tensor.is_quantizable) {
        let (Some(layer), [rows, columns]) = (layer_of(&tensor.source), tensor.shape.dims()) else {
            continue;
        };
        let Some(source) = file.find_tensor(&tensor.source) else { continue };
        let role = tensor.source.splitn(3, '.').nth(2).unwrap_or_default().to_owned();
        let weights = importance.weights(&tensor.source, *columns, 1).unwrap_or_else(|| vec![1.0; *columns]);
        let (mut buffer, mut values, mut energy) = (Vec::new(), Vec::new(), 0.0);
        let sampled = SAMPLED_ROWS.min(*rows).max(1);
        for sample in 0..sampled {
            let row = sample * rows / sampled;
            reader.values(&source, row..row + 1, &mut buffer, &mut values)?;
            energy += squared_error(&values, &values, Some(&weights)).1;
        }
        let energy = energy / sampled as f64 * *rows as f64;
        let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        let noise = SHARE * (energy / (*rows as f64 * total.max(f64::MIN_POSITIVE))).sqrt();
        let own = NoisyTensor { name: tensor.source.clone(), rows: *rows, columns: *columns, noise, energy };
        let group = groups.entry((role, layer * bands / layers)).or_insert(Group { tensors: Vec::new() });
        group.tensors.push(own);
    }
    Ok(groups.into_values().collect())
}

/// The model with noise in the tensors of a group; `None` if adapters cannot change them.
fn noisy(model: &Model, group: &Group, seed: u64) -> Result<Option<Model>> {
    let mut writer = Writer::new();
    writer.set("general.architecture", model.hyperparameters().architecture)?;
    writer.set("general.type", "adapter")?.set("adapter.type", "lora")?;
    let mut normal = Normal(seed.wrapping_add(1));
    for tensor in &group.tensors {
        let rank = RANK.min(tensor.rows).min(tensor.columns).max(1);
        let size = (tensor.noise / (rank as f64).sqrt()) as f32;
        for (end, dims, size) in [("a", [rank, tensor.columns], 1.0), ("b", [tensor.rows, rank], size)] {
            let values: Vec<f32> = (0..dims[0] * dims[1]).map(|_| size * normal.next()).collect();
            writer.tensor(&format!("{}.lora_{end}", tensor.name), DType::F32, dims, move |out| {
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            })?;
        }
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes)?;
    let adapter = Adapter::from_file(&File::from_bytes(bytes)?, 1.0)?;
    Ok(model.clone().with_adapters(&[adapter]).ok())
}

/// The logits behind each token of a text.
fn predictions(engine: &mut Engine, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    engine.truncate(0, 0);
    let batch: Vec<BatchToken> =
        tokens.iter().map(|token| BatchToken { sequence: 0, token: *token, output: true }).collect();
    engine.extend(&batch)?;
    engine.wait()?;
    Ok((0..tokens.len()).map(|row| engine.logits(row).to_vec()).collect())
}

fn mean_divergence(reference: &[Vec<f32>], other: &[Vec<f32>]) -> Result<f64> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pairs: Vec<(&Vec<f32>, &Vec<f32>)> = reference.iter().zip(other).collect();
    let sums = std::thread::scope(|scope| {
        let parts: Vec<_> = pairs
            .chunks(pairs.len().div_ceil(threads).max(1))
            .map(|part| {
                scope.spawn(move || part.iter().map(|(p, q)| row_divergence(p, q)).sum::<Result<f64>>())
            })
            .collect();
        let failed = || Err(QuantizeError::Cancelled.into());
        parts.into_iter().map(|part| part.join().unwrap_or_else(|_| failed())).sum::<Result<f64>>()
    });
    let sum = sums?;
    // A logit that a small error makes infinite says nothing about others.
    if !sum.is_finite() {
        return Err(QualityError::NotFinite.into());
    }
    Ok(sum / pairs.len().max(1) as f64)
}

/// Independent errors of logits, of a share of their size, diverge by half their variance under the predicted probabilities.
fn output_sensitivity(reference: &[Vec<f32>]) -> f64 {
    let row = |logits: &Vec<f32>| {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut squares, mut energy) = (0.0, 0.0, 0.0);
        for logit in logits {
            let p = f64::from(logit - most).exp();
            sum += p;
            squares += p * p;
            energy += f64::from(*logit) * f64::from(*logit);
        }
        0.5 * (1.0 - squares / (sum * sum)) * energy / logits.len().max(1) as f64
    };
    reference.iter().map(row).sum::<f64>() / reference.len().max(1) as f64
}

/// An error of the embedding is one of the residual stream, as is one of what the first layer adds to it.
fn embedding_sensitivity(model: &Model, first_layer: Option<f64>) -> Result<f64> {
    let Some(tensor) = model.file().find_tensor("token_embd.weight") else { return Ok(0.0) };
    let rows = tensor.shape().dims().first().copied().unwrap_or_default();
    let reader = RowReader::new(model.file())?;
    let (mut buffer, mut values, mut energy) = (Vec::new(), Vec::new(), 0.0);
    let sampled = (4 * SAMPLED_ROWS).min(rows).max(1);
    for sample in 0..sampled {
        let row = sample * rows / sampled;
        reader.values(&tensor, row..row + 1, &mut buffer, &mut values)?;
        energy += squared_error(&values, &values, None).1;
    }
    let scale = f64::from(model.hyperparameters().embedding_scale);
    Ok(first_layer.unwrap_or_default() * energy / sampled as f64 * scale * scale)
}

/// The mean square of the inputs of a tensor.
fn mean_square(importance: &ImportanceMatrix, name: &str) -> Option<f64> {
    let entry = importance.entries.get(name)?;
    let count = f64::from(entry.counts.iter().sum::<f32>()) * entry.sums.len() as f64;
    let sum: f64 = entry.sums.iter().map(|sum| f64::from(*sum)).sum();
    (count > 0.0).then(|| sum / count)
}

/// Normally distributed numbers, the same for the same seed.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f32 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 40) as f32 + 0.5) / (1 << 24) as f32
    }

    fn next(&mut self) -> f32 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }
}
