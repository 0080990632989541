//! Lines of results: Quadriga's own, or OpenAI's for lines of OpenAI's batch files.

use quadriga_llm::Model;
use quadriga_llm::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::logprobs::{self, Logprobs};

/// Digits of a digest in a result.
const DIGITS: usize = 16;

/// Where a result comes from: it is written with the result, so that a batch does not go on after the results of another one.
#[derive(Clone, Default)]
pub(super) struct ResultOrigin {
    /// A digest of the request's line.
    pub(super) request: String,
    /// Whether the line is that of an OpenAI batch file, with the request in `body`.
    is_openai: bool,
    /// Whether its request is one of `/v1/completions`.
    is_text: bool,
}

impl ResultOrigin {
    /// Of a line as it is read.
    pub(super) fn of(line: &Result<String, String>) -> ResultOrigin {
        let text = line.as_deref().unwrap_or_else(|error| error).trim();
        let Ok(value) = serde_json::from_str::<Value>(text) else {
            return ResultOrigin { request: digest(text.as_bytes()), ..ResultOrigin::default() };
        };
        let body = value.get("body").and_then(Value::as_object);
        ResultOrigin {
            // White space of the file is none of the request.
            request: digest(value.to_string().as_bytes()),
            is_openai: body.is_some(),
            is_text: body.is_some_and(|body| body.contains_key("prompt")),
        }
    }

    /// The log-probabilities of a result, as it shows them.
    pub(super) fn logprobs(&self, found: &Logprobs, tokenizer: Option<&Tokenizer>) -> Value {
        match (self.is_openai, self.is_text) {
            (false, _) => logprobs::own(found),
            (true, false) => logprobs::of_chat(found, tokenizer),
            (true, true) => logprobs::of_text(found, tokenizer),
        }
    }

    /// The line of a result for the request of a number. `model` is the digest of the model, `name` its name.
    pub(super) fn line(
        &self,
        index: usize,
        id: Option<Value>,
        result: Value,
        model: &str,
        name: &str,
    ) -> Value {
        let mut line =
            if self.is_openai { self.openai_line(index, id, &result, name) } else { own_line(id, result) };
        if let Some(fields) = line.as_object_mut() {
            fields.insert("index".to_owned(), index.into());
            fields.insert("request".to_owned(), self.request.as_str().into());
            fields.insert("model".to_owned(), model.into());
        }
        line
    }

    /// As OpenAI's batches and vLLM's `run-batch` write it.
    fn openai_line(&self, index: usize, id: Option<Value>, result: &Value, name: &str) -> Value {
        let (response, error) = match result.get("error") {
            Some(message) => (Value::Null, json!({ "code": "invalid_request", "message": message })),
            None => {
                let body = self.body(index, result, name);
                (
                    json!({ "status_code": 200, "request_id": format!("req_{index}"), "body": body }),
                    Value::Null,
                )
            }
        };
        json!({ "id": format!("batch_req_{index}"), "custom_id": id, "response": response, "error": error })
    }

