//! Plans: everything decided about one graph on some backends, before anything is allocated.

use std::ffi::c_char;
use std::sync::Arc;

use quadriga::runtime::Plan;
use quadriga::view::Picture;

use crate::arguments::{give_text, optional_text, required};
use crate::graph::{qd_graph, tensor_id};
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::scheduler::qd_scheduler;
use crate::status::{Failure, qd_error, qd_status};
use crate::tensor::qd_tensor;

/// Where and when every node of a graph runs, and how many bytes that takes: immutable.
pub struct qd_plan {
    _opaque: (),
}

impl Handle for qd_plan {
    type Object = Plan;
    const NAME: &'static str = "qd_plan";
}

/// Plans a graph. Nothing is allocated.
///
/// Threads: one at a time for each scheduler.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scheduler_plan(
    scheduler: *const qd_scheduler,
    graph: *const qd_graph,
    error: Option<&mut qd_error>,
) -> *mut qd_plan {
    guard::handle(error, || {
        let (scheduler, graph) = (handle::get(scheduler)?, handle::get(graph)?);
        let scheduler = exclusive(&scheduler, "scheduler")?.clone();
        Ok(scheduler.plan(Arc::clone(&graph))?)
    })
}

/// Frees a plan. Its sessions stay usable.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_plan_free(plan: *mut qd_plan) {
    guard::free(plan);
}

/// Splits, copies and bytes as text.
pub const QD_PLAN_TEXT: i32 = 0;
/// As QD_PLAN_TEXT, with a line for each node and the reason for its placement.
pub const QD_PLAN_REASONS: i32 = 1;
/// Everything as JSON: docs/plan-schema.md.
pub const QD_PLAN_JSON: i32 = 2;
/// An interactive page.
pub const QD_PLAN_HTML: i32 = 3;
/// A drawing as SVG.
pub const QD_PLAN_SVG: i32 = 4;
/// The graph with its splits, for Graphviz.
pub const QD_PLAN_DOT: i32 = 5;

/// A plan in one of the formats QD_PLAN_…. `title` is for pages and drawings, and may be NULL.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_plan_write(
    plan: *const qd_plan,
    format: i32,
    title: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let plan = handle::get(plan)?;
        // SAFETY: the rules of the header for texts.
        let title = unsafe { optional_text(title, "title") }?.unwrap_or("plan");
        let written = match format {
            QD_PLAN_TEXT => plan.to_string(),
            QD_PLAN_REASONS => format!("{:#}", *plan),
            QD_PLAN_JSON => plan.to_json(),
            QD_PLAN_HTML => Picture::new(title, plan.explain()).html(),
            QD_PLAN_SVG => Picture::new(title, plan.explain()).svg(),
            QD_PLAN_DOT => plan.to_dot(),
            other => return Err(Failure::argument(format!("there is no format QD_PLAN_… {other}"))),
        };
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&written, buffer, capacity, needed) }
    })
}

/// The number of splits of a plan: groups of nodes that one backend runs in one call.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_plan_split_count(plan: *const qd_plan) -> usize {
    guard::value(0, || Ok(handle::get(plan)?.splits().splits.len()))
}

/// The number of copies between backends in each run.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_plan_copy_count(plan: *const qd_plan) -> usize {
    guard::value(0, || Ok(handle::get(plan)?.splits().copies.len()))
}

/// The number of the backend that runs a split, counted from 0; -1 if there is no such split.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_plan_split_backend(plan: *const qd_plan, split: usize) -> i32 {
    guard::value(-1, || {
        let plan = handle::get(plan)?;
        let backend = plan.splits().splits.get(split).map(|split| split.backend);
        Ok(backend.and_then(|backend| i32::try_from(backend).ok()).unwrap_or(-1))
    })
}

/// The number of the backend that a tensor is on; -1 for leaves that are on every backend that reads them.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_plan_backend_of(plan: *const qd_plan, tensor: qd_tensor) -> i32 {
    guard::value(-1, || {
        let plan = handle::get(plan)?;
        let backend = plan.placement(tensor_id(plan.graph(), tensor)?);
        Ok(backend.and_then(|backend| i32::try_from(backend).ok()).unwrap_or(-1))
    })
}

/// The memory that a plan takes of one backend, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct qd_plan_bytes {
    /// Weights and constants to be loaded.
    pub weights: u64,
    /// Weights that are read in the file map.
    pub mapped: u64,
    /// States.
    pub state: u64,
    /// Inputs, results and copies.
    pub compute: u64,
    /// The backend's work memory.
    pub work: u64,
    /// Host memory for copies.
    pub staging: u64,
    /// What is allocated of the backend's own memory in all.
    pub total: u64,
}

/// The memory that a plan takes of a backend, by number, before anything is allocated.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_plan_memory(
    plan: *const qd_plan,
    backend: usize,
    bytes: Option<&mut qd_plan_bytes>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let plan = handle::get(plan)?;
        let all = plan.bytes();
        let found = all.get(backend).ok_or_else(|| {
            Failure::argument(format!(
                "there is no backend {backend}: the plan has {}, counted from 0",
                all.len()
            ))
        })?;
        *required(bytes, "bytes")? = qd_plan_bytes {
            weights: found.weights,
            mapped: found.mapped,
            state: found.state,
            compute: found.compute,
            work: found.work,
            staging: found.staging,
            total: found.total(),
        };
        Ok(())
    })
}
