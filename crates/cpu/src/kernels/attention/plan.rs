//! How an attention is divided.

use super::AttentionShape;
use super::query_run::QueryRun;

/// Up to this many queries of a run read keys and values in place; for more, a tile is first widened and transposed.
const FEW_TOKENS: usize = 4;

/// How the work is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttentionPlan {
    /// Query heads per key head.
    pub(super) group: usize,
    /// Queries per unit, at most.
    pub(super) block: usize,
    /// Rows of partial results that there is memory for: a query's head in a KV split.
    pub(super) partials: usize,
    /// Elements of a padded key row and value row.
    pub(super) key_pad: usize,
    pub(super) value_pad: usize,
    /// Bytes of a key and of a value.
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
    /// Whether rows are multiples of sixteen elements, so that few queries can read them as they are.
    pub(super) even: bool,
    /// The kernel for many queries, if there are enough of them.
    pub(super) many: Option<ManyQueryKernel>,
}

/// Kernels for many queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "they are x86-64 kernels"))]
pub(super) enum ManyQueryKernel {
    /// AMX tiles.
    Amx,
    /// AVX-512 vectors.
    Avx512,
}

impl AttentionPlan {
    /// Whether a run's queries are so few that rows of keys and values are read as they are, in place or widened. Otherwise
    /// keys are transposed first.
    pub(super) fn is_direct(&self, run: &QueryRun) -> bool {
        self.even && run.tokens.len() <= FEW_TOKENS
    }

    /// Rows that a unit may have: those of all key heads where rows are read as they are, else of one.
    pub(super) fn unit_rows(&self, shape: &AttentionShape) -> Option<usize> {
        let direct = if self.even { self.block.min(FEW_TOKENS).checked_mul(shape.heads)? } else { 0 };
        self.group.checked_mul(self.block).map(|rows| rows.max(direct))
    }

    /// Floats of a partial result: sums, the largest score, the sum of weights.
    pub(super) fn partial_floats(&self) -> usize {
        self.value_pad + 2
    }
}
