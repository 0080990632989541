//! The judge of exact results: what it accepts, and at which difference it stops to.
#![allow(clippy::unwrap_used, reason = "tests")]

use quadriga_llm::evaluate::{CaseKind, CaseResult, ResultFields, Scored};
use quadriga_llm::judge::{ExactCase, Judgement, read_cases};

/// The verdict on one case.
fn judged(exact: &str, result: ResultFields) -> Result<Judgement, String> {
    let exact: ExactCase = serde_json::from_str(exact).unwrap();
    let mut judgement = Judgement::default();
    judgement.add(&exact, &CaseResult { name: "case".into(), kind: exact.case.kind, result });
    judgement.holds(false).map(|_| judgement)
}

fn next(exact: &str, top5: &[Scored]) -> Result<Judgement, String> {
    let exact = format!(r#"{{"name":"case","kind":"next","text":"","top5":{exact}}}"#);
    judged(&exact, ResultFields::Next { top5: top5.to_vec() })
}

fn greedy(tokens: &[u32], steps: &[&[Scored]]) -> Result<Judgement, String> {
    // A clear first step, a near tie, and a clear last one.
    let exact = r#"{"name":"case","kind":"greedy","text":"","tokens":[7,8],
        "top5":[[[1,-0.1],[2,-3.0]],[[3,-0.9],[4,-1.5]],[[5,-0.2],[6,-4.0]]]}"#;
    let top5 = steps.iter().map(|step| step.to_vec()).collect();
    judged(exact, ResultFields::Greedy { tokens: tokens.to_vec(), greedy: Vec::new(), top5 })
}

fn nll(nll: f64) -> Result<Judgement, String> {
    let exact = r#"{"name":"case","kind":"nll","text":"","ctx":4,"nll":2.0}"#;
    judged(exact, ResultFields::Nll { nll, chunk_nll: vec![nll], count: 3 })
}

#[test]
fn the_best_token_may_differ_only_in_a_tie() {
    let clear = "[[1,-0.1],[2,-3.0]]";
    assert!(next(clear, &[(1, -0.1), (2, -3.0)]).is_ok());
    assert!(next(clear, &[(2, -0.1), (1, -0.1)]).unwrap_err().contains("in place of 1"));
    assert!(next(clear, &[(2, -0.1), (3, -2.0)]).unwrap_err().contains("best token 1 is not among"));
    assert!(next(clear, &[]).unwrap_err().contains("is not among"));
    let tie = "[[1,-0.9],[2,-1.0]]";
    assert!(next(tie, &[(2, -0.9), (1, -1.0)]).is_ok());
    assert!(next(tie, &[(2, -0.9), (3, -1.0)]).is_ok());
    // A difference of 0.8 nats is no tie.
    assert!(next("[[1,-0.5],[2,-1.3]]", &[(2, -0.5), (1, -0.6)]).is_err());
    assert!(next("[[1,-0.5],[2,-1.29]]", &[(2, -0.5), (1, -0.6)]).is_ok());
    assert!(next("[[1,-0.5]]", &[(1, -0.5)]).unwrap_err().contains("fewer than two"));
}

#[test]
fn log_probabilities_may_drift_a_little() {
    let exact = "[[1,-0.5],[2,-3.0]]";
    let drift = |probability| next(exact, &[(1, probability), (2, -3.0)]);
    assert_eq!(drift(-0.5).unwrap().mean_drift(), 0.0);
    assert!((drift(-0.6).unwrap().mean_drift() - 0.1).abs() < 1e-12);
    assert!((drift(-0.4).unwrap().mean_drift() - 0.1).abs() < 1e-12);
    assert!(drift(-0.63).unwrap_err().contains("mean drift 0.1300 nats"));
}

#[test]
fn a_continuation_is_compared_until_a_tie_is_decided_differently() {
    let steps: [&[Scored]; 3] = [&[(1, -0.1), (2, -3.0)], &[(3, -0.9), (4, -1.5)], &[(5, -0.2), (6, -4.0)]];
    assert!(greedy(&[7, 8], &steps).is_ok());
    assert!(greedy(&[7, 9], &steps).unwrap_err().contains("tokens [7, 9] != [7, 8]"));
    assert!(greedy(&[7, 8], &steps[..2]).unwrap_err().contains("stopped at step 2"));
    let wrong: &[Scored] = &[(9, -0.2), (6, -4.0)];
    assert!(greedy(&[7, 8], &[steps[0], steps[1], wrong]).unwrap_err().contains("step 2"));
    // After the other side of the tie the text is another one.
    let other: &[Scored] = &[(4, -0.9), (3, -1.0)];
    let judgement = greedy(&[7, 8], &[steps[0], other, wrong]).unwrap();
    assert!((judgement.mean_drift() - 0.05).abs() < 1e-12, "the mean of two steps");
}

#[test]
fn likelihoods_are_compared_relatively() {
    assert_eq!(nll(2.0).unwrap().mean_likelihood_error(), 0.0);
    for close in [2.005, 1.995] {
        assert!((nll(close).unwrap().mean_likelihood_error() - 0.0025).abs() < 1e-12);
    }
    for far in [2.007, 1.993, 4.0] {
        assert!(nll(far).unwrap_err().contains("!= 2.00000"));
    }
}

#[test]
fn means_are_stricter_than_single_cases() {
    let with_mean = |judgement: Judgement| (judgement.holds(false).is_ok(), judgement.holds(true).is_ok());
    let drift = |probability| next("[[1,-0.5],[2,-3.0]]", &[(1, probability), (2, -3.0)]).unwrap();
    assert_eq!(with_mean(drift(-0.54)), (true, true));
    assert_eq!(with_mean(drift(-0.55)), (true, false));
    assert_eq!(with_mean(nll(2.002).unwrap()), (true, true));
    assert_eq!(with_mean(nll(2.005).unwrap()), (true, false));
    let line = nll(2.005).unwrap().holds(false).unwrap();
    assert_eq!(line, "1 of 1 cases hold; mean drift 0.0000 nats, mean likelihood error 0.2500 %");
}

#[test]
fn cases_are_read_line_by_line() {
    let case = r#"{"name":"a","kind":"tokenize","text":"x","tokens":[1]}"#;
    let cases = read_cases(&format!("{case}\n\n  \n{case}\n")).unwrap();
    assert_eq!(cases.len(), 2);
    assert!(cases.iter().all(|exact| exact.case.name == "a" && exact.case.kind == CaseKind::Tokenize));
    assert!(read_cases("{}").is_err());
    assert!(judged(case, ResultFields::Tokenize { tokens: vec![1] }).is_ok());
    assert!(judged(case, ResultFields::Tokenize { tokens: vec![2] }).is_err());
}
