//! Collectives: which ranks execute them, in which order, and what a plan says of them.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, NodeId, Op, Ranks, Value, Weight};
use quadriga_runtime::{
    Backend, ExchangeCall, Plan, RankGroup, RankGroups, RuntimeError, ScheduleError, Scheduler,
    check_schedule,
};

use crate::common::{device, host};
use crate::misbehaving::Misbehaving;

/// The first of two ranks.
const FIRST: Ranks = Ranks { group: 0, rank: 0, count: 2 };

/// A rank whose sums are a multiple of its own part.
#[derive(Debug)]
struct Multiplying {
    rank: usize,
    factor: f32,
}

impl RankGroup for Multiplying {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        2
    }

    fn exchange(&self, call: ExchangeCall<'_>) -> Result<(), String> {
        for number in call.output.as_chunks_mut::<4>().0 {
            *number = (f32::from_le_bytes(*number) * self.factor).to_le_bytes();
        }
        Ok(())
    }
}

fn multiplying(factor: f32) -> Arc<dyn RankGroup> {
    Arc::new(Multiplying { rank: 0, factor })
}

fn built(build: impl FnOnce(&GraphBuilder)) -> Graph {
    let g = GraphBuilder::new();
    build(&g);
    g.finish().unwrap()
}

fn weight<'g>(g: &'g GraphBuilder, name: &str) -> Value<'g> {
    g.weight(name, Weight::with_data(DType::F32, [8, 8], [0.1f32; 64].as_slice()))
}

/// Weights whose names end with 1 are on the second of two devices.
fn on_two_devices() -> Scheduler {
    let rule = |name: &str| name.bytes().last().filter(u8::is_ascii_digit).map(|last| usize::from(last % 2));
    Scheduler::new([device("a"), device("b"), host("cpu")]).place(rule).weight_streaming(None)
}

fn collectives(graph: &Graph) -> Vec<NodeId> {
    graph.node_ids().filter(|node| matches!(graph[*node].op(), Op::Collective(_))).collect()
}

fn split_of(plan: &Plan, node: NodeId) -> usize {
    plan.splits().split_of_node[node.index()] as usize
}

#[test]
fn the_ranks_of_a_group_execute_its_collectives() {
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [2]);
        g.output("y", x.tanh().all_reduce(FIRST).sub(x.all_reduce(Ranks { group: 7, ..FIRST })));
    });
    let run = |scheduler: Scheduler| -> Result<Vec<f32>, RuntimeError> {
        let mut session = scheduler.plan(&graph)?.session()?;
        session.run(&[("x", &[0.5f32, -2.0])])?;
        session.read("y")
    };
    let expected = |a: f32, b: f32| [0.5f32, -2.0].map(|x| a * x.tanh() - b * x);
    let with =
        |first: Arc<dyn RankGroup>| Scheduler::new(device("a")).ranks(0, first).ranks(7, multiplying(4.0));
    let close = |found: Vec<f32>, expected: [f32; 2]| {
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{found:?}, {expected:?}");
    };
    close(run(with(multiplying(3.0))).unwrap(), expected(3.0, 4.0));
    // Ranks that are set again take the place of the earlier ones, and those of other groups stay.
    close(run(with(multiplying(3.0)).ranks(0, multiplying(5.0))).unwrap(), expected(5.0, 4.0));
    close(run(with(multiplying(3.0)).ranks(7, multiplying(2.0))).unwrap(), expected(3.0, 2.0));

    let missing = run(Scheduler::new(device("a")).ranks(0, multiplying(3.0))).unwrap_err().to_string();
    assert!(missing.contains("no ranks of group 7"), "{missing}");
    let other = run(with(Arc::new(Multiplying { rank: 1, factor: 3.0 }))).unwrap_err().to_string();
    assert!(other.contains("for rank 0 of 2, and this is rank 1 of 2"), "{other}");
}

#[test]
fn groups_are_found_by_number_rank_and_size() {
    let mut groups = RankGroups::default();
    groups.insert(3, multiplying(1.0));
    assert!(groups.get(3).is_some() && groups.get(0).is_none());
    assert!(groups.of(&Ranks { group: 3, ..FIRST }).is_ok());
    for wrong in [FIRST, Ranks { group: 3, rank: 1, count: 2 }, Ranks { group: 3, rank: 0, count: 4 }] {
        assert!(groups.of(&wrong).is_err(), "{wrong:?}");
    }
    let ranks = groups.get(3).unwrap();
    assert!(ranks.failure().is_none() && ranks.device_code("cuda").is_none(), "unless a group says so");
}

#[test]
fn a_backend_that_does_not_exchange_data_leaves_collectives_to_others() {
    let plain = Misbehaving::new(device("plain"));
    assert!(plain.join_ranks(&multiplying(1.0)).unwrap().is_none());
    let graph = built(|g| g.output("y", g.input("x", DType::F32, [2]).tanh().all_reduce(FIRST)));
    let backends: [Arc<dyn Backend>; 2] = [Arc::new(plain), host("cpu")];
    let plan = Scheduler::new(backends).plan(&graph).unwrap();
    let of_nodes: Vec<usize> =
        graph.node_ids().map(|node| plan.splits().splits[split_of(&plan, node)].backend).collect();
    assert_eq!(of_nodes, [0, 1]);
    let alone = Scheduler::new(Misbehaving::new(device("plain"))).plan(&graph).unwrap_err().to_string();
    assert!(alone.contains("it does not exchange data with other ranks"), "{alone}");
}

