//! Estimates of work, lifetimes, and the texts of errors that have several forms.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{
    AttentionOptions, CustomFunction, DType, DeltaRuleInputs, Gate, GatedDeltaRule, GraphBuilder, Order,
    Pairing, Pooling, Ranks, Rope, SelectExperts, TensorId, Value, Weight, Window,
};
use quadriga_runtime::memory::Lifetime;
use quadriga_runtime::{
    BackendError, Cost, DeviceKind, OverBudget, Rates, ReadCurve, ReadPoint, RuntimeError,
};

/// The cost of the last node of a graph.
fn cost(build: impl for<'g> FnOnce(&'g GraphBuilder) -> Value<'g>) -> (u64, u64) {
    let g = GraphBuilder::new();
    let y = build(&g);
    let y = y.id();
    let graph = g.finish().unwrap();
    let Cost { operations, traffic, .. } = Cost::of(&graph, graph[y].node().unwrap());
    (operations, traffic)
}

/// An input of 32-bit floats.
fn f32s<'g, const N: usize>(g: &'g GraphBuilder, name: &str, dims: [usize; N]) -> Value<'g>
where
    quadriga_graph::Shape: From<[usize; N]>,
{
    g.input(name, DType::F32, dims)
}

#[test]
fn matmuls_count_multiplications_additions_and_weights_in_their_own_type() {
    // 5 · 3 results of 64 products each; a Q8_0 block of 32 elements has 34 bytes.
    let matmul = cost(|g| g.weight("w", Weight::new(DType::Q8_0, [3, 64])).mul_mat(f32s(g, "x", [5, 64])));
    assert_eq!(matmul, (5 * 3 * 2 * 64, 3 * 2 * 34 + 5 * 64 * 4 + 5 * 3 * 4));
    let outer = cost(|g| f32s(g, "a", [7, 4]).out_prod(f32s(g, "b", [7, 5])));
    assert_eq!(outer, (5 * 4 * 2 * 7, 4 * (7 * 4 + 7 * 5 + 5 * 4)));
    // Of six experts, at most the two that are named are read.
    let experts = |used: usize| {
        cost(|g| {
            let ids = g.input("ids", DType::I32, [1, used]);
            g.weight("w", Weight::new(DType::F32, [6, 3, 8])).mul_mat_id(f32s(g, "x", [1, used, 8]), ids)
        })
    };
    assert_eq!(experts(2), (2 * 3 * 2 * 8, 4 * (2 * 3 * 8 + 2 * 8 + 2 + 2 * 3)));
    assert_eq!(experts(9), (9 * 3 * 2 * 8, 4 * (6 * 3 * 8 + 9 * 8 + 9 + 9 * 3)));
}

#[test]
fn sparse_matmuls_count_all_rows_and_sums_of_experts_every_element() {
    // Three tokens, five neurons, eight columns.
    let sparse = cost(|g| {
        let (x, gates) = (f32s(g, "x", [3, 8]), f32s(g, "gates", [3, 5]));
        g.weight("w", Weight::new(DType::F32, [5, 8])).mul_mat_sparse(x, gates, None)
    });
    assert_eq!(sparse, (3 * 5 * 2 * 8, 4 * (5 * 8 + 3 * 8 + 3 * 5 + 3 * 5)));
    let sums =
        cost(|g| g.weight("w", Weight::new(DType::F32, [5, 8])).axpy_sparse(f32s(g, "factors", [3, 5])));
    assert_eq!(sums, (3 * 8 * 2 * 5, 4 * (5 * 8 + 3 * 5 + 3 * 8)));
    // Two experts for each of three tokens, multiplied and added.
    let experts = cost(|g| f32s(g, "x", [3, 2, 8]).sum_experts(f32s(g, "weights", [3, 2])));
    assert_eq!(experts.0, 3 * 2 * 8 * 2);
}

#[test]
fn attention_counts_scores_and_weighted_values() {
    // Six heads of five queries over seven keys of eight elements, values of four.
    let attention = cost(|g| {
        let (q, k) = (f32s(g, "q", [6, 5, 8]), g.input("k", DType::F16, [3, 7, 8]));
        q.attention(k, g.input("v", DType::F16, [3, 7, 4]), AttentionOptions::new())
    });
    let traffic = 4 * 6 * 5 * 8 + 2 * 3 * 7 * 8 + 2 * 3 * 7 * 4 + 4 * 5 * 6 * 4;
    assert_eq!(attention, (6 * 5 * 2 * 7 * (8 + 4), traffic));
}

