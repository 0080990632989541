//! A model that is loaded and answers requests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use quadriga_llm::constraint::MAX_COMPILING;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, BatcherState, Finished, Service};
use quadriga_llm::{EngineOptions, Finish, GeneratorOptions, Model, Pooling};

use tokio::sync::Semaphore;

use crate::embedding::{EmbedderLoader, EmbeddingService};
use crate::error::{ApiError, ErrorKind};
use crate::generation::ReasoningEffort;
use crate::observer_counts::ObserverCounts;
use crate::operation::metrics::ModelMetrics;
use crate::reasoning_output::ReasoningOutput;
use crate::slot_table::{AnswerSlot, SlotTable};
use crate::template_abilities::TemplateAbilities;

/// Bytes of text from which it takes a while to tokenize it, and how many such texts are tokenized at a time.
const LONG_TEXT: usize = 64 << 10;
const LONG_TEXTS: usize = 4;
/// The same for texts whose tokens are only counted.
const COUNTED_TEXTS: usize = 2;

/// A model that is loaded: its engine, and the defaults of its requests.
pub struct ServedModel {
    /// The name by which clients ask for it.
    pub name: String,
    /// The model's file, tokenizer and template.
    pub model: Model,
    /// The engine's options, with everything filled in.
    pub options: BatcherOptions,
    /// The defaults of requests: sampling options, stop strings, system prompt, variables of the template.
    pub defaults: GeneratorOptions,
    /// The random seed of requests that have none; a random one if `None`.
    pub seed: Option<u64>,
    /// How the vectors of a text's tokens become its embedding; as the file says if `None`.
    pub pooling: Option<Pooling>,
    /// Where the reasoning of answers is, for requests that do not say.
    pub reasoning_output: ReasoningOutput,
    /// How much it is to reason, for requests that do not say. The most tokens of that are in `defaults`.
    pub reasoning: ReasoningEffort,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Drawings of the plan of its largest step: as SVG, and as a page.
    pub pictures: Option<PlanPictures>,
    /// Bytes that its plan takes of devices other than the host's memory.
    pub device_bytes: u64,
    /// Counters and histograms.
    pub metrics: Arc<ModelMetrics>,
    service: Option<Service>,
    embeddings: Option<EmbeddingService>,
    in_flight: Arc<InFlightTable>,
    slots: Arc<SlotTable>,
    /// What is known of the chat template, once somebody asked.
    pub(crate) template_abilities: OnceLock<TemplateAbilities>,
    next: AtomicU64,
    failure: OnceLock<String>,
    longest_token: OnceLock<usize>,
    long_texts: Arc<Semaphore>,
    /// Long texts whose tokens are only counted.
    counted_texts: Arc<Semaphore>,
    /// Requests whose grammars are compiled.
    compilers: Arc<Semaphore>,
    /// References of [`ObservedModel`](crate::observed::ObservedModel).
    pub(crate) observers: ObserverCounts,
    /// Whether its engine was taken away, to be ended.
    ended: bool,
}

/// What of a model takes long to end: an engine finishes its step and writes prefixes, and memory of devices and files is given back.
struct Engines {
    _service: Option<Service>,
    _embeddings: Option<EmbeddingService>,
    _model: Model,
}

/// The answers that are being generated, by number.
struct InFlightTable {
    entries: Mutex<HashMap<u64, Arc<InFlight>>>,
    /// When the latest request came or ended.
    last_used: Mutex<Instant>,
}

impl InFlightTable {
    fn touch(&self) {
        *self.last_used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

/// Why an answer ended, in the log and in traces.
fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::End | Finish::Stop(_) | Finish::StopToken(_) => "stop",
        Finish::Length | Finish::Context => "length",
        Finish::Cancelled => "cancelled",
    }
}

/// Drawings of a plan.
#[derive(Clone, Debug, Default)]
pub struct PlanPictures {
    /// As SVG.
    pub svg: String,
    /// As an HTML page.
    pub html: String,
}

/// An answer that is being generated, for the status page.
#[derive(Debug)]
pub struct InFlight {
    /// When it was submitted.
    pub since: Instant,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, the ones in the KV cache so far.
    pub computed: AtomicUsize,
    /// Tokens generated so far.
    pub generated: AtomicUsize,
    /// The options with which an answer is sampled; none of texts that are embedded.
    pub options: Option<Arc<FlightOptions>>,
    /// The slot, once something of it is computed.
    pub(crate) slot: AnswerSlot,
}

