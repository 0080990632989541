//! A loaded model: requests of any thread go to one batching engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use quadriga_llm::{
    BatchToken, Embedder, EmbedderOptions, Engine, EngineOptions, cut_tokens, pair_tokens, text_tokens,
};
use quadriga_server::ServedModel;
use quadriga_server::body::JsonBody;
use quadriga_server::constraint::Constraint;
use quadriga_server::generation::{Generation, Prompt};
use quadriga_server::requests;
use quadriga_view::Picture;

use crate::callback::{Caller, check_model, is_called_by, new_number};
use crate::detached::{SIGNAL_INTERVAL, detached, interruptible};
use crate::failure::{Failure, Outcome};
use crate::floats::Floats;
use crate::interpreter::{Counted, WORKING, is_refusing};
use crate::loading::{LoadOptions, LoadPaths, LoadedModel, LoadedParts};
use crate::logits::LogitsProcessors;
use crate::measure::stream_requests;
use crate::model_facts;
use crate::notifier::Notifier;
use crate::process::ProcessMark;
use crate::queue::EventQueue;
use crate::stream::StreamCore;
use crate::turns::Turns;

/// The most texts that are embedded at once, and the most tokens of them unless one text has more.
const EMBEDDED_TEXTS: usize = 16;
const EMBEDDED_TOKENS: usize = 16 << 10;

/// A loaded model.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct ModelCore {
    process: ProcessMark,
    number: u64,
    engines: RwLock<Option<Arc<Engines>>>,
}

/// The engines of a model. They share its weights. They are dropped without the GIL, for which their threads may be waiting.
struct Engines {
    served: Arc<ServedModel>,
    parts: LoadedParts,
    embedder: Mutex<Option<Embedder>>,
    evaluator: Mutex<Option<Engine>>,
    /// Stopped last: requests that end with the engines wake their readers.
    notifier: EnginesNotifier,
    /// The order in which threads that wait for answers are woken.
    turns: Arc<Turns>,
}

/// A notifier that stops when it is dropped.
#[derive(Default)]
struct EnginesNotifier(Notifier);

impl Drop for EnginesNotifier {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Engines {
    /// Embeds texts of tokens, with an embedder that is made when it is first needed.
    fn embed<T>(&self, work: impl FnOnce(&mut Embedder) -> quadriga_llm::Result<T>) -> Outcome<T> {
        let mut embedder = self.embedder.lock().unwrap_or_else(PoisonError::into_inner);
        if embedder.is_none() {
            let engine = &self.parts.engine;
            // Its KV cache comes on top of the other: one long text, or a few shorter ones.
            let sequences = (EMBEDDED_TOKENS / engine.context.max(1)).clamp(1, EMBEDDED_TEXTS);
            let engine = EngineOptions { sequences, ..engine.clone().without_pages() };
            let options = EmbedderOptions { engine, ..EmbedderOptions::default() };
            let model = self.served.model.clone();
            *embedder = Some(Embedder::new(model, &self.parts.placed.scheduler, options, &mut |_| {})?);
        }
        match embedder.as_mut() {
            Some(embedder) => Ok(work(embedder)?),
            None => Err(Failure::closed("model")),
        }
    }

