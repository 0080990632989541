//! Multi-head latent attention: the keys and values of all heads are products of one short vector `c` for each token, beside
//! a part of the keys that is rotated and common to all heads.
//!
//! With a matrix `K` of a head, a score is `q · (Kᵀ c) = (K q) · c`: queries can be multiplied with the matrix instead of
//! the keys. That is the absorbed form: attention with a single key head `[c, rotated]` and value head `c`, which is all that
//! the KV cache holds. Files of the older layout have keys and values in one matrix, which cannot be used for that: their KV
//! caches hold the keys and values of all heads.

use quadriga_graph::{AttentionOptions, Value};

use super::LayerBuilder;
use crate::hyperparameters::LatentAttention;
use crate::{Error, Result};

/// The queries of all tokens: `[n, heads, plain]`, and the rotated part `[n, heads, rotated]`.
struct Queries<'g> {
    plain: Value<'g>,
    rotated: Value<'g>,
}

impl<'g> LayerBuilder<'_, 'g> {
    /// Latent attention over the KV cache with its output projection, of normed rows. In the last layer the result has the
    /// [output rows](LayerBuilder::output_rows) only; `None` if there are none.
    pub(in crate::models) fn latent_attention(&self, x: Value<'g>) -> Result<Option<Value<'g>>> {
        let Some(latent) = self.model.hyper.latent else {
            return Err(Error::Hyperparameter {
                key: format!("{}.attention.kv_lora_rank", self.model.hyper.architecture),
                value: "missing".to_owned(),
                wanted: "at least 1".to_owned(),
            });
        };
        let queries = self.latent_queries(latent, x)?;
        let (compressed, rotated) = self.latent_keys(latent, x)?;
        match latent.absorbed {
            true => self.absorbed(latent, queries, compressed, rotated),
            false => self.uncompressed(latent, queries, compressed, rotated),
        }
    }

    fn latent_queries(&self, latent: LatentAttention, x: Value<'g>) -> Result<Queries<'g>> {
        let (n, heads, length) = (self.model.shape.tokens, self.shape.heads, latent.key_length());
        let query = match latent.query_rank {
            Some(rank) => {
                let compressed = self.norm("attn_q_a_norm", self.linear("attn_q_a", rank, x)?)?;
                self.linear("attn_q_b", heads * length, compressed)?
            }
            None => self.linear("attn_q", heads * length, x)?,
        };
        let query = query.reshape([n, heads, length]);
        let plain = query.slice(2, 0, latent.plain);
        Ok(Queries { plain, rotated: self.rope(query.slice(2, latent.plain, latent.rotated)) })
    }

    /// The vector that keys and values are made of `[n, rank]`, and the rotated part of the keys `[n, 1, rotated]`.
    fn latent_keys(&self, latent: LatentAttention, x: Value<'g>) -> Result<(Value<'g>, Value<'g>)> {
        let LatentAttention { rank, rotated, .. } = latent;
        let both = self.linear("attn_kv_a_mqa", rank + rotated, x)?;
        let compressed = self.norm("attn_kv_a_norm", both.slice(1, 0, rank))?;
        let last = both.reshape([self.model.shape.tokens, 1, rank + rotated]).slice(2, rank, rotated);
        Ok((compressed, self.rope(last)))
    }

    /// Ordinary attention, with keys and values of all heads in the KV cache.
    fn uncompressed(
        &self,
        latent: LatentAttention,
        queries: Queries<'g>,
        compressed: Value<'g>,
        rotated: Value<'g>,
    ) -> Result<Option<Value<'g>>> {
        let LatentAttention { plain, value_length, .. } = latent;
        let (n, heads) = (self.model.shape.tokens, self.shape.heads);
        let both = self.linear("attn_kv_b", heads * (plain + value_length), compressed)?.reshape([
            n,
            heads,
            plain + value_length,
        ]);
        let query = queries.plain.concat(2, &[queries.rotated]);
        let key = both.slice(2, 0, plain).concat(2, &[rotated.repeat([n, heads, latent.rotated])]);
        let value = both.slice(2, plain, value_length).cont().reshape([n, heads * value_length]);
        self.attention(query, key, value)
    }

    fn absorbed(
        &self,
        latent: LatentAttention,
        queries: Queries<'g>,
        compressed: Value<'g>,
        rotated: Value<'g>,
    ) -> Result<Option<Value<'g>>> {
        let LatentAttention { rank, plain, value_length, .. } = latent;
        let (n, heads) = (self.model.shape.tokens, self.shape.heads);
        let row = compressed.concat(1, &[rotated.reshape([n, latent.rotated])]);
        let cache = self.cache("cache_k", self.model.shape.cache_keys, row)?;
        if self.ends_here() {
            return Ok(None);
        }
        let key_matrices = self.matrices("attn_k_b", [heads, rank, plain])?;
        let value_matrices = self.matrices("attn_v_b", [heads, value_length, rank])?;
        let attended = {
            let _scope = self.model.g.scope(&self.name("attn"));
            let query = key_matrices
                .mul_mat(queries.plain.permute([1, 0, 2]))
                .concat(2, &[queries.rotated.permute([1, 0, 2])]);
            let slots = cache.shape().rows();
            let keys = cache.reshape([1, slots, rank + latent.rotated]);
            query.attention(keys, keys.slice(2, 0, rank), self.latent_options(latent)?)
        };
        let attended = self.output_rows(attended.reshape([n, heads * rank]));
        let rows = attended.shape().rows();
        let values = {
            let _scope = self.model.g.scope(&self.name("attn_v_b"));
            let values = value_matrices.mul_mat(attended.reshape([rows, heads, rank]).permute([1, 0, 2]));
            values.permute([1, 0, 2]).cont().reshape([rows, heads * value_length])
        };
        Ok(Some(self.linear("attn_output", self.model.hyper.width, values)?))
    }

    fn latent_options(&self, latent: LatentAttention) -> Result<AttentionOptions<'g>> {
        let scale = self.model.hyper.attention_scale.unwrap_or(1.0 / (latent.key_length() as f32).sqrt());
        let (spans, pages) = (Some(self.spans()?), self.pages());
        Ok(AttentionOptions { scale: Some(scale), spans, pages, ..AttentionOptions::new() })
    }

    /// A matrix for each head.
    fn matrices(&self, part: &str, dims: [usize; 3]) -> Result<Value<'g>> {
        self.model.weights.get(&self.name(&format!("{part}.weight")), &dims)
    }
}
