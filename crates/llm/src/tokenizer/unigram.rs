//! The unigram tokenizer (`tokenizer.ggml.model = t5`): the segmentation with the best sum of scores (Viterbi).

use super::matcher::{Direction, Matcher};
use super::vocabulary::{TokenType, Vocabulary};
use crate::Result;

/// The difference of an unknown character's score to the worst score of the vocabulary.
const UNKNOWN_PENALTY: f64 = 10.0;

#[derive(Debug)]
pub(super) struct Unigram {
    words: Matcher,
    scores: Vec<f32>,
    unknown: u32,
    unknown_score: f64,
}

/// The best segmentation of the text up to a position.
#[derive(Clone, Copy)]
struct BestPath {
    score: f64,
    token: u32,
    from: usize,
}

impl Unigram {
    pub(super) fn new(vocabulary: &Vocabulary) -> Result<Unigram> {
        let mut words = Vec::new();
        let mut scores = vec![0.0; vocabulary.tokens.len()];
        let mut worst = f32::INFINITY;
        for ((token, text), own) in (0u32..).zip(&vocabulary.tokens).zip(&mut scores) {
            match vocabulary.token_type(token) {
                TokenType::Normal => {
                    *own = vocabulary.score(token);
                    worst = worst.min(*own);
                }
                TokenType::Unused => *own = vocabulary.score(token),
                TokenType::UserDefined => {} // Score 0: better than all others.
                TokenType::Control | TokenType::Unknown | TokenType::Byte => continue,
            }
            words.push((text.as_bytes(), token, true));
        }
        let worst = if worst.is_finite() { f64::from(worst) } else { 0.0 };
        // In a file without an unknown token, unknown text must not be dropped: T5 itself uses token 2.
        let unknown = vocabulary.unknown.unwrap_or(2).min(vocabulary.tokens.len().saturating_sub(1) as u32);
        let words = Matcher::new(Direction::Forward, &words)?;
        Ok(Unigram { words, scores, unknown, unknown_score: worst - UNKNOWN_PENALTY })
    }

    /// Appends the tokens of a normalized text.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let start = BestPath { score: f64::NEG_INFINITY, token: self.unknown, from: 0 };
        let mut best = vec![start; text.len() + 1];
        if let Some(first) = best.first_mut() {
            first.score = 0.0;
        }
        // Of equally good segmentations the one with the longest last token wins: longer tokens come first.
        let mut ends = Vec::new();
        self.words.scan(text.as_bytes(), |end, found| ends.push((end, found)));
        let mut ends = ends.into_iter().peekable();
        for (start, letter) in text.char_indices() {
            let end = start + letter.len_utf8();
            let mut arrive = |from: usize, token: u32, own: f64| {
                let score = best.get(from).map_or(f64::NEG_INFINITY, |path| path.score) + own;
                if let Some(here) = best.get_mut(end)
                    && score > here.score
                {
                    *here = BestPath { score, token, from };
                }
            };
            let mut whole_letter = false;
            let longest = ends.next_if(|(at, _)| *at == end).map(|(_, found)| found);
            for found in std::iter::successors(longest, |found| self.words.shorter(*found)) {
                whole_letter |= found.length as usize == letter.len_utf8();
                let own = self.scores.get(found.token as usize).copied().unwrap_or_default();
                arrive(end - found.length as usize, found.token, f64::from(own));
            }
            if !whole_letter {
                arrive(start, self.unknown, self.unknown_score);
            }
        }
        // Follow the path back from the end; consecutive unknown characters are one token.
        let first = tokens.len();
        let mut at = text.len();
        while at > 0 {
            let Some(path) = best.get(at) else { break };
            let repeated = tokens.len() > first && tokens.last() == Some(&self.unknown);
            if !(repeated && path.token == self.unknown) {
                tokens.push(path.token);
            }
            at = path.from;
        }
        if let Some(added) = tokens.get_mut(first..) {
            added.reverse();
        }
    }
}
