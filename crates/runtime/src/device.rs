//! Facts about devices and their memory.

/// What memory is used for. A backend may allocate each kind differently.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Usage {
    /// Parameters: written once, then only read.
    Weights,
    /// Tensors that outlive a run.
    State,
    /// Inputs, results and copies of one run.
    Compute,
    /// Host memory that transfers go through.
    Staging,
}

/// The kind of processor that a device is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceKind {
    /// The host's processor.
    Cpu,
    /// A graphics processor.
    Gpu,
    /// A device that is simulated in software.
    Simulated,
}

/// Facts about a device.
#[derive(Clone, Debug)]
pub struct Device {
    /// The vendor's name for it.
    pub description: String,
    /// Its kind.
    pub kind: DeviceKind,
    /// Whether queues return before their work is done.
    pub asynchronous: bool,
    /// All of its memory in bytes, if known.
    pub total_bytes: Option<u64>,
    /// Free bytes of it now, if known.
    pub free_bytes: Option<u64>,
}

/// The properties of a backend's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryFacts {
    /// Every tensor starts at a multiple of this; a power of two.
    pub alignment: usize,
    /// The most bytes one buffer can have, if there is a limit.
    pub max_buffer: Option<usize>,
    /// Whether the host can address the memory: then [`Buffer::read`](crate::Buffer::read) and [`Buffer::write`](crate::Buffer::write) cost a copy in memory.
    pub host: bool,
}
