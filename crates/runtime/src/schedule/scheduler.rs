//! The scheduler: what the caller wants, and the way from a graph to a plan.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};
use rustc_hash::FxHashMap;

use super::assign::{Fixed, assign};
use super::check::check;
use super::lend::WeightStreaming;
use super::order::order;
use super::plan::Plan;
use super::space::Space;
use super::split::split;
use crate::flow::Flow;
use crate::memory::Planner;
use crate::memory::packing::Effort;
use crate::session::WeightStore;
use crate::{Backend, OverBudget, RuntimeError};

/// A rule that says of leaves, by name, which backend they live on.
type Rule = Arc<dyn Fn(&str) -> Option<usize> + Send + Sync>;

/// Decides where and when the nodes of graphs run. Made once for a set of backends; cheap to clone.
///
/// ```
/// # fn demo(backends: Vec<std::sync::Arc<dyn quadriga_runtime::Backend>>, graph: &quadriga_graph::Graph)
/// # -> Result<(), quadriga_runtime::RuntimeError> {
/// use quadriga_runtime::Scheduler;
/// let plan = Scheduler::new(backends)
///     .place(|name| name.starts_with("blk.0.").then_some(1))
///     .budget(0, 4 << 30)
///     .plan(graph)?;
/// println!("{plan}");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Scheduler {
    backends: Arc<[Arc<dyn Backend>]>,
    asynchronous: Arc<[bool]>,
    nodes: Vec<(NodeId, usize)>,
    tensors: Vec<(TensorId, usize)>,
    rule: Option<Rule>,
    budgets: Vec<(usize, u64)>,
    effort: Effort,
    lending: Option<WeightStreaming>,
    /// Used again by the next plan.
    workspace: Arc<Mutex<Workspace>>,
    /// The weights of the sessions that are alive.
    weights: Arc<Mutex<Weak<WeightStore>>>,
}

/// The working memory of planning.
#[derive(Default)]
struct Workspace {
    flow: Flow,
    planner: Planner,
}

/// A graph, given by value, by reference or shared.
pub trait IntoGraph {
    /// The graph, shared.
    fn into_graph(self) -> Arc<Graph>;
}

impl IntoGraph for Arc<Graph> {
    fn into_graph(self) -> Arc<Graph> {
        self
    }
}

impl IntoGraph for &Arc<Graph> {
    fn into_graph(self) -> Arc<Graph> {
        Arc::clone(self)
    }
}

impl IntoGraph for Graph {
    fn into_graph(self) -> Arc<Graph> {
        Arc::new(self)
    }
}

impl IntoGraph for &Graph {
    fn into_graph(self) -> Arc<Graph> {
        Arc::new(self.clone())
    }
}

impl Scheduler {
    /// A scheduler for these backends, the most preferred first.
    pub fn new(backends: impl IntoIterator<Item = Arc<dyn Backend>>) -> Scheduler {
        let backends: Arc<[Arc<dyn Backend>]> = backends.into_iter().collect();
        Scheduler {
            asynchronous: backends.iter().map(|b| b.device().asynchronous).collect(),
            backends,
            nodes: Vec::new(),
            tensors: Vec::new(),
            rule: None,
            budgets: Vec::new(),
            effort: Effort::Fast,
            lending: Some(WeightStreaming::default()),
            workspace: Arc::default(),
            weights: Arc::default(),
        }
    }

    /// Makes a node run on a backend. It holds for graphs that have this node.
    pub fn pin_node(mut self, node: NodeId, backend: usize) -> Scheduler {
        self.nodes.push((node, backend));
        self
    }

    /// Makes a tensor live on a backend; what writes it runs there.
    pub fn pin_tensor(mut self, tensor: TensorId, backend: usize) -> Scheduler {
        self.tensors.push((tensor, backend));
        self
    }

    /// Says where weights, constants, states and inputs live, by name; nodes are drawn to them. It holds for every
    /// graph that is planned. `None` leaves one free.
    pub fn place(mut self, rule: impl Fn(&str) -> Option<usize> + Send + Sync + 'static) -> Scheduler {
        self.rule = Some(Arc::new(rule));
        self
    }