/// The options with which an answer is sampled.
#[derive(Clone, Debug)]
pub struct FlightOptions {
    /// Temperature, top-k, top-p, penalties, logit bias and others.
    pub sampling: SamplingOptions,
    /// The largest number of tokens.
    pub max_tokens: Option<usize>,
    /// Stop strings.
    pub stops: Vec<String>,
    /// The number of most probable tokens that are reported with each token.
    pub logprobs: Option<usize>,
}

impl InFlight {
    /// The tokens that were computed for it, or found in the KV cache.
    pub(crate) fn used(&self) -> usize {
        match self.generated.load(Ordering::Relaxed) {
            0 => self.computed.load(Ordering::Relaxed).min(self.prompt_tokens),
            generated => self.prompt_tokens + generated,
        }
    }
}

/// Removes an answer from those in flight when it is dropped.
pub(crate) struct InFlightGuard {
    table: Arc<InFlightTable>,
    number: u64,
    pub(crate) entry: Arc<InFlight>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.table.touch();
        self.entry.slot.end();
        self.table.entries.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

impl Drop for ServedModel {
    /// Ends its engine beside the threads that serve connections, one of which may have had the last reference.
    fn drop(&mut self) {
        let Some(engines) = self.end() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(engines))),
            Err(_) => drop(engines),
        }
    }
}

impl ServedModel {
    /// Ends its engine, which nobody uses, on this thread: its memory is free then.
    pub(crate) fn end_engine(&self) {
        self.service.iter().for_each(Service::end);
        self.embeddings.iter().for_each(EmbeddingService::end);
    }

    /// Gives up a reference; the last one ends what is left on this thread, which may wait.
    pub(crate) fn end_if_last(served: Arc<ServedModel>) {
        drop(Arc::into_inner(served).and_then(|mut served| served.end()));
    }

