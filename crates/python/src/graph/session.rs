//! A session: memory, weights and compiled code of a plan.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quadriga_graph::{DType, Shape, TensorKind};
use quadriga_runtime::{ObservedRun, Session, TensorInfo};

use super::array::{ArrayView, numpy_name};
use super::custom::{calls, original};
use super::observer::PythonObserver;
use crate::callback::{Caller, busy, is_called_by};
use crate::detached::{detached, interruptible};
use crate::failure::{Failure, Outcome};
use crate::process::ProcessMark;

/// Name, numpy's type, own type, shape and bytes of an input, an output or a state.
type TensorFacts = (String, &'static str, &'static str, Vec<usize>, usize);

/// Names of inputs or outputs, with arrays.
type NamedArrays<'py> = Vec<(String, Bound<'py, PyAny>)>;

/// Names of inputs or outputs, with memory.
type NamedViews = Vec<(String, ArrayView)>;

/// A session of a plan. Calls of several threads wait for each other.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct SessionCore {
    process: ProcessMark,
    /// A run that was interrupted has it until its end.
    session: Arc<Mutex<Option<Session>>>,
    /// Whether the latest run was over before anybody could miss Ctrl-C.
    quick: Arc<AtomicBool>,
}

/// A run that takes no longer than this is computed by the main thread itself, which looks at signals afterwards. It is the same
/// graph each time, so the latest run tells.
const QUICK: Duration = Duration::from_millis(10);

/// The session for this call alone; waits for calls of other threads.
fn lock(session: &Mutex<Option<Session>>) -> Outcome<MutexGuard<'_, Option<Session>>> {
    match session.try_lock() {
        Ok(session) => Ok(session),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) if is_called_by(Caller::Graph) => Err(busy("session")),
        Err(TryLockError::WouldBlock) => Ok(session.lock().unwrap_or_else(PoisonError::into_inner)),
    }
}

/// Works with a session that is not closed.
fn with<T>(session: &Mutex<Option<Session>>, work: impl FnOnce(&mut Session) -> Outcome<T>) -> Outcome<T> {
    lock(session)?.as_mut().ok_or_else(|| Failure::closed("session")).and_then(work)
}

/// Sets inputs, runs and reads outputs. Notes whether that was quick; operations in Python can take any time.
fn run_now(
    session: &mut Option<Session>,
    inputs: &mut NamedViews,
    outputs: &mut NamedViews,
    quick: &AtomicBool,
) -> Outcome {
    let session = session.as_mut().ok_or_else(|| Failure::closed("session"))?;
    let (started, before) = (Instant::now(), calls());
    quick.store(false, Ordering::SeqCst);
    for (name, view) in inputs {
        session.set(name.as_str(), &*view)?;
    }
    session.start()?;
    session.wait()?;
    for (name, view) in outputs {
        session.read_into(name.as_str(), view.as_bytes_mut()?)?;
    }
    quick.store(started.elapsed() < QUICK && calls() == before, Ordering::SeqCst);
    Ok(())
}

/// The memory of arrays.
fn views(arrays: &NamedArrays<'_>) -> Outcome<NamedViews> {
    arrays.iter().map(|(name, array)| Ok((name.clone(), ArrayView::new(array)?))).collect()
}

impl SessionCore {
    /// A session for Python.
    pub(crate) fn new(session: Session) -> SessionCore {
        let session = Arc::new(Mutex::new(Some(session)));
        SessionCore { process: ProcessMark::new(), session, quick: Arc::default() }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Session) -> Outcome<T>) -> Outcome<T> {
        self.process.check("session")?;
        with(&self.session, work)
    }

    /// As `with`, for short work on arrays, which needs the GIL: a thread that computes is waited for without it.
    fn with_arrays<T>(&self, py: Python<'_>, work: impl FnOnce(&mut Session) -> Outcome<T>) -> Outcome<T> {
        self.process.check("session")?;
        loop {
            if let Ok(mut session) = self.session.try_lock() {
                return session.as_mut().ok_or_else(|| Failure::closed("session")).and_then(work);
            }
            detached(py, || lock(&self.session).map(drop))?;
            self.session.clear_poison();
        }
    }
}

