//! How well models predict a text: perplexity, and the divergence of one model's predictions from another's.

use quadriga_llm::tokenizer::Tokenizer;
use quadriga_llm::{BatchToken, Engine};
use serde::Serialize;

use super::statistics::{Estimate, quantile};
use crate::divergence::{divergence_term, normalizer};
use crate::error::{QualityError, Result};

/// Tokens whose logits are read at once: they are the vocabulary wide.
const AT_ONCE: usize = 128;

/// The perplexity of a text.
#[derive(Clone, Debug, Serialize)]
pub struct Perplexity {
    /// The exponential of the mean negative log-likelihood.
    pub perplexity: Estimate,
    /// The mean negative log-likelihood of a token, in nats.
    pub nll: Estimate,
    /// The mean of each chunk.
    pub chunk_nll: Vec<f64>,
    /// Predicted tokens.
    pub tokens: usize,
}

/// How much the predictions of a model differ from those of a reference.
#[derive(Clone, Debug, Serialize)]
pub struct TextComparison {
    /// Perplexity of the reference.
    pub reference: Estimate,
    /// Perplexity of the other model.
    pub other: Estimate,
    /// Perplexity of the other model over that of the reference.
    pub ratio: Estimate,
    /// The Kullback-Leibler divergence of a token, in nats: its mean, median, 99 % quantile and largest value. It is infinite where
    /// the other model gives no probability to a token that the reference expects.
    pub divergence: Estimate,
    /// Half of the tokens diverge less.
    pub median: f64,
    /// 99 % of the tokens diverge less.
    pub quantile99: f64,
    /// The largest divergence.
    pub largest: f64,
    /// The share of tokens whose most probable successor is the same.
    pub same_top: Estimate,
    /// The root of the mean squared difference of the probability of the next token of the text.
    pub probability_rms: f64,
    /// Predicted tokens.
    pub tokens: usize,
}

/// The tokens of a text that is computed in chunks of `chunk` tokens, as llama.cpp's tools have them: where the vocabulary's
/// prompts begin with a beginning-of-text token, it is the first token of every chunk, in place of the text's.
pub fn chunk_tokens(tokenizer: &Tokenizer, text: &str, chunk: usize) -> Vec<u32> {
    let mut tokens = tokenizer.encode_prompt(text, false);
    if let (true, Some(bos)) = (tokenizer.adds_bos(), tokenizer.vocabulary().bos) {
        tokens.iter_mut().step_by(chunk.max(1)).for_each(|first| *first = bos);
    }
    tokens
}

/// Chunks of a text; an error if there is none.
fn chunks(tokens: &[u32], chunk: usize) -> Result<impl Iterator<Item = &[u32]>> {
    if chunk < 2 || tokens.len() < chunk {
        return Err(QualityError::ShortText { found: tokens.len(), expected: chunk.max(2) }.into());
    }
    Ok(tokens.chunks_exact(chunk))
}

/// Computes a part of a chunk; its logits are there afterwards.
fn advance(engine: &mut Engine, tokens: &[u32]) -> Result<()> {
    let batch: Vec<BatchToken> =
        tokens.iter().map(|token| BatchToken { sequence: 0, token: *token, output: true }).collect();
    engine.extend(&batch)?;
    engine.wait()?;
    Ok(())
}

/// The negative log-likelihood of a token.
fn surprise(logits: &[f32], token: u32) -> Result<f64> {
    let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    Ok(normalizer(logits)? - f64::from(logit))
}

/// Which tokens of a chunk count for the perplexity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoredTokens {
    /// All but the first, which nothing predicts.
    #[default]
    All,
    /// Those of the second half but its first, as llama-perplexity has it: the tokens before them are context only.
    SecondHalf,
}

impl ScoredTokens {
    /// The position of the first scored token in a chunk of this size.
    fn first(self, chunk: usize) -> usize {
        match self {
            ScoredTokens::All => 1,
            ScoredTokens::SecondHalf => (chunk / 2 + 1).min(chunk.saturating_sub(1)).max(1),
        }
    }
}

/// The perplexity of a text in chunks of `chunk` tokens, each computed from an empty context. `each` is called after each
/// chunk with its number and the perplexity so far; false stops.
pub fn perplexity(
    engine: &mut Engine,
    tokens: &[u32],
    chunk: usize,
    scored: ScoredTokens,
    each: &mut dyn FnMut(usize, f64) -> bool,
) -> Result<Perplexity> {
    let (mut all, mut chunk_nll) = (Vec::new(), Vec::new());
    for (number, part) in chunks(tokens, chunk)?.enumerate() {
        engine.truncate(0, 0);
        let first = all.len();
        let unscored = scored.first(chunk) - 1;
        let pairs = part.get(..chunk - 1).unwrap_or_default().chunks(AT_ONCE);
        for (number, (tokens, next)) in
            pairs.zip(part.get(1..).unwrap_or_default().chunks(AT_ONCE)).enumerate()
        {
            advance(engine, tokens)?;
            for (row, next) in next.iter().enumerate().skip(unscored.saturating_sub(number * AT_ONCE)) {
                all.push(surprise(engine.logits(row), *next)?);
            }
        }
        let own = all.get(first..).unwrap_or_default();
        chunk_nll.push(own.iter().sum::<f64>() / own.len().max(1) as f64);
        if !each(number + 1, (all.iter().sum::<f64>() / all.len().max(1) as f64).exp()) {
            return Err(QualityError::Cancelled.into());
        }
    }
    let nll = Estimate::of(&all);
    Ok(Perplexity { perplexity: nll.map(f64::exp, f64::exp), nll, chunk_nll, tokens: all.len() })
}

