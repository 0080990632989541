//! Runs language models from GGUF files: tokenizer, chat template, KV cache, sampling and text generation. Models are
//! built as graphs that `quadriga-runtime` splits over the CPU and accelerators.
//!
//! ```no_run
//! use quadriga_llm::{Generator, GeneratorOptions, Model};
//!
//! let model = Model::open("model.gguf")?;
//! let mut generator = Generator::new(model, GeneratorOptions::default())?;
//! for piece in generator.answer("Why is the sky blue?")? {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), quadriga_llm::Error>(())
//! ```
//!
//! | type | purpose |
//! |---|---|
//! | [`Model`] | an opened and checked model file |
//! | [`Placement`] | devices, layers on accelerators and memory budgets |
//! | [`Engine`] | runs a model's graphs over the KV cache of one or several sequences: tokens in, logits out |
//! | [`Generator`] | streams answers to prompts and conversations |
//! | [`Embedder`] | a vector for each text |
//! | [`Tokenizer`](tokenizer::Tokenizer), [`Detokenizer`](tokenizer::Detokenizer) | text to tokens and back |
//! | [`ChatTemplate`](template::ChatTemplate) | a conversation as a prompt |
//! | [`Sampler`](sampling::Sampler) | logits to the next token |
//! | [`Grammar`](constraint::Grammar) | what an answer must be: JSON of a schema, a regular expression, a grammar |
//! | [`StopMatcher`](stop::StopMatcher) | stop strings in streamed text |
//! | [`ReasoningSplitter`](reasoning::ReasoningSplitter) | reasoning and answer in streamed text |
//! | [`ToolCallParser`](tools::ToolCallParser) | calls of tools and text in streamed text |
//!
//! The feature `cuda` (default) lets [`Placement`] use CUDA devices; the driver is loaded at run time. The feature `constraint`
//! (default) brings the compiler of grammars.

#![forbid(unsafe_code)]

mod adapter;
mod answer;
mod answer_rules;
mod answer_text;
pub mod constraint;
mod conversation;
pub mod default_model;
mod device_ranks;
mod divergence;
mod embedder;
mod engine;
mod environment;
mod error;
pub mod evaluate;
mod generator;
mod hyperparameters;
pub mod judge;
mod line_rules;
mod marks;
mod model;
pub mod models;
mod neurons;
pub mod placement;
mod prompt_format;
mod ranks;
pub mod reasoning;
mod reasoning_budget;
pub mod sampling;
mod sampling_hook;
pub mod serving;
mod state_error;
pub mod stop;
pub mod template;
pub mod tokenizer;
#[cfg(feature = "constraint")]
mod tool_constraint;
pub mod tools;

pub use adapter::{Adapter, AdapterMatrix, LowRankPair};
pub use answer::{Answer, Completion, Finish, TextPiece, TokenCounts};
pub use answer_rules::AnswerRules;
pub use conversation::FittedConversation;
pub use device_ranks::DeviceRank;
pub use divergence::divergence;
pub use embedder::{Embedder, EmbedderOptions, can_rank, cosine, cut_tokens, pair_tokens, text_tokens};
pub use engine::{
    Batch, BatchObserver, BatchToken, Engine, EngineOptions, ExpertCacheUse, NeuronSlotUse, NeuronUse,
    RecurrentStates, WindowSavings,
};
pub use error::{Error, LogitsError, Result};
pub use generator::{Generator, GeneratorOptions, PrefillObserver, PrefillProgress, RequestOptions};
pub use hyperparameters::{
    AttentionTemperature, CacheRows, Experts, Gating, Hyperparameters, LatentAttention, LayerShape,
    LinearAttention, NormKind, ParallelStreams, Pooling, RecurrentShape, WindowSpan,
};
pub use line_rules::LineRules;
pub use model::Model;
pub use neurons::NeuronCounts;
pub use placement::{GpuLayers, Placement};
pub use ranks::{Grid, Link, MOST_HELD, Parallelism, RankResources, RankShare, RequestLoad, within_share};
pub use state_error::StateError;
