//! The code books of formats as tables of levels.

use quadriga_graph::blocks::{GridBlock, HalfBytes};

/// A format with a code book, and how its blocks are packed.
pub(super) trait GridFormat: GridBlock {
    /// Elements that share a scale.
    const GROUP: usize;
    /// The largest scale of a group.
    const LARGEST_SCALE: u8;
    /// Whether the number of negative signs in eight elements is even.
    const EVEN_SIGNS: bool = false;
    /// Whether entries are shifted, up or down, in place of signs.
    const SHIFTED: bool = false;
    /// Whether a group is shifted as a whole, not entry by entry.
    const SHIFT_PER_GROUP: bool = false;

    /// The levels of the format's entries.
    fn book() -> &'static Book;

    /// The block: indices of entries, sign bits of eight elements at a time, scales of sixteen elements at a time.
    fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self;
}

/// The levels of all entries of a book: for each element of an entry, those of eight entries at a time.
pub(super) struct Book {
    /// `levels[octet × length + element]`: the levels of that element in the eight entries of the octet.
    pub(super) levels: Vec<[f32; 8]>,
    /// Elements of an entry.
    pub(super) length: usize,
    /// Eights of entries of one variant.
    pub(super) octets: usize,
    /// Variants of the book, of which all vectors of a group use the same.
    pub(super) variants: usize,
    /// The largest magnitude of a level.
    pub(super) largest: f32,
    /// The smallest magnitude of a level that is not zero.
    pub(super) smallest: f32,
}

impl Book {
    /// The book of a format. Where the elements of every entry are shifted on their own, the entries shifted down follow
    /// those shifted up; where a group is shifted as a whole, they are another variant.
    pub(super) fn of<B: GridFormat>() -> Book {
        let bits = 16 / B::ENTRY_LEN;
        let shifts: usize = if B::SHIFTED { 2 } else { 1 };
        let mut levels = Vec::new();
        for shift in 0..shifts {
            for entries in B::BOOK.as_chunks::<8>().0 {
                for element in 0..B::ENTRY_LEN {
                    levels.push(entries.map(|entry| {
                        let code = usize::from(entry) >> (element * bits) & ((1 << bits) - 1);
                        f32::from(B::LEVELS.get(2 * code + shift).copied().unwrap_or_default())
                    }));
                }
            }
        }
        let variants = if B::SHIFTED && B::SHIFT_PER_GROUP { 2 } else { 1 };
        let octets = levels.len() / B::ENTRY_LEN / variants;
        let largest = levels.as_flattened().iter().fold(0.0f32, |most, level| most.max(level.abs()));
        let magnitudes = levels.as_flattened().iter().map(|level| level.abs()).filter(|level| *level > 0.0);
        let smallest = magnitudes.fold(largest, f32::min);
        Book { levels, length: B::ENTRY_LEN, octets, variants, largest, smallest }
    }
}
