//! The options that name a model of the hub, for commands that read its file and do not run it.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::Outcome;
use crate::fetch;
use crate::hub::HubAccess;
use crate::model_options::ModelOptions;
use quadriga_models::hub::DEFAULT;

/// A model of the hub in place of a file.
#[derive(Clone, Default, Args)]
pub(crate) struct HubModel {
    /// Model of Hugging Face's hub in place of the file, which is left out, also -hf: downloaded once into the cache; without
    /// :QUANT, or where the repository does not have it, the best that fits in this machine's memory
    #[arg(long, value_name = "ORG/REPO[:QUANT]")]
    hf_repo: Option<String>,
    /// Use models in the cache only [default: HF_HUB_OFFLINE]
    #[arg(long)]
    offline: bool,
    /// Folder of downloaded models
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

impl HubModel {
    /// Whether the model is one of the hub.
    pub(crate) fn is_given(&self) -> bool {
        self.hf_repo.is_some()
    }

    /// The file of the model: that of the hub, which is downloaded if it is not cached, or else the one that an argument names.
    pub(crate) fn path(&self, file: &Path, quiet: bool) -> Outcome<PathBuf> {
        let cache = self.cache_dir.as_deref();
        match self.hf_repo.as_deref() {
            None => fetch::model_path(file, cache, quiet),
            Some(DEFAULT) => fetch::model_path(Path::new(DEFAULT), cache, quiet),
            Some(name) => {
                let options = ModelOptions::detected(self.cache_dir.clone());
                let access = HubAccess { cache, offline: self.offline, quiet };
                access.model(name, &|outline| options.fits(outline))
            }
        }
    }
}
