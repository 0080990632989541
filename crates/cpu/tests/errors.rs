//! Invalid data is an error that names the node and the value, in release builds too; the program can be run again
//! afterwards. A failed allocation is an error and changes nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use common::{Placed, bytes_of, bytes_of_i32, floats};
use quadriga_cpu::Backend;
use quadriga_cpu::isa::Isa;
use quadriga_graph::{Attention, DType, Data, Graph, GraphBuilder, Op, TensorId, TensorKind, Weight};
use quadriga_runtime::{
    Backend as _, BackendError, Layout, RankGroups, Region, SplitSource, TensorPlace, Usage, WeightLayout,
    compute_once,
};

/// Runs a graph with invalid indices, then with valid ones.
fn refuses(graph: &Graph, input: &str, bad: &[i32], good: &[i32], names: &str) {
    for isa in Isa::available() {
        for (threads, packed) in [(1, true), (3, true), (2, false)] {
            let backend = Backend::builder().isa(isa).threads(threads).build().unwrap();
            let mut placed = Placed::new(graph, &backend, packed).unwrap();
            for name in ["x", "k", "v", "target"] {
                if let Some(id) = graph.leaf(name) {
                    placed.set(name, &bytes_of(&vec![1.0; graph[id].elements()])).unwrap();
                }
            }
            placed.set(input, &bytes_of_i32(bad)).unwrap();
            let error = placed.run().unwrap_err();
            let BackendError::Node { node, reason, .. } = &error else { panic!("{error}") };
            assert!(node.contains("bad") && reason.contains(names), "{isa}, {threads} threads: {error}");
            placed.set(input, &bytes_of_i32(good)).unwrap();
            placed.run().unwrap();
        }
    }
}

#[test]
fn indices_of_rows_to_read_are_checked() {
    let build = |weights: bool| {
        let g = GraphBuilder::new();
        let ids = g.input("ids", DType::I32, [3]);
        let x = if weights {
            let w = g.weight("w", Weight::with_data(DType::F32, [10, 32], vec![0; 10 * 32 * 4]));
            g.output("product", g.mul_mat(w, g.input("x", DType::F32, [1, 32])));
            w
        } else {
            g.input("x", DType::F32, [10, 32])
        };
        g.output("y", x.get_rows(ids).named("bad"));
        g.finish().unwrap()
    };
    for weights in [false, true] {
        for (wrong, text) in [(10, "10"), (-1, "-1"), (i32::MAX, "2147483647"), (i32::MIN, "-2147483648")] {
            refuses(&build(weights), "ids", &[1, wrong, 2], &[1, 9, 2], text);
        }
    }
}

#[test]
fn indices_of_rows_to_write_are_checked() {
    let g = GraphBuilder::new();
    let target = g.state("cache", DType::F16, [10, 300]);
    let (x, ids) = (g.input("x", DType::F32, [3, 300]), g.input("ids", DType::I32, [3]));
    g.output("y", target.set_rows(x, ids).named("bad"));
    let graph = g.finish().unwrap();
    for (wrong, text) in [(10, "10"), (-1, "-1"), (i32::MIN, "-2147483648")] {
        refuses(&graph, "ids", &[1, 2, wrong], &[1, 2, 9], text);
    }
}

#[test]
fn indices_of_experts_are_checked() {
    for dtype in [DType::F32, DType::Q8_0, DType::F16] {
        let g = GraphBuilder::new();
        let bytes = dtype.row_bytes(4 * 40 * 64).unwrap();
        let w = g.weight("w", Weight::with_data(dtype, [4, 40, 64], vec![0; bytes]));
        let (x, ids) = (g.input("x", DType::F32, [2, 1, 64]), g.input("ids", DType::I32, [2, 2]));
        g.output("y", g.apply(Op::MulMatId, &[w, x, ids]).named("bad"));
        let graph = g.finish().unwrap();
        // −1 is an expert that is elsewhere.
        for (wrong, text) in [(4, "4"), (-2, "-2"), (i32::MAX, "2147483647")] {
            refuses(&graph, "ids", &[0, 1, 2, wrong], &[0, 1, 2, -1], text);
        }
    }
}

#[test]
fn spans_are_checked_against_the_keys() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 2, 32]);
    let (k, v) = (g.input("k", DType::F32, [1, 5, 32]), g.input("v", DType::F32, [1, 5, 32]));
    let spans = g.input("spans", DType::I32, [2, 2]);
    let attention =
        Attention { scale: 1.0, soft_cap: None, mask: false, spans: true, sinks: false, pages: false };
    g.output("y", g.apply(Op::Attention(attention), &[x, k, v, spans]).named("bad"));
    let graph = g.finish().unwrap();
    for (wrong, text) in [(6, "6"), (-1, "-1")] {
        refuses(&graph, "spans", &[0, 3, 0, wrong], &[0, 3, 2, 5], text);
    }
}

