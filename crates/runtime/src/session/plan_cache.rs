//! The plans of a session, found by the caller's key or by the graph itself.

use quadriga_graph::{Fingerprint, Graph, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use super::plan_key::PlanKey;
use super::plan_limits::{PlanLimits, PlanUsage};
use super::prepared::PreparedPlan;
use crate::RuntimeError;
use crate::weights::same_bytes;

/// All plans of a session. They are named by their number here, which is given to another plan once they are removed.
#[derive(Default)]
pub(crate) struct PlanCache {
    plans: Vec<Option<CachedPlan>>,
    by_key: FxHashMap<PlanKey, usize>,
    by_fingerprint: FxHashMap<Fingerprint, Vec<usize>>,
    /// The plan that the session's methods refer to.
    current: Option<usize>,
    /// The plan whose inputs and results are in the arenas, which all plans share.
    occupant: Option<usize>,
    /// Counts the times that a plan was made the current one.
    clock: u64,
    pub(crate) limits: PlanLimits,
}

struct CachedPlan {
    prepared: PreparedPlan,
    /// When it was last made the current one.
    used: u64,
}

/// So many keys may stand for one plan on average; beyond that the keys of a plan are forgotten, and found again by its
/// graph.
const MAX_KEYS_PER_PLAN: usize = 16;

impl PlanCache {
    pub(crate) fn get(&self, plan: usize) -> Result<&PreparedPlan, RuntimeError> {
        let cached = self.plans.get(plan).and_then(Option::as_ref);
        cached.map(|cached| &cached.prepared).ok_or_else(|| RuntimeError::internal("there is no such plan"))
    }

    pub(crate) fn get_mut(&mut self, plan: usize) -> Result<&mut PreparedPlan, RuntimeError> {
        let cached = self.plans.get_mut(plan).and_then(Option::as_mut);
        cached
            .map(|cached| &mut cached.prepared)
            .ok_or_else(|| RuntimeError::internal("there is no such plan"))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &PreparedPlan> {
        self.plans.iter().flatten().map(|cached| &cached.prepared)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut PreparedPlan> {
        self.plans.iter_mut().flatten().map(|cached| &mut cached.prepared)
    }

    /// The number of the first plan that fulfils a condition.
    pub(crate) fn position(&self, is_it: impl Fn(&PreparedPlan) -> bool) -> Option<usize> {
        self.plans.iter().position(|plan| plan.as_ref().is_some_and(|cached| is_it(&cached.prepared)))
    }

    /// The current plan, or the error that there is none.
    pub(crate) fn current(&self) -> Result<usize, RuntimeError> {
        self.current.ok_or(RuntimeError::NoPlan)
    }

    pub(crate) fn set_current(&mut self, plan: usize) {
        self.current = Some(plan);
        self.clock += 1;
        if let Some(cached) = self.plans.get_mut(plan).and_then(Option::as_mut) {
            cached.used = self.clock;
        }
    }

    pub(crate) fn by_key(&self, key: PlanKey) -> Option<usize> {
        self.by_key.get(&key).copied()
    }

    pub(crate) fn set_key(&mut self, key: PlanKey, plan: usize) {
        if self.by_key.len() >= self.plans.len().saturating_mul(MAX_KEYS_PER_PLAN) {
            self.by_key.retain(|_, other| *other != plan);
        }
        self.by_key.insert(key, plan);
    }

    /// A plan of an equal graph: the same fingerprint, and weights and constants with the same bytes.
    pub(crate) fn find(&self, graph: &Graph) -> Option<usize> {
        let plans = self.by_fingerprint.get(&graph.fingerprint())?;
        let is_equal = |known: &PreparedPlan| difference(known.plan.graph(), graph).is_none();
        plans.iter().copied().find(|plan| self.get(*plan).is_ok_and(is_equal))
    }

    /// An error unless the plan that a key stands for is that of an equal graph.
    pub(crate) fn check_key(&self, key: PlanKey, plan: usize, graph: &Graph) -> Result<(), RuntimeError> {
        match difference(self.get(plan)?.plan.graph(), graph) {
            None => Ok(()),
            Some(difference) => Err(RuntimeError::OtherGraphOfKey { key: key.numbers, difference }),
        }
    }

    /// An error if a plan of the key's model has a weight of the same name, type and shape as the graph, with other bytes: then they
    /// are two models. Each weight is compared with one plan that has it.
    pub(crate) fn check_model(&self, key: PlanKey, graph: &Graph) -> Result<(), RuntimeError> {
        if key.model.is_none() {
            return Ok(());
        }
        let mut unknown: Vec<TensorId> = graph.of_kind(TensorKind::Weight).collect();
        for (_, plan) in self.by_key.iter().filter(|(other, _)| other.model == key.model) {
            if unknown.is_empty() {
                break;
            }
            let known = self.get(*plan)?.plan.graph();
            let mut differs = None;
            unknown.retain(|id| {
                let (Some(name), Some(data)) = (graph.leaf_name(*id), graph.data(*id)) else { return false };
                let Some(other) = known.leaf(name) else { return true };
                let alike =
                    (known[other].dtype(), known[other].shape()) == (graph[*id].dtype(), graph[*id].shape());
                let Some(other) = known.data(other).filter(|_| alike) else { return true };
                if !same_bytes(data, other) {
                    differs = Some(*id);
                }
                false
            });
            if let Some(id) = differs {
                let difference = format!("{} has other bytes", graph.name(id));
                return Err(RuntimeError::OtherModel { key: key.numbers, difference });
            }
        }
        Ok(())
    }

    /// Adds a plan; its number.
    pub(crate) fn insert(&mut self, prepared: PreparedPlan) -> usize {
        let fingerprint = prepared.plan.graph().fingerprint();
        let cached = Some(CachedPlan { prepared, used: self.clock });
        let number = self.plans.iter().position(Option::is_none).unwrap_or(self.plans.len());
        match self.plans.get_mut(number) {
            Some(free) => *free = cached,
            None => self.plans.push(cached),
        }
        self.by_fingerprint.entry(fingerprint).or_default().push(number);
        number
    }

    /// Drops a plan with its programs. It must not be running.
    pub(crate) fn remove(&mut self, plan: usize) {
        let Some(removed) = self.plans.get_mut(plan).and_then(Option::take) else { return };
        let fingerprint = removed.prepared.plan.graph().fingerprint();
        if let Some(same) = self.by_fingerprint.get_mut(&fingerprint) {
            same.retain(|other| *other != plan);
            if same.is_empty() {
                self.by_fingerprint.remove(&fingerprint);
            }
        }
        self.by_key.retain(|_, other| *other != plan);
        self.current = self.current.filter(|current| *current != plan);
        self.occupant = self.occupant.filter(|occupant| *occupant != plan);
    }

    /// Drops the plans that were not used for the longest time, until the others are within the limits. The current plan
    /// stays. Nothing may be running but the current plan.
    pub(crate) fn evict(&mut self) {
        let PlanUsage { mut plans, mut bytes } = self.usage();
        while plans > self.limits.plans || bytes > self.limits.bytes {
            let candidates =
                self.plans.iter().enumerate().filter_map(|(number, plan)| Some((number, plan.as_ref()?)));
            let others = candidates.filter(|(number, _)| self.current != Some(*number));
            let Some((oldest, cached)) = others.min_by_key(|(_, cached)| cached.used) else { return };
            plans -= 1;
            bytes -= cached.prepared.host_bytes();
            self.remove(oldest);
        }
    }

    /// The number of plans, and the memory that they take.
    pub(crate) fn usage(&self) -> PlanUsage {
        let bytes = self.iter().map(PreparedPlan::host_bytes).sum();
        PlanUsage { plans: self.iter().count(), bytes }
    }

    /// Before bytes of a plan are written to the arenas: the other plans lose theirs.
    pub(crate) fn occupy(&mut self, plan: usize) {
        if self.occupant != Some(plan) {
            let others = self.plans.iter_mut().enumerate().filter(|(other, _)| *other != plan);
            others.filter_map(|(_, other)| other.as_mut()).for_each(|other| other.prepared.lose_values());
            self.occupant = Some(plan);
        }
    }

    /// Before the arenas lose their bytes: so do all plans.
    pub(crate) fn vacate(&mut self) {
        self.plans.iter_mut().flatten().for_each(|plan| plan.prepared.lose_values());
        self.occupant = None;
    }
}

/// What makes two graphs different: operations and shapes (the fingerprint), or the bytes of a weight or constant.
fn difference(known: &Graph, graph: &Graph) -> Option<String> {
    if known.fingerprint() != graph.fingerprint() {
        return Some("operations, shapes or names differ".to_owned());
    }
    let mut leaves = graph.of_kind(TensorKind::Constant).chain(graph.of_kind(TensorKind::Weight));
    let differs = leaves.find(|id| match (graph.data(*id), known.data(*id)) {
        (Some(a), Some(b)) => !same_bytes(a, b),
        (None, None) => false,
        _ => true,
    });
    differs.map(|id| format!("{} has other bytes", graph.name(id)))
}
