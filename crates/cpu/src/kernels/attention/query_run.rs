//! The queries of a batch by sequence: consecutive queries that see slots of one sequence are a run.
//!
//! Each run is computed by itself, with the kernel for its number of queries and over the slots that it sees: nothing is
//! multiplied in vain, and a query's result does not depend on the other sequences in the batch.

use std::ops::Range;

use quadriga_graph::PAGE_SLOTS;

use super::{Attention, KV_SPLIT};

/// A KV cache in pages that several sequences share. The slots of a sequence are positions, which a table maps to rows of
/// keys and values.
#[derive(Clone, Copy, Debug)]
pub struct PageTable<'a> {
    /// For each query, the first visible position and one past the last, and the row of the table.
    pub spans: &'a [[i32; 3]],
    /// Rows of `columns` pages. Pages that no span covers may be any numbers.
    pub pages: &'a [i32],
    /// Pages of a row of the table.
    pub columns: usize,
    /// Rows of keys and values: at least a page.
    pub rows: usize,
}

impl PageTable<'_> {
    /// The row of keys and values at a position. Pages out of range, which are an error of the caller, become the last one.
    fn row(&self, table: usize, slot: usize) -> usize {
        let page =
            table.checked_mul(self.columns).and_then(|first| self.pages.get(first + slot / PAGE_SLOTS));
        let page = page.map_or(0, |page| usize::try_from(*page).unwrap_or(usize::MAX));
        page.min((self.rows / PAGE_SLOTS).saturating_sub(1)) * PAGE_SLOTS + slot % PAGE_SLOTS
    }
}

/// Consecutive queries of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueryRun {
    pub(super) tokens: Range<usize>,
    /// The slots that any of them sees, and what lies between these; empty for queries that see none.
    pub(super) slots: Range<usize>,
    /// The row of the page table, if there is one.
    pub(super) table: usize,
}

impl QueryRun {
    /// The KV splits with these slots; at least one.
    pub(super) fn splits(&self) -> Range<usize> {
        let first = self.slots.start / KV_SPLIT;
        first..self.slots.end.div_ceil(KV_SPLIT).max(first + 1)
    }
}

impl Attention<'_> {
    /// The runs of the batch. All queries are in one, without spans: all slots of the cache.
    pub(super) fn runs(&self) -> impl Iterator<Item = QueryRun> {
        let mut token = 0;
        std::iter::from_fn(move || {
            let mut run = (token < self.shape.tokens).then(|| self.query(token))?;
            loop {
                token += 1;
                if token == self.shape.tokens {
                    return Some(run);
                }
                let next = self.query(token);
                let same = match (run.slots.is_empty(), next.slots.is_empty()) {
                    (false, false) if self.memory.pages.is_some() => run.table == next.table,
                    (false, false) => run.slots.start < next.slots.end && next.slots.start < run.slots.end,
                    (true, true) => true,
                    _ => false,
                };
                if !same {
                    return Some(run);
                }
                run.tokens.end += 1;
                run.slots = run.slots.start.min(next.slots.start)..run.slots.end.max(next.slots.end);
            }
        })
    }

    /// A run of one query.
    fn query(&self, token: usize) -> QueryRun {
        let (first, end) = self.span(token);
        let slots = if first < end { first..end } else { 0..0 };
        let table = self.memory.pages.and_then(|pages| pages.spans.get(token));
        let table = table.map_or(0, |[_, _, table]| usize::try_from(*table).unwrap_or(usize::MAX));
        QueryRun { tokens: token..token + 1, slots, table }
    }

    /// The row of keys and values of a run's slot.
    #[inline]
    pub(super) fn cache_row(&self, table: usize, slot: usize) -> usize {
        self.memory.pages.as_ref().map_or(slot, |pages| pages.row(table, slot))
    }
}
