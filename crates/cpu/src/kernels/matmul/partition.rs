//! How the groups of several matrices are shared out: in chunks of about equal cost, equally many for each thread.
//!
//! The matrices are laid end to end, and the whole is cut at equal distances; a chunk may hold the end of one matrix and
//! the beginning of the next. Cuts are between pairs of groups, which kernels for many rows take together.

use std::ops::Range;

/// Chunks for each thread: a thread that is done helps another with what is left of its share.
const EACH: usize = 4;

/// One matrix to be cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixWork {
    pub(super) groups: usize,
    /// What a group costs, in any unit that the matrices share.
    pub(super) cost: usize,
    /// Groups that a chunk should have at most, if there are more than enough.
    pub(super) most: usize,
}

impl MatrixWork {
    fn pairs(&self) -> usize {
        self.groups.div_ceil(2)
    }

    fn pair_cost(&self) -> u64 {
        (self.cost as u64).max(1)
    }

    fn whole(&self) -> u64 {
        (self.pairs() as u64).saturating_mul(self.pair_cost())
    }
}

/// Where several matrices are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partition {
    cost: u64,
    chunks: usize,
}

impl Partition {
    /// Cuts matrices for a number of threads.
    pub(super) fn new(pieces: impl Iterator<Item = MatrixWork>, threads: usize) -> Partition {
        let (mut cost, mut pairs, mut chunks) = (0_u64, 0, 0);
        for piece in pieces {
            cost = cost.saturating_add(piece.whole());
            pairs += piece.pairs();
            chunks += piece.pairs().div_ceil((piece.most / 2).max(1));
        }
        let threads = threads.max(1);
        let chunks = chunks.max(EACH * threads).min(pairs);
        let even = chunks.next_multiple_of(threads);
        Partition { cost, chunks: if even <= pairs { even } else { chunks } }
    }

    /// Into how many chunks.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// The groups of each matrix that a chunk has.
    pub(super) fn ranges(
        &self,
        chunk: usize,
        pieces: impl Iterator<Item = MatrixWork>,
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
        pieces.map(move |piece| {
            let pair = |position: u64| {
                let pairs = position.saturating_sub(first).div_ceil(piece.pair_cost());
                usize::try_from(pairs).map_or(piece.pairs(), |pairs| pairs.min(piece.pairs()))
            };
            let groups = 2 * pair(begin)..(2 * pair(end)).min(piece.groups);
            first = first.saturating_add(piece.whole());
            groups
        })
    }
}

#[cfg(test)]
mod tests {
    use quadriga_conformance::Rng;

    use super::{MatrixWork, Partition};

    #[test]
    fn every_group_is_in_one_chunk_and_chunks_cost_about_the_same() {
        let seed = 7;
        let mut rng = Rng::new(seed);
        let mut below = |n: usize| (rng.next_u64() % n as u64) as usize;
        for round in 0..2000 {
            let threads = 1 + below(9);
            let pieces: Vec<MatrixWork> = (0..1 + below(5))
                .map(|_| MatrixWork { groups: below(200), cost: below(5000), most: 1 + below(40) })
                .collect();
            let cut = Partition::new(pieces.iter().copied(), threads);
            let mut next = vec![0; pieces.len()];
            let even = pieces.iter().map(MatrixWork::whole).sum::<u64>() as f64 / cut.chunks().max(1) as f64;
            let dearest = pieces.iter().map(MatrixWork::pair_cost).max().unwrap_or(1) as f64;
            for chunk in 0..cut.chunks() {
                let mut cost = 0.0;
                for ((range, next), piece) in
                    cut.ranges(chunk, pieces.iter().copied()).zip(&mut next).zip(&pieces)
                {
                    if !range.is_empty() {
                        assert_eq!(range.start, *next, "seed {seed}, round {round}, chunk {chunk}");
                        *next = range.end;
                        cost += range.len().div_ceil(2) as f64 * piece.pair_cost() as f64;
                    }
                }
                assert!(cost <= even + 2.0 * dearest, "seed {seed}, round {round}: {cost} of {even}");
            }
            assert!(next.iter().zip(&pieces).all(|(next, piece)| *next == piece.groups), "round {round}");
        }
    }
}
