//! Many requests at once: a KV cache in pages, continuous batching, and prefixes that are computed once.
//!
//! | type | purpose |
//! |---|---|
//! | [`Batcher`] | answers requests step by step; the caller drives it |
//! | [`Service`] | a batcher on a thread of its own, for requests of any thread |
//! | [`Request`], [`Event`] | what is asked, and what happens |
//!
//! A step computes one token of every sequence that is being generated, and parts of prompts up to the batch size. Steps are
//! padded to few sizes, so that their plans are reused. Every request has a sampler of its own: its random numbers do not depend
//! on its neighbours.

mod batcher;
mod draft;
mod host_pages;
mod lookup;
mod pace;
mod page_file;
mod page_pool;
mod paged_engine;
mod payoff;
mod recurrent_step;
mod refill;
mod request;
mod sequence;
mod service;
mod state_rows;
mod window_pages;

pub use batcher::{Batcher, BatcherOptions, BatcherState, CacheFile};
pub use request::{Event, Finished, Request, RequestId, TokenLogprobs};
pub use service::{EventSink, Response, Service};
