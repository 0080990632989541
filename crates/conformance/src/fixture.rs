//! Reads binary test fixtures: little-endian numbers in sequence.

use std::path::Path;

/// The bytes of a fixture file that have not been read yet.
///
/// Tests of several crates compare with results that other programs wrote to files; all of them are read by this type.
/// A read past the end yields fewer numbers, so a test that compares lengths fails.
///
/// ```
/// use quadriga_conformance::Fixture;
///
/// let mut fixture = Fixture::new([2, 0, 0, 0, 0, 0, 128, 63, 0, 0, 0, 64].to_vec());
/// let count = fixture.u32() as usize;
/// assert_eq!(fixture.f32s(count), [1.0, 2.0]);
/// assert!(fixture.rest().is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct Fixture {
    bytes: Vec<u8>,
    at: usize,
}

impl Fixture {
    /// A fixture with this content.
    pub fn new(bytes: Vec<u8>) -> Fixture {
        Fixture { bytes, at: 0 }
    }

    /// Opens a fixture file; an error names the path.
    pub fn open(path: impl AsRef<Path>) -> std::io::Result<Fixture> {
        let path = path.as_ref();
        let named =
            |error: std::io::Error| std::io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        std::fs::read(path).map(Fixture::new).map_err(named)
    }

    /// The next `len` bytes, or those that are left.
    pub fn bytes(&mut self, len: usize) -> &[u8] {
        let start = self.at;
        self.at = start.saturating_add(len).min(self.bytes.len());
        self.bytes.get(start..self.at).unwrap_or_default()
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &[u8] {
        self.bytes(usize::MAX)
    }

    /// The number of bytes that are left.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn numbers<const N: usize, T>(&mut self, count: usize, read: fn([u8; N]) -> T) -> Vec<T> {
        self.bytes(count.saturating_mul(N)).as_chunks().0.iter().map(|bytes| read(*bytes)).collect()
    }

    /// The next number; 0 at the end.
    pub fn u32(&mut self) -> u32 {
        self.numbers(1, u32::from_le_bytes).pop().unwrap_or_default()
    }

    /// The next `count` numbers.
    pub fn i32s(&mut self, count: usize) -> Vec<i32> {
        self.numbers(count, i32::from_le_bytes)
    }

    /// The next `count` numbers.
    pub fn f32s(&mut self, count: usize) -> Vec<f32> {
        self.numbers(count, f32::from_le_bytes)
    }

    /// The next `count` numbers.
    pub fn f64s(&mut self, count: usize) -> Vec<f64> {
        self.numbers(count, f64::from_le_bytes)
    }
}
