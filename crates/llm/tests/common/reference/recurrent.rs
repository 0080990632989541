//! Recurrent layers in f64, one token after another.

use super::super::recurrent::{GROUPS, HEADS, KERNEL, LENGTH, RecurrentRecipe, STATE};
use super::{Reference, Row, dot};

impl Reference {
    /// What a recurrent layer adds to each token's row.
    pub(super) fn recurrent(&self, layer: usize, recurrent: RecurrentRecipe, x: &[Row]) -> Vec<Row> {
        let normed: Vec<Row> = x.iter().map(|row| self.before(layer, "attn_norm", row)).collect();
        match recurrent {
            RecurrentRecipe::ShortConvolutions { kernel } => self.short_convolutions(layer, kernel, &normed),
            RecurrentRecipe::StateSpace => self.state_space(layer, &normed),
        }
    }

    fn short_convolutions(&self, layer: usize, kernel: usize, x: &[Row]) -> Vec<Row> {
        let width = self.recipe.width;
        let name = |part: &str| format!("blk.{layer}.shortconv.{part}");
        let all: Vec<Row> = x.iter().map(|row| self.linear(&name("in_proj"), row)).collect();
        let gated: Vec<Row> =
            all.iter().map(|row| (0..width).map(|i| row[i] * row[2 * width + i]).collect()).collect();
        let convolved = convolve(&self.weights[&name("conv.weight")], kernel, &gated);
        all.iter()
            .zip(convolved)
            .map(|(row, convolved)| {
                let gated = (0..width).map(|i| row[width + i] * convolved[i]).collect();
                self.linear(&name("out_proj"), &gated)
            })
            .collect()
    }

    fn state_space(&self, layer: usize, x: &[Row]) -> Vec<Row> {
        let (inner, keys) = (HEADS * LENGTH, GROUPS * STATE);
        let channels = inner + 2 * keys;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let weights = |part: &str| &self.weights[&name(part)];
        let silu = |v: f64| v / (1.0 + (-v).exp());
        let all: Vec<Row> = x.iter().map(|row| self.linear(&name("ssm_in"), row)).collect();
        let inputs: Vec<Row> = all.iter().map(|row| row[inner..inner + channels].to_vec()).collect();
        let mut convolved = convolve(weights("ssm_conv1d.weight"), KERNEL, &inputs);
        for row in &mut convolved {
            row.iter_mut().zip(weights("ssm_conv1d.bias")).for_each(|(v, bias)| *v = silu(*v + bias));
        }
        let mut states = vec![vec![vec![0.0; STATE]; LENGTH]; HEADS];
        let mut results = Vec::new();
        for (row, convolved) in all.iter().zip(&convolved) {
            let mut y = Vec::new();
            for (head, state) in states.iter_mut().enumerate() {
                let group = head / (HEADS / GROUPS);
                let key = &convolved[inner + group * STATE..][..STATE];
                let query = &convolved[inner + keys + group * STATE..][..STATE];
                let step = (1.0 + (row[inner + channels + head] + weights("ssm_dt.bias")[head]).exp()).ln();
                let decay = (step * weights("ssm_a")[head]).exp();
                for (value, state) in convolved[head * LENGTH..][..LENGTH].iter().zip(state) {
                    state.iter_mut().zip(key).for_each(|(s, key)| *s = *s * decay + step * key * value);
                    y.push(dot(state, query) + weights("ssm_d")[head] * value);
                }
            }
            let gated: Row = y.iter().zip(row).map(|(y, z)| y * silu(*z)).collect();
            let parts = gated.chunks(inner / GROUPS).zip(weights("ssm_norm.weight").chunks(inner / GROUPS));
            let normed = parts.flat_map(|(part, weights)| self.norm_with(weights, &part.to_vec())).collect();
            results.push(self.linear(&name("ssm_out"), &normed));
        }
        results
    }
}

/// Each channel's sum over the latest rows, times the columns of its kernel.
pub(super) fn convolve(kernels: &[f64], taps: usize, rows: &[Row]) -> Vec<Row> {
    (0..rows.len())
        .map(|t| {
            let of = |channel: usize| {
                (0..taps)
                    .filter(|tap| t + tap + 1 >= taps)
                    .map(|tap| kernels[channel * taps + tap] * rows[t + tap + 1 - taps][channel])
                    .sum()
            };
            (0..rows[t].len()).map(of).collect()
        })
        .collect()
}
