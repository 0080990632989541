//! The results of `quadriga devices --measure`, stored in the cache folder.

use std::path::{Path, PathBuf};

use quadriga_llm::default_model::cache_folder;
use quadriga_llm::placement::{CpuOptions, Devices};
use quadriga_runtime::{DeviceKind, Rates};
use quadriga_view::Limits;

use crate::atomic_file::AtomicFile;
use crate::failure::{Failure, Outcome};

fn path(folder: Option<&Path>) -> Option<PathBuf> {
    let folder = folder.map(Path::to_owned).or_else(|| cache_folder().ok())?;
    Some(folder.join("limits.json"))
}

/// The limits measured on this machine; empty if there is no readable file.
pub(crate) fn load(folder: Option<&Path>) -> Vec<Limits> {
    let text = path(folder).and_then(|path| std::fs::read_to_string(path).ok());
    text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// The rates that were measured on devices, by name. A simulated device stands for a GPU, whatever it takes here.
pub(crate) fn rates(folder: Option<&Path>, devices: &Devices) -> Vec<(String, Rates)> {
    let known = load(folder);
    let real = devices.backends().iter().filter(|backend| backend.device().kind != DeviceKind::Simulated);
    let measured = real.map(|backend| Limits::of(&**backend, &known)).filter(|limits| limits.measured);
    measured.map(|limits| (limits.backend.clone(), limits.to_rates())).collect()
}

/// The rates of one of several ranks of this machine that compute at once, each with as many threads as the CPU backend of `devices`:
/// their part of what all of these threads reach together, if that was measured, else what one rank alone reaches.
pub(crate) fn rates_of_ranks(folder: Option<&Path>, devices: &Devices, ranks: usize) -> Vec<(String, Rates)> {
    let mut rates = rates(folder, devices);
    let cpu = devices.cpu();
    let together = CpuOptions { threads: Some(cpu.threads() * ranks), ..CpuOptions::default() }.open(false);
    let Some(all) = together.ok().map(|cpu| Limits::of(&*cpu, &load(folder))).filter(|all| all.measured)
    else {
        return rates;
    };
    let own = rates.iter().position(|(name, _)| *name == all.backend).map(|index| rates.swap_remove(index).1);
    let shared = all.share_of(ranks).to_rates();
    // A barrier is one of the rank's own threads.
    let launch = own.map_or(shared.launch, |own| own.launch);
    rates.push((all.backend, Rates { launch, ..shared }));
    rates
}

/// Stores new limits beside those of other devices and returns the path of the file.
pub(crate) fn store(folder: Option<&Path>, measured: &[Limits]) -> Outcome<PathBuf> {
    let Some(path) = path(folder) else {
        return Err(Failure::Message("no cache folder; name one with --cache-dir".into()));
    };
    let mut all = load(folder);
    all.retain(|old| !measured.iter().any(|new| (&new.backend, &new.device) == (&old.backend, &old.device)));
    all.extend_from_slice(measured);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(|error| Failure::file("create", parent, &error))?;
    }
    AtomicFile::write_text(&path, &serde_json::to_string_pretty(&all)?)?;
    Ok(path)
}