    /// The most bytes that a plan may take of a backend.
    pub fn budget(mut self, backend: usize, bytes: u64) -> Scheduler {
        self.budgets.push((backend, bytes));
        self
    }

    /// How hard to try to save memory.
    pub fn effort(mut self, effort: Effort) -> Scheduler {
        self.effort = effort;
        self
    }

    /// When weights that are placed with the host are lent to a device for a run; `None`: never. A plan that would be
    /// over a [budget](Scheduler::budget) with weights on loan is made without.
    pub fn lending(mut self, lending: Option<WeightStreaming>) -> Scheduler {
        self.lending = lending;
        self
    }

    /// The same scheduler without pins by id.
    pub(crate) fn without_pins(&self) -> Scheduler {
        Scheduler { nodes: Vec::new(), tensors: Vec::new(), ..self.clone() }
    }

    /// The backends, in order of preference.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// Which of the backends work while the host goes on.
    pub fn asynchronous(&self) -> &[bool] {
        &self.asynchronous
    }

    /// Plans a graph.
    pub fn plan(&self, graph: impl IntoGraph) -> Result<Plan, RuntimeError> {
        self.plan_fixed(graph.into_graph(), |_| None)
    }

    /// Plans a graph whose states may have homes already.
    pub(crate) fn plan_fixed(
        &self,
        graph: Arc<Graph>,
        state_home: impl Fn(&str) -> Option<usize>,
    ) -> Result<Plan, RuntimeError> {
        if self.backends.is_empty() {
            return Err(RuntimeError::NoBackends);
        }
        // Whoever plans at the same time finds a new one here.
        let lock = || self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let mut workspace = std::mem::take(&mut *lock());
        workspace.flow.read(&graph);
        let plan = self.plan_read(&graph, &mut workspace, state_home);
        *lock() = workspace;
        plan
    }

    fn plan_read(
        &self,
        graph: &Arc<Graph>,
        workspace: &mut Workspace,
        state_home: impl Fn(&str) -> Option<usize>,
    ) -> Result<Plan, RuntimeError> {
        let fixed = self.fixed(graph, &workspace.flow, state_home)?;
        let lending = self.borrower().and_then(|device| Some((self.lending?, device)));
        let plan = self.plan_with(graph, workspace, &fixed, lending)?;
        match self.check_budgets(&plan) {
            Err(RuntimeError::OverBudget(_)) if plan.lends() => {
                let plan = self.plan_with(graph, workspace, &fixed, None)?;
                self.check_budgets(&plan).map(|()| plan)
            }
            checked => checked.map(|()| plan),
        }
    }

    /// The device that weights are lent to: the first that works by itself, in memory of its own.
    fn borrower(&self) -> Option<u16> {
        let all = self.backends.iter().zip(self.asynchronous.iter());
        (0u16..).zip(all).find(|(_, (b, asynchronous))| **asynchronous && !b.memory().host).map(|(i, _)| i)
    }

    fn plan_with(
        &self,
        graph: &Arc<Graph>,
        Workspace { flow, planner }: &mut Workspace,
        fixed: &Fixed,
        lending: Option<(WeightStreaming, u16)>,
    ) -> Result<Plan, RuntimeError> {
        let homes = assign(graph, flow, &self.backends, fixed, lending)?;
        let splits = split(graph, flow, &homes, self.backends.len());
        let synchronous: Vec<bool> = self.asynchronous.iter().map(|a| !a).collect();
        let order = order(&splits, &synchronous);
        let (backends, lanes) = (&self.backends, &self.asynchronous);
        let space = Space::plan((graph, flow), backends, &homes, &splits, lanes, self.effort, planner)?;
        let plan = Plan::new(self.clone(), Arc::clone(graph), homes, splits, order, space);
        if cfg!(debug_assertions) {
            check(&plan).map_err(RuntimeError::BadPlan)?;
        }
        Ok(plan)
    }

