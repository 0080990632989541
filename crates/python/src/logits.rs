//! Logits processors: Python callables between the logits and the sampler.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quadriga_llm::sampling::{HookError, SamplingHook};

use crate::callback::{Caller, called_by};
use crate::floats::Floats;
use crate::interpreter::attached;

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

impl SamplingHook for LogitsProcessors {
    /// Python code may keep the arrays that it gets, so they are copies; it returns the bytes of the changed logits.
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        let changed = attached(|py| -> PyResult<()> {
            let tokens = PyBytes::new(py, bytemuck::cast_slice(tokens));
            let values = Floats::new(logits.to_vec(), &[logits.len()]);
            let call = || self.apply.bind(py).call1((&self.processors, tokens, values));
            let result = called_by(Caller::Model(self.model), call)?;
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
