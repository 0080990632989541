//! Runs cases on a backend and reports how it did.

use std::collections::BTreeMap;
use std::fmt;

use crate::{BrokenCase, Case, compute_node, judge};

/// The bytes of each output of a case, contiguous in its type, in the order of the graph's outputs.
pub type Outputs = Vec<Vec<u8>>;

/// Why a target gave no outputs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TargetError {
    /// The target says that it cannot compute this case, and why.
    Unsupported(String),
    /// Something went wrong.
    Failed(String),
}

/// Something that computes cases: a backend in a session of one, several backends, anything.
pub trait Target {
    /// What it is called in the report.
    fn name(&self) -> String;

    /// Computes a case.
    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError>;

    /// The command that runs one case on this target again.
    fn command(&self, case: &str) -> String {
        format!("cargo run --release -p quadriga-conformance --example suite -- \"{case}\"")
    }
}

/// How a target did on one case.
#[derive(Clone, PartialEq, Debug)]
pub enum Verdict {
    /// All outputs are right; the largest normalised mean squared error among them.
    Passed(f64),
    /// The target does not compute such cases.
    Unsupported(String),
    /// What was wrong.
    Failed(String),
}

/// Runs one case and judges its outputs by the oracle's.
pub fn check(case: &Case, target: &mut dyn Target) -> Verdict {
    let outputs = match target.run(case) {
        Ok(outputs) => outputs,
        Err(TargetError::Unsupported(reason)) => return Verdict::Unsupported(reason),
        Err(TargetError::Failed(text)) => return Verdict::Failed(text),
    };
    let expected = match case.expected() {
        Ok(expected) => expected,
        Err(error) => return Verdict::Failed(format!("the oracle failed: {error}")),
    };
    if outputs.len() != expected.len() {
        return Verdict::Failed(format!("{} outputs where {} are right", outputs.len(), expected.len()));
    }
    let mut worst = 0.0;
    for (((name, id), expected), found) in case.graph.outputs().iter().zip(&expected).zip(&outputs) {
        let Some(tensor) = case.graph.get(*id) else { continue };
        match judge(tensor, expected, found, case.tolerance) {
            Ok(nmse) => worst = f64::max(worst, nmse),
            Err(wrong) => return Verdict::Failed(format!("{name}: {wrong}")),
        }
    }
    Verdict::Passed(worst)
}

/// How a target did on the cases of one operation.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Line {
    /// How many cases were run.
    pub cases: usize,
    /// How many were right.
    pub passed: usize,
    /// How many the target does not compute.
    pub unsupported: usize,
    /// How many were wrong.
    pub failed: usize,
    /// The largest normalised mean squared error of a case that passed, and its name.
    pub worst: Option<(f64, String)>,
}

/// How a target did.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Report {
    /// The target's name.
    pub target: String,
    /// One line per operation.
    pub lines: BTreeMap<&'static str, Line>,
    /// The cases that failed: name, what was wrong, and the command that runs it again.
    pub failures: Vec<(String, String, String)>,
    /// Why cases were not computed, and how often each reason was given.
    pub reasons: BTreeMap<String, usize>,
}

impl Report {
    /// Whether nothing failed.
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty()
    }

    /// Adds the verdict on one case, given by its name and operation.
    pub fn add(&mut self, (name, operation): (&str, &'static str), verdict: Verdict, target: &dyn Target) {
        let line = self.lines.entry(operation).or_default();
        line.cases += 1;
        match verdict {
            Verdict::Passed(nmse) => {
                line.passed += 1;
                if line.worst.as_ref().is_none_or(|(worst, _)| nmse > *worst) {
                    line.worst = Some((nmse, name.to_owned()));
                }
            }
            Verdict::Unsupported(reason) => {
                line.unsupported += 1;
                *self.reasons.entry(reason).or_default() += 1;
            }
            Verdict::Failed(text) => {
                line.failed += 1;
                self.failures.push((name.to_owned(), text, target.command(name)));
            }
        }
    }
}

