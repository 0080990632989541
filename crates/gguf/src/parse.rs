//! The parser of one file: bytes to validated records of keys, values and tensors.

use std::ops::Range;

use quadriga_graph::{DType, MAX_DIMS, Shape};

use crate::{
    cursor::Cursor,
    error::{FieldError, FormatErrorKind},
    known,
    value::{self, Value, ValueType},
};

/// The minimum size of a key with its value: length, one letter, type, one byte.
const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;
/// The minimum size of a tensor record: length, one letter, count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The records of one file: byte ranges of names and values, which stay in the file.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) version: u32,
    /// Whether the container is that of PowerInfer.
    pub(crate) is_powerinfer: bool,
    pub(crate) alignment: u32,
    pub(crate) entries: Vec<MetadataEntry>,
    /// The order of `entries` by key.
    pub(crate) entries_by_key: Vec<usize>,
    pub(crate) tensors: Vec<TensorRecord>,
}

/// The byte ranges of a key and its value.
#[derive(Debug)]
pub(crate) struct MetadataEntry {
    pub(crate) key: Range<usize>,
    pub(crate) kind: ValueType,
    pub(crate) value: Range<usize>,
}

/// Type and shape of a tensor, and the byte ranges of its name and data.
#[derive(Debug)]
pub(crate) struct TensorRecord {
    pub(crate) name: Range<usize>,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) data: Range<usize>,
}

/// The bytes of a range, which the parser has checked to be inside the file.
pub(crate) fn bytes_at<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a [u8] {
    bytes.get(range.clone()).unwrap_or_default()
}

/// The text of a range, which the parser has checked to be UTF-8.
pub(crate) fn text_at<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a str {
    str::from_utf8(bytes_at(bytes, range)).unwrap_or_default()
}

impl Records {
    /// Finds an entry by its key.
    pub(crate) fn entry(&self, bytes: &[u8], key: &str) -> Option<&MetadataEntry> {
        let key_of = |index: &usize| self.entries.get(*index).map(|entry| bytes_at(bytes, &entry.key));
        let place =
            self.entries_by_key.binary_search_by(|index| key_of(index).cmp(&Some(key.as_bytes()))).ok()?;
        self.entries.get(*self.entries_by_key.get(place)?)
    }
}

/// Parses and validates a file. Duplicate tensor names are checked by the caller, over all parts of a model.
pub(crate) fn parse(bytes: &[u8]) -> Result<Records, FieldError> {
    let mut cursor = Cursor::new(bytes);
    let (version, is_powerinfer) = parse_version(&mut cursor)?;
    let tensor_count = cursor.u64(format_args!("tensor count"))?;
    let entry_count = cursor.count(MIN_ENTRY_BYTES, format_args!("metadata count"))?;
    let left = cursor.left();
    if tensor_count.checked_mul(MIN_TENSOR_BYTES).is_none_or(|bytes| bytes > left) {
        let kind = FormatErrorKind::TooMany { count: tensor_count, min_bytes: MIN_TENSOR_BYTES, left };
        return Err(FieldError::new("tensor count", 8, kind));
    }

    // Not reserved up front: a hostile count must not allocate more memory than the file has content.
    let mut entries = Vec::new();
    for index in 0..entry_count {
        entries.push(parse_entry(&mut cursor, index)?);
    }
    let entries_by_key = order_by_key(bytes, &entries)?;
    let mut records = Records {
        version,
        is_powerinfer,
        alignment: known::DEFAULT_ALIGNMENT,
        entries,
        entries_by_key,
        tensors: Vec::new(),
    };
    check_known(bytes, &records)?;
    if let Some(entry) = records.entry(bytes, known::ALIGNMENT)
        && let Value::U32(alignment) = Value::decode(entry.kind, bytes_at(bytes, &entry.value))
    {
        records.alignment = alignment;
    }

    let mut offsets = Vec::new();
    for index in 0..tensor_count {
        let (tensor, offset) = parse_tensor(&mut cursor, index)?;
        records.tensors.push(tensor);
        offsets.push(offset);
    }
    place_data(bytes, cursor.at(), &mut records, &offsets)?;
    Ok(records)
}

