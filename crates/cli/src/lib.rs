//! Runs one tensor graph on several processors at once.
//!
//! This crate is the whole of Quadriga under one name; each module is a crate of its own, for those who need less:
//!
//! | module | what |
//! |---|---|
//! | [`graph`] | what is computed: types, shapes, operations, the graph builder |
//! | [`runtime`] | where and when: backends, memory plans, scheduler, sessions |
//! | [`cpu`], [`cuda`], [`sim`] | the backends |
//! | [`gguf`] | model files |
//! | [`llm`] | language models: tokenizer, cache, sampling, generation |
//! | [`view`] | plans and runs made visible: pages, pictures, traces, statistics |
//!
//! A graph is built once, planned for some backends, and run any number of times:
//!
//! ```
//! use std::sync::Arc;
//!
//! use quadriga::graph::{DType, GraphBuilder};
//! use quadriga::runtime::{Backend, Scheduler};
//! use quadriga::{cpu, gguf};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.gguf");
//! # let ones: Vec<u8> = [1f32; 64 * 32].iter().flat_map(|one| one.to_ne_bytes()).collect();
//! # let mut writer = gguf::Writer::new();
//! # writer.set("general.architecture", "llama")?;
//! # writer.tensor_bytes("blk.0.ffn_up.weight", DType::F32, [64, 32], &ones)?;
//! # writer.write(&path)?;
//! let file = gguf::File::open(&path)?;
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [2, 32]);
//! let w = g.weight("blk.0.ffn_up.weight", file.tensor("blk.0.ffn_up.weight")?);
//! g.output("y", w.mul_mat(x).silu());
//! let graph = g.finish()?;
//!
//! let backends: [Arc<dyn Backend>; 1] = [Arc::new(cpu::Backend::new()?)]; // the preferred one first
//! let plan = Scheduler::new(backends).plan(&graph)?; // pins, placements, budgets: builder methods
//! println!("{plan}"); // splits, copies, bytes
//! let mut session = plan.session()?;
//! session.run(&[("x", &[0.5f32; 64])])?;
//! let y: Vec<f32> = session.read("y")?;
//! assert_eq!(y.len(), 2 * 64);
//! assert!((y[0] - 16.0).abs() < 1e-3); // the silu of 32 × 0.5
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A language model is a few lines:
//!
//! ```no_run
//! use quadriga::llm::{Generator, GeneratorOptions, Model};
//!
//! let model = Model::open("model.gguf")?;
//! let mut generator = Generator::new(model, GeneratorOptions::default())?;
//! for piece in generator.answer("Why is the sky blue?")? {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), quadriga::llm::Error>(())
//! ```

pub use quadriga_cpu as cpu;
pub use quadriga_cuda as cuda;
pub use quadriga_gguf as gguf;
pub use quadriga_graph as graph;
pub use quadriga_llm as llm;
pub use quadriga_runtime as runtime;
pub use quadriga_sim as sim;
pub use quadriga_view as view;

pub mod fetch;
pub mod plan_instance;

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
