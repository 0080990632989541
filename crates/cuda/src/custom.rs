//! Code of custom operations for NVIDIA GPUs.

use std::ffi::{CStr, CString};
use std::sync::Arc;

use quadriga_graph::CustomOp;
use sha2::{Digest, Sha256};

use crate::error::Error;

/// The family of backends in [`CustomKernel::backend_code`](quadriga_graph::CustomKernel::backend_code): the code is a
/// [`CustomCode`].
pub const FAMILY: &str = "cuda";

/// The most threads of a block.
const MAX_THREADS: u32 = 1024;

/// A kernel for a custom operation, as PTX, which the driver compiles, or as CUDA C++, which NVRTC does.
///
/// It is launched with one parameter for each input and a last one for the result, all of them by value and of the type that
/// [`CustomCode::HEADER`] declares, in blocks of [`threads`](CustomCode::threads) along x, at least one thread for each element of
/// the result up to 2³⁰ (a loop with the grid as its stride covers any number). Inputs have any strides that the operation's rule
/// accepts, and the result is contiguous. Where the operation works [in place](quadriga_graph::CustomKernel::in_place), the result
/// may or may not be at the address of that input. Launches of a stream come one after another.
///
/// ```no_run
/// use quadriga_cuda::CustomCode;
/// use quadriga_graph::{CustomFunction, DType};
///
/// let source = r#"
/// extern "C" __global__ void cube(Tensor x, Tensor y) {
///     long long elements = y.dims[0] * y.dims[1] * y.dims[2] * y.dims[3];
///     for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < elements; i += (long long)gridDim.x * blockDim.x) {
///         float v = ((const float *)x.address)[i];
///         ((float *)y.address)[i] = v * v * v;
///     }
/// }"#;
/// // SAFETY: the kernel reads x and writes y, both contiguous, within their bounds.
/// let code = unsafe { CustomCode::source(source, "cube")? };
/// let cube = CustomFunction::new(
///     "cube",
///     |inputs| match inputs {
///         [x] if x.is_contiguous() && x.dtype() == DType::F32 => Ok((DType::F32, *x.shape())),
///         _ => Err("one contiguous input of F32 is needed".into()),
///     },
///     |mut call| {
///         let (first, x) = (call.output.first(), call.input(0)?.f32()?);
///         call.output.f32()?.iter_mut().zip(&x[first..]).for_each(|(y, x)| *y = x * x * x);
///         Ok(())
///     },
/// )
/// .backend_code(quadriga_cuda::FAMILY, code)
/// .build();
/// # Ok::<(), quadriga_cuda::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CustomCode {
    code: Arc<KernelCode>,
    threads: u32,
}

#[derive(Debug)]
struct KernelCode {
    text: KernelText,
    entry: CString,
    /// Identifies text and entry.
    key: [u8; 32],
}

/// The text of a kernel.
#[derive(Debug)]
pub(crate) enum KernelText {
    /// For the driver.
    Ptx(CString),
    /// For NVRTC.
    Source(String),
}

impl CustomCode {
    /// The declaration of a kernel's parameters, which precedes [sources](CustomCode::source): address, [number of the
    /// type](quadriga_graph::DType::id), extents and byte strides, outermost first.
    pub const HEADER: &str = "struct Tensor {\n    unsigned long long address;\n    unsigned int type, reserved;\n    long long dims[4], strides[4];\n};\n";

    /// A kernel of a PTX module.
    ///
    /// # Errors
    /// A zero byte in the text or the name.
    ///
    /// # Safety
    /// The kernel has the parameters of the operation's inputs and result, reads and writes nothing but these within their bounds
    /// for every shape that the operation's rule accepts, writes nothing but the result, and ends.
    pub unsafe fn ptx(text: &str, entry: &str) -> Result<CustomCode, Error> {
        CustomCode::new(KernelText::Ptx(c_text(text)?), entry)
    }

    /// A kernel in CUDA C++, declared `extern "C" __global__`, behind [`CustomCode::HEADER`]. It is compiled when a session first
    /// uses it; without NVRTC that is an error.
    ///
    /// # Errors
    /// A zero byte in the text or the name.
    ///
    /// # Safety
    /// As for [`CustomCode::ptx`].
    pub unsafe fn source(text: &str, entry: &str) -> Result<CustomCode, Error> {
        c_text(text)?;
        CustomCode::new(KernelText::Source(format!("{}{text}", CustomCode::HEADER)), entry)
    }

    fn new(text: KernelText, entry: &str) -> Result<CustomCode, Error> {
        let entry = c_text(entry)?;
        let (kind, bytes) = match &text {
            KernelText::Ptx(ptx) => (0u8, ptx.as_bytes()),
            KernelText::Source(source) => (1, source.as_bytes()),
        };
        let hash =
            Sha256::new().chain_update([kind]).chain_update(entry.as_bytes_with_nul()).chain_update(bytes);
        let key = hash.finalize().into();
        Ok(CustomCode { code: Arc::new(KernelCode { text, entry, key }), threads: 256 })
    }

    /// Threads of a block: at least 1 and at most 1,024. [default: 256]
    #[must_use]
    pub fn threads(mut self, threads: u32) -> CustomCode {
        self.threads = threads.clamp(1, MAX_THREADS);
        self
    }

    /// The code of a custom operation, if it has some for this backend.
    pub(crate) fn of(op: &CustomOp) -> Option<CustomCode> {
        op.backend_code(FAMILY)?.downcast_ref::<CustomCode>().cloned()
    }

    pub(crate) fn text(&self) -> &KernelText {
        &self.code.text
    }

    pub(crate) fn entry(&self) -> &CStr {
        &self.code.entry
    }

    pub(crate) fn key(&self) -> [u8; 32] {
        self.code.key
    }

    pub(crate) fn block(&self) -> u32 {
        self.threads
    }
}

fn c_text(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::CustomCode { log: "there is a zero byte in it".into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_code_has_one_key_and_zero_bytes_are_refused() {
        // SAFETY: nothing is launched here.
        let code = |text: &str, entry: &str, ptx: bool| unsafe {
            if ptx { CustomCode::ptx(text, entry) } else { CustomCode::source(text, entry) }
        };
        let key = |text: &str, entry: &str, ptx| code(text, entry, ptx).unwrap().key();
        assert_eq!(key("a", "b", true), key("a", "b", true));
        let others = [key("a", "c", true), key("c", "b", true), key("a", "b", false), key("ba", "", true)];
        assert!(!others.contains(&key("a", "b", true)));
        for (text, entry) in [("a\0", "b"), ("a", "b\0")] {
            for ptx in [false, true] {
                assert!(code(text, entry, ptx).unwrap_err().to_string().contains("zero byte"));
            }
        }
        let threads = |n| code("a", "b", true).unwrap().threads(n).block();
        assert_eq!([threads(0), threads(64), threads(5000)], [1, 64, 1024]);
    }
}
