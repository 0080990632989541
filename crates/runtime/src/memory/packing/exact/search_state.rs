//! The state of the search: items, unplaced bytes, stacks and memoized failures.
#![expect(
    clippy::indexing_slicing,
    reason = "items and sections are numbered by `read`, which sizes all arrays"
)]

use super::branching_rule::BranchingRule;
use crate::memory::packing::boundaries::ChunkBoundaries;
use crate::memory::packing::timeline::Timeline;

/// The most failures that are memoized; later ones replace earlier ones.
const MAX_FAILURES: usize = 1 << 20;

/// An item; its size is in units.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SearchItem {
    pub(super) size: u64,
    /// The sections `left..right` in which it is live.
    pub(super) left: u32,
    pub(super) right: u32,
}

impl SearchItem {
    pub(super) fn sections(&self) -> std::ops::Range<usize> {
        self.left as usize..self.right as usize
    }

    pub(super) fn covers(&self, section: u32) -> bool {
        self.left <= section && section < self.right
    }

    pub(super) fn overlaps(&self, other: &SearchItem) -> bool {
        self.left < other.right && other.left < self.right
    }
}

/// The state of the search. All sizes and offsets are in units.
#[derive(Clone, Debug, Default)]
pub(super) struct SearchState {
    /// The greatest common divisor of all sizes.
    pub(super) unit: u64,
    pub(super) boundaries: ChunkBoundaries,
    pub(super) items: Vec<SearchItem>,
    /// For each item the lowest offset that is still possible.
    pub(super) lowest: Vec<u64>,
    /// For each item that is placed its offset.
    pub(super) offset: Vec<u64>,
    /// For each section the bytes of its unplaced items.
    pub(super) unplaced: Vec<u64>,
    /// For each section the minimum of its items' lowest offsets; valid for the current component.
    pub(super) skyline: Vec<u64>,
    /// Scratch: for each section the number of its niche, or 0.
    pub(super) niche: Vec<u32>,
    /// Scratch: for each section how many items can be placed at its skyline.
    pub(super) candidate_counts: Vec<u32>,
    /// The items of all open components, one component after the other, each in order of time.
    pub(super) lists: Vec<u32>,
    /// The components of open lists that are still to be solved, as (begin, end) in `lists`.
    pub(super) parts: Vec<(u32, u32)>,
    /// The lowest offsets of all open components' items, as they were when the component was opened.
    pub(super) saved: Vec<u64>,
    /// The items still to be tried, of all open components.
    pub(super) candidates: Vec<u32>,
    /// Fingerprints of components that failed, hashed by their low bits.
    failed: Vec<u128>,
    pub(super) capacity: u64,
    pub(super) rule: BranchingRule,
    pub(super) limit: u64,
    pub(super) spent: u64,
}

impl SearchState {
    /// Reads the items.
    pub(super) fn read(&mut self, timeline: &Timeline, boundaries: &ChunkBoundaries) {
        // A section after which no item ends is dominated by the next one and left out.
        let sections = timeline.sections();
        self.candidate_counts.clear();
        self.candidate_counts.resize(sections + 1, 0);
        for item in &timeline.items {
            self.candidate_counts[item.end as usize] = 1;
        }
        let mut rank = 0;
        for ends in &mut self.candidate_counts[1..] {
            rank += *ends;
            *ends = rank;
        }
        self.candidate_counts[0] = 0;
        let rank = &self.candidate_counts;
        self.unit =
            timeline.items.iter().fold(0, |unit, item| greatest_common_divisor(unit, item.size)).max(1);
        self.boundaries.copy_in_units(boundaries, self.unit);
        self.items.clear();
        self.items.extend(timeline.items.iter().map(|item| SearchItem {
            size: item.size / self.unit,
            left: rank[item.start as usize],
            right: rank[item.end as usize],
        }));
        let sections = self.items.iter().map(|item| item.right as usize).max().unwrap_or(0);
        self.lowest.resize(self.items.len(), 0);
        self.offset.resize(self.items.len(), 0);
        self.unplaced.resize(sections, 0);
        self.skyline.resize(sections, 0);
        self.niche.resize(sections, 0);
        self.candidate_counts.resize(sections.max(self.candidate_counts.len()), 0);
    }

    /// Sets a capacity (in bytes), and forgets the failures at another.
    pub(super) fn begin(&mut self, capacity: u64, steps: u64) {
        self.capacity = capacity / self.unit;
        let entries = steps / (self.items.len() as u64 / 4 + 1);
        self.failed.clear();
        self.failed.resize((entries as usize).clamp(1 << 10, MAX_FAILURES).next_power_of_two(), 0);
    }

    /// Unplaces all items and starts a run.
    pub(super) fn restart(&mut self, rule: BranchingRule, limit: u64) {
        self.rule = rule;
        self.limit = limit;
        self.spent = 0;
        self.lowest.fill(0);
        self.unplaced.fill(0);
        for item in &self.items {
            for unplaced in &mut self.unplaced[item.sections()] {
                *unplaced += item.size;
            }
        }
        self.lists.clear();
        self.lists.extend(0..self.items.len() as u32);
        self.parts.clear();
        self.saved.clear();
        self.candidates.clear();
    }

    /// Writes the offsets found, in bytes; returns the peak.
    pub(super) fn write(&self, offsets: &mut Vec<u64>) -> u64 {
        offsets.clear();
        offsets.extend(self.offset.iter().map(|offset| offset * self.unit));
        let tops = self.items.iter().zip(&self.offset).map(|(item, offset)| offset + item.size);
        tops.max().unwrap_or(0) * self.unit
    }

    /// A hash of a component's items and their lowest offsets.
    pub(super) fn fingerprint(&self, list: &[u32]) -> u128 {
        let mut sum = 0_u128;
        for &item in list {
            let one = u128::from(self.lowest[item as usize]) << 32 | u128::from(item);
            let one = (one ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0x2d99_787f_ff51_afd7_ed55_8ccd_9e37_79b9);
            sum = sum.wrapping_add((one ^ one >> 61).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
        }
        sum ^ sum >> 67
    }

    pub(super) fn has_failed(&self, fingerprint: u128) -> bool {
        self.failed[fingerprint as usize & (self.failed.len() - 1)] == fingerprint
    }

    pub(super) fn remember_failure(&mut self, fingerprint: u128) {
        let slot = fingerprint as usize & (self.failed.len() - 1);
        self.failed[slot] = fingerprint;
    }
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
