//! Constrained generation: answers that satisfy a JSON schema, match a regular expression, or belong to a grammar.
//!
//! A [`Grammar`] is plain data that comes with a request. A [`ConstraintEngine`], one per model, compiles it for the model's
//! vocabulary to a [`Constraint`], whose [`hooks`](Constraint::hook) exclude all tokens that cannot continue the answer, one
//! hook per answer. Masks are computed by threads of the engine while the device computes the next logits.
//!
//! Models that reason do so first: the constraint begins where the reasoning ends. End-of-generation tokens are allowed only
//! where the answer is complete; where nothing can follow, they alone are.
//!
//! ```no_run
//! use quadriga_llm::constraint::Grammar;
//! use quadriga_llm::{Generator, GeneratorOptions, Model};
//! use serde_json::json;
//!
//! let schema = json!({
//!     "type": "object",
//!     "properties": { "city": { "type": "string" }, "people": { "type": "integer" } },
//!     "required": ["city", "people"],
//! });
//! let options = GeneratorOptions { grammar: Some(Grammar::JsonSchema(schema)), ..GeneratorOptions::default() };
//! let mut generator = Generator::new(Model::open("model.gguf")?, options)?;
//! println!("{}", generator.answer("Name a city in Peru.")?.text()?);
//! # Ok::<(), quadriga_llm::Error>(())
//! ```
//!
//! Grammars come from requests and are not trusted: their size, the work of compiling them and that of each mask are limited.
//! One that cannot be compiled is an [`Error::Grammar`](crate::Error::Grammar) that says why.
//!
//! The feature `constraint` (default) brings the compiler, the crate `llguidance`. Without it every grammar is an error.

mod cancellation;
mod formats;
pub mod gbnf;
mod grammar;

#[cfg(feature = "constraint")]
mod bounds;
#[cfg(feature = "constraint")]
mod branching;
#[cfg(feature = "constraint")]
mod closed;
#[cfg(feature = "constraint")]
mod compiler_slots;
#[cfg(feature = "constraint")]
mod engine;
#[cfg(feature = "constraint")]
mod hook;
#[cfg(all(test, feature = "constraint"))]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod intersections;
#[cfg(feature = "constraint")]
mod joined_bounds;
#[cfg(feature = "constraint")]
mod mask;
#[cfg(feature = "constraint")]
mod multiples;
#[cfg(feature = "constraint")]
mod numbers;
#[cfg(feature = "constraint")]
mod reasoning;
#[cfg(feature = "constraint")]
mod relaxed;
#[cfg(feature = "constraint")]
mod schema;
#[cfg(feature = "constraint")]
mod source;
#[cfg(feature = "constraint")]
mod vocabulary;
#[cfg(feature = "constraint")]
mod workers;

#[cfg(not(feature = "constraint"))]
mod absent;

#[cfg(not(feature = "constraint"))]
pub use absent::{Constraint, ConstraintEngine};
#[cfg(feature = "constraint")]
pub(crate) use bounds::check_source;
pub use cancellation::Cancellation;
#[cfg(feature = "constraint")]
pub use compiler_slots::MAX_COMPILING;
#[cfg(feature = "constraint")]
pub use engine::{Constraint, ConstraintEngine};
pub use formats::unknown_format;
pub use grammar::Grammar;
#[cfg(feature = "constraint")]
pub(crate) use schema::json_rule;
