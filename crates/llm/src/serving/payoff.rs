//! Whether guesses pay: the time per token of steps with guesses and without them, measured in turns.

/// Steps of a trial of the mode that was slower so far.
const TRIAL: usize = 8;
/// Steps between two trials; doubled while trials change nothing.
const INTERVAL: usize = 48;
/// The most steps between two trials.
const MAX_INTERVAL: usize = 4096;

/// Decides for each step whether tokens are guessed.
#[derive(Debug)]
pub(super) struct Payoff {
    /// Seconds in which a sequence advances by a token, without guesses and with them; 0 before any was seen.
    seconds: [f64; 2],
    /// The mode that is faster, and the one of this step.
    best: bool,
    mode: bool,
    /// Steps until the next trial, or until the end of this one.
    left: usize,
    interval: usize,
}

impl Payoff {
    pub(super) fn new() -> Payoff {
        Payoff { seconds: [0.0; 2], best: true, mode: true, left: INTERVAL, interval: INTERVAL }
    }

    /// Whether the next step may guess.
    pub(super) fn guesses(&self) -> bool {
        self.mode
    }

    /// Notes the seconds of a step without prompts in which sequences advanced by `tokens` on average, with or without guesses.
    pub(super) fn note(&mut self, guessed: bool, tokens: f64, seconds: f64) {
        if tokens <= 0.0 {
            return;
        }
        let [without, with] = &mut self.seconds;
        let average = if guessed { with } else { without };
        let now = seconds / tokens;
        *average = if *average == 0.0 { now } else { 0.85 * *average + 0.15 * now };
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return;
        }
        if self.mode == self.best {
            self.mode = !self.best;
            self.left = TRIAL;
            return;
        }
        let [without, with] = self.seconds;
        // A mode that was not seen yet keeps the other one from being compared.
        let best = if without == 0.0 || with == 0.0 { self.best } else { with < without };
        self.interval = if best == self.best { (2 * self.interval).min(MAX_INTERVAL) } else { INTERVAL };
        (self.best, self.mode, self.left) = (best, best, self.interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps that take so long and advance so far without guesses and with them; returns the share of steps with guesses.
    fn run(payoff: &mut Payoff, steps: usize, without: (f64, f64), with: (f64, f64)) -> f64 {
        let mut guessing = 0;
        for _ in 0..steps {
            let mode = payoff.guesses();
            let (tokens, seconds) = if mode { with } else { without };
            payoff.note(mode, tokens, seconds);
            guessing += usize::from(mode);
        }
        guessing as f64 / steps as f64
    }

    #[test]
    fn guesses_stay_where_they_pay_and_go_where_they_do_not() {
        let mut payoff = Payoff::new();
        assert!(run(&mut payoff, 2000, (1.0, 0.010), (2.5, 0.012)) > 0.95);
        // The text changes: guesses are wrong now.
        run(&mut payoff, 5000, (1.0, 0.010), (1.0, 0.014));
        assert!(run(&mut payoff, 5000, (1.0, 0.010), (1.0, 0.014)) < 0.05);
        run(&mut payoff, 10_000, (1.0, 0.010), (2.5, 0.012));
        assert!(run(&mut payoff, 2000, (1.0, 0.010), (2.5, 0.012)) > 0.95);
        // Steps in which nobody advanced say nothing.
        let before = payoff.left;
        payoff.note(true, 0.0, 1.0);
        assert_eq!(payoff.left, before);
    }

    #[test]
    fn guesses_that_never_pay_cost_little_from_the_start() {
        let mut payoff = Payoff::new();
        let guessing = run(&mut payoff, 2000, (1.0, 0.010), (1.0, 0.014));
        // 40 % slower steps in so few of them stay below 2.5 %.
        assert!(guessing < 0.06, "{guessing}");
    }
}
