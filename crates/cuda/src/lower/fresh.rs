//! The token under way, in attention itself: its query and key are turned there, and its key and value written to the
//! cache there, so that nothing but attention stands between the products that make the three rows and the one that
//! follows.
//!
//! The rows lie in scratch memory, not where the plan has them: by the plan they are used up before attention begins,
//! whose result may lie in their place.

use quadriga_graph::{Attention, DType, Graph, NodeId, Op, Rope, TensorId, TensorKind};
use quadriga_runtime::BackendError;

use super::attention::half_rows;
use super::{Lowering, scratch};
use crate::launch::Described;

/// Nodes that become one launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) rope: Rope,
    pub(super) factors: Option<TensorId>,
    pub(super) positions: TensorId,
    pub(super) ids: TensorId,
    /// The rows as products leave them.
    pub(super) query: TensorId,
    pub(super) key: TensorId,
    pub(super) value: TensorId,
    pub(super) write_keys: NodeId,
    pub(super) write_values: NodeId,
    pub(super) attention: NodeId,
    /// All nodes but attention.
    pub(super) taken: [NodeId; 4],
}

/// What the search looks at.
pub(super) struct Search<'a> {
    pub(super) graph: &'a Graph,
    pub(super) nodes: &'a [NodeId],
    /// Whether a result is read after the split.
    pub(super) kept: &'a dyn Fn(TensorId) -> bool,
    /// The positions of the nodes that read a storage.
    pub(super) readers: &'a dyn Fn(TensorId) -> usize,
}

impl Search<'_> {
    /// All groups of one token, in order; between the first row of one and its attention is no row of another.
    pub(super) fn groups(&self) -> Vec<Group> {
        let computing: Vec<(usize, NodeId)> =
            self.nodes.iter().copied().enumerate().filter(|(_, n)| !self.graph[*n].op().is_view()).collect();
        let mut groups: Vec<Group> = Vec::new();
        let mut end = None;
        for five in computing.windows(5) {
            let [first, second, third, fourth, (at, last)] = *five else { continue };
            let Some(group) = self.group([first.1, second.1, third.1, fourth.1, last]) else { continue };
            let starts = [group.query, group.key, group.value].map(|row| self.maker(row));
            let Some(start) = starts.into_iter().min().flatten() else { continue };
            if end.is_none_or(|end| start > end) {
                end = Some(at);
                groups.push(group);
            }
        }
        groups
    }

    /// The position of the node that makes a tensor's storage.
    fn maker(&self, id: TensorId) -> Option<usize> {
        let node = self.graph[self.graph[id].storage()].node()?;
        self.nodes.iter().position(|n| *n == node)
    }

    fn group(
        &self,
        [turn_query, turn_key, write_keys, write_values, attention]: [NodeId; 5],
    ) -> Option<Group> {
        let graph = self.graph;
        let (Op::Rope { rope, .. }, Op::Attention(parameters)) =
            (graph[turn_query].op(), graph[attention].op())
        else {
            return None;
        };
        let alike = graph[turn_key].op() == graph[turn_query].op()
            && graph.inputs(turn_key).get(1..) == graph.inputs(turn_query).get(1..);
        let writes = [write_keys, write_values].iter().all(|n| matches!(graph[*n].op(), Op::SetRows));
        let (query, positions) = (*graph.inputs(turn_query).first()?, *graph.inputs(turn_query).get(1)?);
        let factors = graph.inputs(turn_query).get(2).copied();
        let key = *graph.inputs(turn_key).first()?;
        let [key_cache, turned_key, ids] = *graph.inputs(write_keys) else { return None };
        let [value_cache, value, other_ids] = *graph.inputs(write_values) else { return None };
        let (q, k, v, spans) = attended(graph, attention, parameters)?;
        let [_, heads, _, d] = graph[q].dims4();
        let [_, groups, rows, _] = graph[k].dims4();
        let is_of = |id: TensorId, node: NodeId| graph[id].storage() == graph[node].output();
        // Turned rows go nowhere else.
        let alone = |node: NodeId| {
            let made = graph[node].output();
            (self.readers)(made) == 1 && !(self.kept)(made)
        };
        // A row is made in this split, for this group alone.
        let row = |id: TensorId, elements: usize| {
            let (tensor, storage) = (&graph[id], graph[id].storage());
            tensor.dtype() == DType::F32
                && tensor.is_contiguous()
                && tensor.elements() == elements
                && matches!(graph[storage].kind(), TensorKind::Computed(_))
                && (self.readers)(storage) == 1
                && !(self.kept)(id)
        };
        // What is looked at before the kernel before is done.
        let given = |id: TensorId, elements: usize| {
            graph[graph[id].storage()].kind() == TensorKind::Input && graph[id].elements() == elements
        };
        let fixed = factors.is_none_or(|factors| {
            matches!(graph[graph[factors].storage()].kind(), TensorKind::Weight | TensorKind::Constant)
        });
        // The rows of a cache that are written are those that are attended to, one after another.
        let cache = |attended: TensorId, written: TensorId| {
            let (a, w) = (&graph[attended], &graph[written]);
            let (size, stride) = (d * 2, w.strides()[2]);
            a.storage() == w.storage()
                && a.offset() == w.offset()
                && (a.dtype(), w.dtype()) == (DType::F16, DType::F16)
                && a.dims4() == [1, groups, rows, d]
                && w.dims4() == [1, 1, rows, groups * d]
                && a.strides()[1..] == [size, stride, 2]
                && w.strides()[3] == 2
                && matches!(graph[w.storage()].kind(), TensorKind::State)
        };
        let fits = alike
            && writes
            && fixed
            && ids == other_ids
            && is_of(q, turn_query)
            && is_of(turned_key, turn_key)
            && graph[turned_key].is_contiguous()
            && alone(turn_query)
            && alone(turn_key)
            && graph[q].dims4() == [1, heads, 1, d]
            && [64, 128, 256].contains(&d)
            && groups > 0
            && heads.is_multiple_of(groups)
            && rope.dims <= d
            && row(query, heads * d)
            && row(key, groups * d)
            && row(value, groups * d)
            && given(positions, 1)
            && given(ids, 1)
            && spans.is_none_or(|spans| given(spans, 2))
            && cache(k, key_cache)
            && cache(v, value_cache)
            && graph[k].storage() != graph[v].storage()
            && self.is_written_once(graph[k].storage(), write_keys)
            && self.is_written_once(graph[v].storage(), write_values);
        let taken = [turn_query, turn_key, write_keys, write_values];
        fits.then_some(Group {
            rope: *rope,
            factors,
            positions,
            ids,
            query,
            key,
            value,
            write_keys,
            write_values,
            attention,
            taken,
        })
    }

    /// Whether one node of the split alone writes a storage.
    fn is_written_once(&self, storage: TensorId, by: NodeId) -> bool {
        let target = |node: NodeId| self.graph.inputs(node).first().map(|id| self.graph[*id].storage());
        let mut writers = self.nodes.iter().filter(|n| self.graph[**n].op().is_write());
        writers.all(|n| *n == by || target(*n) != Some(storage))
    }
}

