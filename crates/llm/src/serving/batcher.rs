//! Answers many requests at once: chooses what each step computes, and gives its results to the requests.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quadriga_graph::PAGE_SLOTS;
use quadriga_runtime::{Progress, Scheduler, Session};

use super::draft::{Draft, DraftInput};
use super::host_pages::HostPages;
use super::lookup::Lookup;
use super::pace::{LEAST as LEAST_PROMPT, Pace};
use super::page_file::PageFile;
use super::page_pool::{PageId, PagePool, PrefixId, PrefixKey};
use super::paged_engine::{PagedEngine, StepSequence, StepToken, Wanted, bucket};
use super::payoff::Payoff;
use super::request::{self, Event, Request, RequestId};
use super::sequence::{Outcome, Sequence};
use super::window_pages::WindowPool;
use crate::answer::Finish;
use crate::engine::{EngineOptions, SCRAP_PAGES};
use crate::{Error, Model, Result};

/// How often a step that fails is tried.
const MAX_ATTEMPTS: usize = 2;

/// Options of a [`Batcher`].
#[derive(Clone, Debug, PartialEq)]
pub struct BatcherOptions {
    /// Context of one sequence, the most sequences of a step, the most tokens of a step (the batch size), the pages of the KV
    /// cache and its types. With 0 pages there are enough for all sequences of full length.
    pub engine: EngineOptions,
    /// The most requests that wait; another one is refused.
    pub queue: usize,
    /// The time between two tokens of a sequence that is aimed at while prompts are computed beside it: they are computed in
    /// parts that are small enough. `None`: parts are as large as the batch size.
    pub token_time: Option<Duration>,
    /// Bytes of host memory for prefixes whose pages were needed for others; they are brought back when a request begins with
    /// them.
    pub cache_ram: u64,
    /// A file for prefixes for which there is no room in host memory either. It outlasts the process: conversations that go on
    /// after a restart are not computed again.
    pub cache_file: Option<CacheFile>,
    /// Prompt look-up: the most tokens that are guessed in a step of a sequence; 0 for none. Tokens are sampled as without it;
    /// their logits may be rounded differently, as with any other number of rows in a step.
    pub lookup: usize,
    /// After so many steps of waiting, a request is the next one, whatever its priority and its client.
    pub patience: u64,
}

impl Default for BatcherOptions {
    fn default() -> Self {
        BatcherOptions {
            engine: EngineOptions { sequences: 64, ..EngineOptions::default() },
            queue: 1024,
            token_time: Some(Duration::from_millis(100)),
            cache_ram: 0,
            cache_file: None,
            lookup: 0,
            patience: 2000,
        }
    }
}

/// A file for prefixes of the KV cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheFile {
    /// Where it is; it is created if there is none. One process at a time uses it, with one model and type of the KV cache.
    pub path: PathBuf,
    /// The most bytes that it takes. Room is used as it is needed.
    pub bytes: u64,
}

/// What a batcher is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatcherState {
    /// Requests that have not been started, or were put back.
    pub waiting: usize,
    /// Sequences that are being computed.
    pub running: usize,
    /// All pages for sequences.
    pub pages: usize,
    /// Pages that sequences use.
    pub used_pages: usize,
    /// Pages that only hold prefixes that may be used again.
    pub cached_pages: usize,
    /// Of layers with a sliding window, all pages for sequences; 0 if they have none of their own.
    pub window_pages: usize,
    /// Of those, the ones that sequences use.
    pub used_window_pages: usize,
    /// Bytes of prefixes in host memory.
    pub host_bytes: u64,
    /// Pages of prefixes in the cache file.
    pub file_pages: usize,
    /// Steps so far.
    pub steps: u64,
    /// Of these, the ones that a device began before the host knew the tokens of the step before.
    pub steps_ahead: u64,
    /// Tokens computed so far.
    pub computed: u64,
    /// Tokens of prompts found in the KV cache so far.
    pub cached: u64,
    /// How often a sequence was put back for want of pages.
    pub preempted: u64,
    /// Tokens guessed by look-up, and those that were right.
    pub guessed: u64,
    /// Of the guesses, those that were right.
    pub guessed_right: u64,
}

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
/// let options = BatcherOptions::default().for_model(&model)?;
/// let placement = Placement::default();
/// let placed = placement.plan(&model, &placement.open_devices()?, &options.engine)?;
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
    pace: Pace,
    draft: Option<Draft>,
    payoff: Payoff,
    next_id: u64,
    state: BatcherState,
    /// The step that a device computes already, ahead of the host.
    ahead: Option<Vec<StepPart>>,
}