#[test]
fn collectives_wait_for_the_previous_one_on_another_device() {
    // On the devices a, b, a; no result depends on another.
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let [a, b, c] = ["w0", "w1", "v0"].map(|name| weight(g, name).mul_mat(x));
        let a = a.all_reduce(FIRST);
        g.output("b", b.all_reduce(FIRST));
        g.output("a", a.tanh());
        g.output("c", c.all_reduce(FIRST));
    });
    let plan = on_two_devices().plan(&graph).unwrap();
    let splits = plan.splits();
    let all = collectives(&graph);
    let of: Vec<usize> = all.iter().map(|node| split_of(&plan, *node)).collect();
    let waits = |split: usize| splits.splits[split].after_splits.clone();
    assert_eq!(of.iter().map(|split| splits.splits[*split].backend).collect::<Vec<_>>(), [0, 1, 0]);
    assert_eq!([waits(of[0]), waits(of[1]), waits(of[2])], [vec![], vec![of[0]], vec![of[1]]]);
    assert_eq!(
        splits.nodes_of(of[0]),
        [all[0]],
        "the split that the other device waits for has no further nodes"
    );

    let wrong = |change: &dyn Fn(&mut quadriga_runtime::Splits)| {
        let mut splits = plan.splits().clone();
        change(&mut splits);
        check_schedule(&plan, &splits, plan.order(), plan.memory())
    };
    assert_eq!(wrong(&|_| ()), Ok(()));
    for waiting in [of[1], of[2]] {
        let error = wrong(&|splits| splits.splits[waiting].after_splits.clear());
        assert!(matches!(error, Err(ScheduleError::CollectiveOrder { .. })), "{error:?}");
    }
}

#[test]
fn collectives_of_one_device_run_in_the_order_of_the_graph() {
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let [a, b] = ["w0", "v0"].map(|name| weight(g, name).mul_mat(x));
        g.output("a", a.all_reduce(FIRST));
        g.output("b", b.all_reduce(FIRST));
    });
    let alone = Scheduler::new(device("a")).plan(&graph).unwrap();
    assert_eq!(alone.splits().splits.len(), 1);
    let plan = on_two_devices().plan(&graph).unwrap();
    assert!(plan.splits().splits.iter().all(|split| split.backend == 0 && split.after_splits.is_empty()));
    for plan in [alone, plan] {
        let mut splits = plan.splits().clone();
        check_schedule(&plan, &splits, plan.order(), plan.memory()).unwrap();
        let all = collectives(&graph);
        let at = |node: NodeId| splits.nodes.iter().position(|other| *other == node).unwrap();
        let (first, second) = (at(all[0]), at(all[1]));
        splits.nodes.swap(first, second);
        let error = check_schedule(&plan, &splits, plan.order(), plan.memory());
        assert!(matches!(error, Err(ScheduleError::CollectiveOrder { .. })), "{error:?}");
    }
}

#[test]
fn a_collective_that_depends_on_the_previous_one_waits_for_its_copy_alone() {
    let graph = built(|g| {
        let x = g.input("x", DType::F32, [4, 8]);
        let a = weight(g, "w0").mul_mat(x).all_reduce(FIRST);
        g.output("y", weight(g, "w1").mul_mat(a).all_reduce(FIRST));
    });
    let plan = on_two_devices().plan(&graph).unwrap();
    assert!(plan.splits().splits.iter().all(|split| split.after_splits.is_empty()), "{plan}");
    assert_eq!(plan.splits().copies.len(), 1);
}

#[test]
fn plans_tell_the_collectives_of_a_split_and_the_bytes_that_are_sent() {
    let graph = |reduce: bool| {
        built(|g| {
            let x = g.input("x", DType::F32, [4, 8]).tanh();
            let sum = |x: Value<'_>| if reduce { x.all_reduce(FIRST).id() } else { x.sqr().id() };
            let _ = (sum(x), sum(x.neg()));
            if reduce {
                x.all_gather(FIRST, [8, 1]);
            }
            g.output("y", x);
        })
    };
    // Of two ranks, each sends half of a sum twice, and half of what is gathered.
    let sent = 2 * (4 * 8 * 4) + 4 * 9 * 4 / 2;
    let told = format!("2 × all_reduce, 1 × all_gather, {sent} bytes sent");
    let plan = Scheduler::new(device("a")).plan(graph(true)).unwrap();
    assert!(plan.to_string().contains(&told), "{plan}");
    assert!(plan.to_dot().contains(&format!("\\n{told}\"")), "{}", plan.to_dot());
    let without = Scheduler::new(device("a")).plan(graph(false)).unwrap();
    assert!(!without.to_string().contains("bytes sent"), "{without}");
    assert!(!without.to_dot().contains("\\n\""), "{}", without.to_dot());
}
