//! Backends by their names on the command line.

use std::sync::Arc;

use quadriga::{OpenError, Registry};
use quadriga_llm::Error;
use quadriga_llm::placement::{CpuOptions, Devices};
use quadriga_runtime::{Backend, DeviceKind, Plan};
use quadriga_server::{MemoryDemand, MemoryShortage, memory_shortages};

use crate::failure::{Failure, Outcome};
use crate::{ranks, size};

/// The devices with these names; without names the first GPU, if there is one, or that of this process's number among the ranks of its machine. The CPU is always the last.
pub(crate) fn open(names: &[String], options: CpuOptions, quiet: bool) -> Outcome<Devices> {
    if names.is_empty() {
        // Ranks of one machine have one GPU after the other.
        let devices = Devices::detect_nth(ranks::number_on_host(), options)?;
        if let Some(Error::Device { source, .. }) = devices.unusable().filter(|_| !quiet) {
            note!("quadriga: continuing without the GPU: {source}");
        }
        return Ok(devices);
    }
    // As in llama.cpp, none stands for no GPU.
    let is_cpu = |name: &str| [quadriga_cpu::NAME, "none"].iter().any(|cpu| name.eq_ignore_ascii_case(cpu));
    let accelerators = names.iter().filter(|name| !is_cpu(name));
    let accelerators =
        accelerators.map(|name| open_one(name, options.threads)).collect::<Outcome<Vec<_>>>()?;
    // A simulated device has no driver.
    let drives = |backend: &Arc<dyn Backend>| backend.device().kind == DeviceKind::Gpu;
    let cpu = options.open(accelerators.iter().any(drives))?;
    Devices::new(accelerators, cpu).map_err(|error| Failure::Usage(error.to_string()))
}

/// One device by name, for commands that use it alone.
pub(crate) fn open_one(name: &str, threads: Option<usize>) -> Outcome<Arc<dyn Backend>> {
    // llama.cpp's CUDA0 is cuda:0.
    let lower = name.to_ascii_lowercase();
    let number = lower.strip_prefix("cuda").filter(|number| number.parse::<usize>().is_ok());
    let name = &number.map_or_else(|| name.to_owned(), |number| format!("cuda:{number}"));
    Registry::with_threads(threads).open(name).map_err(|error| match error {
        OpenError::Unknown { .. } => Failure::Usage(error.to_string()),
        error => Failure::Message(error.to_string()),
    })
}

/// Warns of every device that has less free memory than a plan needs.
pub(crate) fn warn_if_short(plan: &Plan, backends: &[Arc<dyn Backend>]) {
    for MemoryShortage { backend, needed, available } in memory_shortages(plan, backends, MemoryDemand::Whole)
    {
        let bytes = plan.bytes();
        let own = backends.iter().zip(&bytes).find(|(own, _)| own.name() == backend);
        let weights = own.map_or(0, |(_, bytes)| bytes.weights);
        let way_out = match weights > available {
            true => {
                "its weights alone take more: a quantized model (`quadriga quantize`), more of it on a GPU, or several machines (mpirun; `quadriga plan --ranks N`)"
            }
            false => "a smaller context (-c) or batch (-b) needs less",
        };
        note!(
            "quadriga: {backend} needs {}, but only {} are free; {way_out}",
            size::text(needed),
            size::text(available)
        );
    }
}
