//! The settings of a simulated device.

use std::fmt;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId};

/// How time passes on a simulated device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Clock {
    /// Virtual time: each queue adds up the seconds that its commands would take, and returns at once.
    #[default]
    Virtual,
    /// Real time: commands take as long as the settings say.
    Real,
    /// The host's clock: the time that the simulation itself takes; the settings' times are ignored.
    Host,
}

/// The reason to refuse a node, or `None`.
pub(crate) type Refuses = Arc<dyn Fn(&Graph, NodeId) -> Option<String> + Send + Sync>;

/// The settings of a simulated device, before it is [built](SimSettings::build).
///
/// ```
/// use quadriga_runtime::Backend;
/// use quadriga_sim::{Clock, Sim};
///
/// let sim = Sim::new("sim:0")
///     .capacity(64 << 20)
///     .alignment(256)
///     .clock(Clock::Virtual)
///     .copy_seconds(10e-6, 1.0 / 25e9)
///     .build();
/// assert_eq!(sim.device().total_bytes, Some(64 << 20));
/// ```
#[derive(Clone)]
pub struct SimSettings {
    pub(crate) name: String,
    pub(crate) asynchronous: bool,
    pub(crate) alignment: usize,
    pub(crate) padding: usize,
    pub(crate) scratch: usize,
    pub(crate) max_buffer: Option<usize>,
    pub(crate) capacity: u64,
    pub(crate) host: bool,
    pub(crate) peers: bool,
    pub(crate) isolated: bool,
    pub(crate) packs: bool,
    pub(crate) computes: bool,
    pub(crate) clock: Clock,
    pub(crate) node_seconds: f64,
    pub(crate) copy_seconds: f64,
    pub(crate) byte_seconds: f64,
    pub(crate) refuses: Option<Refuses>,
    pub(crate) check_order: bool,
    pub(crate) timed_polls: bool,
}

impl SimSettings {
    pub(crate) fn new(name: &str) -> SimSettings {
        SimSettings {
            name: name.to_owned(),
            asynchronous: true,
            alignment: 64,
            padding: 1,
            scratch: 0,
            max_buffer: None,
            capacity: 1 << 40,
            host: false,
            peers: true,
            isolated: false,
            packs: false,
            computes: true,
            clock: Clock::Virtual,
            node_seconds: 0.0,
            copy_seconds: 0.0,
            byte_seconds: 0.0,
            refuses: None,
            check_order: cfg!(debug_assertions),
            timed_polls: false,
        }
    }

    /// Checks that every access to device memory happens after the accesses it conflicts with, by events or waits of
    /// the host; a command that does not is refused with an error, whatever the timing, and so is everything after it
    /// ([`Sim::unordered_access`](crate::Sim::unordered_access)) [default: in debug builds].
    pub fn check_order(mut self, check: bool) -> SimSettings {
        self.check_order = check;
        self
    }

    /// Makes queues synchronous: a call returns when its work is done, as on the CPU.
    pub fn synchronous(mut self) -> SimSettings {
        self.asynchronous = false;
        self
    }

    /// Sets the alignment of tensors, a power of two [default: 64].
    pub fn alignment(mut self, bytes: usize) -> SimSettings {
        self.alignment = bytes.max(1).next_power_of_two();
        self
    }

    /// Pads the size of tensors to a multiple of this [default: 1].
    pub fn padding(mut self, bytes: usize) -> SimSettings {
        self.padding = bytes.max(1);
        self
    }

    /// Sets the scratch memory that programs need; each run overwrites it with garbage [default: 0].
    pub fn scratch(mut self, bytes: usize) -> SimSettings {
        self.scratch = bytes;
        self
    }

    /// Limits the size of a buffer [default: no limit].
    pub fn max_buffer(mut self, bytes: usize) -> SimSettings {
        self.max_buffer = Some(bytes);
        self
    }

    /// Sets the size of the memory [default: 1 TiB].
    pub fn capacity(mut self, bytes: u64) -> SimSettings {
        self.capacity = bytes;
        self
    }

    /// Makes the memory host memory, which other devices can access.
    pub fn host(mut self) -> SimSettings {
        self.host = true;
        self
    }

    /// Disables peer access to other simulated devices.
    pub fn without_peers(mut self) -> SimSettings {
        self.peers = false;
        self
    }

    /// Disables direct copies from and to any other memory, that of the host included.
    pub fn isolated(mut self) -> SimSettings {
        self.isolated = true;
        self.peers = false;
        self
    }

    /// Packs weights that are only used by `mul_mat` and `mul_mat_id`, and slices that are written into them.
    pub fn packs_weights(mut self) -> SimSettings {
        self.packs = true;
        self
    }

    /// Skips the computation, to measure everything around it.
    pub fn without_computing(mut self) -> SimSettings {
        self.computes = false;
        self
    }

    /// Sets how time passes [default: `Clock::Virtual`].
    pub fn clock(mut self, clock: Clock) -> SimSettings {
        self.clock = clock;
        self
    }

    /// Sets the time that a node takes [default: 0].
    pub fn node_seconds(mut self, seconds: f64) -> SimSettings {
        self.node_seconds = seconds;
        self
    }

    /// Sets the time that a transfer takes: a latency, and a time per byte unless it stays in the device's memory [default: 0].
    pub fn copy_seconds(mut self, each: f64, per_byte: f64) -> SimSettings {
        self.copy_seconds = each;
        self.byte_seconds = per_byte;
        self
    }

    /// Makes an event that the host polls count as reached only once the host has waited for something that is as late on the
    /// device's clock, and lets commands begin no earlier than they were enqueued: with a virtual clock, a copy in the background
    /// then takes as many steps as its time says, whatever the real timing. To poll takes no time.
    pub fn timed_polls(mut self) -> SimSettings {
        self.timed_polls = true;
        self
    }

    /// Refuses to compute the nodes for which this returns a reason.
    pub fn refuse(
        mut self,
        why: impl Fn(&Graph, NodeId) -> Option<String> + Send + Sync + 'static,
    ) -> SimSettings {
        self.refuses = Some(Arc::new(why));
        self
    }
}

impl fmt::Debug for SimSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulated device {}", self.name)
    }
}
