//! The native part of the Python package `quadriga`: the module `quadriga._quadriga`. What users see is in `python/quadriga`;
//! here are the objects behind it.
//!
//! Calls that compute release the GIL. Threads of the engine hold it only to run Python code of the user (logits processors,
//! custom operations); nothing that holds the GIL waits for them.

mod callback;
mod command;
mod detached;
mod failure;
mod floats;
mod graph;
mod hub;
mod interpreter;
mod loading;
mod logits;
mod measure;
mod model;
mod model_facts;
mod notifier;
mod process;
mod queue;
mod stream;
mod turns;

/// The module `quadriga._quadriga`. It does not need the GIL: what several threads share is behind locks, and classes are frozen.
#[pyo3::pymodule(gil_used = false)]
mod _quadriga {
    #[pymodule_export]
    use crate::command::command;
    #[pymodule_export]
    use crate::floats::Floats;
    #[pymodule_export]
    use crate::graph::builder::GraphCore;
    #[pymodule_export]
    use crate::graph::custom::CustomOperation;
    #[pymodule_export]
    use crate::graph::plan::PlanCore;
    #[pymodule_export]
    use crate::graph::session::SessionCore;
    #[pymodule_export]
    use crate::hub::hub_files;
    #[pymodule_export]
    use crate::interpreter::{forget_threads, refuse, set_main_thread, settle};
    #[pymodule_export]
    use crate::model::ModelCore;
    #[pymodule_export]
    use crate::stream::{Piece, StreamCore};
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