/// The part of a sequence that a step computes.
#[derive(Clone, Copy)]
struct StepPart {
    id: RequestId,
    /// Its place among the running sequences when the step was chosen.
    index: usize,
    tokens: usize,
    /// Of its tokens, those with an output.
    outputs: usize,
    /// Whether it is a part of a prompt, not the latest token and guesses at those that follow.
    prompt: bool,
}

impl BatcherOptions {
    /// These options with everything filled in for a model: a placement needs the number of pages.
    pub fn for_model(mut self, model: &Model) -> Result<BatcherOptions> {
        if self.cache_ram > 0 || self.cache_file.is_some() {
            // What is kept elsewhere has all layers in its pages.
            self.engine.window_slots = usize::MAX;
        }
        let without = EngineOptions { pages: 0, ..self.engine.clone() }.resolve(model)?;
        if self.engine.pages == 0 {
            self.engine.pages = without.context.div_ceil(PAGE_SLOTS).saturating_mul(without.sequences);
        }
        self.engine.context = without.context;
        // A step has room for a token of every sequence, and for a part of a prompt.
        self.engine.batch = self.engine.batch.max(self.engine.sequences.saturating_add(LEAST_PROMPT));
        self.engine = self.engine.resolve(model)?;
        // Every sequence of a step has an output, and so has every guess.
        let outputs = self.engine.sequences.saturating_mul(self.lookup.saturating_add(1));
        self.engine.output_rows = outputs.min(self.engine.batch);
        Ok(self)
    }
}

