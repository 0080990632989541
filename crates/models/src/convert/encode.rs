//! The types of a converted file's tensors, and the bytes of their rows.

use std::collections::BTreeMap;
use std::io;

use quadriga_gguf::{OwnedValue, Value};
use quadriga_graph::{DType, Shape, blocks};
use quadriga_llm::models::TensorSpec;

use super::output::OutputTensor;
use super::safetensors::SafeType;
use crate::quantize::{FileType, Mix, MixModel, fallback, is_quantizable, quantize_rows};

/// The types that matrices are converted to: one type, or a mix of which this is the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetType {
    file_type: FileType,
}

impl TargetType {
    /// The type of a name such as `F16`, `Q8_0` or `Q4_K_M`, in any case.
    pub fn from_name(name: &str) -> Option<TargetType> {
        FileType::from_name(name).map(|file_type| TargetType { file_type })
    }

    /// The names that [`from_name`](TargetType::from_name) knows.
    pub fn names() -> Vec<&'static str> {
        FileType::all().map(FileType::name).collect()
    }

    /// The type that loses nothing of a type of safetensors files.
    pub(super) fn keeping(dtype: SafeType) -> Option<TargetType> {
        TargetType::from_name(match dtype {
            SafeType::F16 => "F16",
            SafeType::F32 | SafeType::F64 => "F32",
            _ => "BF16",
        })
    }

    /// The number in `general.file_type` for a file with these tensors: where rows are too short for the type, so that no matrix has
    /// it, that of the type of most bytes.
    pub(super) fn file_type_id(self, tensors: &[(OutputTensor, DType)]) -> u32 {
        let bytes = |wanted: DType| -> u64 {
            let own = tensors.iter().filter(|(tensor, dtype)| tensor.dims.len() > 1 && *dtype == wanted);
            own.map(|(tensor, dtype)| {
                (dtype.row_bytes(tensor.row_len()).unwrap_or_default() * tensor.row_count()) as u64
            })
            .sum()
        };
        let asked = self.file_type;
        if bytes(asked.dtype()) > 0 {
            return asked.id();
        }
        let most = DType::all().filter(|dtype| bytes(*dtype) > 0).max_by_key(|dtype| bytes(*dtype));
        most.and_then(FileType::of).unwrap_or(asked).id()
    }

    /// Gives each tensor its type, by the rules of the quantizer. Norms, biases and routers stay F32.
    pub(super) fn assign(
        self,
        architecture: &str,
        keys: &[(String, OwnedValue)],
        tensors: Vec<OutputTensor>,
        specs: &BTreeMap<String, TensorSpec>,
    ) -> Vec<(OutputTensor, DType)> {
        let number = |name: &str| {
            let key = format!("{architecture}.{name}");
            // Of numbers per layer the first counts.
            let value = match keys.iter().find(|(known, _)| *known == key)?.1.value() {
                Value::Array(list) => list.iter().next()?,
                value => value,
            };
            usize::try_from(value.integer()?).ok()
        };
        let heads = number("attention.head_count").unwrap_or(1);
        let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
        let model = MixModel {
            architecture: architecture.to_owned(),
            layers: number("block_count").unwrap_or(0),
            experts: number("expert_count").unwrap_or(0),
            heads_per_kv_head: heads.checked_div(kv_heads).unwrap_or(0),
            has_importance: false,
        };
        let shape = |tensor: &OutputTensor| Shape::new(&tensor.dims).unwrap_or(Shape::from([0]));
        let shapes: Vec<Shape> = tensors.iter().map(shape).collect();
        let names = tensors.iter().map(|tensor| tensor.name.as_str()).zip(&shapes);
        let mix = Mix::new(self.file_type, model, names);
        let quantized = self.file_type.dtype().is_quantized();
        let of = |tensor: &OutputTensor, shape: &Shape| {
            let f32_only = specs.get(&tensor.name).is_none_or(|spec| spec.f32_only);
            let small = tensor.dims.len() < 2 || !tensor.name.ends_with(".weight");
            match () {
                () if f32_only || small || is_precise(&tensor.name) => DType::F32,
                () if tensor.is_mxfp4() => DType::MXFP4,
                () if quantized && !is_quantizable(&tensor.name, shape) => DType::F16,
                () => fallback(mix.choose(&tensor.name, shape), tensor.row_len()),
            }
        };
        let types: Vec<DType> =
            tensors.iter().zip(&shapes).map(|(tensor, shape)| of(tensor, shape)).collect();
        tensors.into_iter().zip(types).collect()
    }
}

