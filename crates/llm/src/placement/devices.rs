//! The devices that a model runs on: names, and the backends that they stand for.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use quadriga_cpu::numa::NumaMode;
use quadriga_runtime::Backend;

use crate::{Error, Result};

/// The name of a device that this crate can open by itself: `cpu`, `cuda:0`, `cuda:1` …
///
/// ```
/// use quadriga_llm::placement::DeviceName;
///
/// assert_eq!("CUDA".parse::<DeviceName>()?, DeviceName::Cuda(0));
/// assert_eq!(DeviceName::Cuda(1).to_string(), "cuda:1");
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceName {
    /// The CPU.
    Cpu,
    /// A CUDA device, by its ordinal.
    Cuda(u32),
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(name: &str) -> Result<DeviceName> {
        if name.eq_ignore_ascii_case(quadriga_cpu::NAME) {
            return Ok(DeviceName::Cpu);
        }
        let (kind, ordinal) = name.split_once(':').unwrap_or((name, "0"));
        match (kind.to_ascii_lowercase().as_str(), ordinal.parse()) {
            ("cuda", Ok(ordinal)) => Ok(DeviceName::Cuda(ordinal)),
            _ => Err(Error::UnknownDevice { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Cpu => f.write_str(quadriga_cpu::NAME),
            DeviceName::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// How the CPU backend is opened. A number of threads, or none, is one without the rest.
#[derive(Clone, Copy, Default, Debug)]
pub struct CpuOptions {
    /// Threads; `None`: one for each core, and where there are more than four and an accelerator, one less.
    pub threads: Option<usize>,
    /// The NUMA nodes that threads and weights are bound to, on machines with several; `None` leaves it to the system.
    pub numa: Option<NumaMode>,
}

impl From<Option<usize>> for CpuOptions {
    fn from(threads: Option<usize>) -> CpuOptions {
        CpuOptions { threads, numa: None }
    }
}

impl CpuOptions {
    /// Opens the CPU backend, alone or beside accelerators.
    pub fn open(self, beside_accelerator: bool) -> Result<Arc<quadriga_cpu::Backend>> {
        let mut builder = quadriga_cpu::Backend::builder().beside_accelerator(beside_accelerator);
        if let Some(threads) = self.threads {
            builder = builder.threads(threads);
        }
        if let Some(mode) = self.numa {
            builder = builder.numa(mode);
        }
        Ok(Arc::new(builder.build()?))
    }
}

/// The devices that a [`Placement`](super::Placement) uses.
#[derive(Clone, Default, Debug)]
pub enum DeviceList {
    /// The first CUDA device, where there is one that works, and the CPU.
    #[default]
    Auto,
    /// These devices, in order of preference. The CPU is always the last one, whether it is named or not.
    Named(Vec<DeviceName>),
    /// Backends that are open already, of whatever kind.
    Open(Devices),
}

impl DeviceList {
    /// Opens the devices. Those that are open already are returned as they are.
    pub fn open(&self, cpu: impl Into<CpuOptions>) -> Result<Devices> {
        match self {
            DeviceList::Auto => Devices::detect(cpu),
            DeviceList::Named(names) => {
                let cuda = names.iter().filter_map(|name| match name {
                    DeviceName::Cpu => None,
                    DeviceName::Cuda(ordinal) => Some(cuda(*ordinal)),
                });
                let accelerators = cuda.collect::<Result<Vec<_>>>()?;
                let cpu = cpu.into().open(!accelerators.is_empty())?;
                Devices::new(accelerators, cpu)
            }
            DeviceList::Open(devices) => Ok(devices.clone()),
        }
    }
}

/// Opened backends: accelerators in order of preference, then the CPU, which runs everything that they do not. Cheap to
/// clone.
#[derive(Clone)]
pub struct Devices {
    backends: Vec<Arc<dyn Backend>>,
    cpu: Arc<quadriga_cpu::Backend>,
    unusable: Option<Arc<Error>>,
}

impl Devices {
    /// Accelerators and the CPU.
    ///
    /// # Errors
    /// Two of them have the same name.
    pub fn new(
        accelerators: impl IntoIterator<Item = Arc<dyn Backend>>,
        cpu: Arc<quadriga_cpu::Backend>,
    ) -> Result<Devices> {
        let mut backends: Vec<Arc<dyn Backend>> = Vec::new();
        for backend in accelerators {
            let name = backend.name();
            if name == cpu.name() || backends.iter().any(|other| other.name() == name) {
                return Err(Error::DuplicateDevice { name: backend.name().to_owned() });
            }
            backends.push(backend);
        }
        backends.push(Arc::clone(&cpu) as Arc<dyn Backend>);
        Ok(Devices { backends, cpu, unusable: None })
    }

    /// The first CUDA device, where there is one that works, and the CPU. A device that is there but does not work is
    /// left out; [`Devices::unusable`] says why.
    pub fn detect(cpu: impl Into<CpuOptions>) -> Result<Devices> {
        Devices::detect_nth(0, cpu)
    }

    /// As [`Devices::detect`], for one of several processes of this machine, counted from 0: each has the CUDA device of its number, and
    /// those that are more than the devices begin again with the first.
    ///
    /// # Errors
    /// The CPU backend cannot be opened.
    pub fn detect_nth(process: usize, cpu: impl Into<CpuOptions>) -> Result<Devices> {
        let gpu = ordinal_of(process, cuda_count()).map(cuda);
        let cpu = cpu.into().open(matches!(gpu, Some(Ok(_))))?;
        match gpu {
            None => Devices::new([], cpu),
            Some(Ok(gpu)) => Devices::new([gpu], cpu),
            Some(Err(error)) => Ok(Devices { unusable: Some(Arc::new(error)), ..Devices::new([], cpu)? }),
        }
    }

    /// All backends, in the order in which a scheduler is to prefer them.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        &self.backends
    }

    /// The backends besides the CPU.
    pub fn accelerators(&self) -> &[Arc<dyn Backend>] {
        self.backends.split_last().map_or(&[], |(_, accelerators)| accelerators)
    }

    /// The CPU backend.
    pub fn cpu(&self) -> &Arc<quadriga_cpu::Backend> {
        &self.cpu
    }

    /// The names of all backends.
    pub fn names(&self) -> Vec<String> {
        self.backends.iter().map(|backend| backend.name().to_owned()).collect()
    }

    /// The reason why a GPU that [`Devices::detect`] found is not used.
    pub fn unusable(&self) -> Option<&Error> {
        self.unusable.as_deref()
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Devices").field(&self.names()).finish()
    }
}

impl DeviceName {
    /// Opens this device alone.
    pub fn open(self, cpu: impl Into<CpuOptions>) -> Result<Arc<dyn Backend>> {
        match self {
            DeviceName::Cpu => Ok(cpu.into().open(false)?),
            DeviceName::Cuda(ordinal) => cuda(ordinal),
        }
    }
}

/// The CUDA device of a process, of so many.
fn ordinal_of(process: usize, count: u32) -> Option<u32> {
    let number = process.checked_rem(count as usize)?;
    u32::try_from(number).ok()
}

#[cfg(feature = "cuda")]
fn cuda_count() -> u32 {
    quadriga_cuda::device_count().unwrap_or(0)
}

#[cfg(feature = "cuda")]
fn cuda(ordinal: u32) -> Result<Arc<dyn Backend>> {
    match quadriga_cuda::Backend::new(ordinal) {
        Ok(backend) => Ok(Arc::new(backend)),
        Err(error) => {
            Err(Error::Device { name: DeviceName::Cuda(ordinal).to_string(), source: error.into() })
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda_count() -> u32 {
    0
}

#[cfg(not(feature = "cuda"))]
fn cuda(ordinal: u32) -> Result<Arc<dyn Backend>> {
    let source = "this build has no CUDA backend".into();
    Err(Error::Device { name: DeviceName::Cuda(ordinal).to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::ordinal_of;

    #[test]
    fn processes_of_a_machine_have_one_gpu_after_the_other() {
        let found: Vec<Option<u32>> = (0..5).map(|process| ordinal_of(process, 4)).collect();
        assert_eq!(found, [Some(0), Some(1), Some(2), Some(3), Some(0)]);
        assert_eq!(ordinal_of(3, 1), Some(0));
        assert_eq!(ordinal_of(0, 0), None);
    }
}
