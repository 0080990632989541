//! Weight layouts: plain as in the file, or packed for the matmul kernels.

use quadriga_graph::{Op, Tensor};
use quadriga_runtime::{BackendError, Layout, Region, WeightLayout};

use crate::NAME;
use crate::buffer::HostBuffer;
use crate::kernels::{KernelError, matmul};
use crate::state::BackendInner;

/// The number of the only packed layout: every matrix of the weight packed as [`matmul::PackedLayout`] says, in order.
const PACKED: u32 = 1;

/// The layout of the file; its bytes are used in place where they can be mapped.
pub(crate) fn plain(weight: &Tensor) -> WeightLayout {
    WeightLayout { layout: Layout::Plain, bytes: weight.bytes(), mappable: true }
}

/// Rows of active neurons of at least so many bytes are loaded into huge pages: they are read in no order, and in a file map each is
/// on pages of its own, whose addresses are rarely known.
const HUGE_ROWS: usize = 1 << 20;

/// The layout for a weight with these uses: packed if matmuls read it and nothing else does except row lookups.
pub(crate) fn layout(weight: &Tensor, uses: &[(&Op, usize)]) -> WeightLayout {
    let is_matmul = |op: &Op| matches!(op, Op::MulMat | Op::MulMatId);
    let packable = uses.iter().any(|(op, input)| is_matmul(op) && *input == 0)
        && uses.iter().all(|(op, input)| (is_matmul(op) || matches!(op, Op::GetRows)) && *input == 0);
    match PackedMatrices::of(weight) {
        Some(matrices) if packable => {
            WeightLayout { layout: Layout::Packed(PACKED), bytes: matrices.bytes, mappable: false }
        }
        _ => {
            let is_sparse = |op: &Op| matches!(op, Op::MulMatSparse { .. } | Op::AxpySparse);
            let in_huge_pages = weight.bytes() >= HUGE_ROWS && uses.iter().any(|(op, _)| is_sparse(op));
            WeightLayout { mappable: !in_huge_pages, ..plain(weight) }
        }
    }
}

/// The matrices of a packed weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedMatrices {
    /// How each is packed.
    pub(crate) layout: matmul::PackedLayout,
    /// How many there are.
    pub(crate) count: usize,
    /// Bytes of all of them.
    pub(crate) bytes: usize,
}

impl PackedMatrices {
    /// `None` for weights that cannot be packed: empty, strided, or of a type without products.
    fn of(weight: &Tensor) -> Option<PackedMatrices> {
        let [d0, d1, rows, columns] = weight.dims4();
        let layout = matmul::PackedLayout::new(weight.dtype(), rows, columns).ok()?;
        let count = d0.checked_mul(d1)?;
        let bytes = layout.bytes().checked_mul(count)?;
        (bytes > 0 && weight.bytes() > 0 && weight.is_contiguous()).then_some(PackedMatrices {
            layout,
            count,
            bytes,
        })
    }

    /// The packed layout with this number.
    pub(crate) fn numbered(weight: &Tensor, number: u32) -> Option<PackedMatrices> {
        if number == PACKED { PackedMatrices::of(weight) } else { None }
    }
}

/// The matrices of a weight with this layout, if it is packed.
pub(crate) fn packed(weight: &Tensor, layout: &WeightLayout) -> Option<PackedMatrices> {
    match layout.layout {
        Layout::Packed(number) => PackedMatrices::numbered(weight, number),
        Layout::Plain => None,
    }
}

