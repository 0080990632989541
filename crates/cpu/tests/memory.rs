//! B1, B2, K7: the memory of the CPU backend is freed exactly once, wrapped memory is used in place and dropped with its
//! owner.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![allow(unsafe_code, reason = "memory of the caller")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_cpu::{ALIGNMENT, Backend};
use quadriga_graph::{Attention, DType, Data, Graph, GraphBuilder, Op, Weight};
use quadriga_runtime::{
    Backend as _, Layout, RankGroups, Region, Scheduler, SplitSource, TensorPlace, Usage, compute_once,
};

/// Bytes that count how often they are dropped.
struct Owner {
    bytes: Vec<u8>,
    drops: Arc<AtomicUsize>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsMut<[u8]> for Owner {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

fn owner(bytes: usize) -> (Owner, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    (Owner { bytes: vec![1; bytes], drops: Arc::clone(&drops) }, drops)
}

#[test]
fn b1_buffers_are_freed_once_whatever_their_size_and_use() {
    let cpu = Backend::builder().threads(1).build().unwrap();
    assert_eq!(cpu.allocated_bytes(), 0);
    let mut buffers = Vec::new();
    let mut total = 0;
    for usage in [Usage::Weights, Usage::State, Usage::Compute, Usage::Staging] {
        // Slabs of states, the heap and mappings.
        for bytes in [0, 1, 100, 20 << 10, 1 << 20, 3 << 20] {
            let buffer = cpu.allocate(bytes, usage).unwrap();
            assert!(bytes == 0 || buffer.address().is_multiple_of(ALIGNMENT as u64));
            buffer.clear(0, bytes).unwrap();
            buffers.push((Arc::clone(&buffer), bytes));
            buffers.push((buffer, 0));
            total += bytes;
        }
    }
    assert_eq!(cpu.allocated_bytes(), total);
    let mut addresses: Vec<_> = buffers
        .iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(b, bytes)| (b.address(), *bytes as u64))
        .collect();
    addresses.sort_unstable();
    assert!(addresses.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "buffers are disjoint");
    // The second handle of each goes last.
    buffers.retain(|(_, bytes)| *bytes == 0);
    assert_eq!(cpu.allocated_bytes(), total);
    drop(buffers);
    assert_eq!(cpu.allocated_bytes(), 0);
}

#[test]
fn b1_mapped_and_wrapped_memory_is_dropped_with_its_owner_exactly_once() {
    let cpu = Backend::builder().threads(1).build().unwrap();
    let (bytes, drops) = owner(64);
    let data = Data::new(Arc::new(bytes));
    let mapped = cpu.map(&data).unwrap();
    drop(data);
    assert_eq!((drops.load(Ordering::Relaxed), cpu.allocated_bytes()), (0, 0));
    drop(mapped);
    assert_eq!(drops.load(Ordering::Relaxed), 1);

    let (bytes, drops) = owner(64);
    let wrapped = cpu.wrap(bytes);
    let other = Arc::clone(&wrapped);
    drop(wrapped);
    assert_eq!((drops.load(Ordering::Relaxed), cpu.allocated_bytes()), (0, 0));
    other.write(3, &[7]).unwrap();
    drop(other);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

#[test]
fn b1_the_owner_of_a_sessions_weight_is_dropped_once_and_all_memory_is_freed() {
    let cpu = Arc::new(Backend::builder().threads(1).plain_weights(true).build().unwrap());
    let (bytes, drops) = owner(64 * 64 * 4);
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::with_data(DType::F32, [64, 64], Data::new(Arc::new(bytes))));
    let state = g.state("s", DType::F32, [1, 64]);
    g.output("y", w.mul_mat(g.input("x", DType::F32, [1, 64])).add(state));
    let plan = Scheduler::new(Arc::clone(&cpu)).plan(g.finish().unwrap()).unwrap();
    let mut session = plan.session().unwrap();
    session.run(&[("x", &[1.0f32; 64])]).unwrap();
    let work = cpu.work_bytes();
    assert_eq!(cpu.allocated_bytes(), plan.bytes()[0].total() as usize);
    assert_eq!(plan.bytes()[0].mapped, 64 * 64 * 4);
    drop(plan);
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(session);
    assert_eq!((drops.load(Ordering::Relaxed), cpu.allocated_bytes() - work), (1, 0));
}

#[test]
fn k7_a_buffer_over_a_pointer_is_written_in_place() {
    let cpu = Backend::builder().threads(2).build().unwrap();
    let mut memory = vec![0.0f32; 3 * 64];
    memory[..64].fill(2.0);
    let pointer = memory.as_mut_ptr();
    let drops = Arc::new(AtomicUsize::new(0));
    // SAFETY: the vector outlives the buffer, and is not touched before the run is over.
    let buffer = unsafe {
        cpu.wrap_pointer(pointer.cast(), 3 * 256, Owner { bytes: Vec::new(), drops: Arc::clone(&drops) })
    };
    assert_eq!((buffer.address(), buffer.bytes()), (pointer.addr() as u64, 768));
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [64]);
    g.output("z", x.sqr().add(x));
    let graph = g.finish().unwrap();
    let nodes: Vec<_> = graph.node_ids().collect();
    let place = |id: quadriga_graph::TensorId| {
        let region = Region::new(Arc::clone(&buffer), id.index() * 256, 256).ok()?;
        Some(TensorPlace { region, layout: Layout::Plain })
    };
    let split = SplitSource {
        graph: &graph,
        nodes: &nodes,
        place: &place,
        kept: &|_| true,
        scratch: None,
        ranks: RankGroups::NONE,
    };
    compute_once(&cpu, &split).unwrap();
    buffer.clear(0, 4).unwrap();
    drop(buffer);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    assert_eq!((memory[0], memory[1], memory[64], memory[128]), (0.0, 2.0, 4.0, 6.0));
}

