//! A fingerprint of everything that decides a plan, so that a plan is used again only for what it was made for.

use std::fmt;

use super::lifetimes::Lifetime;
use super::packing::Effort;
use super::request::{Inputs, Request};

/// 128 bits that tell requests apart: the graph's own fingerprint, the backends' memories and how they pad, and where
/// and when everything runs. Equal totals or sizes alone never make two requests equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct PlanKey(pub u128);

impl fmt::Debug for PlanKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Two lanes of multiply-and-fold, each word with both lanes' history.
struct Mixer(u64, u64);

impl Mixer {
    fn word(&mut self, word: u64) {
        let fold = |a: u64, b: u64| {
            let wide = u128::from(a) * u128::from(b);
            (wide as u64) ^ ((wide >> 64) as u64)
        };
        let (a, b) = (self.0, self.1);
        self.0 = fold(a ^ word, 0xa076_1d64_78bd_642f).wrapping_add(b);
        self.1 = fold(b ^ word.rotate_left(32), 0xe703_7ed1_a0b4_28db).wrapping_add(a.rotate_left(23));
    }

    fn text(&mut self, text: &str) {
        self.word(text.len() as u64);
        for chunk in text.as_bytes().chunks(8) {
            self.word(chunk.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte)));
        }
    }
}

impl Request<'_> {
    /// The fingerprint of this request. Takes time in proportion to the lists given, and no memory.
    pub fn key(&self) -> PlanKey {
        let mut mix = Mixer(0x8ebc_6af0_9c88_c6e3, 0x5899_65cc_7537_4cc3);
        let graph = self.graph.fingerprint().0;
        mix.word(graph as u64);
        mix.word((graph >> 64) as u64);
        for memory in self.memories {
            mix.text(memory.name);
            mix.word(memory.facts.alignment as u64);
            mix.word(memory.facts.max_buffer.map_or(u64::MAX, |max| max as u64));
        }
        let lengths = [self.memories.len(), self.backends.len(), self.steps.len(), self.holds.len()];
        lengths.into_iter().for_each(|length| mix.word(length as u64));
        for four in self.backends.chunks(4) {
            mix.word(four.iter().fold(0, |word, backend| (word << 16) | u64::from(*backend)));
        }
        for two in self.steps.chunks(2) {
            mix.word(two.iter().fold(0, |word, step| (word << 32) | u64::from(*step)));
        }
        for hold in self.holds {
            mix.word((hold.tensor.index() as u64) << 32 | u64::from(hold.until));
        }
        mix.word(self.extras.len() as u64);
        for extra in self.extras {
            let Lifetime { start, end } = extra.lifetime;
            mix.word(extra.backend.into());
            mix.word(extra.bytes);
            mix.word(u64::from(start) << 32 | u64::from(end));
        }
        mix.word(self.placed.len() as u64);
        for tensor in self.placed {
            mix.word(tensor.index() as u64);
        }
        mix.word((self.inputs == Inputs::Release).into());
        match self.effort {
            Effort::Fast => mix.word(1),
            Effort::Search { seed, steps } => [2, seed, steps].into_iter().for_each(|word| mix.word(word)),
            Effort::Exact { capacity, steps } => {
                [3, capacity.unwrap_or(u64::MAX), steps].into_iter().for_each(|word| mix.word(word));
            }
        }
        if self.memories.iter().any(|memory| memory.pads()) {
            for (index, tensor) in self.graph.tensors().iter().enumerate() {
                if let Some(memory) = self.memories.get(usize::from(self.backend(index))) {
                    mix.word(memory.storage_bytes(tensor));
                }
            }
        }
        (0..3).for_each(|round| mix.word(round));
        PlanKey(u128::from(mix.0) << 64 | u128::from(mix.1))
    }
}
