//! Weight streaming of experts: of a host-resident weight, a device copies the slices that a run selects.

use std::ops::ControlFlow;
use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Data, ExpertWeights, Gate, Graph, GraphBuilder, SelectExperts, Value, Weight};
use quadriga_runtime::{
    Backend, CopySelection, Detail, Observed, RuntimeError, ScheduleError, ScheduleStep, Scheduler, Session,
    Splits, WeightStreaming, check_schedule,
};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{host, numbers};
use crate::misbehaving::Misbehaving;

/// Streams every weight that can be streamed.
const ALWAYS: WeightStreaming = WeightStreaming { operations_per_byte: 0, min_operations: 0 };

/// Columns of the activations.
const WIDTH: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Mixture {
    layers: usize,
    tokens: usize,
    experts: usize,
    used: usize,
    /// Whether each token has the same expert twice, instead of `used` different ones.
    repeated: bool,
}

impl Mixture {
    fn random(rng: &mut Rng) -> Mixture {
        let experts = rng.range(2, 40);
        Mixture {
            layers: rng.range(1, 4),
            tokens: rng.range(1, 12),
            experts,
            used: rng.range(1, experts.min(4)),
            repeated: rng.chance(0.2),
        }
    }

    /// Layers of experts whose router is a weight, too: input "x", output "y".
    fn graph(self, rng: &mut Rng) -> Graph {
        let Mixture { layers, tokens, experts, used, repeated } = self;
        let g = GraphBuilder::new();
        let mut x = g.input("x", DType::F32, [tokens, WIDTH]);
        for layer in 0..layers {
            let _scope = g.scope(&format!("blk.{layer}"));
            let mut weight = |name: &str, dims: [usize; 3]| -> Value<'_> {
                let data = numbers(rng, dims.iter().product());
                g.weight(&format!("{name}.{layer}"), Weight::with_data(DType::F32, dims, data))
            };
            let scores = g
                .mul_mat(weight("router", [1, experts, WIDTH]).reshape([experts, WIDTH]), x)
                .soft_max(1.0, None, None);
            let ids = if repeated {
                let best = scores.argmax().reshape([tokens, 1]);
                best.concat(1, &[best])
            } else {
                scores.select_experts(SelectExperts::ungrouped(used))
            };
            let weights =
                scores.expert_weights(ids, ExpertWeights { softmax: false, normalize: true, scale: 1.0 });
            let rows = x.reshape([tokens, 1, WIDTH]);
            let gate = weight("experts.gate", [experts, 16, WIDTH]).mul_mat_id(rows, ids);
            let up = weight("experts.up", [experts, 16, WIDTH]).mul_mat_id(rows, ids);
            let inner = gate.gated(Gate::Swiglu, up);
            let down = weight("experts.down", [experts, WIDTH, 16]).mul_mat_id(inner, ids);
            x = down.sum_experts(weights).add(x).tanh();
        }
        g.output("y", x);
        g.finish().unwrap()
    }
}

/// A device and a host that has all experts.
fn scheduler(device: Arc<dyn Backend>, streaming: Option<WeightStreaming>) -> Scheduler {
    Scheduler::new([device, host("cpu")])
        .place(|name| Some(usize::from(name.starts_with("experts"))))
        .weight_streaming(streaming)
}

fn device() -> Arc<dyn Backend> {
    Sim::new("gpu").alignment(256).padding(32).build()
}

/// The results of runs with different inputs: the experts of one are prefetched for the next. In some all tokens are the
/// same, and use the same experts.
fn run(session: &mut Session, tokens: usize) -> Result<Vec<Vec<f32>>, RuntimeError> {
    let mut rng = Rng::new(11);
    let mut all = Vec::new();
    for round in 0..5 {
        let row: Vec<f32> = (0..WIDTH).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
        let mut x = row.repeat(tokens);
        if round % 2 == 0 {
            x.iter_mut().for_each(|x| *x = rng.uniform(-1.0, 1.0) as f32);
        }
        session.run(&[("x", &x)])?;
        all.push(session.read("y")?);
    }
    Ok(all)
}

