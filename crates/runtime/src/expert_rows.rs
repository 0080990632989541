//! How many rows a batch has for each matrix of experts, and what few rows cost a host.

use quadriga_graph::{Graph, NodeId, Op};

/// A matrix of an expert costs a host as much as so many rows, beside the rows: it is read, unpacked and laid out in tiles for few
/// of them. Measured with AMX tiles: 742, 988 and 1,280 µs for 16, 32 and 64 rows of the same matrix.
const MATRIX_ROWS: f64 = 50.0;

/// The most that few rows cost: other kernels multiply fewer than a tile.
const MOST: f64 = 4.0;

/// The tokens of a batch that use some of a layer's experts each, all of which are equally likely.
///
/// ```
/// use quadriga_runtime::ExpertRows;
///
/// let batch = ExpertRows { experts: 128, used: 8, tokens: 512 };
/// assert!((batch.rows() - 32.0).abs() < 1e-9);
/// assert!(batch.host_slowness() > 2.0 && batch.host_slowness() < 3.0);
/// // A single token is bound by memory as any other.
/// assert_eq!(ExpertRows { tokens: 1, ..batch }.host_slowness(), 1.0);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertRows {
    /// Experts of the layer.
    pub experts: usize,
    /// Those that a token uses.
    pub used: usize,
    /// Tokens of the batch.
    pub tokens: usize,
}

impl ExpertRows {
    /// Those of a node that multiplies with experts' matrices; `None` for other nodes.
    pub fn of(graph: &Graph, node: NodeId) -> Option<ExpertRows> {
        let (Op::MulMatId, [weight, _, ids]) = (graph.get_node(node)?.op(), graph.inputs(node)) else {
            return None;
        };
        let [_, experts, ..] = graph.get(*weight)?.dims4();
        let [.., tokens, used] = graph.get(*ids)?.dims4();
        Some(ExpertRows { experts, used, tokens })
    }

    /// The share of the experts that any token uses.
    pub fn share(self) -> f64 {
        let unused = (1.0 - self.used as f64 / self.experts.max(1) as f64).max(0.0);
        1.0 - unused.powf(self.tokens as f64)
    }

    /// The rows of an expert, on average of those that any token uses.
    pub fn rows(self) -> f64 {
        let pairs = self.tokens as f64 * self.used as f64;
        pairs / (self.share() * self.experts.max(1) as f64).max(1e-9)
    }

    /// How many times as long a host takes for these products as for as many with one large matrix: for scheduling and for
    /// estimates of time alike.
    pub fn host_slowness(self) -> f64 {
        host_slowness(self.rows())
    }
}

/// [`ExpertRows::host_slowness`] of so many rows of each expert. With one, memory is the limit, as of any product of one row.
pub fn host_slowness(rows: f64) -> f64 {
    if rows < 1.5 { 1.0 } else { (1.0 + MATRIX_ROWS / rows).min(MOST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_cost_up_to_four_times_as_much_and_many_no_more() {
        let of = |tokens: usize| ExpertRows { experts: 128, used: 8, tokens };
        assert!((of(1).rows() - 1.0).abs() < 1e-9);
        assert_eq!([1, 64, 128, 256].map(|tokens| of(tokens).host_slowness()), [1.0, 4.0, 4.0, 4.0]);
        let slowness: Vec<f64> = (4..20).map(|power| of(1 << power).host_slowness()).collect();
        assert!(slowness.windows(2).all(|pair| pair[1] <= pair[0]), "{slowness:?}");
        assert!((of(2048).host_slowness() - (1.0 + 50.0 / 128.0)).abs() < 1e-6);
        assert!(slowness.last().is_some_and(|least| *least < 1.01));
        // Nothing is divided by zero.
        let none = ExpertRows { experts: 0, used: 0, tokens: 0 };
        assert!(none.share().is_finite() && none.rows().is_finite() && none.host_slowness().is_finite());
    }
}
