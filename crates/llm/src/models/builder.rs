//! Building blocks of all architectures: embedding, norms, attention over the KV cache, feed-forward, logits.

use quadriga_gguf::File;
use quadriga_graph::{AttentionOptions, DType, GraphBuilder, Value};

use super::GraphShape;
use crate::hyperparameters::Hyperparameters;
use crate::{Error, Result};

/// A model graph under construction: the graph builder, the file's weights and the inputs that every layer reads.
pub(super) struct ModelBuilder<'g> {
    g: &'g GraphBuilder,
    source: FileWeights<'g>,
    hyper: &'g Hyperparameters,
    shape: GraphShape,
    positions: Value<'g>,
    slots: Value<'g>,
    spans: Value<'g>,
    /// Absent when all tokens are outputs, or none.
    rows: Option<Value<'g>>,
    frequency_factors: Option<Value<'g>>,
    embedding: Value<'g>,
}

/// One layer of a model graph under construction.
pub(super) struct LayerBuilder<'p, 'g> {
    model: &'p ModelBuilder<'g>,
    index: usize,
}

impl<'g> ModelBuilder<'g> {
    pub(super) fn new(
        g: &'g GraphBuilder,
        file: &'g File,
        hyper: &'g Hyperparameters,
        shape: GraphShape,
    ) -> Result<ModelBuilder<'g>> {
        let n = shape.tokens;
        let source = FileWeights { g, file };
        Ok(ModelBuilder {
            g,
            hyper,
            shape,
            positions: g.input("positions", DType::I32, [n]),
            slots: g.input("slots", DType::I32, [n]),
            spans: g.input("spans", DType::I32, [n, 2]),
            rows: (shape.rows > 0 && shape.rows < n).then(|| g.input("rows", DType::I32, [shape.rows])),
            frequency_factors: source.find_vector("rope_freqs.weight", hyper.rope.dims / 2)?,
            embedding: source.get("token_embd.weight", &[hyper.vocabulary, hyper.width])?,
            source,
        })
    }
    /// The embedded tokens `[n, width]`.
    pub(super) fn embed(&self) -> Value<'g> {
        let tokens = self.g.input("tokens", DType::I32, [self.shape.tokens]);
        self.embedding.get_rows(tokens)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = LayerBuilder<'_, 'g>> {
        (0..self.hyper.layers).map(|index| LayerBuilder { model: self, index })
    }

    /// A root-mean-square norm with its weight.
    fn norm(&self, name: &str, x: Value<'g>) -> Result<Value<'g>> {
        let weight = self.source.vector(name, x.shape().cols())?;
        Ok(x.rms_norm(self.hyper.norm_epsilon).mul(weight))
    }

    /// `x · wᵀ + bias`, the bias where the file has one.
    fn linear(&self, name: &str, out: usize, x: Value<'g>) -> Result<Value<'g>> {
        let weight = self.source.get(&format!("{name}.weight"), &[out, x.shape().cols()])?;
        let y = weight.mul_mat(x);
        Ok(match self.source.find_vector(&format!("{name}.bias"), out)? {
            Some(bias) => y.add(bias),
            None => y,
        })
    }

    /// Declares the outputs. Models without an output matrix compute the logits with the token embedding.
    pub(super) fn finish(&self, x: Value<'g>) -> Result<()> {
        let hidden = self.norm("output_norm.weight", x)?;
        if self.shape.hidden {
            self.g.output("hidden", hidden.named("hidden"));
        }
        let dims = [self.hyper.vocabulary, self.hyper.width];
        let head = self.source.find("output.weight", &dims)?.unwrap_or(self.embedding);
        let logits = head.mul_mat(hidden).named("logits");
        self.g.output("logits", logits);
        if self.shape.argmax {
            self.g.output("argmax", logits.argmax().named("argmax"));
            self.g.output("sum", logits.sum_rows().named("sum"));
        }
        Ok(())
    }
}

/// The file's tensors as weights of the graph. Shape and type of each are checked before it is declared.
struct FileWeights<'g> {
    g: &'g GraphBuilder,
    file: &'g File,
}

impl<'g> FileWeights<'g> {
    /// The weight of this name, if the file has it.
    fn find(&self, name: &str, dims: &[usize]) -> Result<Option<Value<'g>>> {
        if self.file.find_tensor(name).is_none() {
            return Ok(None);
        }
        self.get(name, dims).map(Some)
    }

    /// A weight of an element-wise operation; all backends compute those in F32 only.
    fn vector(&self, name: &str, len: usize) -> Result<Value<'g>> {
        let dtype = self.file.tensor(name)?.dtype();
        if dtype != DType::F32 {
            return Err(Error::TensorType { name: name.to_owned(), dtype });
        }
        self.get(name, &[len])
    }

    /// The vector of this name, if the file has it.
    fn find_vector(&self, name: &str, len: usize) -> Result<Option<Value<'g>>> {
        self.file.find_tensor(name).map(|_| self.vector(name, len)).transpose()
    }

    fn get(&self, name: &str, dims: &[usize]) -> Result<Value<'g>> {
        let tensor = self.file.tensor(name)?;
        if tensor.shape().dims() != dims {
            return Err(Error::TensorShape {
                name: name.to_owned(),
                found: tensor.shape().dims().to_vec(),
                wanted: dims.to_vec(),
            });
        }
        if !tensor.dtype().is_computable() {
            return Err(Error::TensorType { name: name.to_owned(), dtype: tensor.dtype() });
        }
        Ok(self.g.weight(name, tensor))
    }
}

