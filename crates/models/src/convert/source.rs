//! The tensors of a model's safetensors files, read in pieces as f32.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::{bf16, f16};

use super::error::{ConvertError, ConvertResult, io_error};
use super::safetensors::{SafeTensor, SafeType, SafetensorsFile};

/// All safetensors files of a folder.
#[derive(Debug)]
pub(super) struct TensorStore {
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, (usize, SafeTensor)>,
    used: Mutex<BTreeSet<String>>,
    /// Rows and columns of FP8 weights that share a scale, where the configuration says so.
    scale_block: Option<[usize; 2]>,
}

/// How the elements of a source are stored.
#[derive(Clone, Debug)]
enum Encoding {
    Plain(SafeType),
    /// FP8 with a factor per block of rows and columns.
    Scaled {
        dtype: SafeType,
        scales: Box<Source>,
        rows: usize,
        columns: usize,
    },
    /// Two elements of 4 bits per byte, and a scale per 32 elements in another tensor.
    Mxfp4 {
        scales: Box<Source>,
    },
}

/// A tensor that can be read in pieces.
#[derive(Clone, Debug)]
pub(super) struct Source {
    name: String,
    file: usize,
    encoding: Encoding,
    /// The dimensions, outermost first.
    pub(super) shape: Vec<usize>,
    start: u64,
}

impl TensorStore {
    /// Opens the files and checks their headers.
    pub(super) fn open(paths: &[PathBuf]) -> ConvertResult<TensorStore> {
        let mut store = TensorStore {
            files: Vec::new(),
            tensors: BTreeMap::new(),
            used: Mutex::default(),
            scale_block: None,
        };
        for path in paths {
            let header = SafetensorsFile::open(path)?;
            let file = File::open(path).map_err(io_error("open", path.as_path()))?;
            for (name, tensor) in header.tensors {
                if store.tensors.insert(name.clone(), (store.files.len(), tensor)).is_some() {
                    let place = format!("tensor {name:?}");
                    let reason = "another file has a tensor of that name, too";
                    return Err(super::error::invalid(path.display().to_string(), place, reason));
                }
            }
            store.files.push((path.clone(), file));
        }
        Ok(store)
    }

