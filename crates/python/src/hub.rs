//! The files of a repository of the hub.

use std::path::PathBuf;

use pyo3::prelude::*;
use quadriga_models::hub::{Hub, HubSettings, ModelCache, RepositoryName};

use crate::detached::interruptible;

/// The names of a repository's files: those of the hub, or without the network those of its models in the cache.
#[pyfunction]
#[pyo3(signature = (name, cache_dir=None, offline=false))]
pub(crate) fn hub_files(
    py: Python<'_>,
    name: String,
    cache_dir: Option<PathBuf>,
    offline: bool,
) -> PyResult<Vec<String>> {
    Ok(interruptible(py, move |_| {
        let name: RepositoryName = name.parse()?;
        let settings = HubSettings::from_environment(cache_dir.as_deref())?;
        if settings.offline || offline {
            let models = ModelCache::new(&settings.cache, &settings.shared_caches).models()?;
            let own = models.into_iter().filter(|model| model.repository == name.path());
            return Ok(own.flat_map(|model| model.files).map(|file| file.name).collect());
        }
        let listing = Hub::new(settings)?.list(&name)?;
        Ok(listing.files.into_iter().map(|file| file.name).collect())
    })?)
}
