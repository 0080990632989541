//! ggml's best-fit rule as plainly as possible: a sorted list of free blocks, searched from end to end.
#![allow(dead_code, reason = "each test uses a part of it")]

/// The last block reaches to the end of the buffer, and stays in the list when it is empty.
pub(crate) struct BestFit {
    alignment: u64,
    /// (offset, bytes)
    pub(crate) free: Vec<(u64, u64)>,
    pub(crate) high_water: u64,
}

impl BestFit {
    pub(crate) fn new(size: u64, alignment: u64) -> Self {
        BestFit { alignment, free: vec![(0, size)], high_water: 0 }
    }

    pub(crate) fn allocate(&mut self, size: u64) -> Option<u64> {
        let size = size.next_multiple_of(self.alignment);
        let (last, others) = self.free.split_last()?;
        let mut best: Option<usize> = None;
        for (index, block) in others.iter().enumerate() {
            if block.1 >= size && best.is_none_or(|best| block.1 <= self.free[best].1) {
                best = Some(index);
            }
        }
        let best = best.or_else(|| (last.1 >= size).then_some(others.len()))?;
        let block = &mut self.free[best];
        let offset = block.0;
        *block = (block.0 + size, block.1 - size);
        if block.1 == 0 && best < self.free.len() - 1 {
            self.free.remove(best);
        }
        self.high_water = self.high_water.max(offset + size);
        Some(offset)
    }

    pub(crate) fn free(&mut self, offset: u64, size: u64) {
        let size = size.next_multiple_of(self.alignment);
        if size == 0 {
            return;
        }
        self.free.push((offset, size));
        self.free.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for &(offset, size) in &self.free {
            match merged.last_mut() {
                Some(last) if last.0 + last.1 == offset => last.1 += size,
                _ => merged.push((offset, size)),
            }
        }
        self.free = merged;
    }

    /// The free blocks that are not empty.
    pub(crate) fn blocks(&self) -> Vec<(u64, u64)> {
        self.free.iter().copied().filter(|block| block.1 > 0).collect()
    }
}

/// The high-water mark when items (bytes, first step, one past the last) are allocated and freed in order of time.
pub(crate) fn best_fit_peak(items: &[(u64, u32, u32)], alignment: u64) -> u64 {
    let mut events = Vec::new();
    for (index, (_, start, end)) in items.iter().enumerate() {
        events.push((*start, 1, index));
        events.push((*end, 0, index));
    }
    events.sort_unstable();
    let mut offsets = vec![0; items.len()];
    let mut list = BestFit::new(u64::MAX, alignment);
    for (_, starts, index) in events {
        if starts == 1 {
            offsets[index] = list.allocate(items[index].0).unwrap();
        } else {
            list.free(offsets[index], items[index].0);
        }
    }
    list.high_water
}
