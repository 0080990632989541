//! How many tokens of prompts a step may compute, so that sequences that are being generated do not wait too long.

use std::time::Duration;

/// The fewest tokens of prompts in a step.
pub(super) const LEAST: usize = 32;

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
        let time = target.as_secs_f64() - self.decode;
        // A float outside the range of integers becomes the nearest one.
        ((time / self.per_token) as usize).clamp(LEAST, batch.max(LEAST))
    }

    /// Notes the time of a step.
    pub(super) fn note(&mut self, tokens: usize, prompts: bool, time: Duration) {
        let seconds = time.as_secs_f64();
        let average = |old: f64, new: f64| if old == 0.0 { new } else { 0.8 * old + 0.2 * new };
        if !prompts {
            self.decode = average(self.decode, seconds);
        } else if tokens >= LEAST {
            let rest = (seconds - self.decode).max(seconds * 0.1);
            self.per_token = average(self.per_token, rest / tokens as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_cut_so_that_a_step_takes_the_time_that_is_aimed_at() {
        let milliseconds = Duration::from_millis;
        let mut pace = Pace::new(Some(milliseconds(100)));
        assert_eq!(pace.prompt_tokens(3, 512), 512, "nothing is known yet");
        for _ in 0..50 {
            pace.note(4, false, milliseconds(20));
            pace.note(200, true, milliseconds(20 + 100));
        }
        // 20 ms for decoding, half a millisecond for each token more.
        assert!((150..170).contains(&pace.prompt_tokens(3, 512)), "{pace:?}");
        assert_eq!(pace.prompt_tokens(0, 512), 512, "nobody waits");
        assert_eq!(pace.prompt_tokens(3, 64), 64);
        for _ in 0..50 {
            pace.note(200, true, Duration::from_secs(60));
        }
        assert_eq!(pace.prompt_tokens(3, 512), LEAST);
        let mut without = Pace::new(None);
        without.note(200, true, Duration::from_secs(60));
        assert_eq!(without.prompt_tokens(3, 512), 512);
    }
}
