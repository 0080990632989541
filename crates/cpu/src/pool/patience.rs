//! How long a thread polls before it sleeps.
//!
//! Putting sixteen threads to sleep and waking them takes longer than most steps of a run, so a thread that has a core of
//! its own polls for much longer than a wait usually takes. Where it has not, the thread that it waits for may need this
//! core: whoever notices that another thread ran in its place sleeps at once, and polls only briefly the next times.
//! Still it polls: where cores are contended, a thread that sleeps may wait for a time slice of another to end.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// Longest poll for other threads of a run, which are all computing.
pub(super) const IN_RUN: Duration = Duration::from_millis(2);

/// Longest poll for the next run, if the latest came as soon: while a GPU computes its layers of a token, say.
const BETWEEN_RUNS: Duration = Duration::from_micros(500);

/// Longest poll when a longer one is not worth it or the core is shared: about as long as it takes to sleep and wake up.
const BRIEF: Duration = Duration::from_micros(50);

/// Longest poll where there are more threads than cores.
pub(super) const OVERSUBSCRIBED: Duration = Duration::from_micros(2);

/// Time between two readings of the clock from which on another thread has run in between. The readings are some
/// microseconds apart, and a time slice takes a millisecond or more.
const LOST_CORE: Duration = Duration::from_micros(100);

/// Time after which a polling thread yields. The scheduler may have put the thread that it waits for on the same core, and
/// on a busy machine it often does: a step of a small model takes no longer.
const YIELD_EVERY: Duration = Duration::from_micros(10);

/// Polls between two readings of the clock: about two microseconds.
const POLLS: u32 = 64;

thread_local! {
    /// The longest poll of this thread, whatever it waits for.
    static LIMIT: Cell<Duration> = const { Cell::new(IN_RUN) };
}

/// How polling ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PollEnd {
    /// The thread waited for was done.
    Done,
    /// It took too long.
    TooLong,
    /// Another thread ran on this core meanwhile.
    LostCore,
}

/// The limit of a thread after a poll: short where its core is shared, then longer each time, most where polling pays.
fn next_limit(limit: Duration, end: PollEnd) -> Duration {
    match end {
        PollEnd::Done => (limit * 2).min(IN_RUN),
        PollEnd::TooLong => (limit * 5 / 4).min(IN_RUN),
        PollEnd::LostCore => BRIEF,
    }
}

/// The longest poll for the next run after a wait of this length for the latest one.
pub(super) fn for_next_run(latest: Duration) -> Duration {
    if latest <= BETWEEN_RUNS { BETWEEN_RUNS } else { BRIEF }
}

/// Polls until `done()` or for about `longest`, less where this thread's core is shared. Returns whether it is done.
pub(super) fn poll(longest: Duration, done: impl Fn() -> bool) -> bool {
    let limit = LIMIT.get();
    let longest = longest.min(limit);
    let start = Instant::now();
    let (mut before, mut yielded) = (start, start);
    let end = loop {
        if (0..POLLS).any(|_| done() || pause()) {
            break PollEnd::Done;
        }
        let now = Instant::now();
        if now.duration_since(before) > LOST_CORE {
            break PollEnd::LostCore;
        }
        if now.duration_since(start) > longest {
            break PollEnd::TooLong;
        }
        before = now;
        if now.duration_since(yielded) > YIELD_EVERY {
            // If a thread of another program waits for this core, the next reading of the clock tells.
            std::thread::yield_now();
            yielded = now;
        }
    };
    LIMIT.set(next_limit(limit, end));
    end == PollEnd::Done
}

/// A pause between two polls. Always false.
fn pause() -> bool {
    std::hint::spin_loop();
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_lost_its_core_polls_briefly_and_recovers() {
        for (end, most) in [(PollEnd::Done, 10), (PollEnd::TooLong, 40)] {
            let mut limit = next_limit(IN_RUN, PollEnd::LostCore);
            assert_eq!(limit, BRIEF);
            let mut polls = 0;
            while limit < IN_RUN {
                limit = next_limit(limit, end);
                polls += 1;
            }
            assert!(limit == IN_RUN && polls > 4 && polls <= most, "{end:?}: {limit:?} after {polls}");
        }
    }

    #[test]
    fn a_long_wait_for_a_run_makes_the_next_poll_brief() {
        assert_eq!(for_next_run(Duration::from_micros(150)), BETWEEN_RUNS);
        assert_eq!(for_next_run(Duration::from_millis(2)), BRIEF);
    }

    #[test]
    fn polling_ends_when_done_and_when_it_takes_too_long() {
        assert!(poll(IN_RUN, || true));
        assert!(!poll(OVERSUBSCRIBED, || false));
    }
}
