//! Schedulers: backends in order of preference, and the caller's settings for placement and memory.

use std::ffi::{c_char, c_void};
use std::sync::Mutex;

use quadriga::graph::TensorId;
use quadriga::runtime::Scheduler;
use quadriga::runtime::memory::packing::Effort;

use crate::arguments::{UserData, array, c_text, text};
use crate::backend::qd_backend;
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::status::{Failure, Outcome, qd_error, qd_status};
use crate::tensor::qd_tensor;

/// Decides where and when each node of a graph runs.
pub struct qd_scheduler {
    _opaque: (),
}

impl Handle for qd_scheduler {
    type Object = Mutex<Scheduler>;
    const NAME: &'static str = "qd_scheduler";
}

/// A scheduler for backends, the most preferred first. Sessions of one scheduler load the same weights only once.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_scheduler_new(
    backends: *const *const qd_backend,
    backend_count: usize,
    error: Option<&mut qd_error>,
) -> *mut qd_scheduler {
    guard::handle(error, || {
        // SAFETY: the rules of the header for arrays.
        let handles = unsafe { array(backends, backend_count, "backends") }?;
        let mut opened = Vec::new();
        for handle in handles {
            let object = handle::get(*handle)?;
            opened.push(std::sync::Arc::clone(&object.backend));
        }
        if opened.is_empty() {
            return Err(Failure::argument("there is no backend to run on: give the scheduler at least one"));
        }
        Ok(Mutex::new(Scheduler::new(opened)))
    })
}

/// Frees a scheduler. Its plans and sessions stay usable.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_free(scheduler: *mut qd_scheduler) {
    guard::free(scheduler);
}

/// Changes a scheduler for the plans that follow.
fn change(
    scheduler: *mut qd_scheduler,
    error: Option<&mut qd_error>,
    change: impl FnOnce(Scheduler) -> Outcome<Scheduler>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(scheduler)?;
        let mut scheduler = exclusive(&object, "scheduler")?;
        *scheduler = change(scheduler.clone())?;
        Ok(())
    })
}

fn check_backend(scheduler: &Scheduler, backend: usize) -> Outcome<()> {
    let count = scheduler.backends().len();
    if backend < count {
        return Ok(());
    }
    Err(Failure::argument(format!(
        "there is no backend {backend}: the scheduler has {count}, counted from 0"
    )))
}

/// Places the leaf or result of this name on a backend, by number, in every graph that has one. Every node that writes it
/// runs there. The graphs are planned later, so a name that none of them has is not an error.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_scheduler_pin(
    scheduler: *mut qd_scheduler,
    name: *const c_char,
    backend: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    change(scheduler, error, |scheduler| {
        // SAFETY: the rules of the header for texts.
        let name = unsafe { text(name, "name") }?;
        check_backend(&scheduler, backend)?;
        Ok(scheduler.pin_name(name, backend))
    })
}

/// Places a tensor of the next graph on a backend, by number.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_pin_tensor(
    scheduler: *mut qd_scheduler,
    tensor: qd_tensor,
    backend: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    change(scheduler, error, |scheduler| {
        let index =
            usize::try_from(tensor).map_err(|_| Failure::argument("QD_NO_TENSOR cannot be pinned"))?;
        check_backend(&scheduler, backend)?;
        Ok(scheduler.pin_tensor(TensorId::from_index(index), backend))
    })
}

/// Chooses the backend, by number, of a weight, constant, state or input of this name; a negative number leaves it to the
/// scheduler.
pub type qd_place_callback = Option<extern "C" fn(user_data: *mut c_void, name: *const c_char) -> i32>;

/// Places leaves by name; nodes that read them tend to run there. The callback runs on the thread that plans a graph, also
/// later, until the scheduler and everything that was made of it are freed; NULL removes it.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_place(
    scheduler: *mut qd_scheduler,
    callback: qd_place_callback,
    user_data: *mut c_void,
    error: Option<&mut qd_error>,
) -> qd_status {
    let data = UserData(user_data);
    change(scheduler, error, |scheduler| {
        Ok(scheduler
            .place(move |name| usize::try_from(callback?(data.pointer(), c_text(name).as_ptr())).ok()))
    })
}

/// Limits the bytes that a plan may take of a backend, by number.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_budget(
    scheduler: *mut qd_scheduler,
    backend: usize,
    bytes: u64,
    error: Option<&mut qd_error>,
) -> qd_status {
    change(scheduler, error, |scheduler| {
        check_backend(&scheduler, backend)?;
        Ok(scheduler.budget(backend, bytes))
    })
}

/// Lets the memory planner search for plans that take less memory, for so many steps of about 50 ns; 0: not at all.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_effort(
    scheduler: *mut qd_scheduler,
    steps: u64,
    error: Option<&mut qd_error>,
) -> qd_status {
    let effort = if steps == 0 { Effort::Fast } else { Effort::Search { seed: 0, steps } };
    change(scheduler, error, |scheduler| Ok(scheduler.effort(effort)))
}

/// 1: check every plan by code that is independent of the planner.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_check_plans(
    scheduler: *mut qd_scheduler,
    check: i32,
    error: Option<&mut qd_error>,
) -> qd_status {
    change(scheduler, error, |scheduler| Ok(scheduler.check_plans(check != 0)))
}