#[test]
fn page_tables_are_checked_before_they_are_used() {
    let build = |spans: Option<&[i32]>, pages: Option<&[i32]>| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [2, 2, 64]);
        let (k, v) = (g.input("k", DType::F32, [1, 200, 64]), g.input("v", DType::F32, [1, 200, 64]));
        let given = |name: &str, dims: [usize; 2], values: Option<&[i32]>| match values {
            Some(values) => g.constant(name, DType::I32, dims, values),
            None => g.input(name, DType::I32, dims),
        };
        let (spans, pages) = (given("spans", [2, 3], spans), given("pages", [2, 2], pages));
        let attention =
            Attention { scale: 1.0, soft_cap: None, mask: false, spans: true, sinks: false, pages: true };
        g.output("y", g.apply(Op::Attention(attention), &[x, k, v, spans, pages]).named("bad"));
        g.finish().unwrap()
    };
    let graph = build(None, Some(&[0, 1, 2, 0]));
    let wrong: [([i32; 3], &str); 4] =
        [([0, 129, 1], "129"), ([-1, 3, 1], "-1"), ([0, 1, 2], "2"), ([0, 1, -1], "-1")];
    for ([first, end, table], text) in wrong {
        refuses(&graph, "spans", &[0, 3, 0, first, end, table], &[0, 3, 0, 0, 128, 1], text);
    }
    // The last 8 of 200 rows are no whole page. Entries that no span covers may be anything.
    let graph = build(Some(&[0, 1, 0, 64, 65, 1]), None);
    for (page, text) in [(3, "3"), (-1, "-1"), (i32::MAX, "2147483647")] {
        refuses(&graph, "pages", &[0, 9, 9, page], &[0, 9, -4, 2], text);
    }
}

#[test]
fn of_two_rows_with_one_index_the_last_wins_on_any_number_of_threads() {
    let g = GraphBuilder::new();
    let target = g.state("cache", DType::F32, [4, 700]);
    let (x, ids) = (g.input("x", DType::F32, [3, 700]), g.input("ids", DType::I32, [3]));
    g.output("y", target.set_rows(x, ids));
    let graph = g.finish().unwrap();
    let values: Vec<f32> = (0..2100).map(|i| i as f32).collect();
    for threads in [1, 2, 3, 8] {
        let backend = Backend::builder().threads(threads).build().unwrap();
        let mut placed = Placed::new(&graph, &backend, true).unwrap();
        placed.set("x", &bytes_of(&values)).unwrap();
        placed.set("ids", &bytes_of_i32(&[2, 1, 2])).unwrap();
        placed.run().unwrap();
        let result = floats(&placed.read(graph.output("y").unwrap()));
        assert_eq!(result[700..1400], values[700..1400]);
        assert_eq!(result[1400..2100], values[1400..2100]);
        assert!(result[..700].iter().chain(&result[2100..]).all(|v| *v == 0.0));
    }
}

#[test]
fn too_large_an_allocation_is_an_error_with_the_requested_and_free_bytes() {
    let backend = Backend::new().unwrap();
    for bytes in [1 << 45, usize::MAX / 2, usize::MAX] {
        let error = backend.allocate(bytes, Usage::Compute).unwrap_err();
        let BackendError::OutOfMemory { requested, free, .. } = error else { panic!("{error}") };
        assert_eq!(requested, bytes as u64);
        assert!(!cfg!(target_os = "linux") || free.is_some_and(|free| free < requested));
    }
    assert!(backend.allocate(1 << 20, Usage::Compute).is_ok());
}

#[test]
fn reads_and_writes_stay_inside_their_buffer() {
    let backend = Backend::new().unwrap();
    let buffer = backend.allocate(100, Usage::Compute).unwrap();
    for (offset, len) in [(0, 101), (100, 1), (usize::MAX, 2), (51, 50)] {
        let mut bytes = vec![0; len];
        assert!(matches!(buffer.read(offset, &mut bytes), Err(BackendError::OutOfBounds { .. })));
        assert!(matches!(buffer.write(offset, &bytes), Err(BackendError::OutOfBounds { .. })));
        assert!(matches!(buffer.clear(offset, len), Err(BackendError::OutOfBounds { .. })));
    }
    buffer.write(50, &[7; 50]).unwrap();
    let mut bytes = [0; 3];
    buffer.read(97, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 3]);
}

