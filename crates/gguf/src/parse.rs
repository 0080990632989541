//! From the bytes of one file to checked records: where each key, value and tensor lies.

use std::ops::Range;

use quadriga_graph::{DType, MAX_DIMS, Shape};

use crate::{
    cursor::Cursor,
    error::{Fault, FormatErrorKind},
    known,
    value::{self, Value, ValueType},
};

/// The fewest bytes a key with its value can take: length, one letter, type, one byte.
const LEAST_ENTRY: u64 = 8 + 1 + 4 + 1;
/// The fewest bytes a tensor's record can take: length, one letter, count, one dimension, type, offset.
const LEAST_TENSOR: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// One file's records. Names and values stay in the file; these are their places.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) version: u32,
    pub(crate) alignment: u32,
    pub(crate) entries: Vec<Entry>,
    /// The order of `entries` by key.
    pub(crate) entries_by_key: Vec<usize>,
    pub(crate) tensors: Vec<TensorRecord>,
}

/// A key and its value.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: Range<usize>,
    pub(crate) kind: ValueType,
    pub(crate) value: Range<usize>,
}

/// A tensor.
#[derive(Debug)]
pub(crate) struct TensorRecord {
    pub(crate) name: Range<usize>,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) data: Range<usize>,
}

/// The bytes of a range that parsing has found to be inside the file.
pub(crate) fn at<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a [u8] {
    bytes.get(range.clone()).unwrap_or_default()
}

/// The text of a range that parsing has found to be UTF-8.
pub(crate) fn text_at<'a>(bytes: &'a [u8], range: &Range<usize>) -> &'a str {
    str::from_utf8(at(bytes, range)).unwrap_or_default()
}

impl Records {
    /// Finds an entry by its key.
    pub(crate) fn entry(&self, bytes: &[u8], key: &str) -> Option<&Entry> {
        let key_of = |index: &usize| self.entries.get(*index).map(|entry| at(bytes, &entry.key));
        let place =
            self.entries_by_key.binary_search_by(|index| key_of(index).cmp(&Some(key.as_bytes()))).ok()?;
        self.entries.get(*self.entries_by_key.get(place)?)
    }
}

