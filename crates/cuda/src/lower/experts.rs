//! Mixtures of experts but for their matrices: routing, biases and the weighted sum.

use quadriga_graph::{Binary, ExpertWeights, NodeId, Op, SelectExperts, TensorId, TensorKind, Unary};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use super::op_codes::RouteActivation;
use crate::buffer::overlap;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg};

/// The most shared memory that a launch may have without asking for it.
const SHARED_BYTES: usize = 48 << 10;

#[repr(C)]
#[derive(Clone, Copy)]
struct RouteWork {
    logits: TensorArg,
    bias: u64,
    ids: u64,
    weights: u64,
    activation: i32,
    experts: i32,
    used: i32,
    groups: i32,
    groups_used: i32,
    softmax: i32,
    normalize: i32,
    scale: f32,
}

// SAFETY: `struct RouteWork` of experts.cu has the same fields in the same order.
unsafe impl Argument for RouteWork {}

/// Nodes that become one launch: an activation and a bias, both optional, the selection, and the weights if they follow.
struct Route {
    logits: TensorId,
    activation: RouteActivation,
    bias: Option<TensorId>,
    select: NodeId,
    parameters: SelectExperts,
    weights: Option<(NodeId, ExpertWeights)>,
    /// All but the first node.
    fused: Vec<NodeId>,
}

/// Shared memory of the routing kernel.
pub(super) fn route_shared_bytes(experts: usize, parameters: &SelectExperts) -> usize {
    (2 * experts + parameters.used + parameters.groups) * 4 + experts + parameters.groups
}

/// Whether the routing kernel takes so many experts.
pub(super) fn can_route(experts: usize, parameters: &SelectExperts) -> bool {
    route_shared_bytes(experts, parameters) <= SHARED_BYTES
}

impl Lowering<'_> {
    pub(super) fn select_experts(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let (Op::SelectExperts(parameters), [scores]) = (self.graph[node].op(), self.graph.inputs(node))
        else {
            return Err(self.failed(node, "one input is needed"));
        };
        let mut route = Route {
            logits: *scores,
            activation: RouteActivation::Plain,
            bias: None,
            select: node,
            parameters: *parameters,
            weights: None,
            fused: Vec::new(),
        };
        if let Some((weights, of)) = self.weights_after(at, node, *scores) {
            route.weights = Some((weights, of));
            route.fused.push(weights);
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

    /// Tries to make one launch of the softmax or sigmoid at position `at`, a bias that is added for the selection alone,
    /// the selection of experts and their weights, if no other node reads what is between them.
    pub(super) fn route(&mut self, at: usize, node: NodeId) -> Result<bool, BackendError> {
        let activation = match self.graph[node].op() {
            Op::SoftMax { scale: 1.0, mask: false, sinks: false } => RouteActivation::Softmax,
            Op::Unary(Unary::Sigmoid) => RouteActivation::Sigmoid,
            _ => return Ok(false),
        };
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

    /// Launches the routing kernel; `false`, with nothing changed, if its results overlap what other tokens read.
    fn push_route(&mut self, route: &Route) -> Result<bool, BackendError> {
        let Route { select, parameters, .. } = *route;
        let logits = self.tensor_arg(select, route.logits)?;
        let experts = logits.dims[3] as usize;
        let read = (logits.address, self.tensor(route.logits).bytes());
        let mut written = vec![self.graph[select].output()];
        written.extend(route.weights.map(|(node, _)| self.graph[node].output()));
        for id in &written {
            let (_, to) = self.place(select, *id)?;
            if overlap(to, self.tensor(*id).bytes(), read.0, read.1) {
                return Ok(false);
            }
        }
        let of = route.weights.map(|(_, of)| of);
        let work = RouteWork {
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
            softmax: i32::from(of.is_some_and(|of| of.softmax)),
            normalize: i32::from(of.is_some_and(|of| of.normalize)),
            scale: of.map_or(1.0, |of| of.scale),
        };
        let function = self.function(KernelFile::Experts, c"k_route")?;
        let launch = Launch::new(function, [logits.dims[2] as u32, 1, 1], 32);
        let shared = route_shared_bytes(experts, &parameters) as u32;
        self.push(launch.shared_bytes(shared).dependent().arg(work));
        route.fused.iter().for_each(|node| self.fuse(*node));
        Ok(true)
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
