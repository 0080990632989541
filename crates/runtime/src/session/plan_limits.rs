//! How many plans a session keeps.

/// How many plans a session keeps, and how much host memory these may take. When there are more, those that were not
/// used for the longest time are dropped with their programs; a graph that comes back is built, planned and compiled
/// again, with the same results. The current plan is always kept.
///
/// ```
/// use quadriga_runtime::{PlanLimits, Scheduler, Session};
///
/// let mut session = Session::new(&Scheduler::new(quadriga_cpu::Backend::new()?))?;
/// session.set_plan_limits(PlanLimits { plans: 8, ..PlanLimits::default() })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanLimits {
    /// How many plans. [default: 64]
    pub plans: usize,
    /// Bytes of host memory, as [`PlanUsage::bytes`] counts them. [default: 256 MiB]
    pub bytes: usize,
}

impl Default for PlanLimits {
    fn default() -> PlanLimits {
        PlanLimits { plans: 64, bytes: 256 << 20 }
    }
}

/// The plans of a session, and the memory that they take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PlanUsage {
    /// How many plans there are.
    pub plans: usize,
    /// About how many bytes of host memory graphs, plans and programs take, and memory for staged copies and constants.
    /// Weights, states and arenas are shared, and not counted.
    pub bytes: usize,
}
