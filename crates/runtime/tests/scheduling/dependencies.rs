//! Waits between runs, plans and queues: the simulated devices refuse every access that is not ordered, whatever the timing.

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Data, Graph, GraphBuilder, Pairing, Rope, Weight};
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session};
use quadriga_sim::Sim;

use crate::common::{chain_input, device, host, random_graph};

/// `-k · x`, collected into rows of a state. The product is computed on device 0, the rest on device 1.
fn collector(k: f32, rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let (x, ids) = (g.input("x", DType::F32, [1, 64]), g.input("ids", DType::I32, [1]));
    let y = x.scale(k).named("y");
    g.output("seen", g.state("seen", DType::F32, [rows, 64]).set_rows(y.neg().named("z"), ids));
    g.finish().unwrap()
}

fn apart(scheduler: &Scheduler, graph: &Graph) -> Scheduler {
    let home = |node| usize::from(!graph.node_name(node).contains('y'));
    graph.node_ids().fold(scheduler.clone(), |scheduler, node| scheduler.pin_node(node, home(node)))
}

fn pairs() -> Vec<[Arc<dyn Backend>; 2]> {
    vec![
        [device("a"), device("b")],
        [Sim::new("a").without_peers().build(), Sim::new("b").without_peers().build()],
        [Sim::new("a").isolated().build(), device("b")],
        [device("a"), host("cpu")],
        [host("cpu"), device("b")],
    ]
}

fn collected(session: &mut Session) -> Vec<f32> {
    session.wait().unwrap();
    session.read::<f32>("seen").unwrap().chunks(64).map(|row| row[0]).collect()
}

#[test]
fn runs_started_without_waiting_are_ordered_with_the_copies_of_the_run_before() {
    for backends in pairs() {
        let graph = collector(2.0, 6);
        let mut session = apart(&Scheduler::new(backends), &graph).plan(&graph).unwrap().session().unwrap();
        for round in 0..6 {
            session.set("x", &[round as f32 + 1.0; 64]).unwrap();
            session.set("ids", &[round]).unwrap();
            session.start().unwrap();
        }
        assert_eq!(collected(&mut session), [-2.0, -4.0, -6.0, -8.0, -10.0, -12.0]);
    }
}

#[test]
fn a_large_input_waits_for_the_run_that_reads_its_bank() {
    let graph = collector(2.0, 6);
    let mut session = Scheduler::new(device("a")).plan(&graph).unwrap().session().unwrap();
    for round in 0..6 {
        // 256 bytes go through the upload queue, 4 through the compute queue.
        session.set("x", &[round as f32; 64]).unwrap();
        session.set("ids", &[round]).unwrap();
        session.start().unwrap();
    }
    assert_eq!(collected(&mut session), [0.0, -2.0, -4.0, -6.0, -8.0, -10.0]);
}

#[test]
fn another_plan_waits_for_the_run_in_flight() {
    for backends in pairs() {
        let scheduler = Scheduler::new(backends);
        let graphs = [collector(2.0, 4), collector(3.0, 4)];
        let plans = graphs.each_ref().map(|graph| apart(&scheduler, graph).plan(graph).unwrap());
        let mut session = Session::new(&scheduler).unwrap();
        for plan in &plans {
            session.use_plan(plan).unwrap();
            session.run(&[("x", &[0.0f32; 64]), ("ids", &[0i32])]).unwrap();
        }
        for round in 0..4usize {
            session.use_plan(&plans[round % 2]).unwrap();
            session.set("x", &[round as f32 + 1.0; 64]).unwrap();
            session.set("ids", &[round as i32]).unwrap();
            session.start().unwrap();
        }
        assert_eq!(collected(&mut session), [-2.0, -6.0, -6.0, -12.0]);
    }
}

#[test]
fn random_graphs_on_three_devices_run_back_to_back() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed + 9000);
        let nodes = rng.range(10, 60);
        let graph = random_graph(&mut rng, nodes);
        let results = |scheduler: &Scheduler| {
            let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
            session.set("x", &chain_input()).unwrap();
            session.set("z", &chain_input()).unwrap();
            for row in [0, 3, 1] {
                session.set("ids", &[row]).unwrap();
                session.start().unwrap();
            }
            let read = |(name, _): &(String, _)| session.read::<u8>(name).unwrap();
            graph.outputs().iter().map(read).collect::<Vec<_>>()
        };
        let expected = results(&Scheduler::new(host("one")));
        let mut scheduler = Scheduler::new([device("a"), device("b"), device("c")]);
        let mut homes = std::collections::HashMap::new();
        for node in graph.node_ids().filter(|_| rng.chance(0.6)).collect::<Vec<_>>() {
            let storage = graph[graph[node].output()].storage();
            scheduler = scheduler.pin_node(node, *homes.entry(storage).or_insert_with(|| rng.below(3)));
        }
        assert_eq!(results(&scheduler), expected, "seed {seed}");
    }
}

