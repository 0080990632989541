//! Runs cases on a target and reports the results.

use std::collections::BTreeMap;
use std::fmt;

use crate::{BrokenCase, Case, judge};

/// The bytes of each output of a case, contiguous in its type, in the order of the graph's outputs.
pub type Outputs = Vec<Vec<u8>>;

/// Why a target gave no outputs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetError {
    /// The target does not support this case, for this reason.
    Unsupported(String),
    /// The run failed.
    Failed(String),
}

/// A system under test that computes cases: a backend, or a scheduler with several.
pub trait Target {
    /// The name in the report.
    fn name(&self) -> String;

    /// Computes a case.
    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError>;

    /// Computes a case of collectives, each rank on a backend of its own ([`on_rank_threads`](crate::on_rank_threads)); the outputs
    /// are those of all ranks. [default: unsupported]
    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let _ = case;
        Err(TargetError::Unsupported("collectives: this target has one rank".to_owned()))
    }

    /// The command that reruns one case on this target.
    fn command(&self, case: &str) -> String {
        format!("cargo run --release -p quadriga-conformance --example suite -- \"{case}\"")
    }
}

/// The outcome of one case.
#[derive(Clone, PartialEq, Debug)]
pub enum CaseOutcome {
    /// All outputs are within the tolerance; the largest normalized mean squared error.
    Passed(f64),
    /// The target does not support the case, for this reason.
    Unsupported(String),
    /// An output is wrong, or the run failed.
    Failed(String),
}

/// Runs one case and compares its outputs with the oracle's.
pub fn check(case: &Case, target: &mut dyn Target) -> CaseOutcome {
    let outputs = match if case.has_ranks() { target.run_ranks(case) } else { target.run(case) } {
        Ok(outputs) => outputs,
        Err(TargetError::Unsupported(reason)) => return CaseOutcome::Unsupported(reason),
        Err(TargetError::Failed(text)) => return CaseOutcome::Failed(text),
    };
    let expected = match case.expected() {
        Ok(expected) => expected,
        Err(error) => return CaseOutcome::Failed(format!("the oracle failed: {error}")),
    };
    if outputs.len() != expected.len() {
        return CaseOutcome::Failed(format!("{} outputs instead of {}", outputs.len(), expected.len()));
    }
    let mut worst = 0.0;
    let ranks = case.parts().enumerate();
    let declared = ranks
        .flat_map(|(rank, part)| part.graph.outputs().iter().map(move |output| (rank, part.graph, output)));
    for (((rank, graph, (name, id)), expected), found) in declared.zip(&expected).zip(&outputs) {
        let Some(tensor) = graph.get(*id) else { continue };
        match judge(tensor, expected, found, case.tolerance) {
            Ok(nmse) => worst = f64::max(worst, nmse),
            Err(mismatch) if case.others.is_empty() => {
                return CaseOutcome::Failed(format!("{name}: {mismatch}"));
            }
            Err(mismatch) => return CaseOutcome::Failed(format!("{name} of rank {rank}: {mismatch}")),
        }
    }
    CaseOutcome::Passed(worst)
}

/// The totals of the cases of one operation.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct OperationTotals {
    /// The number of cases.
    pub cases: usize,
    /// The number that passed.
    pub passed: usize,
    /// The number that the target does not support.
    pub unsupported: usize,
    /// The number that failed.
    pub failed: usize,
    /// The largest normalized mean squared error of a passed case, and the name of the case.
    pub worst: Option<(f64, String)>,
}

/// The results of a target.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Report {
    /// The target's name.
    pub target: String,
    /// Totals per operation.
    pub operations: BTreeMap<&'static str, OperationTotals>,
    /// The failed cases: name, message, and the command that reruns the case.
    pub failures: Vec<(String, String, String)>,
    /// The reasons of unsupported cases, with their counts.
    pub reasons: BTreeMap<String, usize>,
}

impl Report {
    /// Whether nothing failed.
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty()
    }

    /// Adds the outcome of one case, given by its name and operation.
    pub fn add(
        &mut self,
        (name, operation): (&str, &'static str),
        outcome: CaseOutcome,
        target: &dyn Target,
    ) {
        let totals = self.operations.entry(operation).or_default();
        totals.cases += 1;
        match outcome {
            CaseOutcome::Passed(nmse) => {
                totals.passed += 1;
                if totals.worst.as_ref().is_none_or(|(worst, _)| nmse > *worst) {
                    totals.worst = Some((nmse, name.to_owned()));
                }
            }
            CaseOutcome::Unsupported(reason) => {
                totals.unsupported += 1;
                *self.reasons.entry(reason).or_default() += 1;
            }
            CaseOutcome::Failed(text) => {
                totals.failed += 1;
                self.failures.push((name.to_owned(), text, target.command(name)));
            }
        }
    }
}

/// Runs cases, as [`Suite`](crate::Suite) yields them. A broken case counts as failed.
pub fn run_cases(cases: impl Iterator<Item = Result<Case, BrokenCase>>, target: &mut dyn Target) -> Report {
    let mut report = Report { target: target.name(), ..Report::default() };
    for case in cases {
        match case {
            Ok(case) => {
                let outcome = check(&case, target);
                report.add((&case.name, case.operation), outcome, target);
            }
            Err(broken) => {
                let outcome = CaseOutcome::Failed(broken.to_string());
                report.add((&broken.name, broken.operation), outcome, target);
            }
        }
    }
    report
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.target)?;
        writeln!(
            f,
            "{:16} {:>6} {:>6} {:>6} {:>6}  worst NMSE",
            "operation", "cases", "passed", "unsup.", "failed"
        )?;
        let mut total = OperationTotals::default();
        for (operation, totals) in &self.operations {
            row(f, operation, totals)?;
            total.cases += totals.cases;
            total.passed += totals.passed;
            total.unsupported += totals.unsupported;
            total.failed += totals.failed;
        }
        row(f, "total", &total)?;
        for (reason, count) in &self.reasons {
            writeln!(f, "unsupported, {count} times: {reason}")?;
        }
        for (name, text, command) in self.failures.iter().take(20) {
            writeln!(f, "FAILED {name}\n  {text}\n  rerun: {command}")?;
        }
        if self.failures.len() > 20 {
            writeln!(f, "… and {} more", self.failures.len() - 20)?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, totals: &OperationTotals) -> fmt::Result {
    let OperationTotals { cases, passed, unsupported, failed, worst } = totals;
    write!(f, "{name:16} {cases:>6} {passed:>6} {unsupported:>6} {failed:>6}")?;
    match worst {
        Some((nmse, case)) => writeln!(f, "  {nmse:.1e} {case}"),
        None => writeln!(f),
    }
}
