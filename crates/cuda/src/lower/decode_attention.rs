//! Decode attention with fused RoPE and KV-cache write: finds the nodes that one launch can compute. It applies RoPE to
//! query and key of the current token, after an RMS norm of their heads where the model has one, writes key and value to
//! the cache, and attends, so that one kernel stands between the GEMVs that compute the three rows and the GEMV of the
//! output.

use quadriga_graph::{Attention, Binary, DType, Graph, NodeId, Op, Rope, TensorId, TensorKind};

/// The RMS norm of each head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadNorm {
    /// The weight by which a normalised head is multiplied.
    pub(super) weight: TensorId,
    pub(super) eps: f32,
}

/// Nodes that become one launch.
#[derive(Clone, Debug)]
pub(super) struct DecodeAttention {
    pub(super) rope: Rope,
    pub(super) factors: Option<TensorId>,
    pub(super) positions: TensorId,
    pub(super) ids: TensorId,
    /// The rows as the GEMVs write them.
    pub(super) query: TensorId,
    pub(super) key: TensorId,
    pub(super) value: TensorId,
    /// Norms ahead of RoPE.
    pub(super) query_norm: Option<HeadNorm>,
    pub(super) key_norm: Option<HeadNorm>,
    pub(super) write_keys: NodeId,
    pub(super) write_values: NodeId,
    pub(super) attention: NodeId,
    /// All nodes but attention.
    pub(super) fused: Vec<NodeId>,
}

/// The most nodes of a launch: norm, multiplication and RoPE of query and key, two cache writes, attention.
const MAX_NODES: usize = 9;

/// The split in which decode attention is searched.
pub(super) struct DecodeAttentionSearch<'a> {
    pub(super) graph: &'a Graph,
    pub(super) nodes: &'a [NodeId],
    /// Whether a result is kept after the split.
    pub(super) kept: &'a dyn Fn(TensorId) -> bool,
    /// How many nodes read a storage.
    pub(super) readers: &'a dyn Fn(TensorId) -> usize,
}

