//! The graph builder: leaves, names, scopes, outputs and the finished graph.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use quadriga::graph::{Data, GraphBuilder, Scope, Shape, Value, Weight};

use crate::arguments::{UserData, array, required, text};
use crate::dtype::{self, qd_dtype};
use crate::graph::qd_graph;
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::status::{Failure, Outcome, qd_error, qd_status};
use crate::tensor::{QD_NO_TENSOR, qd_tensor, qd_tensor_info};

/// Builds a graph. The first error is kept, with what it was about; everything after it is ignored, and
/// qd_builder_finish returns it.
pub struct qd_builder {
    _opaque: (),
}

impl Handle for qd_builder {
    type Object = Mutex<Construction>;
    const NAME: &'static str = "qd_builder";
}

/// A builder, with the values and scopes that refer to it.
pub(crate) struct Construction {
    /// `None` once the graph is finished.
    builder: Option<NonNull<GraphBuilder>>,
    values: HashMap<qd_tensor, Value<'static>>,
    scopes: Vec<Scope<'static>>,
    failure: Option<Failure>,
}

// SAFETY: the builder is owned, and what refers to it moves to another thread together with it.
unsafe impl Send for Construction {}

impl Construction {
    fn new() -> Construction {
        let builder = NonNull::from(Box::leak(Box::new(GraphBuilder::new())));
        Construction { builder: Some(builder), values: HashMap::new(), scopes: Vec::new(), failure: None }
    }

    /// The builder. The reference is for values and scopes that this object keeps, and drops before the builder.
    pub(crate) fn builder(&self) -> Outcome<&'static GraphBuilder> {
        let finished = || Failure::argument("the graph is finished: make another builder");
        // SAFETY: it was leaked in `new`, and is taken back by `take` alone, after all that refers to it.
        self.builder.map(|builder| unsafe { builder.as_ref() }).ok_or_else(finished)
    }

    /// The builder itself, once nothing refers to it.
    fn take(&mut self) -> Option<Box<GraphBuilder>> {
        self.values.clear();
        while self.scopes.pop().is_some() {}
        // SAFETY: it was leaked in `new`, and nothing refers to it any more.
        self.builder.take().map(|builder| unsafe { Box::from_raw(builder.as_ptr()) })
    }

    /// A tensor of this builder.
    pub(crate) fn value(&self, tensor: qd_tensor) -> Outcome<Value<'static>> {
        let unknown = || match tensor {
            QD_NO_TENSOR => Failure::argument("a tensor is missing"),
            _ => Failure::argument(format!("tensor {tensor} is not one of this builder")),
        };
        self.values.get(&tensor).copied().ok_or_else(unknown)
    }

    /// A tensor that may be missing.
    pub(crate) fn optional(&self, tensor: qd_tensor) -> Outcome<Option<Value<'static>>> {
        if tensor == QD_NO_TENSOR { Ok(None) } else { self.value(tensor).map(Some) }
    }

    /// Several tensors.
    pub(crate) fn values(&self, tensors: &[qd_tensor]) -> Outcome<Vec<Value<'static>>> {
        tensors.iter().map(|tensor| self.value(*tensor)).collect()
    }

    fn keep(&mut self, value: Value<'static>) -> qd_tensor {
        let number = qd_tensor::try_from(value.id().index()).unwrap_or(QD_NO_TENSOR);
        self.values.insert(number, value);
        number
    }
}

