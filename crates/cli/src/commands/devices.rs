//! `quadriga devices`: lists available devices.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use quadriga::Registry;
use quadriga_llm::placement::Devices;
use quadriga_runtime::{Backend, DeviceKind};
use quadriga_view::Limits;
use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::{known_limits, size, terminal, values};

/// Arguments of `quadriga devices`.
#[derive(clap::Args)]
pub(crate) struct DevicesArgs {
    /// Measure memory bandwidth and matmul speed of each device and store them for estimates and --stats
    #[arg(long)]
    measure: bool,
    /// Number of CPU threads to measure with; the figures are used with the same number [default: as many as models use]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = values::threads)]
    threads: Option<usize>,
    /// Folder of the measured rates [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

/// Lists the devices that can be used, and the reason why others cannot.
pub(crate) fn devices(arguments: &DevicesArgs) -> Outcome {
    // As many threads as models have by default: beside a GPU not all cores.
    let cpu = Arc::clone(Devices::detect(arguments.threads)?.cpu());
    let (isa, threads) = (cpu.isa(), cpu.threads());
    drop(cpu);
    let (found, unusable) = Registry::with_threads(Some(threads)).open_all();
    let absent: Vec<(String, String)> =
        unusable.into_iter().map(|device| (device.name, device.reason.to_string())).collect();
    let cache = arguments.cache_dir.as_deref();
    if arguments.measure {
        let mut measured = Vec::new();
        for backend in &found {
            note!("measuring {} …", backend.name());
            let limits = quadriga_view::measure(backend, threads);
            measured.push(limits.map_err(|error| Failure::Message(format!("{}: {error}", backend.name())))?);
        }
        let path = known_limits::store(cache, &measured)?;
        note!("limits stored in {}", path.display());
    }
    let known = known_limits::load(cache);
    let limits = |backend: &dyn Backend| Some(Limits::of(backend, &known)).filter(|limits| limits.measured);
    let mut out = io::stdout().lock();
    if arguments.json {
        let devices: Vec<_> = found
            .iter()
            .map(|backend| {
                let device = backend.device();
                let own = device.kind != DeviceKind::Simulated;
                json!({
                    "name": backend.name(),
                    "description": device.description,
                    "total_bytes": device.total_bytes.filter(|_| own),
                    "free_bytes": device.free_bytes.filter(|_| own),
                    "isa": (device.kind == DeviceKind::Cpu).then(|| isa.name()),
                    "limits": limits(&**backend),
                })
            })
            .collect();
        let absent: Vec<_> =
            absent.iter().map(|(name, reason)| json!({ "name": name, "reason": reason })).collect();
        writeln!(out, "{}", terminal::json(&json!({ "devices": devices, "absent": absent })))?;
        return Ok(());
    }
    for backend in &found {
        let device = backend.device();
        let memory = match (device.free_bytes, device.total_bytes) {
            _ if device.kind == DeviceKind::Simulated => "host memory".to_owned(),
            (Some(free), Some(total)) => format!("{} of {} free", size::text(free), size::text(total)),
            (_, Some(total)) => size::text(total),
            _ => "unknown memory".to_owned(),
        };
        writeln!(out, "{:8} {} · {memory}", backend.name(), device.description)?;
        if let Some(limits) = limits(&**backend) {
            let spread = 100.0 * limits.conditions.spread;
            writeln!(out, "{:8} {} (spread {spread:.0} %)", "", limits.rates())?;
            if let Some(warning) = limits.warning() {
                writeln!(out, "{:8} {warning}", "")?;
            }
        }
    }
    for (name, reason) in &absent {
        writeln!(out, "{name:8} not available: {reason}")?;
    }
    Ok(())
}
