//! `/infill`: text between a prefix and a suffix.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Value, json};

use super::completion;
use crate::call::Call;
use crate::dialects::fill_in_middle::{ExtraFile, FillTokens};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Prompt};
use crate::model::ServedModel;
use crate::openapi::schema::{self, list, text};

/// Fills the gap.
pub async fn infill(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let fields = call.fields();
    // What is wrong with the request is said before what is missing in the model.
    completion::parse_with(&fields, &served, Vec::new())?;
    let prompt = prompt(&fields, &served)?;
    completion::respond(call, &served, vec![prompt]).await
}

/// The request as a [`Generation`].
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Vec<Generation>, ApiError> {
    let prompt = prompt(fields, served)?;
    Ok(completion::parse_with(fields, served, vec![prompt])?.0)
}

fn prompt(fields: &Fields<'_>, served: &ServedModel) -> Result<Prompt, ApiError> {
    let before = fields.required_text("input_prefix")?;
    let behind = fields.required_text("input_suffix")?;
    let written = fields.text("prompt")?.unwrap_or_default();
    let extra = fields.objects("input_extra")?.unwrap_or_default();
    let file = |file: &Fields<'_>| {
        let name = file.text("filename")?.unwrap_or("file").to_owned();
        Ok(ExtraFile { name, text: file.required_text("text")?.to_owned() })
    };
    let extra = extra.iter().map(file).collect::<Result<Vec<_>, ApiError>>()?;
    let tokens = FillTokens::of(&served.model).ok_or_else(|| FillTokens::missing(served))?;
    let before = format!("{before}{written}");
    Ok(Prompt::Mixed(tokens.prompt(&before, behind, &extra, FillTokens::bos(served))))
}

/// The body.
pub(super) fn request_schema() -> Value {
    let file = schema::request(&["text"], json!({ "filename": text(), "text": text() }), []);
    let own = json!({
        "input_prefix": text(),
        "input_suffix": text(),
        "prompt": text(),
        "input_extra": list(file),
    });
    schema::request(&["input_prefix", "input_suffix"], own, completion::shared_fields())
}
