//! Runs mutants against the tests that reach them.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::compile::TestProgram;
use crate::mutate::Mutant;
use crate::record::{Ending, Limits, Recording, run_test};

/// What became of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// A test failed.
    Killed,
    /// A test took much longer than without the mutant, which counts as killed.
    Timeout,
    /// All tests that reach it passed.
    Missed,
    /// No test reaches it.
    Unreached,
}

/// A line of the file of results.
#[derive(Clone, Serialize, Deserialize)]
pub struct Judgement {
    pub name: String,
    pub verdict: Verdict,
    /// The test that killed it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub test: String,
    /// How many tests were run, and how many reach the mutant.
    pub run: usize,
    pub reach: usize,
    pub seconds: f64,
}

pub struct Judge<'a> {
    pub programs: HashMap<&'a str, &'a TestProgram>,
    pub recordings: &'a [Recording],
    pub limits: Limits,
    /// Tests that take longer judge nothing.
    pub longest: f64,
    pub jobs: usize,
    /// Where results are appended and temporary files are made.
    pub folder: &'a Path,
}

impl Judge<'_> {
    /// Judges `mutants`, and appends each verdict to the file of results as it comes.
    pub fn run(&self, mutants: Vec<(usize, &Mutant)>) -> Outcome<()> {
        let total = mutants.len();
        let queue = Mutex::new(VecDeque::from(mutants));
        let results = OpenOptions::new().append(true).create(true).open(self.folder.join("results.jsonl"))?;
        let results = Mutex::new((results, 0));
        // The test that killed the last mutant of a function is likely to kill the next one.
        let killers: Mutex<HashMap<(String, String), usize>> = Mutex::new(HashMap::new());
        crate::in_parallel(self.jobs, |job| {
            loop {
                let Some((id, mutant)) = queue.lock().map_err(|_| "poisoned")?.pop_front() else {
                    return Ok(());
                };
                let place = (mutant.file.clone(), mutant.function.clone());
                let first = killers.lock().map_err(|_| "poisoned")?.get(&place).copied();
                let (judgement, killer) = self.judge(id, mutant, first, job)?;
                if let Some(killer) = killer {
                    killers.lock().map_err(|_| "poisoned")?.insert(place, killer);
                }
                let mut results = results.lock().map_err(|_| "poisoned")?;
                results.1 += 1;
                if matches!(judgement.verdict, Verdict::Missed | Verdict::Unreached) || results.1 % 100 == 0 {
                    eprintln!(
                        "[{}/{total}] {:?} ({} tests) {}",
                        results.1, judgement.verdict, judgement.run, mutant.name
                    );
                }
                writeln!(results.0, "{}", serde_json::to_string(&judgement)?)?;
            }
        })
    }

    fn judge(
        &self,
        id: usize,
        mutant: &Mutant,
        first: Option<usize>,
        job: usize,
    ) -> Outcome<(Judgement, Option<usize>)> {
        let start = Instant::now();
        let tests = self.recordings.iter().enumerate();
        let tests = tests.filter(|(_, test)| test.passed && test.seconds <= self.longest && test.reaches(id));
        let mut tests: Vec<(usize, &Recording)> = tests.collect();
        tests.sort_by(|(a, left), (b, right)| {
            (Some(*a) != first).cmp(&(Some(*b) != first)).then(left.seconds.total_cmp(&right.seconds))
        });
        let verdict = if tests.is_empty() { Verdict::Unreached } else { Verdict::Missed };
        let name = mutant.name.clone();
        let mut judgement =
            Judgement { name, verdict, test: String::new(), run: 0, reach: tests.len(), seconds: 0.0 };
        let mut killer = None;
        for (at, recording) in tests {
            let Some(program) = self.programs.get(recording.program.as_str()) else { continue };
            let limit = Duration::from_secs_f64(10.0 + 5.0 * recording.seconds);
            let number = id.to_string();
            let variable = ("QUADRIGA_MUTANT", OsStr::new(&number));
            let temporary = self.folder.join(format!("tmp.{job}"));
            let (ending, _) = run_test(program, &recording.test, variable, &temporary, limit, self.limits)?;
            judgement.run += 1;
            if ending != Ending::Passed {
                judgement.verdict =
                    if ending == Ending::TimedOut { Verdict::Timeout } else { Verdict::Killed };
                judgement.test = format!("{} {}", recording.program, recording.test);
                killer = Some(at);
                break;
            }
        }
        judgement.seconds = start.elapsed().as_secs_f64();
        Ok((judgement, killer))
    }
}
