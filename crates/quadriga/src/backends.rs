//! Backends by name.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::runtime::Backend;

/// Opens backends of one kind, such as all CUDA devices.
///
/// A backend of one's own takes part in a [`Registry`] by implementing this.
pub trait Family: Send + Sync {
    /// The name of the kind, in lower case and without a colon: `cuda`.
    fn name(&self) -> &str;

    /// How many devices this machine has. They are called `name:0`, `name:1` …; where there is never more than one, `name`
    /// alone (see [`Family::is_single`]).
    ///
    /// # Errors
    /// The reason why devices of this kind cannot be used at all, such as a missing driver.
    fn count(&self) -> Result<u32, Reason>;

    /// Opens a device by its number.
    ///
    /// # Errors
    /// The reason why this device cannot be used.
    fn open(&self, number: u32) -> Result<Arc<dyn Backend>, Reason>;

    /// Whether there is at most one device of this kind; its name is the kind alone then: `cpu`, not `cpu:0`.
    fn is_single(&self) -> bool {
        false
    }
}

/// Why a device cannot be used.
pub type Reason = Box<dyn Error + Send + Sync>;

/// A backend that could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no kind of this name, or the number is none.
    Unknown {
        /// The name given.
        name: String,
        /// The names that can be opened on this machine.
        known: Vec<String>,
    },
    /// The device is not there, or does not work.
    Unusable {
        /// The name given.
        name: String,
        /// Why.
        reason: Reason,
        /// The names that can be opened on this machine.
        known: Vec<String>,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Unknown { name, known } => {
                write!(f, "there is no device \"{name}\"; this machine has {}", known.join(", "))
            }
            OpenError::Unusable { name, reason, known } => {
                write!(f, "{name} cannot be used: {reason}; this machine has {}", known.join(", "))
            }
        }
    }
}

impl Error for OpenError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            OpenError::Unknown { .. } => None,
            OpenError::Unusable { reason, .. } => Some(&**reason),
        }
    }
}

/// A device, or a kind without devices, and why it cannot be used.
#[derive(Debug)]
pub struct Unusable {
    /// `cuda:1`, or `cuda` if there is none at all.
    pub name: String,
    /// Why.
    pub reason: Reason,
}

/// The kinds of backends that a program can open by name: `cpu`, `cuda:0` …, with the feature `sim` also `sim:0` …, and
/// those that the program adds.
///
/// ```
/// use quadriga::Registry;
/// use quadriga::runtime::Scheduler;
///
/// let registry = Registry::default();
/// println!("{}", registry.names().join(", ")); // those of this machine: cpu, cuda:0
/// let cpu = registry.open("cpu")?;
/// let scheduler = Scheduler::new(cpu);
///
/// let error = registry.open("npu").unwrap_err();
/// assert!(error.to_string().starts_with("there is no device \"npu\"; this machine has cpu"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Registry {
    families: Vec<Box<dyn Family>>,
}

impl Default for Registry {
    /// All kinds that this crate was built with.
    fn default() -> Registry {
        Registry::with_threads(None)
    }
}

impl Registry {
    /// A registry of nothing.
    pub fn empty() -> Registry {
        Registry { families: Vec::new() }
    }

    /// As [`Registry::default`], with this number of threads for the CPU; `None`: one for each core.
    pub fn with_threads(threads: Option<usize>) -> Registry {
        let registry = Registry::empty().register(Cpu { threads });
        #[cfg(feature = "cuda")]
        let registry = registry.register(Cuda);
        #[cfg(feature = "sim")]
        let registry = registry.register(Simulated);
        registry
    }

    /// Adds a kind of backends; it takes precedence over an earlier one of the same name.
    #[must_use]
    pub fn register(mut self, family: impl Family + 'static) -> Registry {
        self.families.retain(|other| other.name() != family.name());
        self.families.push(Box::new(family));
        self
    }

