//! Tensor maps: how the tensor copy engine of Hopper finds the boxes of a matrix.

use cudarc::driver::sys;
use quadriga_runtime::BackendError;

use crate::blas::OperandType;
use crate::context::Context;
use crate::launch::Argument;

/// Columns of a box: 128 bytes of 16-bit elements, the width of the swizzle.
const BOX_COLS: u32 = 64;

/// A tensor map as kernels take it: `struct TensorMap` of gemm_wgmma.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TensorMap([u64; 16]);

// SAFETY: `struct TensorMap` of gemm_wgmma.cu has the same words; the driver copies them to where they are aligned.
unsafe impl Argument for TensorMap {}

impl TensorMap {
    /// A contiguous matrix of 16-bit elements, read in boxes of 64 columns and `box_rows` rows.
    pub(crate) fn of_rows(
        context: &Context,
        address: u64,
        (rows, cols): (usize, usize),
        operand: OperandType,
        box_rows: u32,
    ) -> Result<TensorMap, BackendError> {
        use sys::CUtensorMapDataType_enum as Type;
        let kind = match operand {
            OperandType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, row_bytes) = ([cols as u64, rows as u64], [cols as u64 * 2]);
        let (box_sizes, steps) = ([BOX_COLS, box_rows], [1u32; 2]);
        // SAFETY: every array has the two entries that rank 2 needs, strides one less; the address is only stored.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                2,
                address as *mut _,
                sizes.as_ptr(),
                row_bytes.as_ptr(),
                box_sizes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        context.check("cuTensorMapEncodeTiled", code)?;
        Ok(TensorMap(map.opaque))
    }
}
