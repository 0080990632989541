//! Embeddings: a vector for each text.

use std::ffi::c_char;
use std::sync::Mutex;

use quadriga::llm::{Embedder, EmbedderOptions, EngineOptions};

use crate::arguments::{give, parameters, required, text};
use crate::engine_params::qd_engine_params;
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::model::qd_model;
use crate::status::{qd_error, qd_status};

/// Computes embeddings of texts, with an encoder such as BERT or with the hidden states of any other model.
pub struct qd_embedder {
    _opaque: (),
}

impl Handle for qd_embedder {
    type Object = Mutex<Embedder>;
    const NAME: &'static str = "qd_embedder";
}

/// Makes an embedder: plans the model and loads its weights. Embeddings have length 1.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_embedder_new(
    model: *const qd_model,
    params: *const qd_engine_params,
    error: Option<&mut qd_error>,
) -> *mut qd_embedder {
    guard::handle(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for parameters.
        let params = unsafe { parameters(params) }?;
        let engine = EngineOptions { sequences: params.sequences.max(1), ..params.engine()? };
        let options = EmbedderOptions { engine, ..EmbedderOptions::default() };
        // SAFETY: as above.
        let scheduler = unsafe { params.scheduler(&model, &mut options.engine(&model)) }?;
        Ok(Mutex::new(Embedder::new((*model).clone(), &scheduler, options, &mut params.loading())?))
    })
}

/// Frees an embedder.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_embedder_free(embedder: *mut qd_embedder) {
    guard::free(embedder);
}

/// The embedding of a text: as many numbers as the model's width.
///
/// Threads: one at a time for each embedder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_embedder_embed(
    embedder: *mut qd_embedder,
    text: *const c_char,
    vector: *mut f32,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(embedder)?;
        // SAFETY: the rules of the header for texts.
        let text = unsafe { self::text(text, "text") }?;
        let found = exclusive(&object, "embedder")?.embed(text)?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give(&found, vector, capacity, needed) }
    })
}

/// How well a document answers a query, by a reranker's classification head: the larger the better.
///
/// Threads: one at a time for each embedder.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_embedder_rank(
    embedder: *mut qd_embedder,
    query: *const c_char,
    document: *const c_char,
    score: Option<&mut f32>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(embedder)?;
        // SAFETY: the rules of the header for texts.
        let (query, document) = unsafe { (text(query, "query")?, text(document, "document")?) };
        *required(score, "score")? = exclusive(&object, "embedder")?.rank(query, document)?;
        Ok(())
    })
}
