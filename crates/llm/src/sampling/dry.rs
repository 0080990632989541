//! The DRY penalty: tokens that would continue a repeated sequence.

use rustc_hash::FxHashMap;

use super::options::DryOptions;
use super::penalties::clamp;
use crate::tokenizer::Tokenizer;

/// The number of tokens at the end of the text that no sequence breaker is part of. Follows the text of the tokens, so
/// that a breaker is found however it is divided into tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Breakers {
    /// Tokens after the one in which the last breaker ends; all tokens if there is none.
    pub(super) since: usize,
    /// The end of the text, shorter than the longest breaker.
    tail: Vec<u8>,
}

impl Breakers {
    pub(super) fn clear(&mut self) {
        *self = Breakers::default();
    }

    /// Adds a token with its text.
    pub(super) fn accept(&mut self, options: &DryOptions, text: &[u8]) {
        let before = self.tail.len();
        self.tail.extend_from_slice(text);
        self.since += 1;
        if contains_breaker(options, &self.tail, before) {
            self.since = 0;
        }
        let longest = options.sequence_breakers.iter().map(String::len).max().unwrap_or(0);
        let surplus = self.tail.len().saturating_sub(longest.saturating_sub(1));
        self.tail.drain(..surplus);
    }
}

/// Whether a breaker ends in `text` after position `after`.
fn contains_breaker(options: &DryOptions, text: &[u8], after: usize) -> bool {
    options.sequence_breakers.iter().map(String::as_bytes).filter(|breaker| !breaker.is_empty()).any(
        |breaker| {
            let start = (after + 1).saturating_sub(breaker.len());
            text.get(start..).is_some_and(|text| text.windows(breaker.len()).any(|part| part == breaker))
        },
    )
}

/// The text of a token in which breakers are looked for; control tokens have one here, too.
pub(super) fn token_text(tokenizer: &Tokenizer, token: u32) -> &[u8] {
    match tokenizer.piece(token) {
        Ok(piece) if !piece.is_empty() => piece,
        _ => tokenizer.vocabulary().tokens.get(token as usize).map_or(&[], |text| text.as_bytes()),
    }
}

/// Changes the logits of all tokens that would continue a repetition of the end of `tokens`. `since_breaker` limits
/// its length.
pub(super) fn penalize(
    options: &DryOptions,
    tokens: &[u32],
    since_breaker: usize,
    tokenizer: Option<&Tokenizer>,
    logits: &mut [f32],
) {
    let recent = tokens.get(tokens.len().saturating_sub(options.last_n)..).unwrap_or(tokens);
    for (token, length) in continuations(recent, since_breaker, options.allowed_length) {
        let is_breaker = || tokenizer.is_some_and(|t| contains_breaker(options, token_text(t, token), 0));
        let Some(logit) = logits.get_mut(token as usize).filter(|_| !is_breaker()) else { continue };
        let penalty = f64::from(options.multiplier) * power(options.base, length - options.allowed_length);
        *logit = clamp(*logit, (f64::from(*logit) - penalty) as f32);
    }
}

/// `base ^ exponent`, at most about the largest `f32`; multiplied step by step, so that it rounds alike everywhere.
fn power(base: f32, exponent: usize) -> f64 {
    let mut result = 1.0;
    if base > 1.0 {
        for _ in 0..exponent {
            result *= f64::from(base);
            if result >= f64::from(f32::MAX) {
                break;
            }
        }
    }
    result
}

/// Every token that follows an earlier occurrence of the last tokens, with the length of the longest one: at least
/// `least` tokens, and no more than `most` counted.
fn continuations(tokens: &[u32], most: usize, least: usize) -> FxHashMap<u32, usize> {
    let mut found = FxHashMap::default();
    if most < least || tokens.len() <= least {
        return found;
    }
    // The Z function of the reversed tokens: at i, how many tokens before position i are the same as at the end.
    let reversed: Vec<u32> = tokens.iter().rev().copied().collect();
    let mut lengths = vec![0usize; reversed.len()];
    let (mut start, mut end) = (0, 0);
    for i in 1..reversed.len() {
        let known = lengths.get(i - start).copied().unwrap_or(0).min(end.max(i) - i);
        let same = |length: usize| reversed.get(i + length).is_some_and(|b| reversed.get(length) == Some(b));
        let mut length = known;
        while same(length) {
            length += 1;
        }
        if i + length > end {
            (start, end) = (i, i + length);
        }
        if let Some(slot) = lengths.get_mut(i) {
            *slot = length;
        }
        if let (true, Some(next)) = (length.min(most) >= least, reversed.get(i - 1)) {
            let longest = found.entry(*next).or_insert(0);
            *longest = length.min(most).max(*longest);
        }
    }
    found
}
