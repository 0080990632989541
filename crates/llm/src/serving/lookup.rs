//! Prompt look-up: guesses that a text goes on as it did before.
//!
//! Where the latest tokens occurred earlier, the tokens that followed them there are guessed. A step computes guesses beside the
//! token that is due, which costs little where memory bandwidth rules, and every guess that turns out right saves a step.
//! Tokens are sampled as without guesses, so that guesses change results only where a step of several rows rounds differently from
//! one of a single row.

/// The longest run of latest tokens that is looked for.
const LONGEST: usize = 4;
/// The shortest.
const SHORTEST: usize = 2;
/// Steps without guesses after guesses did not pay; doubled each time that they do not.
const PAUSE: usize = 16;
/// The longest pause.
const LONGEST_PAUSE: usize = 512;

/// The state of one sequence.
#[derive(Clone, Debug)]
pub(super) struct Lookup {
    /// The most tokens that are guessed.
    most: usize,
    /// Where each run of tokens ended last, by its hash.
    ends: std::collections::HashMap<u64, usize>,
    /// Tokens that `ends` knows.
    known: usize,
    /// The share of guesses that were right lately.
    rate: f64,
    /// Steps left without guesses, and the next number of those.
    pause: usize,
    next_pause: usize,
}

impl Lookup {
    pub(super) fn new(most: usize) -> Lookup {
        Lookup {
            most,
            ends: std::collections::HashMap::new(),
            known: 0,
            rate: 0.5,
            pause: 0,
            next_pause: PAUSE,
        }
    }

    /// Takes in all tokens so far.
    pub(super) fn accept(&mut self, tokens: &[u32]) {
        // The latest token ends no run yet that something followed.
        for end in self.known.max(1)..tokens.len() {
            for length in SHORTEST..=LONGEST.min(end) {
                if let Some(run) = tokens.get(end - length..end) {
                    self.ends.insert(hash(run), end);
                }
            }
        }
        self.known = self.known.max(tokens.len());
    }

    /// Guesses at the tokens that follow.
    pub(super) fn guess(&mut self, tokens: &[u32], room: usize) -> Vec<u32> {
        if self.pause > 0 {
            self.pause -= 1;
            return Vec::new();
        }
        let most =
            ((self.most as f64 * self.rate * 2.0).ceil() as usize).clamp(1, self.most.max(1)).min(room);
        for length in (SHORTEST..=LONGEST.min(tokens.len())).rev() {
            let Some(run) = tokens.get(tokens.len() - length..) else { continue };
            let Some(end) = self.ends.get(&hash(run)).copied() else { continue };
            // Equal hashes of other tokens only make a bad guess.
            if end < tokens.len() && tokens.get(end - length..end) == Some(run) {
                let guess = tokens.get(end..tokens.len().min(end + most)).unwrap_or_default();
                return guess.to_vec();
            }
        }
        Vec::new()
    }

    /// Notes how many of the guesses of a step were right.
    pub(super) fn note(&mut self, guesses: usize, right: usize) {
        if guesses == 0 {
            return;
        }
        self.rate = 0.8 * self.rate + 0.2 * (right as f64 / guesses as f64);
        if self.rate < 0.15 {
            self.pause = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
            self.rate = 0.3;
        } else if right > 0 {
            self.next_pause = PAUSE;
        }
    }
}

/// A hash of a run of tokens; its length is part of it.
fn hash(run: &[u32]) -> u64 {
    run.iter().fold(run.len() as u64, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_repeats_is_guessed() {
        let mut lookup = Lookup::new(4);
        let text: Vec<u32> = vec![1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4];
        lookup.accept(&text);
        assert_eq!(lookup.guess(&text, 100), [5, 6, 7, 9]);
        assert_eq!(lookup.guess(&text, 2), [5, 6]);
        assert!(lookup.guess(&text, 0).is_empty());
        // The longer run decides: after 3, 4 something else came last, after 2, 3, 4 it did not.
        let text: Vec<u32> = vec![2, 3, 4, 5, 8, 3, 4, 6, 2, 3, 4];
        let mut lookup = Lookup::new(1);
        lookup.accept(&text);
        assert_eq!(lookup.guess(&text, 9), [5]);
        let text = [1, 2, 3];
        let mut lookup = Lookup::new(3);
        lookup.accept(&text);
        assert!(lookup.guess(&text, 9).is_empty());
    }

    #[test]
    fn guesses_that_are_wrong_pause_it_longer_and_longer() {
        let text: Vec<u32> = vec![1, 2, 3, 1, 2];
        let mut lookup = Lookup::new(4);
        lookup.accept(&text);
        let mut steps_until_pause = || {
            (1..100).find(|_| {
                lookup.guess(&text, 9);
                lookup.note(4, 0);
                lookup.pause > 0
            })
        };
        assert!(steps_until_pause().is_some());
        let first = lookup.pause;
        for _ in 0..first {
            assert!(lookup.guess(&text, 9).is_empty());
        }
        assert!(!lookup.guess(&text, 9).is_empty());
        while lookup.pause == 0 {
            lookup.note(4, 0);
        }
        assert!(lookup.pause > first);
        lookup.note(0, 0);
        lookup.pause = 0;
        lookup.note(4, 4);
        assert_eq!(lookup.next_pause, PAUSE);
    }
}
