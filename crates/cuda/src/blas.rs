//! cuBLAS, for GEMMs of many rows on tensor cores.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublas::sys as cublas;
use cudarc::driver::sys;
use quadriga_graph::DType;
use quadriga_runtime::BackendError;

use crate::context::Context;

/// Bytes of workspace: enough for every algorithm on Hopper; with less, cuBLAS picks slower ones.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

/// Element type of a GEMM's operands; the result is f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OperandType {
    Bf16,
    F16,
    F32,
}

impl OperandType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            OperandType::Bf16 => DType::BF16,
            OperandType::F16 => DType::F16,
            OperandType::F32 => DType::F32,
        }
    }

    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        self.dtype().block_bytes()
    }
}

/// Which kernels multiply matrices of many rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GemmKernels {
    /// cuBLAS's.
    Cublas,
    /// Those of gemm.cu and gemm_wgmma.cu, without cuBLAS.
    Own,
    /// Of those only the one for f32: the device has no mma of bf16 (before compute capability 8.0).
    OwnF32,
}

/// `out [m, n] = x [m, k] · (w [n, k])ᵀ`, all row-major; rows of the result are `out_stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) w: u64,
    pub(crate) x: u64,
    pub(crate) out: u64,
    pub(crate) out_stride: usize,
    pub(crate) operand: OperandType,
    /// [`WORKSPACE_BYTES`] bytes for cuBLAS.
    pub(crate) workspace: u64,
}

pub(crate) struct Blas {
    context: Arc<Context>,
    handle: Mutex<Handle>,
}

struct Handle(cublas::cublasHandle_t);

// SAFETY: the handle is used by one thread at a time, under the mutex.
unsafe impl Send for Handle {}

impl Blas {
    /// `None` where cuBLAS is not installed, or does not work, as one that is newer than the driver.
    pub(crate) fn new(context: &Arc<Context>) -> Option<Blas> {
        // SAFETY: looks the library up and calls nothing in it.
        if !unsafe { cublas::is_culib_present() } || context.bind().is_err() {
            return None;
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let created = unsafe { cublas::cublasCreate_v2(&mut handle) };
        (created == cublas::cublasStatus_t::CUBLAS_STATUS_SUCCESS)
            .then(|| Blas { context: Arc::clone(context), handle: Mutex::new(Handle(handle)) })
    }

    pub(crate) fn issue(&self, gemm: &Gemm, stream: sys::CUstream) -> Result<(), BackendError> {
        use cublas::{cublasComputeType_t as Compute, cublasOperation_t as Op, cudaDataType_t as Type};
        let (kind, compute) = match gemm.operand {
            OperandType::Bf16 => (Type::CUDA_R_16BF, Compute::CUBLAS_COMPUTE_32F),
            OperandType::F16 => (Type::CUDA_R_16F, Compute::CUBLAS_COMPUTE_32F),
            // Full f32 precision, not TF32.
            OperandType::F32 => (Type::CUDA_R_32F, Compute::CUBLAS_COMPUTE_32F_PEDANTIC),
        };
        let (one, zero) = (1.0f32, 0.0f32);
        let size = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the handle is live; the addresses and extents describe tensors, and a workspace, that the program
        // keeps alive; the arguments express row-major `out = x · wᵀ` as column-major `outᵀ = w · xᵀ`.
        unsafe {
            let set = cublas::cublasSetStream_v2(handle.0, stream.cast());
            check(&self.context, "cublasSetStream", set)?;
            let space = cublas::cublasSetWorkspace_v2(handle.0, gemm.workspace as *mut _, WORKSPACE_BYTES);
            check(&self.context, "cublasSetWorkspace", space)?;
            let code = cublas::cublasGemmEx(
                handle.0,
                Op::CUBLAS_OP_T,
                Op::CUBLAS_OP_N,
                size(gemm.n),
                size(gemm.m),
                size(gemm.k),
                (&raw const one).cast(),
                gemm.w as *const _,
                kind,
                size(gemm.k),
                gemm.x as *const _,
                kind,
                size(gemm.k),
                (&raw const zero).cast(),
                gemm.out as *mut _,
                Type::CUDA_R_32F,
                size(gemm.out_stride),
                compute,
                cublas::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            );
            check(&self.context, "cublasGemmEx", code)
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: created by `new`, destroyed only here.
            let _ = unsafe { cublas::cublasDestroy_v2(handle.0) };
        }
    }
}

fn check(context: &Context, what: &'static str, code: cublas::cublasStatus_t) -> Result<(), BackendError> {
    match code {
        cublas::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        code => {
            Err(BackendError::Failed { backend: context.name.clone(), what, reason: format!("{code:?}") })
        }
    }
}
