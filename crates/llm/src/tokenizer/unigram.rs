//! The unigram tokenizer (`tokenizer.ggml.model = t5`): the segmentation with the best sum of scores (Viterbi).

use super::trie::Trie;
use super::vocabulary::{TokenType, Vocabulary};

/// The difference of an unknown character's score to the worst score of the vocabulary.
const UNKNOWN_PENALTY: f64 = 10.0;

#[derive(Debug)]
pub(super) struct Unigram {
    words: Trie,
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
    pub(super) fn new(vocabulary: &Vocabulary) -> Unigram {
        let mut words = Trie::default();
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
            words.insert(text.as_bytes(), token);
        }
        let worst = if worst.is_finite() { f64::from(worst) } else { 0.0 };
        // In a file without an unknown token, unknown text must not be dropped: T5 itself uses token 2.
        let unknown = vocabulary.unknown.unwrap_or(2).min(vocabulary.tokens.len().saturating_sub(1) as u32);
        Unigram { words, scores, unknown, unknown_score: worst - UNKNOWN_PENALTY }
    }

    /// Appends the tokens of a normalized text.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let start = BestPath { score: f64::NEG_INFINITY, token: self.unknown, from: 0 };
        let mut best = vec![start; text.len() + 1];
        if let Some(first) = best.first_mut() {
            first.score = 0.0;
        }
        for (from, letter) in text.char_indices() {
            let here = best.get(from).map_or(f64::NEG_INFINITY, |path| path.score);
            let mut whole_letter = false;
            let mut arrive = |length: usize, token: u32, score: f64| {
                if let Some(there) = best.get_mut(from + length)
                    && score > there.score
                {
                    *there = BestPath { score, token, from };
                }
            };
            for (length, token) in self.words.prefixes(text.as_bytes().get(from..).unwrap_or_default()) {
                whole_letter |= length == letter.len_utf8();
                let own = self.scores.get(token as usize).copied().unwrap_or_default();
                arrive(length, token, here + f64::from(own));
            }
            if !whole_letter {
                arrive(letter.len_utf8(), self.unknown, here + self.unknown_score);
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
