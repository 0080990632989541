//! Metadata values and their types, borrowed from the bytes of a file.

use std::fmt;

use crate::{
    cursor::Cursor,
    error::{FieldError, FormatErrorKind},
};

/// How deep arrays may be nested: an array of plain values has depth 1.
const MAX_DEPTH: u32 = 4;

/// The type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of the file format")]
#[repr(u32)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    /// Every type, in the order of its id.
    pub const ALL: [ValueType; 13] = {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64]
    };

    /// The type with this id, if there is one.
    pub fn from_id(id: u32) -> Option<ValueType> {
        ValueType::ALL.get(id as usize).copied()
    }

    /// The id that a file stores.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        use ValueType::*;
        match self {
            U8 => "u8",
            I8 => "i8",
            U16 => "u16",
            I16 => "i16",
            U32 => "u32",
            I32 => "i32",
            F32 => "f32",
            Bool => "bool",
            String => "string",
            Array => "array",
            U64 => "u64",
            I64 => "i64",
            F64 => "f64",
        }
    }

    /// The minimum size of a value, and whether every value has that size (strings and arrays may be larger).
    const fn size(self) -> (u64, bool) {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => (1, true),
            U16 | I16 => (2, true),
            U32 | I32 | F32 => (4, true),
            U64 | I64 | F64 => (8, true),
            String => (8, false),
            Array => (12, false),
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value, borrowed from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are those of the file format")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The value's type.
    pub fn kind(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value if it is an integer.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(value) => value.into(),
            Value::I8(value) => value.into(),
            Value::U16(value) => value.into(),
            Value::I16(value) => value.into(),
            Value::U32(value) => value.into(),
            Value::I32(value) => value.into(),
            Value::U64(value) => value.into(),
            Value::I64(value) => value.into(),
            _ => return None,
        })
    }

    /// The type and, for a number, the value, for error messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::String(text) => format!("string of {} bytes", text.len()),
            Value::Array(array) => format!("array of {} {}", array.len(), array.element_type()),
            number => format!("{} {number}", number.kind()),
        }
    }

    /// Decodes a value from its encoding, which [`check`] has validated.
    ///
    /// Bytes that another process has modified since then decode to zeros and empty strings.
    pub(crate) fn decode(kind: ValueType, bytes: &'a [u8]) -> Value<'a> {
        match kind {
            ValueType::U8 => Value::U8(u8::from_ne_bytes(fixed(bytes))),
            ValueType::I8 => Value::I8(i8::from_ne_bytes(fixed(bytes))),
            ValueType::U16 => Value::U16(u16::from_ne_bytes(fixed(bytes))),
            ValueType::I16 => Value::I16(i16::from_ne_bytes(fixed(bytes))),
            ValueType::U32 => Value::U32(u32::from_ne_bytes(fixed(bytes))),
            ValueType::I32 => Value::I32(i32::from_ne_bytes(fixed(bytes))),
            ValueType::F32 => Value::F32(f32::from_ne_bytes(fixed(bytes))),
            ValueType::Bool => Value::Bool(fixed(bytes) != [0]),
            ValueType::String => {
                Value::String(Cursor::new(bytes).string(format_args!("string")).unwrap_or_default())
            }
            ValueType::Array => {
                let element = ValueType::from_id(u32::from_ne_bytes(fixed(bytes))).unwrap_or(ValueType::U8);
                let len = u64::from_ne_bytes(fixed(bytes.get(4..).unwrap_or_default()));
                let bytes = bytes.get(12..).unwrap_or_default();
                Value::Array(Array { element, len: usize::try_from(len).unwrap_or_default(), bytes })
            }
            ValueType::U64 => Value::U64(u64::from_ne_bytes(fixed(bytes))),
            ValueType::I64 => Value::I64(i64::from_ne_bytes(fixed(bytes))),
            ValueType::F64 => Value::F64(f64::from_ne_bytes(fixed(bytes))),
        }
    }
}

/// The first `N` bytes, or zeros where there are fewer.
fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.first_chunk().copied().unwrap_or([0; N])
}

