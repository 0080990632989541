//! A kernel launch as data: function, grid and argument bytes.

use std::ffi::c_void;

use cudarc::driver::sys;
use quadriga_graph::Tensor;
use quadriga_runtime::BackendError;

use crate::context::Context;
use crate::kernels::Function;

/// A type that can be passed to a kernel byte for byte.
///
/// # Safety
/// The type is `repr(C)`, has no padding that matters, no references, and the same layout as the kernel's parameter.
pub(crate) unsafe trait Argument: Copy {}

// SAFETY: plain numbers.
unsafe impl Argument for u64 {}
// SAFETY: plain numbers.
unsafe impl Argument for i64 {}
// SAFETY: plain numbers.
unsafe impl Argument for u32 {}
// SAFETY: plain numbers.
unsafe impl Argument for i32 {}
// SAFETY: plain numbers.
unsafe impl Argument for f32 {}

/// A tensor as kernels see it.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Described {
    pub(crate) address: u64,
    pub(crate) dtype: u32,
    pub(crate) packed: u32,
    pub(crate) dims: [i64; 4],
    pub(crate) strides: [i64; 4],
}

// SAFETY: `struct Tensor` of common.cuh has the same fields in the same order.
unsafe impl Argument for Described {}

impl Described {
    pub(crate) fn new(tensor: &Tensor, address: u64) -> Described {
        Described {
            address,
            dtype: tensor.dtype().id(),
            packed: 0,
            dims: tensor.dims4().map(|d| d as i64),
            strides: tensor.strides().map(|s| s as i64),
        }
    }

    pub(crate) fn elements(&self) -> u64 {
        self.dims.iter().product::<i64>() as u64
    }

    pub(crate) fn rows(&self) -> u64 {
        self.dims.iter().take(3).product::<i64>() as u64
    }
}

/// One launch, ready to be issued any number of times.
pub(crate) struct Launch {
    function: Function,
    grid: [u32; 3],
    block: u32,
    shared: u32,
    /// Whether the kernel itself waits for the one before, and may start ahead of its end.
    early: bool,
    /// Argument bytes, each argument starting at a multiple of eight.
    bytes: Vec<u64>,
    starts: Vec<usize>,
}

impl Launch {
    pub(crate) fn new(function: Function, grid: [u32; 3], block: u32) -> Launch {
        Launch { function, grid, block, shared: 0, early: false, bytes: Vec::new(), starts: Vec::new() }
    }

    /// As many blocks of 256 threads as cover `threads`, within what a grid holds; kernels loop over the rest.
    pub(crate) fn over(function: Function, threads: u64) -> Launch {
        Launch::new(function, [threads.div_ceil(256).clamp(1, 1 << 20) as u32, 1, 1], 256)
    }

    pub(crate) fn shared(mut self, bytes: u32) -> Launch {
        self.shared = bytes;
        self
    }

    /// For kernels that call `after_kernel_before`: they may start while the kernel before is still running.
    pub(crate) fn early(mut self) -> Launch {
        self.early = true;
        self
    }

    pub(crate) fn arg<T: Argument>(mut self, value: T) -> Launch {
        let words = size_of::<T>().div_ceil(8);
        let start = self.bytes.len();
        self.starts.push(start);
        self.bytes.resize(start + words, 0);
        if let Some(to) = self.bytes.get_mut(start..) {
            // SAFETY: `to` holds at least the bytes of `T`, and is aligned to eight, which is enough for every
            // `Argument`; the value is plain bytes.
            unsafe { to.as_mut_ptr().cast::<T>().write(value) };
        }
        self
    }

    /// Puts the launch into a stream. `behind_launch`: what came before it there is a launch too, and there is a
    /// device that can start this one early.
    pub(crate) fn issue(
        &self,
        context: &Context,
        stream: sys::CUstream,
        behind_launch: bool,
    ) -> Result<(), BackendError> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        let mut pointers: Vec<*mut c_void> = self
            .starts
            .iter()
            .filter_map(|start| self.bytes.get(*start..))
            .map(|bytes| bytes.as_ptr().cast_mut().cast())
            .collect();
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = self.grid;
        let configuration = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(self.early && behind_launch),
        };
        // SAFETY: the function is loaded; the arguments were written with the types that the kernel declares and are
        // copied by the driver before it returns, as are configuration and attribute; what they point to is kept
        // alive by the program.
        let code = unsafe {
            sys::cuLaunchKernelEx(
                &raw const configuration,
                self.function.0,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        context.check("cuLaunchKernelEx", code)
    }
}
