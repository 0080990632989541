//! Which nodes become one launch of the experts' GEMV: gate and up with biases and activation; or one matrix with its
//! bias, the weighted sum over experts, and a residual.

use quadriga_graph::{Binary, DType, Gate, NodeId, Op, TensorId};
use quadriga_runtime::{BackendError, Layout};

use super::expert_extents::{ExpertExtents, MAX_SUMMED};
use super::formats::{MAX_SHARED_BYTES, MatrixFormat, PackedMatrix, expert_gemv_shared_bytes};
use super::lowering::Lowering;
use crate::buffer::overlap;

/// A launch, and the nodes that it computes.
pub(super) struct ExpertLaunch {
    /// The matrices with their biases: one, or gate and up.
    pub(super) matrices: Vec<(TensorId, Option<TensorId>)>,
    pub(super) gate: Option<Gate>,
    /// The weights of the sum over experts, and what is added to it.
    pub(super) sum: Option<(TensorId, Option<TensorId>)>,
    pub(super) output: TensorId,
    /// All nodes but the first.
    pub(super) fused: Vec<NodeId>,
}

/// A matmul of a launch, with the bias that follows it.
struct ExpertMatmul {
    weight: TensorId,
    bias: Option<TensorId>,
    /// The result, with the bias.
    result: TensorId,
}

