//! `/tokenize` and `/detokenize`, with the fields of llama-server and of vLLM, and vLLM's `/tokenizer_info`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::call::Call;
use crate::dialects::format_fields::tools_schema;
use crate::dialects::openai::schemas::message;
use crate::dialects::openai::{chat, messages};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Generation, Prompt};
use crate::model::ServedModel;
use crate::openapi::schema::{
    answer, any_object, any_of, count, filled_list, flag, list, nullable, request, text, token, with,
    with_field,
};

/// The conversation whose tokens are asked for.
const MESSAGES: &str = "messages";

/// A request for the tokens of a text, or of a conversation.
#[derive(Clone, Debug)]
pub struct TokenizeRequest {
    parts: Vec<TextOrToken>,
    /// The conversation, if that is asked for: vLLM's form.
    chat: Option<ChatPrompt>,
    /// Whether the tokens are added that begin prompts.
    add_special: bool,
    /// Whether control tokens that are spelled out become those tokens.
    parse_special: bool,
    /// Whether the text of each token is shown with it.
    with_pieces: bool,
    /// Whether the texts of tokens are shown in a list of their own.
    token_texts: bool,
}

#[derive(Clone, Debug)]
enum TextOrToken {
    Text(String),
    Token(u32),
}

impl TokenizeRequest {
    /// The request that the fields of a body are.
    pub fn new(fields: &Fields<'_>, served: &ServedModel) -> Result<TokenizeRequest, ApiError> {
        // A text in `prompt` is vLLM's form. What is not used must be right all the same.
        let (content, prompt) = (parts_of(fields, "content", served)?, parts_of(fields, "prompt", served)?);
        let is_prompt = content.is_none() && prompt.is_some();
        let messages = match fields.has(MESSAGES) {
            true => Some(messages::messages(fields, MESSAGES)?),
            false => None,
        };
        let has_messages = messages.is_some();
        let chat = chat::prompt(fields, messages.unwrap_or_default())?;
        let parts = content.or(prompt);
        let chat = Some(chat).filter(|_| parts.is_none() && has_messages);
        if parts.is_none() && chat.is_none() {
            return Err(fields.error("content", "is required, or prompt, or messages"));
        }
        Ok(TokenizeRequest {
            parts: parts.unwrap_or_default(),
            chat,
            add_special: fields
                .flag("add_special")?
                .or(fields.flag("add_special_tokens")?)
                .unwrap_or(is_prompt),
            parse_special: fields.flag("parse_special")?.unwrap_or(true),
            with_pieces: fields.flag("with_pieces")?.unwrap_or(false),
            token_texts: fields.flag("return_token_strs")?.unwrap_or(false),
        })
    }

    /// The bytes of its texts.
    fn bytes(&self) -> usize {
        let part = |part: &TextOrToken| match part {
            TextOrToken::Text(text) => text.len(),
            TextOrToken::Token(_) => 0,
        };
        self.parts.iter().map(part).sum()
    }

    /// The tokens.
    pub fn tokens(&self, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
        let tokenizer = served.model.tokenizer()?;
        let mut tokens = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            match part {
                TextOrToken::Text(text) if self.add_special && number == 0 => {
                    tokens.extend(tokenizer.encode_prompt(text, self.parse_special));
                }
                TextOrToken::Text(text) => tokens.extend(tokenizer.encode(text, self.parse_special)),
                TextOrToken::Token(token) => tokens.push(*token),
            }
        }
        Ok(tokens)
    }
}

/// The texts and tokens of a field, if it is there.
fn parts_of(
    fields: &Fields<'_>,
    name: &str,
    served: &ServedModel,
) -> Result<Option<Vec<TextOrToken>>, ApiError> {
    let wrong = || fields.error(name, "must be a text, or a list of texts and tokens");
    let count = served.model.tokenizer()?.token_count();
    let part = |part: &Value| match part {
        Value::String(text) => Ok(TextOrToken::Text(text.clone())),
        part => {
            let token = part.as_u64().and_then(|token| u32::try_from(token).ok()).ok_or_else(wrong)?;
            check_token(fields, name, token, count)?;
            Ok(TextOrToken::Token(token))
        }
    };
    match fields.value(name) {
        None => Ok(None),
        Some(Value::Array(parts)) => parts.iter().map(part).collect::<Result<_, ApiError>>().map(Some),
        Some(Value::String(text)) => Ok(Some(vec![TextOrToken::Text(text.clone())])),
        Some(_) => Err(wrong()),
    }
}

/// Refuses a token that the vocabulary has not.
fn check_token(fields: &Fields<'_>, name: &str, token: u32, count: usize) -> Result<(), ApiError> {
    match (token as usize) < count {
        true => Ok(()),
        false => Err(fields.error(name, format!("has the token {token}; the vocabulary has {count}"))),
    }
}

