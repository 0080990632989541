//! Exact packing: does everything fit below a given capacity?
#![expect(clippy::indexing_slicing, reason = "items and sections are numbered by `Exact::start`, which sizes all arrays")]

use super::timeline::Timeline;

/// The longest chain of decisions that is followed; beyond it the answer is "unknown".
const DEPTH: usize = 4000;
/// Slots of the table of failures.
const SLOTS: usize = 1 << 20;

/// What a search for a packing below a capacity found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A packing, which is now in the offsets.
    Fits,
    /// There is none.
    Impossible,
    /// The steps ran out first.
    Unknown,
}

/// The working memory of the search.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exact {
    size: Vec<u64>,
    left: Vec<u32>,
    right: Vec<u32>,
    /// No way is left to place the item below this.
    lowest: Vec<u64>,
    offset: Vec<u64>,
    /// For each section the bytes of the items that are not placed yet.
    rest: Vec<u64>,
    floor: Vec<u64>,
    count: Vec<u32>,
    /// The items of all open components, one after the other.
    items: Vec<u32>,
    saved: Vec<u64>,
    moves: Vec<Move>,
    failed: Vec<u128>,
    capacity: u64,
    steps: u64,
    pub(crate) spent: u64,
    pub(crate) hits: u64,
    sel: u32,
    ord: u32,
}

#[derive(Clone, Copy, Debug)]
struct Move {
    item: u32,
    key: (u64, u64),
}

impl Exact {
    pub(crate) fn solve(
        &mut self,
        timeline: &Timeline,
        capacity: u64,
        steps: u64,
        offsets: &mut Vec<u64>,
    ) -> Verdict {
        if timeline.lower_bound > capacity {
            return Verdict::Impossible;
        }
        self.start(timeline, capacity, steps);
        let verdict = self.split(0, self.items.len(), 0);
        if verdict == Verdict::Fits {
            offsets.clear();
            offsets.extend_from_slice(&self.offset);
        }
        verdict
    }

    fn start(&mut self, timeline: &Timeline, capacity: u64, steps: u64) {
        self.capacity = capacity;
        self.steps = steps;
        self.spent = 0;
        self.hits = 0;
        let e = |n: &str| std::env::var(n).ok().and_then(|v| v.parse().ok()).unwrap_or(0);
        self.sel = e("SEL");
        self.ord = e("ORD");
        // Only sections that something ends after matter: the others are contained in the next one.
        let sections = timeline.sections();
        let mut ends = vec![false; sections + 1];
        for item in &timeline.items {
            ends[item.end as usize] = true;
        }
        let mut rank = vec![0; sections + 1];
        for section in 0..sections {
            rank[section + 1] = rank[section] + u32::from(ends[section + 1]);
        }
        self.size = timeline.items.iter().map(|item| item.size).collect();
        self.left = timeline.items.iter().map(|item| rank[item.start as usize]).collect();
        self.right = timeline.items.iter().map(|item| rank[item.end as usize]).collect();
        let count = timeline.items.len();
        let sections = rank[sections] as usize;
        self.lowest = vec![0; count];
        self.offset = vec![0; count];
        self.rest = vec![0; sections];
        self.floor = vec![0; sections];
        self.count = vec![0; sections + 1];
        for item in 0..count {
            for section in self.left[item]..self.right[item] {
                self.rest[section as usize] += self.size[item];
            }
        }
        self.items = (0..count as u32).collect();
        self.saved.clear();
        self.failed.clear();
        self.failed.resize(SLOTS, 0);
    }

    /// Cuts the items `begin..end` of the list (in order of their start) into components and solves each.
    fn split(&mut self, begin: usize, end: usize, depth: usize) -> Verdict {
        let mut parts = Vec::new();
        let mut at = begin;
        while at < end {
            let first = at;
            let mut right = 0;
            while at < end && (at == first || self.left[self.items[at] as usize] < right) {
                right = right.max(self.right[self.items[at] as usize]);
                at += 1;
            }
            parts.push((at - first, first));
        }
        parts.sort_unstable();
        for (length, first) in parts {
            let verdict = self.component(first, first + length, depth);
            if verdict != Verdict::Fits {
                return verdict;
            }
        }
        Verdict::Fits
    }

