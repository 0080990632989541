//! Sampling from the largest logits alone, which a device has found: few options need the others.

use super::candidate::TokenCandidate;
use super::candidates::Candidates;
use super::options::SamplingOptions;
use super::penalties::{RecentTokens, clamp};
use super::probabilities::weight;

/// The largest logits of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TopLogits<'a> {
    /// The tokens, most probable first, of equals the smallest.
    pub(crate) tokens: &'a [u32],
    /// Their logits; no other token has a larger one than the last.
    pub(crate) logits: &'a [f32],
    /// The number of all logits.
    pub(crate) vocabulary: usize,
}

/// What changes logits before sampling, and only lowers them.
pub(super) struct Lowering<'a> {
    pub(super) options: &'a SamplingOptions,
    pub(super) recent: &'a RecentTokens,
    /// Tokens that are banned.
    pub(super) banned: &'a [u32],
}

impl SamplingOptions {
    /// Whether all logits are needed, however probable the largest are: something may raise a logit, or looks at all of them.
    pub(crate) fn needs_all_logits(&self) -> bool {
        let penalties = self.has_penalties()
            && (self.repeat_penalty < 1.0 || self.presence_penalty < 0.0 || self.frequency_penalty < 0.0);
        let biases = self.logit_bias.values().any(|bias| *bias > 0.0);
        // Without top-k, these normalise over all tokens, and nothing keeps the others from being drawn.
        let removes_best = self.typical_p < 1.0 || self.has_xtc();
        let is_drawn = self.temperature > 0.0 && (self.top_p < 1.0 || self.min_p <= 0.0);
        let looks_at_all = self.top_k == 0 && (removes_best || is_drawn);
        penalties || biases || looks_at_all || self.dry.is_active() || self.top_n_sigma > 0.0
    }
}

