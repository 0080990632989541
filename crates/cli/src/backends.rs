//! Backends by their names on the command line.

use std::sync::Arc;

use quadriga_llm::Error;
use quadriga_llm::placement::{DeviceName, Devices};
use quadriga_runtime::{Backend, Plan};
use quadriga_sim::{Clock, Sim};

use crate::failure::{Failure, Outcome};
use crate::size;

/// The devices with these names; without names the first GPU, if there is one. The CPU is always the last.
pub(crate) fn open(names: &[String], threads: Option<usize>) -> Outcome<Devices> {
    if names.is_empty() {
        let devices = Devices::detect(threads)?;
        if let Some(Error::Device { source, .. }) = devices.unusable() {
            note!("quadriga: continuing without the GPU: {source}");
        }
        return Ok(devices);
    }
    let accelerators = names.iter().filter(|name| !name.eq_ignore_ascii_case(quadriga_cpu::NAME));
    let accelerators = accelerators.map(|name| open_one(name, threads)).collect::<Outcome<Vec<_>>>()?;
    let cpu = quadriga_cpu::Backend::builder();
    let cpu = if let Some(threads) = threads { cpu.threads(threads) } else { cpu };
    Devices::new(accelerators, Arc::new(cpu.build()?)).map_err(|error| Failure::Usage(error.to_string()))
}

/// One device by name, for commands that use it alone.
pub(crate) fn open_one(name: &str, threads: Option<usize>) -> Outcome<Arc<dyn Backend>> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    if let (true, Ok(number)) = (kind.eq_ignore_ascii_case("sim"), number.parse::<u32>()) {
        return Ok(simulated(&format!("sim:{number}")));
    }
    let unknown = |_| Failure::Usage(format!("no device \"{name}\"; devices are cpu, cuda:N and sim"));
    Ok(name.parse::<DeviceName>().map_err(unknown)?.open(threads)?)
}

/// A simulated device with the host's clock.
pub(crate) fn simulated(name: &str) -> Arc<dyn Backend> {
    Sim::new(name).clock(Clock::Host).build()
}

/// Warns of every device that has less free memory than a plan needs.
pub(crate) fn warn_if_short(plan: &Plan, backends: &[Arc<dyn Backend>]) {
    for (bytes, backend) in plan.bytes().iter().zip(backends) {
        if let Some(free) = backend.device().free_bytes.filter(|free| bytes.total() > *free) {
            note!(
                "quadriga: {} needs {}, but only {} are free; a smaller context (-c) or batch (-b) needs less",
                backend.name(),
                size::text(bytes.total()),
                size::text(free)
            );
        }
    }
}
