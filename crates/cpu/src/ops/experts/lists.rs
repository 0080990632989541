//! The rows of each expert.

use super::expert;
use crate::kernels::matmul::NO_ROW;
use crate::memory::HostBlock;
use crate::view::TensorView;

/// Rows sorted by expert, each expert's rows padded to a multiple of the activation format's row granularity.
///
/// ```text
/// ends    [experts]   one past the last place of each expert; last, that of the rows without an expert
/// gather  [places]    the row of the activations that goes to each place, or none
/// scatter [places]    the row of the result that comes from each place, or none
/// ```
pub(super) struct ExpertLists {
    block: HostBlock,
    /// The lists: one for each expert, and one for rows without an expert.
    lists: usize,
    places: usize,
}

impl ExpertLists {
    /// Lists of this many places for the rows of all experts.
    pub(super) fn new(experts: usize, places: usize) -> Result<ExpertLists, String> {
        let lists = experts.checked_add(1).ok_or("too many experts")?;
        let bytes = places
            .checked_mul(2)
            .and_then(|count| count.checked_add(lists)?.checked_mul(size_of::<u32>()))
            .ok_or("too many rows")?;
        let block = HostBlock::zeroed(bytes).map_err(|error| error.to_string())?;
        Ok(ExpertLists { block, lists, places })
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.block.bytes()
    }
    fn part(&self, first: usize, len: usize) -> *mut u32 {
        debug_assert!((first + len) * size_of::<u32>() <= self.block.bytes());
        self.block.pointer().cast::<u32>().wrapping_add(first)
    }

    /// # Safety
    /// No other thread uses the lists.
    #[expect(clippy::mut_from_ref, reason = "the memory is shared among threads, with barriers between uses")]
    unsafe fn for_writing(&self) -> (&mut [u32], &mut [u32], &mut [u32]) {
        // SAFETY: three parts of the block that do not overlap; no other thread uses them, as the caller promised.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.part(0, self.lists), self.lists),
                std::slice::from_raw_parts_mut(self.part(self.lists, self.places), self.places),
                std::slice::from_raw_parts_mut(self.part(self.lists + self.places, self.places), self.places),
            )
        }
    }

    /// # Safety
    /// No thread writes the lists.
    pub(super) unsafe fn for_reading(&self) -> (&[u32], &[u32], &[u32]) {
        // SAFETY: as in `for_writing`, for reading.
        unsafe {
            (
                std::slice::from_raw_parts(self.part(0, self.lists), self.lists),
                std::slice::from_raw_parts(self.part(self.lists, self.places), self.places),
                std::slice::from_raw_parts(self.part(self.lists + self.places, self.places), self.places),
            )
        }
    }

    /// Sorts the rows of the experts `ids [tokens, used]`, of which row `row_of(token, slot)` is read; the rows of an
    /// expert begin at multiples of `step`.
    ///
    /// # Safety
    /// No other thread uses the lists.
    pub(super) unsafe fn sort(
        &self,
        ids: &TensorView,
        step: usize,
        row_of: impl Fn(usize, usize) -> u32,
    ) -> Result<(), String> {
        // SAFETY: promised by the caller.
        let (ends, gather, scatter) = unsafe { self.for_writing() };
        ends.fill(0);
        gather.fill(NO_ROW);
        scatter.fill(NO_ROW);
        let [_, _, tokens, used] = ids.dims;
        // Rows of experts that are not here come last.
        let absent = self.lists - 1;
        let list_of = |t, u| Ok::<usize, String>(expert(ids, t, u, absent)?.unwrap_or(absent));
        let pairs = || (0..tokens).flat_map(|t| (0..used).map(move |u| (t, u)));
        for (t, u) in pairs() {
            if let Some(count) = ends.get_mut(list_of(t, u)?) {
                *count += 1;
            }
        }
        // A prefix sum makes starts of counts; placing rows then moves each start to its end.
        let mut start = 0;
        for end in ends.iter_mut() {
            let count = *end;
            *end = start;
            start += count.next_multiple_of(step as u32);
        }
        for (t, u) in pairs() {
            let list = list_of(t, u)?;
            let Some(end) = ends.get_mut(list) else { continue };
            let place = *end as usize;
            *end += 1;
            if let (Some(from), Some(to)) = (gather.get_mut(place), scatter.get_mut(place)) {
                *from = if list == absent { NO_ROW } else { row_of(t, u) };
                *to = (t * used + u) as u32;
            }
        }
        Ok(())
    }
}