impl Lowering<'_> {
    fn apply(&self, token: u32, logit: f32) -> f32 {
        let bias = self.options.logit_bias.get(&token);
        let biased = match bias {
            Some(bias) if bias.is_finite() => clamp(logit, logit + bias),
            Some(bias) => *bias,
            None => logit,
        };
        if self.banned.contains(&token) {
            return f32::NEG_INFINITY;
        }
        match self.options.has_penalties() {
            true => self.recent.penalized(self.options, token, biased),
            false => biased,
        }
    }

    /// Whether [`Lowering::fill`] succeeds whichever of the largest logits are lowered: enough of them are left then.
    pub(super) fn is_certain(&self, top: &TopLogits<'_>) -> bool {
        let options = self.options;
        let removes_best = options.typical_p < 1.0 || options.has_xtc();
        let kept = match options.top_k {
            _ if options.takes_best() && !removes_best => 1,
            0 => return false,
            top_k => top_k,
        };
        let recent = if options.has_penalties() { self.recent.len() } else { 0 };
        let lowered = recent + options.logit_bias.len() + self.banned.len();
        let least = top.logits.last().copied().unwrap_or(f32::INFINITY);
        top.logits.get(kept + lowered - 1).is_some_and(|logit| *logit > least)
    }

    /// Fills candidates with the largest logits after they were lowered. `false` if it is not certain that the filters of the
    /// options leave none of the other tokens: then all logits are needed.
    pub(super) fn fill(&self, top: &TopLogits<'_>, candidates: &mut Candidates) -> bool {
        let TopLogits { tokens, logits, vocabulary } = *top;
        let options = self.options;
        let is_all = tokens.len() >= vocabulary;
        // The others have at most the last logit: whatever is above it is in its right place.
        let least = if is_all { f32::NEG_INFINITY } else { logits.last().copied().unwrap_or(f32::INFINITY) };
        let lowered = tokens
            .iter()
            .zip(logits)
            .map(|(&token, &logit)| TokenCandidate { token, logit: self.apply(token, logit) });
        candidates.fill_with(lowered.filter(|one| one.logit > least));
        let certain = candidates.all().len();
        if certain == 0 {
            return false;
        }
        let removes_best = options.typical_p < 1.0 || options.has_xtc();
        if is_all || options.top_k > 0 && options.top_k <= certain || options.takes_best() && !removes_best {
            return true;
        }
        // Min-p alone is a limit for each token by itself.
        let best = candidates.best_logit();
        !removes_best && options.top_p >= 1.0 && weight(least, best, 1.0) < f64::from(options.min_p)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::super::sampler::Sampler;
    use super::super::{DryOptions, SamplingOptions};
    use super::*;

    const VOCABULARY: usize = 700;
    const TOP: usize = 128;

    /// Random numbers below `bound`.
    struct Numbers(u64);

    impl Numbers {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % bound
        }

        fn pick<T: Copy>(&mut self, all: &[T]) -> T {
            all[self.below(all.len())]
        }
    }

    fn options(numbers: &mut Numbers, seed: u64) -> SamplingOptions {
        SamplingOptions {
            temperature: numbers.pick(&[0.0, 0.3, 0.8, 1.5]),
            top_k: numbers.pick(&[0, 1, 2, 40, 40, 100, 126, 300]),
            top_p: numbers.pick(&[0.5, 0.95, 1.0]),
            min_p: numbers.pick(&[0.0, 0.001, 0.05, 0.3]),
            typical_p: numbers.pick(&[1.0, 1.0, 0.7]),
            xtc_probability: numbers.pick(&[0.0, 0.0, 0.5]),
            top_n_sigma: numbers.pick(&[0.0, 0.0, 0.0, 1.0]),
            repeat_penalty: numbers.pick(&[1.0, 1.0, 1.3, 0.9]),
            presence_penalty: numbers.pick(&[0.0, 0.0, 2.0]),
            frequency_penalty: numbers.pick(&[0.0, 0.0, 0.5, -0.5]),
            dry: DryOptions { sequence_breakers: Vec::new(), ..DryOptions::default() },
            logit_bias: match numbers.below(4) {
                0 => [(numbers.below(VOCABULARY) as u32, -3.0), (5, f32::NEG_INFINITY)].into(),
                1 => [(numbers.below(VOCABULARY) as u32, 4.0)].into(),
                _ => [].into(),
            },
            seed,
            ..SamplingOptions::default()
        }
    }

    /// The largest logits in order, of equals the smallest token first.
    fn top_of(logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let mut all: Vec<TokenCandidate> =
            (0..).zip(logits).map(|(token, &logit)| TokenCandidate { token, logit }).collect();
        all.sort_by(TokenCandidate::order);
        all.truncate(TOP);
        (all.iter().map(|one| one.token).collect(), all.iter().map(|one| one.logit).collect())
    }

    #[test]
    fn the_largest_logits_give_the_token_that_all_logits_give() {
        let (mut sampled, mut refused) = (0, 0);
        for seed in 0..4000 {
            let mut numbers = Numbers(seed);
            let options = options(&mut numbers, seed);
            let needs_all = options.needs_all_logits();
            let mut sampler = Sampler::new(options.clone()).unwrap();
            // Peaked and flat distributions, some with many equal logits.
            let spread = numbers.pick(&[0.01, 1.0, 6.0]);
            let steps = numbers.pick(&[20, 1 << 20]);
            let logits: Vec<f32> =
                (0..VOCABULARY).map(|_| numbers.below(steps) as f32 / steps as f32 * spread * 4.0).collect();
            let (tokens, values) = top_of(&logits);
            // Recent tokens are often among the most probable ones.
            for _ in 0..numbers.below(80) {
                let token = if numbers.below(2) == 0 {
                    tokens[numbers.below(TOP)]
                } else {
                    numbers.below(VOCABULARY) as u32
                };
                sampler.accept(token);
            }
            let mut other = sampler.clone();
            let mut asked = sampler.clone();
            let top = TopLogits { tokens: &tokens, logits: &values, vocabulary: VOCABULARY };
            let before = other.random_state();
            let sampled_from_top = other.sample_top(&top);
            assert_eq!(asked.is_top_enough(&top), sampled_from_top.is_some(), "seed {seed}: {options:?}");
            assert_eq!(asked.random_state(), before, "seed {seed}");
            match sampled_from_top {
                Some(token) => {
                    sampled += 1;
                    assert!(!needs_all, "seed {seed}: {options:?}");
                    assert_eq!(token, sampler.sample(&logits).unwrap(), "seed {seed}: {options:?}");
                    assert_eq!(other.random_state(), sampler.random_state(), "seed {seed}");
                }
                None => {
                    refused += 1;
                    assert_eq!(other.random_state(), before, "seed {seed}");
                }
            }
        }
        assert!(sampled > 600 && refused > 600, "{sampled} {refused}");
    }

    #[test]
    fn the_default_options_need_few_logits_and_sampling_from_everything_all() {
        assert!(!SamplingOptions::default().needs_all_logits());
        let everything = SamplingOptions {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..SamplingOptions::default()
        };
        assert!(everything.needs_all_logits());
        assert!(SamplingOptions { top_k: 0, ..SamplingOptions::default() }.needs_all_logits());
        let dry = DryOptions { multiplier: 0.8, ..DryOptions::default() };
        assert!(SamplingOptions { dry, ..SamplingOptions::default() }.needs_all_logits());
    }

    #[test]
    fn all_logits_are_enough_however_few_there_are() {
        let logits = [0.5, 3.0, 2.5, -1.0];
        let (tokens, values) = top_of(&logits);
        let top = TopLogits { tokens: &tokens, logits: &values, vocabulary: logits.len() };
        for seed in 0..50 {
            let mut sampler = Sampler::new(SamplingOptions { seed, ..SamplingOptions::default() }).unwrap();
            let token = sampler.clone().sample_top(&top);
            assert_eq!(token, Some(sampler.sample(&logits).unwrap()), "seed {seed}");
        }
    }
}
