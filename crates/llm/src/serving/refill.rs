//! How long a step waits for the requests that follow those that just ended.
//!
//! A client that asks again as soon as it has its answer is a few microseconds too late for the next step, which then runs with
//! a free place: clients with answers of eight tokens each wait for a ninth step. A short wait brings them into the step. It is a
//! small part of the time of a step, and where clients do not ask again it is soon left out.

use std::time::{Duration, Instant};

/// The part of the latest step's time that the next one may wait.
const SHARE: u32 = 16;
/// The longest wait.
const MOST: Duration = Duration::from_millis(1);
/// How many waits are left out after waits that brought nothing: twice as many each time, up to two to this power.
const MOST_DOUBLINGS: u32 = 7;

/// Decides whether, and until when, a step waits.
#[derive(Debug, Default)]
pub(super) struct Refill {
    /// Requests that ended with the latest step.
    ended: usize,
    /// Requests that came since.
    came: usize,
    /// When the wait is over, if there is one.
    until: Option<Instant>,
    /// Waits in a row that brought less than half of what ended.
    misses: u32,
    /// Waits that are left out.
    skipped: u32,
}

impl Refill {
    /// A step is over, with which so many requests ended.
    pub(super) fn note_step(&mut self, ended: usize, took: Duration, now: Instant) {
        if self.until.is_some() {
            self.end_wait();
        }
        (self.ended, self.came) = (ended, 0);
        if ended == 0 {
            return;
        }
        match self.skipped.checked_sub(1) {
            Some(left) => self.skipped = left,
            None => self.until = now.checked_add((took / SHARE).min(MOST)),
        }
    }

    /// Requests were submitted.
    pub(super) fn note_submitted(&mut self, requests: usize) {
        self.came = self.came.saturating_add(requests);
        if self.until.is_some() && self.came >= self.ended {
            self.end_wait();
        }
    }

    /// How long the next step waits for more.
    pub(super) fn wait(&mut self, now: Instant) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(now);
        if left.is_zero() {
            self.end_wait();
            return None;
        }
        Some(left)
    }

    fn end_wait(&mut self) {
        self.until = None;
        if self.came >= self.ended.div_ceil(2) {
            self.misses = 0;
        } else {
            self.misses = (self.misses + 1).min(MOST_DOUBLINGS);
            self.skipped = (1 << self.misses) - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(8);

    #[test]
    fn a_step_waits_a_little_until_as_many_came_as_ended() {
        let (mut refill, now) = (Refill::default(), Instant::now());
        assert_eq!(refill.wait(now), None, "nothing has ended yet");
        refill.note_step(0, STEP, now);
        assert_eq!(refill.wait(now), None, "nothing ended with the step");
        refill.note_step(3, STEP, now);
        assert_eq!(refill.wait(now), Some(STEP / 16));
        refill.note_submitted(2);
        let later = now + STEP / 32;
        assert_eq!(refill.wait(later), Some(STEP / 32));
        refill.note_submitted(1);
        assert_eq!(refill.wait(later), None);
        // Long steps do not wait longer.
        refill.note_step(1, Duration::from_secs(10), now);
        assert_eq!(refill.wait(now), Some(MOST));
    }

    #[test]
    fn waits_that_bring_nothing_become_rare_and_come_back() {
        let (mut refill, now) = (Refill::default(), Instant::now());
        let (steps, mut waits) = (10_000, 0);
        for _ in 0..steps {
            refill.note_step(1, STEP, now);
            waits += u32::from(refill.wait(now).is_some());
        }
        assert!((50..100).contains(&waits), "{waits} of {steps}");
        // The first that brings something is followed by a wait in each step.
        while refill.wait(now).is_none() {
            refill.note_step(1, STEP, now);
        }
        refill.note_submitted(1);
        for _ in 0..10 {
            refill.note_step(1, STEP, now);
            assert!(refill.wait(now).is_some());
            refill.note_submitted(1);
        }
    }
}
