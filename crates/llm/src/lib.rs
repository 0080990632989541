//! Language models as graphs: tokenizer, chat template, cache, sampling and generation.
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
//! Layer by layer: a [`Model`] is a file with its numbers checked; an [`Engine`] runs its graphs over a cache for one
//! or several sequences and gives logits; a [`Generator`] turns prompts into text. The text side stands on its own: a
//! [`Tokenizer`](tokenizer::Tokenizer) and a [`ChatTemplate`](template::ChatTemplate) come from the model file, a
//! [`Sampler`](sampling::Sampler) picks tokens, a [`Detokenizer`](tokenizer::Detokenizer) and a
//! [`StopMatcher`](stop::StopMatcher) turn them into text as they come.

#![forbid(unsafe_code)]

pub mod default_model;
mod engine;
mod environment;
mod error;
pub mod evaluate;
mod generator;
mod hyperparameters;
pub mod judge;
mod model;
pub mod models;
pub mod placement;
pub mod sampling;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use engine::{Batch, BatchObserver, BatchToken, Engine, EngineOptions};
pub use error::{Error, LogitsError, Result};
pub use generator::{Answer, Finish, Generator, GeneratorOptions, Piece};
pub use hyperparameters::{Architecture, Hyperparameters};
pub use model::Model;
pub use placement::{GpuLayers, Placement};