/// What one token contributes.
#[derive(Default, Clone, Copy)]
struct Row {
    reference: f64,
    other: f64,
    divergence: f64,
    same: f64,
}

/// Compares the predictions of two engines on a text, in chunks as [`perplexity`] has them. `each` is called after each
/// chunk with its number and the mean divergence so far; false stops.
pub fn compare_texts(
    reference: &mut Engine,
    other: &mut Engine,
    tokens: &[u32],
    chunk: usize,
    each: &mut dyn FnMut(usize, f64) -> bool,
) -> Result<TextComparison> {
    let mut rows: Vec<Row> = Vec::new();
    for (number, part) in chunks(tokens, chunk)?.enumerate() {
        reference.truncate(0, 0);
        other.truncate(0, 0);
        let pairs = part.get(..chunk - 1).unwrap_or_default().chunks(AT_ONCE);
        for (tokens, next) in pairs.zip(part.get(1..).unwrap_or_default().chunks(AT_ONCE)) {
            advance(reference, tokens)?;
            advance(other, tokens)?;
            rows.extend(compare_rows(reference, other, next)?);
        }
        let mean = rows.iter().map(|row| row.divergence).sum::<f64>() / rows.len().max(1) as f64;
        if !each(number + 1, mean) {
            return Err(QualityError::Cancelled.into());
        }
    }
    let column = |value: fn(&Row) -> f64| rows.iter().map(value).collect::<Vec<f64>>();
    let difference = Estimate::of(&column(|row| row.other - row.reference));
    let mut divergences = column(|row| row.divergence);
    let changes = column(|row| ((-row.reference).exp() - (-row.other).exp()).powi(2));
    Ok(TextComparison {
        reference: Estimate::of(&column(|row| row.reference)).map(f64::exp, f64::exp),
        other: Estimate::of(&column(|row| row.other)).map(f64::exp, f64::exp),
        ratio: difference.map(f64::exp, f64::exp),
        divergence: Estimate::of(&divergences),
        same_top: Estimate::of(&column(|row| row.same)),
        median: quantile(&mut divergences, 0.5),
        quantile99: quantile(&mut divergences, 0.99),
        largest: quantile(&mut divergences, 1.0),
        probability_rms: (changes.iter().sum::<f64>() / changes.len().max(1) as f64).sqrt(),
        tokens: rows.len(),
    })
}

/// Compares the latest logits of two engines, on all cores.
fn compare_rows(reference: &Engine, other: &Engine, next: &[u32]) -> Result<Vec<Row>> {
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let per_thread = next.len().div_ceil(threads).max(1);
    // Logits are read before the threads start: engines are not shared between threads.
    let pairs: Vec<(&[f32], &[f32], u32)> = next
        .iter()
        .enumerate()
        .map(|(row, next)| (reference.logits(row), other.logits(row), *next))
        .collect();
    let results = std::thread::scope(|scope| {
        let parts: Vec<_> = pairs
            .chunks(per_thread)
            .map(|part| {
                scope.spawn(move || part.iter().map(|(p, q, next)| compare_row(p, q, *next)).collect())
            })
            .collect();
        let joined =
            parts.into_iter().map(|part| part.join().unwrap_or_else(|_| Err(QualityError::NotFinite.into())));
        joined.collect::<Vec<Result<Vec<Row>>>>()
    });
    results.into_iter().collect::<Result<Vec<Vec<Row>>>>().map(|rows| rows.concat())
}

fn compare_row(p: &[f32], q: &[f32], next: u32) -> Result<Row> {
    if p.len() != q.len() {
        return Err(QualityError::Vocabulary { reference: p.len(), other: q.len() }.into());
    }
    let (p_norm, q_norm) = (normalizer(p)?, normalizer(q)?);
    let mut divergence = 0.0;
    let (mut p_top, mut q_top) = ((f32::NEG_INFINITY, 0), (f32::NEG_INFINITY, 0));
    for (i, (p, q)) in p.iter().zip(q).enumerate() {
        divergence += divergence_term(f64::from(*p) - p_norm, f64::from(*q) - q_norm);
        if *p > p_top.0 {
            p_top = (*p, i);
        }
        if *q > q_top.0 {
            q_top = (*q, i);
        }
    }
    let nll = |logits: &[f32], norm: f64| {
        norm - f64::from(logits.get(next as usize).copied().unwrap_or(f32::NEG_INFINITY))
    };
    Ok(Row {
        reference: nll(p, p_norm),
        other: nll(q, q_norm),
        // Rounding can make the divergence of equal predictions slightly negative.
        divergence: divergence.max(0.0),
        same: f64::from(u8::from(p_top.1 == q_top.1)),
    })
}
