//! Log-probabilities in results: in a form of their own, or in those of OpenAI's chats and completions.

use quadriga_llm::serving::TokenLogprobs;
use quadriga_llm::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The log-probability that stands for that of a token that is excluded, which JSON cannot express.
const EXCLUDED: f64 = -9999.0;

/// The tokens of an answer with theirs.
pub(super) type Logprobs = [(u32, TokenLogprobs)];

/// A list of tokens by their numbers.
pub(super) fn own(found: &Logprobs) -> Value {
    let one = |(token, TokenLogprobs { logprob, top, .. }): &(u32, TokenLogprobs)| json!({ "token": token, "logprob": logprob, "top": top });
    found.iter().map(one).collect()
}

/// As in chats: a list of tokens by their texts.
pub(super) fn of_chat(found: &Logprobs, tokenizer: Option<&Tokenizer>) -> Value {
    let one = |token: u32, logprob: f64| {
        let bytes = bytes(token, tokenizer);
        json!({ "token": String::from_utf8_lossy(&bytes), "logprob": finite(logprob), "bytes": bytes })
    };
    let token = |(token, found): &(u32, TokenLogprobs)| {
        let mut value = one(*token, found.logprob);
        let top: Value = found.top.iter().map(|(token, logprob)| one(*token, *logprob)).collect();
        if let Some(fields) = value.as_object_mut() {
            fields.insert("top_logprobs".to_owned(), top);
        }
        value
    };
    json!({ "content": found.iter().map(token).collect::<Value>() })
}

/// As in completions: lists of equal length. Offsets are characters of the answer.
pub(super) fn of_text(found: &Logprobs, tokenizer: Option<&Tokenizer>) -> Value {
    let text = |token: u32| String::from_utf8_lossy(&bytes(token, tokenizer)).into_owned();
    let (mut tokens, mut logprobs, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // Characters that were begun.
    let mut begun = 0_usize;
    for (token, found) in found {
        // The most probable come first; another token of the same text does not replace them.
        let mut top = Map::new();
        for (token, logprob) in found.top.iter().copied().chain([(*token, found.logprob)]) {
            top.entry(text(token)).or_insert_with(|| finite(logprob).into());
        }
        let is_end = tokenizer.is_some_and(|tokenizer| tokenizer.is_end(*token));
        let bytes = if is_end { Vec::new() } else { bytes(*token, tokenizer) };
        let continues = |byte: &u8| byte & 0xc0 == 0x80;
        offsets.push(begun - usize::from(bytes.first().is_some_and(continues)).min(begun));
        begun += bytes.iter().filter(|byte| !continues(byte)).count();
        tokens.push(text(*token));
        logprobs.push(finite(found.logprob));
        tops.push(Value::from(top));
    }
    json!({ "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets })
}

fn finite(logprob: f64) -> f64 {
    if logprob.is_finite() { logprob } else { EXCLUDED }
}

/// The bytes of a token; of a control token, its name.
fn bytes(token: u32, tokenizer: Option<&Tokenizer>) -> Vec<u8> {
    let Some(tokenizer) = tokenizer else { return Vec::new() };
    match tokenizer.piece(token) {
        Ok(piece) if !piece.is_empty() => piece.to_vec(),
        _ => tokenizer.vocabulary().tokens.get(token as usize).cloned().unwrap_or_default().into_bytes(),
    }
}