    /// Solves one component: the items `begin..end` of the list.
    fn component(&mut self, begin: usize, end: usize, depth: usize) -> Verdict {
        if self.spent >= self.steps || depth > DEPTH {
            return Verdict::Unknown;
        }
        let first = self.left[self.items[begin] as usize] as usize;
        let last = self.items[begin..end].iter().map(|&item| self.right[item as usize]).max().unwrap_or(0) as usize;

        // The floor of a section: nothing that is to be placed there can be lower.
        self.floor[first..last].fill(u64::MAX);
        let mut hash = 0_u128;
        for &item in &self.items[begin..end] {
            let item = item as usize;
            let lowest = self.lowest[item];
            let mixed = (lowest ^ (item as u64) << 48).wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (u128::from(mixed)).wrapping_mul(0x2d99_787f_ff51_afd7_ed55_8ccd_9e37_79b9);
            hash = hash.wrapping_add((mixed ^ mixed >> 59).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835));
            for floor in &mut self.floor[self.left[item] as usize..self.right[item] as usize] {
                *floor = lowest.min(*floor);
            }
        }
        for section in first..last {
            if self.floor[section] + self.rest[section] > self.capacity {
                return Verdict::Impossible;
            }
        }
        let hash = hash ^ hash >> 67;
        let slot = hash as usize & (SLOTS - 1);
        if self.failed[slot] == hash {
            self.hits += 1;
            return Verdict::Impossible;
        }

        // For each section of a valley, how many items can lie on its floor.
        self.count[first..=last].fill(0);
        let (mut best, mut best_key) = (first, (u64::MAX, u64::MAX, 0));
        let mut valley = (0, 0);
        let mut section = first;
        while section < last {
            let height = self.floor[section];
            let from = section;
            while section < last && self.floor[section] == height {
                section += 1;
            }
            let open_left = from == first || self.floor[from - 1] > height;
            let open_right = section == last || self.floor[section] > height;
            if !(open_left && open_right) {
                continue;
            }
            for &item in &self.items[begin..end] {
                let item = item as usize;
                let (left, right) = (self.left[item] as usize, self.right[item] as usize);
                if left >= from && right <= section && self.lowest[item] == height {
                    for count in &mut self.count[left..right] {
                        *count += 1;
                    }
                }
            }
            for at in from..section {
                let slack = self.capacity - self.rest[at] - height;
                let count = u64::from(self.count[at]);
                let key = match self.sel {
                    0 => (count + u64::from(slack > 0), slack, 0),
                    1 => (slack, count, 0),
                    2 => (height, slack, count),
                    3 => (height, count + u64::from(slack > 0), slack),
                    4 => (count + u64::from(slack > 0), height, slack),
                    5 => (count + 2*u64::from(slack > 0), slack, u64::MAX - self.rest[at]),
                    6 => (count + u64::from(slack > 0), u64::MAX - self.rest[at], slack),
                    _ => ((count + u64::from(slack > 0)) * (section - from) as u64, slack, 0),
                };
                if key < best_key {
                    (best, best_key) = (at, key);
                    valley = (from, section);
                }
            }
        }

