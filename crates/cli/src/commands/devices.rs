//! `quadriga devices`: what there is to run on.

use std::io::{self, Write};
use std::sync::Arc;

use quadriga_cuda::CudaBackend;
use quadriga_runtime::{Backend, DeviceKind};
use serde_json::json;

use crate::failure::Outcome;
use crate::size;

/// How to list them.
#[derive(clap::Args)]
pub(crate) struct Devices {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists the devices that can be used, and says why others cannot.
pub(crate) fn devices(arguments: &Devices) -> Outcome {
    let cpu = Arc::new(quadriga_cpu::Backend::new()?);
    let isa = cpu.isa();
    let mut found: Vec<Arc<dyn Backend>> = vec![cpu];
    let mut absent = Vec::new();
    match quadriga_cuda::device_count() {
        Ok(0) => absent.push(("cuda".to_owned(), "the driver knows no device".to_owned())),
        Ok(count) => {
            for number in 0..count {
                match CudaBackend::new(number) {
                    Ok(backend) => found.push(Arc::new(backend)),
                    Err(error) => absent.push((format!("cuda:{number}"), error.to_string())),
                }
            }
        }
        Err(error) => absent.push(("cuda".to_owned(), error.to_string())),
    }
    found.push(quadriga_sim::Sim::new("sim:0").build());
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
            _ if device.kind == DeviceKind::Simulated => "the host's memory".to_owned(),
            (Some(free), Some(total)) => format!("{} of {} free", size::text(free), size::text(total)),
            (_, Some(total)) => size::text(total),
            _ => "unknown memory".to_owned(),
        };
        writeln!(out, "{:8} {} · {memory}", backend.name(), device.description)?;
    }
    for (name, reason) in &absent {
        writeln!(out, "{name:8} absent: {reason}")?;
    }
    Ok(())
}