    /// The names of all devices that this machine has, in the order in which the kinds were added. They are not opened.
    pub fn names(&self) -> Vec<String> {
        let of = |family: &dyn Family| {
            let count = family.count().unwrap_or(0);
            (0..count).map(|number| device_name(family, number)).collect::<Vec<_>>()
        };
        self.families.iter().flat_map(|family| of(&**family)).collect()
    }

    /// Opens a device. Upper and lower case are the same, and a kind without a number is its first device.
    ///
    /// # Errors
    /// There is no such device, or it cannot be used; the error lists the names of this machine.
    pub fn open(&self, name: &str) -> Result<Arc<dyn Backend>, OpenError> {
        let lower = name.to_ascii_lowercase();
        let (kind, number) = match lower.split_once(':') {
            Some((kind, number)) => (kind, number.parse::<u32>().ok().filter(|_| !number.starts_with('+'))),
            None => (lower.as_str(), Some(0)),
        };
        let unknown = || OpenError::Unknown { name: name.to_owned(), known: self.names() };
        let family = self.families.iter().find(|family| family.name() == kind).ok_or_else(unknown)?;
        // The only device of its kind is `cpu`; there is no `cpu:0`.
        let number = number.filter(|_| !family.is_single() || kind == lower).ok_or_else(unknown)?;
        family.open(number).map_err(|reason| OpenError::Unusable {
            name: device_name(&**family, number),
            reason,
            known: self.names(),
        })
    }

    /// Opens every device of this machine, and lists what cannot be used.
    pub fn open_all(&self) -> (Vec<Arc<dyn Backend>>, Vec<Unusable>) {
        let (mut open, mut unusable) = (Vec::new(), Vec::new());
        for family in &self.families {
            match family.count() {
                Ok(0) => {
                    let reason = "no device found".into();
                    unusable.push(Unusable { name: family.name().to_owned(), reason });
                }
                Ok(count) => {
                    for number in 0..count {
                        match family.open(number) {
                            Ok(backend) => open.push(backend),
                            Err(reason) => {
                                unusable.push(Unusable { name: device_name(&**family, number), reason });
                            }
                        }
                    }
                }
                Err(reason) => unusable.push(Unusable { name: family.name().to_owned(), reason }),
            }
        }
        (open, unusable)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.families.iter().map(|family| family.name())).finish()
    }
}

fn device_name(family: &dyn Family, number: u32) -> String {
    if family.is_single() { family.name().to_owned() } else { format!("{}:{number}", family.name()) }
}

struct Cpu {
    threads: Option<usize>,
}

impl Family for Cpu {
    fn name(&self) -> &str {
        crate::cpu::NAME
    }

    fn count(&self) -> Result<u32, Reason> {
        Ok(1)
    }

    fn open(&self, _: u32) -> Result<Arc<dyn Backend>, Reason> {
        let builder = crate::cpu::Backend::builder();
        let builder = if let Some(threads) = self.threads { builder.threads(threads) } else { builder };
        Ok(Arc::new(builder.build()?))
    }

    fn is_single(&self) -> bool {
        true
    }
}

#[cfg(feature = "cuda")]
struct Cuda;

#[cfg(feature = "cuda")]
impl Family for Cuda {
    fn name(&self) -> &str {
        "cuda"
    }

    fn count(&self) -> Result<u32, Reason> {
        Ok(crate::cuda::device_count()?)
    }

    fn open(&self, number: u32) -> Result<Arc<dyn Backend>, Reason> {
        Ok(Arc::new(crate::cuda::Backend::new(number)?))
    }
}

/// Simulated devices. There are as many as one opens; one is listed.
#[cfg(feature = "sim")]
struct Simulated;

#[cfg(feature = "sim")]
impl Family for Simulated {
    fn name(&self) -> &str {
        "sim"
    }

    fn count(&self) -> Result<u32, Reason> {
        Ok(1)
    }

    fn open(&self, number: u32) -> Result<Arc<dyn Backend>, Reason> {
        let settings = crate::sim::Sim::new(&format!("sim:{number}"));
        Ok(settings.clock(crate::sim::Clock::Host).build())
    }
}
