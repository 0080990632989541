//! Tensor maps: how the tensor copy engine of Hopper finds the boxes of a matrix.

use cudarc::driver::sys;
use cudarc::driver::sys::CUtensorMapDataType_enum as Type;
use quadriga_runtime::BackendError;

use crate::blas::OperandType;
use crate::context::Context;
use crate::launch::Argument;

/// Columns of a box: 128 bytes of 16-bit elements, the width of the swizzle.
const BOX_COLS: u32 = 64;

/// A tensor map as kernels take it: `struct TensorMap` of wgmma.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct TensorMap([u64; 16]);

// SAFETY: `struct TensorMap` of wgmma.cuh has the same words; the driver copies them to where they are aligned.
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
        let kind = match operand {
            OperandType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        TensorMap::new(context, address, kind, (rows, cols, cols * 2), (box_rows, BOX_COLS), true)
    }

    /// Rows of bytes, whole 16-byte words, read in boxes of 64 rows; the swizzle is for boxes of 128 bytes.
    pub(crate) fn of_bytes(
        context: &Context,
        address: u64,
        (rows, bytes): (usize, usize),
        box_bytes: u32,
    ) -> Result<TensorMap, BackendError> {
        let kind = Type::CU_TENSOR_MAP_DATA_TYPE_UINT8;
        TensorMap::new(context, address, kind, (rows, bytes, bytes), (64, box_bytes), box_bytes == 128)
    }

    fn new(
        context: &Context,
        address: u64,
        kind: Type,
        (rows, cols, row_bytes): (usize, usize, usize),
        (box_rows, box_cols): (u32, u32),
        is_swizzled: bool,
    ) -> Result<TensorMap, BackendError> {
        use sys::CUtensorMapSwizzle_enum as Swizzle;
        let swizzle = match is_swizzled {
            true => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            false => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (sizes, row_bytes) = ([cols as u64, rows as u64], [row_bytes as u64]);
        let (box_sizes, steps) = ([box_cols, box_rows], [1u32; 2]);
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
                swizzle,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        context.check("cuTensorMapEncodeTiled", code)?;
        Ok(TensorMap(map.opaque))
    }
}
