//! A rank that is planned, but not there.

use std::sync::Arc;

use crate::communicator::{Communicator, Wait};
use crate::error::ClusterError;
use crate::operation::Operation;

/// A rank of a plan: graphs can be built and planned for it, and every operation fails.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    rank: usize,
    size: usize,
    /// The ranks of each group that [`Communicator::split`] makes: neighbours.
    group: usize,
}

impl Planned {
    /// Rank `rank` of `size`, whose groups are `group` neighbours each.
    pub fn new(rank: usize, size: usize, group: usize) -> Planned {
        Planned { rank, size, group: group.max(1) }
    }
}

impl Communicator for Planned {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn overlapped(&self, operation: Operation<'_>, _work: &mut dyn FnMut()) -> Result<(), ClusterError> {
        let reason = format!("rank {} of {} is planned, and not there", self.rank, self.size);
        Err(ClusterError::Invalid { operation: operation.name(), reason })
    }

    fn run_within(&self, operation: Operation<'_>, _wait: Wait) -> Result<(), ClusterError> {
        self.run(operation)
    }

    fn fail(&self, _message: &str) {}

    fn failure(&self) -> Option<ClusterError> {
        None
    }

    fn split(&self, _group: u32) -> Result<Arc<dyn Communicator>, ClusterError> {
        Ok(Arc::new(Planned { rank: self.rank % self.group, size: self.group, group: 1 }))
    }

    fn host(&self, _rank: usize) -> &str {
        "a planned machine"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planned_rank_has_a_place_and_no_operations() {
        let rank = Planned::new(5, 8, 2);
        assert_eq!((rank.rank(), rank.size()), (5, 8));
        let group = rank.split(2).unwrap();
        assert_eq!((group.rank(), group.size()), (1, 2));
        let error = group.barrier().unwrap_err().to_string();
        assert!(error.contains("rank 1 of 2 is planned"), "{error}");
    }
}
