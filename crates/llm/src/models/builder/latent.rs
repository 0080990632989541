//! Multi-head latent attention: the keys and values of all heads are products of one short vector `c` for each token, beside
//! a part of the keys that is rotated and common to all heads. The KV cache holds `[c, rotated]`.
//!
//! With a matrix `K` of a head, a score is `q · (Kᵀ c) = (K q) · c`: queries can be multiplied with the matrix instead of
//! the keys. That is the absorbed form: attention with a single key head `[c, rotated]` and value head `c`, for few tokens.
//! The expanded form makes the keys and values of all heads of what is cached: they are shorter than `c`, which pays for
//! many tokens.

use quadriga_graph::{AttentionOptions, DType, PAGE_SLOTS, Value};

use super::LayerBuilder;
use super::latent_weights::scaled_by;
use crate::hyperparameters::LatentAttention;
use crate::{Error, Result};

/// The queries of all tokens: `[n, heads, plain]`, and the rotated part `[n, heads, rotated]`.
struct Queries<'g> {
    plain: Value<'g>,
    rotated: Value<'g>,
}

/// What both forms of a layer's attention have in common.
#[derive(Clone, Copy)]
struct Latent<'g> {
    shape: LatentAttention,
    /// What products with the matrices of keys and of values are multiplied with.
    scales: [Option<Value<'g>>; 2],
}

impl<'g> Queries<'g> {
    /// How many tokens there are.
    fn tokens(&self) -> usize {
        self.plain.shape().dims().first().copied().unwrap_or(0)
    }

