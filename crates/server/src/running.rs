//! Requests that are being answered: their events as they happen. Dropping them cancels them.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Event, EventSink, Request, RequestId};
use quadriga_llm::{Finish, tools};
use tokio::sync::{mpsc, oneshot};

use crate::answer_meter::AnswerMeter;
use crate::answer_tokens::HeldTokens;
use crate::call::new_id;
use crate::error::{ApiError, ErrorKind};
use crate::generation::{Delta, Done, FinishReason, GenerationEvent, ToolCallPiece};
use crate::held_answers::{AnswerRoom, HeldAnswers, Overflow};
use crate::model::{FlightOptions, InFlightGuard, ServedModel};
use crate::operation::caller::{CallerUse, TokenNeed};
use crate::prompt::Prepared;
use crate::reasoning_output::ReasoningPlace;
use crate::whole_answers::{Collection, WholeAnswers};

pub use crate::held_answers::MAX_UNREAD;

/// Requests that are being answered.
pub struct Running {
    served: Arc<ServedModel>,
    events: mpsc::UnboundedReceiver<(usize, Sent)>,
    held: Arc<HeldAnswers>,
    choices: Vec<RunningChoice>,
    prompts: Vec<Vec<u32>>,
    usage: CallerUse,
    failed: bool,
}

/// What the engine's thread tells.
enum Sent {
    Event(Event),
    /// There was no room for more of the answer, which was ended.
    Ended(Overflow),
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
        room: AnswerRoom,
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
        let answers = prepared.iter().map(|prepared| prepared.requests.len()).sum();
        check_room(served, answers)?;
        let streamed = prepared.iter().any(|prepared| prepared.streamed);
        let held = Arc::new(HeldAnswers::new(room, streamed, answers));
        let (mut all, mut choices, mut prompts) = (Vec::new(), Vec::new(), Vec::new());
        for Prepared { requests, stops, prompt, reasoning, slot, .. } in prepared {
            let control_text = requests.iter().any(|request| request.rules.control_text);
            let stops = Arc::new(stops);
            let mut answers: Vec<(Request, EventSink)> = Vec::with_capacity(requests.len());
            for mut request in requests {
                let flight = served.note_in_flight(prompt.len(), Some(flight_options(&request)), slot);
                // What is computed counts, whoever else wants to know.
                let progress = std::mem::replace(&mut request.progress, true);
                let sink = sink(served, &flight, choices.len(), progress, &held, &sender);
                answers.push((request, sink));
                choices.push(RunningChoice {
                    id: None,
                    stops: Arc::clone(&stops),
                    control_text,
                    calls: 0,
                    held: HeldTokens::default(),
                    reasoning: reasoning.clone(),
                    flight,
                });
            }
            all.push(answers);
            prompts.push(prompt);
        }
        let ids = submit(served, all, answers).await?;
        for (choice, id) in choices.iter_mut().zip(ids) {
            choice.id = Some(id);
        }
        let served = Arc::clone(served);
        Ok(Running { served, events, held, choices, prompts, usage, failed: false })
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
    pub async fn finish(mut self) -> Result<WholeAnswers, ApiError> {
        let control_text = self.choices.iter().map(|choice| choice.control_text);
        let mut collection = Collection::new(control_text, Arc::clone(&self.held));
        while let Some(event) = self.next().await {
            collection.add(event)?;
        }
        collection.finish()
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
        let event = match sent {
            Sent::Event(event) => event,
            Sent::Ended(overflow) => {
                running.end_early(&self.usage);
                self.served.metrics.note_cancelled();
                let error = self.held.error(overflow);
                return Some(self.fail(error));
            }
        };
        self.held.take(choice, &event);
        let slot = running.flight.entry.slot.number().unwrap_or(0);
        Some(match event {
            Event::Progress { cached, computed, .. } => {
                GenerationEvent::Progress { choice, cached, computed, slot }
            }
            Event::Prompt { logprobs } => GenerationEvent::PromptLogprobs { choice, logprobs },
            // Of requests for embeddings, which are not among these.
            Event::Embedding { .. } => return None,
            Event::Token { piece, logprobs } => {
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

/// Gives the engine all prompts with their answers at once, and waits until it has accepted them: none of them is computed before
/// the others are there.
async fn submit(
    served: &Arc<ServedModel>,
    prompts: Vec<Vec<(Request, EventSink)>>,
    answers: usize,
) -> Result<Vec<RequestId>, ApiError> {
    let mut submission = Submission { served: Arc::clone(served), requests: answers };
    let (reply, accepted) = oneshot::channel();
    let lease = Arc::downgrade(served);
    let submitted = served.service()?.submit_prompts_to(prompts, move |ids| {
        let accepted = ids.map(|ids| Accepted { served: lease, ids });
        // If nobody hears of them, the engine drops them itself.
        reply.send(accepted).map_err(|unheard| unheard.map(Accepted::take)).is_ok()
    });
    submitted.map_err(|_| served.note_stopped())?;
    let accepted = accepted.await;
    // Whatever the answer is, somebody was there to hear it.
    submission.requests = 0;
    Ok(accepted.map_err(|_| served.note_stopped())??.take())
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
        // An answer whose end nobody took is complete nevertheless. Those that end after this are counted by their meters.
        self.events.close();
        while let Ok((choice, sent)) = self.events.try_recv() {
            if let (Sent::Event(Event::Finished(finished)), Some(choice)) =
                (sent, self.choices.get_mut(choice).filter(|choice| choice.id.is_some()))
            {
                choice.id = None;
                self.usage.charge(finished.counts.prompt + finished.counts.answer);
                self.served.note_finished(&finished);
            }
        }
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

/// Sends events on, and counts what they tell.
fn sink(
    served: &Arc<ServedModel>,
    flight: &InFlightGuard,
    choice: usize,
    progress: bool,
    held: &Arc<HeldAnswers>,
    sender: &mpsc::UnboundedSender<(usize, Sent)>,
) -> EventSink {
    let mut meter = AnswerMeter::new(&served.metrics, &flight.entry);
    let (held, sender) = (Arc::clone(held), sender.clone());
    Box::new(move |event| {
        meter.note(&event);
        if matches!(event, Event::Progress { .. }) && !progress {
            return !sender.is_closed();
        }
        if let Err(overflow) = held.add(choice, &event) {
            // False: the engine ends it.
            let _ = sender.send((choice, Sent::Ended(overflow)));
            return false;
        }
        let is_end = matches!(event, Event::Finished(_));
        let is_heard = sender.send((choice, Sent::Event(event))).is_ok();
        if is_end && is_heard {
            meter.note_whole();
        }
        is_heard
    })
}
