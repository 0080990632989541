//! Which experts are in a device's slots, and which should move there. Touches no memory.
//!
//! Beside what is in the slots, each layer keeps what *should* be in them: the experts used last, as many as there are
//! slots. Where that set would have served clearly more of the recent look-ups than the slots did, experts that were used
//! and have no slot are uploaded, in place of those that should have none. Where it would not, as with routing that has
//! no locality, nothing moves and nothing is lost.

use std::fmt;

use serde::Serialize;

/// How much of the average of hits a step changes.
const SMOOTHING: f64 = 1.0 / 16.0;

/// Experts move while the set that should be in the slots serves so much more of the look-ups, and more than chance
/// explains.
const MIN_GAIN: f64 = 0.03;

/// How many standard deviations of the difference of the two averages count as chance.
const CHANCE: f64 = 4.0;

/// Where the experts of a layer are.
struct Layer {
    /// For each expert its slot, or −1.
    slot_of: Vec<i32>,
    /// For each slot the expert that it has or gets.
    in_slot: Vec<SlotState>,
    /// For each expert the step of its latest use, 0 for none.
    used_at: Vec<u64>,
    /// Whether each expert should be in a slot.
    wanted: Vec<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotState {
    Empty,
    Holds(usize),
    /// On its way.
    Awaits(usize),
}

/// An expert that should move into a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Move {
    pub(super) layer: usize,
    pub(super) expert: usize,
    pub(super) slot: usize,
}

/// How an expert cache has served since the engine was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct ExpertCacheUse {
    /// Slots on devices.
    pub slots: u64,
    /// Experts that tokens used, in all layers.
    pub lookups: u64,
    /// How many of them were in a slot.
    pub hits: u64,
    /// Experts that were uploaded while running.
    pub uploads: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl ExpertCacheUse {
    /// What was added to an earlier one.
    pub fn since(&self, earlier: &ExpertCacheUse) -> ExpertCacheUse {
        ExpertCacheUse {
            slots: self.slots,
            lookups: self.lookups.saturating_sub(earlier.lookups),
            hits: self.hits.saturating_sub(earlier.hits),
            uploads: self.uploads.saturating_sub(earlier.uploads),
            bytes: self.bytes.saturating_sub(earlier.bytes),
        }
    }
}

impl fmt::Display for ExpertCacheUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExpertCacheUse { slots, lookups, hits, uploads, bytes } = self;
        let share = 100.0 * *hits as f64 / (*lookups).max(1) as f64;
        let megabytes = *bytes as f64 / 1e6;
        write!(
            f,
            "expert cache: {slots} slots served {share:.1} % of {lookups} experts; {uploads} uploaded ({megabytes:.1} MB)"
        )
    }
}

/// The experts in the slots of all layers.
pub(super) struct ExpertResidency {
    layers: Vec<Layer>,
    step: u64,
    /// Averages over recent steps: the share of look-ups in slots, and the share that would be if the right experts were.
    hits: f64,
    possible: f64,
    /// Counted in this step: look-ups, hits, and hits of the set that should be in the slots.
    counted: [u64; 3],
    pub(super) usage: ExpertCacheUse,
    /// Experts without a slot that this step used, with their layers.
    missed: Vec<(usize, usize)>,
    /// The layer after that of the latest move.
    next: usize,
}

impl ExpertResidency {
    /// Empty slots, so many in each layer, for so many experts of each layer.
    pub(super) fn new(slots: &[usize], experts: usize) -> ExpertResidency {
        let layers = slots.iter().map(|slots| Layer {
            slot_of: vec![-1; experts],
            in_slot: vec![SlotState::Empty; *slots],
            used_at: vec![0; experts],
            wanted: (0..experts).map(|expert| expert < *slots).collect(),
        });
        let usage =
            ExpertCacheUse { slots: slots.iter().map(|slots| *slots as u64).sum(), ..Default::default() };
        ExpertResidency {
            layers: layers.collect(),
            step: 0,
            hits: 0.0,
            possible: 0.0,
            counted: [0; 3],
            usage,
            missed: Vec::new(),
            next: 0,
        }
    }

    /// The moves that fill empty slots: the first experts of each layer.
    pub(super) fn initial_moves(&self) -> Vec<Move> {
        let of = |(layer, of): (usize, &Layer)| {
            let slots = of.in_slot.len().min(of.slot_of.len());
            (0..slots).map(move |slot| Move { layer, expert: slot, slot }).collect::<Vec<_>>()
        };
        self.layers.iter().enumerate().flat_map(of).collect()
    }

