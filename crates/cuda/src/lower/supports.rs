//! Which nodes there are kernels for.

use quadriga_graph::{Graph, NodeId, Op};
use quadriga_runtime::Refusal;

use super::experts::can_route;
use super::recurrent::MAX_DELTA_DEPTH;
use super::sort::MAX_SORTED_IN_BLOCK;
use super::sparse;
use crate::custom::CustomCode;

/// The largest grid in y and z.
const MAX_GRID_Y: usize = 65_535;
/// The largest grid in x.
const MAX_ROWS: usize = i32::MAX as usize;
/// The largest head that the attention kernels take.
const MAX_HEAD: usize = 576;

/// Whether there is a kernel for a node.
pub(crate) fn supports(graph: &Graph, node: NodeId) -> Result<(), Refusal> {
    let refuse = |reason: &'static str| Err(Refusal(reason.into()));
    let n = &graph[node];
    let out = &graph[n.output()];
    let input = |i: usize| graph.inputs(node).get(i).map(|id| &graph[*id]);
    if out.shape().rows() > MAX_ROWS {
        return refuse("more rows than a grid has blocks");
    }
    match n.op() {
        Op::SelectExperts(parameters)
            if input(0).is_some_and(|scores| !can_route(scores.shape().cols(), parameters)) =>
        {
            refuse("more experts than fit the shared memory of a block")
        }
        Op::SumExperts if out.shape().cols() > MAX_GRID_Y * 256 => {
            refuse("rows of more blocks than a grid has")
        }
        Op::GatedDeltaRule(_) => match (input(1), input(2)) {
            (Some(keys), _) if keys.shape().cols() > MAX_DELTA_DEPTH => {
                refuse("keys of more than 256 elements")
            }
            (_, Some(values)) if values.dims4()[2] > MAX_GRID_Y => {
                refuse("more heads than a grid has blocks")
            }
            _ => Ok(()),
        },
        Op::MulMatSparse { .. } | Op::AxpySparse
            if input(0).is_some_and(|w| !sparse::fits(w, out.shape().rows())) =>
        {
            refuse("more rows than a grid has blocks")
        }
        Op::Custom(op) if CustomCode::of(op).is_none() => refuse("the custom operation has no code for CUDA"),
        Op::ArgSort { .. } | Op::TopK { .. }
            if input(0).is_some_and(|x| x.shape().cols() > MAX_SORTED_IN_BLOCK * MAX_GRID_Y) =>
        {
            refuse("rows of more sorted runs than a grid has blocks")
        }
        Op::Attention(_) => {
            let (Some(q), Some(v)) = (input(0), input(2)) else { return refuse("inputs are missing") };
            let [b, h, t, d] = q.dims4();
            if d > MAX_HEAD || v.shape().cols() > MAX_HEAD {
                return refuse("heads of more than 576 elements");
            }
            if b.saturating_mul(t) > MAX_GRID_Y || h > MAX_GRID_Y {
                return refuse("more queries than a grid has blocks");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{
        AttentionOptions, CustomFunction, DType, Gate, GatedDeltaRule, GraphBuilder, SelectExperts, Value,
    };

    use super::*;

    /// Why the last node of a graph is refused.
    fn refusal(build: impl for<'g> FnOnce(&'g GraphBuilder) -> Value<'g>) -> Option<String> {
        let g = GraphBuilder::new();
        let y = build(&g);
        let y = y.id();
        let graph = g.finish().unwrap();
        supports(&graph, graph[y].node().unwrap()).err().map(|refusal| refusal.0.to_string())
    }

    fn attention([heads, queries, cols]: [usize; 3], value_cols: usize, batches: usize) -> Option<String> {
        refusal(|g| {
            let q = g.input("q", DType::F32, [batches, heads, queries, cols]);
            let k = g.input("k", DType::F16, [batches, 1, 3, cols]);
            let v = g.input("v", DType::F16, [batches, 1, 3, value_cols]);
            q.attention(k, v, AttentionOptions::new())
        })
    }

    #[test]
    fn attention_is_limited_by_head_size_and_grid() {
        assert_eq!(attention([2, 5, 576], 576, 1), None);
        assert_eq!(attention([MAX_GRID_Y, 5, 64], 64, 1), None);
        assert_eq!(attention([1, 13_107, 64], 64, 5), None, "five times 13,107 queries are 65,535");
        let head = Some("heads of more than 576 elements".to_owned());
        assert_eq!(attention([2, 5, 577], 64, 1), head);
        assert_eq!(attention([2, 5, 64], 577, 1), head);
        let queries = Some("more queries than a grid has blocks".to_owned());
        assert_eq!(attention([MAX_GRID_Y + 1, 5, 64], 64, 1), queries);
        assert_eq!(attention([1, 13_108, 64], 64, 5), queries);
    }

    #[test]
    fn sorts_and_rows_are_limited_by_the_grid() {
        let longest = MAX_SORTED_IN_BLOCK * MAX_GRID_Y;
        for (cols, refused) in [(longest, false), (longest + 1, true)] {
            let sort =
                refusal(|g| g.input("x", DType::F32, [1, cols]).argsort(quadriga_graph::Order::Ascending));
            assert_eq!(sort.is_some(), refused, "argsort of {cols}");
            assert_eq!(
                refusal(|g| g.input("x", DType::F32, [1, cols]).top_k(4)).is_some(),
                refused,
                "{cols}"
            );
            assert_eq!(refusal(|g| g.input("x", DType::F32, [1, cols]).sqr()), None);
        }
        for (rows, refused) in [(MAX_ROWS, false), (MAX_ROWS + 1, true)] {
            let square = refusal(|g| g.input("x", DType::F32, [rows, 1]).sqr());
            assert_eq!(square.is_some(), refused, "{rows} rows");
        }
    }

    #[test]
    fn operations_without_a_kernel_are_refused() {
        let own = |inputs: &[&quadriga_graph::Tensor]| Ok((DType::F32, *inputs[0].shape()));
        let custom = CustomFunction::new("own", own, |_| Ok(())).build();
        let refusal_of = |op| refusal(|g| g.input("x", DType::F32, [4]).custom(op, &[]));
        assert_eq!(refusal_of(&custom), Some("the custom operation has no code for CUDA".to_owned()));
        // SAFETY: nothing is launched here.
        let code = unsafe { CustomCode::ptx("", "own") }.unwrap();
        let with = CustomFunction::new("own", own, |_| Ok(())).backend_code(crate::FAMILY, code).build();
        assert_eq!(refusal_of(&with), None);
        let other = CustomFunction::new("own", own, |_| Ok(())).backend_code(crate::FAMILY, 1u8).build();
        assert!(refusal_of(&other).is_some());
        let gated = |gate| refusal(|g| g.input("x", DType::F32, [4]).gated_halves(gate, false)).is_some();
        assert!(!Gate::ALL.into_iter().any(gated));
    }

    #[test]
    fn experts_and_states_are_limited_by_their_blocks() {
        let select = |experts| {
            let parameters = SelectExperts::ungrouped(8);
            refusal(|g| g.input("x", DType::F32, [3, experts]).select_experts(parameters)).is_some()
        };
        assert!(!select(2048) && select(8192));
        let rule = |depth: usize, heads: usize| {
            let parameters = GatedDeltaRule { scale: 1.0, tiled: false, delta: true };
            refusal(|g| {
                let rows = |name: &str, heads, width| g.input(name, DType::F32, [1, heads, width]);
                let per_head = |name: &str| g.input(name, DType::F32, [1, heads]);
                let (q, k, v) = (rows("q", 1, depth), rows("k", 1, depth), rows("v", heads, 4));
                let state = g.input("state", DType::F32, [heads, depth, 4]);
                let inputs = [q, k, v, per_head("gates"), per_head("betas"), state];
                g.apply(Op::GatedDeltaRule(parameters), &inputs)
            })
        };
        assert_eq!(rule(256, 2), None);
        assert_eq!(rule(257, 2), Some("keys of more than 256 elements".to_owned()));
        assert_eq!(rule(4, MAX_GRID_Y + 1), Some("more heads than a grid has blocks".to_owned()));
    }
}
