//! What an answer may be made of and where it ends, beyond sampling options, grammars and stop strings.

use crate::line_rules::LineRules;
use crate::sampling_hook::{HookError, SamplingHook};
use crate::{Error, Model, Result};

/// Rules of one answer: the tokens that it may have, those that end it, and how its end is shown.
///
/// Where rules leave no token, the weaker one yields: the least length first, then the sequences that are banned, then the
/// tokens that are allowed. A grammar is stronger than all of them.
///
/// ```
/// use quadriga_llm::AnswerRules;
/// use quadriga_llm::serving::Request;
///
/// // At least ten tokens, the last of which may be 13, and never 7 behind 5.
/// let rules = AnswerRules {
///     min_tokens: 10,
///     stop_tokens: vec![13],
///     banned_sequences: vec![vec![5, 7]],
///     ..AnswerRules::default()
/// };
/// let request = Request { rules, ..Request::new(vec![1, 450, 7483]) };
/// # assert_eq!(request.rules.min_tokens, 10);
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AnswerRules {
    /// The tokens that may be sampled; all if `None`.
    pub allowed_tokens: Option<Vec<u32>>,
    /// Sequences of tokens whose last one is not sampled behind the others. Empty ones ban nothing.
    pub banned_sequences: Vec<Vec<u32>>,
    /// Tokens that end the answer, beside the end-of-generation tokens of the model.
    pub stop_tokens: Vec<u32>,
    /// The least number of tokens: before that, no token that ends the answer is sampled, and a stop string ends it only if
    /// it is completed later.
    pub min_tokens: usize,
    /// Whether the stop string or stop token that ends the answer is a part of its text.
    pub keep_stop: bool,
    /// Whether control tokens are written in the text, as they are named.
    pub control_text: bool,
    /// Where the answer ends at one of its lines.
    pub lines: LineRules,
}

impl AnswerRules {
    /// The memory that they take, roughly.
    pub fn bytes(&self) -> usize {
        let of_list = |list: &Vec<u32>| size_of::<Vec<u32>>() + size_of_val(list.as_slice());
        let banned: usize = self.banned_sequences.iter().map(of_list).sum();
        banned + self.allowed_tokens.as_ref().map_or(0, of_list) + of_list(&self.stop_tokens)
    }

    /// An error that names the first token that a vocabulary of this size lacks.
    pub(crate) fn check(&self, vocabulary: usize) -> Result<()> {
        let listed = self.allowed_tokens.iter().chain(&self.banned_sequences).flatten();
        match listed.chain(&self.stop_tokens).find(|token| **token as usize >= vocabulary) {
            Some(token) => Err(Error::Token { token: *token, count: vocabulary }),
            None => Ok(()),
        }
    }

    /// What keeps an answer to the rules, if they exclude any token.
    pub(crate) fn hook(&self, model: &Model) -> Option<RulesHook> {
        let banned: Vec<Vec<u32>> =
            self.banned_sequences.iter().filter(|sequence| !sequence.is_empty()).cloned().collect();
        if self.allowed_tokens.is_none() && banned.is_empty() && self.min_tokens == 0 {
            return None;
        }
        let count = model.hyperparameters().vocabulary;
        let allowed = self.allowed_tokens.as_ref().map(|tokens| {
            let mut allowed = vec![false; count];
            for token in tokens {
                if let Some(allowed) = allowed.get_mut(*token as usize) {
                    *allowed = true;
                }
            }
            allowed
        });
        let mut ends = self.stop_tokens.clone();
        ends.extend(model.tokenizer().ok().into_iter().flat_map(|tokenizer| tokenizer.end_tokens()));
        Some(RulesHook { allowed, banned, ends, min_tokens: self.min_tokens, start: None })
    }
}

/// Excludes the tokens that rules exclude. It comes after all other hooks, so that it sees what they leave.
pub(crate) struct RulesHook {
    /// For each token, whether it is allowed; all are if `None`.
    allowed: Option<Vec<bool>>,
    banned: Vec<Vec<u32>>,
    /// Tokens that end the answer.
    ends: Vec<u32>,
    min_tokens: usize,
    /// Tokens of the prompt, once the first token is sampled.
    start: Option<usize>,
}

impl RulesHook {
    fn is_allowed(&self, token: usize) -> bool {
        self.allowed.as_ref().is_none_or(|allowed| allowed.get(token).copied().unwrap_or(false))
    }

    /// The tokens that would complete a banned sequence, none of which reaches into the prompt.
    fn banned_after(&self, answer: &[u32]) -> Vec<u32> {
        let last = |sequence: &Vec<u32>| {
            let (last, before) = sequence.split_last()?;
            answer.ends_with(before).then_some(*last)
        };
        self.banned.iter().filter_map(last).collect()
    }
}

impl SamplingHook for RulesHook {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> std::result::Result<(), HookError> {
        let start = *self.start.get_or_insert(tokens.len());
        let answer = tokens.get(start..).unwrap_or_default();
        let banned = self.banned_after(answer);
        let ends = if answer.len() < self.min_tokens { self.ends.as_slice() } else { &[] };
        let is_left = |token: usize, without: &[&[u32]]| {
            self.is_allowed(token)
                && !without.iter().any(|list| list.iter().any(|other| *other as usize == token))
        };
        // From the strictest to the weakest.
        let choices: [&[&[u32]]; 3] = [&[&banned, ends], &[&banned], &[]];
        let leaves_any = |without: &&&[&[u32]]| {
            let mut possible = (0..).zip(logits.iter()).filter(|(_, logit)| logit.is_finite());
            possible.any(|(token, _)| is_left(token, without))
        };
        let Some(without) = choices.iter().find(leaves_any) else { return Ok(()) };
        for (token, logit) in logits.iter_mut().enumerate() {
            if !is_left(token, without) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// The tokens that a hook leaves of five, behind an answer, where `possible` were left before it.
    fn left(hook: &mut RulesHook, answer: &[u32], possible: &[usize]) -> Vec<usize> {
        let mut logits = [f32::NEG_INFINITY; 5];
        for (token, logit) in logits.iter_mut().enumerate() {
            if possible.contains(&token) {
                *logit = token as f32;
            }
        }
        // The prompt ends like a banned sequence begins.
        hook.start = Some(2);
        hook.apply(&[&[0, 1], answer].concat(), &mut logits).unwrap();
        (0..5).filter(|token| logits.get(*token).is_some_and(|logit| logit.is_finite())).collect()
    }

    #[test]
    fn weaker_rules_yield_where_nothing_is_left() {
        let all = [0, 1, 2, 3, 4];
        let mut hook = RulesHook {
            allowed: Some(vec![true, true, true, false, true]),
            banned: vec![vec![0], vec![1, 2]],
            ends: vec![4],
            min_tokens: 2,
            start: None,
        };
        assert_eq!(left(&mut hook, &[], &all), [1, 2]);
        assert_eq!(left(&mut hook, &[1], &all), [1]);
        assert_eq!(left(&mut hook, &[1, 1], &all), [1, 4]);
        assert_eq!(left(&mut hook, &[2, 2], &all), [1, 2, 4]);
        // A grammar that leaves the end alone is complete.
        assert_eq!(left(&mut hook, &[1], &[4]), [4]);
        assert_eq!(left(&mut hook, &[1], &[0, 3, 4]), [4]);
        assert_eq!(left(&mut hook, &[1], &[0, 2, 3]), [0, 2]);
        assert_eq!(left(&mut hook, &[1], &[3]), [3]);
    }
}