/// Reads and checks a whole file, except that no two tensors have one name: that concerns all parts of a model.
pub(crate) fn parse(bytes: &[u8]) -> Result<Records, Fault> {
    let mut cursor = Cursor::new(bytes);
    let version = parse_version(&mut cursor)?;
    let tensor_count = cursor.u64(format_args!("tensor count"))?;
    let entry_count = cursor.count(LEAST_ENTRY, format_args!("metadata count"))?;
    let left = cursor.left();
    if tensor_count.checked_mul(LEAST_TENSOR).is_none_or(|least| least > left) {
        let problem = FormatErrorKind::TooMany { count: tensor_count, least: LEAST_TENSOR, left };
        return Err(Fault::new("tensor count", 8, problem));
    }

    // Grown as they are read, not reserved: what is kept is in proportion to what was really there.
    let mut entries = Vec::new();
    for index in 0..entry_count {
        entries.push(parse_entry(&mut cursor, index)?);
    }
    let entries_by_key = order_by_key(bytes, &entries)?;
    let mut records = Records {
        version,
        alignment: known::DEFAULT_ALIGNMENT,
        entries,
        entries_by_key,
        tensors: Vec::new(),
    };
    check_known(bytes, &records)?;
    if let Some(entry) = records.entry(bytes, known::ALIGNMENT)
        && let Value::U32(alignment) = Value::decode(entry.kind, at(bytes, &entry.value))
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

fn parse_version(cursor: &mut Cursor<'_>) -> Result<u32, Fault> {
    let found = cursor.magic()?;
    if found != *b"GGUF" {
        return Err(Fault::new("magic", 0, FormatErrorKind::Magic { found }));
    }
    let found = cursor.u32(format_args!("version"))?;
    let problem = match found {
        2 | 3 => return Ok(found),
        _ if matches!(found.swap_bytes(), 1..=3) => FormatErrorKind::ForeignByteOrder,
        _ => FormatErrorKind::Version { found },
    };
    Err(Fault::new("version", 4, problem))
}

fn parse_entry(cursor: &mut Cursor<'_>, index: u64) -> Result<Entry, Fault> {
    let key = cursor.name(format_args!("key {index}"))?;
    let key_range = cursor.at() - key.len()..cursor.at();
    let kind = value::read_type(cursor, format_args!("value type of key {key:?}"))?;
    let start = cursor.at();
    value::check(kind, cursor, 0, format_args!("value of key {key:?}"))?;
    Ok(Entry { key: key_range, kind, value: start..cursor.at() })
}

/// A tensor's record with its data length still to be placed, and the position of its offset field.
fn parse_tensor(cursor: &mut Cursor<'_>, index: u64) -> Result<(TensorRecord, (usize, u64)), Fault> {
    let name = cursor.name(format_args!("name of tensor {index}"))?;
    let name_range = cursor.at() - name.len()..cursor.at();

    let field = format_args!("dimension count of tensor {name:?}");
    let start = cursor.at();
    let count = cursor.u32(field)?;
    if count == 0 || count as usize > MAX_DIMS {
        let problem = FormatErrorKind::DimensionCount { found: count.into(), most: MAX_DIMS as u64 };
        return Err(Fault::new(field, start, problem));
    }
    let dims_start = cursor.at();
    let mut dims = [1; MAX_DIMS];
    // The file lists the innermost dimension first, a shape has it last.
    for (dim, index) in dims.iter_mut().rev().zip(0..count) {
        let field = format_args!("dimension {index} of tensor {name:?}");
        let start = cursor.at();
        let found = cursor.u64(field)?;
        if found == 0 || found > i64::MAX as u64 {
            return Err(Fault::new(field, start, FormatErrorKind::Dimension { found: found as i64 }));
        }
        *dim = usize::try_from(found).map_err(|_| Fault::new(field, start, FormatErrorKind::TooLarge))?;
    }
    let shape = dims.get(MAX_DIMS - count as usize..).and_then(Shape::new).unwrap_or(dims.into());

    let field = format_args!("type of tensor {name:?}");
    let start = cursor.at();
    let found = cursor.u32(field)?;
    let dtype = DType::from_id(found)
        .ok_or_else(|| Fault::new(field, start, FormatErrorKind::TensorType { found }))?;
    let len = byte_len(dtype, &shape)
        .map_err(|problem| Fault::new(format_args!("dimensions of tensor {name:?}"), dims_start, problem))?;

    let start = cursor.at();
    let offset = cursor.u64(format_args!("data offset of tensor {name:?}"))?;
    Ok((TensorRecord { name: name_range, dtype, shape, data: 0..len }, (start, offset)))
}

/// The bytes of a contiguous tensor: whole blocks, and no product that wraps.
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

/// Turns offsets in the data section into ranges of the file, and checks that they are aligned, inside and apart.
fn place_data(
    bytes: &[u8],
    header_end: usize,
    records: &mut Records,
    offsets: &[(usize, u64)],
) -> Result<(), Fault> {
    let alignment = records.alignment as usize;
    let start = header_end.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
    let available = bytes.len().saturating_sub(start);
    for (tensor, &(position, offset)) in records.tensors.iter_mut().zip(offsets) {
        let len = tensor.data.len();
        let problem = if offset % alignment as u64 != 0 {
            FormatErrorKind::Misaligned { found: offset, alignment: alignment as u64 }
        } else if let Ok(offset) = usize::try_from(offset)
            && offset.checked_add(len).is_some_and(|end| end <= available)
        {
            // Both sums are at most the length of the file.
            tensor.data = start + offset..start + offset + len;
            continue;
        } else {
            FormatErrorKind::OutOfRange { start: offset, len: len as u64, available: available as u64 }
        };
        let name = text_at(bytes, &tensor.name);
        return Err(Fault::new(format_args!("data offset of tensor {name:?}"), position, problem));
    }

    let mut by_start: Vec<_> = records.tensors.iter().zip(offsets).collect();
    by_start.sort_by_key(|(tensor, _)| tensor.data.start);
    for ((before, _), (after, (position, _))) in by_start.iter().zip(by_start.iter().skip(1)) {
        if before.data.end > after.data.start {
            let name = text_at(bytes, &after.name);
            let other = text_at(bytes, &before.name).to_owned();
            let field = format_args!("data offset of tensor {name:?}");
            return Err(Fault::new(field, *position, FormatErrorKind::Overlap { other }));
        }
    }
    Ok(())
}

/// The order of the entries by key; two equal keys are an error that tells where both are.
fn order_by_key(bytes: &[u8], entries: &[Entry]) -> Result<Vec<usize>, Fault> {
    let key_of = |index: &usize| entries.get(*index).map(|entry| at(bytes, &entry.key));
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(key_of);
    for (first, second) in order.iter().zip(order.iter().skip(1)) {
        if key_of(first) == key_of(second)
            && let (Some(first), Some(second)) = (entries.get(*first), entries.get(*second))
        {
            let problem = FormatErrorKind::Duplicate { first: first.key.start as u64 };
            let key = text_at(bytes, &second.key);
            return Err(Fault::new(format_args!("key {key:?}"), second.key.start, problem));
        }
    }
    Ok(order)
}

/// Checks the types of the keys with a fixed meaning.
fn check_known(bytes: &[u8], records: &Records) -> Result<(), Fault> {
    let decode = |entry: &Entry| Value::decode(entry.kind, at(bytes, &entry.value));
    let architecture = match records.entry(bytes, known::ARCHITECTURE).map(decode) {
        Some(Value::String(name)) => Some(name),
        _ => None,
    };
    for entry in &records.entries {
        let key = text_at(bytes, &entry.key);
        known::check(key, &decode(entry), architecture).map_err(|problem| {
            Fault::new(format_args!("value of key {key:?}"), entry.value.start, problem)
        })?;
    }
    Ok(())
}
