//! Numbers that belong to a Python object: numpy uses their memory in place, through `__array_interface__`.

use std::cell::UnsafeCell;

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A contiguous array of float32. `numpy.asarray` makes a view of it, which keeps it alive; nothing is copied.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct Floats {
    values: UnsafeCell<Box<[f32]>>,
    shape: Vec<usize>,
}

// SAFETY: after `Floats::new` the elements are only reached through the pointer that `__array_interface__` hands out, whose
// users are numpy's arrays with numpy's rules about threads; no reference to them is ever made in Rust.
unsafe impl Sync for Floats {}

impl Floats {
    /// Takes over numbers, which have a shape; one that does not fit becomes a flat array.
    pub(crate) fn new(values: Vec<f32>, shape: &[usize]) -> Floats {
        let fits = shape.iter().product::<usize>() == values.len();
        let shape = if fits { shape.to_vec() } else { vec![values.len()] };
        Floats { values: UnsafeCell::new(values.into_boxed_slice()), shape }
    }
}

#[pymethods]
impl Floats {
    /// The array as numpy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // SAFETY: the box is never replaced, so that its pointer is that of the elements for as long as this object lives. No
        // reference is made, neither to the box nor to the elements, which others may read and write meanwhile.
        let pointer = unsafe { &raw mut **self.values.get() }.cast::<f32>();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "<f4")?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        interface.set_item("data", (pointer as usize, false))?;
        Ok(interface)
    }
}
