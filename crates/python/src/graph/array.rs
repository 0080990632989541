//! numpy's arrays as bytes, in place.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use quadriga_graph::{DType, Shape};
use quadriga_runtime::Values;

use crate::failure::{Failure, Outcome};

/// A contiguous numpy array, for the length of a call. As for numpy's own functions, the program must not change the elements
/// from another thread meanwhile.
pub(crate) struct ArrayView {
    /// Keeps the memory alive.
    _array: Py<PyAny>,
    pointer: *mut u8,
    bytes: usize,
    writable: bool,
    /// `None` for bytes of any type.
    dtype: Option<DType>,
    shape: Vec<usize>,
}

// SAFETY: the address is that of memory which `_array` keeps alive, and bytes of it are only reached through `as_bytes` and
// `as_bytes_mut`, whose rules do not depend on the thread.
unsafe impl Send for ArrayView {}

/// The type of numpy's name, and the bytes of an element; `None` as a type for plain bytes.
fn element(name: &str) -> Option<(Option<DType>, usize)> {
    Some(match name {
        "<f4" => (Some(DType::F32), 4),
        "<f2" => (Some(DType::F16), 2),
        "<f8" => (Some(DType::F64), 8),
        "<i4" => (Some(DType::I32), 4),
        "<i8" => (Some(DType::I64), 8),
        "<i2" => (Some(DType::I16), 2),
        "|i1" => (Some(DType::I8), 1),
        "|u1" => (None, 1),
        _ => return None,
    })
}

/// numpy's name of a type; bytes for those that it does not have.
pub(crate) fn numpy_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::F64 => "<f8",
        DType::I32 => "<i4",
        DType::I64 => "<i8",
        DType::I16 => "<i2",
        DType::I8 => "|i1",
        _ => "|u1",
    }
}

impl ArrayView {
    /// The memory of an array.
    pub(crate) fn new<'py>(array: &Bound<'py, PyAny>) -> Outcome<ArrayView> {
        let py = array.py();
        let class = py.import("numpy")?.getattr("ndarray")?;
        if !array.is_instance(&class)? {
            return Err(Failure::new("GraphError", "a numpy array is needed"));
        }
        // numpy's own attribute: that of a class derived from it could say anything.
        let interface = class.getattr("__array_interface__")?.call_method1("__get__", (array,))?;
        let interface = interface.cast::<PyDict>().map_err(PyErr::from)?;
        let get = |name: &str| -> Outcome<Bound<'py, PyAny>> {
            let found = interface.get_item(name)?;
            found.ok_or_else(|| Failure::new("GraphError", format!("the array has no {name}")))
        };
        let typestr: String = get("typestr")?.extract()?;
        let (dtype, size) = element(&typestr).ok_or_else(|| {
            let known =
                "float32, float16, float64, int8, int16, int32, int64, and uint8 for bytes of any type";
            Failure::new("GraphError", format!("arrays of {typestr} cannot be used; {known} can"))
        })?;
        if !get("strides")?.is_none() {
            return Err(Failure::new(
                "GraphError",
                "the array is not contiguous; use numpy.ascontiguousarray",
            ));
        }
        let shape: Vec<usize> = get("shape")?.cast::<PyTuple>().map_err(PyErr::from)?.extract()?;
        let (pointer, readonly): (usize, bool) = get("data")?.extract()?;
        let bytes = shape.iter().product::<usize>() * size;
        let pointer = pointer as *mut u8;
        Ok(ArrayView { _array: array.clone().unbind(), pointer, bytes, writable: !readonly, dtype, shape })
    }

    /// The array's shape.
    pub(crate) fn shape(&self) -> Outcome<Shape> {
        shape(&self.shape)
    }

    /// The element type; `None` for bytes of any type.
    pub(crate) fn element_type(&self) -> Option<DType> {
        self.dtype
    }

    /// An error unless the elements are of this type, or bytes of any.
    pub(crate) fn check_type(&self, name: &str, wanted: DType) -> Outcome {
        match self.dtype {
            Some(found) if found != wanted => Err(Failure::new(
                "GraphError",
                format!(
                    "{name} has type {wanted}, the array {found}; bytes of any type are an array of uint8"
                ),
            )),
            _ => Ok(()),
        }
    }

    /// The bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: numpy says that the array is contiguous and has this address, and `_array` keeps it alive. Bytes have no invalid
        // values; that no other thread changes them during a call is numpy's rule for all who read an array.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, to be written.
    pub(crate) fn as_bytes_mut(&mut self) -> Outcome<&mut [u8]> {
        if !self.writable {
            return Err(Failure::new("GraphError", "the array is read-only"));
        }
        if self.bytes == 0 {
            return Ok(&mut []);
        }
        // SAFETY: as above, and numpy says that the array can be written.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) })
    }
}

impl Values for ArrayView {
    fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    fn element_bytes(&self) -> usize {
        self.dtype.map_or(1, DType::block_bytes)
    }
}

/// A shape of at most four dimensions.
pub(crate) fn shape(dims: &[usize]) -> Outcome<Shape> {
    Shape::new(dims).ok_or_else(|| {
        Failure::new(
            "GraphError",
            format!("the shape {dims:?} has {} dimensions; there are at most 4", dims.len()),
        )
    })
}

/// A type by its name.
pub(crate) fn dtype(name: &str) -> Outcome<DType> {
    DType::from_name(name).ok_or_else(|| Failure::new("GraphError", format!("there is no type {name:?}")))
}
