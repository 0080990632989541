//! Plans are the recorded ones. The other tests judge a plan; these notice a change that still plans validly, but cuts a graph
//! into more splits, copies or waits more, or needs more memory. Such a change is a decision: record the new numbers if
//! they are better.

use quadriga_conformance::Rng;
use quadriga_graph::{Graph, NodeId};
use quadriga_runtime::{Cost, Plan, Scheduler, WeightStreaming};
use quadriga_sim::Sim;

use crate::common::{device, host, random_graph};

/// What is recorded of some plans: sums, and a hash of all decisions.
#[derive(Debug, PartialEq, Eq)]
struct Recorded {
    splits: usize,
    copies: usize,
    waits: usize,
    compute: u64,
    decisions: u64,
}

fn record(plans: impl Iterator<Item = Plan>) -> Recorded {
    let mut sum = Recorded { splits: 0, copies: 0, waits: 0, compute: 0, decisions: 0xcbf2_9ce4_8422_2325 };
    for plan in plans {
        let said = plan.explain();
        let splits = plan.splits();
        sum.splits += splits.splits.len();
        sum.copies += splits.copies.len();
        sum.waits += splits.splits.iter().map(|s| s.after_copies.len() + s.after_splits.len()).sum::<usize>();
        sum.compute += said.backends.iter().map(|backend| backend.bytes.compute).sum::<u64>();
        let texts = [decisions(&plan), format!("{plan:#}"), plan.to_dot()];
        for byte in texts.iter().flat_map(|text| text.bytes()) {
            // FNV-1a.
            sum.decisions = (sum.decisions ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    sum
}

/// Every decision in words. Fields are named one by one, so that a new one changes nothing.
fn decisions(plan: &Plan) -> String {
    let (said, splits) = (plan.explain(), plan.splits());
    let mut words: Vec<String> = Vec::new();
    for b in &said.backends {
        let bytes = (b.bytes.weights, b.bytes.mapped, b.bytes.state, b.bytes.compute, b.total, b.unshared);
        words.push(format!("{bytes:?} {:?} {} {} {}", b.chunks, b.lower_bound, b.peak_step, b.optimal));
    }
    for s in &said.splits {
        let split = &s.split;
        let waits = (&split.inputs, &split.after_copies, &split.after_splits);
        words.push(format!("{} {waits:?} {} {} {}", split.backend, s.first, s.last, cost(s.cost)));
    }
    for c in &said.copies {
        let copy = &c.copy;
        let bytes = (copy.tensor, copy.storage, copy.offset, copy.bytes);
        let ends = (copy.from, copy.to, copy.source, copy.reader, copy.after, copy.last_node);
        words.push(format!("{bytes:?} {ends:?} {} {} {}", c.name, c.place, c.streamed));
    }
    for n in &said.nodes {
        let (storage, cost) = (n.storage, cost(n.cost));
        words.push(format!("{} {} {} {} {storage:?} {cost}", n.node, n.split, n.why, n.bytes));
    }
    for s in &said.storages {
        let place = (s.backend, s.bytes, s.chunk, s.offset, s.start, s.end);
        words.push(format!("{} {:?} {place:?} {} {} {}", s.name, s.usage, s.results, s.mapped, s.why));
    }
    for leaf in &splits.leaves {
        words.push(format!("{} {} {}", leaf.tensor, leaf.backend, leaf.viewed));
    }
    words.push(format!("{:?} {:?}", splits.lanes, said.order));
    words.join("\n")
}

fn cost(Cost { operations, traffic, .. }: Cost) -> String {
    format!("Cost {{ operations: {operations}, traffic: {traffic} }}")
}

/// Random graphs, and random barriers in some of them.
fn graph(rng: &mut Rng) -> Graph {
    let nodes = rng.range(5, 50);
    let graph = random_graph(rng, nodes);
    if rng.chance(0.6) {
        return graph;
    }
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    let mut groups: Vec<&[NodeId]> = Vec::new();
    let mut rest = nodes.as_slice();
    while !rest.is_empty() {
        let (group, after) = rest.split_at(rng.range(1, rest.len().min(12)));
        groups.push(group);
        rest = after;
    }
    graph.with_order(&groups).unwrap()
}

fn pinned(scheduler: Scheduler, graph: &Graph, rng: &mut Rng) -> Scheduler {
    let count = scheduler.backends().len();
    let mut homes = std::collections::HashMap::new();
    let picked: Vec<NodeId> = graph.node_ids().filter(|_| rng.chance(0.5)).collect();
    picked.into_iter().fold(scheduler, |scheduler, node| {
        let storage = graph[graph[node].output()].storage();
        scheduler.pin_node(node, *homes.entry(storage).or_insert_with(|| rng.below(count)))
    })
}

#[test]
fn graphs_on_three_devices_are_planned_as_recorded() {
    let plans = (0..40).map(|seed| {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let graph = graph(&mut rng);
        let scheduler = match seed % 3 {
            0 => Scheduler::new([device("a"), device("b"), device("c")]),
            1 => Scheduler::new([device("a"), host("b"), Sim::new("c").max_buffer(512).build()]),
            _ => Scheduler::new([Sim::new("a").isolated().build(), device("b"), host("c")]),
        };
        pinned(scheduler, &graph, &mut rng).plan(&graph).unwrap()
    });
    let expected = Recorded {
        splits: 1156,
        copies: 974,
        waits: 385,
        compute: 251_424,
        decisions: 0x4420_5f07_cf1e_1fef,
    };
    assert_eq!(record(plans), expected);
}

#[test]
fn streamed_graphs_are_planned_as_recorded() {
    let plans = (0..40).map(|seed| {
        println!("seed {seed}");
        let mut rng = Rng::new(seed + 500);
        let graph = graph(&mut rng);
        let streaming = WeightStreaming { operations_per_byte: seed % 4, min_operations: 0 };
        let hosted = rng.range(0, 3);
        let scheduler = Scheduler::new([device("gpu"), host("cpu")])
            .place(move |name| {
                let number = name.get(1..)?.parse::<usize>().ok()?;
                (name.starts_with(['w', 's']) && number <= hosted).then_some(1)
            })
            .weight_streaming(Some(streaming));
        scheduler.plan(&graph).unwrap()
    });
    let expected =
        Recorded { splits: 348, copies: 143, waits: 92, compute: 131_360, decisions: 0x10e3_9849_49a5_6af4 };
    assert_eq!(record(plans), expected);
}

#[test]
fn graphs_without_pins_are_planned_as_recorded() {
    let plans = (0..30).map(|seed| {
        println!("seed {seed}");
        let mut rng = Rng::new(seed + 900);
        let graph = graph(&mut rng);
        let refusing = Sim::new("a").refuse(|graph, node| {
            let name = graph[node].op().name();
            matches!(name, "tanh" | "soft_max" | "concat").then(|| format!("no {name}"))
        });
        let rule =
            |name: &str| name.starts_with(['w', 's']).then_some(usize::from(name.ends_with(['1', '2'])));
        Scheduler::new([refusing.build(), device("b"), host("c")]).place(rule).plan(&graph).unwrap()
    });
    let expected =
        Recorded { splits: 333, copies: 213, waits: 73, compute: 130_720, decisions: 0x9349_bb3c_1911_d26d };
    assert_eq!(record(plans), expected);
}
