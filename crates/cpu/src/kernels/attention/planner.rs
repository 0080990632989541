//! Decides how an attention is divided, and the memory that it needs: by its shape alone.

use quadriga_graph::DType;

use super::plan::{AttentionPlan, ManyQueryKernel};
use super::{ALIGN, AttentionShape, KV_SPLIT, work_unit};
#[cfg(target_arch = "x86_64")]
use super::{transposed_amx, transposed_avx512};
use crate::isa::Isa;
use crate::kernels::KernelError;

/// Rows (queries × heads) of a unit of work, about.
const UNIT_ROWS: usize = 64;

/// Queries with all of the slots visible for whose partial results there is memory: with more, threads have enough work
/// without sharing the slots of a run.
const SPLIT_TOKENS: usize = 8;

impl AttentionPlan {
    pub(super) fn new(isa: Isa, shape: &AttentionShape) -> Result<AttentionPlan, KernelError> {
        for dtype in [shape.key_type, shape.value_type] {
            if !dtype.is_cache_type() {
                return Err(KernelError::Type { dtype });
            }
        }
        for (dtype, columns) in [(shape.key_type, shape.key_width), (shape.value_type, shape.value_width)] {
            if !columns.is_multiple_of(dtype.block_len()) {
                return Err(KernelError::Blocks { dtype, columns });
            }
        }
        if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
            let (left, right) = (shape.heads, shape.kv_heads);
            return Err(KernelError::Differ { what: "query heads as a multiple of key heads", left, right });
        }
        let group = shape.heads / shape.kv_heads;
        #[cfg(target_arch = "x86_64")]
        let many = match (isa.amx(), isa.avx512()) {
            (Some(_), _) if transposed_amx::is_supported(shape) => Some(ManyQueryKernel::Amx),
            (_, Some(_)) if transposed_avx512::is_supported(shape) => Some(ManyQueryKernel::Avx512),
            _ => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let many = {
            let _ = isa;
            None
        };
        let block = (UNIT_ROWS / group.max(1)).clamp(1, shape.tokens.max(1));
        let splits = shape.slots.div_ceil(KV_SPLIT);
        let partials = match shape.tokens.min(SPLIT_TOKENS).checked_mul(shape.heads) {
            Some(rows) if splits > 1 => rows.checked_mul(splits),
            rows => rows.map(|_| 0),
        };
        let partials = partials.ok_or(KernelError::TooLarge { rows: shape.tokens, columns: shape.slots })?;
        let (key_pad, value_pad) = (shape.key_width.div_ceil(16) * 16, shape.value_width.div_ceil(16) * 16);
        let even = shape.key_width == key_pad && shape.value_width == value_pad;
        let row_bytes = |dtype: DType, width: usize| dtype.row_bytes(width).unwrap_or(0);
        let key_bytes = row_bytes(shape.key_type, shape.key_width);
        let value_bytes = row_bytes(shape.value_type, shape.value_width);
        Ok(AttentionPlan { group, block, partials, key_pad, value_pad, key_bytes, value_bytes, even, many })
    }

    /// Bytes of scratch memory for one thread, of partial results, and of keys and values as AMX tiles.
    pub(super) fn bytes(&self, shape: &AttentionShape) -> Option<[usize; 3]> {
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(ALIGN);
        let scratch = work_unit::scratch_floats(self, shape)?.checked_mul(4)?;
        let partials = self.partials.checked_mul(self.partial_floats())?.checked_mul(4)?;
        let (mut scratch, mut tiles) = (scratch, 0);
        #[cfg(target_arch = "x86_64")]
        match self.many {
            Some(ManyQueryKernel::Amx) => {
                let [own, shared] = transposed_amx::bytes(shape)?;
                (scratch, tiles) = (scratch.max(own), shared);
            }
            Some(ManyQueryKernel::Avx512) => scratch = scratch.max(transposed_avx512::bytes(shape)?),
            None => {}
        }
        Some([aligned(scratch)?, aligned(partials)?, aligned(tiles)?])
    }

    pub(super) fn total(&self, shape: &AttentionShape, threads: usize) -> Result<usize, KernelError> {
        self.bytes(shape)
            .and_then(|[scratch, partials, tiles]| {
                scratch.checked_mul(threads)?.checked_add(partials)?.checked_add(tiles)?.checked_add(ALIGN)
            })
            .ok_or(KernelError::TooLarge { rows: shape.tokens, columns: shape.slots })
    }
}
