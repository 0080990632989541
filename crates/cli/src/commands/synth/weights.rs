//! Random weights, generated directly as quantized blocks.
//!
//! A block is random bits with scales such that the root mean square of its values is one over the square root of the
//! row's length, as in a trained matrix, so that activations neither vanish nor overflow. The root mean square at a
//! scale of 1 is measured for each type by the graph crate's dequantization.

use std::io;

use quadriga_conformance::Rng;
use quadriga_gguf::{Result, Writer};
use quadriga_graph::{DType, blocks};
use quadriga_llm::models::TensorSpec;

use crate::interrupt::CtrlC;

/// Bytes generated at a time, rounded down to whole blocks.
const CHUNK: usize = 1 << 20;

/// Number of distinct scales in a matrix.
const SCALES: usize = 16;

/// Adds random tensors to a file.
pub(super) struct RandomWeights<'a> {
    seeds: Rng,
    ctrl_c: &'a CtrlC,
}

impl<'a> RandomWeights<'a> {
    pub(super) fn new(seed: u64, ctrl_c: &'a CtrlC) -> RandomWeights<'a> {
        RandomWeights { seeds: Rng::new(seed), ctrl_c }
    }

    /// Adds a tensor; a matrix of this type, of whose blocks its rows consist.
    pub(super) fn tensor(&mut self, writer: &mut Writer<'a>, spec: &TensorSpec, dtype: DType) -> Result<()> {
        let (name, dims) = (spec.name.as_str(), spec.dims.as_slice());
        if spec.f32_only {
            let range = range_of(name);
            return self.add(writer, name, DType::F32, dims, move |rng, out| {
                floats(DType::F32, range.clone(), rng, out);
            });
        }
        let columns = dims.last().copied().unwrap_or(1);
        let rms = 1.0 / (columns as f32).sqrt();
        self.add(writer, name, dtype, dims, move |rng, out| fill(dtype, rms, rng, out))
    }

    fn add(
        &mut self,
        writer: &mut Writer<'a>,
        name: &str,
        dtype: DType,
        dims: &[usize],
        fill: impl Fn(&mut Rng, &mut [u8]) + Sync + 'a,
    ) -> Result<()> {
        let (seed, ctrl_c) = (self.seeds.next_u64(), self.ctrl_c);
        let block = dtype.block_bytes();
        let chunk = CHUNK / block * block;
        let elements = dims.iter().fold(1usize, |product, dim| product.saturating_mul(*dim));
        // The writer rejects a shape that is too large before anything is generated.
        let bytes = dtype.row_bytes(elements).unwrap_or(0);
        let shape = quadriga_graph::Shape::new(dims).unwrap_or(quadriga_graph::Shape::from([0]));
        writer.tensor(name, dtype, shape, move |out| {
            let mut buffer = vec![0; chunk.min(bytes)];
            for (number, start) in (0u64..).zip((0..bytes).step_by(chunk.max(1))) {
                if ctrl_c.is_pressed() {
                    return Err(io::Error::other("interrupted"));
                }
                let part = buffer.get_mut(..chunk.min(bytes - start)).unwrap_or_default();
                fill(&mut Rng::new(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d)), part);
                out.write_all(part)?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// The values of a tensor that is not a matrix of a product.
fn range_of(name: &str) -> std::ops::Range<f32> {
    if name.ends_with("norm.weight") {
        0.9..1.1
    } else if name.ends_with("ssm_a") {
        // The logarithm of a decay.
        -1.0..-0.1
    } else {
        -0.1..0.1
    }
}

/// The type itself if rows of this length are whole blocks; else a type with shorter blocks and a similar bit width.
pub(super) fn fitting(dtype: DType, columns: usize) -> DType {
    if dtype.row_bytes(columns).is_some() {
        return dtype;
    }
    let next = match dtype {
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        DType::NVFP4 => DType::MXFP4,
        _ if dtype.block_len() == 256 => DType::IQ4_NL,
        _ => DType::F16,
    };
    fitting(next, columns)
}

/// Fills whole blocks with values of this root mean square.
fn fill(dtype: DType, rms: f32, rng: &mut Rng, out: &mut [u8]) {
    if !dtype.is_quantized() {
        let bound = rms * 3f32.sqrt();
        return floats(dtype, -bound..bound, rng, out);
    }
    let unit = unit_rms(dtype);
    let scales = std::array::from_fn(|number| rms / unit * (0.7 + 0.04 * number as f32));
    random_bits(dtype, rng, out);
    set_scales(dtype, &scales, rng, out);
}

/// Random values of a float type, uniform in a range.
fn floats(dtype: DType, range: std::ops::Range<f32>, rng: &mut Rng, out: &mut [u8]) {
    let (low, width) = (range.start, range.end - range.start);
    let values: Vec<f32> = (0..out.len() / dtype.block_bytes())
        .map(|_| low + width * ((rng.next_u64() >> 40) as f32 / (1u64 << 24) as f32))
        .collect();
    // Float types represent any value, and the lengths agree.
    let _ = blocks::quantize(dtype, &values, out);
}

fn random_bits(dtype: DType, rng: &mut Rng, out: &mut [u8]) {
    let (chunks, rest) = out.as_chunks_mut::<8>();
    for chunk in chunks {
        *chunk = rng.next_u64().to_le_bytes();
    }
    for (byte, random) in rest.iter_mut().zip(rng.next_u64().to_le_bytes()) {
        *byte = random;
    }
    if matches!(dtype, DType::Q8_0 | DType::Q6_K) {
        // Quantizers use the symmetric range −127..=127.
        out.iter_mut().for_each(|byte| *byte = if *byte == 0x80 { 0x81 } else { *byte });
    }
}

/// Gives each block one of the scales. Alternating signs centre asymmetric ranges such as −8..=7.
fn set_scales(dtype: DType, scales: &[f32; SCALES], rng: &mut Rng, out: &mut [u8]) {
    for block in out.chunks_exact_mut(dtype.block_bytes()) {
        let number = (rng.next_u64() >> 60) as usize;
        let scale = scales.get(number).copied().unwrap_or_default();
        blocks::set_scale(dtype, block, if number % 2 == 1 { -scale } else { scale });
    }
}

/// The root mean square of random values of a type at a scale of 1.
fn unit_rms(dtype: DType) -> f32 {
    const BLOCKS: usize = 64;
    let mut rng = Rng::new(1);
    let mut bytes = vec![0; BLOCKS * dtype.block_bytes()];
    random_bits(dtype, &mut rng, &mut bytes);
    set_scales(dtype, &[1.0; SCALES], &mut rng, &mut bytes);
    let mut values = vec![0.0; BLOCKS * dtype.block_len()];
    if blocks::dequantize(dtype, &bytes, &mut values).is_err() {
        return 1.0;
    }
    let sum: f32 = values.iter().map(|value| value * value).sum();
    (sum / values.len() as f32).sqrt().max(f32::MIN_POSITIVE)
}
