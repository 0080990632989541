//! Profiling of runs: `--trace`, `--trace-ops` and `--stats`.

use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use quadriga_llm::{Batch, BatchObserver, EngineOptions, ExpertCacheUse, Model};
use quadriga_runtime::Detail;
use quadriga_view::format::plural;
use quadriga_view::{ChromeTrace, Statistics, TracedRun};

use crate::atomic_file::AtomicFile;
use crate::failure::{Failure, Outcome};
use crate::known_limits;
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;

/// Options of profiling.
#[derive(clap::Args)]
pub(crate) struct RecordOptions {
    /// Write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing
    #[arg(long, value_name = "FILE.json", help_heading = PROFILING)]
    trace: Option<PathBuf>,
    /// Include every operation in the timeline
    #[arg(long, requires = "trace", help_heading = PROFILING)]
    trace_ops: bool,
    /// Print time by device, split and operation
    #[arg(long, help_heading = PROFILING)]
    stats: bool,
}

/// Heading of the help text.
const PROFILING: &str = "Profiling options";

/// The most tokens of a batch whose active neurons are counted.
const OBSERVED_TOKENS: usize = 8;

/// A recording in progress.
pub(crate) struct Recording {
    detail: Detail,
    path: PathBuf,
    recorder: Arc<Mutex<Recorder>>,
}

/// Receives the engine's batches; shared by the [`Recording`] and the observer in the engine.
struct Recorder {
    origin: Instant,
    model: Model,
    trace: Option<ChromeTrace<BufWriter<AtomicFile>>>,
    statistics: Option<Statistics>,
    /// Seconds from the origin to the end of the previous run.
    end: f64,
    /// The figures of the expert cache at that time.
    expert_cache: ExpertCacheUse,
    /// The first error of writing the file.
    failed: Option<io::Error>,
}

impl RecordOptions {
    /// Whether the options request a recording.
    pub(crate) fn is_on(&self) -> bool {
        self.trace.is_some() || self.stats
    }

    /// Lets an engine count active neurons if statistics are wanted: those of long batches would take the memory of weights.
    pub(crate) fn count_neurons(&self, options: &mut EngineOptions) {
        (options.neurons.observe, options.observed_tokens) = (self.stats, OBSERVED_TOKENS);
    }

    /// Prepares a recording if the options request one. An unwritable file is an error before the model is loaded.
    pub(crate) fn start(&self, options: &ModelOptions, prepared: &Prepared) -> Outcome<Option<Recording>> {
        if !self.is_on() {
            return Ok(None);
        }
        let backends = prepared.devices.backends();
        let trace = match &self.trace {
            Some(path) => {
                let file = BufWriter::with_capacity(1 << 18, AtomicFile::create(path)?);
                let trace = ChromeTrace::new(file, backends);
                Some(trace.map_err(|error| Failure::file("write", path, &error))?)
            }
            None => None,
        };
        let known = known_limits::load(options.cache_dir());
        let statistics = self.stats.then(|| Statistics::new(backends, &known));
        let operations = self.trace_ops || self.stats;
        Ok(Some(Recording {
            detail: if operations { Detail::Operations } else { Detail::Splits },
            path: self.trace.clone().unwrap_or_default(),
            recorder: Arc::new(Mutex::new(Recorder {
                origin: Instant::now(),
                model: prepared.model.clone(),
                trace,
                statistics,
                end: 0.0,
                expert_cache: ExpertCacheUse::default(),
                failed: None,
            })),
        }))
    }
}

impl Recording {
    /// The observer for the engine. Time zero of the recording is now.
    pub(crate) fn observer(&self) -> (Detail, BatchObserver) {
        let recorder = Arc::clone(&self.recorder);
        lock(&recorder).origin = Instant::now();
        (self.detail, Box::new(move |batch| lock(&recorder).add(batch)))
    }

    /// Completes the trace file and returns the statistics.
    pub(crate) fn finish(self) -> Outcome<Option<Statistics>> {
        let mut recorder = lock(&self.recorder);
        let total = recorder.origin.elapsed().as_secs_f64();
        let end = recorder.end;
        let failed = |error: io::Error| Failure::file("write", &self.path, &error);
        if let Some(error) = recorder.failed.take() {
            return Err(failed(error));
        }
        if let Some(mut trace) = recorder.trace.take() {
            trace.host("after the last run", end, total - end).map_err(failed)?;
            let file = trace.finish(total).map_err(failed)?;
            file.into_inner().map_err(|error| failed(error.into_error()))?.publish()?;
        }
        Ok(recorder.statistics.take())
    }
}

fn lock(recorder: &Mutex<Recorder>) -> MutexGuard<'_, Recorder> {
    recorder.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorder {
    fn add(&mut self, batch: &Batch<'_>) {
        let one = batch.tokens.len() == 1;
        if let Some(statistics) = &mut self.statistics {
            let kind = if one { "token" } else { "prompt" };
            statistics.add(kind, batch.plan, batch.trace, batch.visible);
        }
        let wrote = self.write(batch);
        if self.failed.is_none() {
            self.failed = wrote.err();
        }
    }

    fn write(&mut self, batch: &Batch<'_>) -> io::Result<()> {
        let start = batch.started.saturating_duration_since(self.origin).as_secs_f64();
        let previous_end = self.end;
        self.end = start + batch.trace.seconds;
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let name = match batch.tokens {
            [one] => format!("token {}", one.token),
            more => format!("prompt, {}", plural(more.len(), "token", "tokens")),
        };
        trace.host("between runs", previous_end, start - previous_end)?;
        trace.run(&TracedRun { plan: batch.plan, trace: batch.trace, start, name: &name })?;
        if let Some(total) = &batch.expert_cache {
            let added = total.since(&self.expert_cache);
            self.expert_cache = *total;
            // Batches that are not divided look nothing up.
            if let Some(share) = (100 * added.hits).checked_div(added.lookups) {
                trace.counters("expert cache: hits, %", self.end, &[("hits, %", share)])?;
            }
            trace.counters("expert cache: uploads", self.end, &[("experts", added.uploads)])?;
            trace.counters("expert cache: uploaded bytes", self.end, &[("bytes", added.bytes)])?;
        }
        if let [one] = batch.tokens {
            let piece = self.model.tokenizer().ok().and_then(|tokenizer| tokenizer.piece(one.token).ok());
            let text = piece.map(|piece| String::from_utf8_lossy(piece).into_owned()).unwrap_or_default();
            trace.token(&format!("{text:?} at {}", batch.position), start)?;
        }
        Ok(())
    }
}
