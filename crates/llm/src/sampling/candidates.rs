//! The tokens that may be sampled, and the filters that remove some of them.

use super::candidate::TokenCandidate;
use super::options::SamplingOptions;
use super::probabilities::weight;
use super::random::Random;

/// Tokens with their logits. The order says nothing; sums are taken in order of tokens, so that rounding does not
/// depend on what earlier filters left.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    all: Vec<TokenCandidate>,
}

impl Candidates {
    /// All tokens that are not excluded by `-inf`.
    pub(super) fn fill(&mut self, logits: &[f32]) {
        self.all.clear();
        let allowed = (0u32..).zip(logits).filter(|(_, logit)| **logit != f32::NEG_INFINITY);
        self.all.extend(allowed.map(|(token, &logit)| TokenCandidate { token, logit }));
    }

    /// Some tokens.
    pub(super) fn fill_with(&mut self, some: impl Iterator<Item = TokenCandidate>) {
        self.all.clear();
        self.all.extend(some);
    }

    /// The candidates, in no order.
    pub(super) fn all(&self) -> &[TokenCandidate] {
        &self.all
    }

    /// The most probable token, of equals the smallest.
    pub(super) fn best(&self) -> Option<u32> {
        self.all.iter().min_by(|one, other| one.order(other)).map(|best| best.token)
    }

    /// All filters of the options, in their order.
    pub(super) fn filter(&mut self, options: &SamplingOptions, random: &mut Random) {
        self.keep_top_n_sigma(options.top_n_sigma);
        self.keep_top_k(options.top_k);
        self.keep_typical(options.typical_p);
        self.keep_top_p(options.top_p);
        self.keep_min_p(options.min_p);
        if options.has_xtc() {
            self.exclude_top_choices(options.xtc_probability, options.xtc_threshold, random);
        }
    }

    fn keep_top_n_sigma(&mut self, sigmas: f32) {
        if sigmas <= 0.0 || self.all.len() < 2 {
            return;
        }
        let count = self.all.len() as f64;
        let mean = self.all.iter().map(|one| f64::from(one.logit)).sum::<f64>() / count;
        let square: f64 = self.all.iter().map(|one| (f64::from(one.logit) - mean).powi(2)).sum();
        let least = f64::from(self.best_logit()) - f64::from(sigmas) * (square / count).sqrt();
        self.all.retain(|one| f64::from(one.logit) >= least);
    }

    fn keep_top_k(&mut self, count: usize) {
        if count > 0 && count < self.all.len() {
            self.all.select_nth_unstable_by(count, TokenCandidate::order);
            self.all.truncate(count);
        }
    }

    /// Keeps the tokens whose information, `-ln p`, is closest to its mean, the entropy. Both have the logarithm of the
    /// normalization in them, which cancels: the distance is that of the logit from the mean logit.
    fn keep_typical(&mut self, typical_p: f32) {
        if typical_p >= 1.0 || self.all.len() < 2 {
            return;
        }
        let best = self.best_logit();
        let total = self.total(best);
        let relative = |one: &TokenCandidate| f64::from(one.logit) - f64::from(best);
        let mean =
            self.all.iter().map(|one| weight(one.logit, best, 1.0) * relative(one)).sum::<f64>() / total;
        let distance = |one: &TokenCandidate| (relative(one) - mean).abs();
        self.all.sort_unstable_by(|a, b| distance(a).total_cmp(&distance(b)).then(a.order(b)));
        let mut reached = 0.0;
        let needed = self.all.iter().position(|one| {
            reached += weight(one.logit, best, 1.0);
            reached > f64::from(typical_p) * total
        });
        self.all.truncate(needed.map_or(usize::MAX, |at| at + 1));
    }

    /// Keeps the smallest set of most probable tokens that reaches `top_p`. Sorts only as many candidates as needed.
    fn keep_top_p(&mut self, top_p: f32) {
        let top_p = f64::from(top_p);
        if top_p >= 1.0 || self.all.len() < 2 {
            return;
        }
        let best = self.best_logit();
        let total = self.total(best);
        let (mut sorted, mut reached) = (0, 0.0);
        let mut step = 128;
        while let Some(rest) = self.all.get_mut(sorted..).filter(|rest| !rest.is_empty()) {
            let size = step.min(rest.len());
            if size < rest.len() {
                rest.select_nth_unstable_by(size, TokenCandidate::order);
            }
            let Some(block) = rest.get_mut(..size) else { return };
            block.sort_unstable_by(TokenCandidate::order);
            for (index, candidate) in block.iter().enumerate() {
                reached += weight(candidate.logit, best, 1.0);
                if reached >= top_p * total {
                    self.all.truncate(sorted + index + 1);
                    return;
                }
            }
            sorted += size;
            step *= 2;
        }
    }

    fn keep_min_p(&mut self, min_p: f32) {
        let min_p = f64::from(min_p);
        if min_p > 0.0 {
            let best = self.best_logit();
            self.all.retain(|candidate| weight(candidate.logit, best, 1.0) >= min_p);
        }
    }

    /// XTC: with some probability removes all tokens that reach the threshold but the least probable of them.
    fn exclude_top_choices(&mut self, probability: f32, threshold: f32, random: &mut Random) {
        if self.all.len() < 2 || random.unit() >= f64::from(probability) {
            return;
        }
        let best = self.best_logit();
        let total = self.total(best);
        self.all.sort_unstable_by(TokenCandidate::order);
        let reaches = |one: &TokenCandidate| weight(one.logit, best, 1.0) >= f64::from(threshold) * total;
        let above = self.all.iter().take_while(|one| reaches(one)).count();
        self.all.drain(..above.saturating_sub(1));
    }

    /// A token drawn by its probability, with the temperature applied. `None` if there are no candidates.
    pub(super) fn draw(&mut self, temperature: f32, random: &mut Random) -> Option<u32> {
        let best = self.best_logit();
        let inverse_temperature = 1.0 / f64::from(temperature);
        self.all.sort_unstable_by_key(|candidate| candidate.token);
        let weight = |candidate: &TokenCandidate| weight(candidate.logit, best, inverse_temperature);
        let total: f64 = self.all.iter().map(weight).sum();
        let mut left = random.unit() * total;
        for candidate in &self.all {
            left -= weight(candidate);
            if left < 0.0 {
                return Some(candidate.token);
            }
        }
        // Rounding can leave a remainder; then it is the most probable token.
        self.best()
    }

    /// The sum of all weights. Sorts by token.
    fn total(&mut self, best: f32) -> f64 {
        self.all.sort_unstable_by_key(|candidate| candidate.token);
        self.all.iter().map(|candidate| weight(candidate.logit, best, 1.0)).sum()
    }

    pub(super) fn best_logit(&self) -> f32 {
        self.all.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max)
    }
}
