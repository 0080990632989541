//! Forgetting graphs: by the caller, or when there are too many.

use quadriga_graph::Graph;

use super::plan_key::PlanKey;
use super::plan_limits::{PlanLimits, PlanUsage};
use super::session::Session;
use crate::RuntimeError;

/// Which plans are kept. States, and weights that were [set](Session::set_weight), belong to the session: they stay when
/// the graphs that use them are forgotten. A weight with data is freed with the last plan that uses it.
impl Session {
    /// The number of plans that the session has, and the memory that they take.
    pub fn plan_usage(&self) -> PlanUsage {
        self.plans.usage()
    }

    /// Sets how many plans are kept, and drops those that are too many now.
    pub fn set_plan_limits(&mut self, limits: PlanLimits) -> Result<(), RuntimeError> {
        self.wait()?;
        self.plans.limits = limits;
        self.plans.evict();
        Ok(())
    }

    /// Forgets the graph with this key; whether there was one. A run in flight is waited for. If it was the current
    /// graph, the session has none afterwards.
    pub fn forget(&mut self, key: impl Into<PlanKey>) -> Result<bool, RuntimeError> {
        let found = self.plans.by_key(key.into());
        self.forget_plan(found)
    }

    /// Forgets a graph; whether the session had an equal one. As [`Session::forget`].
    pub fn forget_graph(&mut self, graph: &Graph) -> Result<bool, RuntimeError> {
        let found = self.plans.find(graph);
        self.forget_plan(found)
    }

    /// Forgets all graphs, and frees the arenas.
    pub fn forget_all(&mut self) -> Result<(), RuntimeError> {
        self.wait()?;
        while let Some(plan) = self.plans.position(|_| true) {
            self.plans.remove(plan);
        }
        self.memory.arenas.release();
        Ok(())
    }

    /// Gives memory back that only holds inputs and results of earlier runs, as far as backends can: the CPU does. Plans, weights and
    /// states stay, and nothing is compiled again; inputs must be set again, and results are gone.
    ///
    /// ```
    /// # use quadriga_graph::{DType, GraphBuilder};
    /// # use quadriga_runtime::Scheduler;
    /// # fn example(scheduler: Scheduler) -> Result<(), Box<dyn std::error::Error>> {
    /// let g = GraphBuilder::new();
    /// g.output("y", g.input("x", DType::F32, [1 << 20]).scale(2.0));
    /// let mut session = scheduler.plan(&g.finish()?)?.session()?;
    /// session.run(&[("x", &vec![1.0_f32; 1 << 20])])?;
    /// session.discard_values()?; // until the next request
    /// # Ok(())
    /// # }
    /// ```
    pub fn discard_values(&mut self) -> Result<(), RuntimeError> {
        self.wait()?;
        self.plans.vacate();
        self.memory.arenas.discard();
        Ok(())
    }

    fn forget_plan(&mut self, plan: Option<usize>) -> Result<bool, RuntimeError> {
        let Some(plan) = plan else { return Ok(false) };
        self.wait()?;
        self.plans.remove(plan);
        Ok(true)
    }
}
