//! A shared handle on a custom operation, with its identity.

use std::any::{Any, TypeId};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::call::{CustomCall, CustomValues};
use super::error::CustomError;
use super::kernel::CustomKernel;
use crate::dtype::DType;
use crate::fingerprint::Mixer;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// Inputs that a result can overwrite.
const IN_PLACE: [&[usize]; 8] = [&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7]];

/// The number of the next operation without attributes; numbers are never used again.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// What makes two operations the same.
#[derive(Clone, PartialEq, Eq)]
enum Identity {
    /// An object without attributes, by a number of its own.
    Object(u64),
    /// A type with attributes.
    Attributes(TypeId, Vec<u8>),
}

/// A custom operation: a shared [`CustomKernel`]. Clones are the same operation.
///
/// Two operations are equal if they are clones, or of one type with equal names and
/// [attributes](CustomKernel::attributes). The fingerprint of a graph distinguishes them in the same way; it is then only
/// valid in this process.
///
/// Every method calls the kernel and turns a panic into an error.
#[derive(Clone)]
pub struct CustomOp {
    kernel: Arc<dyn CustomKernel>,
    identity: Arc<Identity>,
    name: &'static str,
    description: &'static str,
    in_place: &'static [usize],
    /// Why the operation cannot be used: the kernel panicked when it was made.
    broken: Option<Arc<str>>,
}

impl CustomOp {
    /// An operation of a kernel. If the kernel's name, description, attributes or in-place input panic, [every use of the
    /// operation in a graph](CustomOp::infer) is an error.
    pub fn new(kernel: impl CustomKernel) -> CustomOp {
        CustomOp::shared(Arc::new(kernel))
    }

    fn shared<K: CustomKernel>(kernel: Arc<K>) -> CustomOp {
        let asked =
            caught(|| Ok((kernel.attributes(), kernel.in_place(), kernel.name(), kernel.description())));
        let (broken, (attributes, in_place, name, description)) = match asked {
            Ok(answers) => (None, answers),
            Err(why) => (Some(why.into()), (None, None, "custom", "")),
        };
        let identity = match attributes {
            Some(attributes) => Identity::Attributes(TypeId::of::<K>(), attributes),
            None => Identity::Object(NEXT.fetch_add(1, Ordering::Relaxed)),
        };
        let in_place = match in_place {
            // An input past the eighth is refused by the inference rule.
            Some(input) => IN_PLACE.get(input).copied().unwrap_or(&[usize::MAX]),
            None => &[],
        };
        CustomOp { kernel, identity: Arc::new(identity), name, description, in_place, broken }
    }

    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The computation in a line.
    pub fn description(&self) -> &'static str {
        self.description
    }

    /// The input that the result overwrites, if there is one.
    pub fn in_place(&self) -> Option<usize> {
        self.in_place.first().copied()
    }

    pub(crate) fn in_place_inputs(&self) -> &'static [usize] {
        self.in_place
    }

    /// The kernel.
    pub fn kernel(&self) -> &dyn CustomKernel {
        &*self.kernel
    }

    /// The result's type and shape.
    ///
    /// # Errors
    /// The kernel refuses the inputs or panics, or an in-place input differs from the result.
    pub fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), String> {
        if let Some(why) = &self.broken {
            return Err(why.to_string());
        }
        let (dtype, shape) = caught(|| self.kernel.infer(inputs))?;
        if let Some(input) = self.in_place() {
            let Some(tensor) = IN_PLACE.get(input).and_then(|_| inputs.get(input)) else {
                return Err(format!(
                    "it overwrites input {input}, which does not exist or is past the eighth"
                ));
            };
            if tensor.dtype() != dtype || tensor.dims4() != shape.dims4() {
                return Err(format!(
                    "the result {dtype} {shape} cannot overwrite input {input}, which is {} {}",
                    tensor.dtype(),
                    tensor.shape()
                ));
            }
        }
        Ok((dtype, shape))
    }

    /// Into how many equal parts the result is divided; at least 1.
    ///
    /// # Errors
    /// The kernel panics, or its number does not divide the result into whole blocks.
    pub fn units(&self, inputs: &[&Tensor], output: &Tensor) -> Result<usize, String> {
        let units = caught(|| Ok(self.kernel.units(inputs, output)))?;
        let elements = output.elements();
        if elements == 0 {
            return Ok(1);
        }
        let whole = units > 0
            && elements.is_multiple_of(units)
            && (elements / units).is_multiple_of(output.dtype().block_len());
        if whole {
            Ok(units)
        } else {
            Err(format!("{} {} cannot be divided into {units} equal units", output.dtype(), output.shape()))
        }
    }

    /// Bytes of scratch memory for each thread.
    ///
    /// # Errors
    /// The kernel panics.
    pub fn scratch_bytes(&self, inputs: &[&Tensor], output: &Tensor) -> Result<usize, String> {
        caught(|| Ok(self.kernel.scratch_bytes(inputs, output)))
    }

    /// About how many arithmetic operations it takes; one per element if the kernel panics.
    pub fn operations(&self, inputs: &[&Tensor], output: &Tensor) -> u64 {
        caught(|| Ok(self.kernel.operations(inputs, output))).unwrap_or(output.elements() as u64)
    }

    /// Computes some units.
    ///
    /// # Errors
    /// The kernel fails or panics.
    pub fn compute(&self, call: CustomCall<'_>) -> Result<(), String> {
        caught(|| self.kernel.compute(call))
    }

    /// The result in float64, if the kernel has a reference.
    ///
    /// # Errors
    /// The reference fails or panics, or returns the wrong number of values.
    pub fn reference(&self, inputs: &[CustomValues], output: &Tensor) -> Option<Result<Vec<f64>, String>> {
        let values = caught(|| self.kernel.reference(inputs, output).transpose()).transpose()?;
        Some(values.and_then(|values| match values.len() == output.elements() {
            true => Ok(values),
            false => Err(format!("the reference has {} values for {}", values.len(), output.shape())),
        }))
    }

    /// Code for another backend; `None` if the kernel has none, or panics.
    pub fn backend_code(&self, family: &str) -> Option<Arc<dyn Any + Send + Sync>> {
        caught(|| Ok(self.kernel.backend_code(family))).ok().flatten()
    }

    pub(crate) fn mix(&self, mix: &mut Mixer) {
        match &*self.identity {
            Identity::Object(number) => {
                mix.word(1);
                mix.word(*number);
            }
            Identity::Attributes(kind, attributes) => {
                mix.word(2);
                kind.hash(&mut MixedHash(mix));
                mix.bytes(attributes);
            }
        }
    }
}

impl PartialEq for CustomOp {
    fn eq(&self, other: &CustomOp) -> bool {
        self.name == other.name && self.identity == other.identity
    }
}

impl fmt::Debug for CustomOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomOp({})", self.name)
    }
}

/// Passes what a hash is made of to a fingerprint.
struct MixedHash<'a>(&'a mut Mixer);

impl Hasher for MixedHash<'_> {
    fn finish(&self) -> u64 {
        0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.bytes(bytes);
    }
}

/// Calls the caller's code; an error or a panic becomes a text.
fn caught<T>(call: impl FnOnce() -> Result<T, CustomError>) -> Result<T, String> {
    // The code sees only what it owns and what it is given; a run that failed leaves results that nobody reads.
    match catch_unwind(AssertUnwindSafe(|| call().map_err(|error| error.to_string()))) {
        Ok(result) => result,
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".into());
            // Dropping a payload may panic, too; the second payload is then leaked.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(second);
            }
            Err(format!("it panicked: {text}"))
        }
    }
}
