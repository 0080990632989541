//! Rectified feed-forward networks: a model of whose neurons few are active, some much more often than others, as in
//! trained ones.
//!
//! Neuron `i` of a layer is active for a share `p` of the tokens that falls exponentially with its rank, so that a quarter of the
//! neurons make four fifths of the activations; ranks are in random order. Its gate is the sum of few of a layer's
//! directions, and a bias that makes the share `p`: the input decides, and predictors of usual size can know it.

use std::io;

use quadriga_conformance::Rng;
use quadriga_gguf::{Result, Writer};
use quadriga_graph::{DType, Shape, blocks, layer_of};
use quadriga_llm::models::TensorSpec;

use super::topics::shuffled;
use crate::interrupt::CtrlC;

/// The key of the score above which a neuron is predicted to be active.
pub(super) const THRESHOLD_KEY: &str = "powerinfer.sparse_threshold";

/// How fast shares fall with the rank, of 0 to 1: the first quarter has four fifths of the sum.
const FALL: f64 = 0.155;

/// The largest share of tokens for which a neuron is active.
const MOST: f64 = 0.98;

/// The most directions of a layer; a predictor has twice as many rows.
const DIRECTIONS: usize = 512;

/// Directions that a gate is the sum of.
const SUMMANDS: usize = 4;

/// The mean magnitude of a normal distribution with a variance of 1.
const MEAN_MAGNITUDE: f32 = 0.797_884_6;

/// The tensors of rectified networks.
#[derive(Clone, Copy)]
pub(super) struct Rectified {
    /// The share of neurons that a token activates.
    pub(super) active: f64,
    /// The width of the model.
    pub(super) width: usize,
    pub(super) seed: u64,
}

impl Rectified {
    /// The directions of a layer.
    fn count(&self) -> usize {
        DIRECTIONS.min((self.width / 2).max(SUMMANDS))
    }

