//! Weight formats: sizes and kernel names of every format, the counterpart of `kernels/formats.cuh`. A new type is
//! added in these two files.

use std::ffi::CStr;
use std::sync::Arc;

use quadriga_graph::{DType, Op, Tensor};
use quadriga_runtime::{BackendError, Buffer, Layout, Region, Usage, WeightLayout};

use crate::buffer::{DeviceBuffer, device_address};
use crate::inner::BackendInner;
use crate::kernels::{Function, KernelFile};
use crate::launch::{Launch, TensorArg};
use crate::stream::CudaStream;

/// The most rows that the GEMV kernels take.
pub(super) const MAX_GEMV_ROWS: usize = 8;

/// Formats of matrices on the device, as `MATRIX_…` of formats.cuh, where the layouts are described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixFormat {
    /// Four bits per element, a scale for each 32.
    Q4,
    /// Four bits per element, scale and minimum for each 32.
    Q4Min,
    /// Eight bits per element, a scale for each 32.
    Q8,
    /// f16, as in the file: never packed.
    F16,
    /// MXFP4: the index of one of sixteen levels per element, a power of two for each 32.
    Mxfp4,
}

/// Sizes and kernels of a matrix format.
struct FormatInfo {
    /// Elements whose quants and scales are stored together.
    block: usize,
    /// Bytes of a block's quants, or elements.
    quant_bytes: usize,
    /// Bytes of a block's scale, and minimum.
    scale_bytes: usize,
    /// Elements of a row in one ring slot of the streamed GEMV.
    chunk: usize,
    /// GEMV kernels for 1, 2, 4 and 8 rows; none for f16, which has kernels in common with other float types.
    gemv: Option<[&'static CStr; 4]>,
    /// Streamed GEMV kernels: sharing an SM with the next kernel, and wide.
    streamed: [&'static CStr; 2],
}

/// All formats, in the order of [`MatrixFormat`].
const FORMATS: [FormatInfo; 5] = [
    FormatInfo {
        block: 32,
        quant_bytes: 16,
        scale_bytes: 2,
        chunk: 4096,
        gemv: Some([c"k_gemv_q4_m1", c"k_gemv_q4_m2", c"k_gemv_q4_m4", c"k_gemv_q4_m8"]),
        streamed: [c"k_gemv_q4_streamed", c"k_gemv_q4_streamed_wide"],
    },
    FormatInfo {
        block: 32,
        quant_bytes: 16,
        scale_bytes: 4,
        chunk: 4096,
        gemv: Some([c"k_gemv_q4min_m1", c"k_gemv_q4min_m2", c"k_gemv_q4min_m4", c"k_gemv_q4min_m8"]),
        streamed: [c"k_gemv_q4min_streamed", c"k_gemv_q4min_streamed_wide"],
    },
    FormatInfo {
        block: 32,
        quant_bytes: 32,
        scale_bytes: 2,
        chunk: 2048,
        gemv: Some([c"k_gemv_q8_m1", c"k_gemv_q8_m2", c"k_gemv_q8_m4", c"k_gemv_q8_m8"]),
        streamed: [c"k_gemv_q8_streamed", c"k_gemv_q8_streamed_wide"],
    },
    FormatInfo {
        block: 8,
        quant_bytes: 16,
        scale_bytes: 0,
        chunk: 1024,
        gemv: None,
        streamed: [c"k_gemv_f16_streamed", c"k_gemv_f16_streamed_wide"],
    },
    FormatInfo {
        block: 32,
        quant_bytes: 16,
        scale_bytes: 2,
        chunk: 4096,
        gemv: Some([c"k_gemv_mxfp4_m1", c"k_gemv_mxfp4_m2", c"k_gemv_mxfp4_m4", c"k_gemv_mxfp4_m8"]),
        streamed: [c"k_gemv_mxfp4_streamed", c"k_gemv_mxfp4_streamed_wide"],
    },
];

/// Kernels that convert rows of a block format, as in the file, to bf16.
const TO_BF16: [(DType, &CStr); 8] = [
    (DType::Q4_0, c"k_q4_0_to_bf16"),
    (DType::Q4_1, c"k_q4_1_to_bf16"),
    (DType::Q5_0, c"k_q5_0_to_bf16"),
    (DType::Q5_1, c"k_q5_1_to_bf16"),
    (DType::Q8_0, c"k_q8_0_to_bf16"),
    (DType::Q4_K, c"k_q4_k_to_bf16"),
    (DType::Q5_K, c"k_q5_k_to_bf16"),
    (DType::Q6_K, c"k_q6_k_to_bf16"),
];

/// The kernel that converts rows of a block format to bf16, if it has one.
pub(super) fn to_bf16(dtype: DType) -> Option<&'static CStr> {
    TO_BF16.iter().find(|(known, _)| *known == dtype).map(|(_, name)| *name)
}

impl MatrixFormat {
    /// The packed format of a type.
    pub(super) fn of(dtype: DType) -> Option<MatrixFormat> {
        match dtype {
            DType::Q4_0 => Some(MatrixFormat::Q4),
            DType::Q4_1 | DType::Q4_K => Some(MatrixFormat::Q4Min),
            DType::Q8_0 => Some(MatrixFormat::Q8),
            DType::MXFP4 => Some(MatrixFormat::Mxfp4),
            _ => None,
        }
    }

