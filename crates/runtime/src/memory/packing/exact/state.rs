//! What the search knows: the items, what is left to place, and what has failed.
#![expect(
    clippy::indexing_slicing,
    reason = "items and sections are numbered by `read`, which sizes all arrays"
)]

use super::style::Style;
use crate::memory::packing::timeline::Timeline;
use crate::memory::packing::walls::Walls;

/// The most failures that are remembered; later ones replace earlier ones.
const FAILURES: usize = 1 << 20;

/// An item, in units.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Piece {
    pub(super) size: u64,
    /// The sections `left..right` in which it is alive.
    pub(super) left: u32,
    pub(super) right: u32,
}

impl Piece {
    pub(super) fn sections(&self) -> std::ops::Range<usize> {
        self.left as usize..self.right as usize
    }

    pub(super) fn covers(&self, section: u32) -> bool {
        self.left <= section && section < self.right
    }

    pub(super) fn meets(&self, other: &Piece) -> bool {
        self.left < other.right && other.left < self.right
    }
}

/// The state of the search. All sizes and offsets are in units.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// The greatest common divisor of all sizes.
    pub(super) unit: u64,
    pub(super) walls: Walls,
    pub(super) items: Vec<Piece>,
    /// For each item the lowest offset that is left for it.
    pub(super) lowest: Vec<u64>,
    /// For each item that is placed its offset.
    pub(super) offset: Vec<u64>,
    /// For each section the bytes of the items that are not placed.
    pub(super) rest: Vec<u64>,
    /// For each section the least of its items' lowest offsets; valid for the component at hand.
    pub(super) floor: Vec<u64>,
    /// Scratch: for each section its valley, and how many items can lie on its floor.
    pub(super) valley: Vec<u32>,
    pub(super) choices: Vec<u32>,
    /// The items of all open components, one component after the other, each in order of time.
    pub(super) lists: Vec<u32>,
    /// The parts of open lists that are to be solved, as (begin, end) in `lists`.
    pub(super) parts: Vec<(u32, u32)>,
    /// The lowest offsets of all open components' items, as they were when the component was opened.
    pub(super) saved: Vec<u64>,
    /// The items to be tried, of all open components.
    pub(super) moves: Vec<u32>,
    /// Fingerprints of components that failed, each at the slot that its low bits say.
    failed: Vec<u128>,
    pub(super) capacity: u64,
    pub(super) style: Style,
    pub(super) limit: u64,
    pub(super) spent: u64,
}

impl State {
    /// Reads the items.
    pub(super) fn read(&mut self, timeline: &Timeline, walls: &Walls) {
        // Sections that nothing ends after are contained in the next one, and need no look.
        let sections = timeline.sections();
        self.choices.clear();
        self.choices.resize(sections + 1, 0);
        for item in &timeline.items {
            self.choices[item.end as usize] = 1;
        }
        let mut rank = 0;
        for ends in &mut self.choices[1..] {
            rank += *ends;
            *ends = rank;
        }
        self.choices[0] = 0;
        let rank = &self.choices;
        self.unit =
            timeline.items.iter().fold(0, |unit, item| greatest_common_divisor(unit, item.size)).max(1);
        self.walls.copy_in_units(walls, self.unit);
        self.items.clear();
        self.items.extend(timeline.items.iter().map(|item| Piece {
            size: item.size / self.unit,
            left: rank[item.start as usize],
            right: rank[item.end as usize],
        }));
        let sections = self.items.iter().map(|item| item.right as usize).max().unwrap_or(0);
        self.lowest.resize(self.items.len(), 0);
        self.offset.resize(self.items.len(), 0);
        self.rest.resize(sections, 0);
        self.floor.resize(sections, 0);
        self.valley.resize(sections, 0);
        self.choices.resize(sections.max(self.choices.len()), 0);
    }

    /// Sets a capacity (in bytes), and forgets the failures of another.
    pub(super) fn begin(&mut self, capacity: u64, steps: u64) {
        self.capacity = capacity / self.unit;
        let worth = steps / (self.items.len() as u64 / 4 + 1);
        self.failed.clear();
        self.failed.resize((worth as usize).clamp(1 << 10, FAILURES).next_power_of_two(), 0);
    }

    /// Takes everything away again, and begins a run.
    pub(super) fn restart(&mut self, style: Style, limit: u64) {
        self.style = style;
        self.limit = limit;
        self.spent = 0;
        self.lowest.fill(0);
        self.rest.fill(0);
        for item in &self.items {
            for rest in &mut self.rest[item.sections()] {
                *rest += item.size;
            }
        }
        self.lists.clear();
        self.lists.extend(0..self.items.len() as u32);
        self.parts.clear();
        self.saved.clear();
        self.moves.clear();
    }

    /// Writes the offsets found, in bytes; returns the peak.
    pub(super) fn write(&self, offsets: &mut Vec<u64>) -> u64 {
        offsets.clear();
        offsets.extend(self.offset.iter().map(|offset| offset * self.unit));
        let tops = self.items.iter().zip(&self.offset).map(|(item, offset)| offset + item.size);
        tops.max().unwrap_or(0) * self.unit
    }

    /// What tells a component from all others: its items and the lowest offsets that are left for them.
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
