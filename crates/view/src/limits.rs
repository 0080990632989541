//! What a machine can do at most: a yardstick for estimates and for what a run achieved.

use quadriga_graph::DType;
use quadriga_runtime::{Backend, BackendLine, Cost, DeviceKind};
use serde::{Deserialize, Serialize};

/// How fast one backend can be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// The backend's name.
    pub backend: String,
    /// The device as it describes itself: limits of another device do not hold.
    pub device: String,
    /// Bytes a second that it reads from its memory.
    pub read: f64,
    /// Operations a second of products with 8-bit (and smaller) weights.
    pub int8: f64,
    /// Operations a second of products with 16-bit weights.
    pub bf16: f64,
    /// Operations a second of products with f32 weights.
    pub f32: f64,
    /// Whether they were measured on this device; else they are round figures for a device of its kind.
    pub measured: bool,
}

impl Limits {
    /// Round figures for a kind of device, until somebody measures.
    pub fn nominal(backend: &str, device: &str, kind: DeviceKind) -> Limits {
        let (read, int8, bf16, f32) = match kind {
            DeviceKind::Cpu | DeviceKind::Simulated => (20e9, 200e9, 100e9, 100e9),
            DeviceKind::Gpu => (1e12, 200e12, 100e12, 20e12),
        };
        Limits {
            backend: backend.to_owned(),
            device: device.to_owned(),
            read,
            int8,
            bf16,
            f32,
            measured: false,
        }
    }

    /// What is known of a backend: the measured limits among those given that are of this very device, or round figures.
    pub fn of(backend: &dyn Backend, known: &[Limits]) -> Limits {
        let device = backend.device();
        let found = known.iter().find(|l| l.backend == backend.name() && l.device == device.description);
        found.cloned().unwrap_or_else(|| Limits::nominal(backend.name(), &device.description, device.kind))
    }

    /// The operations a second of products with weights of a type.
    pub fn operations(&self, weights: DType) -> f64 {
        match weights {
            DType::F32 => self.f32,
            DType::F16 | DType::BF16 => self.bf16,
            _ => self.int8,
        }
    }

    /// About how long some work takes: as long as moving its bytes or computing with them, whichever takes longer.
    pub fn seconds(&self, cost: Cost) -> f64 {
        let moving = cost.traffic as f64 / self.read.max(1.0);
        let computing = cost.operations as f64 / self.int8.max(1.0);
        moving.max(computing)
    }
}

/// The limits of each backend of a plan, from measured ones or round figures by what the line says.
pub(crate) fn in_order(backends: &[BackendLine], limits: &[Limits]) -> Vec<Limits> {
    let of = |line: &BackendLine| {
        let found = limits.iter().find(|l| l.backend == line.bytes.backend);
        found
            .cloned()
            .unwrap_or_else(|| Limits::nominal(&line.bytes.backend, &line.description, DeviceKind::Cpu))
    };
    backends.iter().map(of).collect()
}
