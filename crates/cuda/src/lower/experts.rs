//! Mixtures of experts but for their matrices: routing, biases and the weighted sum.

use quadriga_graph::{Binary, ExpertWeights, NodeId, Op, SelectExperts, TensorId, TensorKind, Unary};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use super::op_codes::RouteActivation;
use super::route_work::RouteWork;
use crate::buffer::overlap;
use crate::kernels::KernelFile;
use crate::launch::Launch;

/// The most shared memory that a launch may have without asking for it.
const SHARED_BYTES: usize = 48 << 10;

/// Nodes that become one launch: an activation and a bias, both optional, the selection, and the weights if they follow.
pub(super) struct Route {
    pub(super) logits: TensorId,
    activation: RouteActivation,
    bias: Option<TensorId>,
    pub(super) select: NodeId,
    pub(super) parameters: SelectExperts,
    pub(super) weights: Option<(NodeId, ExpertWeights)>,
    /// All but the first node.
    pub(super) fused: Vec<NodeId>,
}

/// Shared memory of the routing kernel.
pub(super) fn route_shared_bytes(experts: usize, parameters: &SelectExperts) -> usize {
    (2 * experts + parameters.used + parameters.groups) * 4 + experts + parameters.groups
}

/// Whether the routing kernel takes so many experts.
pub(super) fn can_route(experts: usize, parameters: &SelectExperts) -> bool {
    route_shared_bytes(experts, parameters) <= SHARED_BYTES
}

/// The activation of a router's logits that a node computes.
fn activation_of(op: &Op) -> Option<RouteActivation> {
    match op {
        Op::SoftMax { scale: 1.0, mask: false, sinks: false } => Some(RouteActivation::Softmax),
        Op::Unary(Unary::Sigmoid) => Some(RouteActivation::Sigmoid),
        _ => None,
    }
}

