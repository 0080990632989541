//! A bounds-checked reader: every read names its field, for the error message.

use std::fmt::Arguments;

use crate::error::{FieldError, FormatErrorKind};

/// A position in the bytes of a file.
///
/// Numbers are in native byte order: a file of the other order is an error as soon as its version is read.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    /// Bytes from the start of the file.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// The number of unread bytes.
    pub(crate) fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The bytes read since the position `start`.
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        self.bytes.get(start..self.at).unwrap_or_default()
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: u64, field: Arguments<'_>) -> Result<&'a [u8], FieldError> {
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .and_then(|end| self.bytes.get(self.at..end))
            .ok_or_else(|| {
                FieldError::new(
                    field,
                    self.at,
                    FormatErrorKind::Truncated { expected: len, left: self.left() },
                )
            })?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, field: Arguments<'_>) -> Result<[u8; N], FieldError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub(crate) fn magic(&mut self) -> Result<[u8; 4], FieldError> {
        self.array(format_args!("magic"))
    }

    pub(crate) fn u32(&mut self, field: Arguments<'_>) -> Result<u32, FieldError> {
        self.array(field).map(u32::from_ne_bytes)
    }

    pub(crate) fn u64(&mut self, field: Arguments<'_>) -> Result<u64, FieldError> {
        self.array(field).map(u64::from_ne_bytes)
    }

    /// A count of items that take at least `min_bytes` each. A count larger than the file can hold is an error here,
    /// before anything is allocated for the items.
    pub(crate) fn count(&mut self, min_bytes: u64, field: Arguments<'_>) -> Result<u64, FieldError> {
        let start = self.at;
        let count = self.u64(field)?;
        let left = self.left();
        if count.checked_mul(min_bytes).is_none_or(|bytes| bytes > left) {
            return Err(FieldError::new(field, start, FormatErrorKind::TooMany { count, min_bytes, left }));
        }
        Ok(count)
    }

    /// A string: its length, then UTF-8.
    pub(crate) fn string(&mut self, field: Arguments<'_>) -> Result<&'a str, FieldError> {
        let start = self.at;
        let len = self.u64(field)?;
        let bytes = self.take(len, field).map_err(|error| FieldError { offset: start as u64, ..error })?;
        str::from_utf8(bytes).map_err(|_| FieldError::new(field, start, FormatErrorKind::NotUtf8))
    }

    /// The name of a key or tensor: not empty and at most [`MAX_NAME`] bytes long.
    pub(crate) fn name(&mut self, field: Arguments<'_>) -> Result<&'a str, FieldError> {
        let start = self.at;
        let name = self.string(field)?;
        check_name(name).map_err(|kind| FieldError::new(field, start, kind))?;
        Ok(name)
    }
}

/// The longest key or tensor name, in bytes.
const MAX_NAME: u64 = 65_535;

/// Checks the name of a key or tensor.
pub(crate) fn check_name(name: &str) -> Result<(), FormatErrorKind> {
    match name.len() as u64 {
        0 => Err(FormatErrorKind::EmptyName),
        len if len > MAX_NAME => Err(FormatErrorKind::LongName { len, limit: MAX_NAME }),
        _ => Ok(()),
    }
}