    /// The logits after each of the tokens from `start` on, one row after another. Those before it are only computed if the KV
    /// cache does not have them. Between steps it looks whether they are still wanted.
    fn evaluate(&self, tokens: &[u32], start: usize, unwanted: &AtomicBool) -> Outcome<Vec<f32>> {
        let mut evaluator = self.evaluator.lock().unwrap_or_else(PoisonError::into_inner);
        if evaluator.is_none() {
            let engine = EngineOptions {
                sequences: 1,
                greedy: false,
                logits: true,
                output_rows: self.parts.engine.batch,
                ..self.parts.engine.clone().without_pages()
            };
            let model = self.served.model.clone();
            *evaluator = Some(Engine::new(model, &self.parts.placed.scheduler, engine, &mut |_| {})?);
        }
        let Some(engine) = evaluator.as_mut() else { return Err(Failure::closed("model")) };
        let known = engine.tokens(0).iter().zip(tokens).take_while(|(old, new)| old == new).count();
        // Tokens whose logits are needed are computed in any case.
        let known = engine.truncate(0, known.min(start));
        let rest = tokens.get(known..).unwrap_or_default();
        let mut batch = Vec::with_capacity(rest.len());
        batch.extend(rest.iter().zip(known..).map(|(token, position)| BatchToken {
            sequence: 0,
            token: *token,
            output: position >= start,
        }));
        if batch.is_empty() {
            return Err(quadriga_llm::Error::EmptyPrompt.into());
        }
        let mut logits = Vec::new();
        for step in batch.chunks(self.parts.engine.batch.max(1)) {
            if unwanted.load(Ordering::SeqCst) {
                return Err(unwanted_failure());
            }
            engine.extend(step)?;
            engine.wait()?;
            let rows = step.iter().filter(|token| token.output).count();
            logits.extend((0..rows).flat_map(|row| engine.logits(row)).copied());
        }
        Ok(logits)
    }
}

/// What work returns that nobody waits for any more.
fn unwanted_failure() -> Failure {
    Failure::new("Error", "the call was interrupted")
}

/// The most bytes of a request that may be short.
const SHORT_BYTES: usize = 1024;

/// Whether a request is ready in a few microseconds: it has neither a template to render nor a grammar to compile.
fn is_short(generation: &Generation) -> bool {
    matches!(generation.prompt, Prompt::Text(_) | Prompt::Tokens(_))
        && generation.constraint == Constraint::None
}

/// Gives up a share of the engines. A thread of theirs, which runs a logits processor, leaves the end to another one.
fn release(number: u64, engines: Arc<Engines>) {
    if !is_called_by(Caller::Model(number)) {
        drop(engines);
    } else if let Some(last) = Arc::into_inner(engines) {
        drop(end(Arc::new(last)));
    }
}

/// Ends engines on a thread of their own: a logits processor that does not return keeps theirs. The receiver is disconnected
/// when they have ended.
fn end(engines: Arc<Engines>) -> Receiver<()> {
    let (ended, receiver) = channel();
    let working = Counted::new(&WORKING);
    let run = move || {
        drop(engines);
        drop((ended, working));
    };
    // Without a thread they end here, and a logits processor that calls this fails.
    let _ = std::thread::Builder::new().name("quadriga-close".to_owned()).spawn(run);
    receiver
}

/// How long the end of a model that nobody closed is waited for.
const DROP_WAIT: Duration = Duration::from_secs(5);

impl ModelCore {
    fn engines(&self) -> Outcome<Arc<Engines>> {
        self.process.check("model")?;
        let engines = self.engines.read().unwrap_or_else(PoisonError::into_inner);
        engines.as_ref().map(Arc::clone).ok_or_else(|| Failure::closed("model"))
    }

