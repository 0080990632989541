//! The order in which copies and splits are issued to the devices.
//!
//! Splits are numbered so that each waits only for earlier ones, so issuing them by number would be correct. But a split
//! of a synchronous backend blocks the host until it is done, and so may a copy to such a backend: everything that other
//! devices can start is issued before them. Other copies are issued as soon as their source is.
#![expect(clippy::indexing_slicing, reason = "steps and splits are numbered by the same plan")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;

use super::splits::{Copy, Splits};

/// One command of a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
pub enum ScheduleStep {
    /// Makes a copy, by its number.
    Copy(usize),
    /// Copies what a [copy](Copy::is_prefetched) is likely to have, before it is known what is selected.
    Prefetch(usize),
    /// Runs a split, by its number.
    Split(usize),
}

/// Orders all copies and splits. `synchronous` says for each backend whether it blocks the host.
pub(crate) fn order(splits: &Splits, synchronous: &[bool]) -> Vec<ScheduleStep> {
    let (copies, count) = (splits.copies.len(), splits.splits.len());
    // Steps are numbered: copies first, then splits, then prefetches.
    let is_prefetched = |copy: &usize| splits.copies[*copy].is_prefetched();
    let prefetches: Vec<usize> = (0..copies).filter(is_prefetched).collect();
    let mut waits = vec![0u32; copies + count + prefetches.len()];
    let mut edges: Vec<(u32, u32)> = Vec::new();
    let mut edge = |from: usize, to: usize| {
        edges.push((from as u32, to as u32));
        waits[to] += 1;
    };
    for (index, copy) in splits.copies.iter().enumerate() {
        let ids = copy.selected_by.map(|selection| selection.computed_by);
        for before in copy.source.iter().chain(&copy.after).chain(&ids) {
            edge(copies + before, index);
        }
    }
    for (step, copy) in (copies + count..).zip(&prefetches) {
        edge(step, *copy);
        if let Some(after) = splits.copies[*copy].after {
            edge(copies + after, step);
        }
    }
    for (index, split) in splits.splits.iter().enumerate() {
        for copy in split.inputs.iter().chain(&split.after_copies) {
            edge(*copy, copies + index);
        }
        for before in &split.after_splits {
            edge(copies + before, copies + index);
        }
    }
    for lane in &splits.lanes {
        for pair in lane.windows(2) {
            edge(copies + pair[0] as usize, copies + pair[1] as usize);
        }
    }
    edges.sort_unstable();
    let command = |step: usize| match step.checked_sub(copies) {
        None => ScheduleStep::Copy(step),
        Some(split) if split < count => ScheduleStep::Split(split),
        Some(after) => ScheduleStep::Prefetch(prefetches[after - count]),
    };
    let key = |step: usize| match command(step) {
        ScheduleStep::Copy(copy) => {
            let Copy { to, reader, .. } = splits.copies[copy];
            (synchronous[to], reader, false, step)
        }
        ScheduleStep::Prefetch(copy) => {
            // Before the split that it overlaps with.
            let Copy { to, reader, selected_by, .. } = splits.copies[copy];
            let split = selected_by.map_or(reader, |selection| selection.computed_by);
            (synchronous[to], split, false, step)
        }
        ScheduleStep::Split(split) => (synchronous[splits.splits[split].backend], split, true, step),
    };
    let mut ready: BinaryHeap<_> =
        (0..waits.len()).filter(|step| waits[*step] == 0).map(|step| Reverse(key(step))).collect();
    let mut out = Vec::with_capacity(waits.len());
    while let Some(Reverse((.., step))) = ready.pop() {
        out.push(command(step));
        let first = edges.partition_point(|(from, _)| (*from as usize) < step);
        for (from, to) in &edges[first..] {
            if *from as usize != step {
                break;
            }
            waits[*to as usize] -= 1;
            if waits[*to as usize] == 0 {
                ready.push(Reverse(key(*to as usize)));
            }
        }
    }
    out
}
