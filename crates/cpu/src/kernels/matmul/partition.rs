//! Distribution of the row groups of several weight matrices: in chunks of about equal cost, equally many per thread.
//!
//! The matrices are laid end to end, and the whole is cut at equal distances; a chunk may hold the end of one matrix
//! and the beginning of the next. Chunks are whole pairs of groups, which GEMM kernels take together.

use std::ops::Range;

/// Chunks per thread: a thread that has finished its own takes over chunks of others.
const CHUNKS_PER_THREAD: usize = 4;

/// The work that one matrix makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixWork {
    pub(super) groups: usize,
    /// The cost of a group, in any unit that the matrices share.
    pub(super) cost: usize,
    /// Groups that a chunk should have at most, if there are more than enough.
    pub(super) max_groups: usize,
}

impl MatrixWork {
    fn pairs(&self) -> usize {
        self.groups.div_ceil(2)
    }

    fn pair_cost(&self) -> u64 {
        (self.cost as u64).max(1)
    }

    fn total_cost(&self) -> u64 {
        (self.pairs() as u64).saturating_mul(self.pair_cost())
    }
}

/// The chunks of several matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatmulPartition {
    cost: u64,
    chunks: usize,
}

impl MatmulPartition {
    /// Partitions matrices for a number of threads.
    pub(super) fn new(works: impl Iterator<Item = MatrixWork>, threads: usize) -> MatmulPartition {
        let (mut cost, mut pairs, mut chunks) = (0_u64, 0, 0);
        for work in works {
            cost = cost.saturating_add(work.total_cost());
            pairs += work.pairs();
            chunks += work.pairs().div_ceil((work.max_groups / 2).max(1));
        }
        let threads = threads.max(1);
        let chunks = chunks.max(CHUNKS_PER_THREAD * threads).min(pairs);
        let even = chunks.next_multiple_of(threads);
        MatmulPartition { cost, chunks: if even <= pairs { even } else { chunks } }
    }

    /// The number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// The groups of each matrix in a chunk.
    pub(super) fn ranges(
        &self,
        chunk: usize,
        works: impl Iterator<Item = MatrixWork>,
    ) -> impl Iterator<Item = Range<usize>> {
        let at = |chunk: usize| {
            let chunks = self.chunks.max(1);
            match self.cost.checked_mul(chunk as u64) {
                Some(product) => product / chunks as u64,
                None => {
                    let position = u128::from(self.cost) * chunk as u128 / chunks as u128;
                    u64::try_from(position).unwrap_or(u64::MAX)
                }
            }
        };
        let (begin, end) = (at(chunk), at(chunk + 1));
        let mut first = 0_u64;
        works.map(move |work| {
            let pair = |position: u64| {
                let pairs = position.saturating_sub(first).div_ceil(work.pair_cost());
                usize::try_from(pairs).map_or(work.pairs(), |pairs| pairs.min(work.pairs()))
            };
            let groups = 2 * pair(begin)..(2 * pair(end)).min(work.groups);
            first = first.saturating_add(work.total_cost());
            groups
        })
    }
}

#[cfg(test)]
mod tests {
    use quadriga_conformance::Rng;

    use super::{MatmulPartition, MatrixWork};

    #[test]
    fn every_group_is_in_one_chunk_and_chunks_cost_about_the_same() {
        let seed = 7;
        let mut rng = Rng::new(seed);
        let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
        for round in 0..2000 {
            let threads = 1 + below(9);
            let works: Vec<MatrixWork> = (0..1 + below(5))
                .map(|_| MatrixWork { groups: below(200), cost: below(5000), max_groups: 1 + below(40) })
                .collect();
            let partition = MatmulPartition::new(works.iter().copied(), threads);
            let mut next = vec![0; works.len()];
            let even = works.iter().map(MatrixWork::total_cost).sum::<u64>() as f64
                / partition.chunks().max(1) as f64;
            let dearest = works.iter().map(MatrixWork::pair_cost).max().unwrap_or(1) as f64;
            for chunk in 0..partition.chunks() {
                let mut cost = 0.0;
                for ((range, next), work) in
                    partition.ranges(chunk, works.iter().copied()).zip(&mut next).zip(&works)
                {
                    if !range.is_empty() {
                        assert_eq!(range.start, *next, "seed {seed}, round {round}, chunk {chunk}");
                        *next = range.end;
                        cost += range.len().div_ceil(2) as f64 * work.pair_cost() as f64;
                    }
                }
                assert!(cost <= even + 2.0 * dearest, "seed {seed}, round {round}: {cost} of {even}");
            }
            assert!(next.iter().zip(&works).all(|(next, work)| *next == work.groups), "round {round}");
        }
    }
}
