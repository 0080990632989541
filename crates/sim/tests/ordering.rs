//! Accesses to device memory must be ordered, whatever the timing.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use quadriga_runtime::{Backend, BackendError, Queue, Region, Usage};
use quadriga_sim::Sim;

fn region(backend: &dyn Backend) -> Region {
    Region { buffer: backend.allocate(64, Usage::Compute).unwrap(), offset: 0, bytes: 64 }
}

/// A device that checks, two places on it, and two queues.
fn checked() -> (Arc<Sim>, [Region; 2], [Box<dyn Queue>; 2]) {
    let sim = Sim::new("sim:0").check_order(true).device();
    let regions = [region(&*sim), region(&*sim)];
    let queues = [sim.queue().unwrap(), sim.queue().unwrap()];
    (sim, regions, queues)
}

fn is_unordered<T>(result: Result<T, BackendError>) -> bool {
    result.is_err_and(|error| error.to_string().contains("without waiting for"))
}

#[test]
fn a_queue_that_does_not_wait_for_another_is_refused() {
    let (_, [one, two], [mut upload, mut compute]) = checked();
    upload.write(&one, &[1; 64]).unwrap();
    assert!(is_unordered(compute.copy(&one, &two)));

    // With an event between them it is right.
    let (sim, [one, two], [mut upload, mut compute]) = checked();
    let done = sim.event(false).unwrap();
    upload.write(&one, &[2; 64]).unwrap();
    upload.record(&*done).unwrap();
    compute.wait(&*done).unwrap();
    assert!(compute.copy(&one, &two).unwrap());
    compute.synchronize().unwrap();
    upload.write(&one, &[4; 64]).unwrap();
    assert_eq!(sim.unordered_access(), None);

    // The next write must wait for that read.
    upload.record(&*done).unwrap();
    compute.wait(&*done).unwrap();
    assert!(compute.copy(&one, &two).unwrap());
    assert!(is_unordered(upload.write(&one, &[3; 64])));
}

#[test]
fn an_event_orders_only_what_came_before_it() {
    let (sim, [one, two], [mut upload, mut compute]) = checked();
    let early = sim.event(false).unwrap();
    upload.record(&*early).unwrap();
    upload.write(&one, &[1; 64]).unwrap();
    compute.wait(&*early).unwrap();
    assert!(is_unordered(compute.copy(&one, &two)));
}

#[test]
fn the_host_must_wait_before_it_touches_what_a_queue_uses() {
    let (sim, [one, _], [mut queue, _]) = checked();
    queue.write(&one, &[1; 64]).unwrap();
    queue.synchronize().unwrap();
    let mut bytes = [0; 64];
    one.buffer.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 64]);
    // Other bytes of the same buffer are nobody's business.
    let half = Region { buffer: one.buffer.clone(), offset: 32, bytes: 32 };
    queue.write(&half, &[2; 32]).unwrap();
    one.buffer.write(0, &[3; 32]).unwrap();
    assert_eq!(sim.unordered_access(), None);
    assert!(is_unordered(one.buffer.read(0, &mut bytes)));
}

#[test]
fn a_device_that_does_not_check_takes_anything() {
    let sim = Sim::new("sim:0").check_order(false).build();
    let (one, two) = (region(&*sim), region(&*sim));
    let (mut upload, mut compute) = (sim.queue().unwrap(), sim.queue().unwrap());
    upload.write(&one, &[1; 64]).unwrap();
    assert!(compute.copy(&one, &two).unwrap());
}

/// A caller that waits after an error and tries again has mended the order: it must not find a device that works.
#[test]
fn after_a_refused_access_everything_is_refused() {
    let (sim, [one, two], [mut upload, mut compute]) = checked();
    upload.write(&one, &[1; 64]).unwrap();
    assert!(is_unordered(compute.copy(&one, &two)));
    let reason = sim.unordered_access().unwrap();
    assert!(reason.contains("reads bytes 0 to 64"), "{reason}");
    sim.clear_faults();
    assert!(is_unordered(upload.synchronize()) && is_unordered(compute.synchronize()));
    assert!(is_unordered(compute.copy(&one, &two).and_then(|_| compute.synchronize())));
    assert!(is_unordered(one.buffer.write(0, &[1; 64])) && is_unordered(sim.event(false)));
    assert!(is_unordered(sim.allocate(64, Usage::Compute)) && is_unordered(sim.queue()));
}
