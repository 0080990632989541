//! Names of devices on the command line, and the backends they stand for.

use std::sync::Arc;

use quadriga_cuda::CudaBackend;
use quadriga_runtime::Backend;
use quadriga_sim::{Clock, Sim};

use crate::failure::{Failure, Outcome};

/// The backends of a command: accelerators in the order they were named, the CPU last.
pub(crate) struct Backends {
    /// All of them.
    pub(crate) all: Vec<Arc<dyn Backend>>,
    /// The CPU once more, for what only it knows.
    pub(crate) cpu: Arc<quadriga_cpu::Backend>,
}

impl Backends {
    /// The backends with these names; without names the first CUDA device, where there is one. The CPU always takes
    /// what is left.
    pub(crate) fn open(names: &[String], threads: Option<usize>) -> Outcome<Backends> {
        let mut all: Vec<Arc<dyn Backend>> = Vec::new();
        for name in names.iter().filter(|name| !name.eq_ignore_ascii_case(quadriga_cpu::NAME)) {
            let backend = accelerator(name)?;
            if all.iter().any(|other| other.name() == backend.name()) {
                return Err(Failure::Usage(format!("the device {} is named twice", backend.name())));
            }
            all.push(backend);
        }
        if names.is_empty() && quadriga_cuda::device_count().is_ok_and(|count| count > 0) {
            match CudaBackend::new(0) {
                Ok(backend) => all.push(Arc::new(backend)),
                Err(error) => eprintln!("quadriga: going on without the GPU: {error}"),
            }
        }
        let cpu = cpu(threads)?;
        all.push(Arc::clone(&cpu) as Arc<dyn Backend>);
        Ok(Backends { all, cpu })
    }

    /// How many devices there are besides the CPU.
    pub(crate) fn accelerators(&self) -> usize {
        self.all.len().saturating_sub(1)
    }

    /// Their names.
    pub(crate) fn names(&self) -> Vec<String> {
        self.all.iter().map(|backend| backend.name().to_owned()).collect()
    }
}

/// One device by name, for commands that use it alone.
pub(crate) fn open_one(name: &str, threads: Option<usize>) -> Outcome<Arc<dyn Backend>> {
    if name.eq_ignore_ascii_case(quadriga_cpu::NAME) { Ok(cpu(threads)?) } else { accelerator(name) }
}

fn cpu(threads: Option<usize>) -> Outcome<Arc<quadriga_cpu::Backend>> {
    let builder = quadriga_cpu::Backend::builder();
    let builder = if let Some(threads) = threads { builder.threads(threads) } else { builder };
    Ok(Arc::new(builder.build()?))
}

/// A simulated device, whose time is the time that it really takes.
pub(crate) fn simulated(name: &str) -> Arc<dyn Backend> {
    Sim::new(name).clock(Clock::Host).build()
}

fn accelerator(name: &str) -> Outcome<Arc<dyn Backend>> {
    let (kind, number) = name.split_once(':').unwrap_or((name, "0"));
    let number = number.parse::<u32>().ok();
    match (kind.to_ascii_lowercase().as_str(), number) {
        ("sim", Some(number)) => Ok(simulated(&format!("sim:{number}"))),
        ("cuda", Some(number)) => match CudaBackend::new(number) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(error) => Err(Failure::Message(format!("cannot use the device {name}: {error}"))),
        },
        _ => Err(Failure::Usage(format!(
            "there is no device \"{name}\"; devices are cpu, sim, cuda:0, cuda:1 …"
        ))),
    }
}
