//! Operations of the caller's own: a shape rule and code for the CPU.

use std::collections::HashSet;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, PoisonError};

use quadriga::graph::{CustomCall, CustomError, CustomKernel, CustomOp, DType, Shape, Tensor};

use crate::arguments::{Parameters, UserData, array, parameters, text};
use crate::builder::{add, qd_builder};
use crate::callbacks::keep_reason;
use crate::dtype;
use crate::guard;
use crate::handle::{self, Handle};
use crate::status::{Failure, Outcome, QD_STATUS_OK, qd_error, qd_status};
use crate::tensor::{QD_MAX_DIMS, qd_tensor, qd_tensor_info};

/// An operation of the caller's own, for any number of graphs.
pub struct qd_custom_op {
    _opaque: (),
}

impl Handle for qd_custom_op {
    type Object = CustomOp;
    const NAME: &'static str = "qd_custom_op";
}

/// An input of a custom operation.
#[repr(C)]
pub struct qd_custom_input {
    /// Type, shape and strides.
    pub info: qd_tensor_info,
    /// The first element; NULL for the input that the result overwrites: its elements are in the output.
    pub data: *const c_void,
}

/// A part of a result to compute.
#[repr(C)]
pub struct qd_custom_call {
    /// The inputs.
    pub inputs: *const qd_custom_input,
    /// How many.
    pub input_count: usize,
    /// The first unit to compute, of all units of the result; units are rows unless the operation says otherwise.
    pub first_unit: usize,
    /// How many units to compute.
    pub unit_count: usize,
    /// The number of units of the whole result.
    pub all_units: usize,
    /// Type and shape of the whole result, which is contiguous.
    pub output: qd_tensor_info,
    /// The first element of this part.
    pub output_data: *mut c_void,
    /// The number of that element in the whole result.
    pub output_first: usize,
    /// Bytes of this part.
    pub output_bytes: usize,
    /// Scratch memory of this thread.
    pub scratch: *mut c_void,
    /// How much.
    pub scratch_bytes: usize,
}

/// The result's type and shape: the callback sets `output->dtype`, `rank` and `dims`; they begin as those of input 0.
/// QD_STATUS_OK, or another status with the reason why the operation does not take these inputs. It runs on the thread that
/// builds a graph.
pub type qd_infer_callback = Option<
    extern "C" fn(
        context: *mut c_void,
        inputs: *const qd_tensor_info,
        input_count: usize,
        output: *mut qd_tensor_info,
        error: *mut qd_error,
    ) -> qd_status,
>;

/// Computes some units of a result: QD_STATUS_OK, or another status with the reason. Several threads call it at the same time
/// for different units.
pub type qd_compute_callback = Option<
    extern "C" fn(context: *mut c_void, call: *const qd_custom_call, error: *mut qd_error) -> qd_status,
>;

/// An operation of the caller's own as a table of functions.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_custom_table {
    /// The size of this structure.
    pub struct_size: usize,
    /// Its name in plans and messages.
    pub name: *const c_char,
    /// For the functions.
    pub context: *mut c_void,
    /// The rule.
    pub infer: qd_infer_callback,
    /// The code.
    pub compute: qd_compute_callback,
    /// Called once, on any thread, when nothing uses the operation any more, or at once after an error; may be NULL.
    pub destroy: Option<extern "C" fn(context: *mut c_void)>,
    /// The input, one of the first eight, that the result overwrites, or -1. It has the result's type and shape.
    pub in_place: i32,
    /// Equal parts of the result, for threads to compute; 0: its rows.
    pub units: usize,
    /// Bytes of scratch memory for each thread.
    pub scratch_bytes: usize,
    /// What distinguishes this operation from others of the same name and functions, or NULL: then it equals only itself,
    /// and a graph that is built again does not find its plan.
    pub attributes: *const c_void,
    /// How many bytes.
    pub attribute_bytes: usize,
}

// SAFETY: numbers, addresses, and functions that may be NULL; the first field is the size.
unsafe impl Parameters for qd_custom_table {
    const NAME: &'static str = "qd_custom_table";

    fn defaults() -> qd_custom_table {
        qd_custom_table {
            struct_size: size_of::<qd_custom_table>(),
            name: std::ptr::null(),
            context: std::ptr::null_mut(),
            infer: None,
            compute: None,
            destroy: None,
            in_place: -1,
            units: 0,
            scratch_bytes: 0,
            attributes: std::ptr::null(),
            attribute_bytes: 0,
        }
    }
}

/// A table without functions, to be filled in.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_custom_default_params() -> qd_custom_table {
    qd_custom_table::defaults()
}

/// Makes an operation of a table, which is copied.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_custom_op_new(
    table: *const qd_custom_table,
    error: Option<&mut qd_error>,
) -> *mut qd_custom_op {
    guard::handle(error, || {
        if table.is_null() {
            return Err(Failure::null("table"));
        }
        // SAFETY: the rules of the header for parameters.
        let table = unsafe { parameters(table) }?;
        let owner = Context { data: UserData(table.context), destroy: table.destroy };
        // SAFETY: the rules of the header for texts and arrays.
        let (name, attributes) = unsafe {
            let attributes = array(table.attributes.cast::<u8>(), table.attribute_bytes, "attributes")?;
            (text(table.name, "name")?, (!table.attributes.is_null()).then_some(attributes))
        };
        let (infer, compute) = match (table.infer, table.compute) {
            (Some(infer), Some(compute)) => (infer, compute),
            (None, _) => return Err(Failure::null("infer")),
            (_, None) => return Err(Failure::null("compute")),
        };
        let in_place = match table.in_place {
            -1 => None,
            input => {
                let input = usize::try_from(input).ok().filter(|input| *input < IN_PLACE_INPUTS);
                Some(input.ok_or_else(|| {
                    let most = IN_PLACE_INPUTS - 1;
                    Failure::argument(format!(
                        "in_place is {}; it is -1, or from 0 to {most}",
                        table.in_place
                    ))
                })?)
            }
        };
        // Operations with other functions are others, whatever their attributes.
        let attributes = attributes.map(|bytes| {
            let functions = [infer as usize, compute as usize];
            functions.iter().flat_map(|address| address.to_le_bytes()).chain(bytes.iter().copied()).collect()
        });
        Ok(CustomOp::new(Kernel {
            name: interned(name),
            infer,
            compute,
            in_place,
            units: table.units,
            scratch: table.scratch_bytes,
            attributes,
            owner,
        }))
    })
}