const FOUR: Mixture = Mixture { layers: 4, tokens: 3, experts: 16, used: 2, repeated: false };

#[test]
fn copies_of_experts_wait_for_the_router_and_are_prefetched() {
    let graph = FOUR.graph(&mut Rng::new(5));
    let plan = scheduler(device(), Some(ALWAYS)).plan(&graph).unwrap();
    let splits = plan.splits();
    assert!(splits.splits.iter().all(|split| split.backend == 0));
    // A router ends a split; the experts of a layer and the next router are one.
    assert_eq!((splits.splits.len(), splits.copies.len()), (5, 12));
    for copy in &splits.copies {
        let selection = copy.selected_by.unwrap();
        assert_eq!(selection.computed_by + 1, copy.reader);
        let ids = graph.node_ids().find(|node| graph[*node].output().index() == selection.ids).unwrap();
        assert_eq!(graph[ids].op().name(), "select_experts");
    }
    // Memory of the device does not grow with the number of layers.
    let more = Mixture { layers: 9, ..FOUR }.graph(&mut Rng::new(5));
    let more = scheduler(device(), Some(ALWAYS)).plan(&more).unwrap();
    assert_eq!(plan.bytes()[0].compute, more.bytes()[0].compute);
    // A prefetch comes before the split that computes the indices, where the memory is free by then.
    let place = |step| plan.order().iter().position(|other| *other == step);
    for (number, copy) in splits.copies.iter().enumerate() {
        let prefetch = place(ScheduleStep::Prefetch(number)).unwrap();
        let router = place(ScheduleStep::Split(copy.selected_by.unwrap().computed_by)).unwrap();
        assert!(
            copy.is_prefetched() && prefetch < router && router < place(ScheduleStep::Copy(number)).unwrap()
        );
    }
    assert!(plan.to_string().contains("at most"), "{plan}");
    assert!(plan.to_dot().contains("at most"));
}

/// A traced run knows the bytes that were copied, in advance and after the router, though only the device knows which.
#[test]
fn traces_have_the_bytes_of_selected_slices() {
    let graph = FOUR.graph(&mut Rng::new(5));
    let device = device();
    let plan = scheduler(Arc::clone(&device), Some(ALWAYS)).plan(&graph).unwrap();
    let mut session = plan.session().unwrap();
    let mut rng = Rng::new(12);
    let experts_of = |session: &mut Session| -> Vec<Vec<usize>> {
        // The experts by another session, which shows them: all layers' indices.
        let mut all = Vec::new();
        let _ = session.debug().observe(&mut |observed: Observed<'_>| {
            if observed.plan.graph()[observed.node].op().name() == "select_experts" {
                let (ids, _) = observed.bytes.as_chunks::<4>();
                let mut ids: Vec<usize> = ids.iter().map(|id| i32::from_le_bytes(*id) as usize).collect();
                ids.sort_unstable();
                ids.dedup();
                all.push(ids);
            }
            ControlFlow::Continue(())
        });
        all
    };
    let mut judge = scheduler(self::device(), Some(ALWAYS)).plan(&graph).unwrap().session().unwrap();
    let mut before: Option<Vec<Vec<usize>>> = None;
    for round in 0..4 {
        let x: Vec<f32> = (0..3 * WIDTH).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
        session.set("x", &x[..]).unwrap();
        judge.set("x", &x[..]).unwrap();
        let used = experts_of(&mut judge);
        let trace = session.debug().trace(Detail::Splits).unwrap();
        let slice = 16 * WIDTH * 4;
        for (layer, used) in used.iter().enumerate() {
            let known = before.as_ref().map_or(&[][..], |before| &before[layer]);
            let new = used.iter().filter(|expert| !known.contains(expert)).count();
            let is_of = |copy: usize| plan.copy_name(copy).contains(&format!(".{layer}"));
            let times = trace.copies.iter().filter(|time| time.selected && is_of(time.copy));
            let (exact, bytes): (Vec<bool>, Vec<usize>) = times.map(|time| (time.exact, time.bytes)).unzip();
            assert!(exact.iter().all(|exact| *exact), "round {round}, layer {layer}");
            assert_eq!(exact.len(), if before.is_some() { 6 } else { 3 }, "round {round}: prefetched or not");
            let total: usize = bytes.iter().sum();
            assert_eq!(total, 3 * slice * (known.len() + new), "round {round}, layer {layer}: {bytes:?}");
        }
        before = Some(used);
    }
}

