//! Recording runs: `--trace`, `--trace-ops` and `--stats`.

use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use quadriga_llm::{Batch, BatchObserver, Model};
use quadriga_runtime::Detail;
use quadriga_view::{ChromeTrace, Happening, Statistics};

use crate::atomic_file::AtomicFile;
use crate::failure::{Failure, Outcome};
use crate::known_limits;
use crate::model_options::{ModelOptions, Prepared};

/// What to record.
#[derive(clap::Args)]
pub(crate) struct RecordOptions {
    /// Write what happens when, for Perfetto (ui.perfetto.dev) or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// With --trace: also every operation
    #[arg(long, requires = "trace")]
    trace_ops: bool,
    /// Say where the time went: by device, split and operation
    #[arg(long)]
    stats: bool,
}

/// A recording under way.
pub(crate) struct Recording {
    detail: Detail,
    path: PathBuf,
    shared: Arc<Mutex<Shared>>,
}

/// What the watcher of the engine writes to.
struct Shared {
    origin: Instant,
    model: Model,
    trace: Option<ChromeTrace<BufWriter<AtomicFile>>>,
    statistics: Option<Statistics>,
    /// Seconds to the end of the run before.
    end: f64,
    /// The first thing that went wrong with the file.
    failed: Option<io::Error>,
}

impl RecordOptions {
    /// Prepares to record, if anything is to be recorded: a file that cannot be written is known before a model is loaded.
    pub(crate) fn start(&self, options: &ModelOptions, prepared: &Prepared) -> Outcome<Option<Recording>> {
        if self.trace.is_none() && !self.stats {
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
            shared: Arc::new(Mutex::new(Shared {
                origin: Instant::now(),
                model: prepared.model.clone(),
                trace,
                statistics,
                end: 0.0,
                failed: None,
            })),
        }))
    }
}

impl Recording {
    /// What the engine is to be watched with. The recording begins now.
    pub(crate) fn watcher(&self) -> (Detail, BatchObserver) {
        let shared = Arc::clone(&self.shared);
        lock(&shared).origin = Instant::now();
        (self.detail, Box::new(move |batch| lock(&shared).add(batch)))
    }

    /// Puts the trace in its place, and gives the statistics.
    pub(crate) fn finish(self) -> Outcome<Option<Statistics>> {
        let mut shared = lock(&self.shared);
        let total = shared.origin.elapsed().as_secs_f64();
        let end = shared.end;
        let failed = |error: io::Error| Failure::file("write", &self.path, &error);
        if let Some(error) = shared.failed.take() {
            return Err(failed(error));
        }
        if let Some(mut trace) = shared.trace.take() {
            trace.host("after the last run", end, total - end).map_err(failed)?;
            let file = trace.finish(total).map_err(failed)?;
            file.into_inner().map_err(|error| failed(error.into_error()))?.publish()?;
        }
        Ok(shared.statistics.take())
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
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
        let before = self.end;
        self.end = start + batch.trace.seconds;
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let name = match batch.tokens {
            [one] => format!("token {}", one.token),
            more => format!("prompt, {} tokens", more.len()),
        };
        trace.host("between runs", before, start - before)?;
        trace.run(&Happening { plan: batch.plan, trace: batch.trace, start, name: &name })?;
        if let [one] = batch.tokens {
            let piece = self.model.tokenizer().ok().and_then(|tokenizer| tokenizer.piece(one.token).ok());
            let text = piece.map(|piece| String::from_utf8_lossy(piece).into_owned()).unwrap_or_default();
            trace.token(&format!("{text:?} at {}", batch.position), start)?;
        }
        Ok(())
    }
}
