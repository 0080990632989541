//! `/api/generate`.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use quadriga_llm::template::Message;
use serde_json::Value;

use super::answer::{AnswerForm, Head};
use super::chat::{answer, loaded, unloaded};
use super::request_fields::{answered_name, generation, keep_alive, model, reasoning, refuse_images};
use crate::call::Call;
use crate::dialects::fill_in_middle::FillTokens;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{ChatPrompt, Generation, Prompt, ReasoningEffort};
use crate::model::ServedModel;

/// Answers a prompt.
pub async fn generate(call: Call) -> Result<Response, ApiError> {
    let started = Instant::now();
    let fields = call.fields();
    let has_context = !fields.flag("raw")?.unwrap_or(false);
    let (keep, form) = (keep_alive(&fields)?, AnswerForm::Generate { has_context });
    if let Some(answer) = unloaded(&call, keep, started, form).await? {
        return Ok(answer);
    }
    let served = model(&call).await?;
    let head = Head::new(answered_name(&fields, &served)?, started, form);
    let generation = parse(&fields, &served)?;
    let streams = fields.flag("stream")?.unwrap_or(true);
    match generation {
        Some(generation) => {
            keep.apply(&call, &served)?;
            answer(call, &served, head, generation, streams).await
        }
        None => loaded(&call, &served, &head, keep),
    }
}

/// The request as a [`Generation`]; `None` if it has no prompt.
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Option<Generation>, ApiError> {
    let text = fields.text("prompt")?.unwrap_or_default();
    let suffix = fields.text("suffix")?.unwrap_or_default();
    refuse_images(fields)?;
    if fields.text("template")?.is_some_and(|template| !template.is_empty()) {
        return Err(fields.error("template", "is not supported: the model's own template is used"));
    }
    let before = context(fields)?;
    let system = fields.text("system")?.filter(|system| !system.is_empty());
    let reasoning = reasoning(fields)?;
    let raw = fields.flag("raw")?.unwrap_or(false);
    let thinks = matches!(reasoning, ReasoningEffort::On | ReasoningEffort::Named(_));
    for (name, other, is_there) in [
        ("system", "raw", raw && system.is_some()),
        ("context", "raw", raw && fields.has("context")),
        ("system", "suffix", !suffix.is_empty() && system.is_some()),
        ("context", "suffix", !suffix.is_empty() && !before.is_empty()),
        ("think", "suffix", !suffix.is_empty() && thinks),
    ] {
        if is_there {
            return Err(fields.error(name, format!("cannot be used together with {other}")));
        }
    }
    let prompt = if !suffix.is_empty() {
        let tokens = FillTokens::of(&served.model).ok_or_else(|| FillTokens::missing(served).at("suffix"))?;
        Prompt::Mixed(tokens.prompt(text, suffix, &[], FillTokens::bos(served)))
    } else if raw {
        Prompt::Text(text.to_owned())
    } else {
        let system = system.map(|system| Message::new("system", system));
        let messages = system.into_iter().chain([Message::new("user", text)]).collect();
        Prompt::Chat(ChatPrompt { messages, before, reasoning, ..ChatPrompt::default() })
    };
    let generation = generation(fields, served, prompt)?;
    Ok(Some(generation).filter(|_| !text.is_empty() || !suffix.is_empty()))
}

/// The tokens of an earlier prompt and its answer, as an answer returns them.
fn context(fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let list = fields.list("context")?.unwrap_or_default();
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let tokens = list.iter().map(token).collect::<Option<Vec<_>>>();
    tokens.ok_or_else(|| fields.error("context", "must be a list of tokens"))
}
