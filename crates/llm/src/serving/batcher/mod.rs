//! Answers many requests at once: chooses what each step computes, and gives its results to the requests.

mod admission;
mod micro_batches;
mod options;
mod page_store;
mod prefixes;
mod run_ahead;
mod saved_prefix;
mod state;
mod step_choice;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quadriga_runtime::{Progress, Scheduler, Session};

use self::admission::Turn;
use self::micro_batches::MicroBatches;
pub use self::options::{BatcherOptions, CacheFile};
pub use self::state::BatcherState;
use super::draft::Draft;
use super::host_pages::HostPages;
use super::lookup::Lookup;
use super::pace::Pace;
use super::page_file::PageFile;
use super::page_pool::PagePool;
use super::paged_engine::PagedEngine;
use super::payoff::Payoff;
use super::request::{self, Event, Request, RequestId};
use super::sequence::{Outcome, Sequence};
use super::window_pages::WindowPool;
use crate::answer::Finish;
use crate::engine::{EngineOptions, SCRAP_PAGES};
use crate::{Error, Model, Result};

/// How often a step that fails is tried.
const MAX_ATTEMPTS: usize = 2;

/// Answers many requests at once (continuous batching). A step computes one token of every sequence that is being generated, and
/// parts of prompts; sequences share the KV cache in pages, and common prefixes are computed once.
///
/// A batcher does nothing by itself: its owner calls [`Batcher::step`] until nothing is left to do. A
/// [`Service`](super::Service) does that on a thread of its own.
///
/// ```no_run
/// use quadriga_llm::placement::Placement;
/// use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request};
/// use quadriga_llm::Model;
///
/// let model = Model::open("model.gguf")?;
/// let mut options = BatcherOptions::default().for_model(&model)?;
/// let placement = Placement::default();
/// let placed = placement.plan(&model, &placement.open_devices()?, &options.engine)?;
/// options.engine = placed.engine_options(&options.engine);
/// let mut batcher = Batcher::new(model, &placed.scheduler, options, &mut |_| {})?;
/// for text in ["The capital of France is", "The capital of Peru is"] {
///     let prompt = batcher.model().tokenizer()?.encode_prompt(text, true);
///     batcher.submit(Request { max_tokens: Some(8), ..Request::new(prompt) })?;
/// }
/// while batcher.is_busy() {
///     for (id, event) in batcher.step() {
///         if let Event::Token { piece, .. } = event {
///             println!("{id:?}: {}", piece.text);
///         }
///     }
/// }
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub struct Batcher {
    engine: PagedEngine,
    options: BatcherOptions,
    pool: PagePool,
    /// The pages of layers with a window, where those have some of their own.
    windows: Option<WindowPool>,
    host: HostPages,
    file: Option<PageFile>,
    waiting: Vec<Sequence>,
    /// In the order in which they were admitted.
    running: Vec<Sequence>,
    /// Lanes that no running sequence has.
    lanes: Vec<usize>,
    /// Tokens computed for each client that has requests.
    served: HashMap<u64, u64>,
    turn: Option<Turn>,
    /// The request that got no token for very long.
    overdue: Option<RequestId>,
    pace: Pace,
    draft: Option<Draft>,
    /// Tokens of prompts that the draft model computed before the latest step.
    draft_prompts: usize,
    payoff: Payoff,
    next_id: u64,
    state: BatcherState,
    /// The step that a device computes already, ahead of the host.
    ahead: Option<Vec<StepPart>>,
    /// The steps that stages of a pipeline compute.
    micro_batches: MicroBatches,
}

/// The part of a sequence that a step computes.
#[derive(Clone, Copy)]
struct StepPart {
    id: RequestId,
    /// Its place among the running sequences when the step was chosen.
    index: usize,
    /// [`Sequence::restarts`] then.
    restarts: u64,
    tokens: usize,
    /// Of its tokens, those with an output.
    outputs: usize,
    /// Whether it is a part of a prompt, not the latest token and guesses at those that follow.
    prompt: bool,
}

/// A step whose results are waited for next.
struct BegunStep {
    parts: Vec<StepPart>,
    /// Why it could not begin.
    failed: Option<Error>,
    /// The tokens of prompts that the time of this call is for; `None` if it is for more than one step.
    paced: Option<usize>,
    /// Whether its tokens could be guessed.
    guesses: bool,
}

