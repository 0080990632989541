//! S10: the schedule checker accepts what the scheduler makes, and names what is wrong with anything else.

use std::process::Command;

use quadriga_graph::{DType, Graph, GraphBuilder, NodeId, Value, Weight};
use quadriga_runtime::memory::MemoryPlan;
use quadriga_runtime::{
    CHECK_PLANS_VARIABLE, Plan, RuntimeError, ScheduleError, ScheduleStep, Scheduler, Splits, check_schedule,
};
use quadriga_sim::Sim;

use crate::common::{chain, device, host};
use crate::misbehaving::Misbehaving;

/// A plan's schedule, to be changed.
struct Schedule {
    plan: Plan,
    splits: Splits,
    order: Vec<ScheduleStep>,
    memory: MemoryPlan,
}

impl Schedule {
    fn of(graph: &Graph) -> Schedule {
        let backends = [device("a"), device("b"), host("cpu")];
        let rule =
            |name: &str| name.bytes().last().filter(u8::is_ascii_digit).map(|last| usize::from(last % 2));
        let plan = Scheduler::new(backends).place(rule).weight_streaming(None).plan(graph).unwrap();
        plan.check().unwrap();
        let (splits, order, memory) = (plan.splits().clone(), plan.order().to_vec(), plan.memory().clone());
        Schedule { plan, splits, order, memory }
    }

    fn check(&self) -> Result<(), ScheduleError> {
        check_schedule(&self.plan, &self.splits, &self.order, &self.memory)
    }

    fn place(&self, step: ScheduleStep) -> usize {
        self.order.iter().position(|other| *other == step).unwrap()
    }
}

/// Changes the schedule of a graph; the error of the checker.
fn error_of(graph: &Graph, change: impl FnOnce(&mut Schedule)) -> ScheduleError {
    let mut schedule = Schedule::of(graph);
    schedule.check().unwrap();
    change(&mut schedule);
    schedule.check().expect_err("the checker accepted a wrong schedule")
}

macro_rules! refused {
    ($graph:expr, $change:expr, $error:pat) => {
        let error = error_of(&$graph, $change);
        assert!(matches!(error, $error), "{error:?}: {error}");
    };
}

fn built(build: impl FnOnce(&GraphBuilder)) -> Graph {
    let g = GraphBuilder::new();
    build(&g);
    g.finish().unwrap()
}

fn weight<'g>(g: &'g GraphBuilder, name: &str) -> Value<'g> {
    g.weight(name, Weight::with_data(DType::F32, [8, 8], [0.1f32; 64].as_slice()))
}

use ScheduleStep::{Copy, Prefetch, Split};

#[test]
fn s10_wrong_orders_are_refused() {
    // Four splits, on the two devices in turn, with a copy before each but the first.
    let graph = chain(4);
    assert_eq!(Schedule::of(&graph).order.len(), 7);
    refused!(graph, |s| s.order.push(Split(99)), ScheduleError::UnknownStep { .. });
    refused!(graph, |s| s.order.push(Copy(99)), ScheduleError::UnknownStep { .. });
    let named = [(Split(4), "split 4"), (Copy(3), "copy 3"), (Prefetch(0), "the prefetch of copy 0")];
    for (step, name) in named {
        let text = error_of(&graph, |s| s.order.push(step)).to_string();
        assert_eq!(text, format!("the order names {name}, which does not exist"));
    }
    refused!(graph, |s| s.order.push(Copy(0)), ScheduleError::IssuedTwice { .. });
    refused!(graph, |s| s.order.push(Split(1)), ScheduleError::IssuedTwice { .. });
    refused!(graph, |s| _ = s.order.pop(), ScheduleError::NeverIssued { .. });
    let early = |a: ScheduleStep, b: ScheduleStep| {
        move |s: &mut Schedule| {
            let (a, b) = (s.place(a), s.place(b));
            s.order.swap(a, b);
        }
    };
    refused!(graph, early(Copy(0), Split(1)), ScheduleError::IssuedEarly { .. });
    refused!(graph, early(Split(0), Copy(0)), ScheduleError::IssuedEarly { .. });
    refused!(
        graph,
        |s| {
            s.splits.splits[2].inputs.clear();
            let (a, b) = (s.place(Split(0)), s.place(Split(2)));
            s.order.swap(a, b);
        },
        ScheduleError::IssuedEarly { .. }
    );
}

