//! Reads rows of a tensor: from the file, not from its map, so that a large model does not fill the memory, and a file
//! that becomes shorter is an error.

use std::fs;
use std::path::PathBuf;

use quadriga_gguf::{File, Tensor};
use quadriga_graph::blocks;

use crate::error::QuantizeError;

/// The files of a model, opened once more for reading.
pub(crate) struct RowReader {
    #[cfg_attr(not(unix), expect(dead_code, reason = "only Unix reads at an offset"))]
    files: Vec<(PathBuf, fs::File)>,
}

impl RowReader {
    pub(crate) fn new(file: &File) -> Result<RowReader, QuantizeError> {
        let open = |path: &std::path::Path| {
            let opened = fs::File::open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
            match opened {
                Ok((len, file)) => Ok((len, (path.to_owned(), file))),
                Err(source) => Err(QuantizeError::Read { path: path.to_owned(), source }),
            }
        };
        let opened = file.paths().map(open).collect::<Result<Vec<_>, _>>()?;
        let total: u64 = opened.iter().map(|(len, _)| len).sum();
        if let Some((_, (path, _))) = opened.first().filter(|_| total != file.byte_len()) {
            return Err(QuantizeError::Changed { path: path.clone() });
        }
        Ok(RowReader { files: opened.into_iter().map(|(_, file)| file).collect() })
    }

    /// The bytes of a tensor from `start`; `buffer` is filled.
    pub(crate) fn bytes(
        &self,
        tensor: &Tensor<'_>,
        start: usize,
        buffer: &mut [u8],
    ) -> Result<(), QuantizeError> {
        #[cfg(unix)]
        if let Some((path, file)) = self.files.get(tensor.part()) {
            use std::os::unix::fs::FileExt;
            let offset = (tensor.offset() + start) as u64;
            return file
                .read_exact_at(buffer, offset)
                .map_err(|source| QuantizeError::Read { path: path.clone(), source });
        }
        let end = start + buffer.len();
        if let Some(bytes) = tensor.bytes().get(start..end) {
            buffer.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// The values of whole rows, dequantized; both buffers keep their memory for the next rows.
    pub(crate) fn values(
        &self,
        tensor: &Tensor<'_>,
        rows: std::ops::Range<usize>,
        buffer: &mut Vec<u8>,
        values: &mut Vec<f32>,
    ) -> Result<(), QuantizeError> {
        let row_len = tensor.shape().dims().last().copied().unwrap_or_default();
        let dtype = tensor.dtype();
        let row_bytes = dtype.row_bytes(row_len).unwrap_or_default();
        buffer.resize(row_bytes * rows.len(), 0);
        values.resize(row_len * rows.len(), 0.0);
        self.bytes(tensor, row_bytes * rows.start, buffer)?;
        let not_computable = |_| QuantizeError::NotComputable { tensor: tensor.name().to_owned(), dtype };
        dequantize(dtype, buffer, values).map_err(not_computable)?;
        if let Some(place) = first_not_finite(values) {
            let row = rows.start + place / row_len.max(1);
            return Err(QuantizeError::NotFinite { tensor: tensor.name().to_owned(), row });
        }
        Ok(())
    }
}

/// Dequantizes; F16 with the CPU's instructions for it.
pub(crate) fn dequantize(
    dtype: quadriga_graph::DType,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<(), blocks::FormatError> {
    use half::slice::HalfFloatSliceExt;
    if dtype == quadriga_graph::DType::F16
        && let Ok(halves) = bytemuck::try_cast_slice::<u8, half::f16>(bytes)
        && halves.len() == out.len()
        && cfg!(target_endian = "little")
    {
        halves.convert_to_f32_slice(out);
        return Ok(());
    }
    blocks::dequantize(dtype, bytes, out)
}

/// The index of the first value that is infinite or NaN.
pub(crate) fn first_not_finite(values: &[f32]) -> Option<usize> {
    const INFINITE: u32 = 0x7f80_0000;
    // Compared as integers: a maximum that the compiler can vectorize.
    let most = values.iter().fold(0, |most: u32, value| most.max(value.to_bits() & 0x7fff_ffff));
    if most < INFINITE {
        return None;
    }
    values.iter().position(|value| !value.is_finite())
}

/// Σ (a − b)² and Σ a², each column weighted by its importance.
pub(crate) fn squared_error(a: &[f32], b: &[f32], importance: Option<&[f32]>) -> (f64, f64) {
    let row_len = importance.map_or(a.len(), <[f32]>::len).max(1);
    let (mut error, mut square) = (0.0, 0.0);
    for (a, b) in a.chunks(row_len).zip(b.chunks(row_len)) {
        for (a, b, w) in a.iter().zip(b).enumerate().map(|(i, (a, b))| {
            (f64::from(*a), f64::from(*b), importance.and_then(|w| w.get(i)).map_or(1.0, |w| f64::from(*w)))
        }) {
            error += w * (a - b) * (a - b);
            square += w * a * a;
        }
    }
    (error, square)
}
