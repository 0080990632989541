//! The conformance suite on a backend of the caller.

use std::ffi::c_char;

use quadriga_conformance::{BackendTarget, Suite, run_cases};

use crate::arguments::{give_text, required};
use crate::backend::qd_backend;
use crate::guard;
use crate::handle;
use crate::status::{qd_error, qd_status};

/// How the cases of the conformance suite ended.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct qd_conformance {
    /// Cases that were computed correctly.
    pub passed: usize,
    /// Cases that the backend does not support.
    pub unsupported: usize,
    /// Cases that were computed wrongly, or failed.
    pub failed: usize,
}

/// Compares what a backend computes with a reference in 64-bit floating point, in guarded memory: `cases` random cases of more
/// than 40,000, each of them in memory of its own, and in place where the operation allows it; 0: all. The report as text
/// goes to `buffer`, as in other functions. QD_STATUS_OK also if cases failed.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_backend_check(
    backend: *const qd_backend,
    cases: usize,
    seed: u64,
    totals: Option<&mut qd_conformance>,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(backend)?;
        let totals = required(totals, "totals")?;
        let suite = Suite::new();
        let sample = |seed| suite.sample(if cases == 0 { usize::MAX } else { cases }, seed);
        let mut report = String::new();
        *totals = qd_conformance::default();
        for mut target in
            [BackendTarget::unfused(&*object.backend), BackendTarget::in_place(&*object.backend)]
        {
            let cases = sample(seed).into_iter().filter_map(|index| suite.case(index));
            let outcome = run_cases(cases, &mut target);
            for operation in outcome.operations.values() {
                totals.passed += operation.passed;
                totals.unsupported += operation.unsupported;
                totals.failed += operation.failed;
            }
            report.push_str(&outcome.to_string());
        }
        if buffer.is_null() && capacity == 0 && needed.is_none() {
            return Ok(());
        }
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&report, buffer, capacity, needed) }
    })
}
