//! A kernel launch as data: function, grid and argument bytes.

use std::ffi::c_void;

use cudarc::driver::sys;
use quadriga_graph::{DType, Tensor};
use quadriga_runtime::BackendError;

use crate::context::Context;
use crate::kernels::Function;

/// A type that can be passed to a kernel as bytes.
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

/// A tensor as kernels see it: `struct Tensor` of tensor.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct TensorArg {
    pub(crate) address: u64,
    pub(crate) dtype: u32,
    pub(crate) reserved: u32,
    pub(crate) dims: [i64; 4],
    pub(crate) strides: [i64; 4],
}

// SAFETY: `struct Tensor` of tensor.cuh has the same fields in the same order.
unsafe impl Argument for TensorArg {}

impl TensorArg {
    pub(crate) fn new(tensor: &Tensor, address: u64) -> TensorArg {
        TensorArg {
            address,
            dtype: tensor.dtype().id(),
            reserved: 0,
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

/// Whether a type is stored element by element.
pub(crate) fn is_plain(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::I32)
}

/// Whether a tensor is contiguous f32 in rows of whole, aligned float4s.
pub(crate) fn is_dense_f32(t: &TensorArg) -> bool {
    let [_, d1, d2, d3] = t.dims;
    t.dtype == DType::F32.id()
        && t.address.is_multiple_of(16)
        && d3 % 4 == 0
        && t.strides[3] == 4
        && (t.rows() == 1 || t.strides == [d1 * d2 * d3 * 4, d2 * d3 * 4, d3 * 4, 4])
}

/// Whether the rows of a tensor are contiguous, and start at multiples of `alignment`.
pub(crate) fn has_dense_rows(t: &TensorArg, dtype: DType, alignment: u64) -> bool {
    t.dtype == dtype.id()
        && t.strides[3] == dtype.block_bytes() as i64
        && t.address.is_multiple_of(alignment)
        && t.strides.iter().take(3).all(|stride| stride % alignment as i64 == 0)
}

/// One launch, ready to be issued any number of times.
pub(crate) struct Launch {
    function: Function,
    grid: [u32; 3],
    block: u32,
    shared_bytes: u32,
    /// Whether the kernel waits for the previous one itself: programmatic dependent launch.
    dependent: bool,
    /// Whether its blocks start before waiting ones of other streams.
    urgent: bool,
    /// Blocks of a cluster along x; 1: none, or as the kernel says.
    cluster: u32,
    /// Argument bytes, each argument starting at a multiple of eight.
    bytes: Vec<u64>,
    starts: Vec<usize>,
}

impl Launch {
    pub(crate) fn new(function: Function, grid: [u32; 3], block: u32) -> Launch {
        Launch {
            function,
            grid,
            block,
            shared_bytes: 0,
            dependent: false,
            urgent: false,
            cluster: 1,
            bytes: Vec::new(),
            starts: Vec::new(),
        }
    }

    /// Blocks of 256 threads for a kernel with a grid-stride loop over `threads`.
    pub(crate) fn over(function: Function, threads: u64) -> Launch {
        Launch::new(function, [threads.div_ceil(256).clamp(1, 1 << 20) as u32, 1, 1], 256)
    }

    /// The grid in y.
    pub(crate) fn grid_y(mut self, blocks: u32) -> Launch {
        self.grid[1] = blocks.clamp(1, 65_535);
        self
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(mut self, bytes: u32) -> Launch {
        self.shared_bytes = bytes;
        self
    }

    /// For kernels that call `wait_for_previous_kernel`: they may start while the previous kernel still runs
    /// (programmatic dependent launch).
    pub(crate) fn dependent(mut self) -> Launch {
        self.dependent = true;
        self
    }

    /// Gives its blocks precedence over those of other streams that wait for a multiprocessor.
    pub(crate) fn urgent(mut self) -> Launch {
        self.urgent = true;
        self
    }

    /// Has so many blocks along x form a cluster (compute capability 9.0 and newer); the grid is a multiple of it.
    pub(crate) fn cluster(mut self, blocks: u32) -> Launch {
        self.cluster = blocks;
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

    /// Issues the launch to a stream. `after_kernel`: the previous operation of the stream is a kernel launch, and the
    /// device supports programmatic dependent launch.
    pub(crate) fn issue(
        &self,
        context: &Context,
        stream: sys::CUstream,
        after_kernel: bool,
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
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = Vec::with_capacity(2);
        if self.urgent {
            let value = sys::CUlaunchAttributeValue { priority: context.highest_priority() };
            attributes.push(attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY, value));
        } else if self.dependent && after_kernel {
            let value = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
            let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes.push(attribute(id, value));
        }
        if self.cluster > 1 {
            let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
            let value = sys::CUlaunchAttributeValue { clusterDim: cluster };
            attributes
                .push(attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value));
        }
        let [x, y, z] = self.grid;
        let configuration = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: self.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: the function is loaded; the arguments were written with the types that the kernel declares and are
        // copied by the driver before it returns, as are configuration and attributes; what they point to is kept
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A contiguous tensor of 32-bit floats at an aligned address.
    fn dense(dims: [i64; 4]) -> TensorArg {
        let [_, d1, d2, d3] = dims;
        let strides = [d1 * d2 * d3 * 4, d2 * d3 * 4, d3 * 4, 4];
        TensorArg { address: 1 << 20, dtype: DType::F32.id(), reserved: 0, dims, strides }
    }

    #[test]
    fn an_argument_has_the_layout_of_its_tensor() {
        let g = quadriga_graph::GraphBuilder::new();
        let x = g.input("x", DType::F16, [2, 3, 4, 5]);
        let y = x.permute([0, 1, 3, 2]);
        g.output("y", y);
        let y = y.id();
        let graph = g.finish().unwrap();
        let arg = TensorArg::new(&graph[y], 4096);
        assert_eq!((arg.address, arg.dtype), (4096, DType::F16.id()));
        assert_eq!((arg.dims, arg.strides), ([2, 3, 5, 4], [120, 40, 2, 10]));
        assert_eq!((arg.elements(), arg.rows()), (120, 30));
    }

    #[test]
    fn only_contiguous_aligned_rows_of_float4s_are_dense() {
        assert!(is_dense_f32(&dense([2, 3, 5, 8])));
        assert!(is_dense_f32(&dense([1, 1, 1, 4])));
        let not_dense = [
            dense([2, 3, 5, 6]),
            TensorArg { address: (1 << 20) + 8, ..dense([2, 3, 5, 8]) },
            TensorArg { dtype: DType::F16.id(), ..dense([2, 3, 5, 8]) },
            TensorArg { strides: [480, 160, 32, 8], ..dense([2, 3, 5, 8]) },
            TensorArg { strides: [480, 160, 64, 4], ..dense([2, 3, 5, 8]) },
            TensorArg { strides: [480, 320, 32, 4], ..dense([2, 3, 5, 8]) },
            TensorArg { strides: [960, 160, 32, 4], ..dense([2, 3, 5, 8]) },
        ];
        for tensor in not_dense {
            assert!(!is_dense_f32(&tensor), "{tensor:?}");
        }
        // The distance between rows is that of nothing if there is one row.
        assert!(is_dense_f32(&TensorArg { strides: [7, 7, 7, 4], ..dense([1, 1, 1, 8]) }));
    }

    #[test]
    fn plain_types_have_one_element_at_a_time() {
        let plain: Vec<DType> = DType::all().filter(|dtype| is_plain(*dtype)).collect();
        assert_eq!(plain, [DType::F32, DType::F16, DType::I32, DType::BF16]);
    }
}
