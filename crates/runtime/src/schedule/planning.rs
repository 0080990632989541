//! Planning: from a graph to a plan, stage by stage.

use std::sync::{Arc, PoisonError};

use quadriga_graph::{Graph, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use super::assign::{FixedPlacements, assign};
use super::bound::BoundStorages;
use super::into_graph::IntoGraph;
use super::order::order;
use super::plan::Plan;
use super::scheduler::{Scheduler, Workspace};
use super::space::Space;
use super::split::split;
use super::streaming::WeightStreaming;
use crate::flow::Flow;
use crate::{OverBudget, RuntimeError, weights};

impl Scheduler {
    /// Plans a graph. Nothing is allocated on a device.
    pub fn plan(&self, graph: impl IntoGraph) -> Result<Plan, RuntimeError> {
        self.plan_with_states(graph.into_graph(), |_| None, &BoundStorages::default())
    }

    /// Plans a graph, some of whose states may be on a backend already, and some of whose storages may be in memory of the
    /// caller.
    pub(crate) fn plan_with_states(
        &self,
        graph: Arc<Graph>,
        state_backend: impl Fn(&str) -> Option<usize>,
        bound: &BoundStorages,
    ) -> Result<Plan, RuntimeError> {
        if self.backends.is_empty() {
            return Err(RuntimeError::NoBackends);
        }
        // A thread that plans at the same time finds an empty workspace here.
        let lock = || self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let mut workspace = std::mem::take(&mut *lock());
        workspace.flow.read(&graph);
        let plan = self.plan_in(&graph, &mut workspace, state_backend, bound);
        *lock() = workspace;
        plan
    }

    fn plan_in(
        &self,
        graph: &Arc<Graph>,
        workspace: &mut Workspace,
        state_backend: impl Fn(&str) -> Option<usize>,
        bound: &BoundStorages,
    ) -> Result<Plan, RuntimeError> {
        let fixed = self.fixed(graph, &workspace.flow, state_backend, bound)?;
        let streaming = self.streaming_device().and_then(|device| Some((self.streaming?, device)));
        let plan = self.run_stages(graph, workspace, &fixed, bound, streaming)?;
        match self.check_budgets(&plan) {
            Err(RuntimeError::OverBudget(_)) if plan.streams_weights() => {
                let plan = self.run_stages(graph, workspace, &fixed, bound, None)?;
                self.check_budgets(&plan).map(|()| plan)
            }
            checked => checked.map(|()| plan),
        }
    }

    /// The device that weights are streamed to: the first asynchronous one with memory of its own.
    fn streaming_device(&self) -> Option<u16> {
        let all = self.backends.iter().zip(self.asynchronous.iter());
        (0u16..).zip(all).find(|(_, (b, asynchronous))| **asynchronous && !b.memory().host).map(|(i, _)| i)
    }

    fn run_stages(
        &self,
        graph: &Arc<Graph>,
        Workspace { flow, planner }: &mut Workspace,
        fixed: &FixedPlacements,
        bound: &BoundStorages,
        streaming: Option<(WeightStreaming, u16)>,
    ) -> Result<Plan, RuntimeError> {
        let placements = assign((graph, flow), &self.backends, &self.ranks, fixed, streaming)?;
        let splits = split(graph, flow, &placements, self.backends.len());
        let synchronous: Vec<bool> = self.asynchronous.iter().map(|a| !a).collect();
        let order = order(&splits, &synchronous);
        let (backends, lanes) = (&self.backends, &self.asynchronous);
        let settings = (self.effort, self.check_plans);
        let space =
            Space::plan((graph, flow), backends, &placements, &splits, lanes, settings, (planner, bound))?;
        let plan = Plan::new(self.clone(), Arc::clone(graph), placements, splits, order, space);
        if self.check_plans {
            plan.check().map_err(|error| RuntimeError::BadSchedule(Box::new(error)))?;
        }
        Ok(plan)
    }

    /// The placements that are fixed beforehand, with the backends' numbers checked: pins, the backends of allocated
    /// states, and for other leaves the result of the placement rule.
    fn fixed(
        &self,
        graph: &Graph,
        flow: &Flow,
        state_backend: impl Fn(&str) -> Option<usize>,
        bound: &BoundStorages,
    ) -> Result<FixedPlacements, RuntimeError> {
        for (backend, _) in &self.budgets {
            self.check_backend(*backend, &|| "a budget".to_owned())?;
        }
        let mut fixed = self.pinned(graph, bound)?;
        let pins: FxHashMap<TensorId, u16> = fixed.iter().copied().collect();
        fixed.reserve(flow.leaves.len());
        for &(id, kind) in &flow.leaves {
            let is_state = kind == TensorKind::State;
            if self.rule.is_none() && !is_state {
                continue;
            }
            let Some(name) = graph.leaf_name(id) else { continue };
            let allocated = if is_state { state_backend(name) } else { None };
            if let Some(backend) = allocated.or_else(|| self.rule.as_ref().and_then(|rule| rule(name))) {
                let backend = self.check_backend(backend, &|| format!("the placement of {name}"))?;
                if pins.is_empty() || !pins.contains_key(&id) {
                    fixed.push((id, backend));
                }
            }
        }
        Ok(fixed)
    }

    /// The storages that are pinned, each once.
    fn pinned(&self, graph: &Graph, bound: &BoundStorages) -> Result<FixedPlacements, RuntimeError> {
        let mut pinned: FxHashMap<TensorId, u16> = FxHashMap::default();
        let mut fixed = FixedPlacements::new();
        let nodes = self.node_pins.iter().map(|(node, backend)| match graph.get_node(*node) {
            Some(n) => Ok((n.output(), *backend)),
            None => Err(unknown_pin("node", node.index(), graph.nodes().len())),
        });
        let tensors = self.tensor_pins.iter().map(|(tensor, backend)| match graph.get(*tensor) {
            Some(_) => Ok((*tensor, *backend)),
            None => Err(unknown_pin("tensor", tensor.index(), graph.tensors().len())),
        });
        let names =
            self.name_pins.iter().filter_map(|(name, backend)| Some(Ok((graph.tensor(name)?, *backend))));
        let mut in_memory: Vec<(TensorId, usize)> =
            bound.iter().map(|(id, place)| (*id, place.number)).collect();
        in_memory.sort_unstable();
        for pin in nodes.chain(tensors).chain(names).chain(in_memory.into_iter().map(Ok)) {
            let (tensor, backend) = pin?;
            let backend = self.check_backend(backend, &|| format!("the pin of {}", graph.name(tensor)))?;
            let storage = graph.get(tensor).map_or(tensor, |t| t.storage());
            match pinned.insert(storage, backend) {
                None => fixed.push((storage, backend)),
                Some(old) if old != backend => {
                    let name = |b: u16| self.backends.get(usize::from(b)).map_or("", |b| b.name()).to_owned();
                    let (tensor, first, second) = (graph.name(storage), name(old), name(backend));
                    return Err(RuntimeError::PinConflict { tensor, first, second });
                }
                Some(_) => {}
            }
        }
        Ok(fixed)
    }

    /// The number of a backend; an error with the name of `what` if there is no such backend.
    fn check_backend(&self, index: usize, what: &dyn Fn() -> String) -> Result<u16, RuntimeError> {
        let count = self.backends.len();
        let short = u16::try_from(index).ok().filter(|_| index < count);
        short.ok_or_else(|| RuntimeError::UnknownBackend { what: what(), index, count })
    }

    fn check_budgets(&self, plan: &Plan) -> Result<(), RuntimeError> {
        if self.budgets.is_empty() {
            return Ok(());
        }
        let all = plan.bytes();
        for (number, budget) in &self.budgets {
            let (Some(bytes), Some(backend)) = (all.get(*number), self.backends.get(*number)) else {
                continue;
            };
            if bytes.total() <= *budget {
                continue;
            }
            let compute = bytes.compute.saturating_add(bytes.work);
            let left = budget.saturating_sub(bytes.state.saturating_add(compute));
            let reads = plan.weight_reads().filter(|read| read.backend == *number);
            let fitting = weights::fitting(plan.graph(), &**backend, reads, left);
            return Err(RuntimeError::OverBudget(Box::new(OverBudget {
                backend: bytes.backend.clone(),
                needed: bytes.total(),
                weights: bytes.weights,
                state: bytes.state,
                compute,
                budget: *budget,
                weight_count: fitting.weights,
                fitting: fitting.fitting,
                fitting_bytes: fitting.bytes,
            })));
        }
        Ok(())
    }
}

fn unknown_pin(what: &'static str, index: usize, count: usize) -> RuntimeError {
    RuntimeError::UnknownPin { what, index, count }
}
