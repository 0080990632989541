//! Threads and weights on a machine with several NUMA nodes, which a folder or a value simulates.
#![cfg(all(target_os = "linux", not(loom)))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::path::PathBuf;
use std::sync::Mutex;

use quadriga_cpu::internals::pool::Stopped;
use quadriga_cpu::numa::{BoundPages, NumaMode, NumaNode, Topology, record_bound_pages};
use quadriga_cpu::{Backend, Error, PoolError};
use quadriga_graph::{DType, GraphBuilder, Weight};
use quadriga_runtime::{Scheduler, Session};

/// The CPUs that this thread may run on.
fn affinity() -> Vec<usize> {
    // SAFETY: an empty set is a value, which the call overwrites; the numbers are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set), 0);
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}

fn two_nodes(first: usize, second: usize) -> Topology {
    Topology::new([NumaNode { number: 0, cpus: vec![first] }, NumaNode { number: 1, cpus: vec![second] }])
}

#[test]
fn a_folder_like_that_of_linux_is_read() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("numa-nodes");
    let _ = std::fs::remove_dir_all(&folder);
    for (name, cpus) in
        [("node1", "4-7,12\n"), ("node0", "0-3\n"), ("node2", "\n"), ("node10", "20\n"), ("power", "")]
    {
        std::fs::create_dir_all(folder.join(name)).unwrap();
        std::fs::write(folder.join(name).join("cpulist"), cpus).unwrap();
    }
    std::fs::write(folder.join("online"), "0-1\n").unwrap();
    let found = Topology::read(&folder);
    let wanted = [(0, vec![0, 1, 2, 3]), (1, vec![4, 5, 6, 7, 12]), (10, vec![20])];
    let wanted: Vec<NumaNode> = wanted.into_iter().map(|(number, cpus)| NumaNode { number, cpus }).collect();
    assert_eq!(found.nodes(), wanted, "memory without CPUs is left out");
    assert!(Topology::read(&folder.join("absent")).nodes().is_empty());
}