impl Lowering<'_> {
    pub(super) fn select_experts(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let mut route = self.selection(at, node).ok_or_else(|| self.failed(node, "one input is needed"))?;
        if route.weights.is_some() {
            if self.push_route(&route)? {
                return Ok(());
            }
            route.weights = None;
            route.fused.clear();
        }
        match self.push_route(&route)? {
            true => Ok(()),
            false => Err(self.failed(node, "its result overlaps its input")),
        }
    }

    /// A selection by plain scores, with the weights if they follow.
    fn selection(&self, at: usize, node: NodeId) -> Option<Route> {
        let (Op::SelectExperts(parameters), [scores]) = (self.graph[node].op(), self.graph.inputs(node))
        else {
            return None;
        };
        let weights = self.weights_after(at, node, *scores);
        Some(Route {
            logits: *scores,
            activation: RouteActivation::Plain,
            bias: None,
            select: node,
            parameters: *parameters,
            weights,
            fused: weights.map(|(node, _)| node).into_iter().collect(),
        })
    }

    /// The routing that starts at a node; `None` if anything else reads the logits.
    pub(super) fn route_at(&self, node: NodeId) -> Option<Route> {
        let at = self.split.nodes.iter().position(|n| *n == node)?;
        let (route, reads) = match activation_of(self.graph[node].op()) {
            Some(activation) => (self.route_from(at, node, activation)?, 1),
            None => {
                let route = self.selection(at, node)?;
                let reads = 1 + usize::from(route.weights.is_some());
                (route, reads)
            }
        };
        let logits = route.logits;
        let alone = self.readers(logits).len() == reads && !(self.split.kept)(logits);
        let experts = self.graph[logits].shape().cols();
        (alone && can_route(experts, &route.parameters)).then_some(route)
    }

    /// Tries to make one launch of the softmax or sigmoid at position `at`, a bias that is added for the selection alone,
    /// the selection of experts and their weights, if no other node reads what is between them.
    pub(super) fn route(&mut self, at: usize, node: NodeId) -> Result<bool, BackendError> {
        let Some(activation) = activation_of(self.graph[node].op()) else { return Ok(false) };
        let Some(route) = self.route_from(at, node, activation).filter(|_| self.inner.fusion) else {
            return Ok(false);
        };
        self.push_route(&route)
    }

    fn route_from(&self, at: usize, node: NodeId, activation: RouteActivation) -> Option<Route> {
        let graph = self.graph;
        let [logits] = *graph.inputs(node) else { return None };
        let probabilities = graph[node].output();
        if !graph[logits].has_dense_rows() || (self.split.kept)(probabilities) {
            return None;
        }
        let mut later = self.later(at);
        let mut next = later.next()?;
        let mut fused = Vec::new();
        let mut scores = probabilities;
        let mut bias = None;
        if let (Op::Binary(Binary::Add), [a, b]) = (graph[next].op(), graph.inputs(next))
            && *a == probabilities
            && graph[*b].kind() == TensorKind::Weight
            && graph[*b].is_contiguous()
            && graph[*b].elements() == graph[probabilities].shape().cols()
            && graph[*b].shape().rows() == 1
        {
            bias = Some(*b);
            scores = graph[next].output();
            fused.push(next);
            if (self.split.kept)(scores) || self.readers(scores).len() != 1 {
                return None;
            }
            next = later.next()?;
        }
        let (Op::SelectExperts(parameters), [selected]) = (graph[next].op(), graph.inputs(next)) else {
            return None;
        };
        let select = next;
        let weights = later.next()?;
        let (Op::ExpertWeights(of), [from, ids]) = (graph[weights].op(), graph.inputs(weights)) else {
            return None;
        };
        let chained = *selected == scores && *from == probabilities && *ids == graph[select].output();
        fused.extend([select, weights]);
        // The next node after the activation and the weights are all that read the probabilities.
        (chained && self.readers(probabilities).len() == 2).then_some(Route {
            logits,
            activation,
            bias,
            select,
            parameters: *parameters,
            weights: Some((weights, *of)),
            fused,
        })
    }

    /// The next node, if it computes the weights of the experts that `select` selects by the same scores.
    fn weights_after(&self, at: usize, select: NodeId, scores: TensorId) -> Option<(NodeId, ExpertWeights)> {
        let next = self.next(at).filter(|_| self.inner.fusion)?;
        let Op::ExpertWeights(of) = self.graph[next].op() else { return None };
        (*self.graph.inputs(next) == [scores, self.graph[select].output()]).then_some((next, *of))
    }

    /// What the routing kernels take; `None` if results overlap what other tokens read.
    pub(super) fn route_work(&mut self, route: &Route) -> Result<Option<RouteWork>, BackendError> {
        let Route { select, parameters, .. } = *route;
        let logits = self.tensor_arg(select, route.logits)?;
        let experts = logits.dims[3] as usize;
        let read = (logits.address, self.tensor(route.logits).bytes());
        let mut written = vec![self.graph[select].output()];
        written.extend(route.weights.map(|(node, _)| self.graph[node].output()));
        for id in &written {
            let (_, to) = self.place(select, *id)?;
            // A token's logits are all read before its results are written.
            if logits.dims[2] > 1 && overlap(to, self.tensor(*id).bytes(), read.0, read.1) {
                return Ok(None);
            }
        }
        let of = route.weights.map(|(_, of)| of);
        Ok(Some(RouteWork {
            logits,
            bias: match route.bias {
                Some(bias) => self.place(select, bias)?.1,
                None => 0,
            },
            ids: self.place(select, self.graph[select].output())?.1,
            weights: match route.weights {
                Some((node, _)) => self.place(node, self.graph[node].output())?.1,
                None => 0,
            },
            activation: route.activation as i32,
            experts: experts as i32,
            used: parameters.used as i32,
            groups: parameters.groups as i32,
            groups_used: parameters.groups_used as i32,
            group_scores: parameters.group_score.summed() as i32,
            softmax: i32::from(of.is_some_and(|of| of.softmax)),
            normalize: i32::from(of.is_some_and(|of| of.normalize)),
            scale: of.map_or(1.0, |of| of.scale),
        }))
    }

    /// Launches the routing kernel; `false`, with nothing changed, if its results overlap what other tokens read.
    fn push_route(&mut self, route: &Route) -> Result<bool, BackendError> {
        let Some(work) = self.route_work(route)? else { return Ok(false) };
        let launch = self.route_launch(route, work)?;
        self.push(launch);
        route.fused.iter().for_each(|node| self.fuse(*node));
        Ok(true)
    }

    pub(super) fn route_launch(&self, route: &Route, work: RouteWork) -> Result<Launch, BackendError> {
        let function = self.function(KernelFile::Experts, c"k_route")?;
        let launch = Launch::new(function, [work.logits.dims[2] as u32, 1, 1], 32);
        let shared = route_shared_bytes(work.experts as usize, &route.parameters) as u32;
        Ok(launch.shared_bytes(shared).dependent().arg(work))
    }

    pub(super) fn expert_weights(&mut self, node: NodeId, of: &ExpertWeights) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [probabilities, ids] = *inputs.as_slice() else {
            return Err(self.failed(node, "two inputs are needed"));
        };
        let (fault_word, fault) = self.fault(node, "an expert index is out of range");
        let function = self.function(KernelFile::Experts, c"k_expert_weights")?;
        let launch = Launch::new(function, [ids.dims[2] as u32, 1, 1], 32).dependent();
        let launch = launch.arg(probabilities).arg(ids).arg(out.address);
        let launch = launch.arg(i32::from(of.softmax)).arg(i32::from(of.normalize)).arg(of.scale);
        self.push(launch.arg(fault_word).arg(fault));
        Ok(())
    }

    pub(super) fn add_id(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [x, biases, ids] = *inputs.as_slice() else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let (fault_word, fault) = self.fault(node, "an expert index is out of range");
        let function = self.function(KernelFile::Experts, c"k_add_id")?;
        let launch = Launch::new(function, [x.rows() as u32, 1, 1], 256).dependent();
        self.push(launch.arg(x).arg(biases).arg(ids).arg(out).arg(fault_word).arg(fault));
        Ok(())
    }

    pub(super) fn sum_experts(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [x, weights] = *inputs.as_slice() else {
            return Err(self.failed(node, "two inputs are needed"));
        };
        let function = self.function(KernelFile::Experts, c"k_sum_experts")?;
        let grid = [x.dims[1] as u32, (x.dims[3] as u32).div_ceil(256), 1];
        self.push(Launch::new(function, grid, 256).dependent().arg(x).arg(weights).arg(out.address));
        Ok(())
    }
}
