//! G3: the cases of all operations that may compute in place, in place.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeSet;

use quadriga_conformance::{BackendTarget, Suite, run_cases};
use quadriga_runtime::Backend;

/// The operations that compute in place in ggml, as the cases call them.
const IN_PLACE: [&str; 14] = [
    "scale",
    "diag_mask_inf",
    "diag_mask_zero",
    "add",
    "add1",
    "sub",
    "mul",
    "div",
    "sqr",
    "sqrt",
    "log",
    "rope",
    "rms_norm",
    "soft_max",
];

fn check(backend: &dyn Backend, each: usize) {
    let suite = Suite::new();
    let mut target = BackendTarget::in_place(backend);
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    let mut selected = Vec::new();
    for index in suite.sample(12 * each * 50, 5) {
        let operation = suite.operation(index).unwrap();
        let count = counts.entry(operation).or_default();
        if *count < each {
            let Some(Ok(case)) = suite.case(index) else { continue };
            // A case counts if one of its nodes, of any operation, can compute in place.
            if quadriga_conformance::computes_in_place(&case.graph) {
                *count += 1;
                selected.push(index);
            }
        }
    }
    let tested: BTreeSet<&str> =
        counts.iter().filter(|(_, count)| **count > 0).map(|(name, _)| *name).collect();
    for operation in IN_PLACE {
        assert!(tested.contains(operation), "no case of {operation} computes in place: {tested:?}");
    }
    println!("{} cases of {} operations", selected.len(), tested.len());
    let report = run_cases(selected.into_iter().filter_map(|index| suite.case(index)), &mut target);
    assert!(report.is_clean(), "{report}");
}

#[test]
fn g3_the_cpu_computes_every_in_place_operation_in_place() {
    let backend = quadriga_cpu::Backend::builder().threads(3).build().unwrap();
    check(&backend, 40);
}

#[test]
fn g3_the_simulated_device_computes_every_in_place_operation_in_place() {
    check(&*quadriga_sim::Sim::new("sim:0").build(), 15);
}
