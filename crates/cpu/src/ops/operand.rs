//! A node's inputs in memory, and the choices that lowering depends on.

use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::TensorId;

use super::activation_source::ActivationSource;
use crate::isa::Isa;
use crate::kernels::matmul;
use crate::view::TensorView;
use crate::weights::PackedMatrices;

/// An input of a node in memory.
pub(crate) struct Operand {
    /// The tensor; for a packed weight only type, shape and base address are valid.
    pub(crate) view: TensorView,
    /// The packed matrices of a packed weight.
    pub(crate) packed: Option<PackedWeight>,
}

impl Operand {
    /// The addresses of all its bytes.
    pub(crate) fn range(&self) -> Range<usize> {
        self.packed.map_or_else(|| self.view.range(), |packed| packed.range())
    }
}

/// A packed weight in memory: one or more packed matrices.
#[derive(Clone, Copy)]
pub(crate) struct PackedWeight {
    pointer: *const u8,
    /// How each matrix is packed.
    pub(crate) layout: matmul::PackedLayout,
    /// The number of matrices.
    pub(super) count: usize,
}

// SAFETY: an address and numbers; `PackedWeight::bytes` says when it may be used.
unsafe impl Send for PackedWeight {}
// SAFETY: as above.
unsafe impl Sync for PackedWeight {}

impl PackedWeight {
    /// A packed weight at an address.
    ///
    /// # Safety
    /// Their bytes are readable wherever this is used, and not written.
    pub(crate) unsafe fn new(pointer: *const u8, matrices: &PackedMatrices) -> PackedWeight {
        PackedWeight { pointer, layout: matrices.layout, count: matrices.count }
    }

    /// The addresses of all matrices.
    pub(super) fn range(&self) -> Range<usize> {
        let start = self.pointer.addr();
        start..start + self.count * self.layout.bytes()
    }

    /// One of the matrices.
    pub(super) fn matrix(&self, index: usize) -> Result<PackedWeight, String> {
        if index >= self.count {
            return Err(format!("there is no matrix {index} of {}", self.count));
        }
        Ok(PackedWeight {
            pointer: self.pointer.wrapping_add(index * self.layout.bytes()),
            count: 1,
            ..*self
        })
    }

    /// The bytes of the first matrix.
    ///
    /// # Safety
    /// The program holds the buffer.
    pub(super) unsafe fn bytes<'a>(&self) -> &'a [u8] {
        // SAFETY: promised by the callers of `new` and of this function.
        unsafe { std::slice::from_raw_parts(self.pointer, self.layout.bytes()) }
    }
}

/// What the lowering of a node depends on, beside its operation and operands.
pub(crate) struct LoweringContext<'a> {
    pub(crate) isa: Isa,
    pub(crate) input_ids: &'a [TensorId],
    /// Whether operations may be fused.
    pub(crate) fuse: bool,
    /// Whether rows of inactive neurons are skipped.
    pub(crate) skip: bool,
    /// The fused prologue of a matmul that computes its activations, if they are not in memory.
    pub(crate) source: Option<Arc<ActivationSource>>,
}