/// The version, and whether the container is that of PowerInfer, which differs in the first bytes only.
fn parse_version(cursor: &mut Cursor<'_>) -> Result<(u32, bool), FieldError> {
    let found = cursor.magic()?;
    let is_powerinfer = found == known::POWERINFER_MAGIC;
    if found != known::MAGIC && !is_powerinfer {
        return Err(FieldError::new("magic", 0, FormatErrorKind::Magic { found }));
    }
    let found = cursor.u32(format_args!("version"))?;
    let kind = match found {
        2 | 3 => return Ok((found, is_powerinfer)),
        _ if matches!(found.swap_bytes(), 1..=3) => FormatErrorKind::ForeignByteOrder,
        _ => FormatErrorKind::Version { found },
    };
    Err(FieldError::new("version", 4, kind))
}

fn parse_entry(cursor: &mut Cursor<'_>, index: u64) -> Result<MetadataEntry, FieldError> {
    let key = cursor.name(format_args!("key {index}"))?;
    let key_range = cursor.at() - key.len()..cursor.at();
    let kind = value::read_type(cursor, format_args!("value type of key {key:?}"))?;
    let start = cursor.at();
    value::check(kind, cursor, 0, format_args!("value of key {key:?}"))?;
    Ok(MetadataEntry { key: key_range, kind, value: start..cursor.at() })
}

/// A tensor record whose data range has only its length yet, with position and value of its offset field.
fn parse_tensor(cursor: &mut Cursor<'_>, index: u64) -> Result<(TensorRecord, (usize, u64)), FieldError> {
    let name = cursor.name(format_args!("name of tensor {index}"))?;
    let name_range = cursor.at() - name.len()..cursor.at();

    let field = format_args!("dimension count of tensor {name:?}");
    let start = cursor.at();
    let count = cursor.u32(field)?;
    if count == 0 || count as usize > MAX_DIMS {
        let kind = FormatErrorKind::DimensionCount { found: count.into(), max: MAX_DIMS as u64 };
        return Err(FieldError::new(field, start, kind));
    }
    let dims_start = cursor.at();
    let mut dims = [1; MAX_DIMS];
    // The file lists the innermost dimension first, `Shape` the outermost.
    for (dim, index) in dims.iter_mut().rev().zip(0..count) {
        let field = format_args!("dimension {index} of tensor {name:?}");
        let start = cursor.at();
        let found = cursor.u64(field)?;
        if found == 0 || found > i64::MAX as u64 {
            return Err(FieldError::new(field, start, FormatErrorKind::Dimension { found: found as i64 }));
        }
        *dim =
            usize::try_from(found).map_err(|_| FieldError::new(field, start, FormatErrorKind::TooLarge))?;
    }
    let shape = dims.get(MAX_DIMS - count as usize..).and_then(Shape::new).unwrap_or(dims.into());

    let field = format_args!("type of tensor {name:?}");
    let start = cursor.at();
    let found = cursor.u32(field)?;
    let dtype = DType::from_id(found)
        .ok_or_else(|| FieldError::new(field, start, FormatErrorKind::TensorType { found }))?;
    let len = byte_len(dtype, &shape)
        .map_err(|kind| FieldError::new(format_args!("dimensions of tensor {name:?}"), dims_start, kind))?;

    let start = cursor.at();
    let offset = cursor.u64(format_args!("data offset of tensor {name:?}"))?;
    Ok((TensorRecord { name: name_range, dtype, shape, data: 0..len }, (start, offset)))
}

