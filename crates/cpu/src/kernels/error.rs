//! Errors of kernels.

use quadriga_graph::DType;

use crate::pool::Stopped;

/// Why a kernel did not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// There is no kernel for this type.
    #[error("the CPU cannot compute with {dtype}")]
    Type {
        /// The type.
        dtype: DType,
    },
    /// A row is not a whole number of blocks.
    #[error("{columns} columns are not a whole number of {dtype} blocks of {}", dtype.block_len())]
    Blocks {
        /// The type.
        dtype: DType,
        /// Columns of the matrix.
        columns: usize,
    },
    /// Sizes overflow.
    #[error("a matrix of {rows} × {columns} is too large")]
    TooLarge {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        columns: usize,
    },
    /// A buffer or list is shorter than the kernel needs.
    #[error("{what}: has {has}, needs {needs}")]
    Short {
        /// The buffer or list.
        what: &'static str,
        /// Its length.
        has: usize,
        /// The length needed.
        needs: usize,
    },
    /// Two sizes that must be equal are not.
    #[error("{what}: {left} and {right} differ")]
    Differ {
        /// The two sizes.
        what: &'static str,
        /// One size.
        left: usize,
        /// The other.
        right: usize,
    },
    /// A row index is out of range.
    #[error("row {row} of {rows}")]
    Row {
        /// The index.
        row: usize,
        /// How many rows there are.
        rows: usize,
    },
    /// Another thread failed.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}
