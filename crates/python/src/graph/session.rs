//! A session: memory, weights and compiled code of a plan.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quadriga_runtime::{ObservedRun, Session, TensorInfo};

use super::array::{ArrayView, numpy_name};
use super::observer::PythonObserver;
use crate::detached::detached;
use crate::failure::{Failure, Outcome};
use crate::process::ProcessMark;

/// Name, numpy's type, own type, shape and bytes of an input, an output or a state.
type TensorFacts = (String, &'static str, &'static str, Vec<usize>, usize);

/// A session of a plan. Calls of several threads wait for each other.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct SessionCore {
    pub(crate) process: ProcessMark,
    pub(crate) session: Mutex<Option<Session>>,
}

impl SessionCore {
    fn with<T>(&self, work: impl FnOnce(&mut Session) -> Outcome<T>) -> Outcome<T> {
        self.process.check("session")?;
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.as_mut().ok_or_else(|| Failure::closed("session")).and_then(work)
    }

    /// As `with`, for short work on arrays, which needs the GIL: a thread that computes is waited for without it.
    fn with_arrays<T>(&self, py: Python<'_>, work: impl FnOnce(&mut Session) -> Outcome<T>) -> Outcome<T> {
        self.process.check("session")?;
        loop {
            if let Ok(mut session) = self.session.try_lock() {
                return session.as_mut().ok_or_else(|| Failure::closed("session")).and_then(work);
            }
            detached(py, || drop(self.session.lock().unwrap_or_else(PoisonError::into_inner)));
            self.session.clear_poison();
        }
    }
}

fn facts(info: &TensorInfo) -> TensorFacts {
    let dims = info.shape.dims().to_vec();
    (info.name.clone(), numpy_name(info.dtype), info.dtype.name(), dims, info.bytes)
}

#[pymethods]
impl SessionCore {
    /// The inputs.
    fn inputs(&self, py: Python<'_>) -> PyResult<Vec<TensorFacts>> {
        Ok(detached(py, || self.with(|session| Ok(session.inputs()?.iter().map(facts).collect())))?)
    }

    /// The outputs.
    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<TensorFacts>> {
        Ok(detached(py, || self.with(|session| Ok(session.outputs()?.iter().map(facts).collect())))?)
    }

    /// The states.
    fn states(&self, py: Python<'_>) -> PyResult<Vec<TensorFacts>> {
        Ok(detached(py, || {
            self.with(|session| {
                let states = session.states();
                let facts = states.iter().map(|state| {
                    let dims = state.shape.dims().to_vec();
                    (state.name.clone(), numpy_name(state.dtype), state.dtype.name(), dims, state.bytes)
                });
                Ok(facts.collect())
            })
        })?)
    }

    /// Copies an array to an input.
    fn set(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let view = ArrayView::new(array)?;
        Ok(self.with_arrays(py, |session| Ok(session.set(name, &view)?))?)
    }

    /// Sets the data of a weight.
    fn set_weight(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let view = ArrayView::new(array)?;
        Ok(self.with_arrays(py, |session| Ok(session.set_weight(name, view.as_bytes())?))?)
    }

    /// Runs the plan and waits for the end.
    fn run(&self, py: Python<'_>) -> PyResult<()> {
        Ok(detached(py, || {
            self.with(|session| {
                session.start()?;
                Ok(session.wait()?)
            })
        })?)
    }

    /// Copies an output to an array.
    fn read(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut view = ArrayView::new(array)?;
        Ok(self.with_arrays(py, |session| Ok(session.read_into(name, view.as_bytes_mut()?)?))?)
    }

    /// Runs the plan and shows results to a function. Returns whether all nodes were computed.
    #[pyo3(signature = (function, names=None))]
    fn observe(&self, py: Python<'_>, function: Py<PyAny>, names: Option<Vec<String>>) -> PyResult<bool> {
        let mut observer = PythonObserver { function, names, raised: None };
        let run = detached(py, || self.with(|session| Ok(session.debug().observe(&mut observer)?)));
        match observer.raised.take() {
            Some(raised) => Err(raised),
            None => Ok(matches!(run?, ObservedRun::Finished)),
        }
    }

    /// Copies a state to an array.
    fn read_state(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut view = ArrayView::new(array)?;
        Ok(self
            .with_arrays(py, |session| Ok(session.read_state_at::<u8>(name, 0, view.as_bytes_mut()?)?))?)
    }

    /// Copies an array to a state.
    fn write_state(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let view = ArrayView::new(array)?;
        Ok(self.with_arrays(py, |session| Ok(session.write_state(name, &view)?))?)
    }

    /// Sets all states to zero.
    fn clear_state(&self, py: Python<'_>) -> PyResult<()> {
        Ok(detached(py, || self.with(|session| Ok(session.clear_state()?)))?)
    }

    /// All states as bytes.
    fn save_state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let saved = detached(py, || self.with(|session| Ok(session.state_bytes()?)))?;
        Ok(PyBytes::new(py, &saved))
    }

    /// Restores states from bytes.
    fn restore_state(&self, py: Python<'_>, saved: Vec<u8>) -> PyResult<()> {
        Ok(detached(py, || self.with(|session| Ok(session.restore_state(saved.as_slice())?)))?)
    }

    /// Frees the memory.
    fn close(&self, py: Python<'_>) {
        if self.process.is_here() {
            py.detach(|| drop(self.session.lock().unwrap_or_else(PoisonError::into_inner).take()));
        }
    }
}

impl Drop for SessionCore {
    /// In a fork, the threads of the devices do not exist.
    fn drop(&mut self) {
        let mut session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process.is_here() {
            let _ = Python::try_attach(|py| {
                let session = session.take();
                py.detach(|| drop(session));
            });
        }
        std::mem::forget(session);
    }
}
