//! Judges evaluated cases against exact results.

use quadriga_llm::evaluate::Outcome;
pub use quadriga_llm::judge::Exact;

/// The cases of a file, one a line.
pub fn cases(lines: &str) -> Vec<Exact> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Everything judged so far.
#[derive(Default, Debug)]
pub struct Verdict(quadriga_llm::judge::Verdict);

impl Verdict {
    pub fn add(&mut self, exact: &Exact, outcome: &Outcome) {
        assert_eq!(outcome.name, exact.case.name);
        self.0.add(exact, outcome);
    }

    pub fn mean_drift(&self) -> f64 {
        self.0.mean_drift()
    }

    pub fn mean_likelihood_error(&self) -> f64 {
        self.0.mean_likelihood_error()
    }

    /// Panics with what falls short, each case and the means. The means want enough cases to be fair.
    pub fn assert_holds(&self, context: &str, means: bool) {
        self.0.holds(means).unwrap_or_else(|short| panic!("{context}:\n{short}"));
    }
}
