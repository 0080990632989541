//! The Kullback-Leibler divergence of a model that computes less from the same model that computes everything.

use crate::{BatchToken, Engine, Result};

/// The mean Kullback-Leibler divergence of `other`'s next-token probabilities from those of `exact`, over all tokens of a text
/// that both compute from its beginning, in nats a token. 0 without tokens.
pub fn divergence(exact: &mut Engine, other: &mut Engine, tokens: &[u32]) -> Result<f64> {
    let mut rows = Vec::new();
    for engine in [exact, other] {
        engine.truncate(0, 0);
        let batch: Vec<BatchToken> =
            tokens.iter().map(|token| BatchToken { sequence: 0, token: *token, output: true }).collect();
        engine.extend(&batch)?;
        engine.wait()?;
        rows.push((0..tokens.len()).map(|row| log_probabilities(engine.logits(row))).collect::<Vec<_>>());
        engine.truncate(0, 0);
    }
    let [exact, other] = rows.as_slice() else { return Ok(0.0) };
    let pairs = exact.iter().zip(other);
    let of_row = |(p, q): (&Vec<f64>, &Vec<f64>)| -> f64 {
        p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).filter(|term| term.is_finite()).sum()
    };
    Ok(pairs.map(of_row).sum::<f64>() / tokens.len().max(1) as f64)
}

/// The logarithms of the probabilities that logits stand for.
fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    logits.iter().map(|logit| f64::from(logit - most) - sum.ln()).collect()
}