#[test]
fn attention_through_pages_counts_the_pages_of_the_table() {
    // Five queries of two sequences with three pages each, in pools of any size.
    let of_pool = |slots: usize| {
        cost(move |g| {
            let (q, k) = (f32s(g, "q", [6, 5, 8]), g.input("k", DType::F16, [3, slots, 8]));
            let spans = Some(g.input("spans", DType::I32, [5, 3]));
            let pages = Some(g.input("pages", DType::I32, [2, 3]));
            let options = AttentionOptions { spans, pages, ..AttentionOptions::new() };
            q.attention(k, g.input("v", DType::F16, [3, slots, 4]), options)
        })
    };
    let traffic = |slots: u64| 4 * 6 * 5 * 8 + 2 * 3 * slots * (8 + 4) + 4 * (5 * 3 + 2 * 3) + 4 * 5 * 6 * 4;
    let operations = |slots: u64| 6 * 5 * 2 * slots * (8 + 4);
    for slots in [512, 65_536] {
        assert_eq!(of_pool(slots), (operations(3 * 64), traffic(2 * 3 * 64)));
    }
    assert_eq!(of_pool(128), (operations(128), traffic(128)), "not more than there are");
}

#[test]
fn other_operations_count_per_element() {
    type Build = for<'g> fn(&'g GraphBuilder, Value<'g>) -> Value<'g>;
    // Of an input [3, 8]: operations in all.
    let cases: &[(&str, u64, Build)] = &[
        ("add", 24, |_, x| x.add(x)),
        ("view", 0, |_, x| x.reshape([8, 3])),
        ("norm", 96, |_, x| x.norm(1e-5)),
        ("rms norm", 96, |_, x| x.rms_norm(1e-5)),
        ("softmax", 96, |_, x| x.soft_max(1.0, None, None)),
        ("gated halves", 48, |_, x| x.gated_halves(Gate::Swiglu, false)),
        ("rope", 96, |g, x| {
            let positions = g.input("p", DType::I32, [3]);
            x.reshape([3, 1, 8]).rope(Rope::new(8, Pairing::Half, 1e4), positions, None)
        }),
        ("sum", 24, |_, x| x.sum()),
        ("mean", 24, |_, x| x.mean()),
        ("argmax", 24, |_, x| x.argmax()),
        ("argsort", 24, |_, x| x.argsort(Order::Ascending)),
        ("top k", 24, |_, x| x.top_k(2)),
        ("pool", 3 * 4 * 2 * 2, |_, x| x.pool_1d(Pooling::Max, Window::one_dimensional(2).stride([1, 2]))),
        ("depthwise", 2 * 7 * 4 * 2, |g, x| {
            let kernel = g.weight("k", Weight::new(DType::F32, [1, 1, 2, 2]));
            x.reshape([1, 1, 3, 8]).conv_2d_depthwise(kernel, Window::new([2, 2]))
        }),
        ("transposed", 24 * 2 * 20, |g, x| {
            let kernel = g.weight("k", Weight::new(DType::F32, [3, 5, 2, 2]));
            x.reshape([1, 3, 1, 8]).conv_transpose_2d(kernel, [1, 1])
        }),
        ("cross entropy", 96, |_, x| x.cross_entropy_loss(x)),
        ("select experts", 24, |_, x| x.select_experts(SelectExperts::ungrouped(2))),
        ("convolution of a sequence", 2 * 8 * 2 * 2, |g, x| {
            x.ssm_conv(g.weight("k", Weight::new(DType::F32, [8, 2])))
        }),
        ("convolution with a longer kernel", 8 * 2 * 3, |g, x| {
            x.ssm_conv(g.weight("k", Weight::new(DType::F32, [8, 3])))
        }),
        ("im2col", 0, |_, x| x.reshape([1, 1, 3, 8]).im2col(Window::new([2, 2]), DType::F32)),
        ("get rows", 0, |g, x| x.get_rows(g.input("ids", DType::I32, [2]))),
        ("concat", 0, |_, x| x.concat(0, &[x])),
        ("repeat", 0, |_, x| x.repeat([6, 8])),
        ("pad", 0, |_, x| x.pad([1, 1])),
        ("custom", 24 * 5, |_, x| {
            let rule =
                |inputs: &[&quadriga_graph::Tensor]| Ok((DType::F32, *inputs.first().unwrap().shape()));
            x.custom(&CustomFunction::new("own", rule, |_| Ok(())).operations_per_element(5).build(), &[])
        }),
    ];
    for (name, operations, build) in cases {
        assert_eq!(cost(|g| build(g, f32s(g, "x", [3, 8]))).0, *operations, "{name}");
    }
}

