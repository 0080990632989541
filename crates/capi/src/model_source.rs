//! Where a model comes from: a file, the cache, a hub, or the default model.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use quadriga::llm::{EngineOptions, Model, Placement, default_model};
use quadriga::models::hub::{Hub, HubError, HubSettings, ModelCache, RepositoryName};
use quadriga::runtime::Backend;

use crate::status::{Failure, Outcome, QD_STATUS_CALLBACK, QD_STATUS_INVALID_ARGUMENT, QD_STATUS_NOT_FOUND};

/// Is told bytes done and in all; false ends the download.
pub(crate) type DownloadProgress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// The file of a model: an existing file, else a repository's name; the default model without a name.
pub(crate) fn find(
    name: Option<&str>,
    cache: Option<&Path>,
    offline: bool,
    progress: &mut DownloadProgress<'_>,
) -> Outcome<PathBuf> {
    let Some(name) = name else {
        let mut stopped = false;
        let fetched = default_model::fetch(cache, &mut |_| {
            stopped |= !progress(0, 0);
            if stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        return fetched.map_err(|error| match stopped {
            true => Failure::new(QD_STATUS_CALLBACK, "the download was stopped"),
            false => error.into(),
        });
    };
    if name.is_empty() {
        let message = "the name of the model is empty; it is a file, ORG/REPO or ORG/REPO:QUANT of a hub, or NULL for the default model";
        return Err(Failure::new(QD_STATUS_INVALID_ARGUMENT, message));
    }
    let path = Path::new(name);
    if path.exists() {
        return Ok(path.to_owned());
    }
    let is_path = name.ends_with(".gguf") || name.starts_with(['/', '.']) || name.matches('/').count() != 1;
    if is_path {
        let message =
            format!("there is no file {name}; a model of a hub is named ORG/REPO or ORG/REPO:QUANT");
        return Err(Failure::new(QD_STATUS_NOT_FOUND, message));
    }
    let settings = HubSettings::from_environment(cache)?;
    let settings = HubSettings { offline: settings.offline || offline, ..settings };
    let name: RepositoryName = name.parse()?;
    match ModelCache::new(&settings.cache, &settings.shared_caches).find(&name) {
        Ok(Some(model)) => {
            let first = model.files.into_iter().next();
            first.map(|file| file.path).ok_or_else(|| HubError::NotCached { name: name.to_string() }.into())
        }
        // Another quantization may be on the hub.
        Err(error @ HubError::QuantNotCached { .. }) if settings.offline => Err(error.into()),
        Ok(None) | Err(HubError::QuantNotCached { .. }) => pull(&name, settings, progress),
        Err(error) => Err(error.into()),
    }
}

fn pull(
    name: &RepositoryName,
    settings: HubSettings,
    progress: &mut DownloadProgress<'_>,
) -> Outcome<PathBuf> {
    let hub = Hub::new(settings)?;
    let listing = hub.list(name)?;
    let chosen = hub.choose(name, &listing, &mut fits)?;
    let paths = hub.pull(name, &listing, &chosen.model.files, &mut |pulled| {
        if progress(pulled.bytes, pulled.total) { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    paths.into_iter().next().ok_or_else(|| HubError::NotCached { name: name.to_string() }.into())
}

/// Whether a model, of which there is a file without weights, fits in the free memory of the devices.
fn fits(outline: &Path) -> Outcome<bool> {
    let model = Model::open(outline)?;
    let placement = Placement::default();
    let devices = placement.open_devices()?;
    let needed = placement.plan(&model, &devices, &EngineOptions::default())?.forecast.bytes();
    let enough = |(bytes, backend): (&quadriga::runtime::BackendBytes, &std::sync::Arc<dyn Backend>)| {
        backend.device().free_bytes.is_none_or(|free| bytes.total() + bytes.mapped <= free)
    };
    Ok(needed.iter().zip(devices.backends()).all(enough))
}
