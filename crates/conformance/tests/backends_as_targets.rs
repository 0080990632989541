//! `BackendTarget` runs the suite on any backend: here the CPU, on a small sample.
#![allow(clippy::unwrap_used, reason = "tests")]

use quadriga_conformance::{BackendTarget, Suite, run_cases};

#[test]
fn the_cpu_backend_passes_a_sample_with_and_without_fusion() {
    let backend = quadriga_cpu::Backend::builder().threads(2).build().unwrap();
    let suite = Suite::new();
    for mut target in [BackendTarget::new(&backend), BackendTarget::unfused(&backend)] {
        let sample = suite.sample(500, 11).into_iter().filter_map(|i| suite.case(i));
        let report = run_cases(sample, &mut target);
        println!("{report}");
        assert!(report.is_clean(), "{report}");
    }
}
