//! Lines for the user on standard error.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::terminal;

/// Whether lines are events of the log.
static LOGGED: AtomicBool = AtomicBool::new(false);

/// What lines begin with on a terminal.
const PROGRAM: &str = "quadriga: ";

/// From now on lines are events of the log, which is not off: every line of standard error has its form then.
pub(crate) fn log_from_now_on() {
    LOGGED.store(true, Ordering::Relaxed);
}

/// A line for the user.
pub(crate) fn note(text: &str) {
    if !LOGGED.load(Ordering::Relaxed) {
        return print(text);
    }
    let text = text.strip_prefix(PROGRAM).unwrap_or(text);
    match text.strip_prefix("WARNING: ") {
        Some(warning) => tracing::warn!("{warning}"),
        None => tracing::info!("{text}"),
    }
}

/// A warning that no level of the log hides.
pub(crate) fn warning(text: &str) {
    if !LOGGED.load(Ordering::Relaxed) {
        return print(&format!("{PROGRAM}WARNING: {text}"));
    }
    let mut time = String::new();
    // Without the time, it is a warning nevertheless.
    let _ = SystemTime.format_time(&mut Writer::new(&mut time));
    let line =
        serde_json::json!({ "timestamp": time, "level": "WARN", "message": text, "target": module_path!() });
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The line that says why the command failed.
pub(crate) fn failure(text: &str) {
    if LOGGED.load(Ordering::Relaxed) {
        tracing::error!("{text}");
    } else {
        print(&format!("{PROGRAM}{text}"));
    }
}

fn print(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", terminal::escaped(text));
}
