//! How much memory a split works in: known from shapes alone, so that a plan holds it before anything is compiled.

use quadriga_graph::{DType, Graph, NodeId, Op};

use super::attention::Pieces;
use super::matrix::{DENSE_BYTES, FEW};
use super::simple::MOST_SORTED;
use crate::blas::WORKSPACE;

/// Scratch arrays start at multiples of this.
const ALIGNMENT: usize = 256;

/// The bytes of some arrays, one after another.
pub(super) fn together<const N: usize>(arrays: [usize; N]) -> usize {
    arrays.iter().fold(0, |sum, bytes| sum.saturating_add(aligned(*bytes)))
}

pub(super) fn aligned(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX)
}

/// What a split works in: first cuBLAS's workspace, then query, key and value of one token where attention takes them
/// as products leave them, then the arrays of the node that is being computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) workspace: usize,
    pub(crate) rows: usize,
    pub(crate) arrays: usize,
}

impl Scratch {
    pub(crate) fn total(&self) -> usize {
        self.workspace.saturating_add(self.rows).saturating_add(self.arrays)
    }
}

/// The most that any of these nodes takes, whichever of its kernels it becomes.
pub(crate) fn bytes(graph: &Graph, nodes: &[NodeId], blas: bool, multiprocessors: u32) -> Scratch {
    let mut most = Scratch::default();
    for node in nodes {
        let inputs = graph.inputs(*node);
        let tensor = |at: usize| inputs.get(at).and_then(|id| graph.get(*id));
        let op = graph.get_node(*node).map(|node| node.op());
        let arrays = match (op, tensor(0), tensor(1), tensor(2)) {
            (Some(Op::MulMat), Some(weight), Some(x), _) => {
                let (n, k, m) = (weight.shape().rows(), weight.shape().cols(), x.shape().rows());
                if m > FEW && blas {
                    most.workspace = WORKSPACE;
                }
                product(weight.dtype(), (n, k, m), blas)
            }
            (Some(Op::Attention(_)), Some(q), _, Some(v)) => {
                let [b, h, t, _] = q.dims4();
                let [_, groups, keys, e] = v.dims4();
                if b * t == 1 && v.dtype() == DType::F16 {
                    most.rows = most.rows.max(together([h * e * 4, groups * e * 4, groups * e * 4]));
                }
                Pieces::most_bytes([b, h, t].map(|n| n as u64), keys as u64, e, multiprocessors)
            }
            (Some(Op::ArgSort { .. } | Op::TopK { .. }), Some(x), ..) if x.shape().cols() > MOST_SORTED => {
                together(sort(x.elements()))
            }
            _ => 0,
        };
        most.arrays = most.arrays.max(arrays);
    }
    most
}

/// Two lists of the indices of all elements.
pub(super) fn sort(elements: usize) -> [usize; 2] {
    [elements.saturating_mul(4); 2]
}

/// Rows quantized to eight bits, in blocks of 32: the elements, and two numbers for each block.
pub(super) fn quantized(rows: usize, blocks: usize) -> [usize; 2] {
    [rows.saturating_mul(blocks * 32), rows.saturating_mul(blocks * 8)]
}

/// Rows as f16, and a scale for each.
pub(super) fn halves(m: usize, k: usize) -> [usize; 2] {
    [m.saturating_mul(k * 2), m.saturating_mul(4)]
}

/// Rows in a type of `size` bytes an element, and as many of the weight's rows as are converted at once.
pub(super) fn dense(m: usize, k: usize, size: usize, n: usize) -> [usize; 2] {
    [m.saturating_mul(k * size), rows_at_once(k, size, n).saturating_mul(k * size)]
}

/// How many of a weight's rows are converted at once.
pub(super) fn rows_at_once(k: usize, size: usize, n: usize) -> usize {
    (DENSE_BYTES / (k * size).max(1)).clamp(1, n.max(1))
}

fn product(dtype: DType, (n, k, m): (usize, usize, usize), blas: bool) -> usize {
    let blocks = k.div_ceil(32);
    if m <= FEW {
        return together(quantized(m.next_power_of_two(), blocks));
    }
    match dtype {
        _ if !blas => together(quantized(m.next_multiple_of(FEW), blocks)),
        DType::F16 => together(halves(m, k)),
        DType::F32 => together(dense(m, k, 4, n)),
        _ => together(dense(m, k, 2, n)),
    }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{GraphBuilder, Weight};

    use super::*;

    fn of(build: impl FnOnce(&GraphBuilder), blas: bool) -> Scratch {
        let g = GraphBuilder::new();
        build(&g);
        let graph = g.finish().unwrap();
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        bytes(&graph, &nodes, blas, 132)
    }

    fn product_of(dtype: DType, rows: usize, blas: bool) -> Scratch {
        of(
            |g| {
                let w = g.weight("w", Weight::new(dtype, [11008, 4096]));
                g.output("y", w.mul_mat(g.input("x", DType::F32, [rows, 4096])));
            },
            blas,
        )
    }

    #[test]
    fn products_of_many_rows_hold_their_rows_some_of_the_weight_and_a_workspace() {
        let many = product_of(DType::Q4_0, 512, true);
        assert_eq!(many.workspace, WORKSPACE);
        // 11,008 rows of 8 KiB are less than what is converted at once.
        assert_eq!(many.arrays, 512 * 4096 * 2 + 11008 * 4096 * 2);
        assert_eq!(product_of(DType::F16, 512, true).arrays, 512 * 4096 * 2 + 512 * 4);
        assert!(product_of(DType::F32, 512, true).arrays <= 512 * 4096 * 4 + DENSE_BYTES);
        // Without cuBLAS, rows of eight bits.
        assert_eq!(
            product_of(DType::Q4_0, 512, false),
            Scratch { workspace: 0, rows: 0, arrays: 512 * (4096 + 1024) }
        );
    }

    #[test]
    fn one_row_takes_little_and_elementwise_work_nothing() {
        assert_eq!(product_of(DType::Q4_0, 1, true), Scratch { workspace: 0, rows: 0, arrays: 4096 + 1024 });
        let sum = of(
            |g| {
                let x = g.input("x", DType::F32, [64, 64]);
                g.output("y", x.add(x));
            },
            true,
        );
        assert_eq!(sum.total(), 0);
    }

    #[test]
    fn long_rows_are_sorted_between_two_lists() {
        let sorted =
            |cols: usize| of(|g| g.output("y", g.input("x", DType::F32, [3, cols]).top_k(5)), true).total();
        assert_eq!(sorted(MOST_SORTED), 0);
        assert_eq!(sorted(50_000), 2 * aligned(3 * 50_000 * 4));
    }
}