#[test]
fn mapped_bytes_are_used_in_place_and_never_written() {
    let backend = Backend::new().unwrap();
    let values: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let data = Data::from(values.as_slice());
    let Some(buffer) = backend.map(&data) else { return };
    assert!(matches!(buffer.write(0, &[0; 4]), Err(BackendError::Failed { .. })));
    let mut bytes = [0; 4];
    buffer.read(8, &mut bytes).unwrap();
    assert_eq!(f32::from_le_bytes(bytes), 2.0);

    // A node whose result would be in the map is refused.
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [64]).silu());
    let graph = g.finish().unwrap();
    let region = Region::new(Arc::clone(&buffer), 0, 256).unwrap();
    let place = |_: TensorId| Some(TensorPlace { region: region.clone(), layout: Layout::Plain });
    let nodes: Vec<_> = graph.node_ids().collect();
    let split = SplitSource {
        graph: &graph,
        nodes: &nodes,
        place: &place,
        kept: &|_| true,
        scratch: None,
        ranks: RankGroups::NONE,
    };
    assert!(matches!(compute_once(&backend, &split), Err(BackendError::Unsupported { .. })));
}

#[test]
fn a_place_that_changes_from_call_to_call_is_asked_for_once() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 64]);
    let w = g.weight("w", Weight::with_data(DType::F32, [32, 64], vec![0; 32 * 64 * 4]));
    g.output("y", g.mul_mat(w, x.rms_norm(1e-5)));
    let graph = g.finish().unwrap();
    let backend = Backend::builder().threads(1).fuse(true).build().unwrap();
    let y = graph.output("y").unwrap();
    let places: HashMap<TensorId, TensorPlace> = graph
        .tensor_ids()
        .map(|id| {
            let tensor = &graph[id];
            let uses: &[(&Op, usize)] = if graph.data(id).is_some() { &[(&Op::MulMat, 0)] } else { &[] };
            let WeightLayout { layout, bytes, .. } = backend.weight_layout(tensor, uses);
            let buffer = backend.allocate(bytes, Usage::Compute).unwrap();
            let region = Region::new(buffer, 0, bytes).unwrap();
            if let Some(data) = graph.data(id) {
                backend.load_weight(tensor, layout, &data.bytes(), &region).unwrap();
            }
            (id, TensorPlace { region, layout })
        })
        .collect();
    let nodes: Vec<_> = graph.node_ids().collect();
    let x = graph.leaf("x").unwrap();
    // The call with this number gives a region far outside the buffer, all others the right one.
    for wrong in 0..3 {
        let calls = Cell::new(0);
        let place = |id: TensorId| {
            let mut place = places.get(&id).cloned()?;
            if id == x {
                if calls.get() == wrong {
                    place.region.offset = 1 << 40;
                }
                calls.set(calls.get() + 1);
            }
            Some(place)
        };
        let split = SplitSource {
            graph: &graph,
            nodes: &nodes,
            place: &place,
            kept: &|id| id == y,
            scratch: None,
            ranks: RankGroups::NONE,
        };
        let compiled = backend.compile(&split);
        assert_eq!(calls.get(), 1, "x is an input of one node");
        match compiled {
            Err(error) => assert!(wrong == 0 && matches!(error, BackendError::OutOfBounds { .. }), "{error}"),
            Ok(mut program) => {
                assert!(wrong > 0, "the first answer is out of bounds");
                backend.queue().unwrap().run(&mut *program).unwrap();
            }
        }
    }
}