#[test]
fn s10_wrong_splits_are_refused() {
    let graph = chain(4);
    refused!(graph, |s| s.splits.splits[1].node_count = 0, ScheduleError::SplitNodes { split: 1 });
    refused!(graph, |s| s.splits.splits[3].node_count += 1, ScheduleError::SplitNodes { split: 3 });
    refused!(graph, |s| s.splits.splits[3].backend = 7, ScheduleError::SplitNodes { split: 3 });
    let past_the_end = NodeId::from_index(graph.nodes().len());
    refused!(graph, |s| s.splits.nodes[0] = past_the_end, ScheduleError::SplitNodes { split: 0 });
    refused!(graph, |s| s.splits.lanes[0].reverse(), ScheduleError::Lane { backend: 0 });
    refused!(graph, |s| _ = s.splits.lanes[1].pop(), ScheduleError::Lane { backend: 1 });
    // The last node of the first split and the first of the second change places.
    refused!(graph, |s| s.splits.nodes.swap(1, 2), ScheduleError::WrongBackend { .. });
    refused!(graph, |s| s.splits.nodes[1] = s.splits.nodes[0], ScheduleError::NodeTwice { .. });
    refused!(graph, |s| s.splits.splits[3].node_count -= 1, ScheduleError::NeverRuns { .. });
    // Activation before matmul.
    refused!(graph, |s| s.splits.nodes.swap(0, 1), ScheduleError::NotComputed { .. });
    refused!(graph, |s| _ = s.splits.leaves.remove(0), ScheduleError::NotOnBackend { .. });
    refused!(
        graph,
        |s| s.splits.mirrored_writes.push((s.splits.nodes[0], 0)),
        ScheduleError::NoMirror { split: 0, .. }
    );
}

#[test]
fn s10_wrong_copies_are_refused() {
    let graph = chain(4);
    refused!(
        graph,
        |s| s.splits.copies[0].to = s.splits.copies[0].from,
        ScheduleError::CopyTarget { copy: 0 }
    );
    refused!(graph, |s| s.splits.copies[0].to = 9, ScheduleError::CopyTarget { copy: 0 });
    refused!(graph, |s| s.splits.copies[1].from = 2, ScheduleError::CopySource { copy: 1, .. });
    refused!(graph, |s| s.splits.copies[1].bytes += 4, ScheduleError::CopyRange { copy: 1, .. });
    refused!(graph, |s| s.splits.copies[1].offset = usize::MAX, ScheduleError::CopyRange { copy: 1, .. });
    refused!(graph, |s| s.splits.copies[1].bytes -= 4, ScheduleError::NotOnBackend { .. });
    refused!(graph, |s| s.splits.copies[1].to = 2, ScheduleError::NotOnBackend { .. });
    refused!(
        graph,
        |s| s.splits.splits[1].inputs.clear(),
        ScheduleError::CopyNotAwaited { split: 1, copy: 0 }
    );
    refused!(
        graph,
        |s| s.splits.copies[1].source = None,
        ScheduleError::SourceNotAwaited { copy: 1, split: 1 }
    );
    refused!(
        graph,
        |s| s.splits.copies[1].source = Some(0),
        ScheduleError::SourceNotAwaited { copy: 1, split: 1 }
    );
    refused!(graph, |s| s.splits.copies[1].source = Some(77), ScheduleError::UnknownStep { .. });
}

#[test]
fn s10_lost_orders_between_reads_and_writes_are_refused() {
    // A state of one device is read by the other, then overwritten.
    let graph = built(|g| {
        let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
        let state = g.state("s0", DType::F32, [4, 8]);
        g.output("y", weight(g, "w1").mul_mat(state));
        g.output("s", state.set_rows(x, ids));
    });
    refused!(
        graph,
        |s| s.splits.splits.iter_mut().for_each(|split| split.after_copies.clear()),
        ScheduleError::OverwrittenWhileCopied { .. }
    );
    // The other way round: written, then read by the other device.
    let graph = built(|g| {
        let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
        let state = g.state("s0", DType::F32, [4, 8]).set_rows(x, ids);
        g.output("y", weight(g, "w1").mul_mat(state));
    });
    refused!(
        graph,
        |s| {
            s.splits.copies[0].source = None;
            s.splits.splits[0].after_copies.push(0);
            s.order = vec![Copy(0), Split(0), Split(1)];
        },
        ScheduleError::StaleCopy { copy: 0, .. }
    );
    // On one device: the write before the read.
    let graph = built(|g| {
        let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
        let state = g.state("s0", DType::F32, [4, 8]);
        g.output("y", state.tanh());
        g.output("s", state.set_rows(x, ids));
    });
    refused!(graph, |s| s.splits.nodes.swap(0, 1), ScheduleError::Overwritten { .. });
}

