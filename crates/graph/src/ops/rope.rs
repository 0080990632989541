//! Parameters of the rotary position embedding (RoPE), and its angles.

/// Which elements of a row the rotary embedding rotates as a pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pairing {
    /// Elements `2i` and `2i + 1` (llama.cpp's "norm").
    Adjacent,
    /// Elements `i` and `i + dims/2` (llama.cpp's "neox").
    Half,
}

/// Parameters of a rotary position embedding.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rope {
    /// The number of leading elements of each row that are rotated, even; the rest are copied.
    pub dims: usize,
    /// Which elements form a pair.
    pub pairing: Pairing,
    /// Pair `i` is rotated by the angle `position · base^(−2i/dims)`.
    pub base: f32,
    /// The factor of positions: the inverse of a linear context scale.
    pub scale: f32,
    /// YaRN: the weight of extrapolation; 0 disables YaRN.
    pub ext_factor: f32,
    /// The factor of the result, in addition to YaRN's own correction.
    pub attn_factor: f32,
    /// YaRN: the rotation count above which a dimension extrapolates.
    pub beta_fast: f32,
    /// YaRN: the rotation count below which a dimension interpolates.
    pub beta_slow: f32,
    /// YaRN: the context length the model was trained with.
    pub original_context: usize,
}

impl Rope {
    /// A rotary embedding of `dims` elements without scaling.
    pub fn new(dims: usize, pairing: Pairing, base: f32) -> Rope {
        Rope {
            dims,
            pairing,
            base,
            scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context: 0,
        }
    }

    /// YaRN's correction range: the pair indices between which extrapolation fades into interpolation.
    pub fn yarn_range(&self) -> (f64, f64) {
        let dim = |rotations: f32| {
            let rotation = self.original_context as f64 / (f64::from(rotations) * std::f64::consts::TAU);
            self.dims as f64 * rotation.ln() / (2.0 * f64::from(self.base).ln())
        };
        let low = dim(self.beta_fast).floor().max(0.0);
        let high = dim(self.beta_slow).ceil().min(self.dims as f64 - 1.0);
        (low, high)
    }

    /// The rotation angle of a pair at `position`, and the factor of its result. `factor` divides the pair's frequency
    /// (1 without frequency factors).
    pub fn angle(&self, position: i32, pair: usize, factor: f64) -> (f64, f64) {
        let extrapolated =
            f64::from(position) * f64::from(self.base).powf(-2.0 * pair as f64 / self.dims as f64) / factor;
        let interpolated = f64::from(self.scale) * extrapolated;
        let mut theta = interpolated;
        let mut magnitude = f64::from(self.attn_factor);
        if self.ext_factor != 0.0 {
            let (low, high) = self.yarn_range();
            let ramp = 1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let mix = ramp * f64::from(self.ext_factor);
            theta = interpolated * (1.0 - mix) + extrapolated * mix;
            magnitude *= 1.0 + 0.1 * (1.0 / f64::from(self.scale)).ln();
        }
        (theta, magnitude)
    }
}
