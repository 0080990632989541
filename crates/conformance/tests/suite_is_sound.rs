//! The suite itself: large enough, every case builds, evaluates, and allows for rounding.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::HashSet;

use quadriga_conformance::{RoundingOracle, Suite, run_cases};

#[test]
fn there_are_at_least_21000_cases_with_names_of_their_own() {
    let suite = Suite::new();
    for (operation, count) in suite.counts() {
        println!("{operation:16} {count}");
    }
    println!("{:16} {}", "total", suite.len());
    assert!(suite.len() >= 21_000, "{}", suite.len());
    let names: HashSet<_> = (0..suite.len()).map(|i| suite.name(i).unwrap()).collect();
    assert_eq!(names.len(), suite.len());
}

#[test]
fn a_sample_is_fixed_and_covers_every_operation() {
    let suite = Suite::new();
    let sample = suite.sample(1000, 7);
    assert_eq!(sample, suite.sample(1000, 7));
    assert_ne!(sample, suite.sample(1000, 8));
    assert!((1000..1100).contains(&sample.len()), "{}", sample.len());
    let operations: HashSet<_> = sample.iter().map(|i| suite.operation(*i).unwrap()).collect();
    assert_eq!(operations.len(), suite.counts().len());
}

#[test]
fn every_operation_is_in_some_case() {
    let suite = Suite::new();
    let mut built: HashSet<&str> = HashSet::new();
    for i in suite.sample(3000, 3) {
        built.extend(suite.case(i).unwrap().unwrap().graph.nodes().iter().map(|n| n.op().name()));
    }
    let all = "abs add add1 argmax argsort attention cast clamp concat copy_into cos diag_mask_inf diag_mask_zero div elu exp \
        geglu gelu gelu_erf gelu_quick get_rows group_norm hardsigmoid hardswish l2_norm log mean mul mul_mat mul_mat_id neg \
        norm out_prod pad permute reglu relu repeat reshape rms_norm rope scale set_rows sigmoid sign silu sin soft_max \
        softplus sqr sqrt step sub sum sum_rows swiglu tanh top_k transpose view";
    let missing: Vec<&str> = all.split_whitespace().filter(|name| !built.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert_eq!(built.len(), all.split_whitespace().count(), "an operation is missing in this list");
}

#[test]
fn a_sample_passes_on_the_oracle_with_rounding() {
    let suite = Suite::new();
    let sample = suite.sample(2500, 1);
    let report = run_cases(sample.into_iter().filter_map(|i| suite.case(i)), &mut RoundingOracle);
    println!("{report}");
    assert!(report.is_clean(), "{report}");
}

#[test]
#[ignore = "minutes: the whole list; a sample of it runs always"]
fn every_case_passes_on_the_oracle_with_rounding() {
    let suite = Suite::new();
    let report = run_cases(suite.iter(), &mut RoundingOracle);
    println!("{report}");
    assert!(report.is_clean(), "{report}");
}
