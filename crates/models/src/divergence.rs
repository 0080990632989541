//! The Kullback-Leibler divergence of the predictions of one token.

use crate::error::{QualityError, Result};

/// How far the predictions of `q` are from those of `p`, in nats. Both are logits.
pub(crate) fn row_divergence(p: &[f32], q: &[f32]) -> Result<f64> {
    if p.len() != q.len() {
        return Err(QualityError::Vocabulary { reference: p.len(), other: q.len() }.into());
    }
    let (p_norm, q_norm) = (normalizer(p)?, normalizer(q)?);
    let terms = p.iter().zip(q).map(|(p, q)| {
        let log = f64::from(*p) - p_norm;
        log.exp() * (log - (f64::from(*q) - q_norm))
    });
    Ok(terms.filter(|term| term.is_finite()).sum())
}

/// The logarithms of the probabilities that logits stand for: their largest, and the logarithm of the sum.
pub(crate) fn normalizer(logits: &[f32]) -> Result<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    if !most.is_finite() || !sum.is_finite() {
        return Err(QualityError::NotFinite.into());
    }
    Ok(f64::from(most) + sum.ln())
}
