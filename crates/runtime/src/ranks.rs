//! The ranks that a session's collectives run with.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use quadriga_graph::{CollectiveKind, DType, Ranks};

/// The ranks of a group, seen from one of them: executes the collectives of its graphs. `quadriga_cluster` implements it with its
/// communicators.
///
/// Graphs have collectives as plain data, with the number of a group; [`Scheduler::ranks`](crate::Scheduler::ranks) says which ranks
/// these are. So the same graph can be planned without any other rank, compared between ranks, and computed by an oracle.
pub trait RankGroup: Send + Sync + Debug {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Executes a collective in host memory, and returns when this rank's result is complete.
    ///
    /// # Errors
    /// Ranks that disagree about what they do, a rank that is lost, or an error of the transport, in words.
    fn exchange(&self, call: ExchangeCall<'_>) -> Result<(), String>;

    /// The error that ended the communication, if one has.
    fn failure(&self) -> Option<String> {
        None
    }

    /// How long a rank may take part in a collective after the others have begun it, though it shows that it is alive; `None` for ever.
    /// [default: `None`]
    fn step_limit(&self) -> Option<Duration> {
        None
    }

    /// What the backends of a family (`cuda`) need to execute collectives in their own memory: a value of the type that the backend
    /// documents. [default: none; such backends leave collectives to the host]
    fn device_code(&self, family: &str) -> Option<Arc<dyn Any + Send + Sync>> {
        let _ = family;
        None
    }
}

/// A collective with its memory, in row-major order without gaps.
#[derive(Debug)]
pub struct ExchangeCall<'a> {
    /// What the ranks do.
    pub kind: &'a CollectiveKind,
    /// The type of the elements.
    pub dtype: DType,
    /// The rows of the matrices that are gathered or scattered.
    pub rows: usize,
    /// The elements of the first input; empty where the result [replaces](CollectiveKind::is_in_place) them, and where something is
    /// received.
    pub input: &'a [u8],
    /// The result; where it replaces the input, it holds the input's elements.
    pub output: &'a mut [u8],
}

/// The ranks of groups, by the groups' numbers.
#[derive(Clone, Default, Debug)]
pub struct RankGroups(Vec<(u32, Arc<dyn RankGroup>)>);

impl RankGroups {
    /// No ranks: for splits without collectives.
    pub const NONE: &'static RankGroups = &RankGroups(Vec::new());

    /// Sets the ranks of a group.
    pub fn insert(&mut self, group: u32, ranks: Arc<dyn RankGroup>) {
        self.0.retain(|(known, _)| *known != group);
        self.0.push((group, ranks));
    }

    /// The ranks of a group, if there are any.
    pub fn get(&self, group: u32) -> Option<&Arc<dyn RankGroup>> {
        self.0.iter().find(|(known, _)| *known == group).map(|(_, ranks)| ranks)
    }

    /// The ranks that a collective is for.
    ///
    /// # Errors
    /// There are none, or the graph was built for another rank or number of ranks.
    pub fn of(&self, wanted: &Ranks) -> Result<&Arc<dyn RankGroup>, String> {
        let Ranks { group, rank, count } = *wanted;
        let Some(ranks) = self.get(group) else {
            return Err(format!("the scheduler has no ranks of group {group}: Scheduler::ranks sets them"));
        };
        if (ranks.rank(), ranks.size()) != (rank, count) {
            let found = format!("rank {} of {}", ranks.rank(), ranks.size());
            return Err(format!("it is for rank {rank} of {count}, and this is {found}"));
        }
        Ok(ranks)
    }
}
