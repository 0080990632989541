//! Operations in Python, for prototypes.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use quadriga_graph::{CustomCall, CustomError, CustomKernel, CustomOp, DType, Shape, Tensor};

use super::array::{dtype, numpy_name, shape};
use crate::callback::{Caller, called_by};
use crate::failure::Failure;
use crate::interpreter::{attached, call_function};

/// An operation whose rule and code are Python functions.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct CustomOperation {
    pub(crate) op: CustomOp,
}

#[pymethods]
impl CustomOperation {
    /// `infer` gets types and shapes and returns a type and a shape; `compute` gets bytes, types and shapes and returns bytes.
    #[new]
    fn new(name: &str, infer: Py<PyAny>, compute: Py<PyAny>) -> CustomOperation {
        CustomOperation { op: CustomOp::new(PythonKernel { name: kept(name), infer, compute }) }
    }
}

struct PythonKernel {
    name: &'static str,
    infer: Py<PyAny>,
    compute: Py<PyAny>,
}

/// A name for as long as the process lives, kept once.
fn kept(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let name: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(name);
    name
}

/// An exception as the error of a node: its class and message.
fn described(py: Python<'_>, raised: &PyErr) -> String {
    raised.value(py).repr().map_or_else(|_| "an exception".to_owned(), |text| text.to_string())
}

/// Counts calls of operations in Python.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// How many operations in Python were called so far, by any thread.
pub(crate) fn calls() -> u64 {
    CALLS.load(Ordering::SeqCst)
}

/// Runs a function of an operation. Its exception is kept under the text that is returned.
fn call_python<T>(work: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, String> {
    let done = attached(|py| called_by(Caller::Graph, || work(py)).map_err(|raised| keep(py, raised)));
    done.unwrap_or_else(|| Err("the interpreter is shutting down".to_owned()))
}

/// Exceptions of operations, under the text that stands for each in the error of a run or of a graph: those errors are texts.
static RAISED: Mutex<VecDeque<(String, PyErr)>> = Mutex::new(VecDeque::new());
/// How many are kept: more than runs that fail at the same time.
const KEPT: usize = 64;

/// Keeps an exception, and returns a text that no other one has: threads may raise equal ones at the same time.
fn keep(py: Python<'_>, raised: PyErr) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let text = format!("{} (exception {})", described(py, &raised), NUMBER.fetch_add(1, Ordering::Relaxed));
    let mut kept = RAISED.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push_back((text.clone(), raised));
    let oldest = if kept.len() > KEPT { kept.pop_front() } else { None };
    // Its end may run Python code, which may come here.
    drop(kept);
    drop(oldest);
    text
}

/// The exception of the operation that made a run fail, or of its rule that made a graph fail, if that was the reason.
pub(crate) fn original(failure: Failure) -> Failure {
    let Failure::Library { message, .. } = &failure else { return failure };
    let mut kept = RAISED.lock().unwrap_or_else(PoisonError::into_inner);
    let found = kept.iter().position(|(text, _)| message.contains(text.as_str()));
    match found.and_then(|place| kept.remove(place)) {
        Some((_, raised)) => Failure::Python(raised),
        None => failure,
    }
}

impl CustomKernel for PythonKernel {
    fn name(&self) -> &'static str {
        self.name
    }

    fn description(&self) -> &'static str {
        "operation in Python"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        let inferred = call_python(|py| {
            let inputs = inputs.iter().map(|tensor| (tensor.dtype().name(), tensor.shape().dims().to_vec()));
            let inputs = PyList::new(py, inputs.collect::<Vec<_>>())?;
            let result = call_function(self.infer.bind(py), (inputs,))?;
            let (name, dims): (String, Vec<usize>) = result.extract()?;
            Ok((dtype(&name)?, shape(&dims)?))
        });
        inferred.map_err(CustomError::from)
    }

    /// One call computes the whole result.
    fn units(&self, _: &[&Tensor], _: &Tensor) -> usize {
        1
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let mut inputs = Vec::new();
        for input in call.inputs {
            let contiguous = input
                .shape()
                .contiguous(input.dtype())
                .is_some_and(|(strides, _)| strides.0 == input.strides());
            if !contiguous {
                return Err("an input is a strided view; make it contiguous with cont()".into());
            }
            inputs.push((input.bytes()?, numpy_name(input.dtype()), input.shape().dims().to_vec()));
        }
        let (of, dims) = (numpy_name(call.output.dtype()), call.output.shape().dims().to_vec());
        let output = call.output.bytes();
        CALLS.fetch_add(1, Ordering::SeqCst);
        let computed = call_python(|py| {
            let inputs = inputs.into_iter().map(|(bytes, of, dims)| (PyBytes::new(py, bytes), of, dims));
            let inputs = PyList::new(py, inputs.collect::<Vec<_>>())?;
            let result = call_function(self.compute.bind(py), (inputs, of, dims))?;
            let result = result.cast::<PyBytes>()?;
            if result.as_bytes().len() != output.len() {
                let (found, wanted) = (result.as_bytes().len(), output.len());
                return Err(
                    Failure::new("GraphError", format!("it returned {found} bytes, not {wanted}")).into()
                );
            }
            output.copy_from_slice(result.as_bytes());
            Ok(())
        });
        computed.map_err(CustomError::from)
    }
}
