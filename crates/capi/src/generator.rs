//! Text generation: one answer at a time, streamed to a callback.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use quadriga::llm::template::Message;
use quadriga::llm::{Generator, GeneratorOptions, RequestOptions};

use crate::answer::{described, qd_completion, qd_piece_callback, show};
use crate::arguments::{array, give_text, parameters, text};
use crate::engine_params::qd_engine_params;
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::model::qd_model;
use crate::request::{self, RequestSettings, qd_message, qd_request_params};
use crate::status::{Failure, Outcome, QD_STATUS_UNSUPPORTED, qd_error, qd_status};

/// Generates text with a model: one answer after another. What the next prompt has in common with the previous one and its
/// answer is in the KV cache, and is not computed again.
pub struct qd_generator {
    _opaque: (),
}

/// A generator, and the flag that ends its answer.
pub(crate) struct GeneratorObject {
    pub(crate) generator: Mutex<Generator>,
    cancel: Arc<AtomicBool>,
}

impl Handle for qd_generator {
    type Object = GeneratorObject;
    const NAME: &'static str = "qd_generator";
}

/// Makes a generator: plans the model for the devices, loads its weights, and allocates the KV cache.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_new(
    model: *const qd_model,
    params: *const qd_engine_params,
    error: Option<&mut qd_error>,
) -> *mut qd_generator {
    guard::handle(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for parameters.
        let params = unsafe { parameters(params) }?;
        let mut options = GeneratorOptions { engine: params.engine()?, ..GeneratorOptions::default() };
        // SAFETY: the rules of the header for parameters.
        let scheduler = unsafe { params.scheduler(&model, &mut options.engine) }?;
        let generator = Generator::on((*model).clone(), &scheduler, options, &mut params.loading())?;
        let cancel = generator.cancel_flag();
        Ok(GeneratorObject { generator: Mutex::new(generator), cancel })
    })
}

/// Frees a generator. A call that is using it ends first.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_generator_free(generator: *mut qd_generator) {
    guard::free(generator);
}

/// Answers a prompt; the callback gets the answer on the calling thread. The prompt is a user's message, or with `raw` text
/// that is continued.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_generate(
    generator: *mut qd_generator,
    prompt: *const c_char,
    params: *const qd_request_params,
    callback: qd_piece_callback,
    user_data: *mut c_void,
    completion: Option<&mut qd_completion>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and parameters.
        let (prompt, settings) =
            unsafe { (text(prompt, "prompt")?, request::settings(&parameters(params)?)?) };
        let mut stream = Stream { callback, data: user_data, completion };
        stream.run(generator, settings, Prompt::Messages(vec![Message::new("user", prompt)]))
    })
}

/// Answers the last message of a conversation; the callback gets the answer on the calling thread.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_chat(
    generator: *mut qd_generator,
    messages: *const qd_message,
    message_count: usize,
    params: *const qd_request_params,
    callback: qd_piece_callback,
    user_data: *mut c_void,
    completion: Option<&mut qd_completion>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for arrays, texts and parameters.
        let (messages, settings) = unsafe {
            (request::messages(messages, message_count)?, request::settings(&parameters(params)?)?)
        };
        let mut stream = Stream { callback, data: user_data, completion };
        stream.run(generator, settings, Prompt::Messages(messages))
    })
}

/// As qd_generator_chat, for messages as a JSON list in OpenAI's format, with calls of tools and their results.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_chat_json(
    generator: *mut qd_generator,
    messages: *const c_char,
    params: *const qd_request_params,
    callback: qd_piece_callback,
    user_data: *mut c_void,
    completion: Option<&mut qd_completion>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for texts and parameters.
        let (messages, settings) =
            unsafe { (request::json_messages(messages)?, request::settings(&parameters(params)?)?) };
        let mut stream = Stream { callback, data: user_data, completion };
        stream.run(generator, settings, Prompt::Messages(messages))
    })
}

/// Continues tokens; the callback gets the answer on the calling thread.
///
/// Threads: one at a time for each generator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_generator_continue(
    generator: *mut qd_generator,
    tokens: *const u32,
    token_count: usize,
    params: *const qd_request_params,
    callback: qd_piece_callback,
    user_data: *mut c_void,
    completion: Option<&mut qd_completion>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        // SAFETY: the rules of the header for arrays and parameters.
        let (tokens, settings) =
            unsafe { (array(tokens, token_count, "tokens")?, request::settings(&parameters(params)?)?) };
        let mut stream = Stream { callback, data: user_data, completion };
        stream.run(generator, settings, Prompt::Tokens(tokens.to_vec()))
    })
}

/// What is answered.
enum Prompt {
    Messages(Vec<Message>),
    Tokens(Vec<u32>),
}

/// Where an answer goes.
struct Stream<'a> {
    callback: qd_piece_callback,
    data: *mut c_void,
    completion: Option<&'a mut qd_completion>,
}

impl Stream<'_> {
    fn run(
        &mut self,
        generator: *mut qd_generator,
        settings: RequestSettings,
        prompt: Prompt,
    ) -> Outcome<()> {
        let object = handle::get(generator)?;
        let mut generator = exclusive(&object.generator, "generator")?;
        let RequestSettings { sampling, max_tokens, stops, grammar, hook, reseed, .. } = settings;
        let options =
            RequestOptions { sampling, reseed, max_tokens, stops, grammar, reasoning_budget: None, hook };
        generator.set_template_variables(settings.template_variables);
        let answer = match prompt {
            Prompt::Tokens(tokens) => generator.continue_with(&tokens, options)?,
            Prompt::Messages(messages) if settings.raw => {
                let text: String = messages.iter().map(|message| message.content.as_str()).collect();
                let tokens = generator.model().tokenizer()?.encode_prompt(&text, settings.special);
                generator.continue_with(&tokens, options)?
            }
            Prompt::Messages(mut messages) => {
                let begins = messages.first().is_some_and(|message| message.role == "system");
                if let (Some(system), false) = (settings.system, begins) {
                    messages.insert(0, Message::new("system", system));
                }
                messages.iter_mut().for_each(|message| message.trusted |= settings.special);
                generator.chat_with(&messages, options)?
            }
        };
        let completed = answer.stream(|piece| match show(piece, self.callback, self.data) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })?;
        if let Some(completion) = &mut self.completion {
            **completion = described(&completed);
        }
        Ok(())
    }
}

/// Ends the answer that a generator is computing, after its current token. The next prompt is not affected.
///
/// Threads: any, while another one generates.
#[unsafe(no_mangle)]
pub extern "C" fn qd_generator_cancel(
    generator: *mut qd_generator,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        handle::get(generator)?.cancel.store(true, Ordering::Release);
        Ok(())
    })
}

/// The prompt of a conversation as text, rendered with the model's chat template.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_chat_prompt(
    model: *const qd_model,
    messages: *const qd_message,
    message_count: usize,
    buffer: *mut c_char,
    capacity: usize,
    needed: Option<&mut usize>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for arrays and texts.
        let messages = unsafe { request::messages(messages, message_count) }?;
        let template = model
            .template()
            .ok_or_else(|| Failure::new(QD_STATUS_UNSUPPORTED, "the model has no chat template"))?;
        let prompt = template.render(&messages, true)?;
        // SAFETY: the rules of the header for buffers.
        unsafe { give_text(&prompt, buffer, capacity, needed) }
    })
}
