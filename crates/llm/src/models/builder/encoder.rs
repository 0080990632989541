//! Encoders: models whose tokens see the whole text, and which end in vectors in place of logits.

use quadriga_graph::{AttentionOptions, DType, Value};

use super::{LayerBuilder, ModelBuilder};
use crate::Result;

/// The tensor with a vector for each type of tokens: those of the first text of a pair, and those of the second.
pub(crate) const TOKEN_TYPES: &str = "token_types.weight";

/// The key of the number of these types.
pub(in crate::models) const TOKEN_TYPE_COUNT: &str = "tokenizer.ggml.token_type_count";

impl<'g> ModelBuilder<'g> {
    /// Adds the vector of each token's type; models without types add nothing. With a classification head, which scores pairs of
    /// texts, the types are an input; otherwise all tokens have the first.
    pub(in crate::models) fn embed_type(&self, x: Value<'g>) -> Result<Value<'g>> {
        let name = TOKEN_TYPES;
        let count = match self.weights.rows(name) {
            Some(rows) => rows,
            // The tensor is about to be made.
            None if self.weights.has(name) => self.weights.token_type_count()?,
            None => return Ok(x),
        };
        let types = self.weights.get(name, &[count, self.hyper.width])?;
        let numbers = match self.has_head() && count > 1 {
            true => self.g.input("token_types", DType::I32, [self.shape.tokens]),
            false => self.g.constant("first_type", DType::I32, [1], &[0_i32][..]),
        };
        Ok(x.add(types.get_rows(numbers)))
    }

    /// Whether the file has a classification head.
    fn has_head(&self) -> bool {
        ["cls.weight", "cls.output.weight"].iter().any(|name| self.weights.has(name))
    }

    /// Adds the vector of each token's position.
    pub(in crate::models) fn embed_position(&self, x: Value<'g>) -> Result<Value<'g>> {
        let dims = [self.hyper.context, self.hyper.width];
        Ok(x.add(self.weights.get("position_embd.weight", &dims)?.get_rows(self.positions)))
    }

    /// The same of tables that begin with rows which no position uses: as many as they have more than the context. Nothing is added in
    /// later stages of a pipeline.
    pub(in crate::models) fn embed_offset_position(&self, x: Value<'g>) -> Result<Value<'g>> {
        if self.is_later_stage() {
            return Ok(x);
        }
        let (name, context) = ("position_embd.weight", self.hyper.context);
        match self.weights.rows(name).and_then(|rows| rows.checked_sub(context)) {
            None | Some(0) => self.embed_position(x),
            Some(offset) => {
                let dims = [context + offset, self.hyper.width];
                let table = self.weights.matrix_rows(name, "used", dims, offset..offset + context)?;
                Ok(x.add(table.get_rows(self.positions)))
            }
        }
    }

    /// A norm that belongs to no layer.
    pub(in crate::models) fn named_norm(&self, name: &str, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.g.scope(name);
        self.norm(name, x)
    }

    /// Declares the outputs: the vectors of all tokens, and the scores of a classification head if the file has one.
    pub(in crate::models) fn finish_encoder(&self, x: Value<'g>) -> Result<()> {
        let hidden = x.named("hidden");
        self.g.output("hidden", hidden);
        let width = self.hyper.width;
        let has = |name: &str| self.weights.has(&format!("{name}.weight"));
        if !self.has_head() {
            return Ok(());
        }
        let _scope = self.g.scope("rank");
        // The first token of each text.
        let mut scores = hidden.get_rows(self.g.input("rows", DType::I32, [self.shape.rows]));
        if has("cls") {
            scores = self.linear("cls", width, scores)?.tanh();
        }
        if has("cls.output") {
            let rows = self.weights.rows("cls.output.weight").unwrap_or(1);
            scores = self.linear("cls.output", rows, scores)?;
        }
        self.g.output("rank", scores.named("rank"));
        Ok(())
    }
}

impl<'g> LayerBuilder<'_, 'g> {
    /// Attention of every token to all tokens of its text, projected.
    pub(in crate::models) fn attention_to_all(
        &self,
        query: Value<'g>,
        key: Value<'g>,
        value: Value<'g>,
    ) -> Result<Value<'g>> {
        let (shape, n) = (self.shape, self.model.shape.tokens);
        let attended = {
            let _scope = self.model.g.scope(&self.name("attn"));
            let value = value.reshape([n, shape.kv_heads, shape.value_length]);
            let [query, key, value] = [query, key, value].map(|x| x.permute([1, 0, 2]));
            let options = AttentionOptions { spans: self.model.spans, ..AttentionOptions::new() };
            let attended = query.attention(key, value, options);
            attended.reshape([n, shape.heads * shape.value_length])
        };
        self.linear("attn_output", self.model.hyper.width, attended)
    }

    /// `down(gelu(up(x)))`.
    pub(in crate::models) fn plain_feed_forward(&self, x: Value<'g>) -> Result<Value<'g>> {
        let up = self.linear("ffn_up", self.feed_forward_width()?, x)?;
        self.linear("ffn_down", self.model.hyper.width, up.gelu_erf())
    }
}
