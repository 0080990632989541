//! Observers in Python.

use std::ops::ControlFlow;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quadriga_graph::NodeId;
use quadriga_runtime::{Observed, Observer, Plan};

use super::array::numpy_name;
use crate::callback::{Caller, called_by};
use crate::interpreter::{attached, call_function};

/// Calls a Python function with the name, bytes, type, shape and strides of each result that it wants to see.
pub(crate) struct PythonObserver {
    pub(crate) function: Py<PyAny>,
    /// Names of the wanted nodes; all if `None`.
    pub(crate) names: Option<Vec<String>>,
    /// What the function has raised.
    pub(crate) raised: Option<PyErr>,
}

impl Observer for PythonObserver {
    fn wants(&mut self, plan: &Plan, node: NodeId) -> bool {
        self.names.as_ref().is_none_or(|names| names.contains(&plan.graph().node_name(node)))
    }

    fn observe(&mut self, observed: Observed<'_>) -> ControlFlow<()> {
        let graph = observed.plan.graph();
        let Some(tensor) = graph.get(observed.tensor) else { return ControlFlow::Continue(()) };
        let dims = tensor.shape().dims();
        let strides = tensor.strides();
        let strides = strides.get(strides.len() - dims.len()..).unwrap_or_default();
        let goes_on = attached(|py| {
            let bytes = PyBytes::new(py, observed.bytes);
            let name = graph.node_name(observed.node);
            let backend = observed.plan.backend_of(observed.node);
            let backend = observed.plan.backends().get(backend).map(|backend| backend.name().to_owned());
            let arguments = (
                name,
                bytes,
                numpy_name(tensor.dtype()),
                tensor.dtype().name(),
                dims.to_vec(),
                strides.to_vec(),
                backend,
            );
            called_by(Caller::Graph, || call_function(self.function.bind(py), arguments))?.extract::<bool>()
        });
        match goes_on {
            Some(Ok(true)) => ControlFlow::Continue(()),
            Some(Ok(false)) | None => ControlFlow::Break(()),
            Some(Err(raised)) => {
                self.raised = Some(raised);
                ControlFlow::Break(())
            }
        }
    }
}
