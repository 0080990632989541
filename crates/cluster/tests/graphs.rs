//! Collectives of graphs in sessions: order, overlap with other backends, errors, plans and traces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use quadriga_cluster::{Collectives, Communicator, InProcess, Limits, in_process};
use quadriga_graph::{CustomFunction, CustomOp, DType, Graph, GraphBuilder, Ranks};
use quadriga_runtime::{Backend, Cost, Detail, Plan, RuntimeError, ScheduleError, Scheduler, check_schedule};
use quadriga_sim::Sim;

/// How long a rank waits for what must happen; only a test that fails takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

fn limits() -> Limits {
    Limits { operation: Some(PATIENCE), ..Limits::default() }
}

fn pair() -> [InProcess; 2] {
    in_process(2, limits()).try_into().unwrap()
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())
}

fn group(communicator: InProcess) -> (Arc<Collectives>, Ranks) {
    let collectives = Collectives::new(Arc::new(communicator));
    let ranks = collectives.ranks(0);
    (Arc::new(collectives), ranks)
}

/// A copy of its input on simulated devices, which tells a channel that it runs.
fn signal(sender: Sender<()>) -> CustomOp {
    let sender = Mutex::new(sender);
    let code = CustomFunction::new(
        "signal",
        |inputs| Ok((DType::F32, *inputs[0].shape())),
        move |_| {
            sender.lock().unwrap().send(())?;
            Ok(())
        },
    )
    .units(1)
    .in_place(0)
    .build();
    CustomFunction::new("signal", |inputs| Ok((DType::F32, *inputs[0].shape())), |_| Ok(()))
        .units(1)
        .in_place(0)
        .backend_code(quadriga_sim::FAMILY, code)
        .build()
}

/// The other rank takes part only once another backend has computed a split that does not depend on the sum, but comes after it in
/// the graph: were that split stalled by the collective, neither would ever run.
#[test]
fn a_collective_that_waits_stalls_no_other_backend() {
    let kinds: [fn() -> Arc<dyn Backend>; 3] =
        [cpu, || Sim::new("a").build(), || Sim::new("a").synchronous().build()];
    for backend in kinds {
        let [first, second] = pair();
        let (sender, signals) = channel();
        let (collectives, ranks) = group(first);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let other = match signals.recv_timeout(PATIENCE / 2) {
                    Ok(()) => [10.0, 20.0],
                    // The assertion below fails, instead of a test that hangs.
                    Err(_) => [f32::NAN; 2],
                };
                let mut values = other;
                second.all_reduce(&mut values).unwrap();
            });
            let g = GraphBuilder::new();
            let x = g.input("x", DType::F32, [2]);
            let own = x.neg().named("own");
            let sum = own.all_reduce(ranks).named("sum");
            let beside = own.custom(&signal(sender), &[]).named("beside");
            g.output("sum", sum);
            g.output("beside", beside);
            let scheduler = Scheduler::new([backend(), Sim::new("b").build()])
                .pin_name("own", 0)
                .pin_name("sum", 0)
                .pin_name("beside", 1)
                .ranks(0, collectives);
            let plan = scheduler.plan(g.finish().unwrap()).unwrap();
            let mut session = plan.session().unwrap();
            session.run(&[("x", &[1.0f32, 2.0])]).unwrap();
            assert_eq!(session.read::<f32>("sum").unwrap(), [9.0, 18.0], "{plan:#}");
            assert_eq!(session.read::<f32>("beside").unwrap(), [-1.0, -2.0]);
        });
    }
}

/// Independent sums of different lengths, each on a backend of its own.
fn independent(ranks: Ranks) -> Graph {
    let g = GraphBuilder::new();
    for number in 0..6usize {
        let x = g.input(&format!("x{number}"), DType::F32, [number + 1]);
        g.output(&format!("y{number}"), x.neg().all_reduce(ranks).named(&format!("y{number}")));
    }
    g.finish().unwrap()
}

fn plan_of_independent(rank: usize, collectives: Option<Arc<Collectives>>) -> Plan {
    let mut scheduler = Scheduler::new([Sim::new("a").build(), Sim::new("b").build()]).check_plans(true);
    if let Some(collectives) = collectives {
        scheduler = scheduler.ranks(0, collectives);
    }
    for number in 0..6 {
        // The ranks place the sums differently.
        scheduler = scheduler.pin_name(format!("y{number}"), (number + rank) % 2);
    }
    scheduler.plan(independent(Ranks { group: 0, rank, count: 2 })).unwrap()
}

#[test]
fn independent_collectives_run_in_the_order_of_the_graph_on_all_ranks() {
    std::thread::scope(|scope| {
        for (rank, communicator) in pair().into_iter().enumerate() {
            scope.spawn(move || {
                let (collectives, _) = group(communicator);
                let plan = plan_of_independent(rank, Some(collectives));
                let mut session = plan.session().unwrap();
                for _ in 0..20 {
                    for number in 0..6usize {
                        session.set(&format!("x{number}"), &vec![number as f32; number + 1][..]).unwrap();
                    }
                    session.run(&[]).unwrap();
                    for number in 0..6usize {
                        let sums = session.read::<f32>(&format!("y{number}")).unwrap();
                        assert_eq!(sums, vec![-2.0 * number as f32; number + 1]);
                    }
                }
            });
        }
    });
}