/// Matmuls with packed weights of several types, experts, attention, norms and a state.
fn model(rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [rows, 256]);
    for (layer, dtype) in [DType::Q8_0, DType::F16, DType::Q4_K, DType::F32].into_iter().enumerate() {
        let bytes = dtype.row_bytes(256 * 256).unwrap();
        let w = g.weight(&format!("w{layer}"), Weight::with_data(dtype, [256, 256], vec![0; bytes]));
        x = g.mul_mat(w, x.rms_norm(1e-5)).add(x);
    }
    let bytes = DType::Q8_0.row_bytes(4 * 256 * 256).unwrap();
    let experts = g.weight("experts", Weight::with_data(DType::Q8_0, [4, 256, 256], vec![0; bytes]));
    let ids = g.constant("ids", DType::I32, [rows, 2], vec![1; 2 * rows].as_slice());
    g.output("experts", g.apply(Op::MulMatId, &[experts, x.reshape([rows, 1, 256]), ids]));
    let cache = g.state("cache", DType::F16, [2, 300, 64]);
    let q = x.reshape([rows, 4, 64]).permute([1, 0, 2]);
    let attention =
        Attention { scale: 1.0, soft_cap: None, mask: false, spans: false, sinks: false, pages: false };
    g.output("y", g.apply(Op::Attention(attention), &[q, cache, cache]));
    g.finish().unwrap()
}

#[test]
fn s7_the_forecast_of_a_plan_equals_the_allocation_work_memory_included() {
    for (threads, fuse, plain) in [(1, true, false), (2, true, false), (5, false, false), (3, true, true)] {
        for rows in [1, 3, 40] {
            let builder = Backend::builder().threads(threads).fuse(fuse).plain_weights(plain);
            let cpu = Arc::new(builder.build().unwrap());
            let plan = Scheduler::new(Arc::clone(&cpu)).plan(model(rows)).unwrap();
            assert_eq!(cpu.allocated_bytes(), 0, "planning allocates nothing");
            let mut session = plan.session().unwrap();
            session.run(&[("x", &vec![0.5f32; rows * 256])]).unwrap();
            let bytes = &plan.bytes()[0];
            assert_eq!(bytes.work as usize, cpu.work_bytes(), "{threads} threads, {rows} rows: {bytes:?}");
            assert_eq!(bytes.total() as usize, cpu.allocated_bytes(), "{threads} threads, {rows} rows");
        }
    }
}

/// Inputs must be set again after their memory was given back; nothing else changes, with several plans, too.
#[test]
fn discarded_values_are_gone_and_the_session_goes_on() {
    let graph = |rows: usize| {
        let g = GraphBuilder::new();
        let w = g.weight("w", Weight::with_data(DType::F32, [8, 64], vec![0; 8 * 64 * 4]));
        let x = g.input("x", DType::F32, [rows, 64]);
        g.output("y", w.mul_mat(x).add(x.scale(2.0).slice(1, 0, 8)));
        g.finish().unwrap()
    };
    let cpu = Backend::builder().threads(2).build().unwrap();
    let x: Vec<f32> = (0..20_000 * 64).map(|i| (i % 977) as f32).collect();
    let mut session = Scheduler::new(cpu).plan(graph(20_000)).unwrap().session().unwrap();
    session.run(&[("x", &x)]).unwrap();
    let whole = session.read::<f32>("y").unwrap();
    session.discard_values().unwrap();
    assert!(session.read::<f32>("y").unwrap_err().to_string().contains('y'));
    assert!(session.run(&[]).unwrap_err().to_string().contains('x'), "inputs are gone");
    session.run(&[("x", &x)]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), whole);
    session.use_graph(graph(3)).unwrap();
    session.run(&[("x", &x[..3 * 64].to_vec())]).unwrap();
    session.discard_values().unwrap();
    session.use_graph(graph(20_000)).unwrap();
    assert!(session.run(&[]).is_err());
    session.run(&[("x", &x)]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), whole);
}
