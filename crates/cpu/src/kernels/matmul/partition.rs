//! Distribution of the row groups of several weight matrices: in chunks of about equal cost, equally many per thread.
//!
//! The matrices are laid end to end, and the whole is cut at equal distances; a chunk may hold the end of one matrix
//! and the beginning of the next. Chunks are whole units: single groups, or pairs of groups, which GEMM kernels take
//! together.
//!
//! Where long chunks are faster, they are the first three quarters of each thread's share. The rest is cut finely, so
//! that all threads finish at nearly the same time.

use std::ops::Range;

/// Chunks per thread: a thread that has finished its own takes over chunks of others.
const CHUNKS_PER_THREAD: usize = 4;

/// The part of a share that is cut into long chunks, in quarters.
const LONG_QUARTERS: usize = 3;

/// The work that one matrix makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixWork {
    pub(super) groups: usize,
    /// Groups that a kernel takes together: 1 or 2.
    pub(super) unit: usize,
    /// The cost of a group, in any unit that the matrices share.
    pub(super) cost: usize,
    /// Groups that a chunk should have at most, if there are more than enough.
    pub(super) max_groups: usize,
    /// Groups that a long chunk should have: `max_groups` where longer ones are no faster.
    pub(super) long_groups: usize,
}

impl MatrixWork {
    fn units(&self) -> usize {
        self.groups.div_ceil(self.unit.max(1))
    }

    fn unit_cost(&self) -> u64 {
        (self.cost as u64).max(1)
    }

    fn total_cost(&self) -> u64 {
        (self.units() as u64).saturating_mul(self.unit_cost())
    }

    /// Chunks of this many groups.
    fn chunks_of(&self, groups: usize) -> usize {
        self.units().div_ceil((groups / self.unit.max(1)).max(1))
    }
}

/// The chunks of several matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatmulPartition {
    cost: u64,
    /// Equal shares, each cut in the same way.
    shares: usize,
    /// Chunks of a share that are long.
    long: usize,
    /// All chunks of a share.
    chunks: usize,
}

impl MatmulPartition {
    /// Partitions matrices for a number of threads.
    pub(super) fn new(works: impl Iterator<Item = MatrixWork>, threads: usize) -> MatmulPartition {
        let (mut cost, mut units, mut short, mut long) = (0_u64, 0, 0, 0);
        for work in works {
            cost = cost.saturating_add(work.total_cost());
            units += work.units();
            short += work.chunks_of(work.max_groups);
            long += work.chunks_of(work.long_groups.max(work.max_groups));
        }
        let threads = threads.max(1);
        // Long chunks, if shares are long enough for some, and for as many short ones as threads like to have.
        let of_share = |chunks: usize, quarters: usize| (chunks * quarters).div_ceil(4 * threads);
        let (first, rest) = (of_share(long, LONG_QUARTERS), of_share(short, 4 - LONG_QUARTERS));
        if long < short && first + rest >= CHUNKS_PER_THREAD && (first + rest) * threads <= units {
            return MatmulPartition { cost, shares: threads, long: first, chunks: first + rest };
        }
        let chunks = short.max(CHUNKS_PER_THREAD * threads).min(units);
        let even = chunks.next_multiple_of(threads);
        let chunks = if even <= units { even } else { chunks };
        MatmulPartition { cost, shares: 1, long: 0, chunks }
    }

    /// The number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.shares * self.chunks
    }

    /// Where a chunk begins.
    fn begin(&self, chunk: usize) -> u64 {
        let chunks = self.chunks.max(1);
        let (share, within) = (chunk / chunks, chunk % chunks);
        // The position in a share, as a fraction.
        let (numerator, denominator) = if self.long == 0 {
            (within, chunks)
        } else if within <= self.long {
            (LONG_QUARTERS * within, 4 * self.long)
        } else {
            let rest = chunks - self.long;
            (LONG_QUARTERS * rest + (4 - LONG_QUARTERS) * (within - self.long), 4 * rest)
        };
        let (numerator, denominator) = (share * denominator + numerator, self.shares * denominator);
        let position = u128::from(self.cost) * numerator as u128 / denominator.max(1) as u128;
        u64::try_from(position).unwrap_or(u64::MAX)
    }

    /// The groups of each matrix in a chunk.
    pub(super) fn ranges(
        &self,
        chunk: usize,
        works: impl Iterator<Item = MatrixWork>,
    ) -> impl Iterator<Item = Range<usize>> {
        let (begin, end) = (self.begin(chunk), self.begin(chunk + 1));
        let mut first = 0_u64;
        works.map(move |work| {
            let unit = |position: u64| {
                let units = position.saturating_sub(first).div_ceil(work.unit_cost());
                usize::try_from(units).map_or(work.units(), |units| units.min(work.units()))
            };
            let groups = work.unit * unit(begin)..(work.unit * unit(end)).min(work.groups);
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
            let (threads, unit) = (1 + below(9), 1 + below(2));
            let works: Vec<MatrixWork> = (0..1 + below(5))
                .map(|_| {
                    let (groups, cost, max_groups) = (below(200), below(5000), 1 + below(40));
                    MatrixWork { groups, unit, cost, max_groups, long_groups: max_groups + below(9) }
                })
                .collect();
            let partition = MatmulPartition::new(works.iter().copied(), threads);
            let mut next = vec![0; works.len()];
            let total = works.iter().map(MatrixWork::total_cost).sum::<u64>() as f64;
            // The first chunks of a share may be long: three quarters of the share together.
            let of_share = total / partition.shares as f64;
            let even = if partition.long == 0 {
                of_share / partition.chunks.max(1) as f64
            } else {
                0.75 * of_share / partition.long as f64
            };
            let dearest = works.iter().map(MatrixWork::unit_cost).max().unwrap_or(1) as f64;
            for chunk in 0..partition.chunks() {
                let mut cost = 0.0;
                for ((range, next), work) in
                    partition.ranges(chunk, works.iter().copied()).zip(&mut next).zip(&works)
                {
                    if !range.is_empty() {
                        assert_eq!(range.start, *next, "seed {seed}, round {round}, chunk {chunk}");
                        *next = range.end;
                        cost += range.len().div_ceil(unit) as f64 * work.unit_cost() as f64;
                    }
                }
                assert!(cost <= even + 2.0 * dearest, "seed {seed}, round {round}: {cost} of {even}");
            }
            assert!(next.iter().zip(&works).all(|(next, work)| *next == work.groups), "round {round}");
        }
    }

    #[test]
    fn each_share_begins_with_long_chunks_and_ends_with_short_ones() {
        // 4096 weight rows on 16 threads: eight pairs of groups each.
        let work = MatrixWork { groups: 256, unit: 2, cost: 1, max_groups: 2, long_groups: 8 };
        let partition = MatmulPartition::new(std::iter::once(work), 16);
        assert_eq!(partition.chunks(), 16 * 4);
        let groups = |chunk| partition.ranges(chunk, std::iter::once(work)).map(|range| range.len()).sum();
        let of_share: Vec<usize> = (4..8).map(groups).collect();
        assert_eq!(of_share, [6, 6, 2, 2]);
        // Too few for long chunks: all are short, and none is missing.
        let work = MatrixWork { groups: 64, ..work };
        let partition = MatmulPartition::new(std::iter::once(work), 16);
        assert_eq!(partition.chunks(), 32);
    }
}