#[test]
fn wrong_selections_are_refused() {
    let graph = FOUR.graph(&mut Rng::new(5));
    let plan = scheduler(device(), Some(ALWAYS)).plan(&graph).unwrap();
    let error = |change: &dyn Fn(&mut Splits, &mut Vec<ScheduleStep>)| {
        let (mut splits, mut order) = (plan.splits().clone(), plan.order().to_vec());
        check_schedule(&plan, &splits, &order, plan.memory()).unwrap();
        change(&mut splits, &mut order);
        check_schedule(&plan, &splits, &order, plan.memory())
            .expect_err("the checker accepted a wrong schedule")
    };
    let selection = |copy: usize| plan.splits().copies[copy].selected_by.unwrap();
    let set = |copy: usize, selection: CopySelection| {
        error(&|splits: &mut Splits, order: &mut Vec<ScheduleStep>| {
            splits.copies[copy].selected_by = Some(selection);
            let prefetched = splits.copies[copy].is_prefetched();
            order.retain(|step| prefetched || *step != ScheduleStep::Prefetch(copy));
        })
    };
    // The last copy is of the last layer, whose router is in split 3.
    let last = plan.splits().copies.len() - 1;
    let early = CopySelection { computed_by: 2, ..selection(last) };
    assert_eq!(set(last, early), ScheduleError::SelectionNotAwaited { copy: last });
    let unknown = CopySelection { computed_by: 99, ..selection(last) };
    assert!(matches!(set(last, unknown), ScheduleError::UnknownStep { .. }));
    let weight = CopySelection { ids: plan.splits().copies[0].tensor, ..selection(last) };
    assert_eq!(set(last, weight), ScheduleError::SelectionElsewhere { copy: last });

    let place = |order: &[ScheduleStep], step| order.iter().position(|other| *other == step).unwrap();
    let missing = error(&|_, order| {
        order.retain(|step| *step != ScheduleStep::Prefetch(last));
    });
    assert!(matches!(missing, ScheduleError::IssuedEarly { .. }), "{missing}");
    let late = error(&|_, order| {
        let (a, b) = (place(order, ScheduleStep::Prefetch(last)), place(order, ScheduleStep::Copy(last)));
        order.swap(a, b);
    });
    assert!(matches!(late, ScheduleError::IssuedEarly { .. }), "{late}");
    let twice = error(&|_, order| order.insert(0, ScheduleStep::Prefetch(0)));
    assert!(matches!(twice, ScheduleError::IssuedTwice { .. }), "{twice}");
    let in_use = error(&|splits, _| splits.copies[last].after = None);
    assert!(matches!(in_use, ScheduleError::CopyTargetInUse { .. }), "{in_use}");
    let unknown = error(&|_, order| order.push(ScheduleStep::Prefetch(99)));
    assert!(matches!(unknown, ScheduleError::UnknownStep { .. }), "{unknown}");
}

