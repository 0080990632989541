//! Where a product of few rows gets its activations from: a tensor, or operations that only it reads.
//!
//! Such small work is done by every thread for itself, in memory of its own, right before the product: all would have to
//! wait for it anyway, and so they need not meet in between.

use quadriga_graph::{Gate, TensorId};

use crate::isa::Isa;
use crate::kernels::vec::{self, Zip};
use crate::view::View;

/// How the activations come about; all tensors are dense rows of f32.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recipe {
    /// A row divided by its root mean square, times a row of weights.
    Norm { x: View, eps: f32, weight: Option<View> },
    /// A function of one row times another.
    Gated { gate: Gate, first: View, second: View },
}

impl Recipe {
    /// What is read.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &View> {
        let (first, second) = match self {
            Recipe::Norm { x, weight, .. } => (x, weight.as_ref()),
            Recipe::Gated { first, second, .. } => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }
}

/// Activations that exist only inside products.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The tensor they would be.
    pub(crate) tensor: TensorId,
    pub(crate) recipe: Recipe,
    /// Indices of the names of the nodes that are computed here.
    pub(crate) names: Vec<usize>,
}

impl Source {
    /// Computes row after row of `columns` elements.
    ///
    /// # Safety
    /// `rows × columns` elements at `out` must be writable and apart from the tensors, which nobody writes meanwhile.
    pub(crate) unsafe fn fill(&self, isa: Isa, rows: usize, columns: usize, out: *mut f32) {
        for row in 0..rows {
            let out = out.wrapping_add(row * columns);
            let at = |view: &View, row: usize| {
                view.floats_at(view.place(row), 0, columns).map_or(std::ptr::null(), <*mut f32>::cast_const)
            };
            match &self.recipe {
                Recipe::Norm { x, eps, weight } => {
                    let (x, weight) = (at(x, row), weight.as_ref().map_or(std::ptr::null(), |w| at(w, 0)));
                    if x.is_null() {
                        continue;
                    }
                    let none = std::ptr::null_mut();
                    // SAFETY: rows of `columns` elements; the result is apart from them, as the caller promised.
                    unsafe { vec::rms_norm_add(isa, none, x, none, weight, *eps, out, columns) };
                }
                Recipe::Gated { gate, first, second } => {
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
