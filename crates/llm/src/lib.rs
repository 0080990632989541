//! Language models as graphs: tokenizer, chat template, cache, sampling and generation.
//!
//! The text side stands on its own: a [`Tokenizer`](tokenizer::Tokenizer) and a
//! [`ChatTemplate`](template::ChatTemplate) come from the model file, a [`Sampler`](sampling::Sampler) picks tokens,
//! a [`Detokenizer`](tokenizer::Detokenizer) and a [`StopMatcher`](stop::StopMatcher) turn them into text as they come.
//!
//! ```no_run
//! use quadriga_llm::template::{ChatTemplate, Message};
//! use quadriga_llm::tokenizer::Tokenizer;
//!
//! let file = quadriga_gguf::File::open("model.gguf")?;
//! let tokenizer = Tokenizer::from_file(&file)?;
//! let question = "Why is the sky blue?";
//! let prompt = match ChatTemplate::from_file(&file, &tokenizer)? {
//!     Some(template) => template.render(&[Message::new("user", question)], true)?,
//!     None => question.to_owned(),
//! };
//! let tokens = tokenizer.encode_prompt(&prompt, true);
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

pub mod default_model;
mod error;
pub mod sampling;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use error::{Error, Result};
