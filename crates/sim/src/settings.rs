//! What a simulated device is like.

use std::fmt;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId};
use quadriga_runtime::Backend;

use crate::device::Sim;

/// What time is on a simulated device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Clock {
    /// Computed: each queue counts the seconds that its work would take, and nobody waits for them to pass.
    #[default]
    Virtual,
    /// The device really takes its time.
    Real,
    /// The host's: the time that the work really takes, however long it would have taken.
    Host,
}

/// Says why a node is refused, if it is.
pub(crate) type Refuses = Arc<dyn Fn(&Graph, NodeId) -> Option<String> + Send + Sync>;

/// The settings of a simulated device, before it is [built](Settings::build).
#[derive(Clone)]
pub struct Settings {
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
}

impl Settings {
    pub(crate) fn new(name: &str) -> Settings {
        Settings {
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
        }
    }

    /// Does all work before a call returns, as the host's own processor does.
    pub fn synchronous(mut self) -> Settings {
        self.asynchronous = false;
        self
    }

    /// Every tensor starts at a multiple of this power of two. 64 unless set.
    pub fn alignment(mut self, bytes: usize) -> Settings {
        self.alignment = bytes.max(1).next_power_of_two();
        self
    }

    /// Tensors take a whole multiple of this many bytes. 1 unless set.
    pub fn padding(mut self, bytes: usize) -> Settings {
        self.padding = bytes.max(1);
        self
    }

    /// Programs need so many bytes to work in, which they fill with nonsense whenever they run. None unless set.
    pub fn scratch(mut self, bytes: usize) -> Settings {
        self.scratch = bytes;
        self
    }

    /// The most bytes of one buffer.
    pub fn max_buffer(mut self, bytes: usize) -> Settings {
        self.max_buffer = Some(bytes);
        self
    }

    /// The most bytes of all buffers together.
    pub fn capacity(mut self, bytes: u64) -> Settings {
        self.capacity = bytes;
        self
    }

    /// Its memory is host memory, which other devices can reach.
    pub fn host(mut self) -> Settings {
        self.host = true;
        self
    }

    /// Cannot reach the memory of other simulated devices.
    pub fn without_peers(mut self) -> Settings {
        self.peers = false;
        self
    }

    /// Reaches no memory but its own: not even the host's.
    pub fn isolated(mut self) -> Settings {
        self.isolated = true;
        self.peers = false;
        self
    }

    /// Rearranges weights that are only used in matrix products.
    pub fn packs_weights(mut self) -> Settings {
        self.packs = true;
        self
    }

    /// Leaves results as they are: for measuring everything else.
    pub fn without_computing(mut self) -> Settings {
        self.computes = false;
        self
    }

    /// What time is. [`Clock::Virtual`] unless set.
    pub fn clock(mut self, clock: Clock) -> Settings {
        self.clock = clock;
        self
    }

    /// How long a node takes.
    pub fn node_seconds(mut self, seconds: f64) -> Settings {
        self.node_seconds = seconds;
        self
    }

    /// How long a transfer takes: so much each, and so much for each byte.
    pub fn copy_seconds(mut self, each: f64, per_byte: f64) -> Settings {
        self.copy_seconds = each;
        self.byte_seconds = per_byte;
        self
    }

    /// Refuses to compute nodes that this gives a reason for.
    pub fn refuse(
        mut self,
        why: impl Fn(&Graph, NodeId) -> Option<String> + Send + Sync + 'static,
    ) -> Settings {
        self.refuses = Some(Arc::new(why));
        self
    }

    /// The device, to be given to a scheduler. See [`Settings::device`] for one whose faults can be set.
    pub fn build(self) -> Arc<dyn Backend> {
        self.device()
    }

    /// The device itself.
    pub fn device(self) -> Arc<Sim> {
        Arc::new(Sim::with(self))
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulated device {}", self.name)
    }
}
