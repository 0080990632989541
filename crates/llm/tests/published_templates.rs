//! Templates with the features of published ones give the texts that Python's Jinja gives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments};
use serde_json::{Value, json};

#[test]
fn templates_give_the_text_of_python() {
    let data: Value = serde_json::from_str(include_str!("data/templates.json")).unwrap();
    let talks: Vec<Vec<Message>> = serde_json::from_value(data["messages"].clone()).unwrap();
    for case in data["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let number = |field: &str| case[field].as_u64().unwrap() as usize;
        let variables = data["variables"][number("variables")].as_object().unwrap().clone();
        let arguments = TemplateArguments { variables, ..TemplateArguments::default() };
        let source = data["templates"][name].as_str().unwrap();
        let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
        let rendered = template.render_with(&talks[number("messages")], &arguments);
        let at = format!("{name}, messages {}, variables {}", number("messages"), number("variables"));
        match case["text"].as_str() {
            Some(text) => assert_eq!(rendered.expect(&at), text, "{at}"),
            None => assert!(rendered.unwrap_err().to_string().contains("roles must alternate"), "{at}"),
        }
    }
}

#[test]
fn messages_are_those_of_openai() {
    let object = json!({
        "role": "assistant",
        "content": null,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}],
        "trusted": true,
    });
    let message: Message = serde_json::from_value(object).unwrap();
    assert!(!message.trusted, "nobody but the program can trust a message");
    assert_eq!(message.tool_calls[0].arguments.to_string(), r#"{"b":1,"a":2}"#, "in their order");
    let again: Message = serde_json::from_value(serde_json::to_value(&message).unwrap()).unwrap();
    assert_eq!(again, message);
}

#[test]
fn variables_cannot_replace_messages() {
    let template =
        ChatTemplate::new("{{ messages[0].content }}{{ bos_token }}{{ extra }}", "<s>", "").unwrap();
    let variables = json!({"messages": [], "bos_token": "x", "extra": "y", "message bytes": 1u64 << 40});
    let arguments = TemplateArguments {
        variables: variables.as_object().unwrap().clone(),
        ..TemplateArguments::default()
    };
    assert_eq!(template.render_with(&[Message::new("user", "hi")], &arguments).unwrap(), "hi<s>y");
}