        // One of the items that can lie on the floor there does, or none.
        let height = self.floor[best];
        let slack = self.capacity - self.rest[best] - height;
        let moves = self.moves.len();
        for index in begin..end {
            let item = self.items[index] as usize;
            let (left, right) = (self.left[item] as usize, self.right[item] as usize);
            if left <= best && best < right && self.lowest[item] == height && left >= valley.0 && right <= valley.1 {
                // Of items that are alike only the first is tried.
                let twin = self.moves[moves..].iter().any(|other| {
                    let other = other.item as usize;
                    self.left[other] == self.left[item]
                        && self.right[other] == self.right[item]
                        && self.size[other] == self.size[item]
                });
                if !twin {
                    let width = u64::from(self.right[item] - self.left[item]);
                    let size = self.size[item];
                    let key = match self.ord {
                        0 => (width, size),
                        1 => (size, width),
                        2 => (size * width, size),
                        3 => (u64::MAX - size, width),
                        4 => (u64::MAX - width, size),
                        _ => (self.rest[left..right].iter().copied().max().unwrap_or(0), size),
                    };
                    self.moves.push(Move { item: item as u32, key });
                }
            }
        }
        self.moves[moves..].sort_unstable_by(|a, b| b.key.cmp(&a.key).then(a.item.cmp(&b.item)));
        let kept = self.saved.len();
        for index in begin..end {
            let lowest = self.lowest[self.items[index] as usize];
            self.saved.push(lowest);
        }
        let mut verdict = Verdict::Impossible;
        let mut at = moves;
        while at < self.moves.len() {
            let item = self.moves[at].item as usize;
            at += 1;
            self.spent += 1;
            let (left, right, size) = (self.left[item], self.right[item], self.size[item]);
            let list = self.items.len();
            for index in begin..end {
                let other = self.items[index];
                if other as usize == item {
                    continue;
                }
                self.items.push(other);
                let other = other as usize;
                if self.left[other] < right && left < self.right[other] {
                    self.lowest[other] = self.lowest[other].max(height + size);
                }
            }
            self.offset[item] = height;
            for rest in &mut self.rest[left as usize..right as usize] {
                *rest -= size;
            }
            let answer = self.split(list, self.items.len(), depth + 1);
            for rest in &mut self.rest[left as usize..right as usize] {
                *rest += size;
            }
            self.items.truncate(list);
            self.restore(begin, end, kept);
            if answer != Verdict::Impossible {
                verdict = answer;
                break;
            }
        }
        if verdict == Verdict::Impossible && slack > 0 {
            self.spent += 1;
            verdict = if self.leave_empty(begin, end, best, valley, height, slack) {
                self.component(begin, end, depth + 1)
            } else {
                Verdict::Impossible
            };
            self.restore(begin, end, kept);
        }
        self.saved.truncate(kept);
        self.moves.truncate(moves);
        if verdict == Verdict::Impossible {
            self.failed[slot] = hash;
        }
        verdict
    }

    /// Nothing lies on the floor at `section`: whatever could have lies on something else, or cannot be.
    fn leave_empty(
        &mut self,
        begin: usize,
        end: usize,
        section: usize,
        valley: (usize, usize),
        height: u64,
        slack: u64,
    ) -> bool {
        let section = section as u32;
        let kept = self.saved.len() - (end - begin);
        let mut least = u64::MAX;
        for index in begin..end {
            let item = self.items[index] as usize;
            let (left, right) = (self.left[item], self.right[item]);
            if !(left <= section && section < right) {
                continue;
            }
            if self.lowest[item] == height && left as usize >= valley.0 && right as usize <= valley.1 {
                let mut support = u64::MAX;
                for other in begin..end {
                    let before = self.saved[kept + other - begin];
                    let other = self.items[other] as usize;
                    let beside = self.left[other] < right && left < self.right[other] && other != item;
                    let covers = self.left[other] <= section && section < self.right[other];
                    if beside && !(covers && before == height) {
                        support = support.min(before + self.size[other]);
                    }
                }
                if support == u64::MAX || support + self.size[item] > self.capacity {
                    return false;
                }
                self.lowest[item] = support;
            }
            least = least.min(self.lowest[item]);
        }
        least - height <= slack
    }

    fn restore(&mut self, begin: usize, end: usize, kept: usize) {
        for index in begin..end {
            self.lowest[self.items[index] as usize] = self.saved[kept + index - begin];
        }
    }
}
