//! The matrices of latent attention, which make keys and values of the cached vector `c`.
//!
//! Files have a matrix for the keys and one for the values of each head (`attn_k_b`, `attn_v_b`), the former transposed, as
//! the absorbed form needs it; or, in the older layout, one matrix with the rows of keys and values of each head in turn
//! (`attn_kv_b`), as the expanded form needs it. What a file does not have is made of what it has, when a backend loads it.

use std::ops::Range;

use quadriga_graph::Value;

use super::LayerBuilder;
use crate::Result;
use crate::hyperparameters::LatentAttention;

impl<'g> LayerBuilder<'_, 'g> {
    /// The matrices that multiply queries instead of keys, and those that make values: `[heads, rank, plain]` and
    /// `[heads, value_length, rank]`.
    pub(super) fn absorbed_matrices(&self, latent: LatentAttention) -> Result<(Value<'g>, Value<'g>)> {
        let LatentAttention { rank, plain, value_length, .. } = latent;
        let (weights, heads) = (&self.model.weights, self.shape.heads);
        if latent.separate {
            let keys = weights.get(&self.name("attn_k_b.weight"), &[heads, rank, plain])?;
            return Ok((keys, weights.get(&self.name("attn_v_b.weight"), &[heads, value_length, rank])?));
        }
        let each = plain + value_length;
        let both = weights.tensor(&self.name("attn_kv_b.weight"), &[heads * each, rank])?;
        let keys = both.repeated_rows(0..heads, each, 0..plain)?.transposed(plain, rank)?;
        let values = both.repeated_rows(0..heads, each, plain..each)?;
        Ok((
            weights.made_of(keys, "k_absorbed", [heads, rank, plain]),
            weights.made_of(values, "v_absorbed", [heads, value_length, rank]),
        ))
    }

    /// The matrices that make keys, and those that make values, of some heads: `[heads · plain, rank]` and
    /// `[heads · value_length, rank]`.
    pub(super) fn expanded_matrices(
        &self,
        latent: LatentAttention,
        heads: Range<usize>,
    ) -> Result<(Value<'g>, Value<'g>)> {
        let LatentAttention { rank, plain, value_length, .. } = latent;
        let (weights, all, each) = (&self.model.weights, self.shape.heads, plain + value_length);
        let (keys, values) = if latent.separate {
            let keys = weights.tensor(&self.name("attn_k_b.weight"), &[all, rank, plain])?;
            let values = weights.tensor(&self.name("attn_v_b.weight"), &[all, value_length, rank])?;
            (keys.rows(heads.clone())?.transposed(rank, plain)?, values.rows(heads.clone())?)
        } else {
            let both = weights.tensor(&self.name("attn_kv_b.weight"), &[all * each, rank])?;
            (
                both.repeated_rows(heads.clone(), each, 0..plain)?,
                both.repeated_rows(heads.clone(), each, plain..each)?,
            )
        };
        let part = |of: &str| format!("{of}_expanded.{}", heads.start);
        Ok((
            weights.made_of(keys, &part("k"), [heads.len() * plain, rank]),
            weights.made_of(values, &part("v"), [heads.len() * value_length, rank]),
        ))
    }

    /// The numbers that the file may have beside the matrices of keys and of values: products with these are multiplied
    /// with them.
    pub(super) fn latent_scales(&self, latent: LatentAttention) -> Result<[Option<Value<'g>>; 2]> {
        let find = |part: &str| self.model.weights.find_vector(&self.name(part), 1);
        if latent.separate {
            return Ok([find("attn_k_b.scale")?, find("attn_v_b.scale")?]);
        }
        Ok([find("attn_kv_b.scale")?; 2])
    }
}

/// `x` times a number that a file may have.
pub(super) fn scaled_by<'g>(x: Value<'g>, scale: Option<Value<'g>>) -> Value<'g> {
    scale.map_or(x, |scale| x.mul(scale))
}