    fn info(self) -> &'static FormatInfo {
        let [q4, q4_min, q8, f16, mxfp4] = &FORMATS;
        match self {
            MatrixFormat::Q4 => q4,
            MatrixFormat::Q4Min => q4_min,
            MatrixFormat::Q8 => q8,
            MatrixFormat::F16 => f16,
            MatrixFormat::Mxfp4 => mxfp4,
        }
    }

    /// The number that kernels know the format by.
    pub(super) fn code(self) -> i32 {
        self as i32
    }

    /// Rows of the streamed GEMV have whole blocks.
    pub(super) fn block(self) -> usize {
        self.info().block
    }

    /// Elements of a row in one ring slot of the streamed GEMV.
    pub(super) fn chunk(self) -> usize {
        self.info().chunk
    }

    /// Bytes of `elements` of a row: quants, then scales in whole 16-byte words.
    pub(super) fn row_bytes(self, elements: usize) -> usize {
        let (info, blocks) = (self.info(), elements / self.block());
        blocks * info.quant_bytes + (blocks * info.scale_bytes).next_multiple_of(16)
    }

    /// Bytes of a row's quants, and of its scales, in whole 16-byte words.
    pub(super) fn row_parts(self, elements: usize) -> (usize, usize) {
        let (info, blocks) = (self.info(), elements / self.block());
        (blocks * info.quant_bytes, (blocks * info.scale_bytes).next_multiple_of(16))
    }

    /// The GEMV kernel for up to `rows` rows.
    pub(super) fn gemv(self, rows: usize) -> Option<&'static CStr> {
        self.info().gemv.as_ref()?.get(rows.next_power_of_two().ilog2() as usize).copied()
    }

    /// The streamed GEMV kernel.
    pub(super) fn streamed(self, wide: bool) -> &'static CStr {
        let [shares_sm, alone] = self.info().streamed;
        if wide { alone } else { shares_sm }
    }
}

/// Sizes of a packed matrix's two arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedMatrix {
    pub(crate) format: MatrixFormat,
    /// Blocks of a row.
    pub(crate) blocks: usize,
    /// Offset of the scales.
    pub(crate) scales_at: usize,
    /// Bytes of both arrays.
    pub(crate) bytes: usize,
}