#[test]
fn a_packed_weight_that_becomes_an_output_or_is_viewed_is_loaded_anew() {
    let values: Vec<f32> = (0..64 * 64).map(|i| ((i * 37 + 11) % 101) as f32 / 101.0 - 0.5).collect();
    let data = Data::from(values.as_slice());
    let build = |output: bool, viewed: bool| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [2, 64]);
        let w = g.weight("w", Weight::with_data(DType::F32, [64, 64], data.clone()));
        g.output("y", if viewed { g.mul_mat(w.slice(0, 16, 32), x) } else { g.mul_mat(w, x) });
        if output {
            g.output("w", w);
        }
        g.finish().unwrap()
    };
    let cpu = || Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap()) as Arc<dyn Backend>;
    let packing = || Sim::new("p").packs_weights().build();
    for backend in [cpu as fn() -> Arc<dyn Backend>, packing] {
        let run = |session: &mut Session, output, viewed| -> Vec<f32> {
            session.use_graph(build(output, viewed)).unwrap();
            session.run(&[("x", &&values[..128])]).unwrap();
            session.read("y").unwrap()
        };
        let fresh =
            |output, viewed| run(&mut Session::new(&Scheduler::new(backend())).unwrap(), output, viewed);
        let mut session = Session::new(&Scheduler::new(backend())).unwrap();
        let close =
            |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-3);
        for (output, viewed) in [(false, false), (true, false), (false, true), (true, true), (false, false)] {
            let (found, expected) = (run(&mut session, output, viewed), fresh(output, viewed));
            assert!(close(&found, &expected), "output {output}, viewed {viewed}");
            if output {
                assert_eq!(session.read::<f32>("w").unwrap(), values);
            }
        }
    }
}

#[test]
fn a_state_stays_where_it_is_in_the_next_graph() {
    // The second graph alone would place the state with its weight, on the other device.
    let build = |weight: Option<&str>| {
        let g = GraphBuilder::new();
        let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
        let x = match weight {
            Some(name) => {
                g.weight(name, Weight::with_data(DType::F32, [8, 8], [1.0f32; 64].as_slice())).mul_mat(x)
            }
            None => x.scale(2.0),
        };
        g.output("s", g.state("s", DType::F32, [4, 8]).set_rows(x, ids));
        g.finish().unwrap()
    };
    let rule = |name: &str| (name == "w").then_some(1);
    let scheduler = Scheduler::new([device("a"), device("b")]).place(rule);
    assert_eq!(
        scheduler.plan(build(Some("w"))).unwrap().placement(build(Some("w")).leaf("s").unwrap()),
        Some(1)
    );
    let mut session = Session::new(&scheduler).unwrap();
    for (weight, row, expected) in [(None, 0, 2.0), (Some("w"), 1, 8.0), (None, 2, 2.0)] {
        session.use_graph(build(weight)).unwrap();
        session.run(&[("x", &[1.0f32; 8]), ("ids", &[row])]).unwrap();
        let rows: Vec<f32> = session.read("s").unwrap();
        assert_eq!(rows[row as usize * 8], expected);
        assert_eq!(rows[0], 2.0, "the first graph's row is still there");
        assert_eq!(session.states()[0].backend, 0);
    }
}

#[test]
fn a_state_of_other_dimensions_or_type_is_a_conflict() {
    let build = |dtype, dims: &[usize]| {
        let g = GraphBuilder::new();
        let shape = quadriga_graph::Shape::new(dims).unwrap();
        g.output("s", g.state("s", dtype, shape));
        g.finish().unwrap()
    };
    let mut session = Session::new(&Scheduler::new(host("cpu"))).unwrap();
    session.use_graph(build(DType::F32, &[4, 8])).unwrap();
    session.write_state("s", &[3.0f32; 32]).unwrap();
    // As many bytes, and as many elements, in other dimensions.
    for (dtype, dims) in [(DType::F32, &[8, 4][..]), (DType::F32, &[2, 8]), (DType::I32, &[4, 8])] {
        let error = session.use_graph(build(dtype, dims)).unwrap_err();
        assert!(matches!(error, RuntimeError::Conflict { what: "state", .. }), "{dims:?}: {error}");
    }
    session.use_graph(build(DType::F32, &[4, 8])).unwrap();
    assert_eq!(session.read_state::<f32>("s").unwrap(), [3.0; 32]);
}

#[test]
fn rope_tables_differ_by_their_frequency_factors() {
    let g = GraphBuilder::new();
    let (x, positions) = (g.input("x", DType::F32, [3, 1, 8]), g.input("p", DType::I32, [3]));
    let rope = Rope::new(8, Pairing::Half, 1e4);
    for name in ["f", "g"] {
        g.output(&format!("y{name}"), x.rope(rope, positions, Some(g.input(name, DType::F32, [4]))));
    }
    g.output("plain", x.rope(rope, positions, None));
    let graph = g.finish().unwrap();
    let run = |backend: Arc<dyn Backend>| {
        let mut session = Scheduler::new(backend).plan(&graph).unwrap().session().unwrap();
        let x: Vec<f32> = (0..24).map(|i| i as f32 / 7.0).collect();
        let factors: [&dyn quadriga_runtime::Values; 2] =
            [&[1.0f32, 2.0, 4.0, 8.0], &[3.0f32, 1.0, 1.5, 7.0]];
        session.run(&[("x", &x), ("p", &[1i32, 2, 3]), ("f", factors[0]), ("g", factors[1])]).unwrap();
        ["yf", "yg", "plain"].map(|name| session.read::<f32>(name).unwrap()).concat()
    };
    let cpu = run(Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap()));
    let oracle = run(host("cpu"));
    assert!(cpu.iter().zip(&oracle).all(|(a, b)| (a - b).abs() < 1e-4), "{cpu:?} {oracle:?}");
}
