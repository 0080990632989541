//! Random graphs and requests: views of views, in-place chains, values read often or never, writes, several backends.

#![allow(dead_code, reason = "each test uses a part of it")]

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Graph, GraphBuilder, TensorId, Value, Weight};
use quadriga_runtime::memory::packing::Effort;
use quadriga_runtime::memory::{BackendMemory, Extra, Hold, InputPolicy, Lifetime, MemoryRequest};

/// A value, and the number of its storage.
type Known<'g> = (Value<'g>, usize);

/// A small graph of F32 tensors.
pub(crate) fn graph(rng: &mut Rng) -> Graph {
    let g = GraphBuilder::new();
    let mut values: Vec<Known<'_>> = Vec::new();
    let mut storages = 0;
    let shapes = [[2, 4], [4, 2], [1, 8], [3, 4]];
    for i in 0..rng.range(1, 4) {
        let shape = *rng.pick(&shapes).unwrap();
        let name = format!("leaf{i}");
        let leaf = match rng.below(6) {
            0 => g.weight(&name, Weight::new(DType::F32, shape)),
            1 => g.state(&name, DType::F32, shape),
            _ => g.input(&name, DType::F32, shape),
        };
        values.push((leaf, storages));
        storages += 1;
    }
    let mut writable: Vec<usize> = Vec::new();
    for _ in 0..rng.range(1, 16) {
        let near = if rng.chance(0.6) { values.len().min(2) } else { values.len() };
        let (x, storage) = values[values.len() - 1 - rng.below(near)];
        let contiguous = x.strides()[3] == 4 && x.strides()[2] == 4 * x.shape().cols();
        let mut add = |value: Value<'_>, shares: bool| {
            let key = if shares { storage } else { storages };
            if !shares {
                writable.push(storages);
                storages += 1;
            }
            (value.id(), key)
        };
        let made = match rng.below(14) {
            0 => (x.scale(2.0), false),
            1 => (x.silu(), false),
            2 => (x.rms_norm(1e-5), false),
            3 if contiguous => (x.reshape([x.shape().elements()]).reshape([1, x.shape().elements()]), true),
            4 => (x.slice(0, 0, 1), true),
            5 => (x.slice(0, rng.below(x.shape().dims4()[2]), 1), true),
            6 => (x.transpose(), true),
            7 => (x.pad([0, 1]), false),
            8 => (x.cont(), false),
            9 if contiguous => (x.reshape(x.shape()), true),
            10 | 11 => {
                let fitting: Vec<_> =
                    values.iter().filter(|(y, _)| y.shape().dims4() == x.shape().dims4()).collect();
                let (y, _) = **rng.pick(&fitting).unwrap();
                (if rng.chance(0.5) { x.add(y) } else { y.swiglu(x) }, false)
            }
            12 => {
                // A write invalidates all other values in the target's storage.
                let others: Vec<_> = values
                    .iter()
                    .filter(|(t, s)| {
                        *s != storage && writable.contains(s) && t.shape().elements() == x.shape().elements()
                    })
                    .copied()
                    .collect();
                let Some((target, written)) = rng.pick(&others).copied() else { continue };
                values.retain(|(_, s)| *s != written);
                values.push((x.copy_into(target), written));
                continue;
            }
            _ => (x.mean(), false),
        };
        let (_, key) = add(made.0, made.1);
        values.push((made.0, key));
    }
    for (i, (value, _)) in values.iter().enumerate() {
        if i + 1 == values.len() || rng.chance(0.1) {
            g.output(&format!("out{i}"), *value);
        }
    }
    g.finish().unwrap()
}

/// The lists that a request borrows.
#[derive(Debug)]
pub(crate) struct Lists {
    pub(crate) memories: Vec<(usize, Option<usize>)>,
    pub(crate) backends: Vec<u16>,
    pub(crate) steps: Vec<u32>,
    pub(crate) holds: Vec<Hold>,
    pub(crate) extras: Vec<Extra>,
    pub(crate) external: Vec<TensorId>,
    pub(crate) inputs: InputPolicy,
    pub(crate) effort: Effort,
}

pub(crate) fn lists(rng: &mut Rng, graph: &Graph) -> Lists {
    let count = rng.range(1, 3);
    let memory = |rng: &mut Rng| (4 << rng.below(4), rng.chance(0.3).then(|| 32 << rng.below(4)));
    let memories = (0..count).map(|_| memory(rng)).collect();
    let mut backends: Vec<u16> = graph.tensors().iter().map(|_| rng.below(count) as u16).collect();
    // A node that writes into a tensor runs on that tensor's backend.
    for node in graph.nodes().iter().filter(|node| node.op().is_write()) {
        let output = node.output();
        backends[output.index()] = backends[graph[output].storage().index()];
    }
    let width = if rng.chance(0.3) { rng.range(1, 4) } else { 0 };
    let steps = match width {
        0 => Vec::new(),
        width => (0..graph.nodes().len()).map(|node| (node / width) as u32).collect(),
    };
    let tensor = |rng: &mut Rng| TensorId::from_index(rng.below(graph.tensors().len()));
    let until = |rng: &mut Rng| rng.below(graph.nodes().len() + 2) as u32;
    let few = |rng: &mut Rng| if rng.chance(0.3) { rng.range(1, 3) } else { 0 };
    let holds = (0..few(rng)).map(|_| Hold { tensor: tensor(rng), until: until(rng) }).collect();
    let extras = (0..few(rng)).map(|_| {
        let start = until(rng);
        let end = if rng.chance(0.2) { u32::MAX } else { start + 1 + until(rng) };
        let lifetime = Lifetime { start, end };
        Extra { backend: rng.below(count) as u16, bytes: rng.below(100) as u64, lifetime }
    });
    let extras = extras.collect();
    let external = (0..few(rng) / 2).map(|_| tensor(rng)).collect();
    let inputs = if rng.chance(0.5) { InputPolicy::Keep } else { InputPolicy::Release };
    Lists { memories, backends, steps, holds, extras, external, inputs, effort: Effort::Fast }
}

impl Lists {
    pub(crate) fn memories(&self) -> Vec<BackendMemory<'static>> {
        let names = ["a", "b", "c", "d"];
        let with_names = self.memories.iter().zip(names);
        with_names.map(|((alignment, max), name)| BackendMemory::measuring(name, *alignment, *max)).collect()
    }

    pub(crate) fn request<'a>(
        &'a self,
        graph: &'a Graph,
        memories: &'a [BackendMemory<'a>],
    ) -> MemoryRequest<'a> {
        MemoryRequest {
            backends: &self.backends,
            steps: &self.steps,
            holds: &self.holds,
            extras: &self.extras,
            external: &self.external,
            inputs: self.inputs,
            effort: self.effort,
            ..MemoryRequest::new(graph, memories)
        }
    }
}
