//! Conversations as clients send them, for templates that want the system message first and users and assistants by turns.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, TestServer, Value, json, model, with};

/// Refuses what templates of Qwen, Gemma and Mistral refuse.
const STRICT: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('System message must be at the beginning') }}{% endif %}\
    {% if not loop.first and m.role == messages[loop.index0 - 1].role %}\
    {{ raise_exception('Conversation roles must alternate') }}{% endif %}\
    <|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant {% endif %}";

fn server(template: &str) -> TestServer {
    Setup { model: model::with_template(template), ..Setup::default() }.start()
}

/// The messages as the template writes them, and the header of the answer.
fn written(messages: &[(&str, &str)]) -> String {
    let turn = |(role, text): &(&str, &str)| format!("<|start|>{role} {text}<|end|>");
    messages.iter().map(turn).collect::<String>() + "<|start|>assistant "
}

fn count(server: &TestServer, prompt: &str) -> u64 {
    server.post("/tokenize", &json!({ "content": prompt })).ok()["count"].as_u64().unwrap()
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

#[test]
fn strict_and_other_templates_take_the_conversations_of_clients() {
    let messages = json!([
        message("system", "a"),
        message("developer", "b"),
        message("user", "ccc"),
        message("user", "dd"),
        message("assistant", "e"),
        message("assistant", "ff"),
        message("system", "g"),
        message("user", "hhhhh"),
    ]);
    let strict =
        [("system", "a\n\nb"), ("user", "ccc\n\ndd"), ("assistant", "e\n\nff"), ("user", "g\n\nhhhhh")];
    let open = [
        ("system", "a\n\nb"),
        ("user", "ccc"),
        ("user", "dd"),
        ("assistant", "e"),
        ("assistant", "ff"),
        ("system", "g"),
        ("user", "hhhhh"),
    ];
    // Blocks of one role are one message there, and a later system message is the user's.
    let anthropic = [("system", "a\nb"), ("user", "ccc\ndd"), ("assistant", "e\nff"), ("user", "g\nhhhhh")];
    let of_responses = |wanted: &[(&'static str, &'static str)]| -> Vec<(&'static str, &'static str)> {
        // Output items are parts of one message.
        let mut all: Vec<_> = wanted.to_vec();
        all.retain(|(_, text)| *text != "ff");
        let joined = |turn: (&'static str, &'static str)| match turn {
            ("assistant", _) => ("assistant", "e\n\nff"),
            other => other,
        };
        all.into_iter().map(joined).collect()
    };
    for (template, wanted) in [(STRICT, &strict[..]), (model::TEMPLATE, &open[..])] {
        let server = server(template);
        let chat = json!({ "messages": messages, "max_tokens": 1 });
        let prompt = server.post("/apply-template", &chat).ok()["prompt"].as_str().unwrap().to_owned();
        assert_eq!(prompt, written(wanted));
        let tokens = count(&server, &prompt);
        assert_eq!(server.post("/v1/chat/completions", &chat).ok()["usage"]["prompt_tokens"], tokens);
        let streamed = server.post("/v1/chat/completions", &with(chat.clone(), json!({ "stream": true })));
        assert_eq!(streamed.status, 200);
        let without_developer =
            |role: &Value| if role == "developer" { "system".into() } else { role.clone() };
        let plain: Vec<Value> = messages.as_array().unwrap().iter().map(|message| {
            json!({ "role": without_developer(&message["role"]), "content": message["content"] })
        }).collect();
        let ollama =
            json!({ "model": "small", "messages": plain, "stream": false, "options": { "num_predict": 1 } });
        assert_eq!(server.post("/api/chat", &ollama).ok()["prompt_eval_count"], tokens);
        // As Codex sends them: the first system message is in a field of its own.
        let response = json!({ "instructions": "a", "input": messages.as_array().unwrap()[1..], "max_output_tokens": 1 });
        let found = server.post("/v1/responses", &response).ok()["usage"]["input_tokens"].clone();
        assert_eq!(found, count(&server, &written(&of_responses(wanted))));
        let body = json!({ "model": "x", "max_tokens": 1, "system": "a", "messages": plain[1..] });
        let usage = server.post("/v1/messages", &body).ok()["usage"].clone();
        let found = ["input_tokens", "cache_read_input_tokens"].map(|name| usage[name].as_u64().unwrap());
        assert_eq!(found.iter().sum::<u64>(), count(&server, &written(&anthropic)), "{usage}");
        let counted = server.post("/v1/messages/count_tokens", &body).ok()["input_tokens"].clone();
        assert_eq!(counted, found.iter().sum::<u64>());
        server.assert_idle();
    }
}

/// Results that a template without tools gets as text of the user, who says something then.
#[test]
fn results_and_what_the_user_says_then_are_one_turn() {
    let server = server(STRICT);
    let call = json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let messages = json!([
        message("user", "hi"),
        json!({ "role": "assistant", "tool_calls": [call] }),
        json!({ "role": "tool", "tool_call_id": "c1", "content": "rain" }),
        message("user", "and now?"),
    ]);
    let prompt = server.post("/apply-template", &json!({ "messages": messages })).ok()["prompt"].clone();
    let prompt = prompt.as_str().unwrap();
    assert!(prompt.contains("rain") && prompt.contains("and now?"), "{prompt}");
    assert_eq!(prompt.matches("<|start|>user").count(), 2, "{prompt}");
}
