//! A node lowered to kernels, before operations are fused into steps.

use super::experts::ExpertMatMul;
use super::packed_matmul::PackedMatMul;
use crate::kernels::KernelError;
use crate::step::{Access, StepPart, TeamKernel};

/// Bytes of work memory for a number of threads.
pub(crate) type WorkBytes = Box<dyn Fn(usize) -> Result<usize, KernelError> + Send>;

/// An operation that all threads compute together.
pub(crate) struct TeamOp {
    pub(crate) kernel: Box<dyn TeamKernel>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) work_bytes: WorkBytes,
    /// Index of the node's name in the program.
    pub(crate) name: usize,
    /// The operation's name.
    pub(crate) label: &'static str,
}

/// An operation that becomes a step, or part of one.
pub(crate) enum LoweredOp {
    /// A kernel over independent units of work.
    Part(StepPart),
    /// A matmul with packed weights.
    MatMul(PackedMatMul),
    /// A matmul of a mixture of experts, with packed weights.
    Experts(ExpertMatMul),
    /// A kernel that all threads run together.
    Team(TeamOp),
}

impl LoweredOp {
    /// Sets the index of the node's name and the operation's name.
    pub(crate) fn set_name(&mut self, name: usize, label: &'static str) {
        match self {
            LoweredOp::Part(part) => (part.name, part.label) = (name, label),
            LoweredOp::MatMul(matmul) => matmul.set_name(name),
            LoweredOp::Experts(matmul) => matmul.name = name,
            LoweredOp::Team(team) => (team.name, team.label) = (name, label),
        }
    }
}
