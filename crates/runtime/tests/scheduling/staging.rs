//! S7: the forecast has the staging memory of copies, of streamed weights and of pending reads.

use std::sync::Arc;

use quadriga_runtime::{Backend, Plan, Scheduler, Session, WeightStreaming};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{chain, chain_input, device, host};
use crate::misbehaving::Misbehaving;

fn cpu() -> Arc<quadriga_cpu::Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())
}

/// Weights, and with them the nodes that read them, on two backends in turn.
fn alternating(a: Arc<dyn Backend>, b: Arc<dyn Backend>) -> Plan {
    let rule = |name: &str| name.strip_prefix("w.").map(|layer| layer.parse::<usize>().unwrap() % 2);
    Scheduler::new([a, b]).place(rule).weight_streaming(None).plan(chain(6)).unwrap()
}

/// Bytes on a backend: all that are forecast.
fn forecast(plan: &Plan, backend: usize) -> u64 {
    let bytes = &plan.bytes()[backend];
    bytes.total() + bytes.staging
}

fn run(session: &mut Session) {
    session.run(&[("x", &chain_input())]).unwrap();
}

#[test]
fn s7_staging_memory_of_copies_is_forecast() {
    for (peers, reach) in [([true, true], true), ([true, false], true), ([false, false], false)] {
        let sim = |name: &str, peers: bool| {
            let settings = Sim::new(name);
            if peers { settings.device() } else { settings.without_peers().device() }
        };
        let (a, b) = (sim("a", peers[0]), sim("b", peers[1]));
        let plan = alternating(a.clone(), b.clone());
        let staging: Vec<u64> = plan.bytes().iter().map(|bytes| bytes.staging).collect();
        // Three results of 4 × 8 numbers go to b, two come back.
        assert_eq!(staging, if reach { [0, 0] } else { [3 * 128, 2 * 128] });
        let mut session = plan.session().unwrap();
        run(&mut session);
        assert_eq!(
            [a.used_bytes(), b.used_bytes()],
            [0, 1].map(|backend| forecast(&plan, backend)),
            "{peers:?}"
        );
        let allocations = || [&a, &b].map(|sim| sim.counts().of(FaultPoint::Allocation));
        let before = allocations();
        run(&mut session);
        assert_eq!(allocations(), before);
    }
    // As long as a device does not say otherwise, it reaches what the host can address.
    let plain = |device: Arc<dyn Backend>| -> Arc<dyn Backend> { Arc::new(Misbehaving::new(device)) };
    for (other, reach) in [(device("b"), false), (host("b"), true)] {
        let plan = alternating(plain(device("a")), plain(other));
        assert_eq!(plan.bytes().iter().all(|bytes| bytes.staging == 0), reach);
    }
    // Where no device reaches host memory either, the session has the staging memory, and no device.
    let alone = |name| Sim::new(name).isolated().device();
    let (a, b) = (alone("a"), alone("b"));
    let plan = alternating(a.clone(), b.clone());
    let mut session = plan.session().unwrap();
    run(&mut session);
    for (backend, sim) in [&a, &b].into_iter().enumerate() {
        let bytes = &plan.bytes()[backend];
        assert_eq!((sim.used_bytes(), bytes.staging), (bytes.total(), [3 * 128, 2 * 128][backend]));
    }
}

#[test]
fn s7_copies_between_a_device_and_the_cpu_need_no_staging_memory() {
    for device_first in [true, false] {
        let (sim, cpu) = (Sim::new("a").device(), cpu());
        let plan = match device_first {
            true => alternating(sim.clone(), cpu.clone()),
            false => alternating(cpu.clone(), sim.clone()),
        };
        run(&mut plan.session().unwrap());
        let mut session = plan.session().unwrap();
        run(&mut session);
        let (of_sim, of_cpu) = if device_first { (0, 1) } else { (1, 0) };
        assert!(plan.bytes().iter().all(|bytes| bytes.staging == 0));
        assert_eq!(sim.used_bytes(), forecast(&plan, of_sim));
        assert_eq!(cpu.allocated_bytes() as u64, forecast(&plan, of_cpu));
    }
}

#[test]
fn s7_staging_memory_of_streamed_weights_is_forecast() {
    let always = WeightStreaming { operations_per_byte: 0, min_operations: 0 };
    let plan = |device: Arc<dyn Backend>, host: Arc<dyn Backend>| {
        let scheduler = Scheduler::new([device, host]).weight_streaming(Some(always));
        let plan = scheduler.place(|name| name.starts_with('w').then_some(1)).plan(chain(6)).unwrap();
        assert!(plan.streams_weights());
        plan
    };
    // The host maps no data: the device copies the weights from its staging memory.
    let (device, host) = (Sim::new("a").device(), Sim::new("b").synchronous().host().device());
    let streamed = plan(device.clone(), host.clone());
    assert_eq!(streamed.bytes()[0].staging, 6 * 256);
    let mut session = streamed.session().unwrap();
    run(&mut session);
    let used = [device.used_bytes(), host.used_bytes()];
    assert_eq!(used, [0, 1].map(|backend| forecast(&streamed, backend)));
    // The CPU does.
    let (device, cpu) = (Sim::new("a").device(), cpu());
    let streamed = plan(device.clone(), cpu.clone());
    assert_eq!(streamed.bytes()[0].staging, 0);
    let mut session = streamed.session().unwrap();
    run(&mut session);
    assert_eq!(device.used_bytes(), forecast(&streamed, 0));
    assert_eq!(cpu.allocated_bytes() as u64, forecast(&streamed, 1));
}

#[test]
fn s7_staging_memory_of_pending_reads_is_forecast() {
    let (sim, cpu) = (Sim::new("a").device(), cpu());
    let check = |plan: &Plan, allocated: &dyn Fn() -> u64| {
        let outputs = ["y", "no such output"];
        let pending = plan.pending_read_bytes(&outputs);
        assert_eq!(pending, [2 * 128]);
        let mut session = plan.session().unwrap();
        run(&mut session);
        assert_eq!(allocated(), forecast(plan, 0));
        for _ in 0..3 {
            let reads = [session.read_async(&["y"]).unwrap(), session.read_async(&["y"]).unwrap()];
            for read in reads {
                session.finish_read(read, &mut [0; 128]).unwrap();
            }
            assert_eq!(allocated(), forecast(plan, 0) + pending[0]);
        }
    };
    check(&Scheduler::new(sim.clone()).plan(chain(2)).unwrap(), &|| sim.used_bytes());
    check(&Scheduler::new(cpu.clone()).plan(chain(2)).unwrap(), &|| cpu.allocated_bytes() as u64);
}
