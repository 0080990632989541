//! Requests that are being answered: their events as they happen. Dropping them cancels them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Event, EventSink, Request, RequestId, TokenLogprobs};
use quadriga_llm::{Finish, tools};
use tokio::sync::{mpsc, oneshot};

use crate::answer_tokens::{AnswerToken, HeldTokens, TokenPart};
use crate::call::new_id;
use crate::error::{ApiError, ErrorKind};
use crate::generation::{
    AnswerSection, Choice, Delta, Done, FinishReason, GenerationEvent, ToolCallPiece, WholeToolCall,
};
use crate::model::{FlightOptions, InFlightGuard, ServedModel};
use crate::operation::caller::{CallerUse, TokenNeed};
use crate::prompt::Prepared;
use crate::reasoning_output::ReasoningPlace;

/// The most tokens that wait for a client to read them, beyond what buffers of the connection hold. One that reads no more has its
/// answer ended: its sequence is for others then.
pub const MAX_UNREAD: usize = 2048;

/// Requests that are being answered.
pub struct Running {
    served: Arc<ServedModel>,
    events: mpsc::UnboundedReceiver<(usize, Sent)>,
    /// Tokens that were generated and are not taken yet.
    unread: Arc<AtomicUsize>,
    choices: Vec<RunningChoice>,
    prompts: Vec<Vec<u32>>,
    usage: CallerUse,
    failed: bool,
}

/// What the engine's thread tells.
enum Sent {
    Event(Event),
    /// Too many tokens wait, and the answer was ended.
    Unread,
}

struct RunningChoice {
    /// `None` once it has ended.
    id: Option<RequestId>,
    stops: Arc<Vec<String>>,
    /// Whether control tokens are in the text.
    control_text: bool,
    /// The number of tools that were called.
    calls: usize,
    /// Tokens whose text has not come yet.
    held: HeldTokens,
    /// Where its reasoning is put.
    reasoning: ReasoningPlace,
    flight: InFlightGuard,
}

impl RunningChoice {
    /// Ends it before its answer is complete. What was computed counts.
    fn end_early(&mut self, usage: &CallerUse) {
        self.id = None;
        usage.charge(self.flight.entry.used());
    }

    /// A part of a call, whose first one gets an identifier.
    fn tool_call(&mut self, piece: tools::ToolCallPiece) -> ToolCallPiece {
        self.calls = self.calls.max(piece.index + 1);
        let head = piece.name.map(|name| (new_id("call_"), name));
        ToolCallPiece { index: piece.index, head, arguments: piece.arguments }
    }
}

impl Running {
    /// Submits requests, and waits until they are accepted.
    pub(crate) async fn start(
        served: &Arc<ServedModel>,
        mut prepared: Vec<Prepared>,
        usage: CallerUse,
    ) -> Result<Running, ApiError> {
        let (sender, events) = mpsc::unbounded_channel();
        let needed: TokenNeed = prepared.iter().map(|prepared| need(served, prepared)).sum();
        let granted = usage.reserve(needed)?;
        if granted < needed.most {
            let open = prepared.iter_mut().flat_map(|prepared| &mut prepared.requests);
            limit_answers(
                granted - needed.asked.min(granted),
                open.filter(|request| request.max_tokens.is_none()),
            );
        }
        check_room(served, prepared.iter().map(|prepared| prepared.requests.len()).sum())?;
        let mut running = Running {
            served: Arc::clone(served),
            events,
            unread: Arc::default(),
            choices: Vec::new(),
            prompts: Vec::new(),
            usage,
            failed: false,
        };
        for Prepared { mut requests, stops, prompt, reasoning, slot } in prepared {
            let control_text = requests.iter().any(|request| request.rules.control_text);
            let stops = Arc::new(stops);
            let first = running.choices.len();
            let flights: Vec<_> = requests
                .iter()
                .map(|request| served.note_in_flight(prompt.len(), Some(flight_options(request)), slot))
                .collect();
            let mut submission = Submission { served: Arc::clone(served), requests: requests.len() };
            let unread = &running.unread;
            let sinks = flights
                .iter()
                .zip(first..)
                .zip(&mut requests)
                .map(|((flight, choice), request)| {
                    // What is computed counts, whoever else wants to know.
                    let progress = std::mem::replace(&mut request.progress, true);
                    sink(served, flight, choice, progress, unread, &sender)
                })
                .collect::<Vec<_>>();
            let requests: Vec<(Request, EventSink)> = requests.into_iter().zip(sinks).collect();
            let (reply, accepted) = oneshot::channel();
            let lease = Arc::downgrade(served);
            served
                .service()?
                .submit_to(requests, move |ids| {
                    let accepted = ids.map(|ids| Accepted { served: lease, ids });
                    // If nobody hears of them, the engine drops them itself.
                    reply.send(accepted).map_err(|unheard| unheard.map(Accepted::take)).is_ok()
                })
                .map_err(|_| served.note_stopped())?;
            let accepted = accepted.await;
            // Whatever the answer is, somebody was there to hear it.
            submission.requests = 0;
            let ids = accepted.map_err(|_| served.note_stopped())??.take();
            running.choices.extend(ids.into_iter().zip(flights).map(|(id, flight)| RunningChoice {
                id: Some(id),
                stops: Arc::clone(&stops),
                control_text,
                calls: 0,
                held: HeldTokens::default(),
                reasoning: reasoning.clone(),
                flight,
            }));
            running.prompts.push(prompt);
        }
        Ok(running)
    }

