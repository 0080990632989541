//! Reasoning that is switched off: the answer is the answer, whatever markers it has, in a stream and as a whole.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_llm::constraint::Grammar;
use quadriga_server::generation::ReasoningEffort;
use quadriga_server::{App, Keys, Limits, ModelRegistry};

use crate::common::{Setup, TestServer, Value, hello, json, model, with};

const CHAT: &str = "/v1/chat/completions";

/// A template that writes an empty reasoning if it is switched off.
const CLOSES: &str = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant {% if enable_thinking is defined and enable_thinking is false %}\
    <think>\n\n</think>\n\n{% endif %}{% endif %}";

/// One that only asks for none.
const ASKS: &str = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
    {% if enable_thinking is defined and enable_thinking is false %}<|start|>system no_think<|end|>{% endif %}\
    {% if add_generation_prompt %}<|start|>assistant {% endif %}{# </think> #}";

/// One without a switch, which opens the reasoning.
const OPENS: &str = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant <think>\n{% endif %}{% if false %}</think>{% endif %}";

/// A server whose model answers with this text.
fn answering(template: &str, text: &str) -> TestServer {
    let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
    setup.defaults.grammar = Some(Grammar::Choices(vec![text.to_owned()]));
    setup.start()
}

/// The reasoning and the answer of OpenAI's interface, as a whole.
fn asked(server: &TestServer, more: &Value) -> (String, String) {
    let body = with(with(hello(), json!({ "max_tokens": 60 })), more.clone());
    let whole = server.post(CHAT, &body).ok();
    let message = &whole["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    let all = (text("reasoning_content"), text("content"));
    // The stream has the same.
    let chunks = server.post(CHAT, &with(body, json!({ "stream": true }))).chunks();
    let joined = |name: &str| {
        let pieces = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][name].as_str());
        pieces.collect::<String>()
    };
    assert_eq!((joined("reasoning_content"), joined("content")), all, "{more}: {chunks:?}");
    all
}

/// The thinking and the answer of Ollama's interface.
fn asked_ollama(server: &TestServer) -> (String, String) {
    let body = json!({ "model": "small", "messages": [{ "role": "user", "content": "hello" }], "think": false,
        "stream": false, "options": { "num_predict": 60 } });
    let whole = server.post("/api/chat", &body).ok();
    let text = |name: &str| whole["message"][name].as_str().unwrap_or_default().to_owned();
    let all = (text("thinking"), text("content"));
    let lines = server.post("/api/chat", &with(body, json!({ "stream": true }))).lines();
    let joined =
        |name: &str| lines.iter().filter_map(|line| line["message"][name].as_str()).collect::<String>();
    assert_eq!((joined("thinking"), joined("content")), all, "{lines:?}");
    all
}

fn switches() -> [Value; 4] {
    [
        json!({ "reasoning_budget_tokens": 0 }),
        json!({ "reasoning_budget": 0 }),
        json!({ "reasoning_effort": "none" }),
        json!({ "chat_template_kwargs": { "enable_thinking": false } }),
    ]
}

#[test]
fn markers_are_text_where_the_template_has_closed_the_reasoning() {
    for text in ["<think>x", "<think>x</think>y", "a <think>", "</think>"] {
        let server = answering(CLOSES, text);
        let wanted = (String::new(), text.to_owned());
        for switch in switches() {
            assert_eq!(asked(&server, &switch), wanted, "{switch}");
        }
        assert_eq!(asked_ollama(&server), wanted);
    }
    // The template has no switch: an empty reasoning is written for it.
    let server = answering(OPENS, "<think>x");
    for switch in switches().iter().take(3) {
        assert_eq!(asked(&server, switch), (String::new(), "<think>x".to_owned()), "{switch}");
    }
    assert_eq!(asked_ollama(&server), (String::new(), "<think>x".to_owned()));
}

#[test]
fn reasoning_that_nobody_asked_for_is_told_apart_once_it_ends() {
    let cases = [
        ("<think>x</think>y", "x", "y"),
        // Without an end it is the answer.
        ("<think>x", "", "<think>x"),
        ("<think> is a tag of <b>", "", "<think> is a tag of <b>"),
        ("no <think>x</think>", "", "no <think>x</think>"),
    ];
    for (text, reasoning, answer) in cases {
        let server = answering(ASKS, text);
        let wanted = (reasoning.to_owned(), answer.to_owned());
        for switch in &switches()[2..] {
            assert_eq!(asked(&server, switch), wanted, "{switch}");
        }
        assert_eq!(asked_ollama(&server).1, answer);
    }
}

