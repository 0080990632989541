//! Chooses a type for each tensor so that the file fits in a number of bytes, with the least error.
//!
//! The error of each type is measured on a sample of each tensor's rows, weighted by importance. The error of a model is
//! taken as the sum of its tensors' relative squared errors, each times the measured sensitivity of the model to it
//! ([`Sensitivities`]). What is then chosen for each tensor is the type with the least `error + price × bytes`; the price is
//! the lowest with which the file fits.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_gguf::{File, Tensor};
use quadriga_graph::DType;

use super::kernels::quantize_rows;
use super::options::QuantizeOptions;
use super::pipeline::matrices;
use super::plan::{QuantizePlan, TensorPlan};
use super::rows::{RowReader, dequantize, squared_error};
use super::sensitivity::Sensitivities;
use super::write::columns;
use crate::error::{QuantizeError, Result};
use crate::importance::ImportanceMatrix;

/// The types that are tried beside the one that a tensor has, smallest first.
const CANDIDATES: &[DType] = &[
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::Q2_K,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::Q3_K,
    DType::IQ4_XS,
    DType::IQ4_NL,
    DType::Q4_0,
    DType::Q4_K,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_K,
    DType::Q5_1,
    DType::Q6_K,
    DType::Q8_0,
    DType::F16,
];

/// Values of a tensor that are sampled.
const SAMPLE: usize = 48 << 10;

/// One type for one tensor.
#[derive(Clone, Copy, Debug)]
struct TypeChoice {
    dtype: DType,
    bytes: u64,
    error: f64,
}

/// What the error of a model is computed from, beside its weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct FitBasis<'a> {
    /// The importance with which the file is quantized.
    pub importance: Option<&'a ImportanceMatrix>,
    /// How much the model reacts to errors. Without, which is for models that cannot be run, all tensors count alike, and
    /// those outside layers ten times as much.
    pub sensitivities: Option<&'a Sensitivities>,
}

impl FitBasis<'_> {
    fn sensitivity(&self, name: &str) -> f64 {
        match self.sensitivities {
            Some(measured) => measured.of(name),
            None if name.starts_with("blk.") => 1.0,
            None => 10.0,
        }
    }
}

/// A plan with which the tensors take at most `limit` bytes, with what aligns them in the file. Types that the options fix stay as they are.
pub fn fit(
    file: &File,
    options: &QuantizeOptions,
    basis: FitBasis<'_>,
    limit: u64,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<QuantizePlan> {
    let mut plan = QuantizePlan::new(file, options, basis.importance)?;
    let quantized = columns(&plan, options, basis.importance)?;
    // Errors count as the outputs of a matrix show them, also where types are computed without importance.
    let judged = match (basis.importance, basis.sensitivities) {
        (None, Some(measured)) => columns(&plan, options, Some(measured.importance()))?,
        _ => quantized.clone(),
    };
    let mut choices = measure(file, &plan, options, &basis, (&quantized, &judged), cancelled)?;
    let padded = |bytes: u64| bytes.checked_next_multiple_of(file.alignment().into()).unwrap_or(u64::MAX);
    choices.iter_mut().flatten().for_each(|choice| choice.bytes = padded(choice.bytes));
    let smallest: u64 = plan
        .tensors
        .iter()
        .zip(&choices)
        .map(|(tensor, choices)| {
            choices.iter().map(|choice| choice.bytes).min().unwrap_or(padded(tensor.byte_len()))
        })
        .sum();
    if smallest > limit {
        return Err(QuantizeError::TooSmall { smallest, limit }.into());
    }
    let total = |price: f64| -> u64 {
        let bytes = |(tensor, choices): (&TensorPlan, &Vec<TypeChoice>)| {
            cheapest(choices, price).map_or(padded(tensor.byte_len()), |choice| choice.bytes)
        };
        plan.tensors.iter().zip(&choices).map(bytes).sum()
    };
    // The lowest price that fits, by bisection of its logarithm: more price, fewer bytes.
    let (mut low, mut high) = (1e-18f64.ln(), 1e3f64.ln());
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if total(middle.exp()) > limit { low = middle } else { high = middle }
    }
    let price = high.exp();
    let mut bytes = total(price);
    let mut chosen: Vec<Option<TypeChoice>> =
        choices.iter().map(|choices| cheapest(choices, price)).collect();
    // What is left goes where it lowers the error most per byte.
    loop {
        let mut best: Option<(f64, usize, TypeChoice)> = None;
        for (index, (choices, current)) in choices.iter().zip(&chosen).enumerate() {
            let Some(current) = current else { continue };
            for choice in choices.iter().filter(|choice| choice.error < current.error) {
                let more = choice.bytes.saturating_sub(current.bytes);
                if bytes + more > limit {
                    continue;
                }
                let gain = (current.error - choice.error) / more.max(1) as f64;
                if best.is_none_or(|(most, ..)| gain > most) {
                    best = Some((gain, index, *choice));
                }
            }
        }
        let Some((_, index, choice)) = best else { break };
        if let Some(Some(current)) = chosen.get_mut(index) {
            bytes = bytes + choice.bytes - current.bytes.min(bytes + choice.bytes);
            *current = choice;
        }
    }
    for (tensor, choice) in plan.tensors.iter_mut().zip(chosen) {
        if let Some(choice) = choice {
            (tensor.to, tensor.wanted) = (choice.dtype, None);
        }
    }
    Ok(plan)
}