#[test]
fn slices_that_are_selected_for_another_node_are_refused() {
    let g = GraphBuilder::new();
    let mut rng = Rng::new(3);
    let x = g.input("x", DType::F32, [3, WIDTH]);
    let one_of = |name: &str, rng: &mut Rng| {
        let router = g.weight(name, Weight::with_data(DType::F32, [6, WIDTH], numbers(rng, 48)));
        g.mul_mat(router, x).select_experts(SelectExperts::ungrouped(1))
    };
    let ids = [one_of("a", &mut rng), one_of("b", &mut rng)];
    for (number, ids) in ids.into_iter().enumerate() {
        let data = numbers(&mut rng, 6 * 64);
        let w =
            g.weight(&format!("experts.{number}"), Weight::with_data(DType::F32, [6, WIDTH, WIDTH], data));
        g.output(&format!("y{number}"), w.mul_mat_id(x.reshape([3, 1, WIDTH]), ids));
    }
    let plan = scheduler(device(), Some(ALWAYS)).plan(g.finish().unwrap()).unwrap();
    let mut splits = plan.splits().clone();
    splits.copies[0].selected_by = splits.copies[1].selected_by;
    let error = check_schedule(&plan, &splits, plan.order(), plan.memory()).unwrap_err();
    assert!(matches!(error, ScheduleError::OtherSlices { copy: 0, .. }), "{error}");
}

#[test]
fn large_streamed_weights_are_spread_over_splits() {
    // 20 MiB each: two fill a split.
    let data = Data::from(vec![0u8; 20 << 20]);
    let matrices = |layers: usize| {
        let g = GraphBuilder::new();
        let mut x = g.input("x", DType::F32, [2, 1024]);
        let weight =
            |name: String| g.weight(&name, Weight::with_data(DType::F32, [5120, 1024], data.clone()));
        for layer in 0..layers {
            // Three products of the same activations stay together.
            let all = ["q", "k", "v"].map(|name| g.mul_mat(weight(format!("experts.{name}.{layer}")), x));
            x = all[0].add(all[1]).add(all[2]).slice(1, 0, 1024).cont();
        }
        g.output("y", x);
        scheduler(device(), Some(ALWAYS)).plan(g.finish().unwrap()).unwrap()
    };
    let plan = matrices(5);
    let of_splits: Vec<usize> = plan.splits().splits.iter().map(|split| split.inputs.len()).collect();
    assert_eq!(of_splits, [3; 5]);
    // The device has the weights of two splits at a time.
    assert_eq!(plan.bytes()[0].compute, matrices(9).bytes()[0].compute);
}

#[test]
fn only_selected_slices_are_copied_and_known_ones_in_advance() {
    // A second for each byte.
    let seconds = |tokens: usize, used: usize| {
        let sim = Sim::new("gpu").copy_seconds(0.0, 1.0).device();
        let graph = Mixture { tokens, used, ..FOUR }.graph(&mut Rng::new(5));
        let plan = scheduler(Arc::clone(&sim) as Arc<dyn Backend>, Some(ALWAYS)).plan(&graph).unwrap();
        let mut session = plan.session().unwrap();
        let x = vec![0.3f32; tokens * WIDTH];
        let mut last = sim.seconds();
        [(); 2].map(|()| {
            session.run(&[("x", &x)]).unwrap();
            session.wait().unwrap();
            let now = sim.seconds();
            let taken = now - last;
            last = now;
            taken as usize
        })
    };
    let matrix = 16 * WIDTH * 4;
    // All tokens are the same: one expert or two of each of four layers, and the inputs.
    for used in [1, 2] {
        let input = 3 * WIDTH * 4;
        let [first, second] = seconds(3, used);
        assert_eq!(first, 4 * 3 * used * matrix + input);
        assert_eq!(second, first, "what was prefetched is not copied again");
    }
}

#[test]
fn experts_are_streamed_where_the_work_outweighs_those_that_are_used() {
    let streams = |tokens: usize| {
        let graph =
            Mixture { layers: 1, tokens, experts: 4, used: 1, repeated: false }.graph(&mut Rng::new(1));
        let streaming = WeightStreaming { operations_per_byte: 4, min_operations: 0 };
        scheduler(device(), Some(streaming)).plan(&graph).unwrap().streams_weights()
    };
    // A product of one row takes half an operation per byte, which counts four times. Seven tokens use 3.47 of four experts, six 3.29.
    assert!(streams(7) && !streams(6));
    // A host of 2 · 10¹² operations a second, and a link of 50 GB a second.
    let streaming = WeightStreaming::for_rates(2e12, 50e9).unwrap();
    assert_eq!(streaming, WeightStreaming { operations_per_byte: 40, ..WeightStreaming::default() });
    for (host, link) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (-1.0, 1.0)] {
        assert_eq!(WeightStreaming::for_rates(host, link), None, "{host} {link}");
    }
}

