//! Chooses a type for each tensor so that the file fits in a number of bytes, with the least error.
//!
//! The error of each type is measured on a sample of each tensor's rows, weighted by importance. The error of a model is
//! taken as the sum of its tensors' relative errors, each times how much the model reacts to it. What is then chosen for
//! each tensor is the type with the least `error + price × bytes`; the price is the lowest with which the file fits.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_gguf::{File, Tensor};
use quadriga_graph::DType;

use super::kernels::quantize_rows;
use super::options::QuantizeOptions;
use super::pipeline::{matrices, squared_error};
use super::plan::{QuantizePlan, TensorPlan};
use super::rows::{RowReader, dequantize};
use super::write::columns;
use crate::error::{QuantizeError, Result};
use crate::importance::ImportanceMatrix;

/// The types that are tried, smallest first. Types that another one of the same size beats are left out.
const CANDIDATES: &[DType] = &[
    DType::IQ2_XXS,
    DType::IQ2_XS,
    DType::IQ2_S,
    DType::IQ3_XXS,
    DType::IQ3_S,
    DType::IQ4_XS,
    DType::IQ4_NL,
    DType::Q4_0,
    DType::Q4_K,
    DType::Q5_0,
    DType::Q5_K,
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

/// How much the predictions of a model react to a relative error of a tensor, compared with other tensors. These are
/// estimates, in the order in which mixes such as Q4_K_M favour tensors; they have not been measured.
fn sensitivity(name: &str) -> f64 {
    const ROLES: &[(&str, f64)] = &[
        ("output.weight", 30.0),
        ("token_embd", 30.0),
        ("attn_v", 1.6),
        ("attn_output", 1.0),
        ("attn_k", 0.7),
        ("attn_q", 0.7),
        ("ffn_down", 1.6),
        ("ffn_up", 1.2),
        ("ffn_gate", 0.8),
    ];
    ROLES.iter().find(|(part, _)| name.contains(part)).map_or(1.0, |(_, value)| *value)
}

/// A plan with which the tensors take at most `limit` bytes. Types that the options fix stay as they are.
pub fn fit(
    file: &File,
    options: &QuantizeOptions,
    importance: Option<&ImportanceMatrix>,
    limit: u64,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<QuantizePlan> {
    let mut plan = QuantizePlan::new(file, options, importance)?;
    let columns = columns(&plan, options, importance)?;
    let choices = measure(file, &plan, options, &columns, cancelled)?;
    let smallest: u64 = plan
        .tensors
        .iter()
        .zip(&choices)
        .map(|(tensor, choices)| choices.iter().map(|choice| choice.bytes).min().unwrap_or(tensor.byte_len()))
        .sum();
    if smallest > limit {
        return Err(QuantizeError::TooSmall { smallest, limit }.into());
    }
    // The lowest price that fits, by bisection of its logarithm: more price, fewer bytes.
    let (mut low, mut high) = (1e-18f64.ln(), 1e3f64.ln());
    for _ in 0..80 {
        let middle = (low + high) / 2.0;
        if total(&plan, &choices, middle.exp()) > limit { low = middle } else { high = middle }
    }
    let price = high.exp();
    let mut bytes = total(&plan, &choices, price);
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

fn total(plan: &QuantizePlan, choices: &[Vec<TypeChoice>], price: f64) -> u64 {
    let bytes = |(tensor, choices): (&TensorPlan, &Vec<TypeChoice>)| {
        cheapest(choices, price).map_or(tensor.byte_len(), |choice| choice.bytes)
    };
    plan.tensors.iter().zip(choices).map(bytes).sum()
}

/// The errors of all types for all tensors; empty for those whose type is fixed.
fn measure(
    file: &File,
    plan: &QuantizePlan,
    options: &QuantizeOptions,
    columns: &[Option<Vec<f32>>],
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<Vec<TypeChoice>>> {
    let reader = RowReader::new(file)?;
    let tensors: Vec<Tensor<'_>> = file.tensors().collect();
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
                    let importance = columns.get(index).and_then(Option::as_deref);
                    let result = match cancelled() {
                        true => Err(QuantizeError::Cancelled),
                        false if is_fixed(plan, options) => Ok(Vec::new()),
                        false => measure_tensor(&reader, tensor, plan, importance),
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

/// Whether the options, or the tensor, leave no choice.
fn is_fixed(plan: &TensorPlan, options: &QuantizeOptions) -> bool {
    let embedding = plan.name.contains("token_embd") && options.embedding_type.is_some();
    let output = plan.name == "output.weight" && (options.output_type.is_some() || options.leave_output);
    let manual = options.tensor_types.iter().any(|rule| rule.pattern.is_match(&plan.name));
    !plan.is_quantizable || embedding || output || manual
}

fn measure_tensor(
    reader: &RowReader,
    tensor: &Tensor<'_>,
    plan: &TensorPlan,
    importance: Option<&[f32]>,
) -> std::result::Result<Vec<TypeChoice>, QuantizeError> {
    let row_len = plan.row_len().max(1);
    let (count, rows) = matrices(plan);
    let all_rows = count * rows;
    let sampled = (SAMPLE / row_len).clamp(1, all_rows.max(1));
    let (mut buffer, mut values, mut back, mut bytes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let usable = CANDIDATES.iter().filter(|dtype| row_len.is_multiple_of(dtype.block_len()));
    let mut choices: Vec<(DType, f64)> = usable.map(|dtype| (*dtype, 0.0)).collect();
    let mut square = 0.0;
    // Rows at equal distances, all of one matrix with its own importance.
    for sample in 0..sampled {
        let row = sample * all_rows / sampled;
        reader.values(tensor, row..row + 1, &mut buffer, &mut values)?;
        let matrix = row / rows.max(1);
        let columns = importance.and_then(|all| all.get(matrix * row_len..(matrix + 1) * row_len));
        back.resize(values.len(), 0.0);
        for (dtype, error) in &mut choices {
            let unable = |_| QuantizeError::NotATarget { dtype: *dtype };
            bytes.resize(dtype.row_bytes(row_len).unwrap_or_default(), 0);
            quantize_rows(*dtype, &values, row_len, columns, &mut bytes).map_err(unable)?;
            dequantize(*dtype, &bytes, &mut back).map_err(unable)?;
            let (missed, _) = squared_error(&values, &back, columns);
            *error += missed;
        }
        square += squared_error(&values, &values, columns).1;
    }
    let weight = sensitivity(&plan.name) / if square > 0.0 { square } else { 1.0 };
    let choice = |(dtype, error): (DType, f64)| TypeChoice {
        dtype,
        bytes: plan.byte_len_as(dtype),
        error: error * weight,
    };
    Ok(choices.into_iter().map(choice).collect())
}
