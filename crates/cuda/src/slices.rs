//! Copies of the selected slices of a weight from pinned host memory, made by a kernel: the indices that select them are
//! on the device, and the host does not wait for them (kernels/experts_stream.cu).
//!
//! The slices that were selected last are prefetched: batches of one text use much the same experts.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_graph::{DType, Tensor};
use quadriga_runtime::{BackendError, Buffer, Layout, Region, SliceSelection, Usage};

use crate::buffer::DeviceBuffer;
use crate::context::Context;
use crate::inner::BackendInner;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg};
use crate::lower::formats::PackedMatrix;

/// As in experts_stream.cu: bytes that a block loads at once, threads of a block, the most slices.
const UNIT_BYTES: usize = 32 << 10;
const THREADS: u32 = 512;
const MAX_SLICES: usize = 1024;
/// Blocks of a launch: with fewer the link is not busy, with more other kernels are slower.
const BLOCKS: u32 = 16;
/// Bytes that are packed at a time where the host's memory cannot be read by kernels.
const SLAB_BYTES: usize = 8 << 20;

#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct SliceStream {
    from: [u64; 3],
    border: [u64; 2],
    bytes: u64,
    slice_bytes: u64,
    ids: u64,
    id_count: u64,
    last: u64,
    to: u64,
    scales: u64,
    slices: u32,
    rows: u32,
    row_bytes: u32,
    blocks: u32,
    prefetch: u32,
    prefetched: u32,
}

// SAFETY: `struct SliceStream` of experts_stream.cu has the same fields in the same order.
unsafe impl Argument for SliceStream {}

/// Where a weight is in pinned memory: byte `n` is at `address[i] + n`, where `i` counts the borders up to `n`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PinnedSource {
    pub(crate) border: [u64; 2],
    pub(crate) address: [u64; 3],
}

impl PinnedSource {
    /// Pinned memory of `bytes` from an address on.
    pub(crate) fn whole(address: u64, bytes: usize) -> PinnedSource {
        PinnedSource { border: [0, bytes as u64], address: [address; 3] }
    }

    /// Whether 16 bytes at a time can be loaded, if the weight is aligned where it is copied to.
    fn is_aligned(&self) -> bool {
        self.border.iter().chain(&self.address).all(|number| number.is_multiple_of(16))
    }
}

/// The device's address of page-locked host memory.
pub(crate) fn device_pointer(host: *const u8) -> Option<u64> {
    let mut address = 0;
    // SAFETY: writes the address it is given; memory that is not page-locked is an error.
    let code =
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, host.cast_mut().cast::<c_void>(), 0) };
    (code == sys::CUresult::CUDA_SUCCESS).then_some(address)
}

/// An error unless a weight is all in `from` bytes, and its copy fits into `to` bytes. Kernels read and write as many bytes as the
/// shape says.
pub(crate) fn check_sizes(
    backend: &str,
    selection: &SliceSelection,
    (from, to): (usize, usize),
) -> Result<(), BackendError> {
    let weight = &selection.weight;
    let copied = match selection.layout {
        Layout::Plain => weight.bytes(),
        Layout::Packed(_) => {
            let foreign = || BackendError::Foreign { backend: backend.to_owned(), what: "layout" };
            PackedMatrix::of(weight).ok_or_else(foreign)?.bytes
        }
    };
    for (needed, there) in [(weight.bytes(), from), (copied, to)] {
        if needed > there {
            return Err(BackendError::SizeMismatch { backend: backend.to_owned(), from: needed, to: there });
        }
    }
    Ok(())
}

/// A copy that the kernel can make.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SliceCopy {
    work: SliceStream,
    kernel: &'static CStr,
}

impl SliceCopy {
    /// The copy of a selection between these places, whose sizes were [checked](check_sizes). `None` if the kernel cannot make it.
    pub(crate) fn new(
        selection: &SliceSelection,
        source: PinnedSource,
        (ids, to): (u64, u64),
    ) -> Option<SliceCopy> {
        let (weight, slices) = (&selection.weight, selection.slices());
        let rows = weight.dims4()[2];
        let kernel = kernel(weight, selection.layout)?;
        let slice_bytes = weight.bytes() / slices.max(1);
        let few = (1..=MAX_SLICES).contains(&slices) && slice_bytes >= 16;
        if !few || !source.is_aligned() || !to.is_multiple_of(16) || !ids.is_multiple_of(4) {
            return None;
        }
        let packed = PackedMatrix::of(weight).filter(|_| selection.layout != Layout::Plain);
        let work = SliceStream {
            from: source.address,
            border: source.border,
            bytes: weight.bytes() as u64,
            slice_bytes: slice_bytes as u64,
            ids,
            id_count: (selection.ids.bytes / 4) as u64,
            last: 0,
            to,
            scales: packed.map_or(0, |packed| to + packed.scales_at as u64),
            slices: slices as u32,
            rows: rows as u32,
            row_bytes: (slice_bytes / rows.max(1)) as u32,
            blocks: packed.map_or(0, |packed| packed.blocks as u32),
            prefetch: 0,
            prefetched: 0,
        };
        Some(SliceCopy { work, kernel })
    }
}