/// Loads a weight's bytes; the threads of the pool pack it together.
pub(crate) fn load(
    inner: &BackendInner,
    weight: &Tensor,
    layout: Layout,
    data: &[u8],
    to: &Region,
) -> Result<(), BackendError> {
    let Layout::Packed(number) = layout else {
        // Rows of neurons, of which threads read those that are active, whichever these are.
        let numa = inner.pool.numa().filter(|_| data.len() >= HUGE_ROWS);
        if let (Some(numa), Some(buffer)) = (numa, HostBuffer::of(to)) {
            buffer.with_bytes_mut(to.offset, data.len(), |out| {
                numa.interleave(out.as_ptr().addr(), out.len());
            })?;
        }
        return to.buffer.write(to.offset, data);
    };
    let failed =
        |reason: String| BackendError::Failed { backend: NAME.into(), what: "packing a weight", reason };
    let Some(matrices) = PackedMatrices::numbered(weight, number) else {
        return Err(failed("it cannot be packed in this way".into()));
    };
    if data.len() != weight.bytes() || to.bytes < matrices.bytes {
        let (from, to) = if data.len() != weight.bytes() {
            (data.len(), weight.bytes())
        } else {
            (matrices.bytes, to.bytes)
        };
        return Err(BackendError::SizeMismatch { backend: NAME.into(), from, to });
    }
    let Some(buffer) = HostBuffer::of(to) else {
        return Err(BackendError::Foreign { backend: NAME.into(), what: "buffer" });
    };
    let packed = buffer.with_bytes_mut(to.offset, matrices.bytes, |out| {
        if let Some(numa) = inner.pool.numa() {
            numa.bind_weight(out.as_ptr().addr(), out.len(), matrices.count, inner.pool.threads());
        }
        pack(inner, &matrices, data, out)
    })?;
    packed.map_err(|error| failed(error.to_string()))
}

/// Loads a slice of a weight along its first dimension.
pub(crate) fn load_slice(
    inner: &BackendInner,
    weight: &Tensor,
    layout: Layout,
    index: usize,
    data: &[u8],
    to: &Region,
) -> Result<(), BackendError> {
    let count = weight.shape().dims().first().copied().unwrap_or(0).max(1);
    let mismatch = |from, to| BackendError::SizeMismatch { backend: NAME.into(), from, to };
    if data.len() != weight.bytes() / count || index >= count {
        return Err(mismatch(data.len(), weight.bytes() / count));
    }
    let Layout::Packed(number) = layout else {
        return to.buffer.write(to.offset + index * data.len(), data);
    };
    let failed =
        |reason: String| BackendError::Failed { backend: NAME.into(), what: "packing a weight", reason };
    let whole = PackedMatrices::numbered(weight, number).filter(|whole| whole.count.is_multiple_of(count));
    let Some(whole) = whole else { return Err(failed("it cannot be packed in this way".into())) };
    if to.bytes < whole.bytes {
        return Err(mismatch(whole.bytes, to.bytes));
    }
    let slice = PackedMatrices { count: whole.count / count, bytes: whole.bytes / count, ..whole };
    let Some(buffer) = HostBuffer::of(to) else {
        return Err(BackendError::Foreign { backend: NAME.into(), what: "buffer" });
    };
    let first = to.offset + index * slice.bytes;
    let packed = buffer.with_bytes_mut(first, slice.bytes, |out| pack(inner, &slice, data, out))?;
    packed.map_err(|error| failed(error.to_string()))
}

/// An address to whose memory threads write disjoint parts.
#[derive(Clone, Copy)]
struct PackTarget(*mut u8);

// SAFETY: each group of rows is written by one thread alone.
unsafe impl Send for PackTarget {}
// SAFETY: as above.
unsafe impl Sync for PackTarget {}

fn pack(
    inner: &BackendInner,
    matrices: &PackedMatrices,
    data: &[u8],
    out: &mut [u8],
) -> Result<(), KernelError> {
    let layout = matrices.layout;
    let (groups, group_bytes) = (layout.groups(), layout.group_bytes());
    let file_bytes = data.len() / matrices.count.max(1);
    // Enough bytes per chunk that handing out chunks costs nothing.
    let per_chunk = ((64 << 10) / group_bytes.max(1)).max(1);
    let target = PackTarget(out.as_mut_ptr());
    let total = out.len();
    inner.pool.run::<KernelError>(&|worker| {
        let target = &target;
        worker.try_chunks((matrices.count * groups).div_ceil(per_chunk), |chunk| {
            for index in chunk * per_chunk..((chunk + 1) * per_chunk).min(matrices.count * groups) {
                let (matrix, group) = (index / groups, index % groups);
                let file = data.get(matrix * file_bytes..(matrix + 1) * file_bytes).unwrap_or_default();
                let start = matrix * layout.bytes() + group * group_bytes;
                if start + group_bytes > total {
                    return Err(KernelError::Short {
                        what: "packed weights",
                        has: total,
                        needs: start + group_bytes,
                    });
                }
                // SAFETY: the group is inside `out`, which this function has borrowed, and only this thread writes it.
                let part = unsafe { std::slice::from_raw_parts_mut(target.0.add(start), group_bytes) };
                layout.pack_group(group, file, part)?;
            }
            Ok(())
        })
    })
}