    /// Adds a tensor of a rectified network; `false` for others.
    pub(super) fn tensor<'a>(
        self,
        writer: &mut Writer<'a>,
        spec: &TensorSpec,
        dtype: DType,
        ctrl_c: &'a CtrlC,
    ) -> Result<bool> {
        let (name, dims) = (spec.name.as_str(), spec.dims.as_slice());
        let Some(layer) = layer_of(name) else { return Ok(false) };
        match (name.split_once('.').and_then(|(_, rest)| rest.split_once('.')), dims) {
            (Some((_, "ffn_norm.weight")), &[len]) => {
                rows(writer, name, DType::F32, [1, len], ctrl_c, |_| {
                    |_: usize, out: &mut [f32]| out.fill(1.0)
                })?;
            }
            (Some((_, "ffn_gate.bias")), &[len]) => {
                rows(writer, name, DType::F32, [1, len], ctrl_c, move |_| {
                    move |_: usize, out: &mut [f32]| out.copy_from_slice(&self.biases(layer, len))
                })?;
            }
            (Some((_, "ffn_gate.weight")), &[neurons, width]) => {
                // A type that values can be converted to.
                let probe = dtype.row_bytes(width).is_some_and(|bytes| {
                    blocks::quantize(dtype, &vec![0.0; width], &mut vec![0; bytes]).is_ok()
                });
                let dtype = if probe { dtype } else { DType::F16 };
                rows(writer, name, dtype, [neurons, width], ctrl_c, move |_| {
                    let directions = self.directions(layer);
                    move |neuron: usize, out: &mut [f32]| {
                        out.fill(0.0);
                        for (number, sign) in self.summands(layer, neuron) {
                            let direction = directions.get(number * width..(number + 1) * width);
                            let parts = out.iter_mut().zip(direction.unwrap_or_default());
                            parts.for_each(|(out, value)| *out += sign * value);
                        }
                    }
                })?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Adds the predictor of a layer.
    pub(super) fn predictor<'a>(
        self,
        writer: &mut Writer<'a>,
        layer: usize,
        neurons: usize,
        ctrl_c: &'a CtrlC,
    ) -> Result<()> {
        let (count, width) = (self.count(), self.width);
        let name = format!("blk.{layer}.fc1.weight");
        rows(writer, &name, DType::F16, [2 * count, width], ctrl_c, move |_| {
            let directions = self.directions(layer);
            move |row: usize, out: &mut [f32]| {
                let (number, sign) = if row < count { (row, 1.0) } else { (row - count, -1.0) };
                let direction = directions.get(number * width..(number + 1) * width).unwrap_or_default();
                out.iter_mut().zip(direction).for_each(|(out, value)| *out = sign * value);
            }
        })?;
        let name = format!("blk.{layer}.fc2.weight");
        rows(writer, &name, DType::F16, [neurons, 2 * count], ctrl_c, move |_| {
            let biases = self.biases(layer, neurons);
            move |neuron: usize, out: &mut [f32]| {
                // The sum of all magnitudes stands for the norm of the input, which the bias is relative to.
                let bias = biases.get(neuron).copied().unwrap_or(0.0);
                out.fill(bias / (MEAN_MAGNITUDE * count as f32));
                for (number, sign) in self.summands(layer, neuron) {
                    if let Some(value) = out.get_mut(number) {
                        *value += sign;
                    }
                    if let Some(value) = out.get_mut(count + number) {
                        *value -= sign;
                    }
                }
            }
        })
    }

    fn rng(&self, layer: usize, salt: u64) -> Rng {
        Rng::new(self.seed ^ salt ^ (layer as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The directions of a layer, one after the other: of length 1, every element of the same magnitude.
    fn directions(&self, layer: usize) -> Vec<f32> {
        let mut rng = self.rng(layer, 0x6469_7265_6374);
        let size = 1.0 / (self.width as f32).sqrt();
        (0..self.count() * self.width).map(|_| if rng.next_u64() >> 63 == 0 { size } else { -size }).collect()
    }

    /// The directions whose sum a neuron's gate is, with their factors: the variance of the sum is 1.
    fn summands(&self, layer: usize, neuron: usize) -> [(usize, f32); SUMMANDS] {
        let mut rng = self.rng(layer, (neuron as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03));
        let first = rng.below(self.count());
        // Different ones: steps of less than a quarter of all.
        let step = (self.count() / SUMMANDS).max(1);
        std::array::from_fn(|i| {
            let number = (first + i * step + rng.below(step)) % self.count();
            (number, if rng.next_u64() >> 63 == 0 { 0.5 } else { -0.5 })
        })
    }

    /// The biases of a layer's gates.
    fn biases(&self, layer: usize, neurons: usize) -> Vec<f32> {
        let mut rng = self.rng(layer, 0x6269_6173);
        let scale = self.active / (FALL * (1.0 - (-1.0 / FALL).exp()));
        let share = |rank: usize| (scale * (-(rank as f64 + 0.5) / (neurons as f64 * FALL)).exp()).min(MOST);
        shuffled(neurons, &mut rng).into_iter().map(|rank| quantile(share(rank)) as f32).collect()
    }
}

/// The number that a normal variable with a variance of 1 is below with this probability.
fn quantile(probability: f64) -> f64 {
    let (mut low, mut high) = (-9.0, 9.0);
    for _ in 0..60 {
        let middle: f64 = 0.5 * (low + high);
        if below(middle) < probability { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// The probability that a normal variable is below `x`: a rational approximation with an error of 10⁻⁷.
fn below(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let sum = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let tail = sum.iter().rev().fold(0.0, |rest, factor| (rest + factor) * t);
    let tail = tail * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Adds a matrix whose rows are made by a function, which is made when the file is written.
fn rows<'a, F: FnMut(usize, &mut [f32])>(
    writer: &mut Writer<'a>,
    name: &str,
    dtype: DType,
    [count, columns]: [usize; 2],
    ctrl_c: &'a CtrlC,
    prepare: impl FnOnce(()) -> F + 'a,
) -> Result<()> {
    let bytes = dtype.row_bytes(columns).unwrap_or(0);
    let shape = if count == 1 && dtype == DType::F32 {
        Shape::from([columns])
    } else {
        Shape::from([count, columns])
    };
    writer.tensor(name, dtype, shape, move |out| {
        let mut fill = prepare(());
        let (mut values, mut row_bytes) = (vec![0.0; columns], vec![0; bytes]);
        for row in 0..count {
            if ctrl_c.is_pressed() {
                return Err(io::Error::other("interrupted"));
            }
            fill(row, &mut values);
            blocks::quantize(dtype, &values, &mut row_bytes).map_err(io::Error::other)?;
            out.write_all(&row_bytes)?;
        }
        Ok(())
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_neurons_make_four_fifths_of_the_activations() {
        let rectified = Rectified { active: 0.1, width: 256, seed: 3 };
        let mut shares: Vec<f64> =
            rectified.biases(1, 4000).into_iter().map(|bias| below(f64::from(bias))).collect();
        shares.sort_by(|a, b| b.total_cmp(a));
        let sum: f64 = shares.iter().sum();
        let quarter: f64 = shares.iter().take(1000).sum();
        assert!((sum / 4000.0 - 0.1).abs() < 0.002, "{}", sum / 4000.0);
        assert!((quarter / sum - 0.8).abs() < 0.01, "{}", quarter / sum);
    }
}