    /// Computes with the engines, without the GIL. They are released without it, too: the last one to do so waits for the
    /// engine's thread, which may run Python code.
    fn with<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&Engines) -> Outcome<T> + Send) -> Outcome<T> {
        let engines = self.engines()?;
        detached(py, move || {
            let done = work(&engines);
            release(self.number, engines);
            done
        })
    }

    /// As `with`, for what is short and waits for nothing: it keeps the GIL, which costs more to give up and get back.
    fn with_gil<T>(&self, py: Python<'_>, work: impl FnOnce(&Engines) -> Outcome<T>) -> Outcome<T> {
        let engines = self.engines()?;
        if is_refusing() {
            return Err(Failure::new("Closed", "the interpreter is shutting down"));
        }
        let done = work(&engines);
        // If another thread closed the model meanwhile, they end here.
        if let Some(last) = Arc::into_inner(engines) {
            py.detach(|| release(self.number, Arc::new(last)));
        }
        done
    }

    /// As `with`, for what takes long: Ctrl-C ends the wait, and the work sees that it is not wanted.
    fn with_signals<T: Send + 'static>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Engines, &AtomicBool) -> Outcome<T> + Send + 'static,
    ) -> Outcome<T> {
        let (engines, number) = (self.engines()?, self.number);
        interruptible(py, move |unwanted| {
            let done = work(&engines, unwanted);
            release(number, engines);
            done
        })
    }

    /// As `with`, for what waits for the engine's thread.
    fn with_engine<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Engines) -> Outcome<T> + Send,
    ) -> Outcome<T> {
        check_model(self.number)?;
        self.with(py, work)
    }

    /// Begins to end the engines, unless that was done before, or in another process.
    fn begin_end(&self) -> Outcome<Option<Receiver<()>>> {
        if !self.process.is_here() {
            return Ok(None);
        }
        check_model(self.number)?;
        Ok(self.engines.write().unwrap_or_else(PoisonError::into_inner).take().map(end))
    }

    /// What a request asks for.
    fn parse(engines: &Engines, path: &str, body: &str) -> Outcome<Generation> {
        let body = JsonBody::parse(body.as_bytes())?;
        let generation = requests::parse(path, &body, &engines.served)?.pop();
        generation.ok_or_else(|| Failure::invalid("the request asks for nothing"))
    }

    /// Submits a request.
    fn start(
        number: u64,
        engines: &Engines,
        generation: Generation,
        processors: Option<LogitsProcessors>,
    ) -> Outcome<StreamCore> {
        let (served, notifier) = (&engines.served, engines.notifier.0.clone());
        let stops = generation.stops.clone();
        let request = served.prepare(generation)?.pop();
        let mut request = request.ok_or_else(|| Failure::invalid("the request asks for nothing"))?;
        // So that a request whose stream is closed ends with the next part of its prompt.
        request.progress = true;
        if let Some(processors) = processors {
            request.add_hook(Box::new(processors));
        }
        let prompt = request.prompt.clone();
        let queue = Arc::new(EventQueue::new(&engines.turns));
        let requests = vec![(request, queue.sink(notifier.clone()))];
        let refused = Arc::clone(&queue);
        served.service()?.submit_to(requests, move |accepted| {
            if let Err(error) = accepted {
                refused.refuse(error, &notifier);
            }
            true
        })?;
        Ok(StreamCore::new(number, queue, prompt, stops))
    }
}

#[pymethods]
impl ModelCore {
    /// Loads the model that a JSON object describes, and a dictionary of paths.
    #[new]
    fn new(py: Python<'_>, options: &str, paths: LoadPaths) -> PyResult<ModelCore> {
        let mut options: LoadOptions =
            serde_json::from_str(options).map_err(|error| Failure::invalid(error.to_string()))?;
        options.paths = paths;
        options.python = py.import("sys")?.getattr("executable")?.extract().unwrap_or_default();
        let load = move |unwanted: &AtomicBool| {
            options.load(&mut || match unwanted.load(Ordering::SeqCst) {
                true => Err(unwanted_failure()),
                false => Ok(()),
            })
        };
        let LoadedModel { served, parts } = interruptible(py, load)?;
        let engines = Engines {
            served: Arc::new(served),
            parts,
            embedder: Mutex::default(),
            evaluator: Mutex::default(),
            notifier: EnginesNotifier::default(),
            turns: Arc::default(),
        };
        Ok(ModelCore {
            process: ProcessMark::new(),
            number: new_number(),
            engines: RwLock::new(Some(Arc::new(engines))),
        })
    }

