//! Tolerances: which results pass and which fail.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::{
    Case, CaseOutcome, Mismatch, Outputs, RoundingOracle, Suite, Target, TargetError, Tolerance, check,
    judge, run_cases,
};
use quadriga_graph::{DType, Graph, GraphBuilder};

fn tensor(dtype: DType, count: usize) -> Graph {
    let g = GraphBuilder::new();
    g.output("x", g.input("x", dtype, [count]));
    g.finish().unwrap()
}

fn judge_f32(expected: &[f64], found: &[f32], tolerance: Tolerance) -> Result<f64, Mismatch> {
    let graph = tensor(DType::F32, expected.len());
    let bytes: Vec<u8> = found.iter().flat_map(|v| v.to_le_bytes()).collect();
    judge(&graph.tensors()[0], expected, &bytes, tolerance)
}

#[test]
fn errors_are_relative_to_all_values() {
    let close = judge_f32(&[1.0, 2.0], &[1.0001, 2.0], Tolerance::DEFAULT).unwrap();
    assert!((1e-9..3e-9).contains(&close), "{close}");
    let far = judge_f32(&[1.0, 2.0], &[1.001, 2.0], Tolerance::DEFAULT);
    assert!(matches!(far, Err(Mismatch::Error { .. })), "{far:?}");
    assert!(judge_f32(&[0.0], &[1.0], Tolerance::QUANTIZED).is_err());
    assert_eq!(judge_f32(&[], &[], Tolerance::DEFAULT), Ok(0.0));
}

#[test]
fn nan_and_infinity_must_match_the_expected_value() {
    let inf = f32::INFINITY;
    assert!(judge_f32(&[1.0, 1e6], &[f32::NAN, 1e6], Tolerance::QUANTIZED).is_err());
    assert!(judge_f32(&[f64::NAN], &[1.0], Tolerance::DEFAULT).is_err());
    assert!(judge_f32(&[f64::NAN], &[f32::NAN], Tolerance::DEFAULT).is_ok());
    assert!(judge_f32(&[f64::INFINITY], &[-inf], Tolerance::DEFAULT).is_err());
    assert!(judge_f32(&[f64::INFINITY], &[inf], Tolerance::DEFAULT).is_ok());
    // Overflows F32.
    assert!(judge_f32(&[1e50], &[inf], Tolerance::DEFAULT).is_ok());
    assert!(judge_f32(&[1.0], &[inf], Tolerance::DEFAULT).is_err());
}

#[test]
fn exact_means_equal_after_rounding_to_the_type() {
    assert!(judge_f32(&[0.1], &[0.1], Tolerance::Exact).is_ok());
    assert!(judge_f32(&[0.1], &[0.100_000_01], Tolerance::Exact).is_err());
    let graph = tensor(DType::I32, 1);
    let one = 1i32.to_le_bytes();
    // Integers are exact under every tolerance.
    assert!(judge(&graph.tensors()[0], &[2.0], &one, Tolerance::Nmse(1.0)).is_err());
    assert!(matches!(
        judge(&graph.tensors()[0], &[2.0], &[], Tolerance::Exact),
        Err(Mismatch::Length { .. })
    ));
}

/// A target that supports nothing if the flag is set, and otherwise changes one value of each output.
struct Faulty(bool);

impl Target for Faulty {
    fn name(&self) -> String {
        "faulty".into()
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        if self.0 {
            return Err(TargetError::Unsupported("no support".into()));
        }
        let mut outputs = RoundingOracle.run(case)?;
        for bytes in &mut outputs {
            if let Some(last) = bytes.last_mut() {
                // Sign and exponent of a float, the high byte of an integer.
                *last ^= 0x55;
            }
        }
        Ok(outputs)
    }
}

#[test]
fn one_wrong_value_fails_a_case_of_plain_types() {
    let suite = Suite::new();
    for name in [
        "add F32 [1, 1, 1, 7]",
        "argmax [1, 1, 7, 33]",
        "silu F16 [2, 3, 4, 64]",
        "mul_mat Q4_0 [1, 1, 16, 64] × F32 [1, 1, 5, 64]",
    ] {
        let index = (0..suite.len()).find(|i| suite.name(*i).unwrap().starts_with(name)).unwrap();
        let case = suite.case(index).unwrap().unwrap();
        assert!(matches!(check(&case, &mut RoundingOracle), CaseOutcome::Passed(_)));
        assert!(matches!(check(&case, &mut Faulty(false)), CaseOutcome::Failed(_)), "{name}");
    }
}

#[test]
fn the_report_has_counts_and_the_command_to_rerun_a_case() {
    let suite = Suite::new();
    let index = suite.find("mul_mat Q4_0 [1, 1, 16, 64] × F32 [1, 1, 5, 64]").unwrap();
    let failed = run_cases(suite.case(index).into_iter(), &mut Faulty(false));
    assert!(!failed.is_clean());
    let text = failed.to_string();
    assert!(text.contains("FAILED mul_mat Q4_0") && text.contains("rerun: cargo run"), "{text}");
    let skipped = run_cases(suite.case(index).into_iter(), &mut Faulty(true));
    assert!(skipped.is_clean());
    assert_eq!(skipped.operations["mul_mat"].unsupported, 1);
    assert!(skipped.to_string().contains("unsupported, 1 times: no support"));
}
