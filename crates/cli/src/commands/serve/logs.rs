//! What the server logs, and how.

use quadriga_server::body::PROMPTS;
use tracing::Level;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use super::traces::{self, Traces};
use crate::failure::{Failure, Outcome};
use crate::notes;

/// The form of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object.
    Json,
}

/// The least important lines that are logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

impl LogLevel {
    /// llama-server's numbers: from 0 for nothing to 4 and more for everything.
    pub(super) fn of_verbosity(number: u8) -> Option<LogLevel> {
        let levels = [LogLevel::Off, LogLevel::Error, LogLevel::Warn, LogLevel::Info];
        Some(levels.get(usize::from(number)).copied().unwrap_or(LogLevel::Debug))
    }

    fn level(self) -> Option<Level> {
        match self {
            LogLevel::Off => None,
            LogLevel::Error => Some(Level::ERROR),
            LogLevel::Warn => Some(Level::WARN),
            LogLevel::Info => Some(Level::INFO),
            LogLevel::Debug => Some(Level::DEBUG),
        }
    }
}

/// Logs to standard error from now on, and sends traces to a collector as long as what it returns lives. Bodies of requests, with
/// prompts, are logged only if that is asked for.
pub(super) fn install(
    format: LogFormat,
    level: LogLevel,
    prompts: bool,
    collector: Option<&str>,
) -> Outcome<Traces> {
    let level = level.level();
    let filter = filter_fn(move |metadata| {
        // Libraries beside us say what concerns their authors.
        let own = metadata.target().starts_with("quadriga");
        let level = level.map(|level| if own { level } else { level.min(Level::WARN) });
        level.is_some_and(|level| *metadata.level() <= level) && (prompts || metadata.target() != PROMPTS)
    });
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let layer = match format {
        // The layer warns on a terminal unless it is told not to color: that part of the library is not built in.
        LogFormat::Text => layer.with_ansi(false).with_target(false).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_ansi(false).with_span_list(false).boxed(),
    };
    let (spans, traces) = traces::layer(collector)?;
    let installed = tracing_subscriber::registry().with(layer.with_filter(filter)).with(spans).try_init();
    installed.map_err(|error| Failure::Message(format!("cannot log: {error}")))?;
    if format == LogFormat::Json && level.is_some() {
        // Whoever reads the log gets nothing else.
        notes::log_from_now_on();
    }
    Ok(traces)
}