/// What a queue remembers of a copy.
pub(crate) struct SliceMemory {
    copy: SliceCopy,
    /// A counter, and a bit for each slice that was selected last.
    last: DeviceBuffer,
}

impl SliceMemory {
    pub(crate) fn new(context: &Arc<Context>, copy: SliceCopy) -> Result<SliceMemory, BackendError> {
        let words = 1 + (copy.work.slices as usize).div_ceil(32);
        let last = DeviceBuffer::new(context, words * 4, Usage::Compute)?;
        last.clear(0, words * 4)?;
        Ok(SliceMemory { copy, last })
    }

    /// Whether it is of this copy: of the same weight and number of indices, between the same places.
    pub(crate) fn is_of(&self, copy: &SliceCopy) -> bool {
        self.copy == *copy
    }

    /// The slices that were selected last, once the copy is done.
    pub(crate) fn selected(&self) -> Result<Vec<bool>, BackendError> {
        let slices = self.copy.work.slices as usize;
        let mut bits = vec![0; slices.div_ceil(32) * 4];
        self.last.read(4, &mut bits)?;
        Ok(bits.iter().flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1)).take(slices).collect())
    }

    /// Copies the selected slices, or those that were selected last.
    pub(crate) fn issue(
        &self,
        inner: &BackendInner,
        stream: sys::CUstream,
        (prefetch, prefetched): (bool, bool),
    ) -> Result<(), BackendError> {
        let SliceCopy { work, kernel } = self.copy;
        let (prefetch, prefetched, last) = (prefetch.into(), prefetched.into(), self.last.address());
        let work = SliceStream { prefetch, prefetched, last, ..work };
        let shared = UNIT_BYTES as u32 + 32;
        let function = inner.kernels.function(KernelFile::ExpertsStream, kernel)?;
        let launch = Launch::new(function, [BLOCKS, 1, 1], THREADS).shared_bytes(shared).urgent();
        launch.arg(work).issue(&inner.context, stream, false)
    }
}

/// The kernel that copies slices of a weight to a layout.
fn kernel(weight: &Tensor, layout: Layout) -> Option<&'static CStr> {
    Some(match (layout, weight.dtype()) {
        (Layout::Plain, _) => c"k_stream_slices_plain",
        (_, DType::Q4_0) => c"k_stream_slices_q4_0",
        (_, DType::Q4_1) => c"k_stream_slices_q4_1",
        (_, DType::Q4_K) => c"k_stream_slices_q4_k",
        (_, DType::Q8_0) => c"k_stream_slices_q8_0",
        (_, DType::MXFP4) => c"k_stream_slices_mxfp4",
        _ => return None,
    })
}

/// Whether the kernel packs a weight: a block packs whole rows.
pub(crate) fn packs(weight: &Tensor) -> bool {
    let row_bytes = weight.bytes() / weight.shape().rows().max(1);
    kernel(weight, Layout::Packed(0)).is_some() && (1..=UNIT_BYTES).contains(&row_bytes)
}