    /// Writes the tables: for each layer and expert its slot, and its number if it is in none.
    pub(super) fn tables(&self, slots: &mut Vec<i32>, on_host: &mut Vec<i32>) {
        slots.clear();
        on_host.clear();
        for layer in &self.layers {
            slots.extend(&layer.slot_of);
            let number = |(expert, slot): (usize, &i32)| if *slot < 0 { expert as i32 } else { -1 };
            on_host.extend(layer.slot_of.iter().enumerate().map(number));
        }
    }

    /// The slot gets the expert from now on, and has none until it arrives.
    pub(super) fn begin(&mut self, Move { layer, expert, slot }: Move) {
        self.next = layer + 1;
        let Some(layer) = self.layers.get_mut(layer) else { return };
        let Some(state) = layer.in_slot.get_mut(slot) else { return };
        if let SlotState::Holds(old) = std::mem::replace(state, SlotState::Awaits(expert))
            && let Some(of_old) = layer.slot_of.get_mut(old)
        {
            *of_old = -1;
        }
    }

    /// An upload has arrived in its slot, or failed: then the slot is empty.
    pub(super) fn end(&mut self, Move { layer, expert, slot }: Move, arrived: bool) {
        let Some(layer) = self.layers.get_mut(layer) else { return };
        let (Some(state), Some(of)) = (layer.in_slot.get_mut(slot), layer.slot_of.get_mut(expert)) else {
            return;
        };
        if *state != SlotState::Awaits(expert) {
            return;
        }
        if arrived {
            (*state, *of) = (SlotState::Holds(expert), slot as i32);
        } else {
            *state = SlotState::Empty;
        }
    }

    /// The device may have failed to write an expert that has arrived. A slot that awaits another one by now stays as it is.
    pub(super) fn forget(&mut self, Move { layer, expert, slot }: Move) {
        let Some(layer) = self.layers.get_mut(layer) else { return };
        if let (Some(state), Some(of)) = (layer.in_slot.get_mut(slot), layer.slot_of.get_mut(expert))
            && *state == SlotState::Holds(expert)
        {
            (*state, *of) = (SlotState::Empty, -1);
        }
    }

    /// A new batch begins.
    pub(super) fn begin_step(&mut self) {
        self.step += 1;
        self.counted = [0; 3];
        self.missed.clear();
    }

    /// Notes the experts that a layer used in this batch.
    pub(super) fn observe(&mut self, number: usize, experts: &[i32]) {
        let Some(layer) = self.layers.get_mut(number) else { return };
        for expert in experts.iter().filter_map(|expert| usize::try_from(*expert).ok()) {
            let (Some(slot), Some(used_at)) = (layer.slot_of.get(expert), layer.used_at.get_mut(expert))
            else {
                continue;
            };
            *used_at = self.step;
            let (hit, possible) = (*slot >= 0, layer.wanted.get(expert) == Some(&true));
            self.counted[0] += 1;
            self.counted[1] += u64::from(hit);
            self.counted[2] += u64::from(possible);
            if !possible {
                layer.want(expert);
            }
            if !hit {
                self.missed.push((number, expert));
            }
        }
    }

    /// The experts that should move now, at most so many: those of this batch that have no slot, if moving pays. The layer after
    /// that of the latest move is first, so that all layers have their turn.
    pub(super) fn moves(&mut self, most: usize) -> Vec<Move> {
        let [lookups, hits, possible] = self.counted;
        if lookups == 0 {
            return Vec::new();
        }
        (self.usage.lookups, self.usage.hits) = (self.usage.lookups + lookups, self.usage.hits + hits);
        let mix = |average: f64, now: u64| average + SMOOTHING * (now as f64 / lookups as f64 - average);
        (self.hits, self.possible) = (mix(self.hits, hits), mix(self.possible, possible));
        // Of two independent shares near one half: more than that of these two.
        let deviation = (0.5 / lookups as f64 * SMOOTHING / (2.0 - SMOOTHING)).sqrt();
        if self.possible - self.hits < MIN_GAIN.max(CHANCE * deviation) {
            return Vec::new();
        }
        let mut moves: Vec<Move> = Vec::new();
        let first = self.missed.partition_point(|(layer, _)| *layer < self.next);
        let (others, turn) = self.missed.split_at_checked(first).unwrap_or_default();
        for (number, expert) in turn.iter().chain(others) {
            if moves.len() == most {
                break;
            }
            let Some(layer) = self.layers.get(*number) else { continue };
            let taken = |slot: usize| moves.iter().any(|m| m.layer == *number && m.slot == slot);
            let in_flight = layer.in_slot.contains(&SlotState::Awaits(*expert))
                || moves.iter().any(|m| m.layer == *number && m.expert == *expert);
            if let (false, Some(slot)) = (in_flight, layer.victim(taken)) {
                moves.push(Move { layer: *number, expert: *expert, slot });
            }
        }
        moves
    }
}

