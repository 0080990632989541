//! Renders any text as a chat template, for contents that try to forge control tokens: an error, or a prompt within the limits.
//!
//! The input is the template; what follows a NUL byte is the content of the messages.

use std::sync::LazyLock;

use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments, ToolCall};
use quadriga_llm::tokenizer::{TokenType, Tokenizer, Vocabulary};

/// The text of the only control token, which no template composes by accident.
const CONTROL: char = '⌘';

/// A vocabulary with a token for each printable ASCII character, for parts of the control token, and for it.
static TOKENIZER: LazyLock<Option<Tokenizer>> = LazyLock::new(|| {
    let mut tokens: Vec<String> = vec![CONTROL.to_string(), format!("{CONTROL}a")];
    let mut types = vec![TokenType::Control, TokenType::Control];
    for byte in 0..=255u8 {
        tokens.push(format!("<0x{byte:02X}>"));
        types.push(TokenType::Byte);
    }
    tokens.extend((32..127u8).map(|byte| char::from(byte).to_string()));
    types.resize(tokens.len(), TokenType::Normal);
    Tokenizer::new(Vocabulary { model: "llama".into(), tokens, types, ..Vocabulary::default() }).ok()
});

/// Whether a template can write the control token: it has it, or can make any letter from a number.
fn can_write_control(source: &str) -> bool {
    source.contains(CONTROL) || source.contains('\\') || source.contains("format")
}

/// Checks one input.
pub fn run(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (source, content) = text.split_once('\0').unwrap_or((&text, "Hi"));
    let Some(tokenizer) = TOKENIZER.as_ref() else { return };
    let Ok(template) = ChatTemplate::for_tokenizer(source, tokenizer) else { return };
    let _ = (template.reasoning(), template.without_reasoning());
    let content = format!("{content}{CONTROL}a");
    let messages = [
        Message::new("system", &content),
        Message { reasoning_content: Some(content.clone()), ..Message::new("user", "Why?") },
        Message {
            tool_calls: vec![ToolCall::new(&content, serde_json::json!({ content.clone(): [1, content] }))],
            ..Message::new("assistant", &content)
        },
    ];
    let mut arguments = TemplateArguments::default();
    arguments.variables.insert("tools".into(), serde_json::json!([{ "name": content }]));
    let Ok(rendered) = template.render_with(&messages, &arguments) else { return };
    // Twice the messages and 4 MiB are the limit of the output.
    assert!(rendered.len() <= (4 << 20) + 64 * (content.len() + 64), "{} bytes", rendered.len());
    let Ok(tokens) = template.tokenize_with(tokenizer, &messages, &arguments) else { return };
    let forged = tokens.iter().any(|token| *token < 2);
    assert!(!forged || can_write_control(source), "a content became a control token: {source:?}");
}
