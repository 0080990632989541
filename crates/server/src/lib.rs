//! An HTTP server for language models, with the interfaces that clients of OpenAI, Anthropic, Ollama and llama-server use.
//!
//! ```no_run
//! use quadriga_server::{App, Keys, Limits, ModelRegistry, ServedModel, Server};
//! # async fn example(batcher: quadriga_llm::serving::Batcher) -> Result<(), Box<dyn std::error::Error>> {
//! let model = ServedModel::start("default", batcher, Default::default(), None)?;
//! let app = App::new(ModelRegistry::with(model), Keys::default(), Limits::default());
//! let server = Server::bind(app, std::net::SocketAddr::from(([127, 0, 0, 1], 8080))).await?;
//! let (stop, stopped) = Server::stop_handle();
//! server.run(stopped).await;
//! # Ok(())
//! # }
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`generation`], [`answer_tokens`] | a request for text and what happens to it, whatever dialect it came in |
//! | [`dialects`] | JSON of each interface to and from that |
//! | [`model`], [`registry`] | a loaded model that answers requests; loading and unloading models |
//! | [`openapi`] | routes with their descriptions |
//! | [`running`], [`stream`] | answers as they are generated, and as streams |
//! | [`operation`] | keys, limits, metrics |

#![forbid(unsafe_code)]

mod answer_meter;
pub mod answer_tokens;
pub mod app;
pub mod body;
pub mod call;
pub mod constraint;
pub mod dialects;
mod embed;
pub mod embedding;
pub mod error;
pub mod field_log;
pub mod fields;
mod generate;
pub mod generation;
mod held_answers;
mod hooks;
mod memory_fit;
mod memory_keeper;
pub mod model;
mod model_changes;
mod model_loader;
pub mod observed;
mod observer_counts;
pub mod openapi;
pub mod operation;
mod page;
mod partial_json;
mod passage;
mod prompt;
mod reasoning_default;
mod reasoning_output;
pub mod registry;
pub mod requests;
mod routes;
pub mod running;
mod server;
mod slot_table;
mod status;
pub mod stream;
mod template_abilities;
pub mod whole_answers;

pub use app::{App, Interface};
pub use memory_fit::{MemoryDemand, MemoryShortage, device_bytes, memory_shortages};
pub use model::{PlanPictures, ServedModel};
pub use model_loader::{LoadError, ModelEntry, ModelLoader, check_capacity, check_memory};
pub use operation::auth::Keys;
pub use operation::hosts::Hosts;
pub use operation::limits::Limits;
pub use operation::listener::ListenAddress;
pub use operation::origins::Origins;
pub use operation::tls::TlsFiles;
pub use reasoning_output::ReasoningOutput;
pub use registry::{ModelPolicy, ModelRegistry};
pub use server::{Server, StopHandle, StopSignal};
