//! Models as graphs: one file per architecture, which reads like the model's description.
//!
//! All graphs of a model share their weights and their cache, which are known by name; a graph is built for a
//! [`GraphShape`] and is the same for every batch of that shape, since tokens, positions and cache slots are inputs:
//!
//! | input | type, shape | meaning |
//! |---|---|---|
//! | `tokens` | i32 `[n]` | the tokens |
//! | `positions` | i32 `[n]` | each token's place in its sequence |
//! | `slots` | i32 `[n]` | the cell of the cache that each token's key and value go to |
//! | `spans` | i32 `[n, 2]` | the cells that each token sees: from the first to one past the last |
//! | `rows` | i32 `[m]` | the tokens whose results are wanted |
//!
//! The output `logits` is f32 `[m, vocabulary]`; `hidden`, where asked for, is f32 `[m, width]`. Where asked for,
//! `choice` is i32 `[m]`, the first of the largest logits of each row, and `sum` f32 `[m, 1]`, their sum: a number only
//! if all of them are.

mod llama;
mod parts;
mod qwen2;
mod qwen3;

use quadriga_gguf::File;
use quadriga_graph::{DType, Graph, GraphBuilder};

use self::parts::Parts;
use crate::hyperparameters::{Architecture, Hyperparameters};
use crate::{Error, Result};

/// What of a batch decides its graph.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphShape {
    /// Tokens in the batch.
    pub tokens: usize,
    /// Tokens whose results are wanted; 0 only fills the cache.
    pub rows: usize,
    /// Cells of the cache that the batch can see: a bucket that covers every span.
    pub window: usize,
    /// Cells of the whole cache.
    pub cells: usize,
    /// The type of the cache's elements.
    pub cache: DType,
    /// Whether the last layer's result is an output, beside the logits.
    pub hidden: bool,
    /// Whether the most probable token is an output, beside the logits.
    pub choice: bool,
}

/// Builds the graph of a model for one shape of batch.
pub fn build(file: &File, hyper: &Hyperparameters, shape: GraphShape) -> Result<Graph> {
    let g = GraphBuilder::new();
    {
        let parts = Parts::new(&g, file, hyper, shape)?;
        match hyper.architecture {
            Architecture::Llama => llama::build(&parts)?,
            Architecture::Qwen2 => qwen2::build(&parts)?,
            Architecture::Qwen3 => qwen3::build(&parts)?,
        }
    }
    g.finish().map_err(Error::from)
}