#[test]
fn threads_run_on_the_cpus_of_their_nodes() {
    // A thread of its own, since the caller of a run is bound, too.
    let test = || {
        let [first, second, ..] = affinity()[..] else { return };
        let builder = || Backend::builder().threads(4).topology(two_nodes(first, second));
        let backend = builder().numa(NumaMode::Distribute).build().unwrap();
        let numa = backend.numa().expect("two nodes");
        let shares: Vec<_> = numa.threads(4).into_iter().map(|(node, own)| (node.number, own)).collect();
        assert_eq!(shares, [(0, 0..2), (1, 2..4)]);
        let found = Mutex::new(vec![Vec::new(); 4]);
        let pool = quadriga_cpu::internals::pool::Pool::bound(4, Some(numa.clone())).unwrap();
        for threads in [4, 2] {
            pool.set_threads(threads).unwrap();
            pool.run(&|worker| {
                found.lock().unwrap()[worker.index()] = affinity();
                Ok::<(), Stopped>(())
            })
            .unwrap();
            let wanted: Vec<Vec<usize>> =
                (0..threads).map(|i| vec![if i < threads / 2 { first } else { second }]).collect();
            assert_eq!(found.lock().unwrap()[..threads], wanted);
        }
        assert!(builder().build().unwrap().numa().is_none(), "not asked for");
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn one_node_is_left_to_the_system_and_isolated_threads_to_one_node() {
    let test = || {
        let cpus = affinity();
        let one = Topology::new([NumaNode { number: 0, cpus: cpus.clone() }]);
        let backend = Backend::builder().numa(NumaMode::Distribute).topology(one).build().unwrap();
        assert!(backend.numa().is_none());
        let [first, second, ..] = cpus[..] else { return };
        let backend =
            Backend::builder().numa(NumaMode::Isolate).topology(two_nodes(first, second)).build().unwrap();
        assert_eq!(
            (backend.threads(), backend.numa().unwrap().nodes().len()),
            (1, 1),
            "a thread for each CPU"
        );
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn a_node_that_the_program_may_not_use_is_an_error_that_names_it() {
    let absent = 1000;
    let backend = Backend::builder().numa(NumaMode::Distribute).threads(2).topology(two_nodes(0, absent));
    match backend.build() {
        Err(error @ Error::Pool(PoolError::Bind { index: 1, node: 1, .. })) => {
            assert!(error.to_string().contains("numactl"), "{error}");
        }
        other => panic!("{:?}", other.map(|backend| backend.threads())),
    }
    let allowed =
        Backend::builder().numa(NumaMode::Numactl).threads(2).topology(two_nodes(affinity()[0], absent));
    assert_eq!(allowed.build().unwrap().numa().unwrap().nodes().len(), 1, "only what is allowed");
}

/// A matrix has one part on each node, in the order of its threads; experts are on both in turns. `numactl` says where memory is.
fn assert_bound(bound: &[BoundPages], mode: NumaMode, experts: bool, bytes: usize) {
    let context = format!("{mode}, experts: {experts}: {bound:?}");
    let nodes: Vec<&[usize]> = bound.iter().map(|pages| pages.nodes.as_slice()).collect();
    match (mode, experts) {
        (NumaMode::Numactl, _) => assert!(bound.is_empty(), "{context}"),
        (NumaMode::Distribute, true) => assert_eq!(nodes, [[0, 1].as_slice()], "{context}"),
        (NumaMode::Distribute, false) => {
            assert_eq!(nodes, [[0].as_slice(), &[1]], "{context}");
            assert_eq!(bound[0].addresses.end, bound[1].addresses.start, "{context}");
            let [first, second] = [0, 1].map(|part: usize| bound[part].addresses.len());
            assert!(first.abs_diff(second) <= 16 << 10, "{context}");
        }
        // The node that the program was started on.
        (NumaMode::Isolate, _) => {
            assert!(nodes.iter().all(|nodes| nodes.len() == 1 && nodes[0] < 2), "{context}");
        }
    }
    let interleaved = mode == NumaMode::Distribute && experts;
    assert!(bound.iter().all(|pages| pages.interleaved == interleaved), "{context}");
    let pages: usize = bound.iter().map(|pages| pages.addresses.len()).sum();
    assert!(mode == NumaMode::Numactl || pages + (16 << 10) >= bytes, "{context}: {pages} of {bytes} bytes");
}

/// Rows of neurons are on both nodes in turns.
#[test]
fn rows_of_neurons_are_interleaved() {
    let test = || {
        let [first, second, ..] = affinity()[..] else { return };
        let (rows, columns) = (1024, 512);
        let bytes: Vec<u8> =
            (0..rows * columns).flat_map(|i| ((i % 13) as f32 - 6.0).to_le_bytes()).collect();
        let g = GraphBuilder::new();
        let (x, mask) = (g.input("x", DType::F32, [1, columns]), g.input("mask", DType::F32, [1, rows]));
        let w = g.weight("w", Weight::with_data(DType::F32, [rows, columns], bytes.clone()));
        g.output("y", w.mul_mat_sparse(x, mask, None));
        let graph = g.finish().unwrap();
        let backend = Backend::builder().threads(2).topology(two_nodes(first, second));
        let backend = backend.numa(NumaMode::Distribute).build().unwrap();
        let ((), bound) = record_bound_pages(|| {
            let mut session = Session::new(&Scheduler::new(backend)).unwrap();
            session.use_graph(graph).unwrap();
        });
        assert_eq!(bound.len(), 1, "{bound:?}");
        assert!(bound[0].interleaved && bound[0].nodes == [0, 1], "{bound:?}");
        assert!(bound[0].addresses.len() + (8 << 10) >= bytes.len(), "{bound:?}");
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn bound_weights_give_the_same_results() {
    let test = || {
        let [first, second, ..] = affinity()[..] else { return };
        let (rows, columns) = (384, 512);
        let weights: Vec<f32> =
            (0..3 * rows * columns).map(|i| ((i * 7919) % 1013) as f32 / 506.0 - 1.0).collect();
        let graph = |experts: bool| {
            let g = GraphBuilder::new();
            let x = g.input("x", DType::F32, [1, columns]);
            let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
            if experts {
                let w = g.weight("w", Weight::with_data(DType::F32, [3, rows, columns], bytes));
                let ids = g.input("ids", DType::I32, [1, 2]);
                g.output("y", w.mul_mat_id(x.reshape([1, 1, columns]), ids));
            } else {
                let w = g.weight("w", Weight::with_data(DType::F32, [3 * rows, columns], bytes));
                g.output("y", w.mul_mat(x));
            }
            g.finish().unwrap()
        };
        for experts in [false, true] {
            let run = |backend: Backend| -> Vec<f32> {
                let mut session = Session::new(&Scheduler::new(backend)).unwrap();
                session.use_graph(graph(experts)).unwrap();
                let x: Vec<f32> = (0..columns).map(|i| (i % 17) as f32 - 8.0).collect();
                session.set("x", &x[..]).unwrap();
                if experts {
                    session.set("ids", &[2i32, 0]).unwrap();
                }
                session.start().unwrap();
                session.read("y").unwrap()
            };
            let builder = || Backend::builder().threads(2).topology(two_nodes(first, second));
            let wanted = run(builder().build().unwrap());
            for mode in NumaMode::ALL {
                let backend = builder().numa(mode).build().unwrap();
                assert!(backend.numa().is_some(), "{mode}");
                let (found, bound) = record_bound_pages(|| run(backend));
                assert_eq!(found, wanted, "{mode}, experts: {experts}");
                assert_bound(&bound, mode, experts, 4 * weights.len());
            }
        }
    };
    std::thread::spawn(test).join().unwrap();
}