/// The size of a contiguous tensor: an error unless rows are whole blocks and nothing overflows.
pub(crate) fn byte_len(dtype: DType, shape: &Shape) -> Result<usize, FormatErrorKind> {
    if shape.checked_elements().is_none_or(|elements| i64::try_from(elements).is_err()) {
        return Err(FormatErrorKind::TooLarge);
    }
    let (len, block) = (shape.cols(), dtype.block_len());
    if !len.is_multiple_of(block) {
        return Err(FormatErrorKind::PartialBlock { len: len as u64, block: block as u64, dtype });
    }
    dtype.row_bytes(len).and_then(|row| row.checked_mul(shape.rows())).ok_or(FormatErrorKind::TooLarge)
}

/// Converts offsets in the data section to ranges of the file: aligned, inside the file and without overlap.
fn place_data(
    bytes: &[u8],
    header_end: usize,
    records: &mut Records,
    offsets: &[(usize, u64)],
) -> Result<(), FieldError> {
    let alignment = records.alignment as usize;
    let start = header_end.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
    let available = bytes.len().saturating_sub(start);
    let ends = records
        .tensors
        .iter()
        .zip(offsets)
        .map(|(tensor, (_, offset))| offset.saturating_add(tensor.data.len() as u64));
    let needed = ends.max().unwrap_or(0);
    for (tensor, &(position, offset)) in records.tensors.iter_mut().zip(offsets) {
        let len = tensor.data.len();
        let kind = if offset % alignment as u64 != 0 {
            FormatErrorKind::Misaligned { found: offset, alignment: alignment as u64 }
        } else if let Ok(offset) = usize::try_from(offset)
            && offset.checked_add(len).is_some_and(|end| end <= available)
        {
            // Both sums are at most the file's length.
            tensor.data = start + offset..start + offset + len;
            continue;
        } else {
            let start = start as u64;
            FormatErrorKind::OutOfRange {
                start: offset,
                len: len as u64,
                available: available as u64,
                found: bytes.len() as u64,
                expected: start.saturating_add(needed),
            }
        };
        let name = text_at(bytes, &tensor.name);
        return Err(FieldError::new(format_args!("data offset of tensor {name:?}"), position, kind));
    }

    let mut by_start: Vec<_> = records.tensors.iter().zip(offsets).collect();
    by_start.sort_by_key(|(tensor, _)| tensor.data.start);
    for ((before, _), (after, (position, _))) in by_start.iter().zip(by_start.iter().skip(1)) {
        if before.data.end > after.data.start {
            let name = text_at(bytes, &after.name);
            let other = text_at(bytes, &before.name).to_owned();
            let field = format_args!("data offset of tensor {name:?}");
            return Err(FieldError::new(field, *position, FormatErrorKind::Overlap { other }));
        }
    }
    Ok(())
}

/// The indices of the entries sorted by key; a duplicate key is an error with both offsets.
fn order_by_key(bytes: &[u8], entries: &[MetadataEntry]) -> Result<Vec<usize>, FieldError> {
    let key_of = |index: &usize| entries.get(*index).map(|entry| bytes_at(bytes, &entry.key));
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(key_of);
    for (first, second) in order.iter().zip(order.iter().skip(1)) {
        if key_of(first) == key_of(second)
            && let (Some(first), Some(second)) = (entries.get(*first), entries.get(*second))
        {
            let kind = FormatErrorKind::Duplicate { first: first.key.start as u64 };
            let key = text_at(bytes, &second.key);
            return Err(FieldError::new(format_args!("key {key:?}"), second.key.start, kind));
        }
    }
    Ok(order)
}

/// Checks the values of the keys that the format defines.
fn check_known(bytes: &[u8], records: &Records) -> Result<(), FieldError> {
    let decode = |entry: &MetadataEntry| Value::decode(entry.kind, bytes_at(bytes, &entry.value));
    let architecture = match records.entry(bytes, known::ARCHITECTURE).map(decode) {
        Some(Value::String(name)) => Some(name),
        _ => None,
    };
    for entry in &records.entries {
        let key = text_at(bytes, &entry.key);
        known::check(key, &decode(entry), architecture)
            .map_err(|kind| FieldError::new(format_args!("value of key {key:?}"), entry.value.start, kind))?;
    }
    Ok(())
}