fn cheapest(choices: &[TypeChoice], price: f64) -> Option<TypeChoice> {
    let cost = |choice: &TypeChoice| choice.error + price * choice.bytes as f64;
    choices.iter().copied().min_by(|a, b| cost(a).total_cmp(&cost(b)))
}

/// Of every tensor, the importance of its columns, where it is known.
type ColumnImportance = [Option<Vec<f32>>];

/// The errors of all types for all tensors; empty for those whose type is fixed.
fn measure(
    file: &File,
    plan: &QuantizePlan,
    options: &QuantizeOptions,
    basis: &FitBasis<'_>,
    (quantized, judged): (&ColumnImportance, &ColumnImportance),
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<Vec<TypeChoice>>> {
    let reader = RowReader::new(file)?;
    let tensors: Vec<Tensor<'_>> = plan.sources(file)?;
    let next = AtomicUsize::new(0);
    type Choices = std::result::Result<Vec<TypeChoice>, QuantizeError>;
    let results: Mutex<Vec<(usize, Choices)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..options.thread_count().max(1) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let (Some(tensor), Some(plan)) = (tensors.get(index), plan.tensors.get(index)) else {
                        return;
                    };
                    let column = |all: &ColumnImportance| all.get(index).cloned().flatten();
                    let columns = (column(quantized), column(judged));
                    let sensitivity = basis.sensitivity(&plan.source);
                    let result = match cancelled() {
                        true => Err(QuantizeError::Cancelled),
                        false if plan.is_fixed => Ok(Vec::new()),
                        false => measure_tensor(&reader, tensor, plan, sensitivity, &columns),
                    };
                    if let Ok(mut results) = results.lock() {
                        results.push((index, result));
                    }
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_default();
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect::<std::result::Result<_, QuantizeError>>()?)
}

fn measure_tensor(
    reader: &RowReader,
    tensor: &Tensor<'_>,
    plan: &TensorPlan,
    sensitivity: f64,
    (quantized, judged): &(Option<Vec<f32>>, Option<Vec<f32>>),
) -> std::result::Result<Vec<TypeChoice>, QuantizeError> {
    let row_len = plan.row_len().max(1);
    let (count, rows) = matrices(plan);
    let all_rows = count * rows;
    let sampled = (SAMPLE / row_len).clamp(1, all_rows.max(1));
    let (mut buffer, mut values, mut back, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let usable =
        CANDIDATES.iter().filter(|dtype| **dtype != plan.from && row_len.is_multiple_of(dtype.block_len()));
    let mut choices: Vec<(DType, f64)> = usable.map(|dtype| (*dtype, 0.0)).collect();
    let mut square = 0.0;
    // Rows at equal distances, all of one matrix with its own importance.
    for sample in 0..sampled {
        let row = sample * all_rows / sampled;
        reader.values(tensor, row..row + 1, &mut buffer, &mut values)?;
        let matrix = row / rows.max(1);
        let columns = |all: &'_ Option<Vec<f32>>| -> Option<Vec<f32>> {
            all.as_ref()?.get(matrix * row_len..(matrix + 1) * row_len).map(<[f32]>::to_vec)
        };
        let (quantized, judged) = (columns(quantized), columns(judged));
        back.resize(values.len(), 0.0);
        for (dtype, error) in &mut choices {
            let unable = |_| QuantizeError::NotATarget { dtype: *dtype };
            bytes.resize(dtype.row_bytes(row_len).unwrap_or_default(), 0);
            quantize_rows(*dtype, &values, row_len, quantized.as_deref(), &mut bytes).map_err(unable)?;
            dequantize(*dtype, &bytes, &mut back).map_err(unable)?;
            let (missed, _) = squared_error(&values, &back, judged.as_deref());
            *error += missed;
        }
        square += squared_error(&values, &values, judged.as_deref()).1;
    }
    let weight = sensitivity / if square > 0.0 { square } else { 1.0 };
    let choice = |(dtype, error): (DType, f64)| TypeChoice {
        dtype,
        bytes: plan.byte_len_as(dtype),
        error: error * weight,
    };
    // What stays as it is has no error. A type that cannot hold a value has an infinite one, or none where the column has no weight.
    let kept = TypeChoice { dtype: plan.from, bytes: plan.byte_len_as(plan.from), error: 0.0 };
    let others = choices.into_iter().map(choice).filter(|choice| choice.error.is_finite());
    Ok(std::iter::once(kept).chain(others).collect())
}
