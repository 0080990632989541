//! What lists say about a model. That of a model which is not loaded is read from its file once, until the file changes.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use quadriga_gguf::Summary;
use quadriga_llm::Model;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::dialects::fill_in_middle::FillTokens;
use crate::dialects::time::rfc3339;
use crate::model_loader::ModelEntry;
use crate::registry::ListedModel;

/// What lists say about a model.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ModelCard {
    pub(super) modified: String,
    size: u64,
    digest: String,
    pub(super) details: Value,
    pub(super) capabilities: Vec<&'static str>,
}

impl ModelCard {
    /// The card of a model that has a context of so many tokens.
    pub(super) fn new(model: &Model, context: usize, modified: Option<SystemTime>) -> ModelCard {
        let summary = Summary::of(model.file());
        let path = model.file().paths().next();
        let digest = digest(&model.identity(), path, summary.file_bytes, modified);
        ModelCard {
            modified: written(modified),
            size: summary.file_bytes,
            digest,
            details: details(model, context, &summary),
            capabilities: capabilities(model),
        }
    }

    /// The card of a file that is no model that can be run: it is listed, since requests for it say what is wrong.
    fn unreadable(entry: &ModelEntry) -> ModelCard {
        ModelCard {
            modified: written(entry.modified),
            size: entry.bytes,
            digest: digest(&[], Some(&entry.path), entry.bytes, entry.modified),
            details: described("", "", "", json!({})),
            capabilities: Vec::new(),
        }
    }

    /// The model in a list.
    pub(super) fn listed(&self, name: &str) -> Map<String, Value> {
        Map::from_iter([
            ("name".to_owned(), name.into()),
            ("model".to_owned(), name.into()),
            ("modified_at".to_owned(), self.modified.clone().into()),
            ("size".to_owned(), self.size.into()),
            ("digest".to_owned(), self.digest.clone().into()),
            ("details".to_owned(), self.details.clone()),
            ("capabilities".to_owned(), self.capabilities.clone().into()),
        ])
    }
}

/// The cards of files, as they were when the files were read.
#[derive(Debug, Default)]
pub(super) struct ModelCards {
    files: Mutex<HashMap<PathBuf, (ModelEntry, Arc<ModelCard>)>>,
}

impl ModelCards {
    /// The card of a model, loaded or not. Reads its file if it has to.
    pub(super) fn card(&self, listed: &ListedModel) -> Option<Arc<ModelCard>> {
        if let Some(served) = &listed.served {
            return Some(Arc::new(ModelCard::new(&served.model, served.context(), modified(&served.model))));
        }
        let entry = listed.entry.as_ref()?;
        let known =
            self.lock().get(&entry.path).filter(|(of, _)| of == entry).map(|(_, card)| Arc::clone(card));
        Some(known.unwrap_or_else(|| {
            let card = match Model::open(&entry.path) {
                Ok(model) => ModelCard::new(&model, model.hyperparameters().context, entry.modified),
                Err(_) => ModelCard::unreadable(entry),
            };
            let card = Arc::new(card);
            self.lock().insert(entry.path.clone(), (entry.clone(), Arc::clone(&card)));
            card
        }))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PathBuf, (ModelEntry, Arc<ModelCard>)>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A digest by which lists tell files apart: of the weights' identity, path, size and time. Nobody reads whole files for a list.
fn digest(identity: &[u8], path: Option<&Path>, bytes: u64, modified: Option<SystemTime>) -> String {
    let time = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    let mut hash = Sha256::new();
    hash.update(identity);
    hash.update(format!("{path:?} {bytes} {}", time.as_nanos()));
    hash.finalize().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// When the file of a model was changed.
pub(super) fn modified(model: &Model) -> Option<SystemTime> {
    std::fs::metadata(model.file().paths().next()?).ok()?.modified().ok()
}

/// A time; of a model without a file, the beginning of 1970.
fn written(time: Option<SystemTime>) -> String {
    rfc3339(time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default())
}

fn details(model: &Model, context: usize, summary: &Summary) -> Value {
    let family = summary.architecture.clone().unwrap_or_default();
    let most = summary.types.first().map(|total| total.dtype.to_string().to_uppercase());
    let level = summary.file_type.clone().or(most).unwrap_or_default();
    let lengths = json!({ "context_length": context, "embedding_length": model.hyperparameters().width });
    described(&family, &parameter_size(summary.parameters), &level, lengths)
}

fn described(family: &str, parameters: &str, level: &str, lengths: Value) -> Value {
    let families = if family.is_empty() { Vec::new() } else { vec![family] };
    let mut details = json!({
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": families,
        "parameter_size": parameters,
        "quantization_level": level,
    });
    if let (Some(details), Value::Object(lengths)) = (details.as_object_mut(), lengths) {
        details.extend(lengths);
    }
    details
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

fn capabilities(model: &Model) -> Vec<&'static str> {
    if model.hyperparameters().encoder {
        return vec!["embedding"];
    }
    let mut all = vec!["completion"];
    let template = model.template();
    if template.is_some_and(|template| template.reads("tools")) {
        all.push("tools");
    }
    if FillTokens::of(model).is_some() {
        all.push("insert");
    }
    if template.is_some_and(|template| template.reasoning().is_some()) {
        all.push("thinking");
    }
    all
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
