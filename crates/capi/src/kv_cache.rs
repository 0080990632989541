//! The KV cache of a generator: logits after tokens, saved and restored states.

use std::ffi::c_char;

use quadriga::llm::RequestOptions;
use quadriga::llm::sampling::SamplingOptions;

use crate::arguments::{array, give, text};
use crate::generator::qd_generator;
use crate::guard;
use crate::handle::{self, exclusive};
use crate::status::{qd_error, qd_status};

/// Computes the logits after tokens: one number for each token of the vocabulary. Tokens that are in the KV cache already
/// are not computed again.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_logits(
    generator: *mut qd_generator,
    tokens: *const u32,
    token_count: usize,
    logits: *mut f32,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(generator)?;
        // SAFETY: the rules of the header for arrays.
        let tokens = unsafe { array(tokens, token_count, "tokens") }?;
        let mut generator = exclusive(&object.generator, "generator")?;
        let width = generator.model().hyperparameters().vocabulary;
        if capacity < width {
            // Nothing is computed for a buffer that cannot take it.
            // SAFETY: the rules of the header for buffers; nothing is written.
            return unsafe { give(&vec![0.0f32; width], logits, capacity, needed) };
        }
        // The answer ends before its first token, with all logits computed, since it is not greedy.
        let own = generator.request_options();
        let sampling = SamplingOptions { temperature: 1.0, ..own.sampling.clone() };
        drop(generator.continue_with(tokens, RequestOptions { max_tokens: Some(0), sampling, ..own })?);
        // SAFETY: the rules of the header for buffers.
        unsafe { give(generator.engine().logits(0), logits, capacity, needed) }
    })
}

/// Writes the KV cache of the latest prompt and its answer to a file.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_save_file(
    generator: *mut qd_generator,
    path: *const c_char,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(generator)?;
        // SAFETY: the rules of the header for texts.
        let path = unsafe { text(path, "path") }?;
        Ok(exclusive(&object.generator, "generator")?.engine_mut().save_state_file(0, path)?)
    })
}

/// Restores a KV cache that qd_generator_save_file has written, with the same model and cache type.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_load_file(
    generator: *mut qd_generator,
    path: *const c_char,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(generator)?;
        // SAFETY: the rules of the header for texts.
        let path = unsafe { text(path, "path") }?;
        Ok(exclusive(&object.generator, "generator")?.engine_mut().load_state_file(0, path)?)
    })
}

/// The KV cache of the latest prompt and its answer as bytes.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_save(
    generator: *mut qd_generator,
    bytes: *mut u8,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(generator)?;
        let mut saved = Vec::new();
        exclusive(&object.generator, "generator")?.save_state(&mut saved)?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give(&saved, bytes, capacity, needed) }
    })
}

/// Restores a KV cache from bytes of qd_generator_save.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_load(
    generator: *mut qd_generator,
    bytes: *const u8,
    byte_count: usize,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(generator)?;
        // SAFETY: the rules of the header for arrays.
        let mut bytes = unsafe { array(bytes, byte_count, "bytes") }?;
        Ok(exclusive(&object.generator, "generator")?.load_state(&mut bytes)?)
    })
}

/// Forgets the KV cache.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub extern "C" fn qd_generator_clear(
    generator: *mut qd_generator,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let object = handle::get(generator)?;
        exclusive(&object.generator, "generator")?.engine_mut().truncate(0, 0);
        Ok(())
    })
}
