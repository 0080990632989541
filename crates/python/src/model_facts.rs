//! Facts about a loaded model as JSON, for the properties of `quadriga.Model`.

use quadriga_gguf::Value;
use quadriga_llm::Model;
use quadriga_server::ServedModel;
use serde_json::{Map, json};

use crate::loading::LoadedParts;

/// The longest array of metadata that is written out; vocabularies are longer.
const MAX_ARRAY: usize = 64;

/// Sizes, special tokens, devices and memory.
pub(crate) fn json(served: &ServedModel, parts: &LoadedParts) -> String {
    let (model, state) = (&served.model, served.state());
    let hyper = model.hyperparameters();
    let vocabulary = model.tokenizer().ok().map(|tokenizer| tokenizer.vocabulary());
    let memory = parts.placed.forecast.bytes();
    let memory: Vec<_> = memory.iter().map(|bytes| json!(bytes)).collect();
    json!({
        "name": served.name,
        "path": model.file().paths().next().map(|path| path.to_string_lossy()),
        "architecture": hyper.architecture,
        "encoder": hyper.encoder,
        "n_ctx": served.context(),
        "n_ctx_train": hyper.context,
        "n_vocab": hyper.vocabulary,
        "n_embd": hyper.width,
        "n_layer": hyper.layers.len(),
        "n_parallel": parts.engine.sequences,
        "devices": parts.devices,
        "bos": vocabulary.and_then(|vocabulary| vocabulary.bos),
        "eos": vocabulary.and_then(|vocabulary| vocabulary.eos),
        "eot": vocabulary.and_then(|vocabulary| vocabulary.eot),
        "end_tokens": model.tokenizer().map(|tokenizer| tokenizer.end_tokens().collect::<Vec<_>>()).unwrap_or_default(),
        "has_chat_template": model.template().is_some(),
        "memory": memory,
        "running": state.running,
        "waiting": state.waiting,
        "cached_tokens": state.cached,
        "computed_tokens": state.computed,
        "steps": state.steps,
    })
    .to_string()
}

/// The metadata of the file, without long arrays.
pub(crate) fn metadata(model: &Model) -> String {
    let all: Map<String, serde_json::Value> =
        model.file().metadata().filter_map(|(key, value)| Some((key.to_owned(), plain(&value)?))).collect();
    serde_json::Value::Object(all).to_string()
}

fn plain(value: &Value<'_>) -> Option<serde_json::Value> {
    Some(match value {
        Value::U8(number) => json!(number),
        Value::I8(number) => json!(number),
        Value::U16(number) => json!(number),
        Value::I16(number) => json!(number),
        Value::U32(number) => json!(number),
        Value::I32(number) => json!(number),
        Value::U64(number) => json!(number),
        Value::I64(number) => json!(number),
        Value::F32(number) => json!(number),
        Value::F64(number) => json!(number),
        Value::Bool(flag) => json!(flag),
        Value::String(text) => json!(text),
        Value::Array(array) if array.len() <= MAX_ARRAY => {
            json!(array.iter().filter_map(|value| plain(&value)).collect::<Vec<_>>())
        }
        Value::Array(_) => return None,
    })
}
