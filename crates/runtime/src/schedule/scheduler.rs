//! The scheduler: the backends, and the caller's settings for placement, memory and weight streaming.

use std::sync::{Arc, Mutex};

use quadriga_graph::{NodeId, TensorId};

use super::into_backends::IntoBackends;
use super::streaming::WeightStreaming;
use crate::flow::Flow;
use crate::memory::Planner;
use crate::memory::packing::Effort;
use crate::weights::WeightStore;
use crate::{Backend, RankGroup, RankGroups, environment};

/// The caller's rule for placing leaves on backends, by name.
pub(super) type PlacementRule = Arc<dyn Fn(&str) -> Option<usize> + Send + Sync>;

/// Plans graphs for a set of backends: decides where and when each node runs.
///
/// It is made once, with the backends in order of preference, and cheap to clone. A scheduler and its clones load the
/// same weights only once, however many sessions use them: weights are shared if their data are the same, not if their
/// names are.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::Scheduler;
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [2, 8]);
/// let cache = g.state("blk.0.cache", DType::F32, [2, 8]);
/// g.output("y", x.add(cache).silu());
///
/// let device = quadriga_sim::Sim::new("sim:0").device();
/// let plan = Scheduler::new((device, quadriga_cpu::Backend::new()?)) // preferred first
///     .place(|name| name.starts_with("blk.0.").then_some(1))         // this layer on the CPU
///     .budget(0, 4 << 30)                                            // at most 4 GiB of the device
///     .plan(g.finish()?)?;
/// assert!(plan.splits().splits.iter().all(|split| split.backend == 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Scheduler {
    pub(super) backends: Arc<[Arc<dyn Backend>]>,
    pub(super) asynchronous: Arc<[bool]>,
    pub(super) node_pins: Vec<(NodeId, usize)>,
    pub(super) tensor_pins: Vec<(TensorId, usize)>,
    pub(super) name_pins: Vec<(String, usize)>,
    pub(super) rule: Option<PlacementRule>,
    pub(super) budgets: Vec<(usize, u64)>,
    pub(super) effort: Effort,
    pub(super) streaming: Option<WeightStreaming>,
    pub(super) check_plans: bool,
    pub(super) ranks: RankGroups,
    /// Reused by the next plan.
    pub(super) workspace: Arc<Mutex<Workspace>>,
    /// Weights that sessions share.
    weights: Arc<WeightStore>,
}

/// The working memory of planning.
#[derive(Default)]
pub(super) struct Workspace {
    pub(super) flow: Flow,
    pub(super) planner: Planner,
}

impl Scheduler {
    /// A scheduler for these backends, the most preferred first: an array or vector of one type, a tuple of different
    /// ones, or a single backend.
    pub fn new(backends: impl IntoBackends) -> Scheduler {
        let backends: Arc<[Arc<dyn Backend>]> = backends.into_backends().into();
        Scheduler {
            asynchronous: backends.iter().map(|b| b.device().asynchronous).collect(),
            backends,
            node_pins: Vec::new(),
            tensor_pins: Vec::new(),
            name_pins: Vec::new(),
            rule: None,
            budgets: Vec::new(),
            effort: Effort::Fast,
            streaming: Some(WeightStreaming::default()),
            check_plans: environment::check_plans(),
            ranks: RankGroups::default(),
            workspace: Arc::default(),
            weights: Arc::default(),
        }
    }

    /// Runs a node on a backend. The pin is for graphs that have this node.
    pub fn pin_node(mut self, node: NodeId, backend: usize) -> Scheduler {
        self.node_pins.push((node, backend));
        self
    }

    /// Places a tensor on a backend; every node that writes it runs there.
    pub fn pin_tensor(mut self, tensor: TensorId, backend: usize) -> Scheduler {
        self.tensor_pins.push((tensor, backend));
        self
    }

    /// Places the leaf or result of this name on a backend, in every graph that has one: also in those that a session builds
    /// anew for each step. Every node that writes it runs there.
    pub fn pin_name(mut self, name: impl Into<String>, backend: usize) -> Scheduler {
        self.name_pins.push((name.into(), backend));
        self
    }

    /// Places weights, constants, states and inputs by name; nodes that read them tend to run there. The rule is used
    /// for every graph; where it returns `None` the scheduler decides.
    pub fn place(mut self, rule: impl Fn(&str) -> Option<usize> + Send + Sync + 'static) -> Scheduler {
        self.rule = Some(Arc::new(rule));
        self
    }

    /// Limits the bytes that a plan may take of a backend. A new limit takes the place of an earlier one.
    pub fn budget(mut self, backend: usize, bytes: u64) -> Scheduler {
        self.budgets.retain(|(known, _)| *known != backend);
        self.budgets.push((backend, bytes));
        self
    }

    /// The bytes that a plan may take of a backend, if they are limited.
    pub fn budget_of(&self, backend: usize) -> Option<u64> {
        self.budgets.iter().find(|(known, _)| *known == backend).map(|(_, bytes)| *bytes)
    }

    /// How much time the memory planner may spend to save memory.
    pub fn effort(mut self, effort: Effort) -> Scheduler {
        self.effort = effort;
        self
    }

    /// When host-resident weights are copied to a device for a run; `None`: never. If streaming takes a plan over a
    /// [budget](Scheduler::budget), the graph is planned without.
    pub fn weight_streaming(mut self, streaming: Option<WeightStreaming>) -> Scheduler {
        self.streaming = streaming;
        self
    }

    /// Sets the ranks of a group, with which the [collectives](quadriga_graph::Collective) of its number are executed. Without them,
    /// graphs with collectives can be planned, and not run.
    pub fn ranks(mut self, group: u32, ranks: Arc<dyn RankGroup>) -> Scheduler {
        self.ranks.insert(group, ranks);
        self
    }

    /// The ranks of all groups.
    pub fn rank_groups(&self) -> &RankGroups {
        &self.ranks
    }

    /// Whether every plan is checked by code that is independent of the scheduler's own: splits, copies, waits, order
    /// ([`Plan::check`](crate::Plan::check)) and memory ([`memory::check`](crate::memory::check)). A plan that breaks a
    /// rule is an error then. Sessions also compare each graph that is [prepared](crate::Session::prepare) with the one that
    /// its key stands for. [default: in debug builds, or if [`CHECK_PLANS_VARIABLE`](crate::CHECK_PLANS_VARIABLE) is set]
    pub fn check_plans(mut self, check: bool) -> Scheduler {
        self.check_plans = check;
        self
    }

    /// Whether plans are checked.
    pub(crate) fn checks_plans(&self) -> bool {
        self.check_plans
    }

    /// The same scheduler without pins of ids, which are those of one graph.
    pub(crate) fn without_pins(&self) -> Scheduler {
        Scheduler { node_pins: Vec::new(), tensor_pins: Vec::new(), ..self.clone() }
    }

    /// The backends, in order of preference.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// For each backend whether its queues return before their work is done.
    pub fn asynchronous(&self) -> &[bool] {
        &self.asynchronous
    }

    /// The weights that all sessions of this scheduler and its clones share.
    pub(crate) fn weight_store(&self) -> Arc<WeightStore> {
        Arc::clone(&self.weights)
    }

    /// Whether two schedulers have the same backends.
    pub(crate) fn same_backends(&self, other: &Scheduler) -> bool {
        self.backends.len() == other.backends.len()
            && self.backends.iter().zip(other.backends.iter()).all(|(a, b)| Arc::ptr_eq(a, b))
    }
}