/// Queries, keys, values and spans of attention without a mask.
fn attended(
    graph: &Graph,
    node: NodeId,
    parameters: &Attention,
) -> Option<(TensorId, TensorId, TensorId, Option<TensorId>)> {
    let [q, k, v] = *graph.inputs(node).first_chunk::<3>().filter(|_| !parameters.mask)?;
    Some((q, k, v, graph.inputs(node).get(3).copied()))
}

impl Lowering<'_> {
    /// Finds the groups of the split, and gives their rows places in scratch memory from `base` on.
    pub(super) fn find_fresh(&mut self, base: u64, bytes: usize) -> Result<(), BackendError> {
        if !self.shared.fuses {
            return Ok(());
        }
        let readers = |storage| self.readers(storage).len();
        let search =
            Search { graph: self.graph, nodes: self.split.nodes, kept: self.split.kept, readers: &readers };
        for group in search.groups() {
            let [query, key, value] =
                [group.query, group.key, group.value].map(|row| self.tensor(row).bytes());
            let inputs = self.graph.inputs(group.attention);
            let (Some(q), Some(k), Some(v)) = (inputs.first(), inputs.get(1), inputs.get(2)) else {
                continue;
            };
            let caches = [(*k, group.write_keys), (*v, group.write_values)];
            let mut same = true;
            for (attended, write) in caches {
                let Some(written) = self.graph.inputs(write).first().copied() else { continue };
                same &= self.place(write, attended)?.1 == self.place(write, written)?.1;
            }
            let mut all = [Described::default(); 3];
            for (id, slot) in [*q, *k, *v].into_iter().zip(&mut all) {
                *slot = self.described(group.attention, id)?;
            }
            let [mut q, k, v] = all;
            // Where the plan has it, and how, does not matter.
            (q.address, q.strides) = (0, [0, 0, 0, 4]);
            let heads = q.dims[1] as u64;
            let few = heads <= 2 * u64::from(self.shared.context.multiprocessors);
            let sizes = [query, key, value];
            if !same || !few || half_rows(&q, &k, &v, false).is_none() || scratch::together(sizes) > bytes {
                continue;
            }
            let mut at = base;
            for (row, size) in [group.query, group.key, group.value].into_iter().zip(sizes) {
                self.moved.insert(self.graph[row].storage(), at);
                at += scratch::aligned(size) as u64;
            }
            group.taken.into_iter().for_each(|node| self.fuse(node));
            self.fresh.insert(group.attention, group);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{AttentionOptions, GraphBuilder, Pairing, Value, Weight};

    use super::*;

    fn heads(rows: Value<'_>, d: usize) -> Value<'_> {
        rows.reshape([16, 2, d]).permute([1, 0, 2])
    }

    /// How many groups are found in two layers of attention.
    fn found(tokens: usize, d: usize, cache: DType, change: impl Fn(&GraphBuilder, Value<'_>)) -> usize {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [tokens, 64]);
        let (positions, slots) =
            (g.input("positions", DType::I32, [tokens]), g.input("slots", DType::I32, [tokens]));
        let spans = g.input("spans", DType::I32, [tokens, 2]);
        let mut y = x;
        for layer in 0..2 {
            let product = |name: &str, heads: usize| {
                g.weight(&format!("{name}.{layer}"), Weight::new(DType::Q4_0, [heads * d, 64])).mul_mat(y)
            };
            let (q, k, v) = (product("q", 4), product("k", 2), product("v", 2));
            let bias = g.weight(&format!("bias.{layer}"), Weight::new(DType::F32, [4 * d]));
            let q = q.add(bias).reshape([tokens, 4, d]);
            let k = k.reshape([tokens, 2, d]);
            let rope = Rope::new(d, Pairing::Half, 1e4);
            let (q, k) = (q.rope(rope, positions, None), k.rope(rope, positions, None));
            let state = |name: &str| g.state(&format!("{name}.{layer}"), cache, [32, 2 * d]).slice(0, 0, 16);
            let keys = state("keys").set_rows(k.reshape([tokens, 2 * d]), slots);
            let values = state("values").set_rows(v, slots);
            let out = q.permute([1, 0, 2]).attention(
                heads(keys, d),
                heads(values, d),
                AttentionOptions::new().spans(spans).scale(0.1),
            );
            if layer == 1 {
                change(&g, v);
            }
            let down = g.weight(&format!("o.{layer}"), Weight::new(DType::Q4_0, [64, 4 * d]));
            y = down.mul_mat(out.reshape([tokens, 4 * d])).add(y);
        }
        g.output("y", y);
        let graph = g.finish().unwrap();
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        let kept: Vec<TensorId> = graph.outputs().iter().map(|(_, id)| graph[*id].storage()).collect();
        let reads = |storage: TensorId| {
            let computing = nodes.iter().filter(|n| !graph[**n].op().is_view());
            computing.flat_map(|n| graph.inputs(*n)).filter(|id| graph[**id].storage() == storage).count()
        };
        let kept = |id: TensorId| kept.contains(&graph[id].storage());
        Search { graph: &graph, nodes: &nodes, kept: &kept, readers: &reads }.groups().len()
    }

    #[test]
    fn one_token_over_a_half_precision_cache_is_found_in_every_layer() {
        assert_eq!(found(1, 64, DType::F16, |_, _| {}), 2);
        assert_eq!(found(1, 128, DType::F16, |_, _| {}), 2);
    }

    #[test]
    fn what_the_kernel_does_not_do_is_left_alone() {
        assert_eq!(found(2, 64, DType::F16, |_, _| {}), 0, "two tokens");
        assert_eq!(found(1, 96, DType::F16, |_, _| {}), 0, "another length of heads");
        assert_eq!(found(1, 64, DType::F32, |_, _| {}), 0, "another type of cache");
        assert_eq!(found(1, 64, DType::F16, |g, v| g.output("v", v)), 1, "a row that is wanted elsewhere");
        let read = |g: &GraphBuilder, v: Value<'_>| g.output("w", v.sqr());
        assert_eq!(found(1, 64, DType::F16, read), 1, "a row that is read elsewhere");
    }
}