/// Prints at most eight elements of an array: `[a, b, …]`.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(value) => value.fmt(f),
            Value::I8(value) => value.fmt(f),
            Value::U16(value) => value.fmt(f),
            Value::I16(value) => value.fmt(f),
            Value::U32(value) => value.fmt(f),
            Value::I32(value) => value.fmt(f),
            Value::F32(value) => value.fmt(f),
            Value::Bool(value) => value.fmt(f),
            Value::String(value) => value.fmt(f),
            Value::Array(value) => value.fmt(f),
            Value::U64(value) => value.fmt(f),
            Value::I64(value) => value.fmt(f),
            Value::F64(value) => value.fmt(f),
        }
    }
}

/// An array of metadata values of one type, borrowed from the file; as cheap to copy as a slice.
#[derive(Clone, Copy)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The encoding of the elements.
    pub(crate) fn encoded(&self) -> &'a [u8] {
        self.bytes
    }

    /// Iterates over the elements without copying them.
    pub fn iter(&self) -> Values<'a> {
        Values { element: self.element, left: self.len, cursor: Cursor::new(self.bytes) }
    }
}

impl<'a> IntoIterator for Array<'a> {
    type Item = Value<'a>;
    type IntoIter = Values<'a>;

    fn into_iter(self) -> Values<'a> {
        self.iter()
    }
}

impl PartialEq for Array<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.element == other.element && self.len == other.len && self.iter().eq(other.iter())
    }
}

impl fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Display for Array<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (index, value) in self.iter().take(8).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match value {
                Value::String(text) => write!(f, "{comma}{text:?}")?,
                value => write!(f, "{comma}{value}")?,
            }
        }
        f.write_str(if self.len > 8 { ", …]" } else { "]" })
    }
}

/// Iterates over the elements of an [`Array`].
#[derive(Clone, Debug)]
pub struct Values<'a> {
    element: ValueType,
    left: usize,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let start = self.cursor.at();
        let field = format_args!("array element");
        let (size, exact) = self.element.size();
        let read = match self.element {
            ValueType::String => return self.cursor.string(field).ok().map(Value::String),
            _ if exact => self.cursor.take(size, field).map(|_| ()),
            kind => check(kind, &mut self.cursor, 1, field),
        };
        read.ok()?;
        Some(Value::decode(self.element, self.cursor.since(start)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

/// Validates one encoded value: bounds, types, bools and strings.
///
/// Takes time linear in its size. `depth` is the number of arrays around the value.
pub(crate) fn check(
    kind: ValueType,
    cursor: &mut Cursor<'_>,
    depth: u32,
    field: fmt::Arguments<'_>,
) -> Result<(), FieldError> {
    match kind {
        ValueType::Bool => check_bools(1, cursor, field),
        ValueType::String => cursor.string(field).map(|_| ()),
        ValueType::Array => {
            if depth == MAX_DEPTH {
                return Err(FieldError::new(
                    field,
                    cursor.at(),
                    FormatErrorKind::TooDeep { limit: MAX_DEPTH },
                ));
            }
            let element = read_type(cursor, format_args!("element type in {field}"))?;
            let (size, exact) = element.size();
            let len = cursor.count(size, format_args!("array length in {field}"))?;
            match element {
                ValueType::Bool => check_bools(len, cursor, field),
                // `count` has checked that the product neither overflows nor exceeds the file.
                _ if exact => cursor.take(len.saturating_mul(size), field).map(|_| ()),
                _ => (0..len).try_for_each(|index| {
                    check(element, cursor, depth + 1, format_args!("element {index} of {field}"))
                }),
            }
        }
        _ => cursor.take(kind.size().0, field).map(|_| ()),
    }
}

fn check_bools(len: u64, cursor: &mut Cursor<'_>, field: fmt::Arguments<'_>) -> Result<(), FieldError> {
    let start = cursor.at();
    let bytes = cursor.take(len, field)?;
    match bytes.iter().enumerate().find(|(_, byte)| **byte > 1) {
        Some((index, &found)) => Err(FieldError::new(field, start + index, FormatErrorKind::Bool { found })),
        None => Ok(()),
    }
}

/// Reads the id of a value type.
pub(crate) fn read_type(cursor: &mut Cursor<'_>, field: fmt::Arguments<'_>) -> Result<ValueType, FieldError> {
    let start = cursor.at();
    let found = cursor.u32(field)?;
    ValueType::from_id(found)
        .ok_or_else(|| FieldError::new(field, start, FormatErrorKind::ValueType { found }))
}
