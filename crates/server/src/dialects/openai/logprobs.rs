//! Log-probabilities in the form of chat completions.

use quadriga_llm::serving::TokenLogprobs;
use serde_json::{Value, json};

use crate::answer_tokens::{AnswerToken, TokenPart};
use crate::model::ServedModel;

/// The most log-probabilities that are reported for a token.
pub(crate) const MAX_TOP_LOGPROBS: usize = 20;

/// The log-probability that stands for that of a token that is excluded, which JSON cannot express.
const EXCLUDED: f64 = -9999.0;

/// A number that JSON can express.
pub fn finite(logprob: f64) -> f64 {
    if logprob.is_finite() { logprob } else { EXCLUDED }
}

/// A token with its log-probability and those of the most probable ones.
pub fn token(served: &ServedModel, token: u32, logprobs: &TokenLogprobs) -> Value {
    let mut value = one(served, token, logprobs.logprob);
    let top: Vec<Value> = logprobs.top.iter().map(|(token, logprob)| one(served, *token, *logprob)).collect();
    if let Some(object) = value.as_object_mut() {
        object.insert("top_logprobs".to_owned(), top.into());
    }
    value
}

fn one(served: &ServedModel, token: u32, logprob: f64) -> Value {
    let bytes = served.token_bytes(token);
    json!({ "token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes })
}

/// Those of tokens that are in the text of an answer, as far as they were asked for.
pub fn of_text<'t>(served: &ServedModel, tokens: impl IntoIterator<Item = &'t AnswerToken>) -> Vec<Value> {
    let text = tokens.into_iter().filter(|found| found.part == TokenPart::Text);
    text.filter_map(|found| Some(token(served, found.token, found.logprobs.as_ref()?))).collect()
}

/// Those of tokens that are in the text of an answer, and of control tokens that do not end it.
pub fn of_answer(served: &ServedModel, tokens: &[AnswerToken]) -> Vec<Value> {
    let is_wanted = |found: &&AnswerToken| match found.part {
        TokenPart::Text => true,
        TokenPart::Control => is_reported(served, found.token),
        TokenPart::Reasoning | TokenPart::Hidden => false,
    };
    let tokens = tokens.iter().filter(is_wanted);
    tokens.filter_map(|found| Some(token(served, found.token, found.logprobs.as_ref()?))).collect()
}

/// Whether a token is reported: those that end an answer are not.
pub fn is_reported(served: &ServedModel, token: u32) -> bool {
    served.model.tokenizer().is_ok_and(|tokenizer| !tokenizer.is_end(token))
}
