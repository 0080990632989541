//! The plans of a session, found by the caller's key or by the graph itself.

use quadriga_graph::{Fingerprint, Graph, TensorKind};
use rustc_hash::FxHashMap;

use super::prepared::PreparedPlan;
use crate::RuntimeError;
use crate::weights::same_bytes;

/// The caller's key of a graph: a few numbers, such as tokens in the batch and length of the KV cache.
///
/// A key stands for one graph of a session, with its weights: if a session runs several models, their keys must differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct PlanKey(pub [u64; 4]);

impl From<u64> for PlanKey {
    fn from(a: u64) -> PlanKey {
        PlanKey([a, 0, 0, 0])
    }
}

impl From<(usize, usize)> for PlanKey {
    fn from((a, b): (usize, usize)) -> PlanKey {
        PlanKey([a as u64, b as u64, 0, 0])
    }
}

impl From<(usize, usize, usize)> for PlanKey {
    fn from((a, b, c): (usize, usize, usize)) -> PlanKey {
        PlanKey([a as u64, b as u64, c as u64, 0])
    }
}

/// All plans of a session. They are named by their number here.
#[derive(Default)]
pub(crate) struct PlanCache {
    plans: Vec<PreparedPlan>,
    by_key: FxHashMap<PlanKey, usize>,
    by_fingerprint: FxHashMap<Fingerprint, Vec<usize>>,
    /// The plan that the session's methods refer to.
    current: Option<usize>,
    /// The plan whose inputs and results are in the arenas, which all plans share.
    occupant: Option<usize>,
}

impl PlanCache {
    pub(crate) fn get(&self, plan: usize) -> Result<&PreparedPlan, RuntimeError> {
        self.plans.get(plan).ok_or_else(|| RuntimeError::internal("a plan's number is out of range"))
    }

    pub(crate) fn get_mut(&mut self, plan: usize) -> Result<&mut PreparedPlan, RuntimeError> {
        self.plans.get_mut(plan).ok_or_else(|| RuntimeError::internal("a plan's number is out of range"))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &PreparedPlan> {
        self.plans.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut PreparedPlan> {
        self.plans.iter_mut()
    }

    /// The current plan, or the error that there is none.
    pub(crate) fn current(&self) -> Result<usize, RuntimeError> {
        self.current.ok_or(RuntimeError::NoPlan)
    }

    pub(crate) fn set_current(&mut self, plan: usize) {
        self.current = Some(plan);
    }

    pub(crate) fn by_key(&self, key: PlanKey) -> Option<usize> {
        self.by_key.get(&key).copied()
    }

    pub(crate) fn set_key(&mut self, key: PlanKey, plan: usize) {
        self.by_key.insert(key, plan);
    }

    /// A plan of an equal graph: the same fingerprint, and weights and constants with the same bytes.
    pub(crate) fn find(&self, graph: &Graph) -> Option<usize> {
        let plans = self.by_fingerprint.get(&graph.fingerprint())?;
        plans.iter().copied().find(|plan| {
            let Some(known) = self.plans.get(*plan).map(|plan| plan.plan.graph()) else { return false };
            let mut leaves = graph.of_kind(TensorKind::Constant).chain(graph.of_kind(TensorKind::Weight));
            leaves.all(|id| match (graph.data(id), known.data(id)) {
                (Some(a), Some(b)) => same_bytes(a, b),
                (None, None) => true,
                _ => false,
            })
        })
    }

    /// Adds a plan; its number.
    pub(crate) fn insert(&mut self, plan: PreparedPlan) -> usize {
        let number = self.plans.len();
        self.by_fingerprint.entry(plan.plan.graph().fingerprint()).or_default().push(number);
        self.plans.push(plan);
        number
    }

    /// Before bytes of a plan are written to the arenas: the other plans lose theirs.
    pub(crate) fn occupy(&mut self, plan: usize) {
        if self.occupant != Some(plan) {
            let others = self.plans.iter_mut().enumerate().filter(|(other, _)| *other != plan);
            others.for_each(|(_, other)| other.lose_values());
            self.occupant = Some(plan);
        }
    }
}
