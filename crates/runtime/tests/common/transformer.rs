//! Llama-shaped graphs of any size, for tests and benchmarks of planning.
#![allow(dead_code, reason = "each test or benchmark uses a part of it")]

use quadriga_graph::{AttentionOptions, DType, Graph, GraphBuilder, Pairing, Rope, Weight};

/// The sizes of a model and of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) layers: usize,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) feed_forward: usize,
    pub(crate) vocabulary: usize,
    pub(crate) tokens: usize,
    pub(crate) context: usize,
    /// Rows of logits.
    pub(crate) rows: usize,
}

pub(crate) const LLAMA_7B: Sizes = Sizes {
    layers: 32,
    width: 4096,
    heads: 32,
    kv_heads: 32,
    feed_forward: 11008,
    vocabulary: 32000,
    tokens: 512,
    context: 4096,
    rows: 1,
};

pub(crate) const SMOL_135M: Sizes = Sizes {
    layers: 30,
    width: 576,
    heads: 9,
    kv_heads: 3,
    feed_forward: 1536,
    vocabulary: 49152,
    ..LLAMA_7B
};

/// As many layers, of 27 nodes each, as it takes to have at least this many nodes.
fn layers(nodes: usize) -> usize {
    nodes.saturating_sub(6).div_ceil(27).max(1)
}

/// A graph of at least this many nodes, with a width of 256.
pub(crate) fn of_nodes(nodes: usize) -> Graph {
    transformer(Sizes {
        layers: layers(nodes),
        width: 256,
        heads: 4,
        kv_heads: 4,
        feed_forward: 512,
        vocabulary: 512,
        tokens: 32,
        context: 128,
        rows: 1,
    })
}

/// A graph of at least this many nodes whose weights and caches take about 7 kB a layer.
pub(crate) fn of_nodes_small(nodes: usize) -> Graph {
    transformer(Sizes {
        layers: layers(nodes),
        width: 16,
        heads: 2,
        kv_heads: 2,
        feed_forward: 32,
        vocabulary: 32,
        tokens: 2,
        context: 16,
        rows: 1,
    })
}

/// Token ids in, logits of the chosen rows out: attention over a cache kept as state, gated feed-forward.
pub(crate) fn transformer(s: Sizes) -> Graph {
    let head = s.width / s.heads;
    let g = GraphBuilder::new();
    let f32s = |name: &str, n: usize| g.weight(name, Weight::new(DType::F32, [n]));
    let matrix = |name: &str, n: usize, k: usize| g.weight(name, Weight::new(DType::F16, [n, k]));
    let ids = g.input("tokens", DType::I32, [s.tokens]);
    let positions = g.input("positions", DType::I32, [s.tokens]);
    let slots = g.input("slots", DType::I32, [1, 1, s.tokens]);
    let mask = g.input("mask", DType::F16, [1, 1, s.tokens, s.context]);
    let rows = g.input("rows", DType::I32, [s.rows]);
    let rope = Rope::new(head, Pairing::Adjacent, 1e4);
    let mut x = matrix("embedding", s.vocabulary, s.width).get_rows(ids);
    for layer in 0..s.layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let scope = g.scope(&format!("blk.{layer}"));
        let normed = x.rms_norm(1e-5).mul(f32s(&name("norm"), s.width));
        let kv = s.kv_heads * head;
        let project = |part: &str, n: usize| scope.mul_mat(matrix(&name(part), n, s.width), normed);
        let q = project("q", s.width).reshape([s.tokens, s.heads, head]).rope(rope, positions, None);
        let k = project("k", kv).reshape([s.tokens, s.kv_heads, head]).rope(rope, positions, None);
        let v = project("v", kv);
        let keys = g.state(&name("keys"), DType::F16, [1, 1, s.context, kv]);
        let values = g.state(&name("values"), DType::F16, [1, 1, s.context, kv]);
        let keys = keys.set_rows(k.reshape([1, 1, s.tokens, kv]), slots);
        let values = values.set_rows(v.reshape([1, 1, s.tokens, kv]), slots);
        // [n, of · head] seen as [1, of, n, head].
        let heads = |of: usize, n: usize, width: usize| {
            [of * n * head * width, head * width, of * head * width, width]
        };
        let keys = keys.view([1, s.kv_heads, s.context, head], heads(s.kv_heads, s.context, 2), 0);
        let values = values.view([1, s.kv_heads, s.context, head], heads(s.kv_heads, s.context, 2), 0);
        let q = q.view([1, s.heads, s.tokens, head], heads(s.heads, s.tokens, 4), 0);
        let attended = q.attention(keys, values, AttentionOptions::new().mask(mask).scale(0.125));
        let mut attended =
            scope.mul_mat(matrix(&name("o"), s.width, s.width), attended.reshape([s.tokens, s.width]));
        if layer + 1 == s.layers {
            attended = attended.get_rows(rows);
            x = x.get_rows(rows);
        }
        let middle = attended.add(x);
        let normed = middle.rms_norm(1e-5).mul(f32s(&name("ffn_norm"), s.width));
        let gate = scope.mul_mat(matrix(&name("gate"), s.feed_forward, s.width), normed);
        let up = scope.mul_mat(matrix(&name("up"), s.feed_forward, s.width), normed);
        let down = scope.mul_mat(matrix(&name("down"), s.width, s.feed_forward), gate.swiglu(up));
        x = down.add(middle);
    }
    let normed = x.rms_norm(1e-5).mul(f32s("norm", s.width));
    g.output("logits", g.mul_mat(matrix("head", s.vocabulary, s.width), normed));
    g.finish().expect("a graph")
}