    /// Checks the numbers in pins, placements and budgets, and gathers them: pins, and for leaves without one what the
    /// rule says, or the home that a state has already.
    fn fixed(
        &self,
        graph: &Graph,
        flow: &Flow,
        state_home: impl Fn(&str) -> Option<usize>,
    ) -> Result<Fixed, RuntimeError> {
        for (backend, _) in &self.budgets {
            self.known(*backend, &|| "a budget".to_owned())?;
        }
        let mut fixed = self.pinned(graph)?;
        let pins: FxHashMap<TensorId, u16> = fixed.iter().copied().collect();
        fixed.reserve(flow.leaves.len());
        for &(id, kind) in &flow.leaves {
            let is_state = kind == TensorKind::State;
            if self.rule.is_none() && !is_state {
                continue;
            }
            let Some(name) = graph.leaf_name(id) else { continue };
            let kept = if is_state { state_home(name) } else { None };
            if let Some(backend) = kept.or_else(|| self.rule.as_ref().and_then(|rule| rule(name))) {
                let backend = self.known(backend, &|| format!("the placement of {name}"))?;
                if pins.is_empty() || !pins.contains_key(&id) {
                    fixed.push((id, backend));
                }
            }
        }
        Ok(fixed)
    }

    /// The storages that are pinned, each once.
    fn pinned(&self, graph: &Graph) -> Result<Fixed, RuntimeError> {
        let mut pinned: FxHashMap<TensorId, u16> = FxHashMap::default();
        let mut fixed = Fixed::new();
        let nodes = self.nodes.iter().map(|(node, backend)| match graph.get_node(*node) {
            Some(n) => Ok((n.output(), *backend)),
            None => Err(unknown("node", node.index(), graph.nodes().len())),
        });
        let tensors = self.tensors.iter().map(|(tensor, backend)| match graph.get(*tensor) {
            Some(_) => Ok((*tensor, *backend)),
            None => Err(unknown("tensor", tensor.index(), graph.tensors().len())),
        });
        for pin in nodes.chain(tensors) {
            let (tensor, backend) = pin?;
            let backend = self.known(backend, &|| format!("the pin of {}", graph.name(tensor)))?;
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

    /// The number of a backend that the caller named for something, if there is such a backend.
    fn known(&self, index: usize, what: &dyn Fn() -> String) -> Result<u16, RuntimeError> {
        let count = self.backends.len();
        let short = u16::try_from(index).ok().filter(|_| index < count);
        short.ok_or_else(|| RuntimeError::UnknownBackend { what: what(), index, count })
    }

    fn check_budgets(&self, plan: &Plan) -> Result<(), RuntimeError> {
        if self.budgets.is_empty() {
            return Ok(());
        }
        let bytes = plan.bytes();
        for (backend, budget) in &self.budgets {
            let Some(bytes) = bytes.get(*backend).filter(|bytes| bytes.total() > *budget) else { continue };
            let (weight_count, fitting, fitting_bytes) = plan
                .fitting_weights(*backend, budget.saturating_sub(bytes.state.saturating_add(bytes.compute)));
            return Err(RuntimeError::OverBudget(Box::new(OverBudget {
                backend: bytes.backend.clone(),
                wanted: bytes.total(),
                weights: bytes.weights,
                state: bytes.state,
                compute: bytes.compute,
                budget: *budget,
                weight_count,
                fitting,
                fitting_bytes,
            })));
        }
        Ok(())
    }

    /// The weights shared by all sessions of this scheduler and its plans.
    pub(crate) fn weight_store(&self) -> Arc<WeightStore> {
        let mut weak = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        weak.upgrade().unwrap_or_else(|| {
            let store = Arc::new(WeightStore::default());
            *weak = Arc::downgrade(&store);
            store
        })
    }

    /// Whether two schedulers have the same backends.
    pub(crate) fn same_backends(&self, other: &Scheduler) -> bool {
        self.backends.len() == other.backends.len()
            && self.backends.iter().zip(other.backends.iter()).all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

fn unknown(what: &'static str, index: usize, count: usize) -> RuntimeError {
    RuntimeError::UnknownPin { what, index, count }
}
