//! Logits processors: Python callables between the logits and the sampler.

use pyo3::exceptions::{PyRuntimeError, PyStopAsyncIteration, PyStopIteration};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quadriga_llm::sampling::{HookError, SamplingHook};

use crate::callback::{Caller, called_by};
use crate::floats::Floats;
use crate::interpreter::{attached, call_function};

/// Calls `quadriga._logits.apply` before each token.
pub(crate) struct LogitsProcessors {
    /// The callables of the request, a list.
    processors: Py<PyAny>,
    /// `quadriga._logits.apply`.
    apply: Py<PyAny>,
    /// The number of the model.
    model: u64,
}

impl LogitsProcessors {
    /// The callables of a request.
    pub(crate) fn new(py: Python<'_>, processors: Py<PyAny>, model: u64) -> PyResult<LogitsProcessors> {
        let apply = py.import("quadriga._logits")?.getattr("apply")?.unbind();
        Ok(LogitsProcessors { processors, apply, model })
    }
}

/// An exception that may pass through iterators: those that mean their end become a `RuntimeError`, as in generators (PEP 479).
fn not_the_end(py: Python<'_>, raised: PyErr) -> PyErr {
    let is_end =
        raised.is_instance_of::<PyStopIteration>(py) || raised.is_instance_of::<PyStopAsyncIteration>(py);
    if !is_end {
        return raised;
    }
    let name =
        raised.get_type(py).name().map_or_else(|_| "StopIteration".to_owned(), |name| name.to_string());
    let error = PyRuntimeError::new_err(format!("a logits processor raised {name}"));
    error.set_cause(py, Some(raised));
    error
}

impl SamplingHook for LogitsProcessors {
    /// Python code may keep the arrays that it gets, so they are copies; it returns the bytes of the changed logits.
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        let changed = attached(|py| -> PyResult<()> {
            let tokens = PyBytes::new(py, bytemuck::cast_slice(tokens));
            let values = Floats::new(logits.to_vec(), &[logits.len()]);
            let call = || call_function(self.apply.bind(py), (&self.processors, tokens, values));
            let result =
                called_by(Caller::Model(self.model), call).map_err(|raised| not_the_end(py, raised))?;
            let result = result.cast::<PyBytes>()?;
            for (to, from) in logits.iter_mut().zip(result.as_bytes().as_chunks::<4>().0) {
                *to = f32::from_ne_bytes(*from);
            }
            Ok(())
        });
        match changed {
            Some(changed) => Ok(changed?),
            None => Err("the interpreter is shutting down".into()),
        }
    }
}