impl DecodeAttentionSearch<'_> {
    /// All matches, in order. Matches share scratch memory for their rows: no row of one is computed between the first
    /// row of another and its attention.
    pub(super) fn matches(&self) -> Vec<DecodeAttention> {
        let computing: Vec<(usize, NodeId)> =
            self.nodes.iter().copied().enumerate().filter(|(_, n)| !self.graph[*n].op().is_view()).collect();
        let mut found: Vec<DecodeAttention> = Vec::new();
        let mut end = None;
        for (index, (at, _)) in computing.iter().enumerate() {
            let nodes: Vec<NodeId> = computing
                .get((index + 1).saturating_sub(MAX_NODES)..=index)
                .unwrap_or_default()
                .iter()
                .map(|(_, node)| *node)
                .collect();
            let Some(one) = self.matches_nodes(&nodes) else { continue };
            let starts = [one.query, one.key, one.value].map(|row| self.producer(row));
            let Some(start) = starts.into_iter().min().flatten() else { continue };
            if end.is_none_or(|end| start > end) {
                end = Some(*at);
                found.push(one);
            }
        }
        found
    }

    /// The position of the node that produces a tensor's storage.
    fn producer(&self, id: TensorId) -> Option<usize> {
        let node = self.graph[self.graph[id].storage()].node()?;
        self.nodes.iter().position(|n| *n == node)
    }

    /// The launch of the last of these nodes, with nodes directly before it.
    fn matches_nodes(&self, nodes: &[NodeId]) -> Option<DecodeAttention> {
        let graph = self.graph;
        let (before, last) = nodes.split_last_chunk::<4>()?;
        let [rope_key, write_keys, write_values, attention] = *last;
        let is_rope = |node: &&NodeId| matches!(graph[**node].op(), Op::Rope { .. });
        let rope_query = *before.iter().rev().find(is_rope)?;
        let (Op::Rope { rope, .. }, Op::Attention(parameters)) =
            (graph[rope_query].op(), graph[attention].op())
        else {
            return None;
        };
        let alike = graph[rope_key].op() == graph[rope_query].op()
            && graph.inputs(rope_key).get(1..) == graph.inputs(rope_query).get(1..);
        let writes = [write_keys, write_values].iter().all(|n| matches!(graph[*n].op(), Op::SetRows));
        let (query, positions) = (*graph.inputs(rope_query).first()?, *graph.inputs(rope_query).get(1)?);
        let factors = graph.inputs(rope_query).get(2).copied();
        let key = *graph.inputs(rope_key).first()?;
        let mut fused = vec![rope_query, rope_key, write_keys, write_values];
        let (query, query_norm) = self.normed(query, before, &mut fused);
        let (key, key_norm) = self.normed(key, before, &mut fused);
        // Nothing else comes between them.
        let first = before.iter().position(|node| fused.contains(node))?;
        if before.iter().skip(first).any(|node| !fused.contains(node)) {
            return None;
        }
        let [key_cache, rotated_key, ids] = *graph.inputs(write_keys) else { return None };
        let [value_cache, value, other_ids] = *graph.inputs(write_values) else { return None };
        let (q, k, v, spans) = attention_inputs(graph, attention, parameters)?;
        let [_, heads, _, d] = graph[q].dims4();
        let [_, groups, rows, _] = graph[k].dims4();
        let is_of = |id: TensorId, node: NodeId| graph[id].storage() == graph[node].output();
        // Nothing else reads the rotated rows.
        let read_once = |node: NodeId| {
            let output = graph[node].output();
            (self.readers)(output) == 1 && !(self.kept)(output)
        };
        // A row is computed in this split, and nothing else reads it. It is moved to scratch memory of its own size, so it
        // must be all that its storage has.
        let row = |id: TensorId, elements: usize| {
            let (tensor, storage) = (&graph[id], graph[id].storage());
            tensor.dtype() == DType::F32
                && tensor.is_contiguous()
                && tensor.elements() == elements
                && graph[storage].elements() == elements
                && matches!(graph[storage].kind(), TensorKind::Computed(_))
                && (self.readers)(storage) == 1
                && !(self.kept)(id)
        };
        // The kernel reads these before the previous kernel is complete.
        let is_input = |id: TensorId, elements: usize| {
            graph[graph[id].storage()].kind() == TensorKind::Input && graph[id].elements() == elements
        };
        let fixed = factors.is_none_or(|factors| {
            matches!(graph[graph[factors].storage()].kind(), TensorKind::Weight | TensorKind::Constant)
        });
        // The rows that are written are rows of the cache that attention reads, all contiguous.
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
            && is_of(q, rope_query)
            && is_of(rotated_key, rope_key)
            && graph[rotated_key].is_contiguous()
            && read_once(rope_query)
            && read_once(rope_key)
            && graph[q].dims4() == [1, heads, 1, d]
            && [64, 128, 256].contains(&d)
            && groups > 0
            && heads.is_multiple_of(groups)
            && rope.dims <= d
            && row(query, heads * d)
            && row(key, groups * d)
            && row(value, groups * d)
            && is_input(positions, 1)
            && is_input(ids, 1)
            && spans.is_none_or(|spans| is_input(spans, 2))
            && cache(k, key_cache)
            && cache(v, value_cache)
            && graph[k].storage() != graph[v].storage()
            && self.is_written_once(graph[k].storage(), write_keys)
            && self.is_written_once(graph[v].storage(), write_values);
        fits.then_some(DecodeAttention {
            rope: *rope,
            factors,
            positions,
            ids,
            query,
            key,
            value,
            query_norm,
            key_norm,
            write_keys,
            write_values,
            attention,
            fused,
        })
    }

    /// The heads that `row` normalises by two of these nodes, which nothing else reads, and the norm; or `row` itself.
    fn normed(
        &self,
        row: TensorId,
        nodes: &[NodeId],
        fused: &mut Vec<NodeId>,
    ) -> (TensorId, Option<HeadNorm>) {
        let graph = self.graph;
        let producer = |id: TensorId| graph[graph[id].storage()].node().filter(|node| nodes.contains(node));
        let read_once = |node: NodeId| {
            let output = graph[node].output();
            (self.readers)(output) == 1 && !(self.kept)(output)
        };
        let d = graph[row].shape().cols();
        let find = || {
            let times = producer(row).filter(|node| graph[*node].output() == row)?;
            let (Op::Binary(Binary::Mul), [a, weight]) = (graph[times].op(), graph.inputs(times)) else {
                return None;
            };
            let norm = producer(*a).filter(|node| graph[*node].output() == *a)?;
            let (Op::RmsNorm { eps }, [x]) = (graph[norm].op(), graph.inputs(norm)) else { return None };
            let vector = &graph[*weight];
            // The kernel reads it before the previous kernel is complete.
            let fits = matches!(graph[vector.storage()].kind(), TensorKind::Weight | TensorKind::Constant)
                && vector.dtype() == DType::F32
                && vector.dims4() == [1, 1, 1, d]
                && vector.is_contiguous()
                && graph[*x].is_contiguous()
                && graph[*x].shape().cols() == d
                && read_once(norm)
                && read_once(times);
            fits.then_some((*x, HeadNorm { weight: *weight, eps: *eps }, [norm, times]))
        };
        match find() {
            Some((x, norm, nodes)) => {
                fused.extend(nodes);
                (x, Some(norm))
            }
            None => (row, None),
        }
    }

    /// Whether no other node of the split writes a storage.
    fn is_written_once(&self, storage: TensorId, by: NodeId) -> bool {
        let target = |node: NodeId| self.graph.inputs(node).first().map(|id| self.graph[*id].storage());
        let mut writers = self.nodes.iter().filter(|n| self.graph[**n].op().is_write());
        writers.all(|n| *n == by || target(*n) != Some(storage))
    }
}

