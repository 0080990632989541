//! Skyline and niches: the section to branch at, and its candidates.
#![expect(
    clippy::indexing_slicing,
    reason = "lists hold items, items hold sections; all arrays are sized by `read`"
)]

use super::branching_rule::{ItemRule, SectionRule};
use super::search_state::SearchState;

/// A section of a niche, at whose skyline one of several items can be placed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BranchPoint {
    pub(super) section: u32,
    /// Its skyline.
    pub(super) height: u64,
    /// How many units of it may stay empty.
    pub(super) slack: u64,
}

impl SearchState {
    /// Computes the skyline of a component's sections `first..last`. False if the unplaced bytes of a section exceed
    /// the capacity above it.
    pub(super) fn find_skyline(&mut self, begin: usize, end: usize, first: usize, last: usize) -> bool {
        self.skyline[first..last].fill(u64::MAX);
        for &item in &self.lists[begin..end] {
            let lowest = self.lowest[item as usize];
            for skyline in &mut self.skyline[self.items[item as usize].sections()] {
                *skyline = lowest.min(*skyline);
            }
        }
        let mut sections = self.skyline[first..last].iter().zip(&self.unplaced[first..last]);
        sections.all(|(skyline, unplaced)| skyline + unplaced <= self.capacity)
    }

    /// Chooses the section to branch at, among those of all niches.
    pub(super) fn choose_branch_point(
        &mut self,
        begin: usize,
        end: usize,
        first: usize,
        last: usize,
    ) -> BranchPoint {
        // A niche is a run of equal skyline between higher ones. Niches are numbered from 1.
        self.candidate_counts[first..last].fill(0);
        let (mut section, mut number) = (first, 0);
        while section < last {
            let (from, height) = (section, self.skyline[section]);
            while section < last && self.skyline[section] == height {
                section += 1;
            }
            let enclosed = (from == first || self.skyline[from - 1] > height)
                && (section == last || self.skyline[section] > height);
            number += u32::from(enclosed);
            self.niche[from..section].fill(if enclosed { number } else { 0 });
        }
        // An item whose lowest offset is the skyline of a niche fits between its sides, which are higher.
        for &item in &self.lists[begin..end] {
            let candidate = self.items[item as usize];
            let left = candidate.left as usize;
            if self.niche[left] > 0 && self.lowest[item as usize] == self.skyline[left] {
                for count in &mut self.candidate_counts[candidate.sections()] {
                    *count += 1;
                }
            }
        }
        let (mut best, mut best_key) = (BranchPoint::default(), (u64::MAX, u64::MAX, u64::MAX));
        let mut width = (0, 0);
        for section in first..last {
            let niche = self.niche[section];
            if niche == 0 {
                continue;
            }
            if width.0 != niche {
                let run = self.niche[section..last].iter().take_while(|other| **other == niche);
                width = (niche, run.count() as u64);
            }
            let (height, unplaced) = (self.skyline[section], self.unplaced[section]);
            let slack = self.capacity - unplaced - height;
            let branches = u64::from(self.candidate_counts[section]) + u64::from(slack > 0);
            let key = match self.rule.at {
                SectionRule::FewestBranches => (branches, u64::MAX - unplaced, slack),
                SectionRule::Tightest => (slack, branches, 0),
                SectionRule::Narrowest => (branches * width.1, slack, 0),
                SectionRule::Lowest => (height, branches, slack),
            };
            if key < best_key {
                best_key = key;
                best = BranchPoint { section: section as u32, height, slack };
            }
        }
        best
    }

    /// Lists the items that can be placed at a branch point, the one to be tried first at the end.
    pub(super) fn list_candidates(&mut self, begin: usize, end: usize, point: BranchPoint) {
        let from = self.candidates.len();
        for &item in &self.lists[begin..end] {
            let candidate = self.items[item as usize];
            if !candidate.covers(point.section) || self.lowest[item as usize] != point.height {
                continue;
            }
            // Of identical items only one is tried.
            let identical = |other: &u32| {
                let other = self.items[*other as usize];
                (other.left, other.right, other.size) == (candidate.left, candidate.right, candidate.size)
            };
            if !self.candidates[from..].iter().any(identical) {
                self.candidates.push(item);
            }
        }
        let SearchState { items, unplaced, rule, candidates, .. } = self;
        candidates[from..].sort_unstable_by_key(|&item| {
            let candidate = items[item as usize];
            let (size, duration) = (candidate.size, u64::from(candidate.right - candidate.left));
            let key = match rule.first {
                ItemRule::Longest => (duration, size),
                ItemRule::Largest => (size, duration),
                ItemRule::Smallest => (u64::MAX - size, duration),
                ItemRule::Shortest => (u64::MAX - duration, size),
                ItemRule::Crowded => {
                    (unplaced[candidate.sections()].iter().copied().max().unwrap_or(0), size)
                }
            };
            (key, u32::MAX - item)
        });
    }

    /// The branch in which no item is placed at the point: each candidate then rests on another item. Raises the lowest
    /// offsets accordingly; false if the gap exceeds the slack.
    pub(super) fn leave_empty(&mut self, begin: usize, end: usize, point: BranchPoint, saved: usize) -> bool {
        let mut skyline = u64::MAX;
        for index in begin..end {
            let item = self.lists[index] as usize;
            let candidate = self.items[item];
            if !candidate.covers(point.section) {
                continue;
            }
            if self.lowest[item] == point.height {
                // It can rest on any other item that is no candidate itself.
                let list = self.lists[begin..end].iter().zip(&self.saved[saved..]);
                let tops = list.filter_map(|(&other, &lowest)| {
                    let other = self.items[other as usize];
                    let same = other.covers(point.section) && lowest == point.height;
                    (!same && other.overlaps(&candidate)).then_some(lowest + other.size)
                });
                // Or on the next chunk boundary.
                let boundary = self.boundaries.next(point.height);
                let support =
                    self.boundaries.fit(tops.min().unwrap_or(boundary).min(boundary), candidate.size);
                if support.saturating_add(candidate.size) > self.capacity {
                    return false;
                }
                self.lowest[item] = support;
            }
            skyline = skyline.min(self.lowest[item]);
        }
        skyline - point.height <= point.slack
    }
}