#[test]
fn results_that_overlap_the_end_of_a_packed_weight_are_refused() {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::with_data(DType::Q8_0, [8, 64], vec![0; 8 * 2 * 34]));
    g.output("y", g.mul_mat(w, g.input("x", DType::F32, [1, 64])));
    let graph = g.finish().unwrap();
    let backend = Backend::builder().threads(1).build().unwrap();
    let weight = graph.leaf("w").unwrap();
    let WeightLayout { layout, bytes, .. } = backend.weight_layout(&graph[weight], &[(&Op::MulMat, 0)]);
    assert!(bytes > graph[weight].bytes(), "packing fills up the rows");
    let buffer = backend.allocate(bytes + 1024, Usage::Compute).unwrap();
    let run = |output: usize| {
        let place = |id: TensorId| {
            let tensor = &graph[id];
            let (offset, bytes, layout) = match tensor.kind() {
                TensorKind::Weight => (0, bytes, layout),
                TensorKind::Input => (bytes.next_multiple_of(64) + 512, tensor.bytes(), Layout::Plain),
                _ => (output, tensor.bytes(), Layout::Plain),
            };
            Some(TensorPlace { region: Region::new(Arc::clone(&buffer), offset, bytes).ok()?, layout })
        };
        let nodes: Vec<_> = graph.node_ids().collect();
        let split = SplitSource {
            graph: &graph,
            nodes: &nodes,
            place: &place,
            kept: &|_| true,
            scratch: None,
            ranks: RankGroups::NONE,
        };
        compute_once(&backend, &split)
    };
    assert!(run(bytes.next_multiple_of(64)).is_ok());
    let end = bytes / 64 * 64 - 64;
    assert!(matches!(run(end), Err(BackendError::Unsupported { .. })));
}

#[test]
fn results_that_overlap_inputs_partly_are_refused() {
    let backend = Backend::new().unwrap();
    let g = GraphBuilder::new();
    let (x, y) = (g.input("x", DType::F32, [64]), g.input("y", DType::F32, [64]));
    g.output("z", x.add(y));
    let graph = g.finish().unwrap();
    let buffer = backend.allocate(1024, Usage::Compute).unwrap();
    let run = |offset: usize| {
        let place = |id: TensorId| {
            let at = [0, 512, offset][id.index()];
            Some(TensorPlace {
                region: Region::new(Arc::clone(&buffer), at, 256).ok()?,
                layout: Layout::Plain,
            })
        };
        let nodes: Vec<_> = graph.node_ids().collect();
        compute_once(
            &backend,
            &SplitSource {
                graph: &graph,
                nodes: &nodes,
                place: &place,
                kept: &|_| true,
                scratch: None,
                ranks: RankGroups::NONE,
            },
        )
    };
    assert!(run(0).is_ok() && run(512).is_ok() && run(256).is_ok());
    for offset in [4, 128, 508, 600] {
        assert!(matches!(run(offset), Err(BackendError::Unsupported { .. })), "{offset}");
    }
}

#[test]
fn the_work_memory_only_grows_and_threads_can_change_at_any_time() {
    let build = |rows: usize| {
        let g = GraphBuilder::new();
        let w = g.weight("w", Weight::with_data(DType::Q8_0, [64, 256], vec![0; 64 * 8 * 34]));
        g.output("y", g.mul_mat(w, g.input("x", DType::F32, [rows, 256])));
        g.finish().unwrap()
    };
    let (small, large) = (build(1), build(900));
    let backend = Backend::builder().threads(2).build().unwrap();
    let mut first = Placed::new(&large, &backend, true).unwrap();
    first.set("x", &bytes_of(&vec![1.0; 900 * 256])).unwrap();
    first.run().unwrap();
    let most = backend.work_bytes();
    assert!(most > 0);
    let mut second = Placed::new(&small, &backend, true).unwrap();
    second.set("x", &bytes_of(&[1.0; 256])).unwrap();
    for threads in [1, 8, 3, 1] {
        backend.set_threads(threads).unwrap();
        assert_eq!(backend.threads(), threads);
        first.run().unwrap();
        second.run().unwrap();
        assert!(backend.work_bytes() >= most);
    }
    assert!(backend.set_threads(0).is_err());
    assert_eq!(backend.threads(), 1);
}

#[test]
fn two_threads_share_one_backend_and_its_weights() {
    let g = GraphBuilder::new();
    let values: Vec<f32> = (0..64 * 64).map(|i| (i % 7) as f32).collect();
    let w = g.weight("w", Weight::with_data(DType::F32, [64, 64], values.as_slice()));
    g.output("y", g.mul_mat(w, g.input("x", DType::F32, [4, 64])));
    let graph = g.finish().unwrap();
    let backend = Backend::builder().threads(2).build().unwrap();
    std::thread::scope(|scope| {
        for factor in [1.0, 2.0, 3.0] {
            let (graph, backend) = (&graph, &backend);
            scope.spawn(move || {
                let mut placed = Placed::new(graph, backend, true).unwrap();
                placed.set("x", &bytes_of(&[factor; 256])).unwrap();
                for _ in 0..50 {
                    placed.run().unwrap();
                    let result = floats(&placed.read(graph.output("y").unwrap()));
                    let right: f32 = (0..64).map(|i| factor * (i % 7) as f32).sum();
                    assert_eq!(result[0], right);
                }
            });
        }
    });
}
