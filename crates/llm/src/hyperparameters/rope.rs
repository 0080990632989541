//! Keys of the rotary position embedding and its context scaling.

use quadriga_graph::{Pairing, Rope};

use super::keys::Keys;
use crate::Result;

/// Tensors of long-context frequency factors, for contexts beyond the original one and up to it.
pub(crate) const LONG_FACTORS: &str = "rope_factors_long.weight";
/// See [`LONG_FACTORS`].
pub(crate) const SHORT_FACTORS: &str = "rope_factors_short.weight";

impl Keys<'_> {
    /// The rotary embedding of heads of `key_length`, as the file's keys describe it for all layers.
    pub(super) fn rope(&self, pairing: Pairing, key_length: usize, context: usize) -> Result<Rope> {
        let dims = self.find_count("rope.dimension_count")?.unwrap_or(key_length);
        self.check_rope_dims("rope.dimension_count", dims, key_length)?;
        let mut rope = Rope::new(dims, pairing, self.positive("rope.freq_base", 10_000.0)?);
        rope.original_context = self.find_count("rope.scaling.original_context_length")?.unwrap_or(context);
        rope.attn_factor = self.positive("rope.scaling.attn_factor", 1.0)?;
        let factor = match self.find_factor("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.find_factor("rope.scale_linear")?.unwrap_or(1.0),
        };
        match self.find_text("rope.scaling.type")? {
            Some("none") => {}
            None | Some("linear") => rope.scale = 1.0 / factor,
            Some("yarn") => {
                rope.scale = 1.0 / factor;
                self.yarn(&mut rope, factor)?;
            }
            Some("longrope") => {
                rope.scale = 1.0 / factor;
                if [LONG_FACTORS, SHORT_FACTORS].iter().any(|name| self.file().find_tensor(name).is_none()) {
                    let wanted = "none, linear or yarn: the file has no tensors rope_factors_long and rope_factors_short";
                    return Err(self.wrong("rope.scaling.type", "longrope", wanted));
                }
            }
            Some(other) => {
                return Err(self.wrong("rope.scaling.type", other, "none, linear, yarn or longrope"));
            }
        }
        Ok(rope)
    }

    /// An error unless `dims` elements of a head can be rotated.
    pub(crate) fn check_rope_dims(&self, key: &str, dims: usize, key_length: usize) -> Result<()> {
        let holds = dims > 0 && dims <= key_length && dims.is_multiple_of(2);
        self.check(key, dims, holds, "even and at most the key length")
    }

    /// YaRN. The rotary embedding multiplies its result by `1 + 0.1 · ln(factor)`; a file with a log multiplier divides
    /// that by the same with its own factor of the logarithm.
    fn yarn(&self, rope: &mut Rope, factor: f32) -> Result<()> {
        rope.ext_factor =
            self.find_float("rope.scaling.yarn_ext_factor")?.filter(|f| *f >= 0.0).unwrap_or(1.0);
        rope.beta_fast = self.positive("rope.scaling.yarn_beta_fast", rope.beta_fast)?;
        rope.beta_slow = self.positive("rope.scaling.yarn_beta_slow", rope.beta_slow)?;
        if rope.ext_factor == 0.0 {
            rope.attn_factor *= self.positive("rope.scaling.yarn_attn_factor", 1.0)?;
            return Ok(());
        }
        let magnitude =
            |multiplier: f32| if factor <= 1.0 { 1.0 } else { 1.0 + 0.1 * multiplier * factor.ln() };
        let all = self.find_factor("rope.scaling.yarn_log_multiplier")?.map_or(1.0, magnitude);
        let correction = 1.0 + 0.1 * factor.ln();
        if correction <= 0.0 {
            return Err(self.wrong("rope.scaling.factor", factor, "at least 1 with YaRN"));
        }
        rope.attn_factor *= magnitude(1.0) / all / correction;
        Ok(())
    }
}
