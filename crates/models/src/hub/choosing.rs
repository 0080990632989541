//! Which model of a repository is meant: that of the quantization in its name, or the best that fits in the machine's memory.

use std::path::Path;

use super::client::Hub;
use super::error::{HubError, HubResult, io_error};
use super::listing::{Listing, RemoteFile};
use super::name::RepositoryName;
use super::selection::{ModelChoice, choices, find_choice};

/// A model that was chosen among those of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenModel {
    /// The model.
    pub model: ModelChoice<RemoteFile>,
    /// The types of quantization of all, the largest first.
    pub known: Vec<String>,
    /// The type that was asked for, if the repository does not have it.
    pub missing: Option<String>,
}

impl ChosenModel {
    /// What a user has to know who asked for another type than was chosen.
    pub fn warning(&self, name: &RepositoryName) -> Option<String> {
        let missing = self.missing.as_ref()?;
        Some(format!(
            "{} has no {missing}, only {}: {} is taken, the best of them that fits in this machine's memory",
            name.path(),
            self.known.join(", "),
            self.model.quant
        ))
    }
}

impl Hub {
    /// The model of a repository that a name stands for. Where the name has no quantization, or one that the repository does not
    /// have, it is the largest that fits; plain floats only if there is nothing else. `fits` is given a file with the header of a
    /// model and no weights.
    ///
    /// # Errors
    /// There is no model, or none fits; an error of `fits`.
    pub fn choose<E: From<HubError>>(
        &self,
        name: &RepositoryName,
        listing: &Listing,
        fits: &mut dyn FnMut(&Path) -> Result<bool, E>,
    ) -> Result<ChosenModel, E> {
        let all = choices(&listing.files, |file| &file.name, |file| file.bytes);
        let known: Vec<String> = all.iter().map(|choice| choice.quant.clone()).collect();
        if let Some(found) = name.quant().and_then(|quant| find_choice(&all, quant, |file| &file.name)) {
            return Ok(ChosenModel { model: found.clone(), known, missing: None });
        }
        let has_quantized = all.iter().any(|choice| !choice.is_unquantized());
        let mut smallest = None;
        for choice in all.iter().filter(|choice| !has_quantized || !choice.is_unquantized()) {
            smallest = Some(choice);
            let folder = temporary_folder()?;
            if fits(&self.outline(listing, choice, folder.path())?)? {
                let missing = name.quant().map(str::to_owned);
                return Ok(ChosenModel { model: choice.clone(), known, missing });
            }
        }
        let repository = name.path();
        Err(match smallest {
            Some(smallest) => HubError::NothingFits { repository, smallest: smallest.quant.clone() },
            None => {
                let files = listing.files.iter().map(|file| file.name.clone()).collect();
                HubError::NoModel { repository, files }
            }
        }
        .into())
    }
}

fn temporary_folder() -> HubResult<tempfile::TempDir> {
    tempfile::tempdir().map_err(io_error("create a folder in", std::env::temp_dir()))
}