    /// The model that answers.
    pub fn served(&self) -> &Arc<ServedModel> {
        &self.served
    }

    /// The number of answers.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// The tokens of each prompt.
    pub fn prompts(&self) -> &[Vec<u32>] {
        &self.prompts
    }

    /// The number of tokens of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }

    /// Whether control tokens are in the texts of the answers, by their names.
    pub fn shows_control_text(&self) -> bool {
        self.choices.iter().any(|choice| choice.control_text)
    }

    /// Waits for the next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        while !self.has_ended() {
            let Some((choice, event)) = self.events.recv().await else {
                let error = self.served.note_stopped();
                return Some(self.fail(error));
            };
            if let Some(event) = self.take(choice, event) {
                return Some(event);
            }
        }
        None
    }

    /// The next event, if there is one already.
    pub fn try_next(&mut self) -> Option<GenerationEvent> {
        while !self.has_ended() {
            let (choice, event) = self.events.try_recv().ok()?;
            if let Some(event) = self.take(choice, event) {
                return Some(event);
            }
        }
        None
    }

    /// Waits for the whole answers.
    pub async fn finish(mut self) -> Result<Vec<Choice>, ApiError> {
        let empty = |choice: &RunningChoice| ChoiceParts {
            control_text: choice.control_text,
            ..ChoiceParts::default()
        };
        let mut parts: Vec<ChoiceParts> = self.choices.iter().map(empty).collect();
        while let Some(event) = self.next().await {
            match event {
                GenerationEvent::Failed(error) => return Err(error),
                GenerationEvent::Progress { .. } => {}
                GenerationEvent::PromptLogprobs { choice, logprobs } => {
                    if let Some(part) = parts.get_mut(choice) {
                        part.prompt_logprobs = Some(logprobs);
                    }
                }
                GenerationEvent::Delta(delta) => {
                    if let Some(part) = parts.get_mut(delta.choice) {
                        part.add(delta);
                    }
                }
                GenerationEvent::Done(done) => {
                    if let Some(part) = parts.get_mut(done.choice) {
                        part.done = Some(done);
                    }
                }
            }
        }
        let missing = || ApiError::new(ErrorKind::Internal, "an answer has no end");
        parts.into_iter().map(|part| part.choice().ok_or_else(missing)).collect()
    }

    fn has_ended(&self) -> bool {
        self.failed || self.choices.iter().all(|choice| choice.id.is_none())
    }

    fn fail(&mut self, error: ApiError) -> GenerationEvent {
        self.failed = true;
        GenerationEvent::Failed(error)
    }

    fn take(&mut self, choice: usize, sent: Sent) -> Option<GenerationEvent> {
        let running = self.choices.get_mut(choice)?;
        let Sent::Event(event) = sent else {
            running.end_early(&self.usage);
            self.served.metrics.note_cancelled();
            let message = format!(
                "{MAX_UNREAD} tokens waited for a client that did not read them, and the answer was ended"
            );
            return Some(self.fail(ApiError::new(ErrorKind::Unavailable, message)));
        };
        let slot = running.flight.entry.slot.number().unwrap_or(0);
        Some(match event {
            Event::Progress { cached, computed } => {
                GenerationEvent::Progress { choice, cached, computed, slot }
            }
            Event::Prompt { logprobs } => GenerationEvent::PromptLogprobs { choice, logprobs },
            // Of requests for embeddings, which are not among these.
            Event::Embedding { .. } => return None,
            Event::Token { piece, logprobs } => {
                self.unread.fetch_sub(1, Ordering::Relaxed);
                let bytes = self.served.text_bytes(piece.token, running.control_text);
                let tokens = running.held.add(&bytes, &piece, logprobs);
                let calls = !piece.tool_calls.is_empty();
                let tool_calls = piece.tool_calls.into_iter().map(|piece| running.tool_call(piece)).collect();
                let (reasoning, text) = running.reasoning.put(piece.reasoning, piece.text, calls);
                GenerationEvent::Delta(Delta {
                    choice,
                    token: piece.token,
                    text,
                    reasoning,
                    tool_calls,
                    tokens,
                    slot,
                })
            }
            Event::Finished(finished) => {
                running.id = None;
                let tokens =
                    running.held.finish(matches!(finished.finish, Finish::Stop(_) | Finish::StopToken(_)));
                let finish = match FinishReason::new(&finished, &running.stops) {
                    FinishReason::End if running.calls > 0 => FinishReason::ToolCalls,
                    finish => finish,
                };
                self.usage.charge(finished.counts.prompt + finished.counts.answer);
                if self.choices.iter().all(|choice| choice.id.is_none()) {
                    self.usage.release();
                }
                self.served.note_finished(&finished);
                GenerationEvent::Done(Done {
                    choice,
                    finish,
                    counts: finished.counts,
                    reasoning_tokens: finished.counts.reasoning,
                    times: finished,
                    tokens,
                    slot,
                })
            }
            Event::Failed(error) => {
                running.end_early(&self.usage);
                if matches!(*error, quadriga_llm::Error::ServiceStopped) {
                    self.served.metrics.note_cancelled();
                    let message = "the server stopped before the answer was complete";
                    return Some(self.fail(ApiError::new(ErrorKind::Unavailable, message)));
                }
                self.served.metrics.note_failed();
                self.served.note_failure(&error);
                self.fail(ApiError::failed(&error))
            }
        })
    }
}

