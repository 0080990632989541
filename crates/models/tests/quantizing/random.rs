//! Random numbers with a seed.

/// A generator of normally distributed numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 40) as f32 + 0.5) / (1 << 24) as f32
    }

    pub(crate) fn normal(&mut self) -> f32 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// Weights as models have them: normal, rows of different sizes, some outliers.
    pub(crate) fn weights(&mut self, rows: usize, row_len: usize) -> Vec<f32> {
        let mut values = Vec::with_capacity(rows * row_len);
        for _ in 0..rows {
            let scale = 0.02 * (0.5 + self.uniform());
            for _ in 0..row_len {
                let outlier = if self.uniform() < 0.004 { 6.0 } else { 1.0 };
                values.push(scale * outlier * self.normal());
            }
        }
        values
    }

    /// Importance of columns: positive, over several orders of magnitude.
    pub(crate) fn importance(&mut self, columns: usize) -> Vec<f32> {
        (0..columns).map(|_| (1.5 * self.normal()).exp()).collect()
    }
}
