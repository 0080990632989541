//! Which experts the tokens of a simulated step use: the same for every rank of every division, and for one rank alone.

use std::ops::Range;

use crate::sampling::random::Random;

/// The step whose tokens are routed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct RoutedStep {
    pub(super) seed: u64,
    pub(super) round: usize,
    /// The first of the requests that the step computes a token of, and how many there are.
    pub(super) first: usize,
    pub(super) tokens: usize,
}

/// The experts of a layer, and those that each token uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ExpertCounts {
    pub(super) all: usize,
    pub(super) used: usize,
}

/// What a rank has to do with the experts of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct ExpertWork {
    /// Experts that any token uses.
    pub(super) distinct: usize,
    /// Tokens of each expert, added up.
    pub(super) pairs: usize,
}

impl RoutedStep {
    /// The work of those experts of a layer that a rank has. Every token uses different ones, all equally often.
    pub(super) fn work(&self, layer: usize, experts: ExpertCounts, own: &Range<usize>) -> ExpertWork {
        let mut tokens = vec![0usize; own.len()];
        for token in self.first..self.first + self.tokens {
            for expert in self.of_token(layer, token, experts) {
                let place = expert.checked_sub(own.start).and_then(|place| tokens.get_mut(place));
                place.into_iter().for_each(|count| *count += 1);
            }
        }
        let distinct = tokens.iter().filter(|count| **count > 0).count();
        ExpertWork { distinct, pairs: tokens.iter().sum() }
    }

    /// The experts of one token.
    fn of_token(&self, layer: usize, token: usize, experts: ExpertCounts) -> Vec<usize> {
        let mut random = Random { state: self.seed };
        for part in [self.round, layer, token] {
            random.state ^= (part as u64).wrapping_mul(0xa076_1d64_78bd_642f);
            random.unit();
        }
        let used = experts.used.min(experts.all);
        let mut chosen: Vec<usize> = Vec::with_capacity(used);
        // Floyd's sampling: each set of experts is equally likely.
        for last in experts.all - used..experts.all {
            let drawn = (random.unit() * (last + 1) as f64) as usize;
            chosen.push(if chosen.contains(&drawn) { last } else { drawn.min(last) });
        }
        chosen
    }
}