    /// Takes the engine away. What it counted goes on with the next one of its name.
    fn end(&mut self) -> Option<Engines> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        self.metrics.note_unloaded(&self.state());
        let (service, embeddings) = (self.service.take(), self.embeddings.take());
        Some(Engines { _service: service, _embeddings: embeddings, _model: self.model.clone() })
    }

    /// Starts to serve a model under a name.
    pub fn start(
        name: impl Into<String>,
        batcher: Batcher,
        defaults: GeneratorOptions,
        pictures: Option<PlanPictures>,
    ) -> Result<ServedModel, quadriga_llm::Error> {
        let (model, options) = (batcher.model().clone(), batcher.options().clone());
        let served = ServedModel::new(name.into(), model, options, defaults, pictures);
        let mut served = served;
        served.service = Some(Service::start(batcher)?);
        Ok(served)
    }

    /// Serves an encoder, which generates no text.
    pub fn encoder(
        name: impl Into<String>,
        model: Model,
        engine: EngineOptions,
        pictures: Option<PlanPictures>,
    ) -> ServedModel {
        let options = BatcherOptions { engine, ..BatcherOptions::default() };
        ServedModel::new(name.into(), model, options, GeneratorOptions::default(), pictures)
    }

    fn new(
        name: String,
        model: Model,
        options: BatcherOptions,
        defaults: GeneratorOptions,
        pictures: Option<PlanPictures>,
    ) -> ServedModel {
        ServedModel {
            name,
            model,
            slots: Arc::new(SlotTable::new(options.engine.sequences)),
            template_abilities: OnceLock::new(),
            options,
            defaults,
            seed: None,
            pooling: None,
            reasoning_output: ReasoningOutput::default(),
            reasoning: ReasoningEffort::default(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            pictures,
            device_bytes: 0,
            metrics: Arc::default(),
            service: None,
            embeddings: None,
            in_flight: Arc::new(InFlightTable {
                entries: Mutex::default(),
                last_used: Mutex::new(Instant::now()),
            }),
            next: AtomicU64::new(0),
            failure: OnceLock::new(),
            longest_token: OnceLock::new(),
            long_texts: Arc::new(Semaphore::new(LONG_TEXTS)),
            counted_texts: Arc::new(Semaphore::new(COUNTED_TEXTS)),
            compilers: Arc::new(Semaphore::new(MAX_COMPILING)),
            observers: ObserverCounts::default(),
            ended: false,
        }
    }

    /// With what makes the embedder of an encoder, when the first request for embeddings comes. A model that generates text
    /// needs none: its engine embeds beside the answers.
    #[must_use]
    pub fn with_embedder(mut self, loader: EmbedderLoader) -> ServedModel {
        self.embeddings = Some(EmbeddingService::new(loader));
        self
    }

    /// With the random seed of requests that have none of their own; without it, each of them gets another one.
    #[must_use]
    pub fn with_seed(mut self, seed: Option<u64>) -> ServedModel {
        self.seed = seed;
        self
    }

    /// With the bytes that its plan takes of devices other than the host's memory, as [`device_bytes`](crate::device_bytes) counts
    /// them.
    #[must_use]
    pub fn with_device_bytes(mut self, bytes: u64) -> ServedModel {
        self.device_bytes = bytes;
        self
    }

    /// With another pooling of embeddings than the file's.
    #[must_use]
    pub fn with_pooling(mut self, pooling: Option<Pooling>) -> ServedModel {
        self.pooling = pooling;
        self
    }

    /// With another place for the reasoning of answers.
    #[must_use]
    pub fn with_reasoning_output(mut self, output: ReasoningOutput) -> ServedModel {
        self.reasoning_output = output;
        self
    }

    /// With another effort of reasoning for requests that do not say.
    #[must_use]
    pub fn with_reasoning(mut self, effort: ReasoningEffort) -> ServedModel {
        self.reasoning = effort;
        self
    }

    /// The pooling of embeddings.
    pub(crate) fn pooling(&self) -> Pooling {
        let hyper = self.model.hyperparameters();
        let default = if hyper.encoder { Pooling::Mean } else { Pooling::Last };
        self.pooling.or(hyper.pooling).unwrap_or(default)
    }

    /// The engine's thread.
    ///
    /// # Errors
    /// It is an encoder.
    pub fn service(&self) -> Result<&Service, ApiError> {
        let refused = || {
            let message = format!("{} is an encoder, which generates no text: ask /v1/embeddings", self.name);
            ApiError::new(ErrorKind::Unsupported, message)
        };
        self.service.as_ref().ok_or_else(refused)
    }

    /// What the engine was doing after its latest step.
    pub fn state(&self) -> BatcherState {
        self.service.as_ref().map(Service::state).unwrap_or_default()
    }

    /// What embeds and ranks, if it is an encoder.
    pub(crate) fn encoder_service(&self) -> Option<&EmbeddingService> {
        self.embeddings.as_ref()
    }

    /// When the latest request came or ended.
    pub fn last_used(&self) -> Instant {
        *self.in_flight.last_used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a request came.
    pub(crate) fn touch(&self) {
        self.in_flight.touch();
    }

    /// Why it cannot answer any more, if a device, a rank or its engine was lost.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Notes an error of the engine. After the loss of a device or of a rank every further step would fail, too.
    pub(crate) fn note_failure(&self, error: &quadriga_llm::Error) {
        let is_lost = match error {
            quadriga_llm::Error::Runtime(error) => error.is_lost(),
            quadriga_llm::Error::Cluster(_) => true,
            _ => false,
        };
        if is_lost {
            let _ = self.failure.set(error.to_string());
        }
    }

    /// Notes that the engine's thread has ended, which it does by itself only after a panic, and says so.
    pub(crate) fn note_stopped(&self) -> ApiError {
        const REASON: &str = "its engine stopped unexpectedly";
        if self.failure.set(REASON.to_owned()).is_ok() {
            tracing::error!(model = self.name, "the engine stopped unexpectedly");
        }
        ApiError::new(ErrorKind::Unavailable, format!("{} cannot answer: {REASON}", self.name))
    }

    /// Counts an answer that is complete, and logs it.
    pub(crate) fn note_finished(&self, finished: &Finished) {
        self.metrics.note_finished(finished);
        let milliseconds = |time: Duration| time.as_micros() as f64 / 1e3;
        tracing::info!(
            model = self.name,
            prompt_tokens = finished.counts.prompt,
            cached_tokens = finished.counts.cached,
            answer_tokens = finished.counts.answer,
            finish = finish_name(finished.finish),
            queue_ms = milliseconds(finished.queued),
            first_token_ms = milliseconds(finished.first_token),
            decode_ms = milliseconds(finished.decode),
            "generated"
        );
    }

    /// Tokens of a prompt and its answer together.
    pub fn context(&self) -> usize {
        self.options.engine.context
    }

    /// The answers that are being generated, by number.
    pub fn in_flight(&self) -> Vec<(u64, Arc<InFlight>)> {
        let table = self.in_flight.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = table.iter().map(|(number, entry)| (*number, Arc::clone(entry))).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all
    }

    /// Notes an answer that waits from now on, and would rather have a certain slot.
    pub(crate) fn note_in_flight(
        &self,
        prompt_tokens: usize,
        options: Option<Arc<FlightOptions>>,
        slot: Option<usize>,
    ) -> InFlightGuard {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::new(InFlight {
            since: Instant::now(),
            prompt_tokens,
            computed: AtomicUsize::new(0),
            generated: AtomicUsize::new(0),
            options,
            slot: AnswerSlot::new(&self.slots, slot),
        });
        let mut table = self.in_flight.entries.lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(number, Arc::clone(&entry));
        InFlightGuard { table: Arc::clone(&self.in_flight), number, entry }
    }

    /// Runs a function that computes for a while beside the threads that serve connections.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed = |_| ApiError::new(ErrorKind::Internal, "the request could not be prepared");
        tokio::task::spawn_blocking(work).await.map_err(failed)
    }

    /// Runs a function that tokenizes so many bytes of text. Few long texts are tokenized at a time, so that short ones find a
    /// thread.
    pub(crate) async fn tokenizing<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        match bytes > LONG_TEXT {
            true => self.in_turn(&self.long_texts, work).await,
            false => self.blocking(work).await,
        }
    }

    /// The same for tokens that are only counted: they wait for no text of a generation.
    pub(crate) async fn counting<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        match bytes > LONG_TEXT {
            true => self.in_turn(&self.counted_texts, work).await,
            false => self.blocking(work).await,
        }
    }

    /// Runs a function that compiles grammars. Whoever waits for a compiler holds no thread: there are few of them, and all other
    /// requests need one, too.
    pub(crate) async fn compiling<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        self.in_turn(&self.compilers, work).await
    }

    /// Runs a function once one of these permits is free.
    async fn in_turn<T: Send + 'static>(
        &self,
        permits: &Arc<Semaphore>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        // It is never closed.
        let turn = Arc::clone(permits).acquire_owned().await.ok();
        self.blocking(move || {
            // If nobody waits any more, the thread is busy nevertheless.
            let _turn = turn;
            work()
        })
        .await
    }

    /// Refuses a text of so many bytes that has more tokens than the context, however they are chosen: it is not tokenized then.
    pub(crate) fn check_length(&self, bytes: usize) -> Result<(), ApiError> {
        let context = self.context();
        match bytes.div_ceil(self.longest_token()) {
            least if least > context => {
                Err(quadriga_llm::Error::ContextFull { wanted: least, used: 0, context }.into())
            }
            _ => Ok(()),
        }
    }

    /// The most bytes of text that a token of the vocabulary stands for.
    pub(crate) fn longest_token(&self) -> usize {
        *self.longest_token.get_or_init(|| {
            let Ok(tokenizer) = self.model.tokenizer() else { return usize::MAX };
            // In others, a word that is not in the vocabulary is one token, and spaces are none, however many they are.
            if !matches!(tokenizer.vocabulary().model.as_str(), "gpt2" | "gemma4" | "llama") {
                return usize::MAX;
            }
            let tokens = 0..u32::try_from(tokenizer.token_count()).unwrap_or(u32::MAX);
            let pieces = tokens.filter_map(|token| tokenizer.piece(token).ok().map(<[u8]>::len));
            let names = tokenizer.vocabulary().tokens.iter().map(String::len);
            pieces.chain(names).max().unwrap_or(1).max(1)
        })
    }

    /// The bytes that a token has in an answer's text: control tokens that do not end it have their names, if they are shown.
    pub(crate) fn text_bytes(&self, token: u32, shows_control: bool) -> Vec<u8> {
        let Ok(tokenizer) = self.model.tokenizer() else { return Vec::new() };
        match shows_control && !tokenizer.is_end(token) {
            true => self.token_bytes(token),
            false => tokenizer.piece(token).unwrap_or_default().to_vec(),
        }
    }

    /// The bytes of a token; of a control token, its name.
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        let Ok(tokenizer) = self.model.tokenizer() else { return Vec::new() };
        match tokenizer.piece(token) {
            Ok(bytes) if !bytes.is_empty() => bytes.to_vec(),
            _ => {
                let name = tokenizer.vocabulary().tokens.get(token as usize);
                name.map_or_else(Vec::new, |name| name.clone().into_bytes())
            }
        }
    }

    /// The text of a token, with U+FFFD in place of parts of characters.
    pub fn token_text(&self, token: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(token)).into_owned()
    }
}
