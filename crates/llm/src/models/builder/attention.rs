//! Attention over the KV cache.

use quadriga_graph::{AttentionOptions, DType, Value};

use super::LayerBuilder;
use crate::{Error, Result};

/// Keys and values of a KV cache that attention may see: all rows, those of the batch among them.
#[derive(Clone, Copy)]
pub(in crate::models) struct KeyValues<'g> {
    /// `[slots, kv_heads · d]`
    keys: Value<'g>,
    /// `[slots, kv_heads · e]`
    values: Value<'g>,
}

impl<'g> LayerBuilder<'_, 'g> {
    /// Queries `[n, heads, d]`, keys `[n, kv_heads, d]` and values `[n, kv_heads · e]`.
    pub(in crate::models) fn query_key_value(
        &self,
        x: Value<'g>,
    ) -> Result<(Value<'g>, Value<'g>, Value<'g>)> {
        let (query, key, value) = self.projections(x)?;
        Ok((self.heads(query), self.heads(key), value))
    }

    /// Queries `[n, heads · d]`, keys `[n, kv_heads · d]` and values `[n, kv_heads · e]`, from three matrices or from a fused
    /// one.
    pub(in crate::models) fn projections(&self, x: Value<'g>) -> Result<(Value<'g>, Value<'g>, Value<'g>)> {
        let shape = self.shape;
        let widths = [shape.query_width(), shape.key_width(), shape.value_width()];
        let [query, key, value] = match self.model.weights.has(&self.name("attn_qkv.weight")) {
            true => self.fused("attn_qkv", ["q", "k", "v"], widths, x)?,
            false => {
                let [query, key, value] = widths;
                let query = self.linear("attn_q", query, x)?;
                let key = self.linear("attn_k", key, x)?;
                [query, key, self.linear("attn_v", value, x)?]
            }
        };
        Ok((query, key, value))
    }

    /// Norms over all queries and over all keys of a token, before they are cut into heads: `[n, heads, d]` each. Where ranks have some
    /// of the heads, they add up the squares of theirs.
    pub(in crate::models) fn normed_projections(
        &self,
        query: Value<'g>,
        key: Value<'g>,
    ) -> Result<(Value<'g>, Value<'g>)> {
        let weights = &self.model.weights;
        let Some(ranks) = weights.ranks().and_then(|ranks| ranks.divided_heads()) else {
            let (query, key) = (self.norm("attn_q_norm", query)?, self.norm("attn_k_norm", key)?);
            return Ok((self.heads(query), self.heads(key)));
        };
        let squares = {
            let _scope = self.model.g.scope(&self.name("attn_q_norm"));
            let of = |x: Value<'g>| x.sqr().sum_rows();
            of(query).concat(1, &[of(key)]).all_reduce(ranks)
        };
        let normed = |part: &str, x: Value<'g>, column: usize| -> Result<Value<'g>> {
            let _scope = self.model.g.scope(&self.name(part));
            let name = self.name(&format!("{part}.weight"));
            let all = weights.all_rows(&name).unwrap_or(0).max(1) as f32;
            let mean = squares.slice(1, column, 1).scale_bias(1.0 / all, self.model.hyper.norm_epsilon);
            let normed = x.div(mean.sqrt()).mul(weights.vector(&name, x.shape().cols())?);
            Ok(self.heads(normed))
        };
        Ok((normed("attn_q_norm", query, 0)?, normed("attn_k_norm", key, 1)?))
    }

    /// Projected queries or keys, cut into heads: `[n, heads, d]`.
    pub(in crate::models) fn heads(&self, x: Value<'g>) -> Value<'g> {
        let d = self.shape.key_length;
        x.reshape([self.model.shape.tokens, x.shape().cols() / d.max(1), d])
    }

    /// Products with consecutive rows of one matrix, as many as `widths` say.
    pub(super) fn fused<const N: usize>(
        &self,
        part: &str,
        names: [&str; N],
        widths: [usize; N],
        x: Value<'g>,
    ) -> Result<[Value<'g>; N]> {
        let _scope = self.model.g.scope(&self.name(part));
        let total = widths.iter().sum();
        let weight = self.name(&format!("{part}.weight"));
        let bias = self.name(&format!("{part}.bias"));
        let scale = self.model.weights.find_vector(&self.name(&format!("{part}.scale")), 1)?;
        let dims = [total, x.shape().cols()];
        let mut next = 0;
        let parts = widths.map(|width| {
            next += width;
            next - width..next
        });
        let added = self.model.weights.low_rank_parts(&weight, dims, parts.clone())?;
        let mut results = [x; N];
        for ((result, name), rows) in results.iter_mut().zip(names).zip(parts) {
            *result = self.model.weights.matrix_rows(&weight, name, dims, rows.clone())?.mul_mat(x);
            if let Some(scale) = scale {
                *result = result.mul(scale);
            }
            if let Some(bias) = self.model.weights.find_vector_rows(&bias, name, total, rows)? {
                *result = result.add(bias);
            }
        }
        for added in added {
            for (result, product) in results.iter_mut().zip(added.products(x)) {
                *result = result.add(product);
            }
        }
        Ok(results)
    }

    /// Writes keys and values to the KV cache, attends over it and projects the result, which in the last layer has the
    /// [output rows](LayerBuilder::output_rows) only; `None` if there are none.
    pub(in crate::models) fn attention(
        &self,
        query: Value<'g>,
        key: Value<'g>,
        value: Value<'g>,
    ) -> Result<Option<Value<'g>>> {
        let Some(attended) = self.attend(query, key, value)? else { return Ok(None) };
        Ok(Some(self.linear("attn_output", self.model.hyper.width, attended)?))
    }

    /// As [`LayerBuilder::attention`], without the projection: `[rows, heads · e]`.
    pub(in crate::models) fn attend(
        &self,
        query: Value<'g>,
        key: Value<'g>,
        value: Value<'g>,
    ) -> Result<Option<Value<'g>>> {
        let cached = self.cache_key_value(key, value)?;
        if self.ends_here() {
            return Ok(None);
        }
        self.attend_to(query, cached).map(Some)
    }

    /// Writes keys and values to the layer's KV cache.
    pub(in crate::models) fn cache_key_value(
        &self,
        key: Value<'g>,
        value: Value<'g>,
    ) -> Result<KeyValues<'g>> {
        let _scope = self.model.g.scope(&self.name("attn"));
        let (n, shape) = (self.model.shape.tokens, self.shape);
        let key = key.reshape([n, shape.key_width()]);
        Ok(KeyValues {
            keys: self.cache("cache_k", self.model.shape.cache_keys, key)?,
            values: self.cache("cache_v", self.model.shape.cache_values, value)?,
        })
    }

    /// Attends over a KV cache: the layer's own, or that of an earlier one with the same window. The result
    /// `[rows, heads · e]` has the [output rows](LayerBuilder::output_rows) only.
    pub(in crate::models) fn attend_to(&self, query: Value<'g>, cached: KeyValues<'g>) -> Result<Value<'g>> {
        let (hyper, shape, n) = (self.model.hyper, self.shape, self.model.shape.tokens);
        let attended = {
            let _scope = self.model.g.scope(&self.name("attn"));
            let KeyValues { keys, values } = cached;
            let heads = |x: Value<'g>, length: usize| {
                x.reshape([x.shape().rows(), shape.kv_heads, length]).permute([1, 0, 2])
            };
            let scale = hyper.attention_scale.unwrap_or(1.0 / (shape.key_length as f32).sqrt());
            let options = AttentionOptions {
                scale: Some(scale),
                soft_cap: hyper.attention_soft_cap,
                spans: Some(self.spans()?),
                sinks: self.sinks()?,
                pages: self.pages(),
                ..AttentionOptions::new()
            };
            query
                .permute([1, 0, 2])
                .attention(heads(keys, shape.key_length), heads(values, shape.value_length), options)
                .reshape([n, shape.heads * shape.value_length])
        };
        Ok(self.output_rows(attended))
    }

    /// The attention sinks of the layer's heads, in models that have them.
    fn sinks(&self) -> Result<Option<Value<'g>>> {
        let name = self.name("attn_sinks.weight");
        self.model
            .hyper
            .attention_sinks
            .then(|| self.model.weights.vector(&name, self.shape.heads))
            .transpose()
    }

    /// Writes a row for each token to one of the layer's KV-cache tensors. Returns all rows that attention may see,
    /// `[slots, width]`: the written ones are among them.
    pub(in crate::models) fn cache(&self, part: &str, dtype: DType, rows: Value<'g>) -> Result<Value<'g>> {
        let shape = self.model.shape;
        let (all, visible, slots) = match self.shape.window.and(shape.window_cache) {
            Some(cache) => {
                let slots = self.model.window_slots.ok_or_else(|| self.no_attention())?;
                (cache.rows, cache.slots, slots)
            }
            None => (shape.cache_slots, shape.visible_slots, self.model.slots()),
        };
        let cache = self.model.g.state(&self.name(part), dtype, [all, rows.shape().cols()]);
        Ok(cache.slice(0, 0, visible).set_rows(rows, slots))
    }

    /// The slots of the layer's KV cache that each token attends to.
    pub(in crate::models) fn spans(&self) -> Result<Value<'g>> {
        let spans = if self.shape.window.is_some() { self.model.window_spans } else { self.model.spans };
        spans.ok_or_else(|| self.no_attention())
    }

    /// The page table of the layer's KV cache, if it has pages.
    pub(in crate::models) fn pages(&self) -> Option<Value<'g>> {
        let apart = self.shape.window.is_some() && self.model.shape.window_cache.is_some();
        if apart { self.model.window_pages } else { self.model.pages }
    }

    /// The error about a layer whose shape denies the attention that its architecture's graph has.
    pub(super) fn no_attention(&self) -> Error {
        Error::Hyperparameter {
            key: format!("{}.attention.head_count", self.model.hyper.architecture),
            value: self.shape.heads.to_string(),
            wanted: "that of a layer with attention".to_owned(),
        }
    }
}
