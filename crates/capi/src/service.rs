//! Many requests at once: continuous batching over a shared KV cache in pages.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use quadriga::llm::sampling::{HookError, SamplingHook};
use quadriga::llm::serving::{Batcher, BatcherOptions, Event, Finished, Request, Response, Service};
use quadriga::llm::template::Message;
use quadriga::llm::{Finish, GeneratorOptions, TextPiece};

use crate::answer::{PieceTexts, finish_code, qd_completion, qd_piece, qd_piece_callback, show};
use crate::arguments::{parameters, required, text};
use crate::callbacks::{called_by, is_called_by};
use crate::engine_params::qd_engine_params;
use crate::guard;
use crate::handle::{self, Handle, exclusive};
use crate::model::qd_model;
use crate::request::{self, RequestSettings, qd_message, qd_request_params};
use crate::status::{
    Failure, Outcome, QD_STATUS_BUSY, QD_STATUS_END, QD_STATUS_FAILED, QD_STATUS_OK, qd_error, qd_status,
};

/// Answers requests of any number of threads with one model: they are computed together, and share what their prompts have in common.
pub struct qd_service {
    _opaque: (),
}

impl Handle for qd_service {
    type Object = Service;
    const NAME: &'static str = "qd_service";
}

/// A request that a service answers. Freeing it cancels it.
pub struct qd_request {
    _opaque: (),
}

/// A response, and the texts of its latest piece.
pub(crate) struct RequestObject {
    stream: Mutex<RequestStream>,
}

struct RequestStream {
    response: Response,
    finished: Option<qd_completion>,
    texts: Option<PieceTexts>,
    seen: SeenTokens,
    /// Kept as long as there are requests.
    service: Arc<Service>,
}

impl Handle for qd_request {
    type Object = RequestObject;
    const NAME: &'static str = "qd_request";
}

/// Starts a service: plans the model, loads its weights, and allocates the KV cache. `sequences` of the parameters are
/// computed at the same time; 0: 16.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_service_new(
    model: *const qd_model,
    params: *const qd_engine_params,
    error: Option<&mut qd_error>,
) -> *mut qd_service {
    guard::handle(error, || {
        let model = handle::get(model)?;
        // SAFETY: the rules of the header for parameters.
        let params = unsafe { parameters(params) }?;
        let mut options = BatcherOptions { engine: params.engine()?, ..BatcherOptions::default() };
        options.engine.sequences = if params.sequences == 0 { 16 } else { params.sequences };
        let mut options = options.for_model(&model)?;
        // SAFETY: as above.
        let scheduler = unsafe { params.scheduler(&model, &mut options.engine) }?;
        let batcher = Batcher::new((*model).clone(), &scheduler, options, &mut params.loading())?;
        Ok(Service::start(batcher)?)
    })
}

/// Frees a service; it ends when its requests are freed, too.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_service_free(service: *mut qd_service) {
    guard::free(service);
}

/// Submits a conversation, and returns at once.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_service_submit(
    service: *mut qd_service,
    messages: *const qd_message,
    message_count: usize,
    params: *const qd_request_params,
    error: Option<&mut qd_error>,
) -> *mut qd_request {
    guard::handle(error, || {
        // SAFETY: the rules of the header for arrays, texts and parameters.
        let (messages, settings) = unsafe {
            (request::messages(messages, message_count)?, request::settings(&parameters(params)?)?)
        };
        submit(service, &messages, settings)
    })
}

/// As qd_service_submit, for messages as a JSON list in OpenAI's format.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_service_submit_json(
    service: *mut qd_service,
    messages: *const c_char,
    params: *const qd_request_params,
    error: Option<&mut qd_error>,
) -> *mut qd_request {
    guard::handle(error, || {
        // SAFETY: the rules of the header for texts and parameters.
        let (messages, settings) =
            unsafe { (request::json_messages(messages)?, request::settings(&parameters(params)?)?) };
        submit(service, &messages, settings)
    })
}

fn submit(
    service: *const qd_service,
    messages: &[Message],
    settings: RequestSettings,
) -> Outcome<RequestObject> {
    let service = handle::get(service)?;
    refuse_own(&service)?;
    let RequestSettings { sampling, max_tokens, stops, grammar, hook, raw, special, system, .. } = settings;
    let options = GeneratorOptions {
        sampling,
        max_tokens,
        stops,
        raw,
        special,
        system,
        template_variables: settings.template_variables,
        ..GeneratorOptions::default()
    };
    let mut request = Request::chat(service.model(), &options, messages)?;
    let number = number_of(&service);
    request.hook = hook.map(|hook| Box::new(ServiceHook { hook, number }) as Box<dyn SamplingHook>);
    if let Some(grammar) = &grammar {
        request.constrain(service.model(), grammar)?;
    }
    (request.priority, request.client, request.salt) = (settings.priority, settings.client, settings.salt);
    let prompt_tokens = request.prompt.len();
    let submitted = Instant::now();
    let response = service.submit(request)?;
    let stream = RequestStream {
        response,
        finished: None,
        texts: None,
        seen: SeenTokens {
            prompt_tokens,
            submitted,
            first: None,
            latest: submitted,
            answer: 0,
            reasoning: 0,
        },
        service,
    };
    Ok(RequestObject { stream: Mutex::new(stream) })
}

/// What tells a service from others.
fn number_of(service: &Arc<Service>) -> usize {
    Arc::as_ptr(service).addr()
}

/// An error in a callback of the service, which waits for its end.
fn refuse_own(service: &Arc<Service>) -> Outcome<()> {
    match is_called_by(number_of(service)) {
        true => Err(Failure::new(
            QD_STATUS_BUSY,
            "a logits callback cannot wait for its own service, which waits for the callback; use another service or thread",
        )),
        false => Ok(()),
    }
}

