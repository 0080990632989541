//! Repetition, presence and frequency penalties.

use rustc_hash::FxHashMap;

use super::options::SamplingOptions;

/// How often each token occurs among the recent ones.
#[derive(Clone, Debug, Default)]
pub(super) struct RecentTokens {
    counts: FxHashMap<u32, u32>,
}

impl RecentTokens {
    pub(super) fn clear(&mut self) {
        self.counts.clear();
    }

    /// How many different tokens are among the recent ones.
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Counts the last of these tokens, and no longer the one that is not among the last `window` any more.
    pub(super) fn accept(&mut self, tokens: &[u32], window: usize) {
        let Some(last) = tokens.last().filter(|_| window > 0) else { return };
        *self.counts.entry(*last).or_default() += 1;
        let Some(left) = tokens.len().checked_sub(window.saturating_add(1)).and_then(|at| tokens.get(at))
        else {
            return;
        };
        if let Some(count) = self.counts.get_mut(left) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(left);
            }
        }
    }

    /// Changes the logits of the recent tokens.
    pub(super) fn penalize(&self, options: &SamplingOptions, logits: &mut [f32]) {
        for (token, count) in &self.counts {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = penalized(options, *logit, *count);
            }
        }
    }

    /// A token's logit with the penalties.
    pub(super) fn penalized(&self, options: &SamplingOptions, token: u32, logit: f32) -> f32 {
        self.counts.get(&token).map_or(logit, |count| penalized(options, logit, *count))
    }
}

fn penalized(options: &SamplingOptions, logit: f32, count: u32) -> f32 {
    let SamplingOptions { repeat_penalty, presence_penalty, frequency_penalty, .. } = *options;
    let repeated = if logit > 0.0 { logit / repeat_penalty } else { logit * repeat_penalty };
    // Clamped in between: two infinities of different signs would make a NaN.
    let repeated = clamp(logit, repeated);
    clamp(logit, repeated - (count as f32 * frequency_penalty + presence_penalty))
}

/// A changed logit, kept finite if the original was: extreme penalties overflow, and infinities mean something else.
pub(super) fn clamp(original: f32, changed: f32) -> f32 {
    if original.is_finite() { changed.clamp(f32::MIN, f32::MAX) } else { original }
}