#[test]
fn results_are_the_same_with_and_without_streaming() {
    let first = std::env::var("QUADRIGA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for seed in first..first + 80 {
        let mut rng = Rng::new(seed);
        let mixture = Mixture::random(&mut rng);
        let graph = mixture.graph(&mut rng);
        let on_host = rng.range(1, 7);
        let packs = rng.chance(0.5);
        let place = |streaming| {
            let sim = Sim::new("gpu").alignment(64).scratch(if packs { 64 } else { 0 });
            let sim = if packs { sim.packs_weights() } else { sim };
            let backends = [sim.build(), host("cpu")];
            let rule = move |name: &str| {
                let number: usize = name.bytes().map(usize::from).sum();
                name.starts_with("experts").then_some(usize::from(number % 8 <= on_host))
            };
            Scheduler::new(backends).place(rule).weight_streaming(streaming).plan(&graph).unwrap()
        };
        let results = |streaming| run(&mut place(streaming).session().unwrap(), mixture.tokens).unwrap();
        assert_eq!(results(Some(ALWAYS)), results(None), "seed {seed}: {mixture:?}");
    }
}

#[test]
fn faults_of_selected_copies_lose_nothing() {
    let mixture = Mixture { layers: 2, ..FOUR };
    let graph = mixture.graph(&mut Rng::new(9));
    let expected =
        run(&mut scheduler(device(), None).plan(&graph).unwrap().session().unwrap(), mixture.tokens).unwrap();
    let sim = Sim::new("gpu").device();
    let plan = scheduler(Arc::clone(&sim) as Arc<dyn Backend>, Some(ALWAYS)).plan(&graph).unwrap();
    let mut failed = 0;
    for warm in [false, true] {
        for after in 0.. {
            let mut session = plan.session().unwrap();
            if warm {
                run(&mut session, mixture.tokens).unwrap();
            }
            sim.fail(FaultPoint::Transfer, after);
            let ran = run(&mut session, mixture.tokens);
            sim.clear_faults();
            let Err(error) = ran else {
                assert_eq!(ran.unwrap(), expected);
                break;
            };
            assert!(matches!(error, RuntimeError::Device { .. }), "{error}");
            assert_eq!(run(&mut session, mixture.tokens).unwrap(), expected, "transfer {after}, {warm}");
            failed += 1;
        }
    }
    // Two layers with three copies, five runs: the first cannot prefetch.
    assert!(failed >= 2 * 5 * 6 + 9 * 6, "{failed}");
}

#[test]
fn indices_from_the_caller_or_another_device_select_nothing() {
    let g = GraphBuilder::new();
    let mut rng = Rng::new(2);
    let (x, ids) = (g.input("x", DType::F32, [3, 1, WIDTH]), g.input("ids", DType::I32, [3, 2]));
    let data = numbers(&mut rng, 4 * 8 * WIDTH);
    let w = g.weight("experts", Weight::with_data(DType::F32, [4, 8, WIDTH], data));
    g.output("y", w.mul_mat_id(x, ids));
    let graph = g.finish().unwrap();
    let results = |streaming| {
        let plan = scheduler(device(), streaming).plan(&graph).unwrap();
        assert!(plan.splits().copies.iter().all(|copy| copy.selected_by.is_none()));
        let mut session = plan.session().unwrap();
        session.run(&[("x", &[0.5f32; 24])]).unwrap_err();
        session.set("ids", &[1i32, 1, 3, 0, 1, 3]).unwrap();
        session.run(&[("x", &[0.5f32; 24])]).unwrap();
        session.read::<f32>("y").unwrap()
    };
    assert_eq!(results(Some(ALWAYS)), results(None));
}