    /// Ends all requests and frees the memory, after the calls of other threads that compute with the engines. An exception of a
    /// signal handler ends the wait, and the end goes on in the background.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(ended) = self.begin_end()? else { return Ok(()) };
        // A receiver is not for several threads; here one has it at a time.
        let ended = Mutex::new(ended);
        let wait = || {
            let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(ended.recv_timeout(SIGNAL_INTERVAL) == Err(RecvTimeoutError::Timeout))
        };
        // At the end of the interpreter, that waits.
        while !is_refusing() && detached(py, wait)? {
            py.check_signals()?;
        }
        Ok(())
    }

    /// As `close`, but in the background: for the end of the interpreter.
    fn begin_close(&self) -> PyResult<()> {
        Ok(self.begin_end().map(drop)?)
    }

    /// Whether the model was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.engines.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Starts to answer a request: JSON in the format of one of the server's routes, and logits processors.
    #[pyo3(signature = (path, body, processors=None))]
    fn submit(
        &self,
        py: Python<'_>,
        path: &str,
        body: &str,
        processors: Option<Py<PyAny>>,
    ) -> PyResult<StreamCore> {
        let processors = processors.map(|list| LogitsProcessors::new(py, list, self.number)).transpose()?;
        let number = self.number;
        let parse = |engines: &Engines| Self::parse(engines, path, body);
        let may_be_short = body.len() <= SHORT_BYTES;
        let generation = if may_be_short { self.with_gil(py, parse)? } else { self.with(py, parse)? };
        let short = may_be_short && is_short(&generation);
        let start = |engines: &Engines| Self::start(number, engines, generation, processors);
        Ok(if short { self.with_gil(py, start)? } else { self.with(py, start)? })
    }

    /// The tokens of a request's prompt.
    fn prompt_tokens(&self, py: Python<'_>, path: &str, body: &str) -> PyResult<Vec<u32>> {
        Ok(self.with(py, |engines| {
            let body = JsonBody::parse(body.as_bytes())?;
            Ok(requests::prompts(path, &body, &engines.served)?.pop().unwrap_or_default())
        })?)
    }

    /// The tokens of a text.
    fn tokenize(&self, py: Python<'_>, text: &str, add_bos: bool, special: bool) -> PyResult<Vec<u32>> {
        Ok(self.with(py, |engines| {
            let tokenizer = engines.served.model.tokenizer()?;
            Ok(if add_bos { tokenizer.encode_prompt(text, special) } else { tokenizer.encode(text, special) })
        })?)
    }

    /// The bytes of tokens, which may be parts of characters. Control tokens have none, or with `special` their names.
    fn detokenize<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
        special: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, |engines| {
            let tokenizer = engines.served.model.tokenizer()?;
            let mut bytes = Vec::new();
            for token in tokens {
                let piece = tokenizer.piece(token)?;
                match special && piece.is_empty() {
                    true => bytes.extend(engines.served.token_bytes(token)),
                    false => bytes.extend(piece),
                }
            }
            Ok(bytes)
        })?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The embeddings of texts, one row for each, and the number of their tokens.
    fn embed(&self, py: Python<'_>, texts: Vec<String>, truncate: bool) -> PyResult<(Floats, usize)> {
        Ok(self.with_signals(py, move |engines, unwanted| {
            let model = &engines.served.model;
            let mut tokens = Vec::with_capacity(texts.len());
            for text in &texts {
                let mut of_text = text_tokens(model, text)?;
                if truncate {
                    cut_tokens(model, &mut of_text, engines.parts.engine.context);
                }
                tokens.push(of_text);
            }
            let count = tokens.iter().map(Vec::len).sum();
            let mut vectors = Vec::with_capacity(tokens.len());
            for some in tokens.chunks(EMBEDDED_TEXTS) {
                if unwanted.load(Ordering::SeqCst) {
                    return Err(unwanted_failure());
                }
                vectors.extend(engines.embed(|embedder| embedder.embed_batch(some))?);
            }
            let width = vectors.first().map_or(0, Vec::len);
            let flat = match <[Vec<f32>; 1]>::try_from(vectors) {
                Ok([only]) => only,
                Err(several) => several.concat(),
            };
            Ok((Floats::new(flat, &[texts.len(), width]), count))
        })?)
    }

    /// How well documents answer a query, by the model's classification head.
    fn rank(&self, py: Python<'_>, query: String, documents: Vec<String>) -> PyResult<Vec<f32>> {
        Ok(self.with_signals(py, move |engines, unwanted| {
            let model = &engines.served.model;
            let pairs = documents.iter().map(|document| pair_tokens(model, &query, document));
            let pairs = pairs.collect::<quadriga_llm::Result<Vec<_>>>()?;
            let mut scores = Vec::with_capacity(pairs.len());
            for some in pairs.chunks(EMBEDDED_TEXTS) {
                if unwanted.load(Ordering::SeqCst) {
                    return Err(unwanted_failure());
                }
                scores.extend(engines.embed(|embedder| embedder.rank_batch(some))?);
            }
            Ok(scores)
        })?)
    }

    /// The logits after each of the tokens from `start` on: one row for each.
    fn logits(&self, py: Python<'_>, tokens: Vec<u32>, start: usize) -> PyResult<Floats> {
        Ok(self.with_signals(py, move |engines, unwanted| {
            let logits = engines.evaluate(&tokens, start, unwanted)?;
            let rows = tokens.len().saturating_sub(start);
            let width = logits.len() / rows.max(1);
            Ok(Floats::new(logits, &[rows, width]))
        })?)
    }

    /// The KV cache of the beginning of these tokens, as far as it is there.
    fn save_state<'py>(&self, py: Python<'py>, tokens: Vec<u32>) -> PyResult<Bound<'py, PyBytes>> {
        let saved = self.with_engine(py, |engines| Ok(engines.served.service()?.save_prefix(tokens)?))?;
        Ok(PyBytes::new(py, &saved))
    }

    /// Brings back a saved KV cache; returns the number of tokens that requests will find.
    fn load_state(&self, py: Python<'_>, saved: Vec<u8>) -> PyResult<usize> {
        Ok(self.with_engine(py, |engines| Ok(engines.served.service()?.restore_prefix(saved)?))?)
    }

    /// Forgets what the KV cache has of earlier requests.
    fn clear_cache(&self, py: Python<'_>) -> PyResult<()> {
        Ok(self.with_engine(py, |engines| Ok(engines.served.service()?.clear_prefixes()?))?)
    }

    /// Facts about the model, its memory and its engine, as JSON.
    fn facts(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.with(py, |engines| Ok(model_facts::json(&engines.served, &engines.parts)))?)
    }

    /// The metadata of the file, as JSON.
    fn metadata(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.with(py, |engines| Ok(model_facts::metadata(&engines.served.model)))?)
    }

    /// Streams greedy answers to prompts, of so many tokens each, from Rust's threads: seconds, and the number of tokens. For
    /// bench/python-overhead.
    fn measure_requests(
        &self,
        py: Python<'_>,
        requests: Vec<(Vec<u32>, usize)>,
        threads: usize,
    ) -> PyResult<(f64, usize)> {
        Ok(self.with(py, |engines| stream_requests(engines.served.service()?, &requests, threads))?)
    }

    /// The plan of the largest step as a page, or as a drawing.
    fn picture(&self, py: Python<'_>, svg: bool) -> PyResult<String> {
        Ok(self.with(py, |engines| {
            let plan = engines.parts.placed.forecast.explain();
            let picture = Picture::new(engines.served.name.clone(), plan);
            Ok(if svg { picture.svg() } else { picture.html() })
        })?)
    }
}

impl Drop for ModelCore {
    /// Ends the engine's threads. In a fork they do not exist, and at the end of the interpreter they end with the process. A
    /// logits processor that does not return is not waited for: nobody could interrupt that.
    fn drop(&mut self) {
        let mut engines = self.engines.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.process.is_here() {
            let _ = Python::try_attach(|py| {
                let ended = engines.take().map(end);
                py.detach(|| {
                    if !is_called_by(Caller::Model(self.number))
                        && let Some(ended) = ended
                    {
                        let _ = ended.recv_timeout(DROP_WAIT);
                    }
                });
            });
        }
        std::mem::forget(engines);
    }
}