/// Frees an operation. Graphs that use it keep it.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_custom_op_free(op: *mut qd_custom_op) {
    guard::free(op);
}

/// Applies an operation of the caller's own to tensors.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_custom(
    builder: *mut qd_builder,
    op: *const qd_custom_op,
    tensors: *const qd_tensor,
    tensor_count: usize,
) -> qd_tensor {
    add(builder, "custom", |c| {
        let op = handle::get(op)?;
        // SAFETY: the rules of the header for arrays.
        let tensors = c.values(unsafe { array(tensors, tensor_count, "tensors") }?)?;
        match tensors.split_first() {
            Some((first, others)) => Ok(first.custom(&op, others)),
            None => Err(Failure::argument("there are no tensors")),
        }
    })
}

/// How many inputs a result can overwrite one of.
const IN_PLACE_INPUTS: usize = 8;

/// Names of operations, which live as long as the program; each is kept once.
static NAMES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);

fn interned(name: &str) -> &'static str {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_with(HashSet::new);
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(kept);
    kept
}

/// The caller's context, destroyed when nothing uses it any more.
struct Context {
    data: UserData,
    destroy: Option<extern "C" fn(*mut c_void)>,
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            destroy(self.data.pointer());
        }
    }
}

/// The caller's functions as a kernel.
struct Kernel {
    name: &'static str,
    infer: extern "C" fn(
        *mut c_void,
        *const qd_tensor_info,
        usize,
        *mut qd_tensor_info,
        *mut qd_error,
    ) -> qd_status,
    compute: extern "C" fn(*mut c_void, *const qd_custom_call, *mut qd_error) -> qd_status,
    in_place: Option<usize>,
    units: usize,
    scratch: usize,
    attributes: Option<Vec<u8>>,
    owner: Context,
}

/// The status of a callback as a result.
fn checked(status: qd_status, error: &qd_error) -> Result<(), CustomError> {
    match status {
        QD_STATUS_OK => Ok(()),
        status => {
            let reason = error.text(&format!("the callback returned {status}"));
            keep_reason(&reason);
            Err(reason.into())
        }
    }
}

impl CustomKernel for Kernel {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        let infos: Vec<qd_tensor_info> = inputs.iter().map(|tensor| qd_tensor_info::of(tensor)).collect();
        let scalar = || qd_tensor_info::new(DType::F32, &Shape::from([]), [4; QD_MAX_DIMS]);
        let mut output = infos.first().copied().unwrap_or_else(scalar);
        let mut error = qd_error::empty();
        let inputs = infos.as_ptr();
        let status =
            (self.infer)(self.owner.data.pointer(), inputs, infos.len(), &raw mut output, &raw mut error);
        checked(status, &error)?;
        inferred(&output).map_err(|failure| failure.message.into())
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let mut inputs = Vec::with_capacity(call.inputs.len());
        for (number, input) in call.inputs.iter().enumerate() {
            let data = match self.in_place == Some(number) {
                true => std::ptr::null(),
                false => input.bytes()?.as_ptr().cast(),
            };
            inputs.push(qd_custom_input {
                info: qd_tensor_info::new(input.dtype(), input.shape(), input.strides()),
                data,
            });
        }
        let (dtype, shape) = (call.output.dtype(), *call.output.shape());
        let strides = shape.contiguous(dtype).map_or([0; QD_MAX_DIMS], |(strides, _)| strides.0);
        let first = call.output.first();
        let part = call.output.bytes();
        let described = qd_custom_call {
            inputs: inputs.as_ptr(),
            input_count: inputs.len(),
            first_unit: call.units.start,
            unit_count: call.units.len(),
            all_units: call.unit_count,
            output: qd_tensor_info::new(dtype, &shape, strides),
            output_data: part.as_mut_ptr().cast(),
            output_first: first,
            output_bytes: part.len(),
            scratch: call.scratch.as_mut_ptr().cast(),
            scratch_bytes: call.scratch.len(),
        };
        let mut error = qd_error::empty();
        let status = (self.compute)(self.owner.data.pointer(), &raw const described, &raw mut error);
        checked(status, &error)
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        self.attributes.clone()
    }

    fn in_place(&self) -> Option<usize> {
        self.in_place
    }

    fn units(&self, _: &[&Tensor], output: &Tensor) -> usize {
        if self.units == 0 { output.shape().rows() } else { self.units }
    }

    fn scratch_bytes(&self, _: &[&Tensor], _: &Tensor) -> usize {
        self.scratch
    }
}

/// What a rule has written.
fn inferred(output: &qd_tensor_info) -> Outcome<(DType, Shape)> {
    let rank = output.rank as usize;
    let dims = QD_MAX_DIMS.checked_sub(rank).and_then(|skip| output.dims.get(skip..));
    let dims = dims.ok_or_else(|| Failure::argument(format!("a result of {rank} dimensions; at most 4")))?;
    let shape = Shape::new(dims).ok_or_else(|| Failure::argument("a result of more than 4 dimensions"))?;
    Ok((dtype::from_id(output.dtype)?, shape))
}
