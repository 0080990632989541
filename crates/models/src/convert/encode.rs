//! The types of a converted file's tensors, and the bytes of their rows.

use std::collections::BTreeMap;
use std::io;

use quadriga_gguf::OwnedValue;
use quadriga_graph::{DType, blocks};
use quadriga_llm::models::TensorSpec;

use super::output::OutputTensor;
use super::safetensors::SafeType;

/// The type that matrices are converted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetType {
    dtype: DType,
}

impl TargetType {
    /// The type of a name such as `F16`, `BF16` or `Q8_0`, in any case.
    pub fn from_name(name: &str) -> Option<TargetType> {
        let found = TargetType::all().find(|dtype| dtype.name().eq_ignore_ascii_case(name));
        found.map(|dtype| TargetType { dtype })
    }

    /// The types that can be written.
    fn all() -> impl Iterator<Item = DType> {
        use DType::{BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q6_K, Q8_0};
        [F32, F16, BF16, Q8_0, Q6_K, Q5_1, Q5_0, Q4_K, Q4_1, Q4_0].into_iter()
    }

    /// The names that [`from_name`](TargetType::from_name) knows.
    pub fn names() -> Vec<&'static str> {
        TargetType::all().map(DType::name).collect()
    }

    /// The type that loses nothing of a type of safetensors files.
    pub(super) fn keeping(dtype: SafeType) -> TargetType {
        let dtype = match dtype {
            SafeType::F16 => DType::F16,
            SafeType::F32 | SafeType::F64 => DType::F32,
            _ => DType::BF16,
        };
        TargetType { dtype }
    }

    /// The number in `general.file_type`.
    pub(super) fn file_type_id(self) -> u32 {
        match self.dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Q4_0 => 2,
            DType::Q4_1 => 3,
            DType::Q8_0 => 7,
            DType::Q5_0 => 8,
            DType::Q5_1 => 9,
            DType::Q4_K => 15,
            DType::Q6_K => 18,
            _ => 32,
        }
    }

    /// Gives each tensor its type. Norms, biases and routers stay F32.
    pub(super) fn assign(
        self,
        _architecture: &str,
        _keys: &[(String, OwnedValue)],
        tensors: Vec<OutputTensor>,
        specs: &BTreeMap<String, TensorSpec>,
    ) -> Vec<(OutputTensor, DType)> {
        let of = |tensor: &OutputTensor| {
            let f32_only = specs.get(&tensor.name).is_none_or(|spec| spec.f32_only);
            let small = tensor.dims.len() < 2 || !tensor.name.ends_with(".weight");
            match () {
                () if f32_only || small || is_precise(&tensor.name) => DType::F32,
                () if tensor.is_mxfp4() => DType::MXFP4,
                () if tensor.row_len().is_multiple_of(self.dtype.block_len()) => self.dtype,
                // As llama.cpp: what does not fit in blocks stays a float.
                () => DType::F16,
            }
        };
        tensors
            .into_iter()
            .map(|tensor| {
                let dtype = of(&tensor);
                (tensor, dtype)
            })
            .collect()
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

/// Encodes whole rows.
pub(super) fn encode(dtype: DType, exact_mxfp4: bool, values: &[f32], out: &mut [u8]) -> io::Result<()> {
    if dtype == DType::MXFP4 && exact_mxfp4 {
        repack_mxfp4(values, out);
        return Ok(());
    }
    blocks::quantize(dtype, values, out)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
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