/// Packs a weight some rows at a time, where the host's memory cannot be read by kernels: `copy` copies bytes of the
/// weight to device memory, in the order of the stream.
pub(crate) fn pack_by_slabs(
    inner: &Arc<BackendInner>,
    stream: sys::CUstream,
    weight: &Tensor,
    to: u64,
    mut copy: impl FnMut(usize, &Region) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    let packed = PackedMatrix::of(weight)
        .ok_or_else(|| BackendError::Foreign { backend: inner.context.name.clone(), what: "layout" })?;
    let (rows, function) = (weight.shape().rows(), inner.kernels.function(KernelFile::Pack, c"k_pack")?);
    let row_bytes = (weight.bytes() / rows.max(1)).max(1);
    let at_once = (SLAB_BYTES / row_bytes).clamp(1, rows.max(1));
    let slab = DeviceBuffer::new(&inner.context, at_once * row_bytes, Usage::Compute)?;
    let address = slab.address();
    let slab: Arc<dyn Buffer> = Arc::new(slab);
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        copy(first * row_bytes, &Region::new(Arc::clone(&slab), 0, count * row_bytes)?)?;
        let launch = packed.pack_rows(function, TensorArg::new(weight, address), (first, count), to);
        launch.issue(&inner.context, stream, false)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::any::Any;

    use quadriga_graph::{GraphBuilder, Weight};

    use super::*;

    #[test]
    fn kernels_have_the_same_sizes() {
        let text = include_str!("../kernels/experts_stream.cu");
        for (name, value) in [("UNIT", UNIT_BYTES), ("THREADS", THREADS as usize), ("MAX_SLICES", MAX_SLICES)]
        {
            assert!(text.contains(&format!("#define {name} {value}\n")), "{name}");
        }
    }

    /// Experts of a type, selected by so many indices.
    fn selection(dtype: DType, dims: [usize; 3], layout: Layout, ids: usize) -> SliceSelection {
        let g = GraphBuilder::new();
        let id = g.weight("w", Weight::new(dtype, dims)).id();
        let weight = g.finish().unwrap()[id].clone();
        let buffer: Arc<dyn Buffer> = Arc::new(Elsewhere(64));
        SliceSelection::new(weight, layout, Region::new(buffer, 0, ids * 4).unwrap())
    }

    /// A buffer of so many bytes that nobody accesses.
    struct Elsewhere(usize);

    impl Buffer for Elsewhere {
        fn backend(&self) -> &str {
            "elsewhere"
        }

        fn bytes(&self) -> usize {
            self.0
        }

        fn usage(&self) -> Usage {
            Usage::Compute
        }

        fn is_host(&self) -> bool {
            false
        }

        fn address(&self) -> u64 {
            0
        }

        fn read(&self, _: usize, _: &mut [u8]) -> Result<(), BackendError> {
            Ok(())
        }

        fn write(&self, _: usize, _: &[u8]) -> Result<(), BackendError> {
            Ok(())
        }

        fn clear(&self, _: usize, _: usize) -> Result<(), BackendError> {
            Ok(())
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    #[test]
    fn both_ends_of_a_copy_have_room_for_the_weight() {
        for layout in [Layout::Plain, Layout::Packed(0)] {
            let selection = selection(DType::Q4_0, [8, 3, 64], layout, 2);
            let whole = selection.weight.bytes();
            let copied = match layout {
                Layout::Plain => whole,
                Layout::Packed(_) => PackedMatrix::of(&selection.weight).unwrap().bytes,
            };
            let check = |from, to| check_sizes("cuda:0", &selection, (from, to));
            assert_eq!((check(whole, copied), check(whole + 1, copied + 1)), (Ok(()), Ok(())));
            for (from, to) in [(whole - 1, copied), (whole, copied - 1), (0, copied), (whole, 0)] {
                let checked = check(from, to);
                assert!(matches!(checked, Err(BackendError::SizeMismatch { .. })), "{layout:?}: {checked:?}");
            }
        }
        // A layout that this type does not have.
        let wrong = selection(DType::F16, [8, 3, 64], Layout::Packed(0), 2);
        let checked = check_sizes("cuda:0", &wrong, (1 << 20, 1 << 20));
        assert!(matches!(checked, Err(BackendError::Foreign { .. })), "{checked:?}");
    }

    #[test]
    fn what_is_remembered_of_a_copy_is_used_for_the_same_copy_only() {
        let (source, places) = (PinnedSource::whole(4096, 1 << 20), (1 << 12, 1 << 16));
        let of = |dims, ids| {
            let selection = selection(DType::Q4_0, dims, Layout::Packed(0), ids);
            SliceCopy::new(&selection, source, places).unwrap()
        };
        let copy = of([8, 3, 64], 2);
        assert_eq!(copy, of([8, 3, 64], 2));
        for (dims, ids) in [([8, 3, 64], 3), ([16, 3, 64], 2), ([8, 6, 64], 2), ([8, 3, 128], 2)] {
            assert_ne!(copy, of(dims, ids), "{dims:?} {ids}");
        }
        // Indices that a kernel cannot load.
        let selection = selection(DType::Q4_0, [8, 3, 64], Layout::Packed(0), 2);
        assert_eq!(SliceCopy::new(&selection, source, (4098, 1 << 16)), None);
    }

    #[test]
    fn pinned_memory_must_be_aligned() {
        let source = PinnedSource { border: [4080, 8176], address: [64, 4096, 32] };
        assert!(source.is_aligned());
        assert!(!PinnedSource { border: [4081, 8177], ..source }.is_aligned());
        assert!(!PinnedSource { address: [64, 4100, 32], ..source }.is_aligned());
        assert!(PinnedSource::whole(4096, 160).is_aligned());
    }
}
