//! The default model compared with exact results: float64 activations with the same weights.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use crate::common::{data, output, quadriga};
use serde_json::Value;

/// Nats between the best two tokens below which either may be the argmax.
const TIE: f64 = 0.80;
/// Nats: the largest mean difference of the best token's log-probability within one case.
const DRIFT: f64 = 0.12;
/// Nats: the same over all cases.
const MEAN_DRIFT: f64 = 0.045;
/// Relative difference of the mean negative log-likelihood of one case, and over all cases.
const LIKELIHOOD: f64 = 0.003;
const MEAN_LIKELIHOOD: f64 = 0.0015;

fn rows(text: &str) -> BTreeMap<String, Value> {
    let rows = text.lines().filter(|line| !line.trim().is_empty());
    rows.map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|row| (row["name"].as_str().unwrap().to_owned(), row))
        .collect()
}

fn pairs(top: &Value) -> Vec<(u64, f64)> {
    let pair = |pair: &Value| (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap());
    top.as_array().unwrap().iter().map(pair).collect()
}

/// The error of one result, or why it is wrong.
fn judge(want: &Value, got: &Value) -> Result<Option<f64>, String> {
    let kind = want["kind"].as_str().unwrap();
    if matches!(kind, "tokenize" | "greedy") && got["tokens"] != want["tokens"] {
        return Err(format!("tokens {} instead of {}", got["tokens"], want["tokens"]));
    }
    let (wanted, found) = match kind {
        "tokenize" => return Ok(None),
        "nll" => {
            let (wanted, found) = (want["nll"].as_f64().unwrap(), got["nll"].as_f64().unwrap());
            let error = (found - wanted).abs() / wanted;
            return if error <= LIKELIHOOD {
                Ok(Some(error))
            } else {
                Err(format!("{found} instead of {wanted}"))
            };
        }
        "greedy" => (want["top5"].as_array().unwrap().clone(), got["top5"].as_array().unwrap().clone()),
        _ => (vec![want["top5"].clone()], vec![got["top5"].clone()]),
    };
    let mut drifts = Vec::new();
    for (step, wanted) in wanted.iter().enumerate() {
        let Some(found) = found.get(step) else { return Err(format!("it stopped at step {step}")) };
        let (wanted, found) = (pairs(wanted), pairs(found));
        let is_tie = wanted[0].1 - wanted[1].1 < TIE;
        match found.iter().find(|(token, _)| *token == wanted[0].0) {
            Some((_, probability)) => drifts.push((probability - wanted[0].1).abs()),
            None if is_tie => {}
            None => return Err(format!("step {step}: {wanted:?} is not among {found:?}")),
        }
        if found[0].0 != wanted[0].0 {
            if !is_tie {
                return Err(format!("step {step}: {:?} instead of {:?}", found[0], wanted[0]));
            }
            // A tie was decided differently: later steps have another context.
            break;
        }
    }
    let mean = drifts.iter().sum::<f64>() / drifts.len().max(1) as f64;
    if mean <= DRIFT { Ok(Some(mean)) } else { Err(format!("mean drift {mean:.4} nats")) }
}

#[track_caller]
fn assert_exact(flags: &[&str], isa: Option<&str>) {
    let model = quadriga_llm::default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let cases = data("smollm2.exact.jsonl");
    let mut command = quadriga(["eval", "-q", "-m"]);
    command.arg(model).arg(&cases).args(flags);
    if let Some(isa) = isa {
        command.env("QUADRIGA_ISA", isa);
    }
    let got = rows(&output(&mut command).success().out);
    let (mut drifts, mut likelihoods, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    for (name, want) in rows(&std::fs::read_to_string(cases).unwrap()) {
        match got.get(&name).ok_or("missing".to_owned()).and_then(|got| judge(&want, got)) {
            Ok(Some(error)) if want["kind"] == "nll" => likelihoods.push(error),
            Ok(error) => drifts.extend(error),
            Err(reason) => wrong.push(format!("{name}: {reason}")),
        }
    }
    assert!(wrong.is_empty(), "{flags:?} {isa:?}:\n{}", wrong.join("\n"));
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (drift, likelihood) = (mean(&drifts), mean(&likelihoods));
    println!(
        "{flags:?} {isa:?}: mean drift {drift:.4} nats, mean likelihood error {:.4} %",
        likelihood * 100.0
    );
    assert!(drift <= MEAN_DRIFT && likelihood <= MEAN_LIKELIHOOD, "drift {drift}, likelihood {likelihood}");
}

#[test]
fn on_the_cpu_with_two_threads() {
    assert_exact(&["-t", "2"], None);
}

#[test]
#[ignore = "takes minutes; run it with --ignored"]
fn on_every_instruction_set_with_one_thread() {
    for isa in quadriga_cpu::isa::Isa::available().iter().rev() {
        assert_exact(&["-t", "1"], Some(isa.name()));
    }
}
