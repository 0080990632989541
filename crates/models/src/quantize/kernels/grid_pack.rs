//! How the formats with code books store indices, signs and scales.

#![expect(clippy::indexing_slicing, reason = "indices are those of entries, octets and groups of one block")]

use std::sync::LazyLock;

use quadriga_graph::blocks::{
    BlockIQ1_M, BlockIQ1_S, BlockIQ2_S, BlockIQ2_XS, BlockIQ2_XXS, BlockIQ3_S, BlockIQ3_XXS, HalfBytes,
};

use super::grid_book::{Book, GridFormat};

/// The book of a format, computed once.
macro_rules! book {
    () => {
        fn book() -> &'static Book {
            static BOOK: LazyLock<Book> = LazyLock::new(Book::of::<Format>);
            &BOOK
        }
    };
}

/// Four times seven sign bits and a scale of four bits.
fn signs_and_scale(signs: &[u8], scale: u8) -> [u8; 4] {
    let bits =
        signs.iter().enumerate().fold(0u32, |bits, (i, signs)| bits | u32::from(signs & 127) << (7 * i));
    (bits | u32::from(scale) << 28).to_le_bytes()
}

/// Sixteen numbers of four bits, two per byte.
fn pairs(numbers: &[u8; 16]) -> [u8; 8] {
    std::array::from_fn(|i| numbers[2 * i] | numbers[2 * i + 1] << 4)
}

const _: () = {
    type Format = BlockIQ2_XXS;
    impl GridFormat for Format {
        const GROUP: usize = 32;
        const LARGEST_SCALE: u8 = 15;
        const EVEN_SIGNS: bool = true;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            let groups = std::array::from_fn(|g| {
                let entries = std::array::from_fn(|i| indices[4 * g + i] as u8);
                [entries, signs_and_scale(&signs[4 * g..4 * g + 4], group_scales[2 * g])]
            });
            BlockIQ2_XXS { scale, groups }
        }
    }
};

const _: () = {
    type Format = BlockIQ2_XS;
    impl GridFormat for Format {
        const GROUP: usize = 16;
        const LARGEST_SCALE: u8 = 15;
        const EVEN_SIGNS: bool = true;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            let entries =
                std::array::from_fn(|i| (indices[i] | u16::from(signs[i] & 127) << 9).to_le_bytes());
            BlockIQ2_XS { scale, entries, group_scales: pairs(group_scales) }
        }
    }
};

const _: () = {
    type Format = BlockIQ2_S;
    impl GridFormat for Format {
        const GROUP: usize = 16;
        const LARGEST_SCALE: u8 = 15;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            BlockIQ2_S {
                scale,
                indices: std::array::from_fn(|i| indices[i] as u8),
                signs: *signs,
                indices_high: std::array::from_fn(|i| {
                    (0..4).fold(0, |bits, j| bits | ((indices[4 * i + j] >> 8) as u8) << (2 * j))
                }),
                group_scales: pairs(group_scales),
            }
        }
    }
};

const _: () = {
    type Format = BlockIQ3_XXS;
    impl GridFormat for Format {
        const GROUP: usize = 32;
        const LARGEST_SCALE: u8 = 15;
        const EVEN_SIGNS: bool = true;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            BlockIQ3_XXS {
                scale,
                indices: indices.map(|index| index as u8),
                groups: std::array::from_fn(|g| {
                    signs_and_scale(&signs[4 * g..4 * g + 4], group_scales[2 * g])
                }),
            }
        }
    }
};

const _: () = {
    type Format = BlockIQ3_S;
    impl GridFormat for Format {
        const GROUP: usize = 32;
        const LARGEST_SCALE: u8 = 15;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            BlockIQ3_S {
                scale,
                indices: indices.map(|index| index as u8),
                indices_high: std::array::from_fn(|i| {
                    (0..8).fold(0, |bits, j| bits | ((indices[8 * i + j] >> 8) as u8) << j)
                }),
                signs: *signs,
                group_scales: std::array::from_fn(|i| group_scales[4 * i] | group_scales[4 * i + 2] << 4),
            }
        }
    }
};

const _: () = {
    type Format = BlockIQ1_S;
    impl GridFormat for Format {
        const GROUP: usize = 32;
        const LARGEST_SCALE: u8 = 7;
        const SHIFTED: bool = true;
        const SHIFT_PER_GROUP: bool = true;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            let group = |g: usize| {
                let high = (0..4).fold(0u16, |bits, i| bits | (indices[4 * g + i] >> 8) << (3 * i));
                let down = u16::from(signs[4 * g] != 0);
                (high | u16::from(group_scales[2 * g]) << 12 | down << 15).to_le_bytes()
            };
            BlockIQ1_S {
                scale,
                indices: std::array::from_fn(|i| indices[i] as u8),
                groups: std::array::from_fn(group),
            }
        }
    }
};

const _: () = {
    type Format = BlockIQ1_M;
    impl GridFormat for Format {
        const GROUP: usize = 16;
        const LARGEST_SCALE: u8 = 7;
        const SHIFTED: bool = true;
        book!();

        fn pack(scale: HalfBytes, indices: &[u16; 64], signs: &[u8; 32], group_scales: &[u8; 16]) -> Self {
            let high = |e: usize| (indices[e] >> 8) as u8 | u8::from(signs[e] != 0) << 3;
            let mut block = BlockIQ1_M {
                indices: std::array::from_fn(|i| indices[i] as u8),
                indices_high: std::array::from_fn(|i| high(2 * i) | high(2 * i + 1) << 4),
                group_scales: std::array::from_fn(|i| {
                    let scales =
                        (0..4).fold(0u16, |bits, j| bits | u16::from(group_scales[4 * i + j]) << (3 * j));
                    scales.to_le_bytes()
                }),
            };
            block.set_scale(scale);
            block
        }
    }
};
