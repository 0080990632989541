//! Speeds, as llama-server reports them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::generation::Done;

/// The `timings` of an answer, with its guesses if there were any.
pub fn timings(done: &Done) -> Value {
    let prompt = done.times.first_token.saturating_sub(done.times.queued);
    let mut all =
        speeds(done.counts.prompt, done.counts.cached, prompt, done.counts.answer, done.times.decode);
    if let Some(object) = all.as_object_mut().filter(|_| done.times.guessed > 0) {
        object.insert("draft_n".to_owned(), done.times.guessed.into());
        object.insert("draft_n_accepted".to_owned(), done.times.guessed_right.into());
    }
    all
}

fn speeds(prompt: usize, cached: usize, prompt_time: Duration, predicted: usize, decode: Duration) -> Value {
    let computed = prompt.saturating_sub(cached);
    let (prompt_ms, predicted_ms) = (prompt_time.as_secs_f64() * 1e3, decode.as_secs_f64() * 1e3);
    // The prefill gives the first token: the time is that of the others.
    let steps = predicted.saturating_sub(1);
    let each = |ms: f64, count: usize| if count > 0 { ms / count as f64 } else { 0.0 };
    let rate = |ms: f64, count: usize| if ms > 0.0 { count as f64 / ms * 1e3 } else { 0.0 };
    json!({
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": each(prompt_ms, computed),
        "prompt_per_second": rate(prompt_ms, computed),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": each(predicted_ms, steps),
        "predicted_per_second": rate(predicted_ms, steps),
    })
}

/// The times of an answer while it is generated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerClock {
    started: Instant,
    first_token: Option<Instant>,
    prompt: usize,
    cached: usize,
    predicted: usize,
}

impl AnswerClock {
    /// Starts, for a prompt of so many tokens.
    pub(crate) fn new(prompt: usize) -> AnswerClock {
        AnswerClock { started: Instant::now(), first_token: None, prompt, cached: 0, predicted: 0 }
    }

    /// A part of the prompt was computed; returns `prompt_progress`.
    pub(crate) fn progress(&mut self, cached: usize, computed: usize) -> Value {
        self.cached = cached;
        json!({
            "total": self.prompt,
            "cache": cached,
            "processed": computed,
            "time_ms": self.started.elapsed().as_millis() as u64,
        })
    }

    /// Counts a token.
    pub(crate) fn token(&mut self) {
        self.first_token.get_or_insert_with(Instant::now);
        self.predicted += 1;
    }

    /// The number of tokens so far.
    pub(crate) fn predicted(&self) -> usize {
        self.predicted
    }

    /// The `timings` so far.
    pub(crate) fn timings(&self) -> Value {
        let first = self.first_token.unwrap_or_else(Instant::now);
        speeds(self.prompt, self.cached, first - self.started, self.predicted, first.elapsed())
    }
}

/// The schema of `timings`.
pub(crate) fn schema() -> Value {
    json!({ "type": "object", "additionalProperties": { "type": "number" } })
}
