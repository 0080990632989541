//! The work of experts that ranks divide: a token uses some of one rank's, and all wait for the rank that has the most of them.

use quadriga_graph::{Graph, NodeId, Op};
use quadriga_runtime::{Cost, ExpertRows};

use crate::hyperparameters::Experts;

/// The experts of a model of which each rank has a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DividedExperts {
    /// All experts of a layer.
    pub(super) count: usize,
    /// Those that a token uses.
    pub(super) used: usize,
    /// Tokens of a batch.
    pub(super) tokens: usize,
}

impl DividedExperts {
    pub(super) fn new(experts: Experts, tokens: usize) -> DividedExperts {
        DividedExperts { count: experts.count, used: experts.used, tokens }
    }

    /// How many rows an expert has, wherever it is.
    pub(super) fn rows(&self) -> ExpertRows {
        ExpertRows { experts: self.count, used: self.used, tokens: self.tokens }
    }

    /// The work of a matmul with experts: what the rank with the most of those that tokens use has to do. Several tokens use some of
    /// them in common, on one rank as on several.
    pub(super) fn cost(&self, graph: &Graph, node: NodeId, all: Cost) -> Cost {
        let (Op::MulMatId, Some(weight)) = (graph[node].op(), graph.inputs(node).first()) else { return all };
        let own = graph[*weight].dims4()[1];
        if own == 0 || self.used == 0 || (own >= self.count && self.tokens == 1) {
            return all;
        }
        let (pairs, ranks) = ((self.tokens * self.used) as f64, self.count.div_ceil(own));
        let [share, read] = if self.tokens == 1 {
            let most = expected_most(own, ranks, self.used);
            [most / self.used as f64, most]
        } else {
            let (count, own) = (self.count as f64, own as f64);
            // Of each expert: that not all tokens miss it.
            let is_used =
                1.0 - (1.0 - self.used as f64 / count).max(0.0).powi(self.tokens.min(1 << 20) as i32);
            [own / count, own * is_used]
        };
        let counted = pairs.min(own as f64);
        let scaled = |value: u64, by: f64| (value as f64 * by) as u64;
        Cost {
            operations: scaled(all.operations, share.min(1.0)),
            traffic: scaled(all.traffic, (read / counted.max(1.0)).min(1.0)),
            ..all
        }
    }
}

/// How many of `used` experts are on the rank that has the most of them, on average, if each of `ranks` has `own` and all are used
/// equally often.
fn expected_most(own: usize, ranks: usize, used: usize) -> f64 {
    let used = used.min(own * ranks);
    // Ways to choose `used` with at most `limit` on each rank, for each limit; as shares of all ways.
    let mut binomials = vec![1.0f64];
    for chosen in 1..=used.min(own) {
        let before = binomials.last().copied().unwrap_or(1.0);
        binomials.push(before * (own + 1 - chosen) as f64 / chosen as f64);
    }
    let ways = |limit: usize| -> f64 {
        let mut sums = vec![0.0f64; used + 1];
        sums.iter_mut().take(1).for_each(|none| *none = 1.0);
        for _ in 0..ranks {
            let with = |sum: usize| -> f64 {
                let here = binomials.iter().take(limit + 1).enumerate();
                here.filter_map(|(n, ways)| Some(ways * sums.get(sum.checked_sub(n)?)?)).sum()
            };
            sums = (0..=used).map(with).collect();
        }
        sums.last().copied().unwrap_or(0.0)
    };
    let all = ways(used);
    // The mean is the sum of the chances that the most exceed a limit.
    (0..used).map(|limit| 1.0 - ways(limit) / all).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_rank_has_more_than_its_share() {
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        near(expected_most(8, 1, 3), 3.0);
        near(expected_most(4, 2, 1), 1.0);
        near(expected_most(4, 2, 8), 4.0);
        // Two of four experts: on one rank in 2 of 6 ways.
        near(expected_most(2, 2, 2), 4.0 / 3.0);
        // By counting all ways for three ranks of two experts.
        let (mut sum, mut ways) = (0, 0);
        for chosen in 0u32..64 {
            if chosen.count_ones() == 3 {
                sum += (0..3).map(|rank| (chosen >> (2 * rank) & 3).count_ones()).max().unwrap();
                ways += 1;
            }
        }
        near(expected_most(2, 3, 3), f64::from(sum) / f64::from(ways));
        let most = expected_most(32, 8, 8);
        assert!(most > 2.0 && most < 3.0, "{most}");
    }

    #[test]
    fn a_rank_does_its_part_of_the_work() {
        use quadriga_graph::{DType, GraphBuilder};
        let g = GraphBuilder::new();
        let (x, ids) = (g.input("x", DType::F32, [1, 1, 64]), g.input("ids", DType::I32, [1, 2]));
        g.output("y", g.input("w", DType::F32, [2, 32, 64]).mul_mat_id(x, ids));
        let graph = g.finish().unwrap();
        let node = graph.node_ids().next().unwrap();
        let all = Cost { operations: 1200, traffic: 1200, sent: 0 };
        let cost =
            |count: usize, tokens: usize| DividedExperts { count, used: 2, tokens }.cost(&graph, node, all);
        assert_eq!(cost(2, 1), all, "all experts are here");
        assert_eq!(cost(2, 1000), all, "and all are used");
        assert_eq!(cost(4, 1), Cost { operations: 800, traffic: 800, sent: 0 });
        // Many tokens use every expert: all are read, half of the products are here.
        assert_eq!(cost(4, 1000), Cost { operations: 600, traffic: 1200, sent: 0 });
        // Two tokens that use one of two experts each: with an even chance the same one, wherever the experts are.
        let one = |count: usize| DividedExperts { count, used: 1, tokens: 2 }.cost(&graph, node, all).traffic;
        assert_eq!((one(2), one(4)), (900, 525));
    }
}