impl PackedMatrix {
    pub(crate) fn of(weight: &Tensor) -> Option<PackedMatrix> {
        let format = MatrixFormat::of(weight.dtype())?;
        let FormatInfo { block, quant_bytes, scale_bytes, .. } = *format.info();
        let cols = weight.shape().cols();
        if !cols.is_multiple_of(block) || weight.dims4()[0] != 1 || weight.elements() == 0 {
            return None;
        }
        let (rows, blocks) = (weight.shape().rows(), cols / block);
        let scales_at = rows.checked_mul(blocks)?.checked_mul(quant_bytes)?.next_multiple_of(256);
        // Each row's scales start at a 16-byte word.
        let scales = rows.checked_mul((blocks * scale_bytes).next_multiple_of(16))?;
        Some(PackedMatrix { format, blocks, scales_at, bytes: scales_at.checked_add(scales)? })
    }

    /// Packs `count` rows of `weight`, which start with row `first` of the matrix, into the matrix at an address.
    pub(crate) fn pack_rows(
        &self,
        pack: Function,
        mut weight: TensorArg,
        (first, count): (usize, usize),
        to: u64,
    ) -> Launch {
        let FormatInfo { quant_bytes, scale_bytes, .. } = *self.format.info();
        weight.dims = [1, 1, count as i64, weight.dims[3]];
        let quants = to + (first * self.blocks * quant_bytes) as u64;
        let scales = (first * self.scale_stride() * scale_bytes) as u64;
        Launch::over(pack, weight.rows() * self.scale_stride() as u64)
            .arg(weight)
            .arg(quants)
            .arg(to + self.scales_at as u64 + scales)
            .arg(self.blocks as i64)
            .arg(self.format.code())
    }

    /// Scales from the start of one row to that of the next.
    fn scale_stride(&self) -> usize {
        self.blocks.next_multiple_of(16 / self.format.info().scale_bytes.max(1))
    }
}

/// Shared memory that every device from compute capability 7.5 on can give a block.
pub(super) const MAX_SHARED_BYTES: usize = 64 << 10;

/// Shared memory of the experts' GEMV: activations of so many columns as 8-bit elements, with two floats for each 32.
pub(super) fn expert_gemv_shared_bytes(cols: usize) -> usize {
    cols + cols / 4
}

/// The packed layout, for a weight that only matmuls and get_rows read, or that has the matrices of experts.
pub(crate) fn layout(weight: &Tensor, uses: &[(&Op, usize)]) -> Option<WeightLayout> {
    let all = |is: fn(&Op) -> bool| uses.iter().all(|(op, input)| *input == 0 && is(op));
    let used = |is: fn(&Op) -> bool| uses.iter().any(|(op, _)| is(op));
    let of_experts = used(|op| matches!(op, Op::MulMatId)) && all(|op| matches!(op, Op::MulMatId));
    let fits = if of_experts {
        weight.dims4()[0] == 1 && expert_gemv_shared_bytes(weight.shape().cols()) <= MAX_SHARED_BYTES
    } else {
        let matrix = all(|op| matches!(op, Op::MulMat | Op::GetRows)) && weight.shape().rank() <= 2;
        matrix && used(|op| matches!(op, Op::MulMat))
    };
    if !fits {
        return None;
    }
    // Packing rounds the scale of a Q4_K group to f16: fine in a matmul, but get_rows must be exact.
    if weight.dtype() == DType::Q4_K && used(|op| matches!(op, Op::GetRows)) {
        return None;
    }
    let packed = PackedMatrix::of(weight)?;
    Some(WeightLayout { layout: Layout::Packed(0), bytes: packed.bytes, mappable: false })
}

/// Bytes of a weight that are uploaded and packed at a time, so that loading needs little memory beyond the packed
/// weight.
const SLAB_BYTES: usize = 8 << 20;

