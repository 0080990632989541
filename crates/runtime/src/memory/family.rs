//! The plans of one model: the same layers at other batch sizes and cache lengths, run one at a time in the same memory.

use quadriga_graph::Graph;
use rustc_hash::FxHashMap;
use std::sync::Arc;

use super::arena::{Arena, Binding};
use super::fingerprint::PlanKey;
use super::plan::MemoryPlan;
use super::request::Request;
use super::{MemoryError, Planner};
use crate::Backend;

/// Plans that share one arena for each backend, as large as the largest of them needs.
///
/// A plan is found again by the fingerprint of its request: a request that differs in anything that matters is planned
/// anew, even if all its sizes are the same. Two plans of a family use the same bytes, so what one leaves behind is gone
/// once another has run.
#[derive(Debug)]
pub struct Family {
    arenas: Vec<Arena>,
    planner: Planner,
    plans: FxHashMap<PlanKey, (Arc<MemoryPlan>, u64)>,
    limit: usize,
    clock: u64,
}

impl Family {
    /// A family without plans and without memory. It remembers up to 64 plans.
    pub fn new(backends: impl IntoIterator<Item = Arc<dyn Backend>>) -> Family {
        let arenas = backends.into_iter().map(Arena::new).collect();
        Family { arenas, planner: Planner::default(), plans: FxHashMap::default(), limit: 64, clock: 0 }
    }

    /// Remembers up to this many plans, at least one; the one unused for longest goes first.
    pub fn remembering(mut self, plans: usize) -> Family {
        self.limit = plans.max(1);
        self
    }

    /// The arenas, one for each backend.
    pub fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    /// How many plans it remembers.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether it remembers none.
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// The plan for a request: the one made before, or a new one. No memory of a backend is touched.
    pub fn plan(&mut self, request: &Request<'_>) -> Result<Arc<MemoryPlan>, MemoryError> {
        self.clock += 1;
        let key = request.key();
        if let Some((plan, used)) = self.plans.get_mut(&key) {
            *used = self.clock;
            return Ok(Arc::clone(plan));
        }
        let plan = Arc::new(self.planner.plan(request)?);
        if self.plans.len() >= self.limit
            && let Some(oldest) = self.plans.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key)
        {
            self.plans.remove(&oldest);
        }
        self.plans.insert(key, (Arc::clone(&plan), self.clock));
        Ok(plan)
    }

    /// Gives a plan its memory. New memory is asked for only where the arenas are too small; if it is refused, all that
    /// was bound before keeps working.
    pub fn bind(&mut self, graph: &Arc<Graph>, plan: &Arc<MemoryPlan>) -> Result<Binding, MemoryError> {
        Binding::new(graph, plan, &mut self.arenas)
    }
}
