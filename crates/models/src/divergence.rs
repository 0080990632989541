//! The Kullback-Leibler divergence of the predictions of one token.

use crate::error::{QualityError, Result};

/// How far the predictions of `q` are from those of `p`, in nats. Both are logits.
pub(crate) fn row_divergence(p: &[f32], q: &[f32]) -> Result<f64> {
    if p.len() != q.len() {
        return Err(QualityError::Vocabulary { reference: p.len(), other: q.len() }.into());
    }
    let (p_norm, q_norm) = (normalizer(p)?, normalizer(q)?);
    Ok(p.iter().zip(q).map(|(p, q)| divergence_term(f64::from(*p) - p_norm, f64::from(*q) - q_norm)).sum())
}

/// What one token adds, by the logarithms of its probabilities: infinite where only the second is none.
pub(crate) fn divergence_term(p: f64, q: f64) -> f64 {
    let share = p.exp();
    if share > 0.0 { share * (p - q) } else { 0.0 }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_without_probability_diverges_only_where_the_reference_expects_it() {
        let none = f32::NEG_INFINITY;
        assert_eq!(row_divergence(&[0.0, 0.0], &[0.0, none]).unwrap(), f64::INFINITY);
        let expected = std::f64::consts::LN_2;
        assert!((row_divergence(&[0.0, none], &[0.0, 0.0]).unwrap() - expected).abs() < 1e-12);
        assert_eq!(row_divergence(&[0.0, none], &[0.0, none]).unwrap(), 0.0);
    }
}