/// The launch that packs a slice of a weight along its first dimension, whose bytes are in device memory.
pub(crate) fn pack_slice(
    inner: &BackendInner,
    weight: &Tensor,
    index: usize,
    from: &Region,
    to: &Region,
) -> Result<Launch, BackendError> {
    let foreign = || BackendError::Foreign { backend: inner.context.name.clone(), what: "buffer" };
    let packed = PackedMatrix::of(weight).filter(|p| p.bytes <= to.bytes).ok_or_else(foreign)?;
    let slices = weight.shape().dims().first().copied().unwrap_or(0).max(1);
    let (rows, bytes) = (weight.shape().rows() / slices, weight.bytes() / slices);
    if index >= slices || from.bytes != bytes {
        let backend = inner.context.name.clone();
        return Err(BackendError::SizeMismatch { backend, from: from.bytes, to: bytes });
    }
    let (from, to) = (device_address(&inner.context, from)?, device_address(&inner.context, to)?);
    let function = inner.kernels.function(KernelFile::Pack, c"k_pack")?;
    Ok(packed.pack_rows(function, TensorArg::new(weight, from), (index * rows, rows), to))
}

/// The packed form of a weight that `bytes` in its file format are loaded into; an error unless they are all of it, and it fits into
/// `room` bytes. Kernels read and write as many bytes as the shape says.
fn check_load(
    backend: &str,
    weight: &Tensor,
    bytes: usize,
    room: usize,
) -> Result<PackedMatrix, BackendError> {
    let packed = PackedMatrix::of(weight)
        .ok_or_else(|| BackendError::Foreign { backend: backend.to_owned(), what: "layout" })?;
    for (from, to, fits) in
        [(bytes, weight.bytes(), bytes == weight.bytes()), (packed.bytes, room, packed.bytes <= room)]
    {
        if !fits {
            return Err(BackendError::SizeMismatch { backend: backend.to_owned(), from, to });
        }
    }
    Ok(packed)
}

