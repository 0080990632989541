//! Copies of the selected slices of a weight.

use std::sync::{Arc, Mutex, PoisonError};

use quadriga_runtime::{BackendError, Region, SliceSelection};

use crate::program::{PACKED, get, put};

/// What slices have that are not copied: reading them yields garbage.
const NOT_COPIED: u8 = 0xa5;

/// The slices that were selected last: known once the copy has run.
type Selected = Arc<Mutex<Vec<bool>>>;

/// A copy of some slices of a weight.
pub(crate) struct SliceCopy {
    from: Region,
    to: Region,
    /// The indices of the slices; `None` copies those that were selected last.
    ids: Option<Region>,
    slices: usize,
    packed: bool,
    /// Whether the slices that were selected last are there already.
    prefetched: bool,
    last: Selected,
}

impl SliceCopy {
    /// A copy of the selected slices.
    pub(crate) fn selected(from: &Region, to: &Region, selection: &mut SliceSelection) -> SliceCopy {
        let known = selection.memory.as_ref().and_then(|memory| memory.downcast_ref::<Selected>());
        let last = known.map(Arc::clone).unwrap_or_default();
        selection.memory = Some(Box::new(Arc::clone(&last)));
        SliceCopy {
            from: from.clone(),
            to: to.clone(),
            ids: Some(selection.ids.clone()),
            slices: selection.slices(),
            packed: selection.layout == PACKED,
            prefetched: selection.prefetched,
            last,
        }
    }

    /// A copy of the slices that were selected last; `None` if none were.
    pub(crate) fn likely(from: &Region, to: &Region, selection: &mut SliceSelection) -> Option<SliceCopy> {
        selection.memory.as_ref()?;
        Some(SliceCopy { ids: None, prefetched: false, ..SliceCopy::selected(from, to, selection) })
    }

    /// The memory that it accesses; `true` for writes.
    pub(crate) fn accesses(&self) -> [Option<(&Region, bool)>; 3] {
        let ids = self.ids.as_ref().map(|ids| (ids, false));
        [ids, Some((&self.from, false)), Some((&self.to, true))]
    }

    /// Copies the slices; how many bytes they have. `bytes` is working memory.
    pub(crate) fn run(&self, bytes: &mut Vec<u8>) -> Result<usize, BackendError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.resize(self.slices, false);
        let there = last.clone();
        if let Some(ids) = &self.ids {
            get(ids, bytes)?;
            last.fill(false);
            let (ids, _) = bytes.as_chunks::<4>();
            for id in ids.iter().map(|id| i32::from_le_bytes(*id)) {
                if let Some(selected) = usize::try_from(id).ok().and_then(|id| last.get_mut(id)) {
                    *selected = true;
                }
            }
        }
        if !self.prefetched {
            put(&self.to, &vec![NOT_COPIED; self.to.bytes])?;
        }
        let each = self.from.bytes / self.slices.max(1);
        let mut copied = 0;
        for (slice, (selected, there)) in last.iter().zip(there).enumerate() {
            if !selected || (self.prefetched && there) {
                continue;
            }
            get(&self.from.part(slice * each, each)?, bytes)?;
            if self.packed {
                bytes.iter_mut().for_each(|byte| *byte = !*byte);
            }
            put(&self.to.part(slice * each, each)?, bytes)?;
            copied += each;
        }
        Ok(copied)
    }
}

/// The slices that were selected last, if any were.
pub(crate) fn selected(selection: &SliceSelection) -> Option<Vec<bool>> {
    let last = selection.memory.as_ref()?.downcast_ref::<Selected>()?;
    Some(last.lock().unwrap_or_else(PoisonError::into_inner).clone())
}
