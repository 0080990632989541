//! The levels that a quant can stand for: integers in a range, or the entries of a table.

use super::simd::{Lanes, Simd};

/// Levels, and the nearest of them to a number.
pub(super) trait Levels: Copy {
    /// The level nearest to each number.
    fn nearest<S: Simd>(self, simd: S, value: S::F) -> S::F;
    /// Its index in order of size, from 0.
    fn index<S: Simd>(self, simd: S, value: S::F) -> S::F;
}

/// The integers from `low` to `high`.
#[derive(Clone, Copy)]
pub(super) struct Integers {
    pub(super) low: f32,
    pub(super) high: f32,
}

impl Levels for Integers {
    #[inline(always)]
    fn nearest<S: Simd>(self, simd: S, value: S::F) -> S::F {
        value.round().min(simd.splat(self.high)).max(simd.splat(self.low))
    }

    #[inline(always)]
    fn index<S: Simd>(self, simd: S, value: S::F) -> S::F {
        self.nearest(simd, value) - simd.splat(self.low)
    }
}

/// The `T + 1` entries of a table, in order of size.
#[derive(Clone, Copy)]
pub(super) struct Table<const T: usize> {
    first: f32,
    /// Between entry `i` and entry `i + 1`.
    bounds: [f32; T],
    /// From entry `i` to entry `i + 1`.
    steps: [f32; T],
}

impl<const T: usize> Table<T> {
    /// The levels `first` and `rest`, which are in order of size.
    pub(super) const fn new(first: i8, rest: [i8; T]) -> Table<T> {
        let (mut bounds, mut steps) = ([0.0; T], [0.0; T]);
        let (mut i, mut previous) = (0, first as f32);
        while i < T {
            #[allow(clippy::indexing_slicing, reason = "i < T")]
            {
                let level = rest[i] as f32;
                bounds[i] = (previous + level) / 2.0;
                steps[i] = level - previous;
                previous = level;
            }
            i += 1;
        }
        Table { first: first as f32, bounds, steps }
    }
}

impl<const T: usize> Levels for Table<T> {
    #[inline(always)]
    fn nearest<S: Simd>(self, simd: S, value: S::F) -> S::F {
        let mut level = simd.splat(self.first);
        for (bound, step) in self.bounds.iter().zip(self.steps) {
            level = level + simd.splat(*bound).less(value).and(simd.splat(step));
        }
        level
    }

    #[inline(always)]
    fn index<S: Simd>(self, simd: S, value: S::F) -> S::F {
        let (mut index, one) = (simd.splat(0.0), simd.splat(1.0));
        for bound in self.bounds {
            index = index + simd.splat(bound).less(value).and(one);
        }
        index
    }
}

/// The levels of IQ4_NL and IQ4_XS.
pub(super) const IQ4: Table<15> =
    Table::new(-127, [-104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);

/// The levels of MXFP4 and NVFP4, in order of size; [`e2m1_code`] has their codes.
pub(super) const E2M1: Table<14> = Table::new(-12, [-8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12]);

/// The code of the level with this index in [`E2M1`].
pub(super) const fn e2m1_code(index: u8) -> u8 {
    if index < 7 { 15 - index } else { index - 7 }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::blocks::{IQ4_LEVELS, MXFP4_LEVELS};

    use super::super::simd::Portable;
    use super::*;

    #[test]
    fn tables_have_the_levels_of_the_formats() {
        for (index, level) in IQ4_LEVELS.iter().enumerate() {
            let value = Portable.splat(f32::from(*level));
            assert_eq!(IQ4.nearest(Portable, value).store()[0], f32::from(*level));
            assert_eq!(IQ4.index(Portable, value).store()[0], index as f32);
        }
        for level in MXFP4_LEVELS {
            let value = Portable.splat(f32::from(level));
            let code = e2m1_code(E2M1.index(Portable, value).store()[0] as u8);
            assert_eq!(MXFP4_LEVELS[usize::from(code)], level);
        }
    }
}