#[test]
fn s10_memory_that_is_reused_too_early_is_refused() {
    // A result is copied to the other device while its own goes on.
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let a = weight(g, "w0").mul_mat(x).named("a");
        g.output("b", a.tanh().sqr().neg());
        g.output("c", weight(g, "w1").mul_mat(a));
    });
    let a = graph.tensor("a").unwrap();
    refused!(
        graph,
        |s| s.memory.lifetimes[a.index()].end = 1,
        ScheduleError::ReleasedWhileCopied { .. } | ScheduleError::OverwrittenWhileCopied { .. }
    );
    // The memory of a copy belongs to another tensor until the first split of the reading device is done.
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let p = weight(g, "w1").mul_mat(x);
        let q = weight(g, "w0").mul_mat(x);
        g.output("p", p);
        g.output("r", weight(g, "v1").mul_mat(q));
    });
    let copies = Schedule::of(&graph).splits.copies.len();
    assert_eq!(copies, 1);
    refused!(
        graph,
        |s| {
            let extra = s.memory.extras.len() - 1;
            s.memory.extras[extra].lifetime.start = 2;
        },
        ScheduleError::CopyTargetInUse { copy: 0, .. }
    );
}

#[test]
fn s10_ignored_barriers_are_refused() {
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let (a, b) = (weight(g, "w0").mul_mat(x), weight(g, "w1").mul_mat(x));
        g.barrier();
        g.output("a", a.tanh().sqr());
        g.output("b", b.tanh().sqr());
    });
    refused!(
        graph,
        |s| s.splits.splits.iter_mut().for_each(|split| split.after_splits.clear()),
        ScheduleError::BarrierIgnored { .. }
    );
    refused!(graph, |s| s.splits.splits[3].after_splits[0] = 99, ScheduleError::UnknownStep { .. });
    let one = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]).tanh();
        g.barrier();
        g.output("y", x.sqr().neg());
    });
    refused!(
        one,
        |s| {
            s.splits.splits[0].node_count += 1;
            s.splits.splits[1].first_node += 1;
            s.splits.splits[1].node_count -= 1;
        },
        ScheduleError::AcrossBarrier { split: 0 }
    );
}

#[test]
fn s10_checking_is_a_setting_of_the_scheduler() {
    let graph = chain(4);
    // The memory planner and the checker are told different sizes.
    let scheduler = || Scheduler::new(Misbehaving::new(Sim::new("a").alignment(1).build()).growth(1));
    let refused = scheduler().check_plans(true).plan(&graph);
    assert!(matches!(&refused, Err(RuntimeError::BadPlan(_))), "{refused:?}");
    scheduler().check_plans(false).plan(&graph).unwrap();
}

/// Runs itself in a process with the variable, which would change other tests of this one.
#[test]
fn s10_checking_is_turned_off_by_the_environment() {
    if std::env::var(CHECK_PLANS_VARIABLE).as_deref() == Ok("0") {
        let device = Misbehaving::new(Sim::new("a").alignment(1).build()).growth(1);
        Scheduler::new(device).plan(chain(4)).unwrap();
        println!("planned without a check");
        return;
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "wrong_plans::s10_checking_is_turned_off_by_the_environment", "--nocapture"])
        .env(CHECK_PLANS_VARIABLE, "0")
        .output()
        .unwrap();
    // A process that finds no test of this name succeeds, too.
    let out = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && out.contains("planned without a check"), "{out}");
}

#[test]
fn s10_plans_are_checked_in_debug_builds_unless_the_environment_says_otherwise() {
    if std::env::var(CHECK_PLANS_VARIABLE).is_ok_and(|value| value == "0") {
        return;
    }
    let device = Misbehaving::new(Sim::new("a").alignment(1).build()).growth(1);
    let planned = Scheduler::new(device).plan(chain(4));
    assert_eq!(planned.is_err(), cfg!(debug_assertions), "{planned:?}");
}

#[test]
fn s10_a_copy_of_other_bytes_is_refused() {
    // Views of a storage: the copy has the second row, which starts at byte 32 and ends at 64.
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let a = weight(g, "w0").mul_mat(x);
        g.output("a", a);
        g.output("y", weight(g, "w1").mul_mat(a.slice(0, 1, 1)));
    });
    let copy = Schedule::of(&graph).splits.copies[0].clone();
    assert_eq!((copy.offset, copy.bytes), (32, 32));
    for (offset, bytes) in [(32, 28), (36, 32), (28, 32), (64, 32), (0, 32)] {
        refused!(
            graph,
            |s| (s.splits.copies[0].offset, s.splits.copies[0].bytes) = (offset, bytes),
            ScheduleError::NotOnBackend { .. }
        );
    }
    let other = graph.tensor("w1").unwrap().index();
    refused!(
        graph,
        |s| {
            s.splits.copies[0].storage = other;
            s.splits.copies[0].from = 1;
            s.splits.copies[0].to = 0;
        },
        ScheduleError::NotOnBackend { .. } | ScheduleError::SourceNotAwaited { .. }
    );
}