impl Batcher {
    /// Plans the model for the scheduler's backends, loads the weights and allocates the KV cache.
    pub fn new(
        model: Model,
        scheduler: &Scheduler,
        options: BatcherOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Batcher> {
        let mut options = options.for_model(&model)?;
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
            pace: Pace::new(options.token_time),
            draft: None,
            payoff: Payoff::new(),
            engine,
            options,
            waiting: Vec::new(),
            running: Vec::new(),
            served: HashMap::new(),
            next_id: 0,
            state: BatcherState::default(),
            ahead: None,
        })
    }

    /// Loads a draft model: a smaller one with the same vocabulary, which guesses up to `most` tokens in a step of a sequence.
    /// Tokens are sampled as without it; a guess that is sampled, too, saves a step. Where that does not pay, nothing is guessed.
    ///
    /// # Errors
    /// The vocabularies differ, one of the models has recurrent layers, or the draft model cannot be loaded.
    pub fn set_draft(
        &mut self,
        model: Model,
        scheduler: &Scheduler,
        most: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<()> {
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

    /// What it is doing.
    pub fn state(&self) -> BatcherState {
        let EngineOptions { pages, .. } = self.options.engine;
        let window_pages = self.options.engine.window_pages(self.model().hyperparameters()).unwrap_or(0);
        BatcherState {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pages,
            used_pages: pages - self.pool.available(),
            cached_pages: self.pool.cached(),
            window_pages,
            used_window_pages: self.windows.as_ref().map_or(0, |own| window_pages - own.available()),
            host_bytes: self.host.bytes(),
            file_pages: self.file.as_ref().map_or(0, PageFile::pages),
            ..self.state
        }
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
        if self.waiting.len() >= self.options.queue {
            return Err(Error::QueueFull { waiting: self.waiting.len() });
        }
        let id = RequestId(self.next_id);
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
        let mut failed = None;
        let parts = match self.take_ahead() {
            Some(parts) => {
                self.state.steps_ahead += 1;
                parts
            }
            None => {
                let mut parts = self.choose();
                if parts.is_empty() {
                    return events;
                }
                failed = self.start(&mut parts).err();
                parts
            }
        };
        let mut next = None;
        if failed.is_none() {
            let followed = self.follow(&parts).map(|followed| next = followed);
            failed = followed.and_then(|()| self.engine.finish()).err();
        }
        let failed = failed.map(Arc::new);
        self.state.steps += 1;
        let (mut output, mut computed) = (0, 0);
        let mut ended: Vec<RequestId> = Vec::new();
        for part in &parts {
            // Whatever ended while the step was in flight needs no result.
            if let Some(index) = self.index_near(part.id, part.index) {
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
            let prompts = parts.iter().filter(|part| part.prompt).map(|part| part.tokens).sum();
            self.pace.note(prompts, started.elapsed());
            if prompts == 0 {
                self.note_payoff(&parts, &events, started.elapsed());
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

    /// The step that runs ahead, if anybody needs it.
    fn take_ahead(&mut self) -> Option<Vec<StepPart>> {
        let parts = self.ahead.take()?;
        if parts.iter().any(|part| self.index_near(part.id, part.index).is_some()) {
            return Some(parts);
        }
        self.engine.discard();
        None
    }

    /// Lets the device go on with the next step of all sequences before the host knows what it found in this one.
    fn follow(&mut self, parts: &[StepPart]) -> Result<Option<Vec<StepPart>>> {
        let guesses = self.options.lookup > 0 || self.draft.is_some();
        // Windows give pages back after each step.
        if guesses || self.windows.is_some() || parts.iter().any(|part| part.prompt || part.tokens != 1) {
            return Ok(None);
        }
        let context = self.options.engine.context;
        let mut next: Vec<StepPart> = Vec::with_capacity(parts.len());
        let (mut running, mut going_on, mut missing) = (0, 0, 0);
        for part in parts {
            let index = self.index_near(part.id, part.index);
            let sequence = index.and_then(|index| self.running.get(index));
            let (Some(index), Some(sequence)) = (index, sequence) else {
                next.push(StepPart { index: usize::MAX, ..*part });
                continue;
            };
            running += 1;
            if !sequence.is_greedy() {
                return Ok(None);
            }
            if sequence.ends_with_next(context) {
                next.push(StepPart { index: usize::MAX, ..*part });
                continue;
            }
            going_on += 1;
            missing += sequence.missing_pages(sequence.computed + 2);
            next.push(StepPart { index, ..*part });
        }
        // Others wait for their first step, or the rows of those that ended are too many, or somebody would be put back.
        if running < self.running.len()
            || going_on == 0
            || bucket(going_on) < bucket(parts.len())
            || missing > self.pool.available()
        {
            return Ok(None);
        }
        for part in &next {
            let missing = self
                .running
                .get(part.index)
                .map_or(0, |sequence| sequence.missing_pages(sequence.computed + 2));
            let pages: Vec<PageId> = (0..missing).map_while(|_| self.take_page()).collect();
            if let Some(sequence) = self.running.get_mut(part.index) {
                sequence.pages.extend(pages);
            }
        }
        let sequence = |part: &StepPart| self.running.get(part.index);
        let tokens: Vec<StepToken> = (0..)
            .zip(&next)
            .map(|(number, part)| match sequence(part) {
                Some(sequence) => StepToken {
                    token: 0,
                    position: sequence.computed + 1,
                    sequence: number,
                    output: true,
                    hidden: false,
                    logits: false,
                },
                None => StepToken::UNUSED,
            })
            .collect();
        let tables: Vec<StepSequence<'_>> = next
            .iter()
            .map(|part| match sequence(part) {
                Some(sequence) => {
                    StepSequence { pages: &sequence.pages, lane: sequence.lane, ..StepSequence::NONE }
                }
                None => StepSequence::NONE,
            })
            .collect();
        Ok(self.engine.follow(&tokens, &tables)?.then_some(next))
    }

    /// Notes how far the sequences of a step came.
    fn note_payoff(&mut self, parts: &[StepPart], events: &[(RequestId, Event)], time: Duration) {
        let sampled = events.iter().filter(|(_, event)| matches!(event, Event::Token { .. })).count();
        let has_guesses = self.draft.is_some() || parts.iter().any(|part| part.tokens > 1);
        let advanced = sampled as f64 / parts.len().max(1) as f64;
        self.payoff.note(self.payoff.guesses() && has_guesses, advanced, time.as_secs_f64());
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
        let (before, guesses) = (sequence.computed, sequence.draft.len());
        let outcome = sequence.advance(&mut self.engine, part.tokens - guesses, output, context, events);
        let computed = sequence.computed - before;
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

    /// Starts waiting requests, as long as there are lanes for them, and pages for all that is known of them.
    fn admit(&mut self) {
        while !self.lanes.is_empty() {
            let Some(at) = self.next_waiting() else { return };
            let mut sequence = self.waiting.remove(at);
            self.find_prefix(&mut sequence);
            self.copy_last_page(&mut sequence);
            // Room for the next token, too.
            let needed = sequence.missing_pages(sequence.tokens.len() + 1);
            if needed > self.pool.available() && !self.running.is_empty() {
                self.release_pages(&mut sequence);
                self.waiting.insert(at, sequence);
                return;
            }
            let Some(lane) = self.lanes.pop() else { return };
            sequence.lane = lane;
            self.start_state(&mut sequence);
            self.state.cached += sequence.count_found() as u64;
            self.running.push(sequence);
        }
    }

    /// The place of the request to start next: by priority, then of the client that got least, then in their order. One that
    /// has waited for very long comes first.
    fn next_waiting(&self) -> Option<usize> {
        let key = |sequence: &Sequence| {
            let served = self.served.get(&sequence.client).copied().unwrap_or(0);
            let is_patient = self.state.steps.saturating_sub(sequence.waiting_since) < self.options.patience;
            (is_patient, std::cmp::Reverse(sequence.priority), served, sequence.id)
        };
        let ready = self.waiting.iter().enumerate().filter(|(_, sequence)| self.is_ready(sequence));
        ready.min_by_key(|(_, sequence)| key(sequence)).map(|(at, _)| at)
    }

    /// Whether nobody else is about to compute the prompt of a waiting sequence.
    fn is_ready(&self, sequence: &Sequence) -> bool {
        let Some(leader) = sequence.leader else { return true };
        match self.running.iter().find(|running| running.id == leader) {
            Some(running) => running.has_prompt(),
            None => !self.waiting.iter().any(|waiting| waiting.id == leader),
        }
    }

    /// Copies the page in which the prompt ends from the sequence that has computed it. All but the last token is there then.
    fn copy_last_page(&mut self, sequence: &mut Sequence) {
        let before = sequence.pages.len();
        let last = sequence.prompt() - 1;
        let leader =
            sequence.leader.and_then(|leader| self.running.iter().find(|running| running.id == leader));
        let Some(from) =
            leader.filter(|leader| leader.has_prompt()).and_then(|leader| leader.pages.get(before).copied())
        else {
            return;
        };
        let shares = sequence.may_share() && self.engine.model().hyperparameters().recurrent.is_none();
        let is_next = sequence.computed == before * PAGE_SLOTS
            && sequence.computed < last
            && last / PAGE_SLOTS == before;
        if !shares || !is_next {
            return;
        }
        let Some(page) = self.take_page() else { return };
        if self.engine.copy_page(from, page).is_err() || !self.copy_window_page(sequence, before) {
            // The tokens are computed instead.
            self.pool.release(page);
            return;
        }
        sequence.pages.push(page);
        sequence.found += last - sequence.computed;
        sequence.computed = last;
    }

    /// Copies the page of a number of layers with a window from the sequence that has computed it, where those have pages of their own.
    fn copy_window_page(&mut self, sequence: &mut Sequence, number: usize) -> bool {
        let Some(windows) = &mut self.windows else { return true };
        let leader = self.running.iter().find(|running| Some(running.id) == sequence.leader);
        let Some(from) = leader.and_then(|leader| leader.window_pages.get(number)) else { return false };
        if sequence.window_pages.end() != number || !windows.take(&mut sequence.window_pages, 1) {
            return false;
        }
        let to = sequence.window_pages.get(number);
        let copied = to.is_some_and(|to| self.engine.copy_window_page(from, to).is_ok());
        if !copied {
            windows.pop(&mut sequence.window_pages);
        }
        copied
    }

    /// Takes pages that hold the beginning of a sequence. The last token is computed in any case: its logits are needed.
    fn find_prefix(&mut self, sequence: &mut Sequence) {
        let mut prefix = match sequence.prefix {
            Some(prefix) => prefix,
            None => PagePool::root(sequence.salt),
        };
        // Only whole pages from where its own pages end.
        if sequence.may_share()
            && sequence.computed == sequence.pages.len() * PAGE_SLOTS
            && sequence.published == sequence.pages.len()
        {
            let (last, before) = (sequence.tokens.len().saturating_sub(1), sequence.computed);
            let mut prefixes = Vec::new();
            let first = sequence.pages.len();
            while let Some(tokens) = sequence.tokens.get(sequence.computed..last)
                && let Some((page, next)) = self.find_page(prefix, tokens)
            {
                prefixes.push(std::mem::replace(&mut prefix, next));
                sequence.pages.push(page);
                sequence.published += 1;
                sequence.computed += PAGE_SLOTS;
            }
            // What begins alike twice may do so again: next time there will be a recurrent state.
            sequence.shared = sequence.shared.max(sequence.computed);
            // Only as far as there is everything that the next token needs.
            while !prefixes.is_empty() && !self.can_go_on(sequence, first, &prefixes, prefix) {
                prefix = prefixes.pop().unwrap_or(prefix);
                sequence.published -= 1;
                sequence.computed -= PAGE_SLOTS;
                if let Some(page) = sequence.pages.pop() {
                    self.pool.release(page);
                }
            }
            if sequence.computed > before {
                sequence.starts_from = self.is_recurrent().then_some(prefix);
                if let Some(windows) = &mut self.windows {
                    let pages = sequence.tokens.chunks(PAGE_SLOTS).enumerate().skip(first).zip(&prefixes);
                    let found = pages.map(|((number, tokens), prefix)| (number, *prefix, tokens));
                    windows.share(&mut sequence.window_pages, found, sequence.computed);
                }
            }
            sequence.found += sequence.computed - before;
        }
        sequence.prefix = Some(prefix);
    }

    /// Whether a sequence can go on after the pages that it has, of which those from `first` on were found after `prefixes`: its
    /// window's pages and its recurrent state are there, too.
    fn can_go_on(&self, sequence: &Sequence, first: usize, prefixes: &[PrefixId], end: PrefixId) -> bool {
        if self.is_recurrent() && !self.engine.has_state(end) {
            return false;
        }
        let Some(windows) = &self.windows else { return true };
        let seen = windows.first_page(sequence.computed).max(first);
        let pages = sequence.tokens.chunks(PAGE_SLOTS).skip(first).zip(prefixes);
        pages.skip(seen - first).all(|(tokens, prefix)| windows.has(*prefix, tokens))
    }

    fn is_recurrent(&self) -> bool {
        self.engine.model().hyperparameters().recurrent.is_some()
    }

    /// Gives the lane of a sequence the recurrent state after the prefix that was found for it.
    fn start_state(&mut self, sequence: &mut Sequence) {
        if let Some(prefix) = sequence.starts_from.take() {
            self.engine.start_from(sequence.lane, prefix);
        }
    }

    /// The page that holds the first of `tokens` after a prefix, with one more user: from the KV cache, or brought back from host
    /// memory.
    fn find_page(&mut self, prefix: PrefixId, tokens: &[u32]) -> Option<(PageId, PrefixId)> {
        if let Some(found) = self.pool.find(prefix, tokens) {
            return Some(found);
        }
        let in_file = |key: &PrefixKey| self.file.as_ref().is_some_and(|file| file.has(key));
        let key = PrefixKey::new(prefix, tokens).filter(|key| self.host.has(key) || in_file(key))?;
        let page = self.take_page()?;
        // Making room may have moved it from host memory to the file, or dropped it.
        let Some((next, content)) = self.host.remove(&key).or_else(|| self.read_file(&key)) else {
            self.pool.release(page);
            return None;
        };
        if self.engine.write_page(page, &content).is_err() || !self.pool.publish_as(page, key, next) {
            // It is computed again.
            self.pool.release(page);
            return None;
        }
        Some((page, next))
    }

    /// Takes a page. A prefix that it held goes to host memory.
    fn take_page(&mut self) -> Option<PageId> {
        let taken = self.pool.take()?;
        if let Some((key, prefix)) = taken.evicted
            && (self.options.cache_ram > 0 || self.file.is_some())
            && let Ok(content) = self.engine.read_page(taken.page)
        {
            for (key, prefix, content) in self.host.insert(key, prefix, content) {
                self.write_file(key, prefix, &content);
            }
        }
        Some(taken.page)
    }

    fn read_file(&mut self, key: &PrefixKey) -> Option<(PrefixId, Vec<u8>)> {
        // What cannot be read is computed again.
        self.file.as_mut()?.read(key).ok().flatten()
    }

    /// Keeps a page in the file. After an error, such as a full disk, the file is not used any more.
    fn write_file(&mut self, key: PrefixKey, prefix: PrefixId, content: &[u8]) {
        if let Some(file) = &mut self.file
            && file.insert(key, prefix, content).is_err()
        {
            self.file = None;
        }
    }

    /// Writes all prefixes that no running sequence uses to the cache file, for the next process. Returns whether there is a file
    /// that has them.
    pub fn save_prefixes(&mut self) -> bool {
        let host: Vec<_> =
            self.host.iter().map(|(key, prefix, content)| (key.clone(), prefix, content.to_vec())).collect();
        for (key, prefix, content) in host {
            self.write_file(key, prefix, &content);
        }
        let unused: Vec<_> = self.pool.unused().collect();
        for (page, key, prefix) in unused {
            if self.file.is_some()
                && let Ok(content) = self.engine.read_page(page)
            {
                self.write_file(key, prefix, &content);
            }
        }
        self.file.is_some()
    }

    /// Chooses what the step computes: first a token of every sequence that is being generated, then parts of prompts. Pages
    /// for all of it are taken.
    fn choose(&mut self) -> Vec<StepPart> {
        let batch = self.options.engine.batch;
        let mut left = batch;
        let ids = |running: &[Sequence], decoding: bool| -> Vec<(usize, RequestId)> {
            let wanted = running.iter().enumerate().filter(|(_, one)| one.is_decoding() == decoding);
            wanted.map(|(index, sequence)| (index, sequence.id)).collect()
        };
        let mut chosen: Vec<StepPart> = Vec::new();
        let decoding = ids(&self.running, true);
        // Guesses take no room from tokens that are due.
        self.guess(&decoding, left.saturating_sub(decoding.len()));
        for (index, id) in decoding {
            if left > 0
                && self.ensure_pages(id, index, 1)
                && let Some(sequence) = self.index_near(id, index).and_then(|index| self.running.get(index))
            {
                let tokens = 1 + sequence.draft.len();
                left -= tokens;
                chosen.push(StepPart { id, index, tokens, outputs: tokens, prompt: false });
            }
        }
        let mut left = self.pace.prompt_tokens(batch - left, batch).min(left);
        for (index, id) in ids(&self.running, false) {
            let Some(index) = self.index_near(id, index).filter(|_| left > 0) else { continue };
            self.share_ahead(index);
            let keeps = self.options.engine.checkpoints > 0;
            let tokens = self.running.get(index).map_or(0, |sequence| sequence.next_part(left, keeps));
            if self.ensure_pages(id, index, tokens) {
                left -= tokens;
                chosen.push(StepPart { id, index, tokens, outputs: 0, prompt: true });
            }
        }
        // Some may have been put back for others.
        let placed = |part: StepPart| {
            let index = self.index_near(part.id, part.index)?;
            Some(StepPart { index, ..part })
        };
        chosen.into_iter().filter_map(placed).collect()
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

    /// A prompt that another sequence has computed meanwhile is not computed again.
    fn share_ahead(&mut self, index: usize) {
        if index >= self.running.len() {
            return;
        }
        let mut sequence = self.running.swap_remove(index);
        self.find_prefix(&mut sequence);
        self.start_state(&mut sequence);
        self.state.cached += sequence.count_found() as u64;
        self.running.push(sequence);
        let last = self.running.len() - 1;
        self.running.swap(index, last);
    }

    /// Guesses at the tokens after those that are due, up to `room` for all sequences together: by look-up, else by the draft model.
    fn guess(&mut self, decoding: &[(usize, RequestId)], room: usize) {
        if !self.payoff.guesses() || self.options.lookup == 0 && self.draft.is_none() {
            return;
        }
        let context = self.options.engine.context;
        let mut room = room;
        let mut others = Vec::new();
        for (index, id) in decoding {
            let Some(sequence) = self.index_near(*id, *index).and_then(|index| self.running.get_mut(index))
            else {
                continue;
            };
            let own = room.min(context.saturating_sub(sequence.tokens.len() + 1));
            if let Some(lookup) = &mut sequence.lookup {
                lookup.accept(&sequence.tokens);
                sequence.draft = lookup.guess(&sequence.tokens, own);
                room -= sequence.draft.len();
            }
            if sequence.draft.is_empty() {
                others.push(*id);
            }
        }
        let Some(mut draft) = self.draft.take() else { return };
        let share = room / others.len().max(1);
        let sequences: Vec<&Sequence> =
            self.running.iter().filter(|sequence| others.contains(&sequence.id)).collect();
        let inputs: Vec<DraftInput<'_>> = sequences
            .iter()
            .map(|sequence| DraftInput {
                id: sequence.id,
                tokens: &sequence.tokens,
                room: share.min(context.saturating_sub(sequence.tokens.len() + 1)),
            })
            .collect();
        let guesses = draft.guess(&inputs);
        let guessed: Vec<(RequestId, Vec<u32>)> = inputs.iter().map(|input| input.id).zip(guesses).collect();
        for (id, guesses) in guessed {
            if let Some(sequence) = self.index_of(id).and_then(|index| self.running.get_mut(index)) {
                sequence.draft = guesses;
            }
        }
        self.draft = Some(draft);
    }

    /// Takes the pages for the next tokens of a running sequence, and puts younger sequences back until there are enough. False
    /// if it was put back itself.
    fn ensure_pages(&mut self, id: RequestId, index: usize, tokens: usize) -> bool {
        loop {
            let Some(index) = self.index_near(id, index) else { return false };
            let Some(sequence) = self.running.get_mut(index) else { return false };
            let guesses = if tokens == 1 { sequence.draft.len() } else { 0 };
            if sequence.missing_pages(sequence.computed + tokens + guesses) > self.pool.available() {
                sequence.draft.clear();
            }
            let guesses = if tokens == 1 { sequence.draft.len() } else { 0 };
            let missing = sequence.missing_pages(sequence.computed + tokens + guesses);
            let end = sequence.computed + tokens + guesses;
            let takes = |windows: &mut WindowPool| {
                let missing = windows.missing(&sequence.window_pages, end);
                windows.take(&mut sequence.window_pages, missing)
            };
            if missing <= self.pool.available() && self.windows.as_mut().is_none_or(takes) {
                let pages: Vec<PageId> = (0..missing).map_while(|_| self.take_page()).collect();
                if let Some(sequence) = self.running.get_mut(index) {
                    sequence.pages.extend(pages);
                }
                return true;
            }
            self.preempt();
        }
    }

    /// Puts back the running sequence of the lowest priority, of several the youngest. Its full pages stay findable for as long
    /// as nobody needs their memory.
    fn preempt(&mut self) {
        let key = |sequence: &Sequence| (sequence.priority, std::cmp::Reverse(sequence.id));
        let numbered = self.running.iter().enumerate();
        let Some((at, _)) = numbered.min_by_key(|(_, sequence)| key(sequence)) else { return };
        let mut sequence = self.running.remove(at);
        self.release_pages(&mut sequence);
        self.release_lane(sequence.lane);
        self.state.preempted += 1;
        sequence.waiting_since = self.state.steps;
        self.waiting.push(sequence);
    }

    /// The tokens of a step's parts.
    fn tokens_of(&self, parts: &[StepPart]) -> Vec<StepToken> {
        let mut tokens = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let Some(sequence) = self.running.get(part.index) else { continue };
            let logits = sequence.needs_logits();
            let known =
                sequence.tokens.iter().chain(&sequence.draft).skip(sequence.computed).take(part.tokens);
            tokens.extend(known.zip(sequence.computed..).map(|(token, position)| StepToken {
                token: *token,
                position,
                sequence: number,
                output: sequence.wants_output(position),
                hidden: sequence.is_embedded(),
                logits,
            }));
        }
        tokens
    }

    /// Starts a step, and notes how many outputs each of its parts has.
    fn start(&mut self, parts: &mut [StepPart]) -> Result<()> {
        let tokens = self.tokens_of(parts);
        let mut first = 0;
        for (number, part) in parts.iter_mut().enumerate() {
            part.outputs = 0;
            let own = tokens.iter().skip(first).take_while(|token| token.sequence == number);
            for token in own {
                first += 1;
                part.outputs += usize::from(token.output);
            }
        }
        let mut wanted = Wanted::Argmax;
        for part in &*parts {
            let Some(sequence) = self.running.get_mut(part.index) else { continue };
            sequence.note_start();
            if !sequence.is_greedy() {
                wanted = Wanted::Logits;
            }
        }
        let table = |part: &StepPart| match self.running.get(part.index) {
            Some(sequence) => StepSequence {
                pages: &sequence.pages,
                window_pages: Some(&sequence.window_pages),
                lane: sequence.lane,
                checkpoint: sequence.keeps_state_after(part.tokens),
            },
            None => StepSequence::NONE,
        };
        let tables: Vec<StepSequence<'_>> = parts.iter().map(table).collect();
        self.engine.start(&tokens, &tables, wanted)
    }

    /// Makes pages findable that are complete.
    fn publish(&mut self, index: usize) {
        let recurrent = self.is_recurrent();
        let Some(sequence) = self.running.get_mut(index) else { return };
        while let Some(prefix) = sequence.prefix {
            let first = sequence.published * PAGE_SLOTS;
            let Some(tokens) =
                sequence.tokens.get(first..sequence.computed).filter(|t| t.len() >= PAGE_SLOTS)
            else {
                return;
            };
            let Some(page) = sequence.pages.get(sequence.published) else { return };
            let Some(next) = self.pool.publish(*page, prefix, tokens) else { return };
            if let Some(windows) = &mut self.windows {
                windows.publish(&sequence.window_pages, sequence.published, (prefix, tokens), next);
            }
            sequence.prefix = Some(next);
            sequence.published += 1;
            // Of an answer, only the latest recurrent state is kept.
            if recurrent
                && sequence.computed == sequence.published * PAGE_SLOTS
                && self.engine.publish_state(sequence.lane, next)
                && let Some(earlier) = sequence.note_kept(next)
            {
                self.engine.forget_state(earlier);
            }
        }
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

    /// Forgets all prefixes in the KV cache that no running sequence uses.
    pub fn clear_prefixes(&mut self) {
        self.pool.clear();
        if let Some(windows) = &mut self.windows {
            windows.clear();
        }
    }

    /// An error unless pages, sequences and lanes agree: for tests, after any step.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check(self.running.iter().map(|sequence| sequence.pages.as_slice()))?;
        if let Some(sequence) = self.waiting.iter().find(|sequence| !sequence.pages.is_empty()) {
            return Err(format!("{:?} waits and has pages", sequence.id));
        }
        for sequence in &self.running {
            // What comes next is written to pages that nobody else reads.
            let next = sequence.pages.get(sequence.computed / PAGE_SLOTS..).unwrap_or_default();
            if let Some(page) = next.iter().find(|page| !self.pool.is_writable(**page)) {
                return Err(format!("{:?} would write to page {page}, which is shared", sequence.id));
            }
        }
        if let Some(windows) = &self.windows {
            let running = self.running.iter();
            windows.check(running.map(|sequence| (&sequence.window_pages, sequence.computed)))?;
            if self.waiting.iter().any(|sequence| sequence.window_pages.end() > 0) {
                return Err("a sequence waits and has window pages".to_owned());
            }
        }
        if let Some(draft) = &self.draft {
            draft.check()?;
            if let Some(id) = draft.ids().find(|id| self.index_of(*id).is_none()) {
                return Err(format!("the draft model has pages of {id:?}, which is not running"));
            }
        }
        self.engine.check_states()?;
        let mut lanes: Vec<usize> = self.running.iter().map(|sequence| sequence.lane).collect();
        lanes.extend(&self.lanes);
        lanes.sort_unstable();
        if lanes != (0..self.options.engine.sequences).collect::<Vec<_>>() {
            return Err(format!("lanes {lanes:?}"));
        }
        Ok(())
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
