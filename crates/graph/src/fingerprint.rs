//! A 128-bit fingerprint and the hasher that makes it.

use std::fmt;

use crate::shape::Shape;

/// A 128-bit hash that identifies a graph; see [`Graph::fingerprint`](crate::Graph::fingerprint).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Fingerprint(pub u128);

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// A non-cryptographic hash over 64-bit words: two lanes of multiply-and-fold, each mixed with the other's state.
pub(crate) struct Mixer(u64, u64);

impl Mixer {
    pub(crate) fn new() -> Mixer {
        Mixer(0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344)
    }

    pub(crate) fn word(&mut self, word: u64) {
        let fold = |a: u64, b: u64| {
            let wide = u128::from(a) * u128::from(b);
            (wide as u64) ^ ((wide >> 64) as u64)
        };
        let (a, b) = (self.0, self.1);
        self.0 = fold(a ^ word, 0x9e37_79b9_7f4a_7c15).wrapping_add(b);
        self.1 = fold(b ^ word.rotate_left(32), 0xc2b2_ae3d_27d4_eb4f).wrapping_add(a.rotate_left(17));
    }

    pub(crate) fn size(&mut self, n: usize) {
        self.word(n as u64);
    }

    pub(crate) fn float(&mut self, x: f32) {
        self.word(u64::from(x.to_bits()));
    }

    pub(crate) fn sizes(&mut self, all: &[usize]) {
        for n in all {
            self.size(*n);
        }
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.size(bytes.len());
        for chunk in bytes.chunks(8) {
            self.word(chunk.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte)));
        }
    }

    pub(crate) fn shape(&mut self, shape: &Shape) {
        self.size(shape.rank());
        self.sizes(&shape.dims4());
    }

    pub(crate) fn finish(mut self) -> Fingerprint {
        for _ in 0..3 {
            self.word(0x5851_f42d_4c95_7f2d);
        }
        Fingerprint((u128::from(self.0) << 64) | u128::from(self.1))
    }
}