#[test]
fn the_delta_rule_counts_every_element_of_its_state_for_every_token() {
    let g = GraphBuilder::new();
    let [keys, values] = [("k", [5, 2, 3]), ("v", [5, 2, 4])].map(|(name, dims)| f32s(&g, name, dims));
    let [gates, betas] = ["gates", "betas"].map(|name| f32s(&g, name, [5, 2]));
    let inputs = DeltaRuleInputs { keys, values, gates, betas, state: f32s(&g, "s", [2, 3, 4]) };
    let (y, _) = f32s(&g, "q", [5, 2, 3])
        .gated_delta_rule(inputs, GatedDeltaRule { scale: 1.0, tiled: false, delta: true });
    g.output("y", y);
    let graph = g.finish().unwrap();
    let costs = graph.node_ids().map(|node| Cost::of(&graph, node).operations);
    assert_eq!(costs.sum::<u64>(), 7 * (2 * 3 * 4) * 5);
}

#[test]
fn row_operations_move_the_rows_that_they_touch() {
    let get =
        cost(|g| g.weight("w", Weight::new(DType::Q8_0, [100, 32])).get_rows(g.input("i", DType::I32, [2])));
    assert_eq!(get.1, 2 * 34 + 2 * 4 + 2 * 32 * 4);
    let set = cost(|g| {
        let rows = f32s(g, "x", [2, 8]);
        g.state("s", DType::F16, [100, 8]).set_rows(rows, g.input("i", DType::I32, [2]))
    });
    assert_eq!(set.1, 2 * 8 * 2 + 2 * 8 * 4 + 2 * 4);
    let copy = cost(|g| f32s(g, "x", [2, 8]).copy_into(g.state("s", DType::F16, [100, 8]).slice(0, 3, 2)));
    assert_eq!(copy.1, 2 * 8 * 4 + 2 * 8 * 2);
    assert_eq!(cost(|g| f32s(g, "x", [3, 8]).add(f32s(g, "b", [8]))).1, 4 * (24 + 8 + 24));
    assert_eq!(cost(|g| g.arange(0.0, 10.0, 1.0)), (10, 40));
    let (one, two) =
        (Cost { operations: 1, traffic: u64::MAX, sent: 4 }, Cost { operations: 2, traffic: 3, sent: 5 });
    assert_eq!(one.and(two), Cost { operations: 3, traffic: u64::MAX, sent: 9 });
}

#[test]
fn lifetimes_are_half_open_ranges_of_steps() {
    let life = |start, end| Lifetime { start, end };
    for (lifetime, empty) in
        [(life(2, 5), false), (life(2, 2), true), (life(3, 2), true), (Lifetime::NEVER, true)]
    {
        assert_eq!(lifetime.is_empty(), empty, "{lifetime}");
    }
    let contained: Vec<u32> = (0..8).filter(|step| life(2, 5).contains(*step)).collect();
    assert_eq!(contained, [2, 3, 4]);
    assert!(Lifetime::WHOLE.contains(0) && !Lifetime::NEVER.contains(0));
    for (other, overlaps) in
        [(life(0, 2), false), (life(0, 3), true), (life(4, 9), true), (life(5, 9), false)]
    {
        assert_eq!(life(2, 5).overlaps(other), overlaps, "{other}");
        assert_eq!(other.overlaps(life(2, 5)), overlaps, "{other}");
    }
}

