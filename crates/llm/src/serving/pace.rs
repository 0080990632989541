//! How many tokens of prompts a step may compute, so that sequences that are being generated do not wait too long.

use std::time::Duration;

/// The fewest tokens of prompts in a step.
pub(super) const LEAST: usize = 32;

/// The longest step with parts of prompts, in times of a step without: tokens then come at nearly even distances, whether
/// prompts arrive or not.
const LONGEST: f64 = 1.8;

/// Learns how long steps take, and limits them to a target.
#[derive(Debug)]
pub(super) struct Pace {
    target: Option<Duration>,
    /// Seconds of a step without prompts, and of each token of prompts more; 0 before any was seen.
    decode: f64,
    per_token: f64,
}

impl Pace {
    pub(super) fn new(target: Option<Duration>) -> Pace {
        Pace { target, decode: 0.0, per_token: 0.0 }
    }

    /// Tokens of prompts for a step that also decodes `decoding` tokens.
    pub(super) fn prompt_tokens(&self, decoding: usize, batch: usize) -> usize {
        let Some(target) = self.target.filter(|_| decoding > 0 && self.per_token > 0.0) else { return batch };
        let longest = if self.decode > 0.0 { LONGEST * self.decode } else { f64::INFINITY };
        let time = target.as_secs_f64().min(longest) - self.decode;
        // A float outside the range of integers becomes the nearest one.
        ((time / self.per_token) as usize).clamp(LEAST, batch.max(LEAST))
    }

    /// Notes the time of a step with so many tokens of prompts.
    pub(super) fn note(&mut self, prompts: usize, time: Duration) {
        let seconds = time.as_secs_f64();
        let average = |old: f64, new: f64| if old == 0.0 { new } else { 0.8 * old + 0.2 * new };
        if prompts == 0 {
            self.decode = average(self.decode, seconds);
        } else if prompts >= LEAST {
            let rest = (seconds - self.decode).max(seconds * 0.1);
            self.per_token = average(self.per_token, rest / prompts as f64);
        }
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_cut_so_that_a_step_takes_the_time_that_is_aimed_at() {
        let milliseconds = Duration::from_millis;
        let mut pace = Pace::new(Some(milliseconds(100)));
        assert_eq!(pace.prompt_tokens(3, 512), 512, "nothing is known yet");
        for _ in 0..50 {
            pace.note(0, milliseconds(60));
            pace.note(200, milliseconds(60 + 50));
        }
        // 60 ms for decoding, a quarter of a millisecond for each token more.
        assert!((150..170).contains(&pace.prompt_tokens(3, 512)), "{pace:?}");
        assert_eq!(pace.prompt_tokens(0, 512), 512, "nobody waits");
        assert_eq!(pace.prompt_tokens(3, 64), 64);
        for _ in 0..50 {
            pace.note(200, Duration::from_secs(60));
        }
        assert_eq!(pace.prompt_tokens(3, 512), LEAST);
    }

    /// Prompts of 4,000 tokens arrive while others are generated: the time of a step in some unit, on a simulated device.
    #[test]
    fn tokens_come_at_nearly_even_distances_while_prompts_arrive() {
        let time = |prompts: usize, before: usize| {
            6e-3 + prompts as f64 * (4e-5 + before as f64 * 4e-9) + if prompts > 0 { 2e-4 } else { 0.0 }
        };
        let mut pace = Pace::new(Some(Duration::from_millis(100)));
        let mut times = Vec::new();
        for _ in 0..20 {
            for _ in 0..30 {
                times.push(time(0, 0));
                pace.note(0, Duration::from_secs_f64(time(0, 0)));
            }
            let mut computed = 0;
            while computed < 4000 {
                let tokens = pace.prompt_tokens(64, 512).min(4000 - computed);
                let seconds = time(tokens, computed);
                times.push(seconds);
                pace.note(tokens, Duration::from_secs_f64(seconds));
                computed += tokens;
            }
        }
        // The very first part is not limited: nothing is known then.
        times.sort_by(f64::total_cmp);
        let (median, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        assert!(late <= 2.0 * median, "{late} {median}");
        let plain = time(0, 0);
        assert!(late <= 2.0 * plain && late > 1.3 * plain, "{late} {plain}");
    }

    #[test]
    fn prompts_are_not_cut_where_nobody_waits() {
        let mut without = Pace::new(None);
        without.note(200, Duration::from_secs(60));
        assert_eq!(without.prompt_tokens(3, 512), 512);
    }
}
