//! Peak memory bandwidth and arithmetic speed of a backend, for estimates and for comparison with runs.

use quadriga_graph::DType;
use quadriga_runtime::{Backend, BackendLine, Cost, DeviceKind, Rates, ReadCurve};
use serde::{Deserialize, Serialize};

use crate::format::{count, list};
use crate::rounds::Conditions;

/// Peak speeds of one backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// The backend's name.
    pub backend: String,
    /// The device's description; limits measured on another device are not used.
    pub device: String,
    /// Memory read bandwidth in bytes per second, of data that no cache holds.
    pub read: f64,
    /// Read bandwidth of data in the caches, in bytes per second; 0 if it is unknown.
    pub cache: f64,
    /// Bytes per second that the backend's own kernels read of quantized weights, by how much each run reads; without points where it is
    /// unknown.
    #[serde(default)]
    pub read_curve: ReadCurve,
    /// Seconds that a matmul takes beside its traffic, as a launch or a barrier of threads does; 0 if they are unknown.
    #[serde(default)]
    pub launch: f64,
    /// Operations per second of a matmul with weights of 8 bits and less.
    pub int8: f64,
    /// Operations per second of a matmul with 16-bit weights.
    pub bf16: f64,
    /// Operations per second of a matmul with f32 weights.
    pub f32: f64,
    /// Bytes per second of copies from pinned host memory to a device's own memory; 0 if they are unknown, or of a device
    /// that uses the host's memory.
    #[serde(default)]
    pub upload: f64,
    /// Whether they were measured on this device; else they are nominal figures for its kind.
    pub measured: bool,
    /// How they were measured, and what disturbed it.
    pub conditions: Conditions,
}

impl Limits {
    /// Nominal figures for a kind of device, as long as nothing was measured.
    pub fn nominal(backend: &str, device: &str, kind: DeviceKind) -> Limits {
        let Rates { read, int8, bf16, f32, .. } = Rates::assumed(kind);
        Limits {
            backend: backend.to_owned(),
            device: device.to_owned(),
            read,
            cache: 0.0,
            read_curve: ReadCurve::UNKNOWN,
            launch: 0.0,
            int8,
            bf16,
            f32,
            upload: 0.0,
            measured: false,
            conditions: Conditions::default(),
        }
    }

    /// The limits of a backend: those among `known` that were measured on its device, else nominal figures.
    pub fn of(backend: &dyn Backend, known: &[Limits]) -> Limits {
        let device = backend.device();
        let found = known.iter().find(|l| l.backend == backend.name() && l.device == device.description);
        found.cloned().unwrap_or_else(|| {
            let Rates { read, int8, bf16, f32, .. } = backend.nominal_rates();
            let nominal = Limits::nominal(backend.name(), &device.description, device.kind);
            Limits { read, int8, bf16, f32, ..nominal }
        })
    }

    /// The part of one of several equal ranks, where these are the limits of as many threads as all of them have together: ranks share
    /// memory and caches. A launch is that of the rank's own threads, and not known from those of all.
    pub fn share_of(&self, ranks: usize) -> Limits {
        let part = |rate: f64| rate / ranks.max(1) as f64;
        Limits {
            read: part(self.read),
            cache: part(self.cache),
            read_curve: self.read_curve.share_of(ranks),
            launch: if ranks > 1 { 0.0 } else { self.launch },
            int8: part(self.int8),
            bf16: part(self.bf16),
            f32: part(self.f32),
            ..self.clone()
        }
    }

    /// The rates for estimates; the rendezvous is assumed, and launch and link where they were not measured.
    pub fn to_rates(&self) -> Rates {
        let &Limits { read, read_curve, int8, bf16, f32, measured, .. } = self;
        let assumed = Rates::assumed(DeviceKind::Gpu);
        let link = if self.upload > 0.0 { self.upload } else { assumed.link };
        let launch = if self.launch > 0.0 { self.launch } else { assumed.launch };
        Rates { read, read_curve, int8, bf16, f32, link, launch, measured, ..assumed }
    }

    /// The rates in one line: memory and cache bandwidth, then matmuls by type of the weights.
    pub fn rates(&self) -> String {
        let [read, cache, int8, bf16, f32] =
            [self.read, self.cache, self.int8, self.bf16, self.f32].map(count);
        let cache = if self.cache > 0.0 { format!(", cache {cache}B/s") } else { String::new() };
        let upload =
            if self.upload > 0.0 { format!(", upload {}B/s", count(self.upload)) } else { String::new() };
        format!(
            "memory {read}B/s{cache}{upload}; matmul with 8-bit weights {int8}op/s, 16-bit {bf16}op/s, f32 {f32}op/s"
        )
    }

    /// Why measured figures are uncertain, with the way out; `None` if nothing disturbed them.
    pub fn warning(&self) -> Option<String> {
        let reasons = self.conditions.disturbances();
        let is_uncertain = self.measured && !reasons.is_empty();
        is_uncertain.then(|| format!("disturbed: {}; measure again on an idle machine", list(&reasons)))
    }

    /// Operations per second of a matmul with weights of a type.
    pub fn operations(&self, weights: DType) -> f64 {
        match weights {
            DType::F32 => self.f32,
            DType::F16 | DType::BF16 => self.bf16,
            _ => self.int8,
        }
    }

    /// Roofline estimate in seconds: the longer of memory traffic and arithmetic.
    pub fn seconds(&self, cost: Cost) -> f64 {
        let memory = cost.traffic as f64 / self.read.max(1.0);
        let compute = cost.operations as f64 / self.int8.max(1.0);
        memory.max(compute)
    }
}

/// The limits of each backend of a plan, by name; nominal figures where there are none.
pub(crate) fn in_order(backends: &[BackendLine], limits: &[Limits]) -> Vec<Limits> {
    let of = |line: &BackendLine| {
        let found = limits.iter().find(|l| l.backend == line.bytes.backend);
        found
            .cloned()
            .unwrap_or_else(|| Limits::nominal(&line.bytes.backend, &line.description, DeviceKind::Cpu))
    };
    backends.iter().map(of).collect()
}
