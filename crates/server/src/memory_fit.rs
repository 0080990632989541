//! Whether the memory that a plan needs is there.

use std::sync::Arc;

use quadriga_runtime::{Backend, DeviceKind, Plan};

/// A backend that has less memory than a plan needs of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryShortage {
    /// The backend's name.
    pub backend: String,
    /// Bytes that are needed.
    pub needed: u64,
    /// Bytes that there are.
    pub available: u64,
}

/// What a plan's memory is compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryDemand {
    /// All of it, with what is free now and reserved by no other model.
    Whole,
    /// All but states, with what is free now, swap space included: a KV cache of a size that nobody chose is memory that is taken as
    /// it is used.
    WithoutStates,
    /// All of it, with what the devices have if nothing else was loaded.
    Alone,
}

/// The backends that have too little memory for a plan.
pub fn memory_shortages(
    plan: &Plan,
    backends: &[Arc<dyn Backend>],
    demand: MemoryDemand,
) -> Vec<MemoryShortage> {
    let of = |(bytes, backend): (&quadriga_runtime::BackendBytes, &Arc<dyn Backend>)| {
        let device = backend.device();
        // A KV cache of another model is taken, though nothing may have been written to most of it.
        let free = || Some(device.free_bytes?.saturating_sub(backend.reserved_bytes()));
        let (needed, available) = match demand {
            MemoryDemand::Whole => (bytes.total(), free()?),
            MemoryDemand::WithoutStates => {
                let swap = if device.kind == DeviceKind::Cpu { free_swap() } else { 0 };
                (bytes.total().saturating_sub(bytes.state), free()?.saturating_add(swap))
            }
            MemoryDemand::Alone => (bytes.total(), device.total_bytes?),
        };
        let backend = backend.name().to_owned();
        (needed > available).then_some(MemoryShortage { backend, needed, available })
    };
    plan.bytes().iter().zip(backends).filter_map(of).collect()
}

/// Bytes that a plan takes of devices other than the host's memory.
pub fn device_bytes(plan: &Plan, backends: &[Arc<dyn Backend>]) -> u64 {
    let is_device = |backend: &Arc<dyn Backend>| backend.device().kind != DeviceKind::Cpu;
    let bytes = plan.bytes().into_iter().zip(backends).filter(|(_, backend)| is_device(backend));
    bytes.map(|(bytes, _)| bytes.total()).sum()
}

/// Free bytes of the swap space, as far as the system tells.
fn free_swap() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("SwapFree:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kibibytes.unwrap_or(0).saturating_mul(1024)
}
