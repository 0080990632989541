//! Random weights, made directly in the file's format.
//!
//! A block is random bits with scales that make its values as large as those of a trained matrix: about one over the
//! square root of the row's length, so that activations neither vanish nor overflow. How large values are for a scale
//! of 1 is measured once for each type, by the graph crate's own dequantization.

use std::io;

use quadriga_conformance::Rng;
use quadriga_gguf::{Result, Writer};
use quadriga_graph::{DType, blocks};

use crate::interrupt::Gentle;

/// Bytes that are made at a time, about.
const PIECE: usize = 1 << 20;

/// How many different scales the blocks of a matrix have.
const SCALES: usize = 16;

/// Adds tensors with random contents to a file.
pub(super) struct Source<'a> {
    seeds: Rng,
    gentle: &'a Gentle,
}

impl<'a> Source<'a> {
    pub(super) fn new(seed: u64, gentle: &'a Gentle) -> Source<'a> {
        Source { seeds: Rng::new(seed), gentle }
    }

    /// A matrix `[rows, columns]` of the type asked for, or the next best where its rows are not whole blocks.
    pub(super) fn matrix(
        &mut self,
        writer: &mut Writer<'a>,
        name: &str,
        dtype: DType,
        [rows, columns]: [usize; 2],
    ) -> Result<()> {
        let dtype = fitting(dtype, columns);
        let size = 1.0 / (columns as f32).sqrt();
        self.add(writer, name, dtype, &[rows, columns], move |rng, out| fill(dtype, size, rng, out))
    }

    /// The weights of a norm: about 1.
    pub(super) fn norm(&mut self, writer: &mut Writer<'a>, name: &str, len: usize) -> Result<()> {
        self.add(writer, name, DType::F32, &[len], |rng, out| floats(DType::F32, 0.9..1.1, rng, out))
    }

    /// The biases of a matrix: small.
    pub(super) fn bias(&mut self, writer: &mut Writer<'a>, name: &str, len: usize) -> Result<()> {
        self.add(writer, name, DType::F32, &[len], |rng, out| floats(DType::F32, -0.1..0.1, rng, out))
    }

    fn add(
        &mut self,
        writer: &mut Writer<'a>,
        name: &str,
        dtype: DType,
        dims: &[usize],
        fill: impl Fn(&mut Rng, &mut [u8]) + Sync + 'a,
    ) -> Result<()> {
        let (seed, gentle) = (self.seeds.next_u64(), self.gentle);
        let block = dtype.block_bytes();
        let piece = PIECE / block * block;
        let elements = dims.iter().fold(1usize, |product, dim| product.saturating_mul(*dim));
        // A shape that is too large is refused by the writer, before anything is made.
        let bytes = dtype.row_bytes(elements).unwrap_or(0);
        let shape = quadriga_graph::Shape::new(dims).unwrap_or(quadriga_graph::Shape::from([0]));
        writer.tensor(name, dtype, shape, move |out| {
            let mut buffer = vec![0; piece.min(bytes)];
            for (number, start) in (0u64..).zip((0..bytes).step_by(piece.max(1))) {
                if gentle.is_interrupted() {
                    return Err(io::Error::other("interrupted"));
                }
                let part = buffer.get_mut(..piece.min(bytes - start)).unwrap_or_default();
                fill(&mut Rng::new(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d)), part);
                out.write_all(part)?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// The type itself where rows of this length are whole blocks of it; else one with shorter blocks and about as many
/// bits.
fn fitting(dtype: DType, columns: usize) -> DType {
    if dtype.row_bytes(columns).is_some() {
        return dtype;
    }
    let next = match dtype {
        DType::Q2_K | DType::Q3_K | DType::IQ4_XS => DType::IQ4_NL,
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        _ => DType::F16,
    };
    fitting(next, columns)
}

/// Where a block keeps the numbers that decide how large its values are.
enum Scale {
    /// Half-precision fields: offset, and the value in terms of the block's scale.
    Halves(&'static [(usize, f32)]),
    /// A power of two in one byte, at the start.
    Exponent,
    /// Plain numbers have none.
    None,
}

fn scale_of(dtype: DType) -> Scale {
    // Where a block has a minimum, it is set such that values are positive as often as negative.
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4_NL | DType::IQ4_XS => Scale::Halves(&[(0, 1.0)]),
        DType::Q4_1 => Scale::Halves(&[(0, 1.0), (2, -7.5)]),
        DType::Q5_1 => Scale::Halves(&[(0, 1.0), (2, -15.5)]),
        DType::Q2_K => Scale::Halves(&[(80, 1.0), (82, 1.5)]),
        DType::Q3_K => Scale::Halves(&[(108, 1.0)]),
        DType::Q4_K => Scale::Halves(&[(0, 1.0), (2, 7.5)]),
        DType::Q5_K => Scale::Halves(&[(0, 1.0), (2, 15.5)]),
        DType::Q6_K => Scale::Halves(&[(208, 1.0)]),
        DType::MXFP4 => Scale::Exponent,
        _ => Scale::None,
    }
}

/// Fills whole blocks with values of this root mean square.
fn fill(dtype: DType, size: f32, rng: &mut Rng, out: &mut [u8]) {
    match scale_of(dtype) {
        Scale::None => {
            let most = size * 3f32.sqrt();
            floats(dtype, -most..most, rng, out);
        }
        Scale::Halves(fields) => {
            let unit = size_of_unit(dtype);
            let step = |number: usize| size / unit * (0.7 + 0.04 * number as f32);
            let scales: [f32; SCALES] = std::array::from_fn(step);
            random_bits(dtype, rng, out);
            set_halves(dtype, fields, &scales, rng, out);
        }
        Scale::Exponent => {
            let exponent = 127.0 + (size / size_of_unit(dtype)).log2().round();
            random_bits(dtype, rng, out);
            set_exponent(dtype, exponent.clamp(0.0, 254.0) as u8, out);
        }
    }
}

/// Random numbers of a plain type, evenly in a range.
fn floats(dtype: DType, range: std::ops::Range<f32>, rng: &mut Rng, out: &mut [u8]) {
    let (low, width) = (range.start, range.end - range.start);
    let values: Vec<f32> = (0..out.len() / dtype.block_bytes())
        .map(|_| low + width * ((rng.next_u64() >> 40) as f32 / (1u64 << 24) as f32))
        .collect();
    // Plain types take any values, and the lengths agree.
    let _ = blocks::quantize(dtype, &values, out);
}

fn random_bits(dtype: DType, rng: &mut Rng, out: &mut [u8]) {
    let (words, rest) = out.as_chunks_mut::<8>();
    for word in words {
        *word = rng.next_u64().to_le_bytes();
    }
    for (byte, random) in rest.iter_mut().zip(rng.next_u64().to_le_bytes()) {
        *byte = random;
    }
    if matches!(dtype, DType::Q8_0 | DType::Q6_K) {
        // Quantizers use a symmetric range of signed bytes: −128 does not occur.
        out.iter_mut().for_each(|byte| *byte = if *byte == 0x80 { 0x81 } else { *byte });
    }
}

fn set_halves(dtype: DType, fields: &[(usize, f32)], scales: &[f32; SCALES], rng: &mut Rng, out: &mut [u8]) {
    // A lone scale of either sign makes up for ranges that are not symmetric, such as −8 to 7.
    let sign = |number: usize| if fields.len() == 1 && number % 2 == 1 { -1.0 } else { 1.0 };
    for (offset, factor) in fields {
        let bytes: [[u8; 2]; SCALES] = std::array::from_fn(|number| {
            let scale = scales.get(number).copied().unwrap_or_default();
            blocks::HalfBytes::from_f32_finite(scale * factor * sign(number)).0
        });
        let mut rng = rng.clone();
        for block in out.chunks_exact_mut(dtype.block_bytes()) {
            let chosen = bytes.get((rng.next_u64() >> 60) as usize).copied().unwrap_or_default();
            if let Some(field) = block.get_mut(*offset..offset + 2) {
                field.copy_from_slice(&chosen);
            }
        }
    }
}

fn set_exponent(dtype: DType, exponent: u8, out: &mut [u8]) {
    out.chunks_exact_mut(dtype.block_bytes())
        .filter_map(|block| block.first_mut())
        .for_each(|byte| *byte = exponent);
}

/// The root mean square of random values of a type whose scale is 1.
fn size_of_unit(dtype: DType) -> f32 {
    const BLOCKS: usize = 64;
    let mut rng = Rng::new(1);
    let mut bytes = vec![0; BLOCKS * dtype.block_bytes()];
    random_bits(dtype, &mut rng, &mut bytes);
    match scale_of(dtype) {
        Scale::Halves(fields) => set_halves(dtype, fields, &[1.0; SCALES], &mut rng, &mut bytes),
        Scale::Exponent => set_exponent(dtype, 127, &mut bytes),
        Scale::None => return 1.0,
    }
    let mut values = vec![0.0; BLOCKS * dtype.block_len()];
    if blocks::dequantize(dtype, &bytes, &mut values).is_err() {
        return 1.0;
    }
    let sum: f32 = values.iter().map(|value| value * value).sum();
    (sum / values.len() as f32).sqrt().max(f32::MIN_POSITIVE)
}
