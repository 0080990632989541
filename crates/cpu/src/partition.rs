//! How an operation is cut into units of work, and which bytes of a tensor each unit touches.
//!
//! Kernels iterate over the rows and columns that [`Partition::unit`] gives, and fusion compares the byte ranges that
//! [`Partition::share`] derives from the same numbers: two operations run without a barrier between them only if unit
//! `u` of one touches exactly what unit `u` of the other touches.

use std::ops::Range;

use crate::view::{SEGMENT, TensorView};

/// With fewer rows than this, rows are cut into pieces.
const FEW_ROWS: usize = 16;

/// Columns of a piece: whole blocks of every type.
const PIECE: usize = 16 * SEGMENT;

/// Units of work over a tensor in row-major order: groups of whole rows, or pieces of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// Rows, or equal groups of rows.
    groups: usize,
    /// Units of a group.
    pieces: usize,
    /// Columns of a row; only used where rows are cut into pieces.
    cols: usize,
}

/// The bytes of a contiguous tensor that each unit touches: groups of `stride` bytes, each cut into units of `bytes`
/// bytes, of which the last may be shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitShare {
    stride: usize,
    bytes: usize,
}

impl Partition {
    /// `units` units of equally many whole rows.
    pub(crate) fn equal(units: usize) -> Partition {
        Partition { groups: units, pieces: 1, cols: 0 }
    }

    /// One unit per row of a tensor; several where it has few, long rows.
    pub(crate) fn by_pieces(view: &TensorView) -> Partition {
        let (groups, cols) = (view.rows(), view.cols());
        let pieces = if groups < FEW_ROWS { cols.div_ceil(PIECE).max(1) } else { 1 };
        Partition { groups, pieces, cols }
    }

    /// The number of units.
    pub(crate) fn units(self) -> usize {
        self.groups * self.pieces
    }

    /// Whether a unit is at least one whole row.
    pub(crate) fn is_by_rows(self) -> bool {
        self.pieces == 1
    }

    /// The row and the columns of a unit of a partition [by pieces](Partition::by_pieces).
    pub(crate) fn unit(self, unit: usize) -> (usize, Range<usize>) {
        if self.pieces == 1 {
            return (unit, 0..self.cols);
        }
        let first = unit % self.pieces * PIECE;
        (unit / self.pieces, first..(first + PIECE).min(self.cols))
    }

    /// The bytes of a tensor that each unit touches, if it touches nothing outside its own rows and columns of it.
    /// `None` for tensors that are not contiguous or that cannot be cut like this.
    pub(crate) fn share(self, view: &TensorView) -> Option<UnitShare> {
        let total = view.range().len();
        if self.groups == 0 || !view.is_contiguous() || !total.is_multiple_of(self.groups) {
            return None;
        }
        let stride = total / self.groups;
        if self.pieces == 1 {
            return Some(UnitShare { stride, bytes: stride });
        }
        if view.rows() != self.groups || view.cols() != self.cols {
            return None;
        }
        let bytes = view.dtype.row_bytes(PIECE)?;
        // Without a remainder the units are equal shares of the whole tensor, whatever its rows are.
        let stride = if stride.is_multiple_of(bytes) { bytes } else { stride };
        Some(UnitShare { stride, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quadriga_graph::{DType, Graph, GraphBuilder};

    fn tensor(dtype: DType, rows: usize, cols: usize) -> Graph {
        let g = GraphBuilder::new();
        g.output("y", g.input("x", dtype, [rows, cols]).cast(DType::F32));
        g.finish().unwrap()
    }

    impl UnitShare {
        /// The bytes of a unit, counted from the start of a tensor of `total` bytes.
        fn range(self, unit: usize, total: usize) -> Range<usize> {
            let pieces = self.stride.div_ceil(self.bytes);
            let group = unit / pieces * self.stride;
            let first = group + unit % pieces * self.bytes;
            first..(first + self.bytes).min(group + self.stride).min(total)
        }
    }

    #[test]
    fn the_bytes_of_a_unit_are_those_of_its_rows_and_columns() {
        for dtype in [DType::F32, DType::F16] {
            for rows in [1, 2, 3, 15, 16, 17] {
                for cols in [1, 512, 6144, PIECE - 1, PIECE, PIECE + 1, 12288, 2 * PIECE, 3 * PIECE - 5] {
                    let graph = tensor(dtype, rows, cols);
                    // SAFETY: only the numbers of the view are used.
                    let view = unsafe {
                        TensorView::new(&graph[graph.leaf("x").unwrap()], std::ptr::null_mut::<u8>())
                    };
                    let partition = Partition::by_pieces(&view);
                    let share = partition.share(&view).unwrap();
                    let size = dtype.block_bytes();
                    let mut end = 0;
                    for unit in 0..partition.units() {
                        let (row, columns) = partition.unit(unit);
                        let bytes = (row * cols + columns.start) * size..(row * cols + columns.end) * size;
                        assert_eq!(share.range(unit, rows * cols * size), bytes, "{dtype} {rows} × {cols}");
                        assert_eq!(bytes.start, end);
                        end = bytes.end;
                    }
                    assert_eq!(end, rows * cols * size);
                }
            }
        }
    }

    #[test]
    fn pieces_with_a_remainder_differ_from_rows_of_equal_length() {
        let graph = tensor(DType::F32, 1, 12288);
        // SAFETY: only the numbers of the view are used.
        let view = unsafe { TensorView::new(&graph[graph.leaf("x").unwrap()], std::ptr::null_mut::<u8>()) };
        let pieces = Partition::by_pieces(&view);
        let rows = Partition::equal(2);
        assert_eq!(pieces.units(), rows.units());
        assert_ne!(pieces.share(&view), rows.share(&view));
    }
}