/// The options of a request, for whoever asks what is being computed.
fn flight_options(request: &Request) -> Arc<FlightOptions> {
    Arc::new(FlightOptions {
        // The biases are not shown, and may be many.
        sampling: SamplingOptions {
            logit_bias: BTreeMap::new(),
            dry: request.sampling.dry.clone(),
            ..request.sampling
        },
        max_tokens: request.max_tokens,
        stops: request.stops.clone(),
        logprobs: request.logprobs,
    })
}

/// The tokens that requests may use: those of the prompt, and of the answer as far as the request or the context limits it.
fn need(served: &ServedModel, prepared: &Prepared) -> TokenNeed {
    let of_request = |request: &Request| {
        let prompt = request.prompt.len();
        let room = served.context().saturating_sub(prompt);
        let most = prompt + request.max_tokens.unwrap_or(room).min(room);
        // An answer without a limit has at least one token.
        let asked = if request.max_tokens.is_some() { most } else { most.min(prompt + 1) };
        TokenNeed { asked: asked as u64, most: most as u64 }
    };
    prepared.requests.iter().map(of_request).sum()
}

/// Divides tokens beyond the first of each among answers that nothing but the context limits.
fn limit_answers<'r>(tokens: u64, open: impl Iterator<Item = &'r mut Request>) {
    let open: Vec<&mut Request> = open.collect();
    let count = open.len().max(1) as u64;
    let (each, more) = (tokens / count, tokens % count);
    for (number, request) in (0..).zip(open) {
        let tokens = each + 1 + u64::from(number < more);
        request.max_tokens = Some(usize::try_from(tokens).unwrap_or(usize::MAX));
    }
}

/// Refuses answers for which there is no room in the queue before the first of them is computed. Those that come at the same time
/// may still take it.
fn check_room(served: &ServedModel, answers: usize) -> Result<(), ApiError> {
    let state = served.state();
    let free = served.options.engine.sequences.saturating_sub(state.running);
    let room = served.options.queue.saturating_add(free).saturating_sub(state.waiting);
    match answers > 1 && answers > room {
        true => Err(quadriga_llm::Error::QueueFull { waiting: state.waiting.saturating_sub(free) }.into()),
        false => Ok(()),
    }
}