impl Drop for Construction {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Adds a tensor to a graph. A failure is kept for the end.
pub(crate) fn add(
    builder: *mut qd_builder,
    operation: &str,
    make: impl FnOnce(&Construction) -> Outcome<Value<'static>>,
) -> qd_tensor {
    guard::value(QD_NO_TENSOR, || {
        let object = handle::get(builder)?;
        let mut construction = exclusive(&object, "builder")?;
        if construction.failure.is_some() {
            return Ok(QD_NO_TENSOR);
        }
        match make(&construction) {
            Ok(value) => Ok(construction.keep(value)),
            Err(failure) => {
                construction.failure =
                    Some(Failure { message: format!("{operation}: {}", failure.message), ..failure });
                Ok(QD_NO_TENSOR)
            }
        }
    })
}

/// Does something to a graph that makes no tensor.
fn note(builder: *mut qd_builder, operation: &str, act: impl FnOnce(&mut Construction) -> Outcome<()>) {
    guard::value((), || {
        let object = handle::get(builder)?;
        let mut construction = exclusive(&object, "builder")?;
        if construction.failure.is_some() {
            return Ok(());
        }
        if let Err(failure) = act(&mut construction) {
            construction.failure =
                Some(Failure { message: format!("{operation}: {}", failure.message), ..failure });
        }
        Ok(())
    });
}

/// A shape.
///
/// # Safety
/// As of [`array`].
pub(crate) unsafe fn shape(dims: *const usize, rank: usize) -> Outcome<Shape> {
    // SAFETY: the caller's promise.
    let dims = unsafe { array(dims, rank.min(usize::from(u8::MAX)), "dims") }?;
    Shape::new(dims)
        .ok_or_else(|| Failure::argument(format!("a tensor has at most 4 dimensions, not {rank}")))
}

/// A builder of an empty graph.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_builder_new(error: Option<&mut qd_error>) -> *mut qd_builder {
    guard::handle(error, || Ok(Mutex::new(Construction::new())))
}

/// Frees a builder, finished or not.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_builder_free(builder: *mut qd_builder) {
    guard::free(builder);
}

/// The finished graph, or the first error. The builder is empty afterwards, and is still to be freed.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_builder_finish(builder: *mut qd_builder, error: Option<&mut qd_error>) -> *mut qd_graph {
    guard::handle(error, || {
        let object = handle::get(builder)?;
        let mut construction = exclusive(&object, "builder")?;
        construction.builder()?;
        let (built, failure) = (construction.take(), construction.failure.take());
        if let Some(failure) = failure {
            return Err(failure);
        }
        Ok(required(built, "the builder")?.finish()?)
    })
}

/// Declares a tensor that the caller sets before each run. Dimensions are outermost first: rows, then columns (ggml's are the
/// other way round).
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_input(
    builder: *mut qd_builder,
    name: *const c_char,
    dtype: qd_dtype,
    dims: *const usize,
    rank: usize,
) -> qd_tensor {
    add(builder, "input", |c| {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, shape) = unsafe { (text(name, "name")?, shape(dims, rank)?) };
        Ok(c.builder()?.input(name, dtype::from_id(dtype)?, shape))
    })
}

/// Declares a tensor that keeps its content between runs, such as a KV cache; zero at first.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_state(
    builder: *mut qd_builder,
    name: *const c_char,
    dtype: qd_dtype,
    dims: *const usize,
    rank: usize,
) -> qd_tensor {
    add(builder, "state", |c| {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, shape) = unsafe { (text(name, "name")?, shape(dims, rank)?) };
        Ok(c.builder()?.state(name, dtype::from_id(dtype)?, shape))
    })
}

/// Declares a constant; its bytes are copied.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_constant(
    builder: *mut qd_builder,
    name: *const c_char,
    dtype: qd_dtype,
    dims: *const usize,
    rank: usize,
    data: *const c_void,
    bytes: usize,
) -> qd_tensor {
    add(builder, "constant", |c| {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, shape, data) =
            unsafe { (text(name, "name")?, shape(dims, rank)?, array(data.cast::<u8>(), bytes, "data")?) };
        Ok(c.builder()?.constant(name, dtype::from_id(dtype)?, shape, data.to_vec()))
    })
}

/// Declares a weight. Its bytes are copied; with NULL, qd_session_set_weight sets them later.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_weight(
    builder: *mut qd_builder,
    name: *const c_char,
    dtype: qd_dtype,
    dims: *const usize,
    rank: usize,
    data: *const c_void,
    bytes: usize,
) -> qd_tensor {
    add(builder, "weight", |c| {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, shape) = unsafe { (text(name, "name")?, shape(dims, rank)?) };
        let dtype = dtype::from_id(dtype)?;
        let weight = if data.is_null() {
            Weight::new(dtype, shape)
        } else {
            // SAFETY: the rules of the header for arrays.
            Weight::with_data(dtype, shape, unsafe { array(data.cast::<u8>(), bytes, "data") }?.to_vec())
        };
        Ok(c.builder()?.weight(name, weight))
    })
}

