//! Floors and valleys: where the next decision is taken, and between what.
#![expect(
    clippy::indexing_slicing,
    reason = "lists hold items, items hold sections; all arrays are sized by `read`"
)]

use super::state::State;
use super::style::{First, Where};

/// A section on whose floor one of several items can lie.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Site {
    pub(super) section: u32,
    /// Its floor.
    pub(super) height: u64,
    /// How much of it may stay empty.
    pub(super) slack: u64,
}

impl State {
    /// Finds the floors of a component's sections `first..last`. False when one of them cannot hold what is left.
    pub(super) fn find_floors(&mut self, begin: usize, end: usize, first: usize, last: usize) -> bool {
        self.floor[first..last].fill(u64::MAX);
        for &item in &self.lists[begin..end] {
            let lowest = self.lowest[item as usize];
            for floor in &mut self.floor[self.items[item as usize].sections()] {
                *floor = lowest.min(*floor);
            }
        }
        let mut sections = self.floor[first..last].iter().zip(&self.rest[first..last]);
        sections.all(|(floor, rest)| floor + rest <= self.capacity)
    }

    /// Chooses where to decide, among the sections of all valleys.
    pub(super) fn choose_site(&mut self, begin: usize, end: usize, first: usize, last: usize) -> Site {
        // A valley is a run of equal floors between higher ones. Valleys are numbered from 1.
        self.choices[first..last].fill(0);
        let (mut section, mut number) = (first, 0);
        while section < last {
            let (from, height) = (section, self.floor[section]);
            while section < last && self.floor[section] == height {
                section += 1;
            }
            let walled = (from == first || self.floor[from - 1] > height)
                && (section == last || self.floor[section] > height);
            number += u32::from(walled);
            self.valley[from..section].fill(if walled { number } else { 0 });
        }
        // An item whose lowest offset is the floor of a valley lies inside it: the walls are higher.
        for &item in &self.lists[begin..end] {
            let piece = self.items[item as usize];
            let left = piece.left as usize;
            if self.valley[left] > 0 && self.lowest[item as usize] == self.floor[left] {
                for choices in &mut self.choices[piece.sections()] {
                    *choices += 1;
                }
            }
        }
        let (mut best, mut best_key) = (Site::default(), (u64::MAX, u64::MAX, u64::MAX));
        let mut width = (0, 0);
        for section in first..last {
            let valley = self.valley[section];
            if valley == 0 {
                continue;
            }
            if width.0 != valley {
                let run = self.valley[section..last].iter().take_while(|other| **other == valley);
                width = (valley, run.count() as u64);
            }
            let (height, rest) = (self.floor[section], self.rest[section]);
            let slack = self.capacity - rest - height;
            let choices = u64::from(self.choices[section]) + u64::from(slack > 0);
            let key = match self.style.at {
                Where::FewestChoices => (choices, u64::MAX - rest, slack),
                Where::Tightest => (slack, choices, 0),
                Where::Narrowest => (choices * width.1, slack, 0),
                Where::Lowest => (height, choices, slack),
            };
            if key < best_key {
                best_key = key;
                best = Site { section: section as u32, height, slack };
            }
        }
        best
    }

    /// Lists the items that can lie on the floor at a site, the one to be tried first at the end.
    pub(super) fn list_moves(&mut self, begin: usize, end: usize, site: Site) {
        let from = self.moves.len();
        for &item in &self.lists[begin..end] {
            let piece = self.items[item as usize];
            if !piece.covers(site.section) || self.lowest[item as usize] != site.height {
                continue;
            }
            // Of items that are alike only one is tried.
            let alike = |other: &u32| {
                let other = self.items[*other as usize];
                (other.left, other.right, other.size) == (piece.left, piece.right, piece.size)
            };
            if !self.moves[from..].iter().any(alike) {
                self.moves.push(item);
            }
        }
        let State { items, rest, style, moves, .. } = self;
        moves[from..].sort_unstable_by_key(|&item| {
            let piece = items[item as usize];
            let (size, duration) = (piece.size, u64::from(piece.right - piece.left));
            let key = match style.first {
                First::Longest => (duration, size),
                First::Largest => (size, duration),
                First::Smallest => (u64::MAX - size, duration),
                First::Shortest => (u64::MAX - duration, size),
                First::Crowded => (rest[piece.sections()].iter().copied().max().unwrap_or(0), size),
            };
            (key, u32::MAX - item)
        });
    }

    /// Nothing lies on the floor at the site: each item that could have lies on another one, or cannot be placed.
    /// Raises the lowest offsets accordingly; false when that leaves too much empty.
    pub(super) fn leave_empty(&mut self, begin: usize, end: usize, site: Site, saved: usize) -> bool {
        let mut floor = u64::MAX;
        for index in begin..end {
            let item = self.lists[index] as usize;
            let piece = self.items[item];
            if !piece.covers(site.section) {
                continue;
            }
            if self.lowest[item] == site.height {
                // What it could lie on: any other item that is not in the same position.
                let list = self.lists[begin..end].iter().zip(&self.saved[saved..]);
                let tops = list.filter_map(|(&other, &lowest)| {
                    let other = self.items[other as usize];
                    let same = other.covers(site.section) && lowest == site.height;
                    (!same && other.meets(&piece)).then_some(lowest + other.size)
                });
                // Or on the next wall.
                let wall = self.walls.next(site.height);
                let support = self.walls.fit(tops.min().unwrap_or(wall).min(wall), piece.size);
                if support.saturating_add(piece.size) > self.capacity {
                    return false;
                }
                self.lowest[item] = support;
            }
            floor = floor.min(self.lowest[item]);
        }
        floor - site.height <= site.slack
    }
}
