//! Rotary position embedding.

use quadriga_graph::{DType, Value};

use super::weights::FileWeights;
use super::{LayerBuilder, ModelBuilder};
use crate::Result;
use crate::hyperparameters::{Hyperparameters, LONG_FACTORS, QUERY_FACTORS, SHORT_FACTORS};

/// The tensor that divides each frequency, if the file has one. Long-context models have two, of which the context length
/// selects one.
pub(super) fn frequency_factors<'g>(
    weights: &FileWeights<'g>,
    hyper: &Hyperparameters,
    context: usize,
) -> Result<Option<Value<'g>>> {
    let Some(rope) = hyper.layers.iter().find_map(|layer| layer.rope) else { return Ok(None) };
    let len = rope.dims / 2;
    if let Some(factors) = weights.find_vector("rope_freqs.weight", len)? {
        return Ok(Some(factors));
    }
    weights.check_vector(LONG_FACTORS, len)?;
    weights.check_vector(SHORT_FACTORS, len)?;
    weights.find_vector(if context > rope.original_context { LONG_FACTORS } else { SHORT_FACTORS }, len)
}

impl<'g> ModelBuilder<'g> {
    /// The factor of each token's queries `[n, 1, 1]` by its position.
    fn query_factors(&self) -> Value<'g> {
        *self.query_factors.get_or_init(|| self.g.input(QUERY_FACTORS, DType::F32, [self.shape.tokens, 1, 1]))
    }
}

impl<'g> LayerBuilder<'_, 'g> {
    /// Queries `[n, heads, d]` times the factor of their position, in models that have one.
    pub(in crate::models) fn tempered(&self, queries: Value<'g>) -> Value<'g> {
        match self.model.hyper.temperature {
            Some(_) => queries.mul(self.model.query_factors()),
            None => queries,
        }
    }

    /// The model's kind of norm of each head `[n, heads, d]`, without weights.
    pub(in crate::models) fn plain_norm(&self, x: Value<'g>) -> Value<'g> {
        self.model.plain_norm(x)
    }

    /// Applies RoPE to the heads `[n, heads, d]` of queries or keys, in layers that have it.
    pub(in crate::models) fn rope(&self, x: Value<'g>) -> Value<'g> {
        let Some(rope) = self.shape.rope else { return x };
        let _scope = self.model.g.scope(&self.name("rope"));
        x.rope(rope, self.model.positions, self.model.frequency_factors)
    }
}
