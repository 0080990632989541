//! Compares evaluated cases with exact results.

use quadriga_llm::evaluate::CaseResult;
pub use quadriga_llm::judge::ExactCase;

/// The cases of a file, one per line.
pub fn cases(lines: &str) -> Vec<ExactCase> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The comparison of all cases so far.
#[derive(Default, Debug)]
pub struct Judgement(quadriga_llm::judge::Judgement);

impl Judgement {
    pub fn add(&mut self, exact: &ExactCase, outcome: &CaseResult) {
        assert_eq!(outcome.name, exact.case.name);
        self.0.add(exact, outcome);
    }

    pub fn mean_drift(&self) -> f64 {
        self.0.mean_drift()
    }

    pub fn mean_likelihood_error(&self) -> f64 {
        self.0.mean_likelihood_error()
    }

    /// Panics if a case, or with `means` a mean over all cases, is out of tolerance.
    pub fn assert_holds(&self, context: &str, means: bool) {
        self.0.holds(means).unwrap_or_else(|short| panic!("{context}:\n{short}"));
    }
}