/// Is told that the library no longer uses memory of the caller, on any thread.
pub type qd_release_callback = Option<extern "C" fn(user_data: *mut c_void)>;

/// Declares a weight whose bytes stay where they are. The caller keeps them unchanged until `release` is called, on any thread:
/// when nothing uses them any more, or at once if there is an error.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_weight_in_place(
    builder: *mut qd_builder,
    name: *const c_char,
    dtype: qd_dtype,
    dims: *const usize,
    rank: usize,
    data: *const c_void,
    bytes: usize,
    release: qd_release_callback,
    user_data: *mut c_void,
) -> qd_tensor {
    let owner = ReleasedMemory { start: data.cast(), bytes, release, data: UserData(user_data) };
    add(builder, "weight", move |c| {
        // SAFETY: the rules of the header for texts and arrays.
        let (name, shape) = unsafe { (text(name, "name")?, shape(dims, rank)?) };
        // SAFETY: as above; the check of the address.
        unsafe { array(owner.start, owner.bytes, "data") }?;
        let data = Data::new(Arc::new(owner));
        Ok(c.builder()?.weight(name, Weight::with_data(dtype::from_id(dtype)?, shape, data)))
    })
}

/// Memory of the caller, until it is released.
struct ReleasedMemory {
    start: *const u8,
    bytes: usize,
    release: qd_release_callback,
    data: UserData,
}

// SAFETY: the caller keeps the bytes unchanged until they are released, and says so for any thread.
unsafe impl Send for ReleasedMemory {}
// SAFETY: as above.
unsafe impl Sync for ReleasedMemory {}

impl AsRef<[u8]> for ReleasedMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the address was checked when the weight was declared, and the caller keeps the bytes.
        unsafe { array(self.start, self.bytes, "data") }.unwrap_or(&[])
    }
}

impl Drop for ReleasedMemory {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            release(self.data.pointer());
        }
    }
}

/// Makes a tensor an output: it can be read under this name after a run.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_output(builder: *mut qd_builder, name: *const c_char, tensor: qd_tensor) {
    note(builder, "output", |c| {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        c.builder()?.output(name, c.value(tensor)?);
        Ok(())
    });
}

/// Labels a result; its name in plans and messages is the scope and this label. Returns the tensor.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_set_name(
    builder: *mut qd_builder,
    tensor: qd_tensor,
    label: *const c_char,
) -> qd_tensor {
    add(builder, "name", |c| {
        // SAFETY: the rules of the header for texts.
        let label = unsafe { text(label, "label") }?;
        Ok(c.value(tensor)?.named(label))
    })
}

/// Opens a scope: names of results begin with its name, until qd_scope_end.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_scope_begin(builder: *mut qd_builder, name: *const c_char) {
    note(builder, "scope", |c| {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        let scope = c.builder()?.scope(name);
        c.scopes.push(scope);
        Ok(())
    });
}

/// Closes the scope that was opened last.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scope_end(builder: *mut qd_builder) {
    note(builder, "scope", |c| match c.scopes.pop() {
        Some(_) => Ok(()),
        None => Err(Failure::argument("there is no open scope")),
    });
}

/// Everything built before is executed before everything built after.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_barrier(builder: *mut qd_builder) {
    note(builder, "barrier", |c| {
        c.builder()?.barrier();
        Ok(())
    });
}

/// Type and shape of a tensor of a graph that is being built. Its name and bytes are known once the graph is finished.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_builder_tensor(
    builder: *mut qd_builder,
    tensor: qd_tensor,
    info: Option<&mut qd_tensor_info>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(builder)?;
        let construction = exclusive(&object, "builder")?;
        let value = construction.value(tensor)?;
        *required(info, "info")? = qd_tensor_info::new(value.dtype(), &value.shape(), value.strides());
        Ok(())
    })
}
