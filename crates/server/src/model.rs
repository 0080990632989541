//! A model that is loaded and answers requests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use quadriga_llm::serving::{Batcher, BatcherOptions, Service};
use quadriga_llm::{GeneratorOptions, Model};

use crate::error::ApiError;
use crate::generation::Generation;
use crate::operation::caller::Caller;
use crate::operation::metrics::ModelMetrics;
use crate::prompt;
use crate::running::Running;

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
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Drawings of the plan of its largest step: as SVG, and as a page.
    pub pictures: Option<PlanPictures>,
    /// Counters and histograms.
    pub metrics: Arc<ModelMetrics>,
    service: Service,
    in_flight: Arc<Mutex<HashMap<u64, Arc<InFlight>>>>,
    next: AtomicU64,
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
    /// Tokens generated so far.
    pub generated: AtomicUsize,
}

/// Removes an answer from those in flight when it is dropped.
pub(crate) struct InFlightGuard {
    table: Arc<Mutex<HashMap<u64, Arc<InFlight>>>>,
    number: u64,
    pub(crate) entry: Arc<InFlight>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

impl ServedModel {
    /// Starts to serve a model under a name.
    pub fn start(
        name: impl Into<String>,
        batcher: Batcher,
        defaults: GeneratorOptions,
        pictures: Option<PlanPictures>,
    ) -> Result<ServedModel, quadriga_llm::Error> {
        let (model, options) = (batcher.model().clone(), batcher.options().clone());
        Ok(ServedModel {
            name: name.into(),
            model,
            options,
            defaults,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            pictures,
            metrics: Arc::default(),
            service: Service::start(batcher)?,
            in_flight: Arc::default(),
            next: AtomicU64::new(0),
        })
    }

    /// The engine's thread.
    pub fn service(&self) -> &Service {
        &self.service
    }

    /// Tokens of a prompt and its answer together.
    pub fn context(&self) -> usize {
        self.options.engine.context
    }

    /// The answers that are being generated, by number.
    pub fn in_flight(&self) -> Vec<(u64, Arc<InFlight>)> {
        let table = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = table.iter().map(|(number, entry)| (*number, Arc::clone(entry))).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all
    }

    pub(crate) fn note_in_flight(&self, prompt_tokens: usize) -> InFlightGuard {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let entry =
            Arc::new(InFlight { since: Instant::now(), prompt_tokens, generated: AtomicUsize::new(0) });
        let mut table = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        table.insert(number, Arc::clone(&entry));
        InFlightGuard { table: Arc::clone(&self.in_flight), number, entry }
    }

    /// Starts to answer a request. When it returns, the request was checked and accepted.
    pub async fn generate(
        self: &Arc<Self>,
        generation: Generation,
        caller: &Caller,
    ) -> Result<Running, ApiError> {
        self.generate_all(vec![generation], caller).await
    }

    /// Starts to answer several requests as one: their choices are numbered one after another.
    pub async fn generate_all(
        self: &Arc<Self>,
        generations: Vec<Generation>,
        caller: &Caller,
    ) -> Result<Running, ApiError> {
        let served = Arc::clone(self);
        let client = caller.client();
        let prepare = move || {
            let prepare = |generation| prompt::prepare(&served, generation, client);
            generations.into_iter().map(prepare).collect::<Result<Vec<_>, ApiError>>()
        };
        let prepared = self.blocking(prepare).await??;
        Running::start(self, prepared, caller).await
    }

    /// The tokens of a prompt, rendered and tokenized as [`generate`](Self::generate) does, without any generation.
    pub async fn tokens(self: &Arc<Self>, generation: Generation) -> Result<Vec<u32>, ApiError> {
        let served = Arc::clone(self);
        let prepare = move || prompt::tokens(&served, &generation);
        self.blocking(prepare).await?
    }

    /// Runs a function that computes for a while beside the threads that serve connections.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed =
            |_| ApiError::new(crate::error::ErrorKind::Internal, "the request could not be prepared");
        tokio::task::spawn_blocking(work).await.map_err(failed)
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
