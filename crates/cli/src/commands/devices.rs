//! `quadriga devices`: lists available devices.

use std::io::{self, Write};
use std::path::PathBuf;

use quadriga::Registry;
use quadriga_runtime::{Backend, DeviceKind};
use quadriga_view::{Limits, format};
use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::{known_limits, size};

/// Arguments of `quadriga devices`.
#[derive(clap::Args)]
pub(crate) struct DevicesArgs {
    /// Measure memory bandwidth and matmul speed of each device and store them for estimates and --stats
    #[arg(long)]
    measure: bool,
    /// Folder of the measured rates [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

/// Lists the devices that can be used, and the reason why others cannot.
pub(crate) fn devices(arguments: &DevicesArgs) -> Outcome {
    let cpu = quadriga_cpu::Backend::new()?;
    let (isa, threads) = (cpu.isa(), cpu.threads());
    let (found, unusable) = Registry::default().open_all();
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
        writeln!(out, "{}", json!({ "devices": devices, "absent": absent }))?;
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
        if let Some(Limits { read, int8, bf16, f32, .. }) = limits(&**backend) {
            let [read, int8, bf16, f32] = [read, int8, bf16, f32].map(format::count);
            writeln!(
                out,
                "{:8} memory {read}B/s; matmul with 8-bit weights {int8}op/s, 16-bit {bf16}op/s, f32 {f32}op/s",
                ""
            )?;
        }
    }
    for (name, reason) in &absent {
        writeln!(out, "{name:8} not available: {reason}")?;
    }
    Ok(())
}
