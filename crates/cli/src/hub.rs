//! Models by the names of their repositories: `-hf ORG/REPO:QUANT`.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_models::hub::{
    Hub, HubError, HubSettings, Listing, ModelCache, ModelChoice, PullStage, RemoteFile, RepositoryName,
};
use tempfile::TempDir;

use crate::failure::{Failure, Outcome};
use crate::{interrupt, size};

fn temporary_folder() -> Outcome<TempDir> {
    tempfile::tempdir().map_err(|error| Failure::Message(format!("no temporary folder: {error}")))
}

/// Waits before the hub is asked again; of a wait that is felt, the user is told.
fn tell_and_sleep(wait: Duration) {
    if wait >= Duration::from_secs(5) {
        note!("quadriga: the hub is asked again in {} s", wait.as_secs());
    }
    std::thread::sleep(wait);
}

/// How models are got.
#[derive(Clone, Copy)]
pub(crate) struct HubAccess<'a> {
    /// The folder given with `--cache-dir`.
    pub(crate) cache: Option<&'a Path>,
    pub(crate) offline: bool,
    pub(crate) quiet: bool,
}

/// Whether a model, of which there is a file without weights, fits in the memory of this machine.
pub(crate) type Fits<'a> = dyn Fn(&Path) -> Outcome<bool> + 'a;

impl HubAccess<'_> {
    pub(crate) fn settings(&self) -> Outcome<HubSettings> {
        let settings = HubSettings::from_environment(self.cache)?;
        let pause = if self.quiet { settings.pause } else { tell_and_sleep };
        Ok(HubSettings { offline: settings.offline || self.offline, pause, ..settings })
    }

    pub(crate) fn cache(&self) -> Outcome<ModelCache> {
        let settings = self.settings()?;
        Ok(ModelCache::new(&settings.cache, &settings.shared_caches))
    }

    /// The path of a model: that in the cache, else it is pulled.
    pub(crate) fn model(&self, name: &str, fits: &Fits<'_>) -> Outcome<PathBuf> {
        let name: RepositoryName = name.parse()?;
        let settings = self.settings()?;
        let offline = settings.offline;
        match ModelCache::new(&settings.cache, &settings.shared_caches).find(&name) {
            Ok(Some(model)) => match model.files.into_iter().next() {
                Some(file) => Ok(file.path),
                None => Err(HubError::NotCached { name: name.to_string() }.into()),
            },
            // Another quantization may be on the hub.
            Err(HubError::QuantNotCached { .. }) if !offline => self.pull(&name, fits),
            Ok(None) => self.pull(&name, fits),
            Err(error) => Err(error.into()),
        }
    }

    /// The path of a file with a model's header: the model itself if it is in the cache, else one without weights, in a folder
    /// that exists as long as it is kept.
    pub(crate) fn header(&self, name: &str, fits: &Fits<'_>) -> Outcome<(PathBuf, Option<TempDir>)> {
        let name: RepositoryName = name.parse()?;
        let settings = self.settings()?;
        match ModelCache::new(&settings.cache, &settings.shared_caches).find(&name) {
            Ok(Some(model)) => match model.files.into_iter().next() {
                Some(file) => return Ok((file.path, None)),
                None => return Err(HubError::NotCached { name: name.to_string() }.into()),
            },
            Err(HubError::QuantNotCached { .. }) if !settings.offline => {}
            Ok(None) => {}
            Err(error) => return Err(error.into()),
        }
        let hub = Hub::new(settings)?;
        let listing = hub.list(&name)?;
        let choice = self.choose(&hub, &name, &listing, fits)?;
        let folder = temporary_folder()?;
        Ok((hub.outline(&listing, &choice, folder.path())?, Some(folder)))
    }

    /// Gets a model, or what is missing of it, and returns its path.
    pub(crate) fn pull(&self, name: &RepositoryName, fits: &Fits<'_>) -> Outcome<PathBuf> {
        let settings = self.settings()?;
        if settings.offline {
            let found = ModelCache::new(&settings.cache, &settings.shared_caches).find(name)?;
            let file = found.and_then(|model| model.files.into_iter().next());
            return file
                .map(|file| file.path)
                .ok_or_else(|| HubError::Offline { repository: name.path() }.into());
        }
        let hub = Hub::new(settings)?;
        let listing = hub.list(name)?;
        let choice = self.choose(&hub, name, &listing, fits)?;
        if !self.quiet {
            note!(
                "{}:{} ({}, commit {})",
                name.path(),
                choice.quant,
                size::text(choice.bytes),
                listing.commit.get(..8).unwrap_or_default()
            );
        }
        let paths = self.download(&hub, name, &listing, &choice.files)?;
        paths.into_iter().next().ok_or_else(|| HubError::NotCached { name: name.to_string() }.into())
    }

    /// Downloads files with a progress bar.
    pub(crate) fn download(
        &self,
        hub: &Hub,
        name: &RepositoryName,
        listing: &Listing,
        files: &[RemoteFile],
    ) -> Outcome<Vec<PathBuf>> {
        let ctrl_c = interrupt::catch();
        let bar = if self.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let style =
            ProgressStyle::with_template("{msg:11} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let pulled = hub.pull(name, listing, files, &mut |progress| {
            bar.set_message(match progress.stage {
                PullStage::Waiting => "waiting",
                PullStage::Downloading => "downloading",
                PullStage::Verifying => "verifying",
            });
            bar.set_length(progress.total);
            bar.set_position(progress.bytes);
            if ctrl_c.is_pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        bar.finish_and_clear();
        match pulled {
            Err(HubError::Cancelled) => Err(Failure::Interrupted),
            pulled => Ok(pulled?),
        }
    }

    /// The model of a repository that was asked for; where no type was, or one that is not there, the best that fits.
    fn choose(
        &self,
        hub: &Hub,
        name: &RepositoryName,
        listing: &Listing,
        fits: &Fits<'_>,
    ) -> Outcome<ModelChoice<RemoteFile>> {
        let chosen = hub.choose(name, listing, &mut |outline| fits(outline))?;
        if let Some(warning) = chosen.warning(name) {
            // Also where the user wants silence: it is another model than was asked for.
            note!("quadriga: {warning}");
        } else if name.quant().is_none() && chosen.known.len() > 1 && !self.quiet {
            note!(
                "quadriga: {} is the best of {} that fits in this machine's memory; {}:QUANT chooses another",
                chosen.model.quant,
                chosen.known.join(", "),
                name.path()
            );
        }
        Ok(chosen.model)
    }
}
