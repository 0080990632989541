//! The rates of a device that estimates of time are made of.

use quadriga_graph::DType;
use serde::Serialize;

use crate::{Cost, DeviceKind, ReadCurve};

/// Peak rates of a device, and of its connection to the host.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Rates {
    /// Memory read bandwidth in bytes per second.
    pub read: f64,
    /// Bytes per second that the device's own kernels read, by how much each run reads; [`Rates::for_working_set`].
    pub read_curve: ReadCurve,
    /// Operations per second of a matmul with weights of 8 bits and less.
    pub int8: f64,
    /// Operations per second of a matmul with 16-bit weights.
    pub bf16: f64,
    /// Operations per second of a matmul with f32 weights.
    pub f32: f64,
    /// Bytes per second of copies between the device and the host.
    pub link: f64,
    /// Seconds that it takes until one of both continues with a result of the other, however small.
    pub rendezvous: f64,
    /// Seconds that a matmul or attention takes beside traffic and arithmetic: a launch and its dependencies, or a barrier.
    pub launch: f64,
    /// Whether memory and matmul rates were measured on this device; else they are assumed for its kind. The rendezvous is
    /// always assumed.
    pub measured: bool,
}

impl Rates {
    /// Rates that are assumed for a kind of device, as long as nothing was measured: a desktop's CPU with two channels of memory,
    /// a GPU of the middle class on 16 lanes of PCIe 4. A simulated device computes on the CPU.
    pub fn assumed(kind: DeviceKind) -> Rates {
        let (read, int8, bf16, f32) = match kind {
            DeviceKind::Cpu | DeviceKind::Simulated => (20e9, 200e9, 100e9, 100e9),
            DeviceKind::Gpu => (1e12, 200e12, 100e12, 20e12),
        };
        // As on a server's GPU and CPU of 2024, where a layer's experts on the CPU cost 36 µs a crossing, and a kernel of decode
        // 2 to 3 µs more than its bytes.
        let launch = if kind == DeviceKind::Gpu { 2.5e-6 } else { 2e-6 };
        Rates {
            read,
            read_curve: ReadCurve::UNKNOWN,
            int8,
            bf16,
            f32,
            link: 20e9,
            rendezvous: 30e-6,
            launch,
            measured: false,
        }
    }

    /// The rates of work that reads so many bytes again and again: `read` is that of the curve, where it is known.
    pub fn for_working_set(&self, bytes: f64) -> Rates {
        Rates { read: self.read_curve.rate(bytes).unwrap_or(self.read), ..*self }
    }

    /// Operations per second of a matmul with weights of a type.
    pub fn operations(&self, weights: DType) -> f64 {
        match weights {
            DType::F32 => self.f32,
            DType::F16 | DType::BF16 => self.bf16,
            _ => self.int8,
        }
    }

    /// Roofline estimate in seconds of work with weights of a type: the longer of memory traffic and arithmetic.
    pub fn seconds(&self, cost: Cost, weights: DType) -> f64 {
        let memory = cost.traffic as f64 / self.read.max(1.0);
        memory.max(cost.operations as f64 / self.operations(weights).max(1.0))
    }
}