/// The type and the shape of a weight.
fn weight(session: &Session, name: &str) -> Option<(DType, Shape)> {
    let graph = session.plan()?.graph();
    let tensor = graph.get(graph.leaf(name)?)?;
    (tensor.kind() == TensorKind::Weight).then(|| (tensor.dtype(), *tensor.shape()))
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

    /// The type of a weight, if there is one of this name.
    fn weight_type(&self, py: Python<'_>, name: &str) -> PyResult<Option<&'static str>> {
        Ok(self.with_arrays(py, |session| Ok(weight(session, name).map(|(dtype, _)| dtype.name())))?)
    }

    /// Sets the data of a weight: an array of its type and shape, or bytes.
    fn set_weight(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let view = ArrayView::new(array)?;
        Ok(self.with_arrays(py, |session| {
            if let Some((dtype, shape)) = weight(session, name) {
                view.check_type(name, dtype)?;
                if view.element_type().is_some() && view.shape()? != shape {
                    let shapes = format!("{name} has the shape {shape}, the array {}", view.shape()?);
                    return Err(Failure::new("GraphError", shapes));
                }
            }
            Ok(session.set_weight(name, view.as_bytes())?)
        })?)
    }

    /// Copies arrays to inputs, runs the plan, and copies outputs to arrays, as one: calls of other threads come before or after.
    /// A run that is interrupted goes on to its end, on its own thread and with the session for itself.
    fn run(&self, py: Python<'_>, inputs: NamedArrays<'_>, outputs: NamedArrays<'_>) -> PyResult<()> {
        self.process.check("session")?;
        let (mut inputs, mut outputs) = (views(&inputs)?, views(&outputs)?);
        if self.quick.load(Ordering::SeqCst) {
            let run = || match self.session.try_lock() {
                Ok(mut session) => run_now(&mut session, &mut inputs, &mut outputs, &self.quick).map(Some),
                // Another thread has it, who knows how long.
                Err(_) => Ok(None),
            };
            if let Some(()) = detached(py, run).map_err(original)? {
                return Ok(());
            }
        }
        let (session, quick) = (Arc::clone(&self.session), Arc::clone(&self.quick));
        let run = move |_: &AtomicBool| {
            let mut session = lock(&session)?;
            run_now(&mut session, &mut inputs, &mut outputs, &quick)
        };
        Ok(interruptible(py, run).map_err(original)?)
    }

    /// Copies an output to an array.
    fn read(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut view = ArrayView::new(array)?;
        Ok(self.with_arrays(py, |session| Ok(session.read_into(name, view.as_bytes_mut()?)?))?)
    }

    /// Copies arrays to inputs, runs the plan and shows results to a function, on this thread. Returns whether all nodes were
    /// computed.
    #[pyo3(signature = (function, names, inputs))]
    fn observe(
        &self,
        py: Python<'_>,
        function: Py<PyAny>,
        names: Option<Vec<String>>,
        inputs: NamedArrays<'_>,
    ) -> PyResult<bool> {
        let inputs = views(&inputs)?;
        let mut observer = PythonObserver { function, names, raised: None };
        let shown = &mut observer;
        let run = detached(py, move || {
            self.with(|session| {
                for (name, view) in &inputs {
                    session.set(name, view)?;
                }
                Ok(session.debug().observe(shown)?)
            })
        });
        match observer.raised.take() {
            Some(raised) => Err(raised),
            None => Ok(matches!(run.map_err(original)?, ObservedRun::Finished)),
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
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process.is_here() {
            py.detach(|| lock(&self.session).map(|mut session| drop(session.take())))?;
        }
        Ok(())
    }
}

impl Drop for SessionCore {
    /// In a fork, the threads of the devices do not exist.
    fn drop(&mut self) {
        // A run that was interrupted drops it at its end.
        let Some(session) = Arc::get_mut(&mut self.session) else { return };
        let mut session = session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process.is_here() {
            let _ = Python::try_attach(|py| {
                let session = session.take();
                py.detach(|| drop(session));
            });
        }
        std::mem::forget(session);
    }
}
