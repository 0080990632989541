//! Where the models of a server come from: files that can be loaded, and whether there is memory for them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use quadriga_runtime::{Backend, Plan};

use crate::memory_fit::{MemoryDemand, MemoryShortage, memory_shortages};
use crate::model::ServedModel;

/// A model that can be loaded.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ModelEntry {
    /// The name by which clients ask for it.
    pub name: String,
    /// Other names by which they may.
    pub aliases: Vec<String>,
    /// Its file.
    pub path: PathBuf,
    /// The bytes of its file.
    pub bytes: u64,
    /// When the file was changed last.
    pub modified: Option<SystemTime>,
}

/// Why a model was not loaded.
#[derive(Clone, PartialEq, Debug)]
pub enum LoadError {
    /// By its plan it needs more memory than is free; nothing was allocated. It may fit once another model is unloaded.
    DoesNotFit(String),
    /// It cannot be loaded.
    Failed(String),
}

/// Finds and loads models. Its functions may block.
pub trait ModelLoader: Send + Sync + 'static {
    /// The models that can be loaded.
    fn entries(&self) -> Vec<ModelEntry>;

    /// Plans a model, and loads it if its memory is free.
    fn load(&self, name: &str) -> Result<ServedModel, LoadError>;

    /// Whether a model could be loaded if there was no other one, as far as its file and its plan tell. It is asked before
    /// another model has to make room.
    ///
    /// # Errors
    /// The file is broken, or the model needs more memory than there is.
    fn check(&self, name: &str) -> Result<(), LoadError> {
        let _ = name;
        Ok(())
    }

    /// Whether models may be added while the server runs, as to a folder.
    fn finds_models(&self) -> bool {
        false
    }

    /// A device was lost: those that the next model uses are opened anew.
    fn device_lost(&self) {}
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Whether every backend has the memory that a plan needs of it, now.
///
/// # Errors
/// Which backend has too little, and how much it has.
pub fn check_memory(forecast: &Plan, backends: &[Arc<dyn Backend>]) -> Result<(), String> {
    match memory_shortages(forecast, backends, MemoryDemand::Whole).first() {
        None => Ok(()),
        Some(MemoryShortage { backend, needed, available }) => Err(format!(
            "it needs {} MiB on {backend}, of which {} MiB are free; unload another model, or use a smaller context (-c) or KV cache (--kv-tokens)",
            mib(*needed),
            available >> 20
        )),
    }
}

/// Whether every backend has the memory that a plan needs of it if nothing else was loaded.
///
/// # Errors
/// Which backend has too little, and how much it has.
pub fn check_capacity(forecast: &Plan, backends: &[Arc<dyn Backend>]) -> Result<(), String> {
    match memory_shortages(forecast, backends, MemoryDemand::Alone).first() {
        None => Ok(()),
        Some(MemoryShortage { backend, needed, available }) => Err(format!(
            "it needs {} MiB on {backend}, which has {} MiB; use a smaller context (-c) or KV cache (--kv-tokens)",
            mib(*needed),
            available >> 20
        )),
    }
}
