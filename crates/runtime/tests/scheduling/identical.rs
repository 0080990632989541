//! Results are bit-identical, however a graph is split.

use std::collections::HashMap;
use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::{Graph, NodeId};
use quadriga_runtime::{Backend, Plan, Scheduler};
use quadriga_sim::Sim;

use crate::common::{device, host, random_graph};

/// Three runs with different inputs; the bytes of all outputs of each.
fn results(plan: &Plan, graph: &Graph) -> Vec<Vec<u8>> {
    let mut session = plan.session().unwrap();
    let mut all = Vec::new();
    for round in 0..3 {
        let x: Vec<f32> = (0..32).map(|i| ((i * 7 + round * 13) % 17) as f32 / 9.0 - 1.0).collect();
        let z: Vec<f32> = (0..32).map(|i| ((i * 5 + round) % 11) as f32 / 6.0 - 1.0).collect();
        session.run(&[("x", &x), ("z", &z), ("ids", &[round % 4])]).unwrap();
        for (name, _) in graph.outputs() {
            all.push(session.read::<u8>(name).unwrap());
        }
    }
    all
}

fn pin_randomly(mut scheduler: Scheduler, graph: &Graph, rng: &mut Rng, share: f64) -> Scheduler {
    let count = scheduler.backends().len();
    let mut by_storage = HashMap::new();
    for node in graph.node_ids() {
        if rng.chance(share) {
            let storage = graph[graph[node].output()].storage();
            let backend = *by_storage.entry(storage).or_insert_with(|| rng.below(count));
            scheduler = scheduler.pin_node(node, backend);
        }
    }
    scheduler
}

fn some_backends(rng: &mut Rng) -> Vec<Arc<dyn Backend>> {
    let count = rng.range(1, 4);
    (0..count)
        .map(|index| {
            let name = format!("d{index}");
            match rng.below(5) {
                0 => host(&name),
                1 => Sim::new(&name).without_peers().build(),
                2 => Sim::new(&name).isolated().alignment(16).build(),
                3 => Sim::new(&name).max_buffer(300).packs_weights().build(),
                _ => device(&name),
            }
        })
        .collect()
}

#[test]
fn results_are_bit_identical_on_one_backend_and_split_at_random() {
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let nodes = rng.range(1, 60);
        let graph = random_graph(&mut rng, nodes);
        let expected = results(&Scheduler::new([host("one")]).plan(&graph).unwrap(), &graph);
        for share in [0.1, 0.5, 1.0] {
            let scheduler = pin_randomly(Scheduler::new(some_backends(&mut rng)), &graph, &mut rng, share);
            let plan = scheduler.plan(&graph).unwrap();
            assert_eq!(results(&plan, &graph), expected, "seed {seed}, share {share}\n{plan:#}");
        }
    }
}

#[test]
fn results_are_bit_identical_split_at_any_node_between_two_instances_of_a_backend() {
    let mut rng = Rng::new(4242);
    let graph = random_graph(&mut rng, 25);
    let expected = results(&Scheduler::new([device("one")]).plan(&graph).unwrap(), &graph);
    for cut in 0..graph.nodes().len() {
        let mut assigned = HashMap::new();
        let mut scheduler = Scheduler::new([device("a"), device("b")]);
        for node in graph.node_ids() {
            let storage = graph[graph[node].output()].storage();
            let backend = *assigned.entry(storage).or_insert(usize::from(node >= NodeId::from_index(cut)));
            scheduler = scheduler.pin_node(node, backend);
        }
        let plan = scheduler.plan(&graph).unwrap();
        assert_eq!(results(&plan, &graph), expected, "cut at {cut}");
    }
}

#[test]
fn results_of_overlapping_runs_are_bit_identical() {
    for seed in 500..540 {
        let mut rng = Rng::new(seed);
        let graph = random_graph(&mut rng, 30);
        let scheduler =
            pin_randomly(Scheduler::new([device("a"), device("b"), host("c")]), &graph, &mut rng, 0.6);
        let plan = scheduler.plan(&graph).unwrap();
        let inputs = |round: i32| -> (Vec<f32>, Vec<f32>) {
            let x = (0..32).map(|i| ((i * 3 + round * 5) % 13) as f32 / 9.0 - 0.6).collect();
            (x, (0..32).map(|i| ((i + round) % 7) as f32 / 6.0 - 0.5).collect())
        };
        let mut patient = plan.session().unwrap();
        let mut hasty = plan.session().unwrap();
        for round in 0..8 {
            let (x, z) = inputs(round);
            patient.run(&[("x", &x), ("z", &z), ("ids", &[round % 4])]).unwrap();
            hasty.set("x", &x).unwrap();
            // Inputs that are not set keep their values.
            if round == 0 || round % 3 != 0 {
                hasty.set("z", &z).unwrap();
            }
            hasty.set("ids", &[round % 4]).unwrap();
            if round % 3 == 0 && round > 0 {
                hasty.set("z", &z).unwrap();
            }
            hasty.start().unwrap();
        }
        for (name, _) in graph.outputs() {
            assert_eq!(
                patient.read::<u8>(name).unwrap(),
                hasty.read::<u8>(name).unwrap(),
                "seed {seed} {name}"
            );
        }
    }
}
