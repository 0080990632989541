//! The fused prologue of a matmul of few rows: a norm or a gate that only matmuls read.
//!
//! Every thread computes the prologue itself, into memory of its own, right before its share of the matmul. That takes
//! no longer than waiting for one thread to compute it, and saves a barrier.

use quadriga_graph::{Gate, TensorId};

use crate::isa::Isa;
use crate::kernels::vec::{self, Zip};
use crate::view::TensorView;

/// An operation that computes activations; all its tensors are contiguous rows of f32.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prologue {
    /// RMS norm, times a row of weights if there is one.
    Norm { x: TensorView, eps: f32, weight: Option<TensorView> },
    /// A gated linear unit: a function of one row times another row.
    Gated { gate: Gate, first: TensorView, second: TensorView },
}

impl Prologue {
    /// The tensors that it reads.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &TensorView> {
        let (first, second) = match self {
            Prologue::Norm { x, weight, .. } => (x, weight.as_ref()),
            Prologue::Gated { first, second, .. } => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }
}

/// Activations that exist only inside matmuls.
#[derive(Clone, Debug)]
pub(crate) struct ActivationSource {
    /// The tensor of the graph that holds them.
    pub(crate) tensor: TensorId,
    pub(crate) prologue: Prologue,
    /// Indices of the names of the nodes in the prologue.
    pub(crate) names: Vec<usize>,
}

impl ActivationSource {
    /// Computes `rows` rows of `columns` elements.
    ///
    /// # Safety
    /// `rows × columns` elements at `out` must be writable and must not overlap the tensors, which no thread may write meanwhile.
    pub(crate) unsafe fn fill(&self, isa: Isa, rows: usize, columns: usize, out: *mut f32) {
        for row in 0..rows {
            let out = out.wrapping_add(row * columns);
            let at = |view: &TensorView, row: usize| {
                view.floats_at(view.place(row), 0, columns).map_or(std::ptr::null(), <*mut f32>::cast_const)
            };
            match &self.prologue {
                Prologue::Norm { x, eps, weight } => {
                    let (x, weight) = (at(x, row), weight.as_ref().map_or(std::ptr::null(), |w| at(w, 0)));
                    if x.is_null() {
                        continue;
                    }
                    let none = std::ptr::null_mut();
                    // SAFETY: rows of `columns` elements; the caller promised that the result does not overlap them.
                    unsafe { vec::rms_norm_add(isa, none, x, none, weight, *eps, out, columns) };
                }
                Prologue::Gated { gate, first, second } => {
                    let (first, second) = (at(first, row), at(second, row));
                    if first.is_null() || second.is_null() {
                        continue;
                    }
                    // SAFETY: as above.
                    unsafe { vec::zip_raw(isa, Zip::of(*gate), first, second, out, columns) };
                }
            }
        }
    }
}