impl<'g> LayerBuilder<'_, 'g> {
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.index)
    }

    pub(super) fn norm(&self, part: &str, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.model.g.scope(&self.name(part));
        self.model.norm(&self.name(&format!("{part}.weight")), x)
    }

    /// A norm over each head of `[n, heads, d]`.
    pub(super) fn head_norm(&self, part: &str, x: Value<'g>) -> Result<Value<'g>> {
        self.norm(part, x)
    }

    fn linear(&self, part: &str, out: usize, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.model.g.scope(&self.name(part));
        self.model.linear(&self.name(part), out, x)
    }

    /// Queries `[n, heads, d]`, keys `[n, kv_heads, d]` and values `[n, kv_heads · e]`.
    pub(super) fn query_key_value(&self, x: Value<'g>) -> Result<(Value<'g>, Value<'g>, Value<'g>)> {
        let h = self.model.hyper;
        let n = self.model.shape.tokens;
        let query = self.linear("attn_q", h.heads * h.key_length, x)?;
        let key = self.linear("attn_k", h.key_width(), x)?;
        let value = self.linear("attn_v", h.value_width(), x)?;
        Ok((query.reshape([n, h.heads, h.key_length]), key.reshape([n, h.kv_heads, h.key_length]), value))
    }

    /// Applies RoPE to the heads of queries or keys.
    pub(super) fn rope(&self, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.model.g.scope(&self.name("rope"));
        Ok(x.rope(self.model.hyper.rope, self.model.positions, self.model.frequency_factors))
    }

    /// Writes keys and values to the KV cache, attends over it and projects the result. Returns the result and the
    /// residual that it is added to. In the last layer both have the output rows only, and `None` is returned if there
    /// are none.
    pub(super) fn attention(
        &self,
        query: Value<'g>,
        key: Value<'g>,
        value: Value<'g>,
        residual: Value<'g>,
    ) -> Result<Option<(Value<'g>, Value<'g>)>> {
        let (g, h, shape) = (self.model.g, self.model.hyper, self.model.shape);
        let (n, d, e) = (shape.tokens, h.key_length, h.value_length);
        let attended = {
            let _scope = g.scope(&self.name("attn"));
            let key_cache = g.state(&self.name("cache_k"), shape.cache, [shape.cache_slots, h.key_width()]);
            let value_cache =
                g.state(&self.name("cache_v"), shape.cache, [shape.cache_slots, h.value_width()]);
            // The written slots are among the visible ones: attention reads the tensors that were written.
            let keys = key_cache.slice(0, 0, shape.visible_slots);
            let keys = keys.set_rows(key.reshape([n, h.key_width()]), self.model.slots);
            let values = value_cache.slice(0, 0, shape.visible_slots).set_rows(value, self.model.slots);
            if self.is_last() && shape.rows == 0 {
                return Ok(None);
            }
            let keys = keys.reshape([shape.visible_slots, h.kv_heads, d]).permute([1, 0, 2]);
            let values = values.reshape([shape.visible_slots, h.kv_heads, e]).permute([1, 0, 2]);
            let scale = 1.0 / (d as f32).sqrt();
            query
                .permute([1, 0, 2])
                .attention(keys, values, AttentionOptions::new().spans(self.model.spans).scale(scale))
                .reshape([n, h.heads * e])
        };
        let (attended, residual) = match self.model.rows {
            Some(rows) if self.is_last() => (attended.get_rows(rows), residual.get_rows(rows)),
            _ => (attended, residual),
        };
        Ok(Some((self.linear("attn_output", h.width, attended)?, residual)))
    }

    /// `down(silu(gate(x)) · up(x))`.
    pub(super) fn gated_feed_forward(&self, x: Value<'g>) -> Result<Value<'g>> {
        let h = self.model.hyper;
        let gate = self.linear("ffn_gate", h.feed_forward, x)?;
        let up = self.linear("ffn_up", h.feed_forward, x)?;
        self.linear("ffn_down", h.width, gate.swiglu(up))
    }

    fn is_last(&self) -> bool {
        self.index + 1 == self.model.hyper.layers
    }
}