#[test]
fn the_checker_finds_collectives_without_an_order() {
    let plan = plan_of_independent(0, None);
    check_schedule(&plan, plan.splits(), plan.order(), plan.memory()).unwrap();
    let mut splits = plan.splits().clone();
    let waiting = splits.splits.iter_mut().find(|split| !split.after_splits.is_empty()).unwrap();
    waiting.after_splits.clear();
    let error = check_schedule(&plan, &splits, plan.order(), plan.memory()).unwrap_err();
    assert!(matches!(error, ScheduleError::CollectiveOrder { .. }), "{error}");
}

#[test]
fn plans_and_traces_name_collectives_and_count_their_bytes() {
    let [first, second] = pair();
    let build = |ranks: Ranks| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [3, 8]);
        let sum = x.neg().all_reduce(ranks).named("sum");
        g.output("whole", sum.all_gather(ranks, [8, 8]).named("whole"));
        g.finish().unwrap()
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (collectives, ranks) = group(second);
            let plan = Scheduler::new([cpu()]).ranks(0, collectives).plan(build(ranks)).unwrap();
            plan.session().unwrap().run(&[("x", &[1.0f32; 24])]).unwrap();
        });
        let (collectives, ranks) = group(first);
        let plan = Scheduler::new([cpu()]).ranks(0, collectives).plan(build(ranks)).unwrap();
        // Of 96 bytes, a sum of two ranks sends 2 · 1/2; of 192, a gather 1/2.
        let text = "1 × all_reduce, 1 × all_gather, 192 bytes sent";
        assert!(plan.to_string().contains(text), "{plan}");
        assert!(plan.to_dot().contains(text), "{}", plan.to_dot());
        let nodes = plan.explain().nodes;
        let sent: Vec<(&str, u64)> = nodes.iter().map(|node| (node.operation, node.cost.sent)).collect();
        assert_eq!(sent, [("neg", 0), ("all_reduce", 96), ("all_gather", 96)]);
        assert_eq!(nodes.iter().map(|node| node.collective).collect::<Vec<_>>(), [false, true, true]);
        let all =
            plan.graph().node_ids().map(|node| Cost::of(plan.graph(), node)).fold(Cost::default(), Cost::and);
        assert_eq!(all.sent, 192);

        let mut session = plan.session().unwrap();
        session.set("x", &[1.0f32; 24][..]).unwrap();
        let trace = session.debug().trace(Detail::Operations).unwrap();
        let names: Vec<String> =
            trace.operations.iter().map(|operation| operation.operation.clone()).collect();
        assert!(names.iter().any(|name| name.contains("all_reduce")), "{names:?}");
        assert!(names.iter().any(|name| name.contains("all_gather")), "{names:?}");
        assert_eq!(session.read::<f32>("whole").unwrap(), [-2.0; 48]);
    });
}

#[test]
fn a_graph_without_its_ranks_is_planned_and_not_run() {
    let [first, _second] = pair();
    let graph = |rank, count| {
        let g = GraphBuilder::new();
        g.output("y", g.input("x", DType::F32, [4]).all_reduce(Ranks { group: 3, rank, count }));
        g.finish().unwrap()
    };
    let refused = |plan: Plan| plan.session().err().unwrap().to_string();
    for backend in [cpu(), Sim::new("a").build()] {
        let text = refused(Scheduler::new([Arc::clone(&backend)]).plan(graph(0, 2)).unwrap());
        assert!(text.contains("no ranks of group 3") && text.contains("Scheduler::ranks"), "{text}");
    }
    let (collectives, _) = group(first);
    let scheduler = Scheduler::new([cpu()]).ranks(3, collectives);
    for (rank, count) in [(1, 2), (0, 3)] {
        let text = refused(scheduler.plan(graph(rank, count)).unwrap());
        assert!(text.contains("and this is rank 0 of 2"), "{text}");
    }
}

#[test]
fn a_rank_that_fails_ends_the_run_of_the_others_with_its_text() {
    for backend in [cpu(), Sim::new("a").build()] {
        let [first, second] = pair();
        let (collectives, ranks) = group(first);
        let g = GraphBuilder::new();
        g.output("y", g.input("x", DType::F32, [4]).all_reduce(ranks).named("y"));
        let plan = Scheduler::new([backend]).ranks(0, collectives).plan(g.finish().unwrap()).unwrap();
        let mut session = plan.session().unwrap();
        second.fail("its disk is full");
        let error: RuntimeError = session.run(&[("x", &[1.0f32; 4])]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 1") && text.contains("its disk is full") && text.contains('y'), "{text}");
    }
}
