//! The native part of the Python package `quadriga`: the module `quadriga._quadriga`. What users see is in `python/quadriga`;
//! here are the objects behind it.
//!
//! Calls that compute release the GIL. Threads of the engine hold it only to run Python code of the user (logits processors,
//! custom operations); nothing that holds the GIL waits for them.

mod command;
mod detached;
mod failure;
mod floats;
mod graph;
mod loading;
mod logits;
mod measure;
mod model;
mod model_facts;
mod notifier;
mod process;
mod queue;
mod stream;

/// The module `quadriga._quadriga`.
#[pyo3::pymodule]
mod _quadriga {
    #[pymodule_export]
    use crate::command::command;
    #[pymodule_export]
    use crate::detached::settle;
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
    use crate::model::ModelCore;
    #[pymodule_export]
    use crate::stream::{Piece, StreamCore};
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
