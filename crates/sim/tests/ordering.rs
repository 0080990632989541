//! Accesses to device memory must be ordered, whatever the timing.
#![allow(clippy::unwrap_used, reason = "tests")]

use quadriga_runtime::{Backend, BackendError, Region, Usage};
use quadriga_sim::Sim;

fn region(backend: &dyn Backend) -> Region {
    Region { buffer: backend.allocate(64, Usage::Compute).unwrap(), offset: 0, bytes: 64 }
}

fn is_unordered(result: Result<(), BackendError>) -> bool {
    result.is_err_and(|error| error.to_string().contains("without waiting for"))
}

#[test]
fn a_queue_that_does_not_wait_for_another_is_refused() {
    let sim = Sim::new("sim:0").check_order(true).build();
    let (one, two) = (region(&*sim), region(&*sim));
    let (mut upload, mut compute) = (sim.queue().unwrap(), sim.queue().unwrap());
    upload.write(&one, &[1; 64]).unwrap();
    assert!(is_unordered(compute.copy(&one, &two).map(|_| ())));

    // With an event between them it is right.
    let done = sim.event(false).unwrap();
    upload.write(&one, &[2; 64]).unwrap();
    upload.record(&*done).unwrap();
    compute.wait(&*done).unwrap();
    assert!(compute.copy(&one, &two).unwrap());
    // The next write must wait for that read.
    assert!(is_unordered(upload.write(&one, &[3; 64])));
    compute.synchronize().unwrap();
    upload.write(&one, &[4; 64]).unwrap();
}

#[test]
fn an_event_orders_only_what_came_before_it() {
    let sim = Sim::new("sim:0").check_order(true).build();
    let (one, two) = (region(&*sim), region(&*sim));
    let (mut upload, mut compute) = (sim.queue().unwrap(), sim.queue().unwrap());
    let early = sim.event(false).unwrap();
    upload.record(&*early).unwrap();
    upload.write(&one, &[1; 64]).unwrap();
    compute.wait(&*early).unwrap();
    assert!(is_unordered(compute.copy(&one, &two).map(|_| ())));
}

#[test]
fn the_host_must_wait_before_it_touches_what_a_queue_uses() {
    let sim = Sim::new("sim:0").check_order(true).build();
    let one = region(&*sim);
    let mut queue = sim.queue().unwrap();
    queue.write(&one, &[1; 64]).unwrap();
    let mut bytes = [0; 64];
    assert!(is_unordered(one.buffer.read(0, &mut bytes)));
    queue.synchronize().unwrap();
    one.buffer.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 64]);
    // Other bytes of the same buffer are nobody's business.
    let half = Region { buffer: one.buffer.clone(), offset: 32, bytes: 32 };
    queue.write(&half, &[2; 32]).unwrap();
    one.buffer.write(0, &[3; 32]).unwrap();
}

#[test]
fn a_device_that_does_not_check_takes_anything() {
    let sim = Sim::new("sim:0").check_order(false).build();
    let (one, two) = (region(&*sim), region(&*sim));
    let (mut upload, mut compute) = (sim.queue().unwrap(), sim.queue().unwrap());
    upload.write(&one, &[1; 64]).unwrap();
    assert!(compute.copy(&one, &two).unwrap());
}

#[test]
fn a_refused_command_counts_as_no_access() {
    let sim = Sim::new("sim:0").check_order(true).build();
    let (one, two) = (region(&*sim), region(&*sim));
    let (mut upload, mut compute) = (sim.queue().unwrap(), sim.queue().unwrap());
    upload.write(&two, &[1; 64]).unwrap();
    // It may read `one`, but not write `two`.
    assert!(is_unordered(compute.copy(&one, &two).map(|_| ())));
    upload.write(&one, &[2; 64]).unwrap();
}
