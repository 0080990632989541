//! Speeds, as llama-server reports them.

use serde_json::{Value, json};

use crate::generation::Done;

/// The `timings` of an answer.
pub fn timings(done: &Done) -> Value {
    let prompt = done.counts.prompt.saturating_sub(done.counts.cached);
    let prompt_ms = done.times.first_token.saturating_sub(done.times.queued).as_secs_f64() * 1e3;
    let predicted = done.counts.answer;
    let predicted_ms = done.times.decode.as_secs_f64() * 1e3;
    // The prefill gives the first token: the time is that of the others.
    let steps = predicted.saturating_sub(1);
    let each = |ms: f64, count: usize| if count > 0 { ms / count as f64 } else { 0.0 };
    let rate = |ms: f64, count: usize| if ms > 0.0 { count as f64 / ms * 1e3 } else { 0.0 };
    json!({
        "cache_n": done.counts.cached,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": each(prompt_ms, prompt),
        "prompt_per_second": rate(prompt_ms, prompt),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": each(predicted_ms, steps),
        "predicted_per_second": rate(predicted_ms, steps),
    })
}
