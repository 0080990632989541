//! The router of one token: RMS norm and logits of all experts in one launch. See `k_router` of kernels/experts.cu. Its last
//! block routes, unless a warp can do that in registers: routing is then left to the kernels of the experts, if they can,
//! and becomes a launch of its own otherwise.

use quadriga_graph::{Binary, DType, NodeId, Op, TensorId, TensorKind};
use quadriga_runtime::{BackendError, Layout};

use super::experts::{Route, route_shared_bytes};
use super::gemv_streamed::FusedNorm;
use super::lowering::Lowering;
use super::route_work::{PendingRoute, RouteWork};
use crate::buffer::overlap;
use crate::inner::MAX_LOGITS;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg, is_dense_f32};

/// Threads of a block, as in the kernel.
const THREADS: u32 = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct RouterWork {
    route: RouteWork,
    router: TensorArg,
    x: u64,
    norm: u64,
    normed: u64,
    bias: u64,
    counter: u64,
    eps: f32,
}

// SAFETY: `struct RouterWork` of experts.cu has the same fields in the same order.
unsafe impl Argument for RouterWork {}

/// Nodes that become one launch.
struct Router {
    router: TensorId,
    /// What is added to the logits.
    bias: Option<TensorId>,
    route: Route,
    /// All nodes but the norm.
    fused: Vec<NodeId>,
}

impl Lowering<'_> {
    /// Tries to make one launch of a norm at `node`, the multiplication `times` by its weight, the router that reads the
    /// result next, and the routing. `false`, with nothing changed, if it is not possible.
    pub(super) fn norm_router(
        &mut self,
        node: NodeId,
        times: NodeId,
        norm: FusedNorm,
    ) -> Result<bool, BackendError> {
        let one = self.tensor(norm.x).shape().rows() == 1;
        let Some(found) = self.router_after(times).filter(|_| one && self.inner.fusion) else {
            return Ok(false);
        };
        let Some(mut route) = self.route_work(&found.route)? else { return Ok(false) };
        let (place, _) = self.place(node, found.router)?;
        if place.layout != Layout::Plain {
            return Ok(false);
        }
        let router = self.tensor_arg(node, found.router)?;
        let normed = self.graph[times].output();
        let vectors = [norm.x, norm.weight, normed];
        let mut places = [TensorArg::default(); 3];
        for (id, slot) in vectors.into_iter().zip(&mut places) {
            *slot = self.tensor_arg(node, id)?;
        }
        let [x, weight, to] = places;
        let rows =
            [x, weight, to].iter().all(|row| is_dense_f32(row) && row.dims == [1, 1, 1, router.dims[3]]);
        if !rows || !router.address.is_multiple_of(16) || !self.are_apart(&found, norm.x, normed)? {
            return Ok(false);
        }
        let bias = match found.bias {
            Some(bias) => self.place(node, bias)?.1,
            None => 0,
        };
        // Where others route, the plan's place of the logits may be in use before all of them have read it.
        let leaves = route.fits_registers();
        if leaves {
            route.logits.address = self.inner.logits_address();
        }
        let work = RouterWork {
            route,
            router,
            x: x.address,
            norm: weight.address,
            normed: to.address,
            bias,
            counter: if leaves { 0 } else { self.inner.counters.address() },
            eps: norm.eps,
        };
        self.uses_counters = true;
        let function = self.function(KernelFile::Experts, c"k_router")?;
        let shared = route_shared_bytes(router.dims[2] as usize, &found.route.parameters) as u32;
        let launch = Launch::new(function, [router.dims[2] as u32, 1, 1], THREADS);
        self.push(launch.shared_bytes(shared).dependent().arg(work));
        if leaves {
            let launch = self.route_launch(&found.route, route)?;
            let ids = self.graph[found.route.select].output();
            self.pending_route = Some(PendingRoute { ids, work: route, launch });
        }
        self.fuse(times);
        found.fused.iter().for_each(|node| self.fuse(*node));
        Ok(true)
    }

    /// The router whose matrix the node after `times` multiplies with its result.
    fn router_after(&self, times: NodeId) -> Option<Router> {
        let graph = self.graph;
        let at = self.split.nodes.iter().position(|node| *node == times)?;
        let mut later = self.later(at);
        let matmul = later.next()?;
        let (Op::MulMat, [router, row]) = (graph[matmul].op(), graph.inputs(matmul)) else { return None };
        let matrix = &graph[*router];
        let float = matches!(matrix.dtype(), DType::F32 | DType::F16 | DType::BF16);
        // The kernel reads it before the previous kernel is complete.
        let fits = *row == graph[times].output()
            && matrix.kind() == TensorKind::Weight
            && matrix.storage() == *router
            && matrix.shape().rank() == 2
            && matrix.shape().rows() <= MAX_LOGITS
            && matrix.shape().cols().is_multiple_of(8);
        if !fits || !float {
            return None;
        }
        let mut fused = vec![matmul];
        let mut logits = graph[matmul].output();
        let mut next = later.next()?;
        let mut bias = None;
        if let (Op::Binary(Binary::Add), [a, b]) = (graph[next].op(), graph.inputs(next))
            && *a == logits
            && graph[*b].kind() == TensorKind::Weight
            && graph[*b].dtype() == DType::F32
            && graph[*b].is_contiguous()
            && graph[*b].elements() == matrix.shape().rows()
            && self.readers(logits).len() == 1
            && !(self.split.kept)(logits)
        {
            bias = Some(*b);
            fused.push(next);
            logits = graph[next].output();
            next = later.next()?;
        }
        let route = self.route_at(next).filter(|route| route.logits == logits)?;
        fused.push(next);
        fused.extend(&route.fused);
        Some(Router { router: *router, bias, route, fused })
    }

    /// Whether the results overlap neither the row, which all blocks read, nor each other.
    fn are_apart(&mut self, found: &Router, x: TensorId, normed: TensorId) -> Result<bool, BackendError> {
        let (graph, select) = (self.graph, found.route.select);
        let mut range = |id: TensorId| -> Result<(u64, usize), BackendError> {
            Ok((self.place(select, id)?.1, self.tensor(id).bytes()))
        };
        let (row, normed, logits) = (range(x)?, range(normed)?, range(found.route.logits)?);
        let results = [Some(select), found.route.weights.map(|(node, _)| node)];
        let mut pairs = vec![(row, normed), (row, logits), (normed, logits)];
        for node in results.into_iter().flatten() {
            let result = range(graph[node].output())?;
            pairs.extend([(row, result), (normed, result)]);
        }
        Ok(pairs.into_iter().all(|(a, b)| !overlap(a.0, a.1, b.0, b.1)))
    }
}