impl Layer {
    /// An expert should be in a slot, instead of the one that should and was used longest ago.
    fn want(&mut self, expert: usize) {
        let wanted = self.wanted.iter().enumerate().filter(|(_, wanted)| **wanted);
        let oldest = wanted.min_by_key(|(other, _)| self.used_at.get(*other)).map(|(other, _)| other);
        let Some(oldest) = oldest else { return };
        if let Some(wanted) = self.wanted.get_mut(oldest) {
            *wanted = false;
        }
        if let Some(wanted) = self.wanted.get_mut(expert) {
            *wanted = true;
        }
    }

    /// The slot that is given up: an empty one, or that of the expert that should have none and was used longest ago.
    fn victim(&self, taken: impl Fn(usize) -> bool) -> Option<usize> {
        let free = |(slot, state): (usize, &SlotState)| match state {
            SlotState::Empty => Some((0, slot)),
            SlotState::Holds(expert) if self.wanted.get(*expert) == Some(&false) => {
                Some((self.used_at.get(*expert).copied().unwrap_or(0).saturating_add(1), slot))
            }
            SlotState::Holds(_) | SlotState::Awaits(_) => None,
        };
        let slots = self.in_slot.iter().enumerate().filter(|(slot, _)| !taken(*slot));
        slots.filter_map(free).min().map(|(_, slot)| slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step whose layers use these experts; every move arrives before the next step.
    fn step(cache: &mut ExpertResidency, used: &[Vec<i32>]) -> Vec<Move> {
        cache.begin_step();
        for (layer, experts) in used.iter().enumerate() {
            cache.observe(layer, experts);
        }
        let moves = cache.moves(64);
        for m in &moves {
            cache.begin(*m);
            cache.end(*m, true);
        }
        cache.check();
        moves
    }

    fn filled(slots: &[usize], experts: usize) -> ExpertResidency {
        let mut cache = ExpertResidency::new(slots, experts);
        for m in cache.initial_moves() {
            cache.begin(m);
            cache.end(m, true);
        }
        cache.check();
        cache
    }

    impl ExpertResidency {
        /// Every expert is in one slot at most, and the tables agree with the slots.
        fn check(&self) {
            let (mut slots, mut on_host) = (Vec::new(), Vec::new());
            self.tables(&mut slots, &mut on_host);
            let experts = self.layers.first().map_or(1, |layer| layer.slot_of.len());
            for (number, layer) in self.layers.iter().enumerate() {
                assert!(layer.wanted.iter().filter(|wanted| **wanted).count() <= layer.in_slot.len());
                for (expert, slot) in layer.slot_of.iter().enumerate() {
                    let at = number * experts + expert;
                    assert_eq!(slots[at], *slot);
                    assert_eq!(on_host[at], if *slot < 0 { expert as i32 } else { -1 });
                    let holders = layer.in_slot.iter().filter(|state| **state == SlotState::Holds(expert));
                    assert_eq!(holders.count(), usize::from(*slot >= 0), "expert {expert} of layer {number}");
                    if let Ok(slot) = usize::try_from(*slot) {
                        assert_eq!(layer.in_slot[slot], SlotState::Holds(expert));
                    }
                }
            }
        }

        fn share(&self) -> f64 {
            self.usage.hits as f64 / self.usage.lookups as f64
        }
    }

    struct Rng(u64);

    impl Rng {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) as usize) % n
        }
    }

    #[test]
    fn experts_of_a_topic_move_into_slots() {
        // Topics of 24 of 64 experts, 26 slots: nothing of the first topic is in a slot at the beginning.
        let mut cache = filled(&[26; 48], 64);
        let mut rng = Rng(1);
        let mut late = [0, 0];
        for now in 0..400 {
            let topic = now / 100 % 2;
            let mut pick = || (40 * (1 - topic) + rng.below(24)) as i32;
            let before = cache.usage;
            let used: Vec<Vec<i32>> = (0..48).map(|_| (0..8).map(|_| pick()).collect()).collect();
            step(&mut cache, &used);
            if now % 100 >= 30 {
                late[0] += cache.usage.hits - before.hits;
                late[1] += cache.usage.lookups - before.lookups;
            }
        }
        assert!(late[0] * 100 >= late[1] * 95, "{late:?}");
    }

    #[test]
    fn without_locality_nothing_moves() {
        let mut cache = filled(&[26; 8], 64);
        let (mut rng, mut moved) = (Rng(2), 0);
        for _ in 0..2000 {
            let used: Vec<Vec<i32>> =
                (0..8).map(|_| (0..8).map(|_| rng.below(64) as i32).collect()).collect();
            moved += step(&mut cache, &used).len();
        }
        assert!(moved <= 200, "{moved} experts moved for nothing");
        assert!((cache.share() - 26.0 / 64.0).abs() < 0.02, "{}", cache.share());
    }

    #[test]
    fn an_upload_counts_only_once_it_has_arrived_and_never_twice() {
        let mut cache = filled(&[1], 4);
        let used = |cache: &mut ExpertResidency, expert| {
            cache.begin_step();
            cache.observe(0, &[expert]);
            cache.moves(8)
        };
        assert_eq!(used(&mut cache, 3), [], "one step is no reason");
        let mut moves = Vec::new();
        while moves.is_empty() {
            moves = used(&mut cache, 3);
        }
        assert_eq!(moves, [Move { layer: 0, expert: 3, slot: 0 }]);
        cache.begin(moves[0]);
        assert_eq!(used(&mut cache, 3), [], "it is in flight");
        let (mut slots, mut on_host) = (Vec::new(), Vec::new());
        cache.tables(&mut slots, &mut on_host);
        assert_eq!((slots.as_slice(), on_host.as_slice()), (&[-1; 4][..], &[0, 1, 2, 3][..]));
        cache.end(moves[0], false);
        let again = used(&mut cache, 3);
        assert_eq!(again, moves, "a failed upload is started again");
        cache.begin(again[0]);
        cache.end(again[0], true);
        cache.tables(&mut slots, &mut on_host);
        assert_eq!((slots.as_slice(), on_host.as_slice()), (&[-1, -1, -1, 0][..], &[0, 1, 2, -1][..]));
        let hits = cache.usage.hits;
        assert_eq!(used(&mut cache, 3), []);
        assert_eq!(cache.usage.hits, hits + 1);
    }

    #[test]
    fn all_layers_have_their_turn_where_few_experts_may_move() {
        let mut cache = filled(&[26; 48], 64);
        let (mut rng, mut late) = (Rng(3), [0usize; 48]);
        for now in 0..1600 {
            let topic = now / 400 % 2;
            cache.begin_step();
            for (layer, hits) in late.iter_mut().enumerate() {
                let used: Vec<i32> = (0..8).map(|_| (40 * (1 - topic) + rng.below(24)) as i32).collect();
                if now % 400 >= 200 {
                    *hits += used.iter().filter(|e| cache.layers[layer].slot_of[**e as usize] >= 0).count();
                }
                cache.observe(layer, &used);
            }
            for m in cache.moves(4) {
                cache.begin(m);
                cache.end(m, true);
            }
            cache.check();
        }
        let looked_up = 1600 / 2 * 8;
        let least = late.iter().min().copied().unwrap_or(0);
        assert!(least * 10 >= looked_up * 8, "{late:?} of {looked_up}");
    }

    #[test]
    fn a_failed_batch_gives_no_slot_away_that_awaits_an_expert() {
        let mut cache = filled(&[1], 4);
        let [first, second, third] = [1, 2, 3].map(|expert| Move { layer: 0, expert, slot: 0 });
        cache.begin(first);
        cache.end(first, true);
        // Uploaded during the batch for which the first one arrived.
        cache.begin(second);
        cache.forget(first);
        cache.check();
        assert_eq!(cache.layers[0].victim(|_| false), None, "the slot awaits an expert");
        cache.end(second, true);
        cache.check();
        // What nobody awaits is not used.
        cache.end(third, true);
        cache.check();
        cache.forget(second);
        cache.check();
        assert_eq!(cache.layers[0].victim(|_| false), Some(0));
    }

    #[test]
    fn as_many_experts_move_as_may() {
        let mut cache = filled(&[4, 4], 16);
        let used = [vec![8, 9, 10, 11], vec![12, 13, 14, 15]];
        let most = |cache: &mut ExpertResidency, most| {
            cache.begin_step();
            (0..2).for_each(|layer| cache.observe(layer, &used[layer]));
            cache.moves(most).len()
        };
        while most(&mut cache, 64) == 0 {}
        assert_eq!(most(&mut cache, 64), 8);
        assert_eq!(most(&mut cache, 3), 3);
        assert_eq!(most(&mut cache, 0), 0);
    }
}