/// A logits callback that knows its service.
struct ServiceHook {
    hook: Box<dyn SamplingHook>,
    number: usize,
}

impl SamplingHook for ServiceHook {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        called_by(self.number, || self.hook.apply(tokens, logits))
    }
}

/// What was seen of an answer, for one that is stopped before its end.
struct SeenTokens {
    prompt_tokens: usize,
    submitted: Instant,
    first: Option<Instant>,
    latest: Instant,
    answer: usize,
    reasoning: usize,
}

impl SeenTokens {
    fn note(&mut self, piece: &TextPiece) {
        self.latest = Instant::now();
        self.first.get_or_insert(self.latest);
        self.answer += 1;
        self.reasoning += usize::from(!piece.reasoning.is_empty());
    }

    /// The answer so far, as one that was stopped by its callback.
    fn stopped(&self) -> qd_completion {
        let (finish, _) = finish_code(Finish::Cancelled);
        let first = self.first.unwrap_or(self.latest);
        qd_completion {
            finish,
            prompt_tokens: self.prompt_tokens,
            answer_tokens: self.answer,
            reasoning_tokens: self.reasoning,
            prompt_seconds: first.duration_since(self.submitted).as_secs_f64(),
            decode_seconds: self.latest.duration_since(first).as_secs_f64(),
            ..qd_completion::default()
        }
    }
}

/// Waits for the next piece of an answer: QD_STATUS_OK and the piece, whose texts are valid until the next call with the
/// request, or QD_STATUS_END when the answer is complete, with `*completion`. Either may be NULL.
///
/// Threads: one at a time for each request.
#[unsafe(no_mangle)]
pub extern "C" fn qd_request_next(
    request: *mut qd_request,
    piece: Option<&mut qd_piece>,
    completion: Option<&mut qd_completion>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::code(error, || {
        let object = handle::get(request)?;
        let mut stream = exclusive(&object.stream, "request")?;
        refuse_own(&stream.service)?;
        loop {
            if let Some(finished) = stream.finished {
                if let Some(completion) = completion {
                    *completion = finished;
                }
                return Ok(QD_STATUS_END);
            }
            match next(&mut stream)? {
                Some(texts) => {
                    let texts = stream.texts.insert(texts);
                    if let Some(piece) = piece {
                        *piece = texts.piece();
                    }
                    return Ok(QD_STATUS_OK);
                }
                None => continue,
            }
        }
    })
}

/// The next piece; `None` if something else happened.
fn next(stream: &mut RequestStream) -> Outcome<Option<PieceTexts>> {
    match stream.response.next() {
        Some(Event::Token { piece, .. }) => Ok(Some(PieceTexts::new(&piece))),
        Some(Event::Finished(finished)) => {
            stream.finished = Some(described(&finished));
            Ok(None)
        }
        Some(Event::Failed(error)) => Err(Failure::of_llm(&error)),
        Some(_) => Ok(None),
        None => Err(Failure::new(QD_STATUS_FAILED, "the request has failed before")),
    }
}

fn described(finished: &Finished) -> qd_completion {
    let (finish, stop) = finish_code(finished.finish);
    qd_completion {
        finish,
        stop,
        prompt_tokens: finished.counts.prompt,
        cached_tokens: finished.counts.cached,
        answer_tokens: finished.counts.answer,
        reasoning_tokens: finished.counts.reasoning,
        prompt_seconds: finished.first_token.as_secs_f64(),
        decode_seconds: finished.decode.as_secs_f64(),
    }
}

/// Frees a request; an answer that is not complete is cancelled.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_request_free(request: *mut qd_request) {
    guard::free(request);
}

/// Answers a prompt: submits it, and gives the answer to a callback on the calling thread. An answer that the callback stops
/// has the tokens and times that were seen until then; how many tokens of its prompt were cached is not known.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_service_generate(
    service: *mut qd_service,
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
        let object = submit(service, &[Message::new("user", prompt)], settings)?;
        let mut stream = exclusive(&object.stream, "request")?;
        let RequestStream { response, seen, .. } = &mut *stream;
        for event in response {
            match event {
                Event::Token { piece, .. } => {
                    seen.note(&piece);
                    if show(&piece, callback, user_data) {
                        continue;
                    }
                    if let Some(completion) = completion {
                        *completion = seen.stopped();
                    }
                    return Ok(());
                }
                Event::Finished(finished) => {
                    if let Some(completion) = completion {
                        *completion = described(&finished);
                    }
                    return Ok(());
                }
                Event::Failed(error) => {
                    return Err(Failure::of_llm(&error));
                }
                _ => {}
            }
        }
        Ok(())
    })
}

/// What a service is doing.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct qd_service_state {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that are being computed.
    pub running: usize,
    /// Pages of the KV cache.
    pub pages: usize,
    /// Pages in use.
    pub used_pages: usize,
    /// Tokens computed so far.
    pub computed: u64,
    /// Tokens of prompts found in the KV cache so far.
    pub cached: u64,
}

/// What a service was doing after its latest step.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_service_describe(
    service: *const qd_service,
    state: Option<&mut qd_service_state>,
    error: Option<&mut qd_error>,
) -> qd_status {
    guard::status(error, || {
        let found = handle::get(service)?.state();
        *required(state, "state")? = qd_service_state {
            waiting: found.waiting,
            running: found.running,
            pages: found.pages,
            used_pages: found.used_pages,
            computed: found.computed,
            cached: found.cached,
        };
        Ok(())
    })
}
