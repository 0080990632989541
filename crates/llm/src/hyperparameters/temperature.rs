//! Queries that grow with their position, so that attention over long contexts stays as sharp as over short ones.

use super::keys::Keys;
use crate::Result;

/// The factor of a query: `1 + scale · ln(1 + ⌊(position + 1) / length⌋)`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionTemperature {
    /// How fast the factor grows.
    pub scale: f32,
    /// Positions after which it grows for the first time.
    pub length: usize,
}

/// The input of a graph that has the factor of each token's queries.
pub(crate) const QUERY_FACTORS: &str = "query_factors";

impl AttentionTemperature {
    /// As the file says, or with these defaults.
    pub(crate) fn read(keys: &Keys<'_>, default: AttentionTemperature) -> Result<AttentionTemperature> {
        let scale = keys.positive("attention.temperature_scale", default.scale)?;
        let length = keys.find_count("attention.temperature_length")?.unwrap_or(default.length);
        Ok(AttentionTemperature { scale, length })
    }

    /// Replaces factors by those of tokens at these positions.
    pub(crate) fn fill(self, factors: &mut Vec<f32>, positions: &[i32]) {
        factors.clear();
        factors.extend(positions.iter().map(|position| self.factor((*position).max(0) as usize)));
    }

    /// The factor of the query at a position.
    pub fn factor(self, position: usize) -> f32 {
        let times = (position + 1) / self.length.max(1);
        (1.0 + f64::from(self.scale) * (times as f64).ln_1p()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_grow_after_each_length() {
        let temperature = AttentionTemperature { scale: 0.1, length: 8 };
        for (position, expected) in
            [(0, 1.0), (6, 1.0), (7, 1.0 + 0.1 * 2f64.ln()), (23, 1.0 + 0.1 * 4f64.ln())]
        {
            let found = f64::from(temperature.factor(position));
            assert!((found - expected).abs() < 1e-6, "{position}: {found}");
        }
    }
}