#[test]
fn a_weight_that_two_routers_read_is_copied_whole() {
    let g = GraphBuilder::new();
    let mut rng = Rng::new(3);
    let x = g.input("x", DType::F32, [3, WIDTH]);
    let w = g.weight("experts", Weight::with_data(DType::F32, [6, WIDTH, WIDTH], numbers(&mut rng, 6 * 64)));
    let mut sum = x;
    for name in ["one", "two"] {
        let router = g.weight(name, Weight::with_data(DType::F32, [6, WIDTH], numbers(&mut rng, 48)));
        let ids = g.mul_mat(router, x).select_experts(SelectExperts::ungrouped(1));
        sum = sum.add(w.mul_mat_id(x.reshape([3, 1, WIDTH]), ids).reshape([3, WIDTH]));
    }
    g.output("y", sum);
    let graph = g.finish().unwrap();
    let plan = scheduler(device(), Some(ALWAYS)).plan(&graph).unwrap();
    assert!(plan.streams_weights());
    assert!(plan.splits().copies.iter().all(|copy| copy.selected_by.is_none()));
    let results = |streaming| {
        let plan = scheduler(device(), streaming).plan(&graph).unwrap();
        run(&mut plan.session().unwrap(), 3).unwrap()
    };
    assert_eq!(results(Some(ALWAYS)), results(None));
}

/// Experts named by a tensor that no device can look at before it copies: an input, or a part of one that it computes.
#[test]
fn experts_that_are_not_known_on_the_device_are_copied_with_all_others() {
    let experts = |ids: &dyn for<'g> Fn(&'g GraphBuilder) -> Value<'g>| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [3, 1, WIDTH]);
        let data = numbers(&mut Rng::new(2), 6 * 4 * WIDTH);
        let w = g.weight("experts.w", Weight::with_data(DType::F32, [6, 4, WIDTH], data));
        g.output("y", w.mul_mat_id(x, ids(&g)));
        g.finish().unwrap()
    };
    let computed = experts(&|g| g.input("scores", DType::F32, [3, 6]).top_k(2));
    let given = experts(&|g| g.input("ids", DType::I32, [3, 2]));
    let part = experts(&|g| g.input("scores", DType::F32, [3, 6]).top_k(4).slice(1, 0, 2));
    for (graph, selected) in [(computed, true), (given, false), (part, false)] {
        let plan = scheduler(device(), Some(ALWAYS)).plan(&graph).unwrap();
        let copies = &plan.splits().copies;
        assert!(!copies.is_empty());
        assert!(copies.iter().all(|copy| copy.selected_by.is_some() == selected), "{copies:?}");
    }
}

/// A device whose queue has only what every queue has by default copies whole weights, and times whole programs.
#[test]
fn a_device_that_copies_no_slices_copies_whole_weights() {
    let graph = FOUR.graph(&mut Rng::new(5));
    let plain: Arc<dyn Backend> = Arc::new(Misbehaving::new(device()));
    let mut streamed = scheduler(plain, Some(ALWAYS)).plan(&graph).unwrap().session().unwrap();
    let mut kept = scheduler(device(), None).plan(&graph).unwrap().session().unwrap();
    assert_eq!(run(&mut streamed, FOUR.tokens).unwrap(), run(&mut kept, FOUR.tokens).unwrap());
    let x = vec![0.5f32; FOUR.tokens * WIDTH];
    let [y, same] = [(&mut streamed, 3 * FOUR.layers), (&mut kept, 0)].map(|(session, copies)| {
        session.set("x", &x).unwrap();
        let trace = session.debug().trace(Detail::Operations).unwrap();
        assert!(!trace.splits.is_empty());
        // Which experts were used is not known: the most that may have been copied is, and none were copied in advance.
        let selected: Vec<_> = trace.copies.iter().filter(|copy| copy.selected).collect();
        assert!(
            selected.iter().all(|copy| !copy.exact && copy.bytes == FOUR.experts * 16 * WIDTH * 4),
            "{selected:?}"
        );
        assert_eq!(selected.len(), copies);
        session.read::<f32>("y").unwrap()
    });
    assert_eq!(y, same);
}
