//! The suite itself: its size, and that every case builds, evaluates and tolerates rounding.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashSet;

use quadriga_conformance::{Case, Outputs, RoundingOracle, Suite, Target, TargetError, Tolerance, run_cases};
use quadriga_graph::{DType, blocks};

#[test]
fn there_are_at_least_21000_cases_with_unique_names() {
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
    for i in suite.sample(10_000, 3) {
        let case = suite.case(i).unwrap().unwrap();
        built.extend(case.parts().flat_map(|part| part.graph.nodes().iter().map(|n| n.op().name())));
    }
    let all = "abs add add1 argmax argsort attention cast clamp concat copy_into cos diag_mask_inf diag_mask_zero div elu exp \
        geglu gelu gelu_erf gelu_quick get_rows group_norm hardsigmoid hardswish l2_norm log mean mul mul_mat mul_mat_id neg \
        norm out_prod pad permute reglu relu repeat reshape rms_norm rope scale set_rows sigmoid sign silu sin soft_max \
        softplus sqr sqrt step sub sum sum_rows swiglu tanh top_k transpose view arange conv_2d_dw conv_transpose_2d \
        cross_entropy_loss im2col pool_avg pool_max upscale add_id expert_weights gated_delta_rule select_experts ssm_conv \
        sum_experts swiglu_oai mul_mat_sparse axpy_sparse all_gather all_reduce broadcast receive reduce_scatter send";
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
#[ignore = "takes minutes; a sample runs always"]
fn every_case_passes_on_the_oracle_with_rounding() {
    let suite = Suite::new();
    let report = run_cases(suite.iter(), &mut RoundingOracle);
    println!("{report}");
    assert!(report.is_clean(), "{report}");
}

/// A backend that rounds activations to 8 bits (or to BF16 if rows are not whole blocks), and is exact otherwise.
struct EightBitActivations;

impl Target for EightBitActivations {
    fn name(&self) -> String {
        "the oracle, with activations in 8 bits".into()
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let mut rounded = Case {
            name: case.name.clone(),
            operation: case.operation,
            graph: case.graph.clone(),
            inputs: case.inputs.clone(),
            tolerance: case.tolerance,
            others: case.others.clone(),
        };
        for (name, bytes) in &mut rounded.inputs {
            let tensor = &case.graph[case.graph.leaf(name).unwrap()];
            let dtype = tensor.dtype();
            if !matches!(dtype, DType::F32 | DType::F16) || tensor.elements() == 0 {
                continue;
            }
            let small = if tensor.shape().cols().is_multiple_of(32) { DType::Q8_0 } else { DType::BF16 };
            let mut values = vec![0.0; tensor.elements()];
            let mut blocks = vec![0; small.row_bytes(values.len()).unwrap()];
            blocks::dequantize(dtype, bytes, &mut values).unwrap();
            blocks::quantize(small, &values, &mut blocks).unwrap();
            blocks::dequantize(small, &blocks, &mut values).unwrap();
            blocks::quantize(dtype, &values, bytes).unwrap();
        }
        RoundingOracle.run(&rounded)
    }
}

#[test]
fn matmuls_with_small_types_tolerate_activations_in_8_bits() {
    let suite = Suite::new();
    let matmuls = ["mul_mat", "mul_mat_id", "gate_up", "mul_mat_bias", "norm_mul_mat", "mul_mat_add"];
    let chosen =
        suite.sample(6000, 5).into_iter().filter(|i| matmuls.contains(&suite.operation(*i).unwrap()));
    let cases = chosen
        .filter_map(|i| suite.case(i))
        .filter(|case| case.as_ref().is_ok_and(|case| case.tolerance == Tolerance::QUANTIZED));
    let report = run_cases(cases, &mut EightBitActivations);
    println!("{report}");
    assert!(report.is_clean(), "{report}");
}
