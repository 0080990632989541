//! `/api/version`, `/api/tags`, `/api/ps` and `/api/show`.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::Json;
use quadriga_gguf::{Summary, Value as MetadataValue};
use quadriga_llm::{GeneratorOptions, Model};
use serde_json::{Map, Value, json};

use super::model_card::{ModelCard, ModelCards, modified};
use super::request_fields::model_name;
use crate::app::App;
use crate::call::Call;
use crate::dialects::fill_in_middle::FillTokens;
use crate::dialects::time::rfc3339;
use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;

/// The version of Ollama whose interface this is, with `/v1/responses` and `/v1/messages`: clients ask for one that is new enough.
const VERSION: &str = "0.14.0";

/// A time that no server lives to see, of models that stay loaded.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The version.
pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": VERSION }))
}

/// All models, loaded or not.
pub(super) async fn tags(app: Arc<App>, cards: Arc<ModelCards>) -> Result<Json<Value>, ApiError> {
    app.models().refresh().await;
    let list = move || -> Vec<Value> {
        let all = app.models().list();
        all.iter().filter_map(|listed| Some(cards.card(listed)?.listed(&listed.name).into())).collect()
    };
    Ok(Json(json!({ "models": beside(list).await? })))
}

/// The models that are loaded, and until when.
pub(super) async fn running(app: Arc<App>, cards: Arc<ModelCards>) -> Result<Json<Value>, ApiError> {
    app.models().refresh().await;
    let list = move || -> Vec<Value> {
        let mut all = Vec::new();
        for listed in app.models().list() {
            let (Some(served), Some(card)) = (&listed.served, cards.card(&listed)) else { continue };
            let expires = listed.expires.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let mut model = card.listed(&listed.name);
            model.insert("expires_at".to_owned(), expires.map_or_else(|| NEVER.to_owned(), rfc3339).into());
            // What is not on the device is what is left of the size.
            let size = model.get("size").and_then(Value::as_u64).unwrap_or(0).max(served.device_bytes);
            model.insert("size".to_owned(), size.into());
            model.insert("size_vram".to_owned(), served.device_bytes.into());
            model.insert("context_length".to_owned(), served.context().into());
            all.push(model.into());
        }
        all
    };
    Ok(Json(json!({ "models": beside(list).await? })))
}

/// Files are read beside the threads that serve connections.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let failed = |_| ApiError::new(ErrorKind::Internal, "the models could not be read");
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

/// The name of the model that is shown, and whether all of it is.
pub(crate) fn parse_show<'f>(fields: &Fields<'f>) -> Result<(Option<&'f str>, bool), ApiError> {
    Ok((model_name(fields)?, fields.flag("verbose")?.unwrap_or(false)))
}

/// Everything about a model, which need not be loaded for that.
pub(super) async fn show(call: Call) -> Result<Json<Value>, ApiError> {
    let fields = call.fields();
    let (name, verbose) = parse_show(&fields)?;
    let listed = call.app.models().describe(name).await?;
    let work = move || {
        if let Some(served) = &listed.served {
            return Ok(described(&served.model, served.context(), Some(&served.defaults), verbose));
        }
        let Some(entry) = &listed.entry else { return Err(ApiError::model_not_found(&listed.name)) };
        let model = Model::open(&entry.path).map_err(|error| {
            ApiError::new(ErrorKind::Internal, format!("{} cannot be read: {error}", listed.name))
        })?;
        Ok(described(&model, model.hyperparameters().context, None, verbose))
    };
    beside(work).await?.map(Json)
}

fn described(model: &Model, context: usize, defaults: Option<&GeneratorOptions>, verbose: bool) -> Value {
    let summary = Summary::of(model.file());
    let card = ModelCard::new(model, context, modified(model));
    let source = model.template().map(|template| template.source()).unwrap_or_default();
    // Clients look for this word to know whether a gap can be filled.
    let template = match FillTokens::of(model) {
        Some(_) => format!("{{# fills a gap before .Suffix #}}{source}"),
        None => source.to_owned(),
    };
    let path = model.file().paths().next();
    let from = path.map_or_else(|| "model".to_owned(), |path| path.display().to_string());
    let mut answer = json!({
        "modelfile": format!("FROM {from}\n"),
        "parameters": parameters(context, defaults),
        "template": template,
        "details": card.details,
        "model_info": model_info(model, &summary, verbose),
        "capabilities": card.capabilities,
        "modified_at": card.modified,
    });
    if let Some(object) = answer.as_object_mut() {
        let system = defaults.and_then(|defaults| defaults.system.clone());
        let texts = [("license", summary.license.clone()), ("system", system)];
        object.extend(texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text?.into()))));
    }
    answer
}

/// The defaults of requests, one a line. Those of a model that is not loaded are not known yet.
fn parameters(context: usize, defaults: Option<&GeneratorOptions>) -> String {
    let mut lines = vec![format!("num_ctx                        {context}")];
    if let Some(defaults) = defaults {
        let sampling = &defaults.sampling;
        lines.extend([
            format!("temperature                    {}", sampling.temperature),
            format!("top_k                          {}", sampling.top_k),
            format!("top_p                          {}", sampling.top_p),
            format!("min_p                          {}", sampling.min_p),
            format!("repeat_penalty                 {}", sampling.repeat_penalty),
        ]);
        lines.extend(defaults.stops.iter().map(|stop| format!("stop                           {stop:?}")));
    }
    lines.join("\n")
}

/// The metadata of the file; long lists only if they are asked for.
fn model_info(model: &Model, summary: &Summary, verbose: bool) -> Map<String, Value> {
    let mut info: Map<String, Value> = model
        .file()
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
