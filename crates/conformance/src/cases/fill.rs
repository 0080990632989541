//! Random values for the tensors of a case, in any type.

use quadriga_graph::{DType, blocks};

use crate::Rng;

/// The distribution of a tensor's values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Fill {
    /// Uniform in `low..high`.
    Range(f32, f32),
    /// Multiples of 0.5 in −3..=3, so that zeros and ties occur.
    Steps,
    /// Distinct values in random order.
    Distinct,
    /// 0, or with this probability uniform in 0..1: gates after ReLU.
    Active(f64),
    /// 0, or `−∞` with this probability.
    Mask(f64),
    /// Uniform in −1..1, or with this probability NaN or infinite.
    NonFinite(f64),
}

/// The usual distribution.
pub(crate) const UNIT: Fill = Fill::Range(-1.0, 1.0);

pub(crate) fn values(fill: Fill, count: usize, rng: &mut Rng) -> Vec<f32> {
    match fill {
        Fill::Range(low, high) => (0..count).map(|_| rng.uniform(low.into(), high.into()) as f32).collect(),
        Fill::Steps => (0..count).map(|_| rng.below(13) as f32 * 0.5 - 3.0).collect(),
        Fill::Distinct => {
            shuffled(count, rng).into_iter().map(|i| i as f32 * 0.25 - count as f32 / 8.0).collect()
        }
        Fill::NonFinite(chance) => (0..count)
            .map(|_| match rng.chance(chance) {
                true if rng.chance(0.5) => f32::NAN,
                true => f32::INFINITY,
                false => rng.uniform(-1.0, 1.0) as f32,
            })
            .collect(),
        Fill::Active(chance) => {
            let gate = |rng: &mut Rng| if rng.chance(chance) { rng.uniform(0.0, 1.0) as f32 } else { 0.0 };
            (0..count).map(|_| gate(rng)).collect()
        }
        Fill::Mask(chance) => {
            (0..count).map(|_| if rng.chance(chance) { f32::NEG_INFINITY } else { 0.0 }).collect()
        }
    }
}

/// A random permutation of `0..count`.
pub(crate) fn shuffled(count: usize, rng: &mut Rng) -> Vec<usize> {
    let mut numbers: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        numbers.swap(i, rng.range(0, i));
    }
    numbers
}

/// Random bytes of `count` elements, a whole number of blocks, of a computable type or I32.
pub(crate) fn bytes(dtype: DType, fill: Fill, count: usize, rng: &mut Rng) -> Vec<u8> {
    if dtype == DType::I32 {
        return (0..count).flat_map(|_| (rng.below(2001) as i32 - 1000).to_le_bytes()).collect();
    }
    let mut out = vec![0; dtype.row_bytes(count).unwrap_or(0)];
    if blocks::quantize(dtype, &values(fill, count, rng), &mut out).is_err() {
        random_blocks(dtype, &mut out, rng);
    }
    out
}

/// Random blocks with scales that keep the values near −1..1, for types that cannot be quantized to.
fn random_blocks(dtype: DType, out: &mut [u8], rng: &mut Rng) {
    for block in out.chunks_mut(dtype.block_bytes()) {
        block.iter_mut().for_each(|b| *b = rng.next_u64() as u8);
        blocks::set_scale(dtype, block, typical_scale(dtype) * rng.uniform(0.5, 1.5) as f32);
    }
}

/// The inverse of the largest value of a block whose scale is 1, roughly.
fn typical_scale(dtype: DType) -> f32 {
    match dtype {
        DType::Q2_K => 1.0 / 24.0,
        DType::Q3_K => 1.0 / 96.0,
        DType::Q5_K => 1.0 / 1000.0,
        DType::IQ4_NL => 1.0 / 127.0,
        DType::IQ4_XS => 1.0 / 4000.0,
        DType::MXFP4 => 1.0 / 16.0,
        DType::IQ1_S | DType::IQ1_M => 1.0 / 15.0,
        DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => 1.0 / 166.0,
        DType::IQ3_XXS | DType::IQ3_S => 1.0 / 480.0,
        _ => 1.0,
    }
}
