//! Renders conversations: reads one JSON object per line with the fields `template` (source), `messages`, `variables`,
//! `bos_token` and `eos_token`, and prints one with `text` or `error`. For `bench/agree_on_templates.py`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a testing tool")]

use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments};
use serde_json::{Value, json};

fn main() {
    for line in std::io::stdin().lines() {
        let case: Value = serde_json::from_str(&line.expect("input")).expect("JSON");
        let text = |name: &str| case[name].as_str().unwrap_or_default();
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).expect("messages");
        let variables = case["variables"].as_object().cloned().unwrap_or_default();
        let arguments = TemplateArguments { variables, ..TemplateArguments::default() };
        let rendered = ChatTemplate::new(text("template"), text("bos_token"), text("eos_token"))
            .and_then(|template| template.render_with(&messages, &arguments));
        println!(
            "{}",
            match rendered {
                Ok(text) => json!({ "text": text }),
                Err(error) => json!({ "error": error.to_string() }),
            }
        );
    }
}