/// Queries, keys, values and spans of attention; `None` if it has a mask.
fn attention_inputs(
    graph: &Graph,
    node: NodeId,
    parameters: &Attention,
) -> Option<(TensorId, TensorId, TensorId, Option<TensorId>)> {
    let [q, k, v] =
        *graph.inputs(node).first_chunk::<3>().filter(|_| !parameters.mask && !parameters.pages)?;
    Some((q, k, v, graph.inputs(node).get(3).copied().filter(|_| parameters.spans)))
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{AttentionOptions, GraphBuilder, Pairing, Value, Weight};

    use super::*;

    fn heads(rows: Value<'_>, d: usize) -> Value<'_> {
        rows.reshape([16, 2, d]).permute([1, 0, 2])
    }

    /// How many matches there are in two layers of attention.
    fn found(tokens: usize, d: usize, cache: DType, change: impl Fn(&GraphBuilder, Value<'_>)) -> usize {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [tokens, 64]);
        let (positions, slots) =
            (g.input("positions", DType::I32, [tokens]), g.input("slots", DType::I32, [tokens]));
        let spans = g.input("spans", DType::I32, [tokens, 2]);
        let mut y = x;
        for layer in 0..2 {
            let gemv = |name: &str, heads: usize| {
                g.weight(&format!("{name}.{layer}"), Weight::new(DType::Q4_0, [heads * d, 64])).mul_mat(y)
            };
            let (q, k, v) = (gemv("q", 4), gemv("k", 2), gemv("v", 2));
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
        let search = DecodeAttentionSearch { graph: &graph, nodes: &nodes, kept: &kept, readers: &reads };
        search.matches().len()
    }

    #[test]
    fn one_token_over_an_f16_cache_matches_in_every_layer() {
        assert_eq!(found(1, 64, DType::F16, |_, _| {}), 2);
        assert_eq!(found(1, 128, DType::F16, |_, _| {}), 2);
    }

    #[test]
    fn splits_that_the_kernel_cannot_compute_do_not_match() {
        assert_eq!(found(2, 64, DType::F16, |_, _| {}), 0, "two tokens");
        assert_eq!(found(1, 96, DType::F16, |_, _| {}), 0, "unsupported head size");
        assert_eq!(found(1, 64, DType::F32, |_, _| {}), 0, "unsupported cache type");
        assert_eq!(found(1, 64, DType::F16, |g, v| g.output("v", v)), 1, "a row that is an output");
        let read = |g: &GraphBuilder, v: Value<'_>| g.output("w", v.sqr());
        assert_eq!(found(1, 64, DType::F16, read), 1, "a row with a second reader");
    }

    /// One layer of attention over a cache, with one thing changed.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Change {
        Nothing,
        OtherRope,
        OtherPositions,
        OtherSlots,
        ComputedPositions,
        ComputedSlots,
        ComputedSpans,
        ComputedFactors,
        KeptQuery,
        KeptKey,
        OneCache,
        WrittenTwice,
        PartialRope,
        StridedQuery,
        QueryFromInput,
        HalfQuery,
        OtherView,
        Norms,
        NormsAheadOfRopes,
        KeptNorm,
        ComputedNormWeight,
        NodeBetween,
    }

    /// The norm of each head, if there is a weight for it.
    fn norm<'g>(heads: Value<'g>, weight: Option<Value<'g>>) -> Value<'g> {
        weight.map_or(heads, |weight| heads.rms_norm(1e-6).mul(weight))
    }

    /// Whether it matches.
    fn matches_with(change: Change) -> bool {
        use Change::*;
        let is = |other: Change| change == other;
        let d = 64;
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [1, 64]);
        let input = |name: &str, len: usize| g.input(name, DType::I32, [len]);
        let (positions, slots) = (input("positions", 1), input("slots", 1));
        let positions = if is(ComputedPositions) { positions.cont() } else { positions };
        let slots = if is(ComputedSlots) { slots.cont() } else { slots };
        let spans = g.input("spans", DType::I32, [1, 2]);
        let spans = if is(ComputedSpans) { spans.cont() } else { spans };
        let gemv = |name: &str, rows: usize| g.weight(name, Weight::new(DType::Q4_0, [rows, 64])).mul_mat(x);
        let query_rows = if is(QueryFromInput) {
            g.input("query", DType::F32, [1, 4 * d])
        } else if is(HalfQuery) {
            gemv("q", 8 * d).slice(1, 0, 4 * d)
        } else {
            gemv("q", 4 * d)
        };
        let q = query_rows.reshape([1, 4, d]);
        let k = gemv("k", 2 * d).reshape([1, 2, d]);
        let v = gemv("v", 2 * d);
        let rope = Rope::new(if is(PartialRope) { 32 } else { d }, Pairing::Half, 1e4);
        let key_rope = if is(OtherRope) { Rope { base: 1e5, ..rope } } else { rope };
        let key_positions = if is(OtherPositions) { input("others", 1) } else { positions };
        let factors = is(ComputedFactors).then(|| g.input("factors", DType::F32, [32]).sqr());
        let weight = || match is(ComputedNormWeight) {
            true => g.input("norm", DType::F32, [d]).sqr(),
            false => g.weight("norm", Weight::new(DType::F32, [d])),
        };
        let has_norms =
            [Norms, NormsAheadOfRopes, KeptNorm, ComputedNormWeight, NodeBetween].contains(&change);
        let scale = has_norms.then(weight);
        let (q, k) = if is(NormsAheadOfRopes) {
            let (q, k) = (norm(q, scale), norm(k, scale));
            (q.rope(rope, positions, factors), k.rope(key_rope, key_positions, factors))
        } else {
            let normed = norm(q, scale);
            if is(KeptNorm) {
                g.output("normed", normed);
            }
            let q = normed.rope(rope, positions, factors);
            if is(NodeBetween) {
                g.output("between", x.sqr());
            }
            (q, norm(k, scale).rope(key_rope, key_positions, factors))
        };
        let state = |name: &str| g.state(name, DType::F16, [16, 2 * d]);
        let keys = state("keys");
        let written_keys = keys.set_rows(k.reshape([1, 2 * d]), slots);
        let value_slots = if is(OtherSlots) { input("other slots", 1) } else { slots };
        let values = if is(OneCache) { written_keys } else { state("values") };
        let written_values = values.set_rows(v, value_slots);
        let written_keys = if is(OneCache) { written_values } else { written_keys };
        let queries = q.permute([1, 0, 2]);
        let queries = if is(StridedQuery) { queries.cont() } else { queries };
        let attended = if is(OtherView) {
            written_keys.reshape([32, d]).view([2, 16, d], [0, 16 * d * 2, d * 2, 2], 0)
        } else {
            heads(written_keys, d)
        };
        let out = queries.attention(
            attended,
            heads(written_values, d),
            AttentionOptions::new().spans(spans).scale(0.1),
        );
        g.output("y", out);
        if is(KeptQuery) {
            g.output("q", q);
        }
        if is(KeptKey) {
            g.output("k", k);
        }
        if is(WrittenTwice) {
            g.output("again", written_keys.set_rows(v, slots));
        }
        let graph = g.finish().unwrap();
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        let kept: Vec<TensorId> = graph.outputs().iter().map(|(_, id)| graph[*id].storage()).collect();
        let reads = |storage: TensorId| {
            let computing = nodes.iter().filter(|n| !graph[**n].op().is_view());
            computing.flat_map(|n| graph.inputs(*n)).filter(|id| graph[**id].storage() == storage).count()
        };
        let kept = |id: TensorId| kept.contains(&graph[id].storage());
        let search = DecodeAttentionSearch { graph: &graph, nodes: &nodes, kept: &kept, readers: &reads };
        !search.matches().is_empty()
    }

    #[test]
    fn every_condition_of_a_match_is_needed() {
        use Change::*;
        assert!(matches_with(Nothing));
        assert!(matches_with(PartialRope), "fewer rotated elements than a head has");
        assert!(matches_with(Norms), "norms of query and key");
        assert!(matches_with(NormsAheadOfRopes), "norms in another order");
        for change in [
            OtherRope,
            OtherPositions,
            OtherSlots,
            ComputedPositions,
            ComputedSlots,
            ComputedSpans,
            ComputedFactors,
            KeptQuery,
            KeptKey,
            OneCache,
            WrittenTwice,
            StridedQuery,
            QueryFromInput,
            HalfQuery,
            OtherView,
            NodeBetween,
        ] {
            assert!(!matches_with(change), "{change:?}");
        }
        // The norm is left to a kernel of its own where it cannot be part of the match; nodes then come between.
        for change in [KeptNorm, ComputedNormWeight] {
            assert!(!matches_with(change), "{change:?}");
        }
    }
}
