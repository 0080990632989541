//! Quadriga runs one tensor graph on several processors at once: it assigns operations to backends, plans copies and
//! memory to the byte before anything is allocated, and runs the plan any number of times. On top of that it runs
//! language models from GGUF files.
//!
//! This crate is the library under one name. Each module is a crate of its own, for those who need less:
//!
//! | module | feature | contents |
//! |---|---|---|
//! | [`graph`] | | tensor types, shapes, operations and the graph builder |
//! | [`runtime`] | | backend traits, scheduler, memory planner, sessions |
//! | [`cpu`] | | the CPU backend: thread pool, kernels for AVX2, AVX-512 and AMX chosen at run time |
//! | [`gguf`] | | reader and writer of GGUF model files |
#![cfg_attr(
    feature = "cuda",
    doc = "| [`cuda`] | `cuda` (default) | the CUDA backend, with compiled kernels; the driver is loaded at run time |"
)]
#![cfg_attr(
    feature = "llm",
    doc = "| [`llm`] | `llm` (default) | language models: tokenizer, chat template, KV cache, sampling, text generation |"
)]
#![cfg_attr(
    feature = "view",
    doc = "| [`view`] | `view` (default) | plans and runs as pages, drawings, traces and statistics |"
)]
#![cfg_attr(
    feature = "models",
    doc = "| [`models`] | `models` | model files: get, convert, quantize, judge, split, merge |"
)]
#![cfg_attr(feature = "sim", doc = "| [`sim`] | `sim` | a simulated device for tests |")]
//!
//! A graph is built once, planned for a list of backends, and run any number of times:
//!
//! ```
//! use quadriga::graph::{DType, GraphBuilder};
//! use quadriga::runtime::Scheduler;
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
//! let scheduler = Scheduler::new(cpu::Backend::new()?); // several: a tuple, preferred first
//! let plan = scheduler.plan(&graph)?;
//! println!("{plan}"); // splits, copies, bytes
//! let mut session = plan.session()?;
//! session.run(&[("x", &[0.5f32; 64])])?;
//! let y: Vec<f32> = session.read("y")?;
//! assert_eq!(y.len(), 2 * 64);
//! assert!((y[0] - 16.0).abs() < 1e-3); // silu(32 × 0.5)
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Registry`] lists and opens backends by name, those of one's own included.
//!
//! Text generation takes a few lines:
//!
#![cfg_attr(feature = "llm", doc = "```no_run")]
#![cfg_attr(not(feature = "llm"), doc = "```ignore")]
//! use quadriga::llm::{Generator, GeneratorOptions, Model};
//!
//! let model = Model::open("model.gguf")?;
//! let mut generator = Generator::new(model, GeneratorOptions::default())?;
//! for piece in generator.answer("Why is the sky blue?")? {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), quadriga::llm::Error>(())
//! ```
//!
//! More programs are in the `examples` folder of this crate: text generation, requests with options of their own, a
//! graph, an operation and a backend of one's own, two models on one scheduler, and an observer of intermediate results.

mod backends;

pub use backends::{Family, OpenError, Reason, Registry, Unusable};
pub use quadriga_cpu as cpu;
#[cfg(feature = "cuda")]
pub use quadriga_cuda as cuda;
pub use quadriga_gguf as gguf;
pub use quadriga_graph as graph;
#[cfg(feature = "llm")]
pub use quadriga_llm as llm;
#[cfg(feature = "models")]
pub use quadriga_models as models;
pub use quadriga_runtime as runtime;
#[cfg(feature = "sim")]
pub use quadriga_sim as sim;
#[cfg(feature = "view")]
pub use quadriga_view as view;

#[cfg(all(doctest, feature = "llm"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
