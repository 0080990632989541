//! Sampling: from logits to the next token.
//!
//! The steps have the order of llama.cpp: logit bias, penalties (repetition, presence, frequency), DRY, a caller's
//! [`SamplingHook`], top-n-sigma, top-k, typical-p, top-p, min-p, XTC, temperature, random draw. A seed gives the same
//! tokens for the same logits on every machine: random numbers and exponential function are implemented here with
//! operations that round alike everywhere.
//!
//! [`SamplingOptions`] are plain data, one per request; a [`Sampler`] is the state of one sequence: the random state and
//! the tokens so far, which penalties refer to.
//!
//! ```
//! use quadriga_llm::sampling::{Sampler, SamplingOptions};
//!
//! let mut greedy = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
//! assert_eq!(greedy.sample(&[0.1, 2.5, 1.0])?, 1);
//!
//! let mut sampler = Sampler::new(SamplingOptions { top_k: 2, seed: 7, ..SamplingOptions::default() })?;
//! let token = sampler.sample(&[0.1, 2.5, 1.0])?;
//! assert!(token == 1 || token == 2);
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

mod candidate;
mod candidates;
mod dry;
mod options;
mod penalties;
mod probabilities;
pub(crate) mod random;
mod sampler;
mod top_logits;

pub(crate) use crate::sampling_hook::ChainedHooks;
pub use crate::sampling_hook::{HookError, SamplingHook};
pub use options::{DryOptions, SamplingOptions};
pub(crate) use probabilities::find_argmax;
pub use probabilities::{argmax, log_probabilities, log_probability, top_log_probabilities};
pub use sampler::Sampler;
pub(crate) use top_logits::TopLogits;
