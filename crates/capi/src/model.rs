//! Models: load, describe, tokenize.

use std::ffi::{c_char, c_void};
use std::path::Path;

use quadriga::llm::Model;
use quadriga::models::lora;

use crate::arguments::{Parameters, array, give, give_text, optional_text, parameters, text};
use crate::handle::{self, Handle};
use crate::status::{Failure, Outcome, QD_STATUS_NOT_FOUND, qd_error, qd_status};
use crate::{guard, model_source};

/// A model file, opened and checked. Generators, services and embedders share its weights' memory map.
pub struct qd_model {
    _opaque: (),
}

impl Handle for qd_model {
    type Object = Model;
    const NAME: &'static str = "qd_model";
}

/// Is told how far a download or the loading of weights is, in bytes; `total` is 0 while it is not known. 0 to go on,
/// anything else to stop.
pub type qd_progress_callback = Option<extern "C" fn(user_data: *mut c_void, done: u64, total: u64) -> i32>;

/// A low-rank adapter (LoRA).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_adapter {
    /// A GGUF file.
    pub path: *const c_char,
    /// The factor of its products; usually 1.
    pub scale: f32,
}

/// How a model is found and opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_model_params {
    /// The size of this structure.
    pub struct_size: usize,
    /// The folder of downloaded models; NULL: the user's cache folder.
    pub cache_dir: *const c_char,
    /// 1: use models in the cache only.
    pub offline: i32,
    /// Another chat template than the file's, or NULL.
    pub chat_template: *const c_char,
    /// Adapters, added while the model runs: GGUF files, or folders that PEFT saves.
    pub adapters: *const qd_adapter,
    /// How many.
    pub adapter_count: usize,
    /// Called while a model is downloaded, on the thread that opens the model, or NULL.
    pub progress: qd_progress_callback,
    /// For the callback.
    pub progress_data: *mut c_void,
}

// SAFETY: numbers, addresses, and a function that may be NULL; the first field is the size.
unsafe impl Parameters for qd_model_params {
    const NAME: &'static str = "qd_model_params";

    fn defaults() -> qd_model_params {
        qd_model_params {
            struct_size: size_of::<qd_model_params>(),
            cache_dir: std::ptr::null(),
            offline: 0,
            chat_template: std::ptr::null(),
            adapters: std::ptr::null(),
            adapter_count: 0,
            progress: None,
            progress_data: std::ptr::null_mut(),
        }
    }
}

/// The default parameters of qd_model_open.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_model_default_params() -> qd_model_params {
    qd_model_params::defaults()
}

/// Opens a model: a GGUF file, or ORG/REPO or ORG/REPO:QUANT of Hugging Face's hub, which is downloaded into the cache
/// once; NULL is the default model (SmolLM2 135M). Without :QUANT, or where the repository does not have it, it is the best
/// that fits in this machine's memory.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_model_open(
    name: *const c_char,
    params: *const qd_model_params,
    error: Option<&mut qd_error>,
) -> *mut qd_model {
    guard::handle(error, || {
        // SAFETY: the rules of the header for texts and parameters.
        let (name, params) = unsafe { (optional_text(name, "name")?, parameters(params)?) };
        // SAFETY: as above.
        unsafe { open(name, &params) }
    })
}

/// # Safety
/// The addresses in the parameters obey the rules of the header.
unsafe fn open(name: Option<&str>, params: &qd_model_params) -> Outcome<Model> {
    // SAFETY: the caller's promise.
    let (cache, template, adapters) = unsafe {
        (
            optional_text(params.cache_dir, "cache_dir")?,
            optional_text(params.chat_template, "chat_template")?,
            array(params.adapters, params.adapter_count, "adapters")?,
        )
    };
    let mut progress = |done, total| match params.progress {
        Some(callback) => callback(params.progress_data, done, total) == 0,
        None => true,
    };
    let path = model_source::find(name, cache.map(Path::new), params.offline != 0, &mut progress)?;
    let mut model = Model::open(path)?;
    if let Some(template) = template {
        model = model.with_template(template)?;
    }
    if !adapters.is_empty() {
        let mut opened = Vec::new();
        for adapter in adapters {
            // SAFETY: the caller's promise.
            let path = unsafe { text(adapter.path, "the path of an adapter") }?;
            opened.push(lora::open(Path::new(path), adapter.scale, model.file())?);
        }
        model = model.with_adapters(&opened)?;
    }
    Ok(model)
}

/// Frees a model. What was made of it stays usable.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_model_free(model: *mut qd_model) {
    guard::free(model);
}

/// Facts about a model.
#[repr(C)]
pub struct qd_model_info {
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Tokens of context that it was trained with.
    pub context: usize,
    /// Elements of its hidden states, and so of embeddings.
    pub width: usize,
    /// Layers.
    pub layers: usize,
    /// Bytes of its file.
    pub bytes: u64,
    /// 1 if it is an encoder, which makes embeddings and no text.
    pub encoder: i32,
    /// 1 if it has a chat template.
    pub has_template: i32,
}

/// Facts about a model.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_model_describe(
    model: *const qd_model,
    info: Option<&mut qd_model_info>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let model = handle::get(model)?;
        let hyper = model.hyperparameters();
        *info.ok_or_else(|| Failure::null("info"))? = qd_model_info {
            vocabulary: hyper.vocabulary,
            context: hyper.context,
            width: hyper.width,
            layers: hyper.layers.len(),
            bytes: model.file().byte_len(),
            encoder: hyper.encoder.into(),
            has_template: model.template().is_some().into(),
        };
        Ok(())
    })
}

/// A value of the file's metadata as text: that of a key such as "general.architecture".
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_model_metadata(
    model: *const qd_model,
    key: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for texts.
        let key = unsafe { text(key, "key") }?;
        let Some(value) = model.file().value(key) else {
            return Err(Failure::new(QD_STATUS_NOT_FOUND, format!("the model's file has no key \"{key}\"")));
        };
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&value.to_string(), buffer, capacity, needed) }
    })
}

/// The tokens of a text. With `add_special`, a beginning-of-text token comes first if the model uses one; with
/// `parse_special`, control tokens that are spelled out in the text become those tokens (not for text of users).
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_tokenize(
    model: *const qd_model,
    text: *const c_char,
    add_special: i32,
    parse_special: i32,
    tokens: *mut u32,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for texts.
        let text = unsafe { crate::arguments::text(text, "text") }?;
        let tokenizer = model.tokenizer()?;
        let found = match add_special {
            0 => tokenizer.encode(text, parse_special != 0),
            _ => tokenizer.encode_prompt(text, parse_special != 0),
        };
        // SAFETY: the rules of the header for buffers.
        unsafe { give(&found, tokens, capacity, needed) }
    })
}

/// The text of tokens. Control tokens have no text.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_detokenize(
    model: *const qd_model,
    tokens: *const u32,
    token_count: usize,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for arrays.
        let tokens = unsafe { array(tokens, token_count, "tokens") }?;
        let text = model.tokenizer()?.decode(tokens)?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&text, buffer, capacity, needed) }
    })
}

/// The bytes of one token's text, which may be a part of a character; none for control tokens. No NUL follows.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_token_piece(
    model: *const qd_model,
    token: u32,
    bytes: *mut u8,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let model = handle::get(model)?;
        let piece = model.tokenizer()?.piece(token)?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give(piece, bytes, capacity, needed) }
    })
}

/// 1 if a token ends an answer, 0 if not or if there is no such token or model.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_token_is_end(model: *const qd_model, token: u32) -> i32 {
    guard::value(0, || Ok(handle::get(model)?.tokenizer()?.is_end(token).into()))
}
