//! Model graphs: one file per architecture.
//!
//! All graphs of a model share their weights and their KV cache by name. A graph is built for a [`GraphShape`] and
//! serves every batch of that shape, since tokens, positions and KV-cache slots are inputs:
//!
//! | input | type, shape | meaning |
//! |---|---|---|
//! | `tokens` | i32 `[n]` | the tokens |
//! | `positions` | i32 `[n]` | each token's position in its sequence |
//! | `slots` | i32 `[n]` | the KV-cache slot that each token's key and value are written to |
//! | `spans` | i32 `[n, 2]` | the slots that each token attends to: from the first to one past the last |
//! | `rows` | i32 `[m]` | the tokens whose logits are an output |
//!
//! | output | type, shape | meaning |
//! |---|---|---|
//! | `logits` | f32 `[m, vocabulary]` | the logits after each output token |
//! | `hidden` | f32 `[m, width]` | with [`GraphShape::hidden`]: the hidden state after the last layer |
//! | `argmax` | i32 `[m]` | with [`GraphShape::argmax`]: the first of the largest logits of each row |
//! | `sum` | f32 `[m, 1]` | with [`GraphShape::argmax`]: the sum of each row, finite only if all its logits are |

mod builder;
mod llama;
mod qwen2;
mod qwen3;

use quadriga_gguf::File;
use quadriga_graph::{DType, Graph, GraphBuilder};

use self::builder::ModelBuilder;
use crate::hyperparameters::{Architecture, Hyperparameters};
use crate::{Error, Result};

/// The properties of a batch that its graph depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphShape {
    /// Tokens in the batch.
    pub tokens: usize,
    /// Tokens whose logits are an output; with 0 the graph only fills the KV cache.
    pub rows: usize,
    /// KV-cache slots that attention covers, from the first: all slots that a token of the batch may see.
    pub visible_slots: usize,
    /// Slots of the whole KV cache.
    pub cache_slots: usize,
    /// The element type of the KV cache.
    pub cache: DType,
    /// Whether the hidden state after the last layer is an output, beside the logits.
    pub hidden: bool,
    /// Whether the argmax of the logits is an output, beside them.
    pub argmax: bool,
}

/// Builds the graph of a model for one batch shape.
pub fn build(file: &File, hyper: &Hyperparameters, shape: GraphShape) -> Result<Graph> {
    let g = GraphBuilder::new();
    {
        let builder = ModelBuilder::new(&g, file, hyper, shape)?;
        match hyper.architecture {
            Architecture::Llama => llama::build(&builder)?,
            Architecture::Qwen2 => qwen2::build(&builder)?,
            Architecture::Qwen3 => qwen3::build(&builder)?,
        }
    }
    g.finish().map_err(Error::from)
}
