//! A checked walk over bytes: every read names its field, so that every failure can.

use std::fmt::Arguments;

use crate::error::{Fault, FormatErrorKind};

/// A position in the bytes of a file.
///
/// Numbers are in the byte order of this machine: a file of the other order is refused before anything but its
/// version is read.
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

    pub(crate) fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The bytes passed since `start`, an earlier position.
    pub(crate) fn since(&self, start: usize) -> &'a [u8] {
        self.bytes.get(start..self.at).unwrap_or_default()
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: u64, field: Arguments<'_>) -> Result<&'a [u8], Fault> {
        let bytes = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .and_then(|end| self.bytes.get(self.at..end))
            .ok_or_else(|| {
                Fault::new(field, self.at, FormatErrorKind::Truncated { wanted: len, left: self.left() })
            })?;
        self.at += bytes.len();
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, field: Arguments<'_>) -> Result<[u8; N], Fault> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub(crate) fn magic(&mut self) -> Result<[u8; 4], Fault> {
        self.array(format_args!("magic"))
    }

    pub(crate) fn u32(&mut self, field: Arguments<'_>) -> Result<u32, Fault> {
        self.array(field).map(u32::from_ne_bytes)
    }

    pub(crate) fn u64(&mut self, field: Arguments<'_>) -> Result<u64, Fault> {
        self.array(field).map(u64::from_ne_bytes)
    }

    /// A count of items that take at least `least` bytes each: more than the file can hold is refused here, before
    /// anything is made for them.
    pub(crate) fn count(&mut self, least: u64, field: Arguments<'_>) -> Result<u64, Fault> {
        let start = self.at;
        let count = self.u64(field)?;
        let left = self.left();
        if count.checked_mul(least).is_none_or(|bytes| bytes > left) {
            return Err(Fault::new(field, start, FormatErrorKind::TooMany { count, least, left }));
        }
        Ok(count)
    }

    /// A length and that many bytes of UTF-8.
    pub(crate) fn string(&mut self, field: Arguments<'_>) -> Result<&'a str, Fault> {
        let start = self.at;
        let len = self.u64(field)?;
        let bytes = self.take(len, field).map_err(|fault| Fault { offset: start as u64, ..fault })?;
        str::from_utf8(bytes).map_err(|_| Fault::new(field, start, FormatErrorKind::NotUtf8))
    }

    /// A string that names something: not empty and not absurdly long.
    pub(crate) fn name(&mut self, field: Arguments<'_>) -> Result<&'a str, Fault> {
        let start = self.at;
        let name = self.string(field)?;
        check_name(name).map_err(|problem| Fault::new(field, start, problem))?;
        Ok(name)
    }
}

/// The longest key or tensor name, in bytes.
const MAX_NAME: u64 = 65_535;

/// Whether a string can name a key or a tensor.
pub(crate) fn check_name(name: &str) -> Result<(), FormatErrorKind> {
    match name.len() as u64 {
        0 => Err(FormatErrorKind::EmptyName),
        len if len > MAX_NAME => Err(FormatErrorKind::LongName { len, limit: MAX_NAME }),
        _ => Ok(()),
    }
}