/// Runs cases, as [`Suite`](crate::Suite) yields them, and judges each. A case that is broken counts as failed.
pub fn run_cases(cases: impl Iterator<Item = Result<Case, BrokenCase>>, target: &mut dyn Target) -> Report {
    let mut report = Report { target: target.name(), ..Report::default() };
    for case in cases {
        match case {
            Ok(case) => {
                let verdict = check(&case, target);
                report.add((&case.name, case.operation), verdict, target);
            }
            Err(broken) => {
                let verdict = Verdict::Failed(broken.to_string());
                report.add((&broken.name, broken.operation), verdict, target);
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
        let mut total = Line::default();
        for (operation, line) in &self.lines {
            row(f, operation, line)?;
            total.cases += line.cases;
            total.passed += line.passed;
            total.unsupported += line.unsupported;
            total.failed += line.failed;
        }
        row(f, "total", &total)?;
        for (reason, count) in &self.reasons {
            writeln!(f, "unsupported, {count} times: {reason}")?;
        }
        for (name, text, command) in self.failures.iter().take(20) {
            writeln!(f, "FAILED {name}\n  {text}\n  again: {command}")?;
        }
        if self.failures.len() > 20 {
            writeln!(f, "… and {} more", self.failures.len() - 20)?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, line: &Line) -> fmt::Result {
    let Line { cases, passed, unsupported, failed, worst } = line;
    write!(f, "{name:16} {cases:>6} {passed:>6} {unsupported:>6} {failed:>6}")?;
    match worst {
        Some((nmse, case)) => writeln!(f, "  {nmse:.1e} {case}"),
        None => writeln!(f),
    }
}

/// The oracle as a target: node by node on plain bytes, each result rounded to its type, as a backend without
/// cleverness would. It shows that every case can be built and computed, and what rounding alone does.
#[derive(Clone, Copy, Default, Debug)]
pub struct RoundingOracle;

impl RoundingOracle {
    fn compute(case: &Case) -> Option<Result<Outputs, crate::OracleError>> {
        let graph = &case.graph;
        // The bytes of each storage, at the index of the tensor that owns it.
        let mut storages: Vec<Vec<u8>> = Vec::new();
        for id in graph.tensor_ids() {
            let tensor = graph.get(id)?;
            let owned = if tensor.storage() == id { tensor.bytes() } else { 0 };
            storages.push(graph.data(id).map_or_else(|| vec![0; owned], |data| data.bytes().to_vec()));
        }
        for (name, bytes) in &case.inputs {
            *storages.get_mut(graph.leaf(name)?.index())? = bytes.clone();
        }
        let range = |id| {
            let tensor = graph.get(id)?;
            Some((tensor.storage().index(), tensor.offset()..tensor.offset() + tensor.bytes()))
        };
        for node in graph.node_ids() {
            let mut inputs: Vec<Vec<u8>> = Vec::new();
            for id in graph.inputs(node) {
                let (storage, bytes) = range(*id)?;
                inputs.push(storages.get(storage)?.get(bytes)?.to_vec());
            }
            let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
            let (storage, bytes) = range(graph.get_node(node)?.output())?;
            let output = storages.get_mut(storage)?.get_mut(bytes)?;
            if let Err(error) = compute_node(graph, node, &inputs, output) {
                return Some(Err(error));
            }
        }
        let mut outputs = Outputs::new();
        for (_, id) in graph.outputs() {
            let (storage, bytes) = range(*id)?;
            outputs.push(storages.get(storage)?.get(bytes)?.to_vec());
        }
        Some(Ok(outputs))
    }
}

impl Target for RoundingOracle {
    fn name(&self) -> String {
        "the oracle, rounded after each node".into()
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        match RoundingOracle::compute(case) {
            Some(Ok(outputs)) => Ok(outputs),
            Some(Err(error)) => Err(TargetError::Failed(error.to_string())),
            None => {
                Err(TargetError::Failed("an input is not in the graph, or shorter than it should be".into()))
            }
        }
    }
}