/// Whether a matrix is small and decides much.
fn is_precise(name: &str) -> bool {
    const PARTS: &[&str] = &[
        "ffn_gate_inp",
        "_norm.",
        "position_embd",
        "token_types",
        "ssm_conv1d",
        "shortconv.conv",
        "altup_correct_coef",
        "altup_predict_coef",
    ];
    PARTS.iter().any(|part| name.contains(part))
}

/// Encodes whole rows of `row_len` elements.
pub(super) fn encode(
    dtype: DType,
    exact_mxfp4: bool,
    values: &[f32],
    row_len: usize,
    out: &mut [u8],
) -> io::Result<()> {
    if dtype == DType::MXFP4 && exact_mxfp4 {
        repack_mxfp4(values, out);
        return Ok(());
    }
    let encoded = match dtype.is_quantized() {
        true => quantize_rows(dtype, values, row_len, None, out),
        false => blocks::quantize(dtype, values, out),
    };
    encoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

/// Encodes values that are 4-bit floats times a power of two per 32 of them, without loss.
fn repack_mxfp4(values: &[f32], out: &mut [u8]) {
    for (block, bytes) in values.chunks_exact(32).zip(out.chunks_exact_mut(17)) {
        let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        // The smallest power of two that makes the largest value at most 6: then all are representable, since with a larger one
        // they were.
        let mut exponent = if largest > 0.0 { (largest / 6.0).log2().ceil() as i32 } else { -127 };
        while largest > 6.0 * 2f32.powi(exponent) {
            exponent += 1;
        }
        let exponent = exponent.clamp(-127, 127);
        let inverse = 2f64.powi(-exponent);
        let code = |value: &f32| {
            const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            let magnitude = f64::from(value.abs()) * inverse;
            let nearest = (0u8..8).min_by(|a, b| {
                let distance = |code: &u8| {
                    (MAGNITUDES.get(usize::from(*code)).copied().unwrap_or(0.0) - magnitude).abs()
                };
                distance(a).total_cmp(&distance(b))
            });
            nearest.unwrap_or(0) | if *value < 0.0 { 8 } else { 0 }
        };
        let (low, high) = block.split_at(16);
        let Some((scale, packed)) = bytes.split_first_mut() else { continue };
        *scale = (exponent + 127) as u8;
        for ((byte, low), high) in packed.iter_mut().zip(low).zip(high) {
            *byte = code(low) | code(high) << 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_bit_blocks_are_repacked_without_loss() {
        let magnitudes = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (exponent, most) in [(-20, 8), (0, 8), (3, 4), (100, 2), (-126, 8)] {
            let values: Vec<f32> = (0..64)
                .map(|index| {
                    magnitudes[index * 7 % most]
                        * 2f32.powi(exponent)
                        * if index % 3 == 0 { -1.0 } else { 1.0 }
                })
                .collect();
            let mut bytes = vec![0; 34];
            repack_mxfp4(&values, &mut bytes);
            let mut back = vec![0.0; 64];
            blocks::dequantize(DType::MXFP4, &bytes, &mut back).unwrap();
            for (value, back) in values.iter().zip(&back) {
                assert!(value == back, "{exponent}: {value} {back}");
            }
        }
    }
}