/// The tokens of a text, or of texts and tokens.
pub(super) async fn tokenize(call: Call) -> Result<Json<Value>, ApiError> {
    let served = call.model().await?;
    let wanted = TokenizeRequest::new(&call.fields(), &served)?;
    let (with_pieces, token_texts) = (wanted.with_pieces, wanted.token_texts);
    let of_model = Arc::clone(&served);
    let bytes = wanted.bytes();
    let tokens = match &wanted.chat {
        // The template writes the tokens that begin a prompt.
        Some(chat) => served.tokens(Generation::new(Prompt::Chat(chat.clone()))).await?,
        None => served.tokenizing(bytes, move || wanted.tokens(&of_model)).await??,
    };
    let texts: Option<Vec<String>> =
        token_texts.then(|| tokens.iter().map(|token| served.token_text(*token)).collect());
    let shown: Vec<Value> = match with_pieces {
        true => tokens.iter().map(|token| piece(&served, *token)).collect(),
        false => tokens.into_iter().map(Value::from).collect(),
    };
    let mut answer = json!({ "tokens": shown, "count": shown.len(), "max_model_len": served.context() });
    if let (Some(texts), Some(object)) = (texts, answer.as_object_mut()) {
        object.insert("token_strs".to_owned(), texts.into());
    }
    Ok(Json(answer))
}

/// A token with its text, or with its bytes if they are a part of a character.
fn piece(served: &ServedModel, token: u32) -> Value {
    let bytes = served.token_bytes(token);
    let piece = match std::str::from_utf8(&bytes) {
        Ok(text) => text.into(),
        Err(_) => json!(bytes),
    };
    json!({ "id": token, "piece": piece })
}

/// The tokens whose text a request asks for.
pub fn listed(fields: &Fields<'_>, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
    const NAME: &str = "tokens";
    let list = fields.list(NAME)?.ok_or_else(|| fields.missing(NAME))?;
    let count = served.model.tokenizer()?.token_count();
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        let token = token.ok_or_else(|| fields.error(NAME, "must be a list of tokens"))?;
        check_token(fields, NAME, token, count)?;
        Ok(token)
    };
    list.iter().map(token).collect()
}

/// The text of tokens, with the names of control tokens.
pub(super) async fn detokenize(call: Call) -> Result<Json<Value>, ApiError> {
    let served = call.model().await?;
    let tokens = listed(&call.fields(), &served)?;
    let bytes: Vec<u8> = tokens.into_iter().flat_map(|token| served.token_bytes(token)).collect();
    let text = String::from_utf8_lossy(&bytes);
    Ok(Json(json!({ "content": text, "prompt": text })))
}

/// The tokens with a meaning of their own, and the chat template, of the model that `?model=` names, or of the first one.
pub(super) async fn tokenizer_info(
    State(app): State<Arc<App>>,
    Query(mut query): Query<BTreeMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let first = || app.models().loaded().first().map(|served| served.name.clone());
    let name = query.remove("model").or_else(first);
    let served = app.models().find_loaded(name.as_deref()).await?;
    let vocabulary = served.model.tokenizer()?.vocabulary();
    let text = |token: Option<u32>| token.map(|token| served.token_text(token));
    Ok(Json(json!({
        "tokenizer_class": vocabulary.model,
        "vocab_size": vocabulary.tokens.len(),
        "model_max_length": served.context(),
        "bos_token": text(vocabulary.bos),
        "eos_token": text(vocabulary.eos),
        "chat_template": served.model.template().map(|template| template.source()),
    })))
}

/// The body of `/tokenize`.
pub(super) fn tokenize_schema() -> Value {
    let parts = any_of([text(), list(any_of([text(), token()]))]);
    let has = |name: &str| json!({ "required": [name], "properties": { name: parts } });
    let fields = json!({
        "content": parts,
        "prompt": parts,
        "add_special": flag(),
        "add_special_tokens": flag(),
        "parse_special": flag(),
        "with_pieces": flag(),
        "return_token_strs": flag(),
        "model": text(),
        "messages": filled_list(message()),
        "tools": tools_schema(),
        "add_generation_prompt": flag(),
        "continue_final_message": flag(),
        "chat_template_kwargs": any_object(),
    });
    // One of them has the text.
    let messages = json!({ "required": [MESSAGES], "properties": { MESSAGES: { "type": "array" } } });
    with(request(&[], fields, []), json!({ "anyOf": [has("content"), has("prompt"), messages] }))
}

/// The answer of `/tokenize`.
pub(super) fn tokens_schema() -> Value {
    let piece = json!({ "id": token(), "piece": any_of([text(), filled_list(token())]) });
    let tokens = list(any_of([token(), answer(piece)]));
    let own = answer(json!({ "tokens": tokens, "count": count(), "max_model_len": count() }));
    with_field(own, "token_strs", list(text()))
}

/// The body of `/detokenize`.
pub(super) fn detokenize_schema() -> Value {
    request(&["tokens"], json!({ "tokens": list(token()), "model": text() }), [])
}

/// The answer of `/detokenize`.
pub(super) fn content_schema() -> Value {
    answer(json!({ "content": text(), "prompt": text() }))
}

/// The answer of `/tokenizer_info`.
pub(super) fn tokenizer_schema() -> Value {
    answer(json!({
        "tokenizer_class": text(),
        "vocab_size": count(),
        "model_max_length": count(),
        "bos_token": nullable(&text()),
        "eos_token": nullable(&text()),
        "chat_template": nullable(&text()),
    }))
}
