//! The slots of an engine: numbers for the sequences that are computed at once, as llama-server has them. The KV cache is made of pages
//! that belong to no slot, so a number says which of the answers it is, and nothing about where it is computed.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Which slots are taken.
#[derive(Debug)]
pub(crate) struct SlotTable {
    taken: Mutex<Vec<bool>>,
}

impl SlotTable {
    /// A table of so many slots.
    pub(crate) fn new(count: usize) -> SlotTable {
        SlotTable { taken: Mutex::new(vec![false; count.max(1)]) }
    }

    /// Takes the wanted slot if it is free, or the first that is.
    fn take(&self, wanted: Option<usize>) -> Option<usize> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |slot: &usize| taken.get(*slot) == Some(&false);
        let slot = wanted.filter(is_free).or_else(|| taken.iter().position(|taken| !taken))?;
        if let Some(place) = taken.get_mut(slot) {
            *place = true;
        }
        Some(slot)
    }

    fn free(&self, slot: usize) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = taken.get_mut(slot) {
            *place = false;
        }
    }
}

/// No slot, as an atomic number.
const NONE: usize = usize::MAX;

/// The slot of one answer: it is taken when its first part is computed, and freed when the answer ends.
#[derive(Debug)]
pub(crate) struct AnswerSlot {
    table: Arc<SlotTable>,
    wanted: Option<usize>,
    /// The slot that it has or had.
    number: AtomicUsize,
    held: AtomicUsize,
}

impl AnswerSlot {
    /// The slot of an answer that waits, and would rather have a certain one.
    pub(crate) fn new(table: &Arc<SlotTable>, wanted: Option<usize>) -> AnswerSlot {
        let (number, held) = (AtomicUsize::new(NONE), AtomicUsize::new(NONE));
        AnswerSlot { table: Arc::clone(table), wanted, number, held }
    }

    /// Takes a slot, if the answer has and had none. Where sequences that were put back hold all of them, it shares the wanted one or
    /// the first.
    pub(crate) fn begin(&self) {
        if self.number.load(Ordering::Acquire) != NONE {
            return;
        }
        let taken = self.table.take(self.wanted);
        self.held.store(taken.unwrap_or(NONE), Ordering::Release);
        self.number.store(taken.or(self.wanted).unwrap_or(0), Ordering::Release);
    }

    /// Frees the slot: the answer has ended.
    pub(crate) fn end(&self) {
        match self.held.swap(NONE, Ordering::AcqRel) {
            NONE => {}
            slot => self.table.free(slot),
        }
    }

    /// The slot that it has or had; `None` while it waits.
    pub(crate) fn number(&self) -> Option<usize> {
        Some(self.number.load(Ordering::Acquire)).filter(|slot| *slot != NONE)
    }

    /// The slot that it holds.
    pub(crate) fn held(&self) -> Option<usize> {
        Some(self.held.load(Ordering::Acquire)).filter(|slot| *slot != NONE)
    }
}

impl Drop for AnswerSlot {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_as_wanted_and_freed() {
        let table = Arc::new(SlotTable::new(2));
        let begun = |wanted| {
            let slot = AnswerSlot::new(&table, wanted);
            assert_eq!(slot.number(), None);
            slot.begin();
            slot
        };
        let (second, first) = (begun(Some(1)), begun(Some(1)));
        assert_eq!((second.number(), first.number()), (Some(1), Some(0)));
        let none = begun(None);
        assert_eq!((none.number(), none.held()), (Some(0), None));
        first.end();
        // The number stays in the answer.
        assert_eq!((first.number(), first.held()), (Some(0), None));
        let next = begun(Some(1));
        assert_eq!(next.number(), Some(0));
        drop(second);
        assert_eq!(begun(None).number(), Some(1));
    }
}