/// Requests that the engine has not accepted yet: if their client goes away before that, they are counted as cancelled. The engine
/// drops them when it sees that nobody waits for its word.
struct Submission {
    served: Arc<ServedModel>,
    requests: usize,
}

impl Drop for Submission {
    fn drop(&mut self) {
        (0..self.requests).for_each(|_| self.served.metrics.note_cancelled());
    }
}

/// Requests that the engine has accepted, on the way to whoever asked. If that one goes away before it has heard of them, they are
/// cancelled: the engine would notice with their first token only.
struct Accepted {
    served: Weak<ServedModel>,
    ids: Vec<RequestId>,
}

impl Accepted {
    fn take(mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.ids)
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        if self.ids.is_empty() {
            return;
        }
        if let Some(served) = self.served.upgrade()
            && let Ok(service) = served.service()
        {
            self.ids.iter().for_each(|id| service.cancel(*id));
        }
    }
}

impl Drop for Running {
    /// Cancels what has not ended.
    fn drop(&mut self) {
        for choice in &mut self.choices {
            if let Some(id) = choice.id {
                if let Ok(service) = self.served.service() {
                    service.cancel(id);
                }
                self.served.metrics.note_cancelled();
                choice.end_early(&self.usage);
            }
        }
    }
}

/// Sends events on, and counts tokens.
fn sink(
    served: &Arc<ServedModel>,
    flight: &InFlightGuard,
    choice: usize,
    progress: bool,
    unread: &Arc<AtomicUsize>,
    sender: &mpsc::UnboundedSender<(usize, Sent)>,
) -> EventSink {
    let unread = Arc::clone(unread);
    let (metrics, entry) = (Arc::clone(&served.metrics), Arc::clone(&flight.entry));
    let (sender, mut last) = (sender.clone(), None);
    Box::new(move |event| {
        match event {
            Event::Finished(_) | Event::Failed(_) => entry.slot.end(),
            _ => entry.slot.begin(),
        }
        if let Event::Progress { computed, .. } = event {
            entry.computed.store(computed, Ordering::Relaxed);
            if !progress {
                return !sender.is_closed();
            }
        }
        if matches!(event, Event::Token { .. }) {
            entry.generated.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            metrics.note_token(last.map(|last| now - last));
            last = Some(now);
            if unread.fetch_add(1, Ordering::Relaxed) >= MAX_UNREAD {
                // False: the engine ends it.
                let _ = sender.send((choice, Sent::Unread));
                return false;
            }
        }
        sender.send((choice, Sent::Event(event))).is_ok()
    })
}

/// An answer that is being collected.
#[derive(Default)]
struct ChoiceParts {
    text: String,
    reasoning: String,
    tool_calls: Vec<WholeToolCall>,
    sections: Vec<AnswerSection>,
    tokens: Vec<AnswerToken>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    generated: Vec<u32>,
    control_text: bool,
    done: Option<Done>,
}

impl ChoiceParts {
    fn add(&mut self, delta: Delta) {
        self.generated.push(delta.token);
        delta.parts().into_iter().for_each(|part| AnswerSection::add(&mut self.sections, part));
        self.text.push_str(&delta.text);
        self.reasoning.push_str(&delta.reasoning);
        WholeToolCall::add(&mut self.tool_calls, delta.tool_calls);
        let new = delta.tokens.iter().filter(|token| token.part == TokenPart::Text).count();
        let text = self.sections.iter_mut().rev().find_map(|section| match section {
            AnswerSection::Text { tokens, .. } => Some(tokens),
            _ => None,
        });
        if let Some(tokens) = text {
            *tokens += new;
        }
        self.tokens.extend(delta.tokens);
    }

    fn choice(mut self) -> Option<Choice> {
        let mut done = self.done?;
        self.tokens.append(&mut done.tokens);
        Some(Choice {
            text: self.text,
            reasoning: self.reasoning,
            tool_calls: self.tool_calls,
            sections: self.sections,
            tokens: self.tokens,
            prompt_logprobs: self.prompt_logprobs,
            generated: self.generated,
            control_text: self.control_text,
            done,
        })
    }
}