    /// Tensors of these names and shapes without contents, for rules that only need those.
    pub(super) fn of_shapes(shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> TensorStore {
        let tensor = |shape| SafeTensor { dtype: SafeType::F32, shape, start: 0, bytes: 0 };
        let tensors = shapes.into_iter().map(|(name, shape)| (name, (0, tensor(shape)))).collect();
        TensorStore { files: Vec::new(), tensors, used: Mutex::default(), scale_block: None }
    }

    /// Sets the rows and columns of FP8 weights that share a scale.
    pub(super) fn with_scale_block(mut self, block: Option<[usize; 2]>) -> TensorStore {
        self.scale_block = block;
        self
    }

    fn used(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The names of all tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The type that most elements have.
    pub(super) fn most_common_type(&self) -> Option<SafeType> {
        let mut bytes: Vec<(SafeType, u64)> = Vec::new();
        for (_, tensor) in self.tensors.values() {
            match bytes.iter_mut().find(|(known, _)| *known == tensor.dtype) {
                Some((_, count)) => *count += tensor.bytes,
                None => bytes.push((tensor.dtype, tensor.bytes)),
            }
        }
        bytes.into_iter().max_by_key(|(_, count)| *count).map(|(found, _)| found)
    }

    /// Marks a tensor as one that is not converted.
    pub(super) fn ignore(&self, name: &str) {
        self.used().insert(name.to_owned());
    }

    /// The first tensor that nothing has asked for.
    pub(super) fn unused(&self) -> Option<&str> {
        let used = self.used();
        self.names().find(|name| !used.contains(*name))
    }

    fn plain(&self, name: &str) -> Option<Source> {
        let (file, tensor) = self.tensors.get(name)?;
        self.used().insert(name.to_owned());
        Some(Source {
            name: name.to_owned(),
            file: *file,
            encoding: Encoding::Plain(tensor.dtype),
            shape: tensor.shape.clone(),
            start: tensor.start,
        })
    }

    /// A tensor as something to read, with the scales of FP8 weights that belong to it.
    pub(super) fn find(&self, name: &str) -> ConvertResult<Option<Source>> {
        let Some(mut source) = self.plain(name) else { return Ok(None) };
        let Encoding::Plain(dtype) = source.encoding else { return Ok(Some(source)) };
        if !dtype.is_float() {
            return Err(ConvertError::Invalid {
                file: self.path(source.file).display().to_string(),
                place: format!("tensor {name:?}"),
                reason: format!(
                    "weights of type {} are not supported, only floating-point types",
                    dtype.name()
                ),
            });
        }
        if matches!(dtype, SafeType::F8E4M3 | SafeType::F8E5M2) {
            for ignored in ["input_scale", "activation_scale", "input_global_scale"] {
                self.ignore(&name.replace(".weight", &format!(".{ignored}")));
            }
            let scales = ["_scale_inv", "_scale"].iter().find_map(|end| self.plain(&format!("{name}{end}")));
            if let Some(scales) = scales {
                let (rows, columns) = scale_block(&source, &scales, self.scale_block)?;
                source.encoding = Encoding::Scaled { dtype, scales: Box::new(scales), rows, columns };
            }
        }
        Ok(Some(source))
    }

    /// Packed 4-bit weights, `NAME_blocks` and `NAME_scales`.
    pub(super) fn find_mxfp4(&self, name: &str) -> ConvertResult<Option<Source>> {
        let (Some(blocks), Some(scales)) =
            (self.plain(&format!("{name}_blocks")), self.plain(&format!("{name}_scales")))
        else {
            return Ok(None);
        };
        let (Some((&16, outer)), true) =
            (blocks.shape.split_last(), blocks.shape.len() == scales.shape.len() + 1)
        else {
            return Err(wrong_shape(&blocks, "blocks of 16 bytes"));
        };
        if outer != scales.shape {
            return Err(wrong_shape(&scales, "the shape of the blocks"));
        }
        let mut shape = outer.to_vec();
        if let Some(last) = shape.last_mut() {
            *last *= 32;
        }
        Ok(Some(Source { shape, encoding: Encoding::Mxfp4 { scales: Box::new(scales) }, ..blocks }))
    }

    pub(super) fn path(&self, file: usize) -> &Path {
        self.files.get(file).map_or(Path::new(""), |(path, _)| path)
    }

    fn read_at(&self, file: usize, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (_, file) = self.files.get(file).ok_or(io::ErrorKind::NotFound)?;
        read_exact_at(file, at, bytes)
    }

    /// Reads consecutive elements of a tensor.
    pub(super) fn read(
        &self,
        source: &Source,
        first: usize,
        out: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> io::Result<()> {
        match &source.encoding {
            Encoding::Plain(dtype) => self.read_plain(source, *dtype, first, out, bytes),
            Encoding::Scaled { dtype, scales, rows, columns } => {
                self.read_plain(source, *dtype, first, out, bytes)?;
                self.scale(source, scales, (*rows, *columns), first, out, bytes)
            }
            Encoding::Mxfp4 { scales } => {
                let blocks = out.len() / 32;
                bytes.resize(17 * blocks, 0);
                let (exponents, nibbles) = bytes.split_at_mut(blocks);
                self.read_at(scales.file, scales.start + (first / 32) as u64, exponents)?;
                self.read_at(source.file, source.start + (first / 2) as u64, nibbles)?;
                for ((values, exponent), packed) in
                    out.chunks_exact_mut(32).zip(exponents).zip(nibbles.chunks_exact(16))
                {
                    let scale = 2f32.powi(i32::from(*exponent) - 127);
                    for (pair, byte) in values.chunks_exact_mut(2).zip(packed) {
                        for (value, nibble) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
                            *value = e2m1(nibble) * scale;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    fn read_plain(
        &self,
        source: &Source,
        dtype: SafeType,
        first: usize,
        out: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> io::Result<()> {
        bytes.resize(out.len() * dtype.bytes(), 0);
        self.read_at(source.file, source.start + (first * dtype.bytes()) as u64, bytes)?;
        decode(dtype, bytes, out);
        Ok(())
    }

    /// Multiplies elements by the scales of their blocks.
    fn scale(
        &self,
        source: &Source,
        scales: &Source,
        (rows, columns): (usize, usize),
        first: usize,
        out: &mut [f32],
        bytes: &mut Vec<u8>,
    ) -> io::Result<()> {
        let Encoding::Plain(dtype) = scales.encoding else { return Ok(()) };
        let width = source.shape.last().copied().unwrap_or(1).max(1);
        let per_row = width.div_ceil(columns);
        let count = scales.shape.iter().product::<usize>();
        let mut factors = vec![1.0; per_row];
        let mut loaded = None;
        let mut at = first;
        let mut rest = out;
        while !rest.is_empty() {
            let (row, column) = (at / width, at % width);
            let block = row / rows;
            if loaded != Some(block) {
                let start = (block * per_row).min(count.saturating_sub(per_row));
                self.read_plain(scales, dtype, start, &mut factors, bytes)?;
                loaded = Some(block);
            }
            let length = (width - column).min(rest.len());
            let (now, later) = rest.split_at_mut(length);
            for (offset, value) in now.iter_mut().enumerate() {
                *value *= factors.get((column + offset) / columns).copied().unwrap_or(1.0);
            }
            at += length;
            rest = later;
        }
        Ok(())
    }
}

impl Source {
    /// The name of the tensor.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The number of elements.
    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The last dimension.
    pub(super) fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// All dimensions but the last.
    pub(super) fn rows(&self) -> usize {
        self.elements().checked_div(self.columns()).unwrap_or(0)
    }

    /// Whether the weights are 4-bit blocks with shared exponents.
    pub(super) fn is_mxfp4(&self) -> bool {
        matches!(self.encoding, Encoding::Mxfp4 { .. })
    }

    /// The same tensor with other dimensions.
    pub(super) fn reshaped(mut self, shape: &[usize]) -> ConvertResult<Source> {
        let wanted: usize = shape.iter().product();
        if wanted != self.elements() {
            return Err(wrong_shape(&self, &format!("{shape:?}, or as many elements")));
        }
        self.shape = shape.to_vec();
        Ok(self)
    }
}

/// An error about a tensor's shape.
pub(super) fn wrong_shape(source: &Source, expected: &str) -> ConvertError {
    ConvertError::Shape {
        name: source.name.clone(),
        expected: expected.to_owned(),
        found: source.shape.clone(),
    }
}

/// The blocks of fine-grained FP8 whose configuration does not name them.
const DEFAULT_BLOCK: [usize; 2] = [128, 128];

/// Rows and columns that share a scale: one for all, one per row, or one per block of a size that the configuration names. The
/// number of scales alone does not tell the size, as the last blocks may be cut off.
fn scale_block(source: &Source, scales: &Source, block: Option<[usize; 2]>) -> ConvertResult<(usize, usize)> {
    let (rows, columns) = (source.rows().max(1), source.columns().max(1));
    match (scales.shape.as_slice(), block) {
        ([] | [1], _) | ([1, 1], None) => Ok((rows, columns)),
        ([count], _) | ([count, 1], None) if *count == rows => Ok((1, columns)),
        ([down, across], _) => {
            let [high, wide] = block.unwrap_or(DEFAULT_BLOCK);
            let expected = [rows.div_ceil(high), columns.div_ceil(wide)];
            if [*down, *across] == expected {
                return Ok((high, wide));
            }
            let named = match block {
                Some(_) => "as quantization_config.weight_block_size says",
                None => "which is the default, as config.json has no quantization_config.weight_block_size",
            };
            let expected = format!(
                "{expected:?}, one scale per block of {high} × {wide} of the weight of {rows} × {columns}, {named}"
            );
            Err(wrong_shape(scales, &expected))
        }
        _ => Err(wrong_shape(scales, "one scale, one per row, or one per block")),
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut at: u64, mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_read(file, bytes, at)?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += count as u64;
        bytes = bytes.get_mut(count..).unwrap_or_default();
    }
    Ok(())
}

/// Decodes little-endian elements.
fn decode(dtype: SafeType, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
        let (chunks, _) = bytes.as_chunks::<N>();
        for (value, chunk) in out.iter_mut().zip(chunks) {
            *value = decode(*chunk);
        }
    }
    match dtype {
        SafeType::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        SafeType::F32 => each(bytes, out, f32::from_le_bytes),
        SafeType::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        SafeType::BF16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        SafeType::F8E4M3 => each(bytes, out, |[b]| e4m3(b)),
        SafeType::F8E5M2 => each(bytes, out, |[b]| f16::from_bits(u16::from(b) << 8).to_f32()),
        SafeType::I64 | SafeType::I32 | SafeType::I16 | SafeType::I8 | SafeType::U8 | SafeType::Bool => {
            out.fill(0.0)
        }
    }
}

/// A float of 4 exponent and 3 mantissa bits without infinities.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 128 == 0 { magnitude } else { -magnitude }
}

/// A float of 2 exponent bits and 1 mantissa bit.
fn e2m1(nibble: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES.get(usize::from(nibble & 7)).copied().unwrap_or(0.0);
    if nibble & 8 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_the_values_of_their_definitions() {
        for (byte, value) in [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0x08, 0.015625),
        ] {
            assert_eq!(e4m3(byte), value, "{byte:#x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let mut out = [0.0; 3];
        decode(SafeType::F8E5M2, &[0x3c, 0xc0, 0x7b], &mut out);
        assert_eq!(out, [1.0, -2.0, 57344.0]);
        assert_eq!([e2m1(1), e2m1(7), e2m1(9), e2m1(15)], [0.5, 6.0, -0.5, -6.0]);
    }
}
