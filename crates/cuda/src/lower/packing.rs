//! Weights in the layout that the one-row products want; see `kernels/matmul.cu` for the picture.

use std::sync::Arc;

use quadriga_graph::{DType, Op, Tensor};
use quadriga_runtime::{BackendError, Buffer, Layout, Region, Usage, WeightLayout};

use crate::backend::Shared;
use crate::buffer::DeviceBuffer;
use crate::kernels::File;
use crate::launch::{Described, Launch};
use crate::program::Stream;

/// Layouts of matrices on the device; the numbers are those of `common.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Four bits an element, a scale for each 32.
    Four,
    /// Four bits an element, a scale and a shift for each 32.
    Shifted,
    /// Eight bits an element, a scale for each 32.
    Eight,
    /// f16, as in the file: never packed.
    Half,
}

impl Form {
    /// Bytes of 32 packed elements.
    fn quant_bytes(self) -> usize {
        if self == Form::Eight { 32 } else { 16 }
    }

    /// Bytes of what scales, and shifts, 32 packed elements.
    fn scale_bytes(self) -> usize {
        if self == Form::Shifted { 4 } else { 2 }
    }
}

/// Sizes of a packed weight's two arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) form: Form,
    /// Blocks of 32 in a row.
    pub(crate) blocks: usize,
    /// Bytes from the start to the scales.
    pub(crate) scales_at: usize,
    /// Bytes of both.
    pub(crate) bytes: usize,
}

impl Packed {
    pub(crate) fn of(weight: &Tensor) -> Option<Packed> {
        let form = match weight.dtype() {
            DType::Q4_0 => Form::Four,
            DType::Q4_1 | DType::Q4_K => Form::Shifted,
            DType::Q8_0 => Form::Eight,
            _ => return None,
        };
        let (quant_bytes, scale_bytes) = (form.quant_bytes(), form.scale_bytes());
        let cols = weight.shape().cols();
        if !cols.is_multiple_of(32) || weight.shape().rank() > 2 || weight.elements() == 0 {
            return None;
        }
        let (rows, blocks) = (weight.shape().rows(), cols / 32);
        let scales_at = rows.checked_mul(blocks)?.checked_mul(quant_bytes)?.next_multiple_of(256);
        // Each row's scales start at whole 16 bytes.
        let scales = rows.checked_mul((blocks * scale_bytes).next_multiple_of(16))?;
        Some(Packed { form, blocks, scales_at, bytes: scales_at.checked_add(scales)? })
    }

    /// How many scales there are from one row to the next.
    pub(crate) fn scale_stride(&self) -> usize {
        self.blocks.next_multiple_of(if self.form == Form::Shifted { 4 } else { 8 })
    }
}

/// The packed layout, for a weight that products and row look-ups alone use.
pub(crate) fn layout(weight: &Tensor, uses: &[(&Op, usize)]) -> Option<WeightLayout> {
    let fits = |(op, input): &(&Op, usize)| *input == 0 && matches!(op, Op::MulMat | Op::GetRows);
    let used = |is: fn(&Op) -> bool| uses.iter().any(|(op, _)| is(op));
    if !used(|op| matches!(op, Op::MulMat)) || !uses.iter().all(fits) {
        return None;
    }
    // Packing rounds a Q4_K group's scale to f16, which a product does not notice but a row look-up must not do.
    if weight.dtype() == DType::Q4_K && used(|op| matches!(op, Op::GetRows)) {
        return None;
    }
    let packed = Packed::of(weight)?;
    Some(WeightLayout { layout: Layout::Packed(0), bytes: packed.bytes, mappable: false })
}

/// Bytes of a weight that are on the device as the file has them while they are packed: loading takes hardly more
/// memory than what stays.
const SLAB: usize = 8 << 20;

/// Uploads a weight as the file has it, some rows at a time, and packs it on the device.
pub(crate) fn load(
    shared: &Arc<Shared>,
    weight: &Tensor,
    data: &[u8],
    to: &Region,
) -> Result<(), BackendError> {
    let foreign = || BackendError::Foreign { backend: shared.context.name.clone(), what: "buffer" };
    let target = to.buffer.as_any().downcast_ref::<DeviceBuffer>().ok_or_else(foreign)?;
    let packed = Packed::of(weight).filter(|p| p.bytes <= to.bytes).ok_or_else(foreign)?;
    let rows = weight.shape().rows();
    let row_bytes = (data.len() / rows.max(1)).max(1);
    let at_once = (SLAB / row_bytes).clamp(1, rows.max(1));
    let raw = DeviceBuffer::new(&shared.context, at_once * row_bytes, Usage::Weights)?;
    let address = target.address() + to.offset as u64;
    let function = shared.kernels.function(File::Pack, c"k_pack")?;
    let stream = Stream::new(shared)?;
    for (number, slab) in data.chunks(at_once * row_bytes).enumerate() {
        raw.write(0, slab)?;
        let first = number * at_once;
        let mut described = Described::new(weight, raw.address());
        described.dims = [1, 1, (slab.len() / row_bytes) as i64, described.dims[3]];
        let quants = address + (first * packed.blocks * packed.form.quant_bytes()) as u64;
        let scales = (first * packed.scale_stride() * packed.form.scale_bytes()) as u64;
        let launch = Launch::over(function, described.rows() * packed.scale_stride() as u64)
            .arg(described)
            .arg(quants)
            .arg(address + packed.scales_at as u64 + scales)
            .arg(packed.blocks as i64)
            .arg(packed.form as i32);
        launch.issue(&shared.context, stream.handle, false)?;
        // SAFETY: the stream is live; the raw bytes may be written over once it has passed.
        let code = unsafe { cudarc::driver::sys::cuStreamSynchronize(stream.handle) };
        shared.context.check("cuStreamSynchronize", code)?;
    }
    Ok(())
}