/// The tokens of prompts in a step.
fn prompt_tokens(parts: &[StepPart]) -> usize {
    parts.iter().filter(|part| part.prompt).map(|part| part.tokens).sum()
}

impl Batcher {
    /// Computes what the first rank's batcher computes, until that is dropped: for every other rank of several.
    ///
    /// # Errors
    /// The model is not divided, or ranks could not compute or exchange data.
    pub fn follow_ranks(&mut self) -> Result<()> {
        self.engine.follow_first()
    }

    /// How often other ranks are to be [told](Batcher::tell_regular) that this one goes on, where they hold a limit.
    pub(super) fn command_interval(&self) -> Option<Duration> {
        self.engine.command_interval()
    }

    /// Tells other ranks, if there are any, whether they hear of this one regularly from now on: they then take it for lost when they do not.
    pub(super) fn tell_regular(&mut self, regular: bool) -> Result<()> {
        self.engine.tell_regular(regular)
    }

    /// Plans the model for the scheduler's backends, loads the weights and allocates the KV cache.
    pub fn new(
        model: Model,
        scheduler: &Scheduler,
        options: BatcherOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Batcher> {
        let mut options = options.for_model(&model)?;
        // The first rank keeps all parts of what is kept elsewhere.
        if model.ranks().is_some_and(|ranks| !ranks.leads()) {
            (options.cache_ram, options.cache_file) = (0, None);
        }
        let engine = PagedEngine::new(model, scheduler, options.engine.clone(), progress)?;
        options.engine = engine.options().clone();
        if engine.model().hyperparameters().recurrent.is_some() {
            (options.lookup, options.cache_ram) = (0, 0);
        }
        let mut pool = PagePool::new(SCRAP_PAGES, options.engine.pages);
        // The states of recurrent layers stay where they are.
        let keeps = engine.model().hyperparameters().recurrent.is_none();
        let mut file = None;
        if let Some(CacheFile { path, bytes }) = options.cache_file.as_ref().filter(|_| keeps) {
            let page_bytes = engine.page_bytes();
            let (opened, last) = PageFile::open(path, *bytes, engine.model(), engine.options(), page_bytes)?;
            pool.skip_prefixes(last);
            file = Some(opened);
        }
        Ok(Batcher {
            windows: WindowPool::new(&options.engine, engine.model().hyperparameters()),
            pool,
            file,
            host: HostPages::new(options.cache_ram),
            lanes: (0..options.engine.sequences).rev().collect(),
            // A sequence waits for as many steps as there are stages.
            pace: Pace::new(options.token_time.map(|time| time / engine.stages().max(1) as u32)),
            draft: None,
            draft_prompts: 0,
            payoff: Payoff::new(),
            engine,
            options,
            waiting: Vec::new(),
            running: Vec::new(),
            served: HashMap::new(),
            turn: None,
            overdue: None,
            next_id: 0,
            state: BatcherState::default(),
            ahead: None,
            micro_batches: MicroBatches::default(),
        })
    }

    /// Loads a draft model: a smaller one with the same vocabulary, which guesses up to [`BatcherOptions::draft`] tokens in a step of
    /// a sequence. Tokens are sampled as without it; a guess that is sampled, too, saves a step. Where that does not pay, nothing is
    /// guessed.
    ///
    /// # Errors
    /// The vocabularies differ, one of the models has recurrent layers, the options have no guesses, or the draft model cannot be
    /// loaded.
    pub fn set_draft(
        &mut self,
        model: Model,
        scheduler: &Scheduler,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<()> {
        let most = self.options.draft;
        if most == 0 {
            let (name, value) = ("the number of tokens that the draft model guesses", most.to_string());
            return Err(Error::Option { name, value, wanted: "at least one" });
        }
        if self.model().hyperparameters().recurrent.is_some() {
            let value = self.model().hyperparameters().architecture.to_string();
            let (name, wanted) = ("the model to guess for", "one without recurrent layers");
            return Err(Error::Option { name, value, wanted });
        }
        let draft = Draft::new(model, self.model(), scheduler, &self.options.engine, most, progress)?;
        self.draft = Some(draft);
        Ok(())
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.engine.model()
    }

    /// The options, with everything filled in.
    pub fn options(&self) -> &BatcherOptions {
        &self.options
    }

    /// The session that runs the graphs.
    pub fn session(&self) -> &Session {
        self.engine.session()
    }

    /// Gives memory back that many requests at once needed, and that later ones get again: plans of steps, of which those used
    /// last stay, and results. `false`, and nothing has happened, if there is something to compute. The KV cache keeps its
    /// prefixes.
    ///
    /// # Errors
    /// A device failed.
    pub fn release_memory(&mut self) -> Result<bool> {
        if self.is_busy() {
            return Ok(false);
        }
        self.waiting.shrink_to_fit();
        self.running.shrink_to_fit();
        self.served.shrink_to_fit();
        self.forget_micro_batches();
        self.engine.release_memory()?;
        self.draft.as_mut().map_or(Ok(()), Draft::release_memory)?;
        Ok(true)
    }

    /// Whether there is something to compute.
    pub fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// Adds a request. [`Batcher::step`] reports its tokens.
    ///
    /// # Errors
    /// The prompt or an option is out of range, or too many requests wait.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let EngineOptions { context, .. } = self.options.engine;
        request::check(&request, context, self.model().hyperparameters().vocabulary)?;
        // Those for which there is a lane start with the next step.
        if self.waiting.len() >= self.options.queue.saturating_add(self.lanes.len()) {
            return Err(Error::QueueFull { waiting: self.waiting.len().saturating_sub(self.lanes.len()) });
        }
        let id = RequestId::after(self.next_id);
        let lookup = (self.options.lookup > 0).then(|| Lookup::new(self.options.lookup));
        let mut sequence = Sequence::new(id, request, self.engine.model(), lookup)?;
        sequence.waiting_since = self.state.steps;
        self.next_id += 1;
        if !self.served.contains_key(&sequence.client) {
            // A new client does not overtake the others for the time in which it did not ask.
            let least = self.served.values().min().copied().unwrap_or(0);
            self.served.insert(sequence.client, least);
        }
        self.waiting.push(sequence);
        Ok(id)
    }

    /// Adds requests for several answers to one prompt: it is computed once. They differ in their seeds, for example.
    ///
    /// # Errors
    /// As of [`Batcher::submit`], or their prompts differ; none of them is added then.
    pub fn submit_choices(&mut self, requests: Vec<Request>) -> Result<Vec<RequestId>> {
        let first = requests.first().map(|request| (request.prompt.clone(), request.salt));
        if requests.iter().any(|request| Some((request.prompt.clone(), request.salt)) != first) {
            let (name, value) = ("the prompts of one request", "different".to_owned());
            return Err(Error::Option { name, value, wanted: "the same" });
        }
        if requests.len() > self.options.queue.saturating_add(self.options.engine.sequences) {
            let (name, value) = ("the number of answers of one request", requests.len().to_string());
            let wanted = "at most the sequences of a step and the length of the queue";
            return Err(Error::Option { name, value, wanted });
        }
        let mut ids: Vec<RequestId> = Vec::new();
        for request in requests {
            match self.submit(request) {
                Ok(id) => ids.push(id),
                Err(error) => {
                    for id in ids {
                        self.cancel(id);
                    }
                    return Err(error);
                }
            }
        }
        let leader = ids.first().copied();
        let mut group: Vec<&mut Sequence> =
            self.waiting.iter_mut().filter(|sequence| ids.contains(&sequence.id)).collect();
        let highest = group.iter().map(|sequence| sequence.priority).max();
        for sequence in &mut group {
            sequence.leader = leader.filter(|leader| *leader != sequence.id);
            // The others wait for the leader: it is as urgent as any of them.
            if let Some(highest) = highest.filter(|_| sequence.leader.is_none()) {
                sequence.priority = highest;
            }
        }
        Ok(ids)
    }

    /// Ends a request; its pages are free at once. False if it has ended already. No event follows.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        if let Some(at) = self.waiting.iter().position(|sequence| sequence.id == id) {
            let sequence = self.waiting.remove(at);
            self.forget_client(sequence.client);
            return true;
        }
        let Some(at) = self.index_of(id) else { return false };
        let sequence = self.running.remove(at);
        self.retire(sequence);
        true
    }

    /// Computes one step, and returns what happened to which requests. Nothing happens if there is nothing to do.
    ///
    /// Where a device computes everything and every request is greedy, it begins with the next step before this one's tokens
    /// are known to the host. The row of a request that ends meanwhile is then computed for nothing.
    pub fn step(&mut self) -> Vec<(RequestId, Event)> {
        self.admit();
        let started = Instant::now();
        let mut events = Vec::new();
        let Some(BegunStep { mut parts, mut failed, paced, guesses }) = self.begin_step() else {
            return events;
        };
        let mut next = None;
        if failed.is_none() {
            let followed = self.follow(&parts).map(|followed| next = followed);
            let finished = followed.and_then(|()| self.engine.finish());
            failed = finished.and_then(|()| self.read_missing_logits(&parts)).err();
        }
        match failed {
            None => self.engine.keep_states(),
            Some(_) => {
                self.state.failed_steps += 1;
                self.fail_micro_batches(&mut parts);
            }
        }
        let failed = failed.map(Arc::new);
        self.state.steps += 1;
        self.state.stepped += parts.len() as u64;
        let (mut output, mut computed) = (0, 0);
        let mut ended: Vec<RequestId> = Vec::new();
        for part in &parts {
            // Whatever ended while the step was in flight needs no result.
            if let Some(index) = self.index_of_part(part) {
                let outcome = match &failed {
                    None => self.advance(part, index, output, &mut events),
                    Some(error) => self.note_failure(index, error, &mut events),
                };
                computed += part.tokens;
                if matches!(outcome, Outcome::Ended) {
                    ended.push(part.id);
                }
            }
            output += part.outputs;
        }
        if failed.is_none() {
            self.ahead = next;
            if let Some(prompts) = paced {
                self.pace.note(prompts, started.elapsed());
            }
            if paced == Some(0) {
                self.note_payoff(&parts, guesses, &events, started.elapsed());
            }
            self.state.computed += computed as u64;
        }
        for id in ended {
            if let Some(index) = self.index_of(id) {
                let sequence = self.running.remove(index);
                self.retire(sequence);
            }
        }
        events
    }

    /// Takes the step that runs ahead, or begins one. `None` if there is nothing to compute.
    fn begin_step(&mut self) -> Option<BegunStep> {
        if self.engine.stages() > 1 {
            return self.begin_micro_batches();
        }
        let guesses = self.payoff.guesses();
        let (parts, failed, guesses) = match self.take_ahead() {
            Some(parts) => {
                self.state.steps_ahead += 1;
                // It began before the host knew what follows.
                (parts, None, false)
            }
            None => {
                let mut parts = self.choose();
                if parts.is_empty() {
                    return None;
                }
                let failed = self.start(&mut parts).err();
                (parts, failed, guesses)
            }
        };
        // The draft model may have computed prompts before the step.
        let paced = (self.draft_prompts == 0).then(|| prompt_tokens(&parts));
        Some(BegunStep { parts, failed, paced, guesses })
    }

    /// Notes how far the sequences of a step came.
    fn note_payoff(
        &mut self,
        parts: &[StepPart],
        guesses: bool,
        events: &[(RequestId, Event)],
        time: Duration,
    ) {
        let sampled = events.iter().filter(|(_, event)| matches!(event, Event::Token { .. })).count();
        let has_guesses = self.draft.is_some() || parts.iter().any(|part| part.tokens > 1);
        let advanced = sampled as f64 / parts.len().max(1) as f64;
        self.payoff.note(guesses && has_guesses, advanced, time.as_secs_f64());
    }

    /// Gives the results of a step to one of its sequences.
    fn advance(
        &mut self,
        part: &StepPart,
        index: usize,
        output: usize,
        events: &mut Vec<(RequestId, Event)>,
    ) -> Outcome {
        let context = self.options.engine.context;
        let Some(sequence) = self.running.get_mut(index) else { return Outcome::Running };
        let (before, guesses, known) = (sequence.computed, sequence.draft.len(), sequence.tokens.len());
        let outcome = sequence.advance(&mut self.engine, part.tokens - guesses, output, context, events);
        let computed = sequence.computed - before;
        if sequence.tokens.len() > known {
            sequence.waiting_since = self.state.steps;
        }
        if let Some(served) = self.served.get_mut(&sequence.client) {
            *served += computed as u64;
        }
        self.state.guessed += guesses as u64;
        self.state.guessed_right += (computed + guesses).saturating_sub(part.tokens) as u64;
        match outcome {
            Ok(outcome) => {
                self.publish(index);
                self.release_windows(index);
                outcome
            }
            Err(error) => {
                events.push((sequence.id, Event::Failed(Arc::new(error))));
                Outcome::Ended
            }
        }
    }

    /// A failed step changed nothing: it is tried again, and in the end its requests fail.
    fn note_failure(
        &mut self,
        index: usize,
        error: &Arc<Error>,
        events: &mut Vec<(RequestId, Event)>,
    ) -> Outcome {
        let Some(sequence) = self.running.get_mut(index) else { return Outcome::Running };
        sequence.draft.clear();
        sequence.failures += 1;
        if sequence.failures < MAX_ATTEMPTS {
            return Outcome::Running;
        }
        events.push((sequence.id, Event::Failed(Arc::clone(error))));
        Outcome::Ended
    }

    fn is_recurrent(&self) -> bool {
        self.engine.model().hyperparameters().recurrent.is_some()
    }

    /// The place of a running sequence.
    fn index_of(&self, id: RequestId) -> Option<usize> {
        self.running.iter().position(|sequence| sequence.id == id)
    }

    /// The place of a running sequence that was at `index` not long ago.
    fn index_near(&self, id: RequestId, index: usize) -> Option<usize> {
        match self.running.get(index) {
            Some(sequence) if sequence.id == id => Some(index),
            _ => self.index_of(id),
        }
    }

    /// The place of the sequence of a part of a step; `None` if that has ended, or lost its pages since the step began.
    fn index_of_part(&self, part: &StepPart) -> Option<usize> {
        let index = self.index_near(part.id, part.index)?;
        self.running.get(index).filter(|sequence| sequence.restarts == part.restarts).map(|_| index)
    }

    /// Gives back the pages that the window of a running sequence has left behind.
    fn release_windows(&mut self, index: usize) {
        if let (Some(windows), Some(sequence)) = (&mut self.windows, self.running.get_mut(index)) {
            windows.release_before(&mut sequence.window_pages, sequence.computed);
        }
    }

    /// Gives back everything that a running sequence has.
    fn retire(&mut self, mut sequence: Sequence) {
        self.release_pages(&mut sequence);
        self.release_lane(sequence.lane);
        self.forget_client(sequence.client);
    }

    fn release_lane(&mut self, lane: usize) {
        self.engine.reset_lane(lane);
        self.lanes.push(lane);
    }

    /// Gives back the pages of a sequence, which is then as if nothing of it had been computed.
    fn release_pages(&mut self, sequence: &mut Sequence) {
        for page in sequence.pages.drain(..).rev() {
            self.pool.release(page);
        }
        if let Some(windows) = &mut self.windows {
            windows.release_all(&mut sequence.window_pages);
        }
        sequence.lose_pages();
        if let Some(draft) = &mut self.draft {
            draft.forget(sequence.id);
        }
    }

    /// Forgets what a client got, once it has no more requests.
    fn forget_client(&mut self, client: u64) {
        let all = self.waiting.iter().chain(&self.running);
        if !all.into_iter().any(|sequence| sequence.client == client) {
            self.served.remove(&client);
        }
    }

    /// Ends all requests, as if each were [cancelled](Batcher::cancel); returns which.
    pub fn cancel_all(&mut self) -> Vec<RequestId> {
        let ids: Vec<RequestId> =
            self.waiting.iter().chain(&self.running).map(|sequence| sequence.id).collect();
        for id in &ids {
            self.cancel(*id);
        }
        ids
    }

    /// How an unfinished request would be reported as cancelled.
    pub fn cancelled(&self, id: RequestId) -> Option<Event> {
        let mut all = self.waiting.iter().chain(&self.running);
        let sequence = all.find(|sequence| sequence.id == id)?;
        Some(Event::Finished(sequence.finished(Finish::Cancelled)))
    }
}
