//! `/api/version`, `/api/tags`, `/api/ps` and `/api/show`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use quadriga_gguf::{Summary, Value as MetadataValue};
use serde_json::{Map, Value, json};

use super::request_fields::model;
use super::time::rfc3339;
use crate::app::App;
use crate::call::Call;
use crate::dialects::fill_in_middle::FillTokens;
use crate::error::ApiError;
use crate::model::ServedModel;

/// The version of Ollama whose interface this is: clients ask for one that is new enough.
const VERSION: &str = "0.12.6";

/// A time that no server lives to see: models stay loaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The version.
pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": VERSION }))
}

/// All models.
pub(super) async fn tags(State(app): State<Arc<App>>) -> Json<Value> {
    let models: Vec<Value> = app.models().loaded().iter().map(|served| listed(served).into()).collect();
    Json(json!({ "models": models }))
}

/// The models that are loaded.
pub(super) async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    let one = |served: &Arc<ServedModel>| {
        let mut model = listed(served);
        model.insert("expires_at".to_owned(), NEVER.into());
        model.insert("size_vram".to_owned(), 0.into());
        model.insert("context_length".to_owned(), served.context().into());
        Value::from(model)
    };
    let models: Vec<Value> = app.models().loaded().iter().map(one).collect();
    Json(json!({ "models": models }))
}

/// A model as lists have it.
fn listed(served: &ServedModel) -> Map<String, Value> {
    let digest = served.model.identity().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let summary = Summary::of(served.model.file());
    Map::from_iter([
        ("name".to_owned(), served.name.clone().into()),
        ("model".to_owned(), served.name.clone().into()),
        ("modified_at".to_owned(), modified(served).into()),
        ("size".to_owned(), summary.file_bytes.into()),
        ("digest".to_owned(), digest.into()),
        ("details".to_owned(), details(served, &summary)),
        ("capabilities".to_owned(), capabilities(served).into()),
    ])
}

/// When the file was changed, or when it was loaded.
fn modified(served: &ServedModel) -> String {
    let path = served.model.file().paths().next();
    let changed = path.and_then(|path| std::fs::metadata(path).ok()?.modified().ok());
    let changed = changed.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    rfc3339(changed.unwrap_or(Duration::from_secs(served.created)))
}

fn details(served: &ServedModel, summary: &Summary) -> Value {
    let family = summary.architecture.clone().unwrap_or_default();
    let most = summary.types.first().map(|total| total.dtype.to_string().to_uppercase());
    json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": parameter_size(summary.parameters),
        "quantization_level": summary.file_type.clone().or(most).unwrap_or_default(),
        "context_length": served.context(),
        "embedding_length": served.model.hyperparameters().width,
    })
}

/// A number of parameters such as `7.6B`.
fn parameter_size(count: u64) -> String {
    let count = count as f64;
    if count >= 1e9 {
        format!("{:.1}B", count / 1e9)
    } else if count >= 1e6 {
        format!("{:.2}M", count / 1e6)
    } else {
        format!("{:.2}K", count / 1e3)
    }
}

fn capabilities(served: &ServedModel) -> Vec<&'static str> {
    if served.model.hyperparameters().encoder {
        return vec!["embedding"];
    }
    let mut all = vec!["completion"];
    let template = served.model.template();
    if template.is_some_and(|template| template.reads("tools")) {
        all.push("tools");
    }
    if FillTokens::of(served).is_some() {
        all.push("insert");
    }
    if template.is_some_and(|template| template.reasoning().is_some()) {
        all.push("thinking");
    }
    all
}

/// Everything about a model.
pub(super) async fn show(call: Call) -> Result<Json<Value>, ApiError> {
    let verbose = call.fields().flag("verbose")?.unwrap_or(false);
    let served = model(&call).await?;
    let summary = Summary::of(served.model.file());
    let source = served.model.template().map(|template| template.source()).unwrap_or_default();
    // Clients look for this word to know whether a gap can be filled.
    let template = match FillTokens::of(&served) {
        Some(_) => format!("{{# fills a gap before .Suffix #}}{source}"),
        None => source.to_owned(),
    };
    let path = served.model.file().paths().next();
    let from = path.map_or_else(|| served.name.clone(), |path| path.display().to_string());
    let parameters = parameters(&served);
    let mut answer = json!({
        "modelfile": format!("FROM {from}\n"),
        "parameters": parameters,
        "template": template,
        "details": details(&served, &summary),
        "model_info": model_info(&served, &summary, verbose),
        "capabilities": capabilities(&served),
        "modified_at": modified(&served),
    });
    if let Some(object) = answer.as_object_mut() {
        let texts = [("license", summary.license.clone()), ("system", served.defaults.system.clone())];
        object.extend(texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?.into()))));
    }
    Ok(Json(answer))
}

/// The defaults of requests, one a line.
fn parameters(served: &ServedModel) -> String {
    let sampling = &served.defaults.sampling;
    let mut lines = vec![
        format!("num_ctx                        {}", served.context()),
        format!("temperature                    {}", sampling.temperature),
        format!("top_k                          {}", sampling.top_k),
        format!("top_p                          {}", sampling.top_p),
        format!("min_p                          {}", sampling.min_p),
        format!("repeat_penalty                 {}", sampling.repeat_penalty),
    ];
    lines.extend(served.defaults.stops.iter().map(|stop| format!("stop                           {stop:?}")));
    lines.join("\n")
}

/// The metadata of the file; long lists only if they are asked for.
fn model_info(served: &ServedModel, summary: &Summary, verbose: bool) -> Map<String, Value> {
    let file = served.model.file();
    let mut info: Map<String, Value> = file
        .metadata()
        .filter(|(key, _)| *key != "tokenizer.chat_template")
        .map(|(key, value)| (key.to_owned(), metadata(value, verbose)))
        .collect();
    info.insert("general.parameter_count".to_owned(), summary.parameters.into());
    info
}

fn metadata(value: MetadataValue<'_>, verbose: bool) -> Value {
    match value {
        MetadataValue::String(text) => text.into(),
        MetadataValue::Bool(flag) => flag.into(),
        MetadataValue::F32(number) => json!(number),
        MetadataValue::F64(number) => json!(number),
        MetadataValue::Array(array) if verbose => array.iter().map(|value| metadata(value, true)).collect(),
        MetadataValue::Array(_) => Value::Null,
        number => number.integer().and_then(|number| i64::try_from(number).ok()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_as_in_ollama() {
        assert_eq!(parameter_size(7_615_616_512), "7.6B");
        assert_eq!(parameter_size(134_515_008), "134.52M");
        assert_eq!(parameter_size(33_000), "33.00K");
    }
}