/// The reasoning and the answer of each interface, without sampling.
fn answers(server: &TestServer, effort: &Value) -> Vec<(String, String)> {
    let user = json!([{ "role": "user", "content": "hello" }]);
    let sampling = json!({ "temperature": 0, "ignore_eos": true });
    let ask =
        |path: &str, own: Value| server.post(path, &with(with(sampling.clone(), own), effort.clone())).ok();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let chat = ask(CHAT, json!({ "messages": user, "max_tokens": 40 }));
    let chat = &chat["choices"][0]["message"];
    let response = ask("/v1/responses", json!({ "input": user, "max_output_tokens": 40 }));
    let of_items = |items: &Value, kind: &str, field: &str| -> String {
        let items = items.as_array().unwrap().iter().filter(|item| item["type"] == kind);
        items.map(|item| text(item.pointer(field).unwrap())).collect()
    };
    let items = &response["output"];
    let message = ask("/v1/messages", json!({ "model": "small", "messages": user, "max_tokens": 40 }));
    let blocks = &message["content"];
    let options = json!({ "temperature": 0, "ignore_eos": true, "num_predict": 40 });
    let ollama = json!({ "model": "small", "messages": user, "stream": false, "options": options });
    let ollama = server.post("/api/chat", &ollama).ok()["message"].clone();
    vec![
        (text(&chat["reasoning_content"]), text(&chat["content"])),
        (of_items(items, "reasoning", "/content/0/text"), of_items(items, "message", "/content/0/text")),
        (of_items(blocks, "thinking", "/thinking"), of_items(blocks, "text", "/text")),
        (text(&ollama["thinking"]), text(&ollama["content"])),
    ]
}

/// A server that was started so answers all interfaces so, unless a request says otherwise.
#[test]
fn requests_that_say_nothing_reason_as_the_server_was_started() {
    let started = |template: &str, effort: ReasoningEffort, budget: Option<usize>| {
        let mut setup = Setup { model: model::with_template(template), ..Setup::default() };
        setup.defaults.reasoning_budget = budget;
        let served = setup.served().with_reasoning(effort);
        TestServer::of(App::new(ModelRegistry::with(served), Keys::default(), Limits::default()))
    };
    let whole = answers(&started(OPENS, ReasoningEffort::Default, None), &json!({}));
    assert!(whole.iter().all(|(reasoning, text)| reasoning.len() > 30 && text.is_empty()), "{whole:?}");
    let limited = started(OPENS, ReasoningEffort::Default, Some(6));
    let cut = answers(&limited, &json!({}));
    let (reasoning, text) = &cut[0];
    assert!(!text.is_empty() && reasoning.len() < whole[0].0.len(), "{cut:?}");
    assert!(cut.iter().all(|answer| answer == &cut[0]), "{cut:?}");
    // A request's own budget counts.
    let own = |server: &TestServer, more: Value| answers(server, &more)[0].0.len();
    assert_eq!(own(&limited, json!({ "reasoning_budget_tokens": -1 })), whole[0].0.len());
    assert!(own(&limited, json!({ "reasoning_budget_tokens": 12 })) > reasoning.len());
    assert_eq!(own(&limited, json!({ "reasoning_budget_tokens": 0 })), 0);
    let off = started(OPENS, ReasoningEffort::Off, None);
    let without = answers(&off, &json!({}));
    assert!(without.iter().all(|(reasoning, text)| reasoning.is_empty() && !text.is_empty()), "{without:?}");
    assert!(own(&off, json!({ "reasoning_effort": "high" })) > 30);
    assert!((1..30).contains(&own(&off, json!({ "reasoning_budget_tokens": 12 }))));
    // Variables of the template say it, too, and prompts that are only counted or shown have it.
    let closes = started(CLOSES, ReasoningEffort::Off, None);
    let prompt = |more: Value| {
        let body = with(json!({ "messages": [{ "role": "user", "content": "hello" }] }), more);
        let prompt = closes.post("/apply-template", &body).ok()["prompt"].as_str().unwrap().to_owned();
        let tokens = closes.post("/tokenize", &json!({ "content": prompt })).ok()["tokens"].clone();
        let counted = closes.post("/v1/chat/completions/input_tokens", &body).ok()["input_tokens"].clone();
        assert_eq!(counted, tokens.as_array().unwrap().len(), "{prompt}");
        prompt
    };
    assert!(prompt(json!({})).ends_with("</think>\n\n"));
    let on = json!({ "chat_template_kwargs": { "enable_thinking": true } });
    assert!(prompt(on).ends_with("<|start|>assistant "));
    assert!(prompt(json!({ "reasoning_budget_tokens": 9 })).ends_with("<|start|>assistant "));
}

/// What is not switched off is told apart as before.
#[test]
fn reasoning_that_is_on_is_apart() {
    let server = answering(CLOSES, "y");
    let (_, answer) = asked(&server, &json!({}));
    assert_eq!(answer, "y");
    let setup = Setup { model: model::with_template(ASKS), ..Setup::default() };
    let server = setup.start();
    let grammar = json!({ "guided_regex": "y", "logit_bias": { "27": 100 }, "ignore_eos": false });
    // `<` comes first where it may.
    let (reasoning, answer) = asked(&server, &with(grammar, json!({ "reasoning_budget_tokens": 12 })));
    assert!(reasoning.starts_with('<'), "{reasoning}");
    assert_eq!(answer, "y");
}
