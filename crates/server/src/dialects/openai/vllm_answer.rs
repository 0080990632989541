//! What vLLM adds to OpenAI's answers.

use quadriga_llm::serving::TokenLogprobs;
use serde_json::{Map, Value, json};

use super::logprobs::finite;
use crate::generation::FinishReason;
use crate::model::ServedModel;

/// The stop string or stop token that ended an answer.
pub(crate) fn stop_reason(finish: &FinishReason) -> Value {
    match finish {
        FinishReason::Stop(Some(text)) => text.clone().into(),
        FinishReason::StopToken(token) => (*token).into(),
        _ => Value::Null,
    }
}

/// The log-probabilities of a prompt's tokens, each by its number, beside those of the most probable ones. Nothing precedes the
/// first token.
pub(crate) fn prompt_logprobs(served: &ServedModel, prompt: &[u32], found: &[TokenLogprobs]) -> Value {
    let at = |(token, found): (&u32, &TokenLogprobs)| {
        let one = |token: u32, logprob: f64, rank: usize| {
            let text = served.token_text(token);
            (token.to_string(), json!({ "logprob": finite(logprob), "rank": rank, "decoded_token": text }))
        };
        let mut all: Map<String, Value> = Map::new();
        all.extend([one(*token, found.logprob, found.rank)]);
        for (rank, (other, logprob)) in (1..).zip(&found.top) {
            if other != token {
                all.extend([one(*other, *logprob, rank)]);
            }
        }
        Value::Object(all)
    };
    let rest = prompt.iter().skip(1).zip(found).map(at);
    prompt.first().map(|_| Value::Null).into_iter().chain(rest).collect()
}