    /// A completion of a chat, or of a text.
    fn body(&self, index: usize, result: &Value, name: &str) -> Value {
        let field = |name: &str| result.get(name).cloned().unwrap_or(Value::Null);
        let finish = match result.get("finish").and_then(Value::as_str) {
            _ if result.get("tool_calls").is_some() => "tool_calls",
            Some("context") => "length",
            Some(finish) => finish,
            None => "stop",
        };
        let mut choice = Map::new();
        choice.insert("index".to_owned(), 0.into());
        choice.insert("logprobs".to_owned(), field("logprobs"));
        choice.insert("finish_reason".to_owned(), finish.into());
        let (kind, prefix) =
            if self.is_text { ("text_completion", "cmpl") } else { ("chat.completion", "chatcmpl") };
        if self.is_text {
            choice.insert("text".to_owned(), field("text"));
        } else {
            let mut message = Map::new();
            message.insert("role".to_owned(), "assistant".into());
            message.insert("content".to_owned(), field("text"));
            if let Some(reasoning) = result.get("reasoning") {
                message.insert("reasoning_content".to_owned(), reasoning.clone());
            }
            let calls = result.get("tool_calls").and_then(Value::as_array);
            if let Some(calls) = calls {
                let call = |(number, call): (usize, &Value)| {
                    json!({ "id": format!("call_{index}_{number}"), "type": "function", "function": {
                        "name": call.get("name"), "arguments": arguments(call) } })
                };
                message.insert("tool_calls".to_owned(), calls.iter().enumerate().map(call).collect());
            }
            choice.insert("message".to_owned(), message.into());
        }
        let usage = result.get("usage").cloned().unwrap_or_default();
        let count = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or(0);
        let (prompt, answer) = (count("prompt_tokens"), count("completion_tokens"));
        json!({
            "id": format!("{prefix}-{index}"),
            "object": kind,
            "created": seconds_now(),
            "model": name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": answer,
                "total_tokens": prompt + answer,
                "prompt_tokens_details": { "cached_tokens": count("cached_tokens") },
            },
        })
    }
}

/// The arguments of a call, which are a text with JSON at OpenAI.
fn arguments(call: &Value) -> Value {
    match call.get("arguments") {
        Some(Value::String(text)) => text.as_str().into(),
        Some(value) => value.to_string().into(),
        None => "{}".into(),
    }
}

fn own_line(id: Option<Value>, mut result: Value) -> Value {
    if let (Some(fields), Some(id)) = (result.as_object_mut(), id) {
        fields.insert("id".to_owned(), id);
    }
    result
}

/// Whether a result that was read is of a request that failed.
pub(super) fn has_failed(result: &Value) -> bool {
    result.get("error").is_some_and(|error| !error.is_null())
}

/// A digest of the model with its adapters; the same on any number of ranks.
pub(super) fn model_digest(model: &Model) -> String {
    hex(&model.weights_identity())
}

fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().take(DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

fn seconds_now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_an_openai_batch_has_a_result_of_openai() {
        let request = json!({ "custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": { "messages": [] } });
        let origin = ResultOrigin::of(&Ok(request.to_string()));
        let result = json!({ "text": "Hi", "finish": "stop", "usage": { "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1 } });
        let line = origin.line(4, Some("r1".into()), result, "m", "tiny");
        assert_eq!(
            (&line["custom_id"], &line["error"], &line["index"]),
            (&json!("r1"), &Value::Null, &json!(4))
        );
        assert_eq!(line["response"]["status_code"], 200);
        let body = &line["response"]["body"];
        assert_eq!(body["choices"][0]["message"], json!({ "role": "assistant", "content": "Hi" }));
        assert_eq!((&body["choices"][0]["finish_reason"], &body["model"]), (&json!("stop"), &json!("tiny")));
        assert_eq!((&body["usage"]["total_tokens"], &body["object"]), (&json!(5), &json!("chat.completion")));
        assert!(!has_failed(&line));
        let failed = origin.line(4, Some("r1".into()), json!({ "error": "line 5: no" }), "m", "tiny");
        assert!(
            has_failed(&failed) && failed["response"].is_null() && failed["error"]["message"] == "line 5: no"
        );
        let text = ResultOrigin::of(&Ok(json!({ "body": { "prompt": "x" } }).to_string()));
        let line = text.line(0, None, json!({ "text": "y", "finish": "length" }), "m", "tiny");
        assert_eq!(
            (&line["response"]["body"]["choices"][0]["text"], &line["custom_id"]),
            (&json!("y"), &Value::Null)
        );
    }

    #[test]
    fn digests_tell_requests_apart_but_not_their_white_space() {
        let of = |line: &str| ResultOrigin::of(&Ok(line.to_owned())).request;
        assert_eq!(of("{\"prompt\": \"a\"}\n"), of("{\"prompt\":\"a\"}"));
        assert_ne!(of("{\"prompt\": \"a\"}"), of("{\"prompt\": \"b\"}"));
        assert_eq!(of("{").len(), DIGITS);
    }
}