    /// Those of some tokens.
    fn slice(&self, first: usize, tokens: usize) -> Queries<'g> {
        let of = |x: Value<'g>| if tokens == self.tokens() { x } else { x.slice(0, first, tokens) };
        Queries { plain: of(self.plain), rotated: of(self.rotated) }
    }
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
        let cache = self.latent_cache(latent, x)?;
        if self.ends_here() {
            return Ok(None);
        }
        let latent = Latent { shape: latent, scales: self.latent_scales(latent)? };
        let attended = match self.model.pages {
            Some(_) => self.over_pages(latent, queries, cache)?,
            None => self.over_slots(latent, queries, cache)?,
        };
        Ok(Some(self.linear("attn_output", self.model.hyper.width, attended)?))
    }

    /// All tokens in the form that costs less: `[rows, heads · value_length]`.
    fn over_slots(&self, latent: Latent<'g>, queries: Queries<'g>, cache: Value<'g>) -> Result<Value<'g>> {
        let (shape, visible) = (self.model.shape, cache.shape().rows());
        match latent.shape.expanded_heads(self.shape.heads, shape.tokens, visible, shape.cache_slots) {
            Some(heads) => {
                let rows = cache.cast(DType::F32);
                let spans = self.spans()?;
                Ok(self.output_rows(self.expanded(latent, heads, queries, (rows, spans))?))
            }
            None => self.absorbed(latent, queries, cache),
        }
    }

    /// The same over pages: parts of prompts whose attention is expanded are the last tokens. Their pages are gathered, one prompt's
    /// after the other's, so that each has slots that follow each other.
    fn over_pages(&self, latent: Latent<'g>, queries: Queries<'g>, cache: Value<'g>) -> Result<Value<'g>> {
        let (Some(parts), Some((pages, spans))) = (self.model.shape.expanded, self.model.expanded) else {
            return self.absorbed(latent, queries, cache);
        };
        let (width, slots) = (cache.shape().cols(), self.model.shape.context.next_multiple_of(PAGE_SLOTS));
        // Those of the longest sequence have room, so that the matrices are the same in all steps.
        let Some(heads) = latent.shape.heads_at_once(self.shape.heads, slots) else {
            return Err(self.no_attention());
        };
        let absorbed = self.model.shape.tokens.saturating_sub(parts.tokens);
        let first = match absorbed {
            0 => None,
            _ => Some(self.absorbed_with(latent, queries.slice(0, absorbed), cache, |attended| attended)?),
        };
        let rows = {
            let _scope = self.model.g.scope(&self.name("attn"));
            let all = cache.reshape([cache.shape().rows() / PAGE_SLOTS, PAGE_SLOTS * width]);
            all.get_rows(pages).reshape([parts.pages * PAGE_SLOTS, width])
        };
        let expanded = self.expanded(latent, heads, queries.slice(absorbed, parts.tokens), (rows, spans))?;
        Ok(self.output_rows(first.map_or(expanded, |first| first.concat(0, &[expanded]))))
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

    /// Writes the vector that keys and values are made of, and the rotated part of the keys, to the KV cache:
    /// `[slots, rank + rotated]`.
    fn latent_cache(&self, latent: LatentAttention, x: Value<'g>) -> Result<Value<'g>> {
        let LatentAttention { rank, rotated, .. } = latent;
        let n = self.model.shape.tokens;
        let both = self.linear("attn_kv_a_mqa", rank + rotated, x)?;
        let compressed = self.norm("attn_kv_a_norm", both.slice(1, 0, rank))?;
        let last = self.rope(both.reshape([n, 1, rank + rotated]).slice(2, rank, rotated));
        let row = compressed.concat(1, &[last.reshape([n, rotated])]);
        self.cache("cache_k", self.model.shape.cache_keys, row)
    }

    /// Attention to the keys and values of all heads, as many at a time as `at_once` says, made of these rows (F32) of the cache:
    /// `[n, heads · value_length]`.
    fn expanded(
        &self,
        latent: Latent<'g>,
        at_once: usize,
        queries: Queries<'g>,
        (rows, spans): (Value<'g>, Value<'g>),
    ) -> Result<Value<'g>> {
        let Latent { shape: latent, scales: [key_scale, value_scale] } = latent;
        let LatentAttention { rank, plain, rotated, value_length, .. } = latent;
        let (n, heads, slots) = (queries.tokens(), self.shape.heads, rows.shape().rows());
        let options = AttentionOptions { spans: Some(spans), ..self.latent_options(latent) };
        // Keys and values of the type of the cache, as far as blocks of it allow.
        let dtype = if self.model.shape.cache_keys == DType::F32 { DType::F32 } else { DType::F16 };
        let mut results = Vec::new();
        let _scope = self.model.g.scope(&self.name("attn"));
        let compressed = rows.slice(1, 0, rank).cont();
        let last = rows.slice(1, rank, rotated).cast(dtype).reshape([slots, 1, rotated]);
        for first in (0..heads).step_by(at_once.max(1)) {
            let some = first..(first + at_once).min(heads);
            let count = some.len();
            let (key_matrices, value_matrices) = self.expanded_matrices(latent, some)?;
            let keys = scaled_by(key_matrices.mul_mat(compressed), key_scale);
            let keys = keys.cast(dtype).reshape([slots, count, plain]);
            let keys = keys.concat(2, &[last.repeat([slots, count, rotated])]);
            let values = scaled_by(value_matrices.mul_mat(compressed), value_scale);
            let values = values.cast(dtype).reshape([slots, count, value_length]);
            let of_heads = |x: Value<'g>| x.slice(1, first, count);
            let query = of_heads(queries.plain).concat(2, &[of_heads(queries.rotated)]);
            let [query, keys, values] = [query, keys, values].map(|x| x.permute([1, 0, 2]));
            let attended = query.attention(keys, values, options);
            results.push(attended.reshape([n, count * value_length]));
        }
        Ok(match results.as_slice() {
            [] => return Err(self.no_attention()),
            [all] => *all,
            [first, others @ ..] => first.concat(1, others),
        })
    }

    /// Attention to what is cached, with queries and results made to fit: `[rows, heads · value_length]`.
    fn absorbed(&self, latent: Latent<'g>, queries: Queries<'g>, cache: Value<'g>) -> Result<Value<'g>> {
        self.absorbed_with(latent, queries, cache, |attended| self.output_rows(attended))
    }

    /// The same for the first tokens, as many as there are queries, of whose results `select` chooses some.
    fn absorbed_with(
        &self,
        latent: Latent<'g>,
        queries: Queries<'g>,
        cache: Value<'g>,
        select: impl Fn(Value<'g>) -> Value<'g>,
    ) -> Result<Value<'g>> {
        let Latent { shape: latent, scales: [key_scale, value_scale] } = latent;
        let LatentAttention { rank, value_length, .. } = latent;
        let (n, heads) = (queries.tokens(), self.shape.heads);
        let (key_matrices, value_matrices) = self.absorbed_matrices(latent)?;
        let spans = self.spans()?;
        let spans = if n == self.model.shape.tokens { spans } else { spans.slice(0, 0, n) };
        let attended = {
            let _scope = self.model.g.scope(&self.name("attn"));
            let query = key_matrices.mul_mat(queries.plain.permute([1, 0, 2]));
            let query = scaled_by(query, key_scale);
            let query = query.concat(2, &[queries.rotated.permute([1, 0, 2])]);
            let slots = cache.shape().rows();
            let keys = cache.reshape([1, slots, rank + latent.rotated]);
            let options = self.latent_options(latent);
            let options = AttentionOptions { spans: Some(spans), pages: self.pages(), ..options };
            query.attention(keys, keys.slice(2, 0, rank), options)
        };
        let attended = select(attended.reshape([n, heads * rank]));
        let rows = attended.shape().rows();
        let _scope = self.model.g.scope(&self.name("attn_v_b"));
        let values = value_matrices.mul_mat(attended.reshape([rows, heads, rank]).permute([1, 0, 2]));
        let values = scaled_by(values, value_scale);
        Ok(values.permute([1, 0, 2]).cont().reshape([rows, heads * value_length]))
    }

    fn latent_options(&self, latent: LatentAttention) -> AttentionOptions<'g> {
        let scale = self.model.hyper.attention_scale.unwrap_or(1.0 / (latent.key_length() as f32).sqrt());
        AttentionOptions { scale: Some(scale), ..AttentionOptions::new() }
    }
}
