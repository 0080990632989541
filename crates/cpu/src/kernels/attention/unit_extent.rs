//! What a unit of work reads of one KV split.

use std::ops::Range;

use super::AttentionPlan;
use super::query_run::QueryRun;

/// The heads, queries and slots of a unit in one KV split.
pub(super) struct UnitExtent<'a> {
    pub(super) run: &'a QueryRun,
    pub(super) kv_heads: Range<usize>,
    pub(super) tokens: Range<usize>,
    pub(super) slots: Range<usize>,
    /// Whether keys and values are read as they are.
    pub(super) direct: bool,
    /// Whether the first slots have been prefetched.
    pub(super) prefetched: bool,
}

impl UnitExtent<'_> {
    /// Rows of one key head.
    pub(super) fn rows(&self, plan: &AttentionPlan) -> usize {
        self.tokens.len() * plan.group
    }

    /// Calls `work(row, token, head)` for all rows.
    #[inline(always)]
    pub(super) fn each(&self, plan: &AttentionPlan, mut work: impl FnMut(usize, usize, usize)) {
        let mut row = 0;
        for kv_head in self.kv_heads.clone() {
            for token in self.tokens.clone() {
                for member in 0..plan.group {
                    work(row, token, kv_head * plan.group + member);
                    row += 1;
                }
            }
        }
    }
}
