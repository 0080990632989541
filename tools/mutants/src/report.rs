//! Sums up the results of a scratch folder.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::State;
use crate::judge::{Judgement, Verdict};

#[derive(Default)]
struct Count {
    total: usize,
    killed: usize,
    timeout: usize,
    missed: usize,
    unreached: usize,
    invalid: usize,
}

impl Count {
    fn row(&self, name: &str) -> String {
        let dead = self.killed + self.timeout;
        let judged = dead + self.missed + self.unreached;
        let rate =
            if judged == 0 { "–".into() } else { format!("{:.1} %", 100.0 * dead as f64 / judged as f64) };
        let open = self.total - judged - self.invalid;
        format!(
            "{:>6} {:>7} {:>8} {:>7} {:>10} {:>12} {:>8} {rate:>8}  {name}",
            self.total, self.killed, self.timeout, self.missed, self.unreached, self.invalid, open
        )
    }
}

/// The latest judgement of each mutant.
pub fn latest(results: Vec<Judgement>) -> HashMap<String, Judgement> {
    results.into_iter().map(|judgement| (judgement.name.clone(), judgement)).collect()
}

/// Prints the survivors of the files `chosen`, then a table of all files.
pub fn print(state: &State, results: &HashMap<String, Judgement>, chosen: &dyn Fn(&str) -> bool) {
    let dropped: BTreeSet<&str> = state.dropped.iter().map(String::as_str).collect();
    let mut files: BTreeMap<&str, Count> = BTreeMap::new();
    let mut all = Count::default();
    for (id, mutant) in state.mutants.iter().enumerate().filter(|(_, mutant)| chosen(&mutant.file)) {
        for count in [files.entry(&mutant.file).or_default(), &mut all] {
            count.total += 1;
            match results.get(&mutant.name).map(|judgement| judgement.verdict) {
                _ if dropped.contains(mutant.name.as_str()) => count.invalid += 1,
                Some(Verdict::Killed) => count.killed += 1,
                Some(Verdict::Timeout) => count.timeout += 1,
                Some(Verdict::Missed) => count.missed += 1,
                Some(Verdict::Unreached) => count.unreached += 1,
                None => {}
            }
        }
        if let Some(judgement) = results.get(&mutant.name)
            && !dropped.contains(mutant.name.as_str())
        {
            match judgement.verdict {
                Verdict::Missed => println!("missed ({} tests) #{id} {}", judgement.reach, mutant.name),
                Verdict::Unreached => println!("missed (not reached) #{id} {}", mutant.name),
                Verdict::Killed | Verdict::Timeout => {}
            }
        }
    }
    println!("\n total  killed time-out  missed unreached not compiled   to run     rate");
    for (file, count) in &files {
        println!("{}", count.row(file));
    }
    println!("{}", all.row(&state.package));
    println!(
        "skipped: {} excluded by .cargo/mutants.toml, {} in constants and const fn; {} macro calls not searched",
        state.excluded, state.constant, state.macros
    );
}