impl Lowering<'_> {
    /// The launch of the matmul at position `at`, with as many of the next nodes as it can compute.
    pub(super) fn expert_launch(
        &mut self,
        at: usize,
        node: NodeId,
        format: MatrixFormat,
        extents: ExpertExtents,
    ) -> Result<ExpertLaunch, BackendError> {
        let [weight, x, ids] = *self.graph.inputs(node) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let alone = ExpertLaunch {
            matrices: vec![(weight, None)],
            gate: None,
            sum: None,
            output: self.graph[node].output(),
            fused: Vec::new(),
        };
        if !self.inner.fusion {
            return Ok(alone);
        }
        let found = match self.gated_experts(at, node, format)? {
            Some(found) => Some(found),
            None => self.summed_experts(at, node, extents),
        };
        let Some(found) = found else { return Ok(alone) };
        // Every block reads these until it ends: the result must not overlap them.
        let read = [Some(x), Some(ids), found.sum.map(|(weights, _)| weights)];
        let out = (self.place(node, found.output)?.1, self.tensor(found.output).bytes());
        for id in read.into_iter().flatten() {
            let (_, address) = self.place(node, id)?;
            if overlap(out.0, out.1, address, self.tensor(id).bytes()) {
                return Ok(alone);
            }
        }
        // Only the thread that writes a result reads what is added to it.
        if let Some((_, Some(add))) = found.sum {
            let (_, address) = self.place(node, add)?;
            if address != out.0 && overlap(out.0, out.1, address, self.tensor(add).bytes()) {
                return Ok(alone);
            }
        }
        Ok(found)
    }

    /// Gate and up, their biases, and the gated unit that reads both.
    fn gated_experts(
        &mut self,
        at: usize,
        node: NodeId,
        format: MatrixFormat,
    ) -> Result<Option<ExpertLaunch>, BackendError> {
        let graph = self.graph;
        let [weight, x, ids] = *graph.inputs(node) else { return Ok(None) };
        let mut members = vec![ExpertMatmul { weight, bias: None, result: graph[node].output() }];
        let mut fused = Vec::new();
        let later: Vec<NodeId> = self.later(at).take(4).collect();
        for next in later {
            let output = graph[next].output();
            match (graph[next].op(), graph.inputs(next)) {
                (Op::MulMatId, [other, same_x, same_ids])
                    if members.len() == 1 && *same_x == x && *same_ids == ids =>
                {
                    if graph[*other].dims4() != graph[weight].dims4()
                        || self.packed_format(next, *other)? != Some(format)
                    {
                        return Ok(None);
                    }
                    members.push(ExpertMatmul { weight: *other, bias: None, result: output });
                }
                (Op::AddId, [from, biases, same_ids]) if *same_ids == ids && self.is_bias(*biases) => {
                    let member = members.iter_mut().find(|m| m.result == *from && m.bias.is_none());
                    let Some(member) = member.filter(|m| self.is_read_once(m.result)) else {
                        return Ok(None);
                    };
                    (member.bias, member.result) = (Some(*biases), output);
                }
                (Op::Gated { gate, swapped }, [a, b]) => {
                    let (gates, ups) = if *swapped { (*b, *a) } else { (*a, *b) };
                    let of = |result: TensorId| members.iter().find(|m| m.result == result);
                    let (Some(gates), Some(ups)) = (of(gates), of(ups)) else { return Ok(None) };
                    let fits = gates.result != ups.result
                        && self.is_read_once(gates.result)
                        && self.is_read_once(ups.result)
                        && graph[output].is_contiguous();
                    fused.push(next);
                    return Ok(fits.then(|| ExpertLaunch {
                        matrices: vec![(gates.weight, gates.bias), (ups.weight, ups.bias)],
                        gate: Some(*gate),
                        sum: None,
                        output,
                        fused,
                    }));
                }
                _ => return Ok(None),
            }
            fused.push(next);
        }
        Ok(None)
    }

    /// One matrix, its bias, and the weighted sum over experts, perhaps with a residual.
    fn summed_experts(&self, at: usize, node: NodeId, extents: ExpertExtents) -> Option<ExpertLaunch> {
        let graph = self.graph;
        let [weight, _, ids] = *graph.inputs(node) else { return None };
        let mut result = graph[node].output();
        let mut bias = None;
        let mut fused = Vec::new();
        let mut later = self.later(at);
        let mut next = later.next()?;
        if let (Op::AddId, [from, biases, same_ids]) = (graph[next].op(), graph.inputs(next))
            && (*from, *same_ids) == (result, ids)
            && self.is_bias(*biases)
            && self.is_read_once(result)
        {
            bias = Some(*biases);
            result = graph[next].output();
            fused.push(next);
            next = later.next()?;
        }
        let (Op::SumExperts, [from, weights]) = (graph[next].op(), graph.inputs(next)) else { return None };
        let shared = expert_gemv_shared_bytes(extents.x_rows * extents.k);
        if *from != result
            || !self.is_read_once(result)
            || extents.used > MAX_SUMMED
            || shared > MAX_SHARED_BYTES
        {
            return None;
        }
        fused.push(next);
        let mut output = graph[next].output();
        let mut add = None;
        if let Some(sum) = later.next()
            && let (Op::Binary(Binary::Add), [a, b]) = (graph[sum].op(), graph.inputs(sum))
            && (graph[*a].storage() == output) != (graph[*b].storage() == output)
            && self.is_read_once(output)
        {
            let (from, other) = if graph[*a].storage() == output { (*a, *b) } else { (*b, *a) };
            // A view of the sum has all of it, in order.
            let whole = |id: TensorId| {
                let tensor = &graph[id];
                tensor.is_contiguous()
                    && tensor.dtype() == DType::F32
                    && tensor.elements() == graph[output].elements()
            };
            if whole(from) && whole(other) && whole(graph[sum].output()) {
                (add, output) = (Some(other), graph[sum].output());
                fused.push(sum);
            }
        }
        let sum = Some((*weights, add));
        Some(ExpertLaunch { matrices: vec![(weight, bias)], gate: None, sum, output, fused })
    }

    /// Whether one node reads a result, and it is not kept after the split.
    fn is_read_once(&self, result: TensorId) -> bool {
        self.readers(result).len() == 1 && !(self.split.kept)(result)
    }

    /// Whether the kernels can read biases: contiguous rows.
    fn is_bias(&self, biases: TensorId) -> bool {
        self.graph[biases].is_contiguous()
    }

    fn packed_format(
        &mut self,
        node: NodeId,
        weight: TensorId,
    ) -> Result<Option<MatrixFormat>, BackendError> {
        let (place, _) = self.place(node, weight)?;
        let packed = PackedMatrix::of(self.tensor(weight)).map(|packed| packed.format);
        Ok(packed.filter(|_| place.layout != Layout::Plain))
    }
}
