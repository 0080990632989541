//! The values that a kernel quantizes, and how a kernel is run with an instruction set.

use quadriga_graph::blocks::FormatError;

use super::groups::Groups;
use super::simd::{Portable, Simd};

#[cfg(target_arch = "x86_64")]
use super::simd::Avx2;

/// Whole rows of values, and the weight of the squared error of each column.
pub(super) struct Rows<'a> {
    values: &'a [f32],
    row_len: usize,
    /// One weight per column; none if all are 1.
    weights: Option<&'a [f32]>,
}

static ZEROS: [f32; 256] = [0.0; 256];
static ONES: [f32; 256] = [1.0; 256];

impl<'a> Rows<'a> {
    /// Rows of `row_len` values. Weights of another length are ignored; the caller has checked them.
    pub(super) fn new(values: &'a [f32], row_len: usize, weights: Option<&'a [f32]>) -> Rows<'a> {
        Rows { values, row_len: row_len.max(1), weights: weights.filter(|weights| weights.len() == row_len) }
    }

    /// Whether columns have different weights: then the value of largest magnitude says less about the best scale, and searches
    /// try more of them.
    #[inline(always)]
    pub(super) fn is_weighted(&self) -> bool {
        self.weights.is_some()
    }

    /// The `N` values from `N × group`, and their weights; zeros beyond the end.
    #[inline(always)]
    pub(super) fn group<const N: usize>(&self, group: usize) -> (&'a [f32; N], &'a [f32; N]) {
        let start = group * N;
        let values = self.values.get(start..).and_then(|rest| rest.first_chunk());
        let column = start % self.row_len;
        let weights =
            self.weights.and_then(|weights| weights.get(column..)).and_then(|rest| rest.first_chunk());
        let zeros = ZEROS.first_chunk();
        match (values, weights.or_else(|| ONES.first_chunk()), zeros) {
            (Some(values), Some(weights), _) => (values, weights),
            (None, Some(weights), Some(zeros)) => (zeros, weights),
            // Groups have at most 256 elements.
            _ => (&[0.0; N], &[0.0; N]),
        }
    }

    /// Eight groups of `N` values.
    #[inline(always)]
    pub(super) fn groups<S: Simd, const N: usize>(&self, simd: S, first: usize) -> Groups<S, N> {
        let (mut values, mut weights) = ([&[0.0; N]; 8], [&[0.0; N]; 8]);
        for (i, (values, weights)) in values.iter_mut().zip(&mut weights).enumerate() {
            (*values, *weights) = self.group(first + i);
        }
        Groups::load(simd, values, weights)
    }
}

/// Quantizes rows to one format.
pub(super) trait Kernel {
    /// Quantizes all values. `out` has the bytes that they take.
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError>;
}

/// The instructions that a kernel uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instructions {
    /// The best that the CPU has.
    Best,
    /// Plain Rust: the judge of the others, which compute the same bits.
    Portable,
}

/// Runs a kernel.
pub(super) fn run<K: Kernel>(
    instructions: Instructions,
    rows: &Rows<'_>,
    out: &mut [u8],
) -> Result<(), FormatError> {
    #[cfg(target_arch = "x86_64")]
    if instructions == Instructions::Best
        && let Some(simd) = Avx2::detect()
    {
        // SAFETY: the CPU has AVX2.
        return unsafe { run_avx2::<K>(simd, rows, out) };
    }
    let _ = instructions;
    K::run(Portable, rows, out)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2<K: Kernel>(simd: Avx2, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
    K::run(simd, rows, out)
}