#[test]
fn errors_say_what_is_free_and_what_would_fit() {
    let error =
        |free| BackendError::OutOfMemory { backend: "gpu".into(), requested: 3 << 29, free }.to_string();
    assert_eq!(error(None), "gpu: cannot allocate 1.5 GiB");
    assert_eq!(error(Some(7 << 10)), "gpu: cannot allocate 1.5 GiB, 7.0 KiB are free");
    let over = |fitting, fitting_bytes| {
        let over = OverBudget {
            backend: "gpu".into(),
            needed: 100,
            weights: 70,
            state: 20,
            compute: 10,
            budget: 60,
            weight_count: 5,
            fitting,
            fitting_bytes,
        };
        over.to_string()
    };
    assert!(
        over(0, 0).ends_with("40 B more than the budget of 60 B; none of its weights would fit"),
        "{}",
        over(0, 0)
    );
    assert!(over(2, 30).ends_with("; 2 of its 5 weights (30 B) would fit"), "{}", over(2, 30));
    let device = |error: BackendError| RuntimeError::Device {
        backend: "gpu".into(),
        split: None,
        node: None,
        error: Box::new(error),
    };
    let lost = BackendError::Lost { backend: "gpu".into(), reason: "unplugged".into() };
    assert!(device(lost).is_lost());
    assert!(!device(BackendError::OutOfMemory { backend: "gpu".into(), requested: 1, free: None }).is_lost());
}

#[test]
fn time_is_that_of_memory_or_of_arithmetic_in_the_weights_type() {
    let rates = Rates {
        read: 10.0,
        read_curve: ReadCurve::UNKNOWN,
        int8: 8.0,
        bf16: 4.0,
        f32: 2.0,
        link: 1.0,
        rendezvous: 1.0,
        launch: 9.0,
        measured: true,
    };
    let seconds = |operations, traffic, dtype| rates.seconds(Cost { operations, traffic, sent: 0 }, dtype);
    assert_eq!(seconds(8, 50, DType::F32), 5.0);
    assert_eq!(seconds(48, 50, DType::F32), 24.0);
    assert_eq!([seconds(48, 1, DType::F16), seconds(48, 1, DType::BF16)], [12.0; 2]);
    assert_eq!([seconds(48, 1, DType::Q8_0), seconds(48, 1, DType::Q4_0)], [6.0; 2]);
    // A rate that is not known does not divide by zero.
    assert_eq!(
        Rates { read: 0.0, ..rates }.seconds(Cost { operations: 0, traffic: 3, sent: 0 }, DType::F32),
        3.0
    );
    assert_eq!(
        Rates { f32: 0.0, ..rates }.seconds(Cost { operations: 3, traffic: 0, sent: 0 }, DType::F32),
        3.0
    );
    // What caches keep is read faster; without a curve, everything is read as memory.
    assert_eq!(rates.for_working_set(1.0), rates);
    let point = |working_set, rate| ReadPoint { working_set, rate };
    let read_curve = ReadCurve::new(&[point(100.0, 50.0), point(1000.0, 8.0)]);
    let cached = Rates { read_curve, ..rates };
    assert_eq!([10.0, 1e4].map(|bytes| cached.for_working_set(bytes).read), [50.0, 8.0]);
    let of = Rates::assumed;
    let (cpu, gpu) = (of(DeviceKind::Cpu), of(DeviceKind::Gpu));
    assert_eq!(cpu, of(DeviceKind::Simulated));
    assert!(gpu.read > 10.0 * cpu.read && gpu.int8 > gpu.f32 && !gpu.measured && cpu.link > 0.0);
    assert!(gpu.launch > cpu.launch, "a kernel takes longer to start than a barrier of threads");
}

#[test]
fn collectives_add_what_other_ranks_send() {
    let ranks = Ranks { group: 0, rank: 1, count: 3 };
    let all = |build: &dyn Fn(Value<'_>) -> TensorId| {
        let g = GraphBuilder::new();
        let y = build(f32s(&g, "x", [2, 6]));
        let graph = g.finish().unwrap();
        let Cost { operations, traffic, sent } = Cost::of(&graph, graph[y].node().unwrap());
        (operations, traffic, sent)
    };
    // A sum adds two other ranks' numbers, and sends two thirds of 48 bytes twice.
    assert_eq!(all(&|x| x.all_reduce(ranks).id()), (2 * 12, 48 + 48, 64));
    assert_eq!(all(&|x| x.reduce_scatter(ranks, [2, 2, 2]).id()), (2 * 4, 48 + 16, 32));
    assert_eq!(all(&|x| x.all_gather(ranks, [6, 6, 6]).id()), (0, 48 + 144, 96));
    // What a message waits for is not read.
    assert_eq!(all(&|x| x.receive(ranks, (0, 1), DType::F32, [5]).id()), (0, 20, 0));
    assert_eq!(all(&|x| x.tanh().id()), (12, 96, 0));
}
