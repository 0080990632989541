//! GGUF files: their tensors as weights of a graph, without copies.

use std::ffi::c_char;

use quadriga::gguf::File;

use crate::arguments::{give_text, text};
use crate::builder::{add, qd_builder};
use crate::guard;
use crate::handle::{self, Handle};
use crate::status::{Failure, QD_STATUS_NOT_FOUND, file_failure, qd_error, qd_status};
use crate::tensor::qd_tensor;

/// A GGUF file of any content, mapped into memory.
pub struct qd_gguf {
    _opaque: (),
}

impl Handle for qd_gguf {
    type Object = File;
    const NAME: &'static str = "qd_gguf";
}

/// Opens a GGUF file, or the first part of a split one, and checks every header, type, shape and range.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_gguf_open(path: *const c_char, error: Option<&mut qd_error>) -> *mut qd_gguf {
    guard::handle(error, || {
        // SAFETY: the rules of the header for texts.
        let path = unsafe { text(path, "path") }?;
        File::open(path).map_err(|error| file_failure(&error))
    })
}

/// Frees a file. Graphs with its weights keep it.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_gguf_free(file: *mut qd_gguf) {
    guard::free(file);
}

/// The number of tensors of a file; 0 without one.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_gguf_tensor_count(file: *const qd_gguf) -> usize {
    guard::value(0, || Ok(handle::get(file)?.tensor_count()))
}

/// The name of a tensor of a file, counted from 0.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_gguf_tensor_name(
    file: *const qd_gguf,
    index: usize,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let file = handle::get(file)?;
        let tensor = file.tensors().nth(index).ok_or_else(|| {
            let message = format!("there is no tensor {index}: the file has {}", file.tensor_count());
            Failure::new(QD_STATUS_NOT_FOUND, message)
        })?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(tensor.name(), buffer, capacity, needed) }
    })
}

/// Declares a weight with the type, shape and bytes of a tensor of a file, and its name.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_gguf_weight(
    builder: *mut qd_builder,
    file: *const qd_gguf,
    name: *const c_char,
) -> qd_tensor {
    add(builder, "weight", |c| {
        let file = handle::get(file)?;
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let tensor = file.tensor(name).map_err(|error| file_failure(&error))?;
        Ok(c.builder()?.weight(name, tensor))
    })
}