/// Uploads a weight in its file format, some rows at a time, and packs it on the device.
pub(crate) fn load(
    inner: &Arc<BackendInner>,
    weight: &Tensor,
    data: &[u8],
    to: &Region,
) -> Result<(), BackendError> {
    let packed = check_load(&inner.context.name, weight, data.len(), to.bytes)?;
    let rows = weight.shape().rows();
    let row_bytes = (data.len() / rows.max(1)).max(1);
    let at_once = (SLAB_BYTES / row_bytes).clamp(1, rows.max(1));
    let raw = DeviceBuffer::new(&inner.context, at_once * row_bytes, Usage::Weights)?;
    let address = device_address(&inner.context, to)?;
    let function = inner.kernels.function(KernelFile::Pack, c"k_pack")?;
    let stream = CudaStream::new(&inner.context)?;
    for (number, slab) in data.chunks(at_once * row_bytes).enumerate() {
        raw.write(0, slab)?;
        let first = number * at_once;
        let rows = (first, slab.len() / row_bytes);
        let launch = packed.pack_rows(function, TensorArg::new(weight, raw.address()), rows, address);
        launch.issue(&inner.context, stream.handle, false)?;
        // The next slab overwrites the uploaded bytes.
        stream.synchronize()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use quadriga_graph::blocks::{
        BlockIQ1_M, BlockIQ2_S, BlockIQ2_XS, BlockIQ2_XXS, BlockIQ3_S, BlockIQ3_XXS, GridBlock,
    };

    use super::*;

    #[test]
    fn kernels_have_the_same_codes_and_block_sizes() {
        let header = include_str!("../../kernels/formats.cuh");
        let constants: HashMap<&str, i32> = header
            .lines()
            .filter_map(|line| line.trim().strip_suffix(',')?.split_once(" = "))
            .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
            .collect();
        let formats = [
            ("MATRIX_Q4", MatrixFormat::Q4),
            ("MATRIX_Q4_MIN", MatrixFormat::Q4Min),
            ("MATRIX_Q8", MatrixFormat::Q8),
            ("MATRIX_F16", MatrixFormat::F16),
            ("MATRIX_MXFP4", MatrixFormat::Mxfp4),
        ];
        for (name, format) in formats {
            assert_eq!(constants.get(name), Some(&format.code()), "{name}");
        }
        for dtype in (0..64).filter_map(DType::from_id) {
            let name = format!("{dtype:?}");
            let Some(id) = constants.get(name.as_str()) else { continue };
            assert_eq!(*id, dtype.id() as i32, "{name}");
            if let Some(bytes) = constants.get(format!("{name}_BYTES").as_str()) {
                assert_eq!(*bytes, dtype.block_bytes() as i32, "{name}");
            }
        }
    }

    #[test]
    fn kernels_read_every_weight_type() {
        let header = include_str!("../../kernels/formats.cuh");
        for dtype in DType::all().filter(|dtype| dtype.is_computable()) {
            assert!(header.contains(&format!("    case {dtype}: ")), "{dtype}");
        }
    }

    #[test]
    fn kernels_have_the_same_code_books() {
        let header = include_str!("../../kernels/code_books.cuh");
        let books: [(&str, &[u16]); 6] = [
            ("IQ1_GRID", BlockIQ1_M::BOOK),
            ("IQ2_XXS_GRID", BlockIQ2_XXS::BOOK),
            ("IQ2_XS_GRID", BlockIQ2_XS::BOOK),
            ("IQ2_S_GRID", BlockIQ2_S::BOOK),
            ("IQ3_XXS_GRID", BlockIQ3_XXS::BOOK),
            ("IQ3_S_GRID", BlockIQ3_S::BOOK),
        ];
        for (name, book) in books {
            let start = format!("__device__ const u16 {name}[{}] = {{", book.len());
            let (numbers, _) = header.split_once(&start).unwrap().1.split_once('}').unwrap();
            let hexadecimal = |number: &str| u16::from_str_radix(number.trim().strip_prefix("0x")?, 16).ok();
            let numbers: Vec<u16> = numbers.split(',').filter_map(hexadecimal).collect();
            assert_eq!(numbers, book, "{name}");
        }
    }

    #[test]
    fn every_number_of_rows_has_a_gemv_kernel() {
        for rows in 1..=MAX_GEMV_ROWS {
            let name = MatrixFormat::Q4.gemv(rows).unwrap().to_str().unwrap();
            let most: usize = name.rsplit('m').next().unwrap().parse().unwrap();
            assert!(rows <= most && most < 2 * rows, "{name} for {rows} rows");
        }
        assert_eq!(MatrixFormat::F16.gemv(1), None);
    }

    /// The weight of a graph, and what is done with it.
    fn weight(dtype: DType, dims: impl Into<quadriga_graph::Shape>) -> Tensor {
        let g = quadriga_graph::GraphBuilder::new();
        let id = g.weight("w", quadriga_graph::Weight::new(dtype, dims)).id();
        g.finish().unwrap()[id].clone()
    }

    #[test]
    fn packed_matrices_have_aligned_scales_after_their_quants() {
        let packed = |dtype, dims: [usize; 2]| PackedMatrix::of(&weight(dtype, dims));
        // Three rows of ten blocks: 16 bytes of quants each, and 20 bytes of scales in 32.
        let q4 = PackedMatrix { format: MatrixFormat::Q4, blocks: 10, scales_at: 512, bytes: 512 + 3 * 32 };
        assert_eq!(packed(DType::Q4_0, [3, 320]), Some(q4));
        let q4_1 =
            PackedMatrix { format: MatrixFormat::Q4Min, blocks: 10, scales_at: 512, bytes: 512 + 3 * 48 };
        assert_eq!(packed(DType::Q4_1, [3, 320]), Some(q4_1));
        let q8 = PackedMatrix { format: MatrixFormat::Q8, blocks: 10, scales_at: 1024, bytes: 1024 + 3 * 32 };
        assert_eq!(packed(DType::Q8_0, [3, 320]), Some(q8));
        assert_eq!(packed(DType::F16, [3, 320]), None);
        assert_eq!(packed(DType::Q4_0, [0, 320]), None);
        let experts = PackedMatrix { scales_at: 1024, bytes: 1024 + 6 * 32, ..q4 };
        assert_eq!(PackedMatrix::of(&weight(DType::Q4_0, [2, 3, 320])), Some(experts), "all experts' rows");
        assert_eq!(PackedMatrix::of(&weight(DType::Q4_0, [2, 1, 3, 320])), None, "a batch");
        // A scale of two bytes: eight in a word of 16 bytes; of four bytes: four.
        assert_eq!((q4.scale_stride(), q4_1.scale_stride()), (16, 12));
    }

    #[test]
    fn exactly_the_bytes_of_a_weight_are_packed_and_only_where_they_fit() {
        // A row has 18 bytes: with 4,095 more, whole rows would be packed behind the last one.
        let weight = weight(DType::Q4_0, [4096, 32]);
        let packed = PackedMatrix::of(&weight).unwrap();
        let check = |bytes, room| check_load("cuda:0", &weight, bytes, room);
        let bytes = weight.bytes();
        assert_eq!(bytes, 4096 * 18);
        assert_eq!(check(bytes, packed.bytes), Ok(packed));
        assert_eq!(check(bytes, packed.bytes + 1), Ok(packed));
        let mismatch = |from, to| Err(BackendError::SizeMismatch { backend: "cuda:0".to_owned(), from, to });
        for wrong in [0, 18, bytes - 18, bytes - 1, bytes + 1, bytes + 4095] {
            assert_eq!(check(wrong, packed.bytes), mismatch(wrong, bytes));
        }
        assert_eq!(check(bytes, packed.bytes - 1), mismatch(packed.bytes, packed.bytes - 1));
        let plain = self::weight(DType::F16, [4, 32]);
        assert!(matches!(
            check_load("cuda:0", &plain, plain.bytes(), 1 << 20),
            Err(BackendError::Foreign { .. })
        ));
    }

    #[test]
    fn streamed_rows_are_quants_and_padded_scales() {
        for (format, bytes) in [
            (MatrixFormat::Q4, 10 * 16 + 32),
            (MatrixFormat::Q4Min, 10 * 16 + 48),
            (MatrixFormat::Q8, 10 * 32 + 32),
            (MatrixFormat::F16, 320 * 2),
        ] {
            assert_eq!(format.row_bytes(320), bytes, "{format:?}");
            assert_ne!(format.streamed(false), format.streamed(true), "{format:?}");
        }
        assert_eq!(MatrixFormat::Q8.streamed(true), c"k_gemv_q8_streamed_wide");
        assert_eq!((MatrixFormat::Q4.chunk(), MatrixFormat::F16.chunk()), (4096, 1024));
        assert_eq!(to_bf16(DType::Q5_K), Some(c"k_q5_k_to_bf16"));
        assert_eq!(to_bf16(DType::F16), None);
    }

    #[test]
    fn weights_of_matmuls_are_packed_unless_another_use_forbids_it() {
        let packs = |dtype, uses: &[(&Op, usize)]| layout(&weight(dtype, [4, 256]), uses).is_some();
        let (matmul, rows, add) = (Op::MulMat, Op::GetRows, Op::Add1);
        assert!(packs(DType::Q4_0, &[(&matmul, 0)]));
        assert!(packs(DType::Q4_0, &[(&matmul, 0), (&rows, 0)]));
        assert!(packs(DType::Q4_K, &[(&matmul, 0)]));
        assert!(!packs(DType::Q4_K, &[(&matmul, 0), (&rows, 0)]), "rows must be exact");
        assert!(!packs(DType::Q4_0, &[(&rows, 0)]), "no matmul");
        assert!(!packs(DType::Q4_0, &[(&matmul, 0), (&add, 0)]), "another operation");
        assert!(!packs(DType::Q4_0, &[(&matmul, 1)]), "not as the matrix");
        assert!(!packs(DType::F16, &[(&matmul, 0)]));
        let found = layout(&weight(DType::Q4_0, [4, 256]), &[(&matmul, 0)]).unwrap();
        assert_eq!((found.layout, found.bytes, found.mappable), (Layout::Packed(0), 512 + 4 * 16, false));
    }
}
