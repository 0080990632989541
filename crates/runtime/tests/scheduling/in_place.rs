//! G3: every operation that may compute in place does so in a session, with the same results as in memory of its own.

use quadriga_runtime::Scheduler;

use crate::common::{device, host};
use crate::in_place_operations::check_in_place;

#[test]
fn g3_sessions_compute_every_in_place_operation_in_place() {
    let schedulers = [
        Scheduler::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap()),
        Scheduler::new(quadriga_cpu::Backend::builder().threads(3).fuse(false).build().unwrap()),
        Scheduler::new([device("gpu"), host("cpu")]),
    ];
    for scheduler in &schedulers {
        check_in_place(scheduler, 0.0);
    }
}
