//! Fields that several of Ollama's requests have.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::call::Call;
use crate::constraint::Constraint;
use crate::dialects::sampling_fields;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Prompt, ReasoningEffort};
use crate::model::ServedModel;

/// The most log-probabilities that are reported for a token.
pub(super) const MAX_TOP_LOGPROBS: usize = 20;

/// Numbers of tokens that stand for no limit, and for as many as the context has room for, which is the same here.
const NO_LIMIT: &[i64] = &[-1, -2];

/// Options of Ollama's runner: hints, since the model is loaded already.
pub(super) const HINTS: &[&str] =
    &["num_keep", "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict"];

/// The name of the model of a request, by `model` or the older `name`.
pub(super) fn model_name<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    let older = fields.text("name")?;
    Ok(fields.text("model")?.or(older))
}

/// The model of a request; the tag `latest` may be left out or added.
pub(super) async fn model(call: &Call) -> Result<Arc<ServedModel>, ApiError> {
    call.app.models().find(model_name(&call.fields())?).await
}

/// The model's name in the answer: the one that the client uses.
pub(super) fn answered_name(fields: &Fields<'_>, served: &ServedModel) -> Result<String, ApiError> {
    Ok(fields.text("model")?.map_or_else(|| served.name.clone(), str::to_owned))
}

/// The options that are sampled with, and the form of the answer.
pub(super) fn generation(
    fields: &Fields<'_>,
    served: &ServedModel,
    prompt: Prompt,
) -> Result<Generation, ApiError> {
    let none = Map::new();
    let options = fields.object("options")?.unwrap_or_else(|| Fields::new(&none));
    for name in HINTS {
        options.integer(name)?;
    }
    options.flag("use_mmap")?;
    // A prompt that is too long is an error in any case, and so is an answer that fills the context its end.
    for name in ["truncate", "shift"] {
        fields.flag(name)?;
    }
    let top = fields.count("top_logprobs")?;
    if top.is_some_and(|top| top > MAX_TOP_LOGPROBS) {
        return Err(fields.error("top_logprobs", format!("must be from 0 to {MAX_TOP_LOGPROBS}")));
    }
    let wants = fields.flag("logprobs")?.unwrap_or(false) || top.is_some_and(|top| top > 0);
    Ok(Generation {
        sampling: sampling_fields::sampling(&options, served)?,
        max_tokens: sampling_fields::max_tokens(&options, &["num_predict"], NO_LIMIT, served)?,
        stops: sampling_fields::stops(&options, "stop", served)?,
        logprobs: wants.then_some(top.unwrap_or(0)),
        constraint: constraint(fields)?,
        constraint_field: Some("format"),
        ..Generation::new(prompt)
    })
}

/// The form of the answer: `json`, or a schema.
fn constraint(fields: &Fields<'_>) -> Result<Constraint, ApiError> {
    const NAME: &str = "format";
    match fields.value(NAME) {
        None => Ok(Constraint::None),
        Some(Value::String(text)) if text.is_empty() => Ok(Constraint::None),
        Some(Value::String(text)) if text == "json" => Ok(Constraint::JsonObject),
        Some(Value::Object(schema)) => Ok(Constraint::JsonSchema(Value::Object(schema.clone()))),
        Some(_) => Err(fields.error(NAME, "must be \"json\" or a JSON schema")),
    }
}

/// Whether, and how much, the model is to reason.
pub(super) fn reasoning(fields: &Fields<'_>) -> Result<ReasoningEffort, ApiError> {
    const NAME: &str = "think";
    match fields.value(NAME) {
        None => Ok(ReasoningEffort::Default),
        Some(Value::Bool(true)) => Ok(ReasoningEffort::On),
        Some(Value::Bool(false)) => Ok(ReasoningEffort::Off),
        Some(Value::String(_)) => {
            let effort = fields.one_of(NAME, &["low", "medium", "high", "max"])?.unwrap_or_default();
            Ok(ReasoningEffort::Named(effort.to_owned()))
        }
        Some(_) => Err(fields.error(NAME, "must be true, false, low, medium, high or max")),
    }
}

/// Images are not understood.
pub(super) fn refuse_images(fields: &Fields<'_>) -> Result<(), ApiError> {
    match fields.list("images")? {
        Some([_, ..]) => Err(fields.error("images", "is not supported: the model takes text only")),
        _ => Ok(()),
    }
}

/// How long a model stays loaded after the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeepAlive {
    /// As the server does by itself.
    Default,
    /// For this time; nothing is at once.
    For(Duration),
    /// For as long as the server runs.
    Forever,
}

impl KeepAlive {
    /// Whether the model is unloaded at once.
    pub(super) fn is_over(self) -> bool {
        self == KeepAlive::For(Duration::ZERO)
    }

    /// Has a loaded model kept for so long after its last answer, if the request names it: the only model answers to every name, but
    /// whoever means another one does not say how long it stays.
    pub(super) fn apply(self, call: &Call, served: &ServedModel) -> Result<(), ApiError> {
        let fields = call.fields();
        let (models, name) = (call.app.models(), model_name(&fields)?.unwrap_or(&served.name));
        match self {
            KeepAlive::Default => {}
            KeepAlive::For(time) => models.keep_alive(name, Some(time)),
            KeepAlive::Forever => models.keep_alive(name, None),
        }
        Ok(())
    }
}

/// `keep_alive`: seconds, or a text such as `5m`; negative for ever.
pub(super) fn keep_alive(fields: &Fields<'_>) -> Result<KeepAlive, ApiError> {
    const NAME: &str = "keep_alive";
    let wrong = || fields.error(NAME, "must be a number of seconds, or a duration such as \"5m\"");
    let seconds = match fields.value(NAME) {
        None => return Ok(KeepAlive::Default),
        Some(Value::String(text)) => duration(text).ok_or_else(wrong)?,
        Some(value) => value.as_f64().ok_or_else(wrong)?,
    };
    if seconds < 0.0 {
        return Ok(KeepAlive::Forever);
    }
    Ok(Duration::try_from_secs_f64(seconds).map_or(KeepAlive::Forever, KeepAlive::For))
}

/// Seconds of a duration such as `1h30m`, `-1` or `500ms`.
fn duration(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest.is_empty() {
        return None;
    }
    if rest.bytes().all(|byte| byte.is_ascii_digit()) {
        return rest.parse::<f64>().ok().map(|seconds| sign * seconds);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let (number, after) = rest.split_at_checked(digits)?;
        let units =
            [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
        let (unit, size) = units.iter().find(|(unit, _)| after.starts_with(unit))?;
        sum += number.parse::<f64>().ok()? * size;
        rest = after.get(unit.len()..)?;
    }
    Some(sign * sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_go() {
        assert_eq!(duration("5m"), Some(300.0));
        assert_eq!(duration("1h30m"), Some(5400.0));
        assert_eq!(duration("1.5s"), Some(1.5));
        assert_eq!(duration("500ms"), Some(0.5));
        assert_eq!(duration("-1"), Some(-1.0));
        assert_eq!(duration("-1m"), Some(-60.0));
        for wrong in ["", "-", "m", "5 m", "x", "5x", "1.2.3s", "5m\n"] {
            assert_eq!(duration(wrong), None, "{wrong}");
        }
    }
}
