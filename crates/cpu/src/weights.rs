//! How weights are held: as the file has them, or packed for the kernels of matrix products.

use quadriga_graph::{Op, Tensor};
use quadriga_runtime::{BackendError, Layout, Region, WeightLayout};

use crate::backend::Shared;

/// The file's own bytes, used in place where they can be mapped.
pub(crate) fn plain(weight: &Tensor) -> WeightLayout {
    WeightLayout { layout: Layout::Plain, bytes: weight.bytes(), mappable: true }
}

/// The layout for a weight with these uses.
pub(crate) fn layout(weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
    let _ = uses;
    plain(weight)
}

/// Puts a weight's bytes into place.
pub(crate) fn load(
    shared: &Shared,
    weight: &Tensor,
    layout: Layout,
    data: &[u8],
    to: &Region,
) -> Result<(), BackendError> {
    let _ = (shared, weight, layout);
    to.buffer.write(to.offset, data)
}

/// The packed layout with this number.
pub(crate) fn packed(weight: &Tensor, number: u32) -> Option<WeightLayout> {
    let _ = (weight, number);
    None
}
