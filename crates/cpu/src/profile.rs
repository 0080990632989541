//! Profiling: the time of runs by kind of step.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The number and time of all steps of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTotals {
    /// The number of steps.
    pub steps: u64,
    /// Their total time, from barrier to barrier.
    pub time: Duration,
}

/// Times of steps by the names of their operations. Prints as a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile(pub BTreeMap<String, StepTotals>);

impl Profile {
    /// The total time.
    pub fn total(&self) -> Duration {
        self.0.values().map(|totals| totals.time).sum()
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total().as_secs_f64();
        let mut lines: Vec<_> = self.0.iter().collect();
        lines.sort_by_key(|(_, totals)| std::cmp::Reverse(totals.time));
        writeln!(f, "{:>9} {:>6} {:>8} {:>9}  step", "ms", "%", "steps", "µs/step")?;
        for (label, StepTotals { steps, time }) in lines {
            let seconds = time.as_secs_f64();
            let each = seconds * 1e6 / (*steps).max(1) as f64;
            writeln!(
                f,
                "{:9.3} {:6.1} {steps:8} {each:9.2}  {label}",
                seconds * 1e3,
                100.0 * seconds / total
            )?;
        }
        writeln!(f, "{:9.3}  total", total * 1e3)
    }
}

/// Accumulates the profile of a backend.
#[derive(Default)]
pub(crate) struct ProfileRecorder(Mutex<Profile>);

impl ProfileRecorder {
    /// Returns the profile so far and starts a new one.
    pub(crate) fn take(&self) -> Profile {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, label: &str, time: Duration) {
        let mut profile = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !profile.0.contains_key(label) {
            profile.0.insert(label.to_owned(), StepTotals::default());
        }
        if let Some(totals) = profile.0.get_mut(label) {
            totals.steps += 1;
            totals.time += time;
        }
    }
}

/// Records the steps of one run; called at every barrier.
pub(crate) struct StepTimer<'a> {
    recorder: &'a ProfileRecorder,
    labels: &'a [String],
    running: Option<(usize, Instant)>,
}

impl<'a> StepTimer<'a> {
    pub(crate) fn new(recorder: &'a ProfileRecorder, labels: &'a [String]) -> StepTimer<'a> {
        StepTimer { recorder, labels, running: None }
    }

    /// Ends the previous step and begins this one.
    pub(crate) fn begin(&mut self, step: usize) {
        let now = Instant::now();
        self.end(now);
        // Read again, so that recording counts for no step.
        self.running = Some((step, Instant::now()));
    }

    fn end(&mut self, now: Instant) {
        if let Some((step, since)) = self.running.take()
            && let Some(label) = self.labels.get(step)
        {
            self.recorder.add(label, now.saturating_duration_since(since));
        }
    }
}

impl Drop for StepTimer<'_> {
    fn drop(&mut self) {
        self.end(Instant::now());
    }
}
