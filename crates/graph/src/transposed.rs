//! Matrices of a file in transposed form.

use crate::blocks::{dequantize, quantize};
use crate::dtype::DType;

/// The type of transposed matrices of type `dtype`: float types stay as they are, blocks, whose elements are no longer
/// adjacent, become F16.
pub(crate) fn transposed_type(dtype: DType) -> DType {
    match dtype {
        DType::F32 | DType::BF16 => dtype,
        _ => DType::F16,
    }
}

/// Matrices of `rows` × `columns` elements, one after the other, each transposed. Empty if the bytes are not whole matrices
/// of a type that can be dequantized.
pub(crate) fn transpose(dtype: DType, bytes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let to = transposed_type(dtype);
    let (Some(from_bytes), Some(to_bytes)) = (dtype.row_bytes(rows * columns), to.row_bytes(rows * columns))
    else {
        return Vec::new();
    };
    if from_bytes == 0 || !bytes.len().is_multiple_of(from_bytes) {
        return Vec::new();
    }
    let mut out = vec![0; bytes.len() / from_bytes * to_bytes];
    let (mut values, mut columns_first) = (vec![0.0; rows * columns], vec![0.0; rows * columns]);
    for (from, to_part) in bytes.chunks(from_bytes).zip(out.chunks_mut(to_bytes)) {
        let done = dequantize(dtype, from, &mut values).and_then(|()| {
            for (column, target) in columns_first.chunks_mut(rows).enumerate() {
                let source = values.iter().skip(column).step_by(columns);
                target.iter_mut().zip(source).for_each(|(to, from)| *to = *from);
            }
            quantize(to, &columns_first, to_part)
        });
        if done.is_err() {
            return Vec::new();
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns_of_each_matrix() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let bytes = bytemuck::cast_slice::<f32, u8>(&values);
        let wanted: Vec<f32> = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11].map(|i| i as f32).to_vec();
        assert_eq!(transpose(DType::F32, bytes, 2, 3), bytemuck::cast_slice::<f32, u8>(&wanted));
        assert!(transpose(DType::F32, bytes, 5, 1).is_empty(), "not whole matrices");
        assert!(transpose(DType::F32, bytes, 0, 3).is_empty());
    }

    #[test]
    fn blocks_become_halves() {
        let values: Vec<f32> = (0..64).map(|i| (i % 32 - 16) as f32 * 0.25).collect();
        let mut blocks = vec![0; DType::Q8_0.row_bytes(64).unwrap()];
        quantize(DType::Q8_0, &values, &mut blocks).unwrap();
        let mut exact = vec![0.0; 64];
        dequantize(DType::Q8_0, &blocks, &mut exact).unwrap();
        let mut halves = vec![0.0; 64];
        dequantize(DType::F16, &transpose(DType::Q8_0, &blocks, 2, 32), &mut halves).unwrap();
        for (i, value) in halves.iter().enumerate() {
            let from = exact[i % 2 * 32 + i / 2];
            assert!((value - from).abs() <= from.abs() / 2048.0, "{i}: {value} of {from}");
        }
    }
}
