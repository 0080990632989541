//! What routing kernels take.

use quadriga_graph::TensorId;

use super::op_codes::RouteActivation;
use crate::launch::{Argument, Launch, TensorArg};

/// The most experts that are routed in registers, and the most of them that a token uses.
const REGISTER_EXPERTS: i32 = 256;
const REGISTER_USED: i32 = 32;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RouteWork {
    pub(super) logits: TensorArg,
    pub(super) bias: u64,
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) activation: i32,
    pub(super) experts: i32,
    pub(super) used: i32,
    pub(super) groups: i32,
    pub(super) groups_used: i32,
    pub(super) group_scores: i32,
    pub(super) softmax: i32,
    pub(super) normalize: i32,
    pub(super) scale: f32,
}

// SAFETY: `struct RouteWork` of route.cuh has the same fields in the same order.
unsafe impl Argument for RouteWork {}

impl RouteWork {
    /// Whether a warp routes in registers: other kernels then can do it themselves.
    pub(super) fn fits_registers(&self) -> bool {
        // With a bias, scores of softmax are not in the order of the logits.
        let ordered = self.bias == 0 || self.activation != RouteActivation::Softmax as i32;
        ordered && self.groups <= 1 && self.experts <= REGISTER_EXPERTS && self.used <= REGISTER_USED
    }
}

/// Routing of one token whose logits are complete.
pub(super) struct PendingRoute {
    pub(super) ids: TensorId,
    pub(super) work: RouteWork,
    pub(super) launch: Launch,
}
