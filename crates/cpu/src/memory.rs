//! Host memory: its size, and zeroed blocks of it.

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use quadriga_runtime::BackendError;

use crate::NAME;

/// Alignment of every buffer, in bytes.
pub const ALIGNMENT: usize = 64;

/// Blocks of at least this size are mapped from the system: zeroed on first touch, in huge pages if possible.
#[cfg(unix)]
const MAP_FROM: usize = 1 << 20;

/// Total and free bytes of memory that this process may use, as far as the system tells.
pub(crate) fn host_bytes() -> (Option<u64>, Option<u64>) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (total, free) = (field("MemTotal:"), field("MemAvailable:"));
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max")
        .or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
        .filter(|limit| total.is_none_or(|total| *limit < total));
    let used = number("/sys/fs/cgroup/memory.current")
        .or_else(|| number("/sys/fs/cgroup/memory/memory.usage_in_bytes"));
    let Some(limit) = limit else { return (total, free) };
    let statistics = std::fs::read_to_string("/sys/fs/cgroup/memory.stat")
        .or_else(|_| std::fs::read_to_string("/sys/fs/cgroup/memory/memory.stat"));
    let used = used.unwrap_or(0).saturating_sub(file_pages(&statistics.unwrap_or_default()));
    let left = limit.saturating_sub(used);
    (Some(limit), Some(free.map_or(left, |free| free.min(left))))
}

/// Bytes of blocks that were allocated and never touched, so that they still count as free. Blocks that are not mapped are small.
pub(crate) fn reserved_bytes() -> u64 {
    #[cfg(unix)]
    return crate::reservations::bytes();
    #[cfg(not(unix))]
    0
}

/// Bytes of a control group that are pages of files, such as those of a model that was read: the system takes them back where memory
/// is needed. `statistics` is its `memory.stat`.
fn file_pages(statistics: &str) -> u64 {
    let field = |name: &str| {
        let line = statistics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        line.trim().parse::<u64>().ok()
    };
    let both = |active: &str, inactive: &str| Some(field(active)?.saturating_add(field(inactive)?));
    // The older form counts groups within it apart.
    both("total_active_file", "total_inactive_file")
        .or_else(|| both("active_file", "inactive_file"))
        .unwrap_or(0)
}

/// A zeroed block of memory, freed when dropped.
#[derive(Debug)]
pub(crate) struct HostBlock {
    pointer: NonNull<u8>,
    bytes: usize,
    /// The larger block that it is part of, if any.
    part_of: Option<Arc<HostBlock>>,
}

// SAFETY: the block owns its memory; users of its address synchronize their accesses.
unsafe impl Send for HostBlock {}
// SAFETY: as above: a shared block only gives out its address.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// A block of no bytes.
    pub(crate) const fn empty() -> HostBlock {
        #[repr(align(64))]
        struct Aligned;
        // The address is never dereferenced; it is aligned like that of any block.
        HostBlock { pointer: NonNull::<Aligned>::dangling().cast(), bytes: 0, part_of: None }
    }

    /// A block of zeros at a multiple of [`ALIGNMENT`].
    ///
    /// # Errors
    /// The allocation fails, or less memory is free.
    pub(crate) fn zeroed(bytes: usize) -> Result<HostBlock, BackendError> {
        HostBlock::paged(bytes, true)
    }

    /// As [`zeroed`](HostBlock::zeroed), in huge pages from the start or not.
    fn paged(bytes: usize, huge: bool) -> Result<HostBlock, BackendError> {
        if bytes == 0 {
            return Ok(HostBlock::empty());
        }
        let missing =
            |free| BackendError::OutOfMemory { backend: NAME.into(), requested: bytes as u64, free };
        // The system overcommits and kills a process that uses too much: large blocks are checked beforehand.
        if bytes >= 64 << 20 {
            let free = host_bytes().1;
            if free.is_some_and(|free| bytes as u64 > free) {
                return Err(missing(free));
            }
        }
        match allocate(bytes, huge) {
            Some(pointer) => Ok(HostBlock { pointer, bytes, part_of: None }),
            None => Err(missing(host_bytes().1)),
        }
    }

    /// Its first byte.
    pub(crate) const fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Its size.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives the pages of a block that was mapped from the system back to it, until they are touched again: they are zeros then.
    ///
    /// # Safety
    /// Nothing reads or writes the block meanwhile, no device has its pages pinned, and nobody relies on its bytes.
    pub(crate) unsafe fn discard(&self) {
        #[cfg(target_os = "linux")]
        if self.part_of.is_none() && self.bytes >= MAP_FROM {
            // SAFETY: a private anonymous mapping of this size, which stays; as the caller promises, its contents may change. If the
            // system refuses, they do not.
            unsafe { libc::madvise(self.pointer.as_ptr().cast(), self.bytes, libc::MADV_DONTNEED) };
        }
    }

    /// Moves part of a larger block into huge pages, as far as the system can; its contents stay.
    pub(crate) fn use_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if let Some(whole) = &self.part_of {
            const HUGE: usize = 2 << 20;
            let (start, end) = (whole.pointer.as_ptr().addr(), whole.pointer.as_ptr().addr() + whole.bytes);
            let own = self.pointer.as_ptr().addr();
            // The huge pages that it is in, except those that extend past the larger block.
            let first = (own / HUGE * HUGE).max(start.next_multiple_of(HUGE));
            let last = (own + self.bytes).next_multiple_of(HUGE).min(end / HUGE * HUGE);
            if first < last {
                let pointer = whole.pointer.as_ptr().with_addr(first).cast();
                // SAFETY: advice on pages of the larger block: it may move them in physical memory, but keeps their
                // contents; an unsupported advice is refused without effect.
                unsafe {
                    libc::madvise(pointer, last - first, libc::MADV_HUGEPAGE);
                    libc::madvise(pointer, last - first, libc::MADV_COLLAPSE);
                }
            }
        }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if self.bytes > 0 && self.part_of.is_none() {
            // SAFETY: the pointer came from `allocate` with the same size, and is released once.
            unsafe { release(self.pointer, self.bytes) };
        }
    }
}

/// Allocates blocks next to each other in larger ones.
///
/// A KV cache is many tensors of a megabyte or two, each too small for a huge page of its own. Attention over four
/// thousand tokens is 1.4 times as fast where they share huge pages. These are requested when a program is compiled that
/// reads much of a tensor ([`HostBlock::use_huge_pages`]); until then, only the pages that were written are resident.
#[derive(Debug, Default)]
pub(crate) struct StateSlabs {
    /// The larger block that new blocks come from, while any of it is in use, and how many of its bytes are taken.
    current: Mutex<(Weak<HostBlock>, usize)>,
}

impl StateSlabs {
    /// Bytes of a larger block.
    const BYTES: usize = 32 << 20;

    /// As [`HostBlock::zeroed`], as part of a larger block if it is neither tiny nor large.
    ///
    /// # Errors
    /// As [`HostBlock::zeroed`].
    pub(crate) fn zeroed(&self, bytes: usize) -> Result<HostBlock, BackendError> {
        if !(16 << 10..=StateSlabs::BYTES / 4).contains(&bytes) {
            return HostBlock::zeroed(bytes);
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let (slab, used) = &mut *current;
        let (block, first) = match slab.upgrade() {
            Some(block) if *used + bytes <= block.bytes => (block, *used),
            _ => (Arc::new(HostBlock::paged(StateSlabs::BYTES, false)?), 0),
        };
        (*slab, *used) = (Arc::downgrade(&block), (first + bytes).next_multiple_of(ALIGNMENT));
        // SAFETY: `first + bytes` is inside the block, and no part of a block is handed out twice.
        let pointer = unsafe { block.pointer.add(first) };
        Ok(HostBlock { pointer, bytes, part_of: Some(block) })
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, ALIGNMENT).ok()
}

fn allocate(bytes: usize, huge: bool) -> Option<NonNull<u8>> {
    let layout = layout(bytes)?;
    #[cfg(unix)]
    if bytes >= MAP_FROM {
        // SAFETY: a new anonymous mapping touches no other memory; pages are aligned far beyond ALIGNMENT.
        let pointer = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if pointer == libc::MAP_FAILED {
            return None;
        }
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: advice on the mapping just made; it changes no contents, and a refusal changes nothing.
            unsafe { libc::madvise(pointer, bytes, libc::MADV_HUGEPAGE) };
        }
        let pointer = NonNull::new(pointer.cast())?;
        crate::reservations::add(pointer, bytes);
        return Some(pointer);
    }
    // SAFETY: the size is not 0: `HostBlock::paged` returns an empty block for that.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })
}

/// # Safety
/// The pointer came from `allocate` with the same size, and is not used again.
unsafe fn release(pointer: NonNull<u8>, bytes: usize) {
    #[cfg(unix)]
    if bytes >= MAP_FROM {
        crate::reservations::remove(pointer);
        // SAFETY: the mapping was made with this size, and nothing uses it any more.
        unsafe { libc::munmap(pointer.as_ptr().cast(), bytes) };
        return;
    }
    if let Some(layout) = layout(bytes) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(pointer.as_ptr(), layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_block_is_reserved_until_it_is_written() {
        use crate::reservations::{bytes, mappings, resident};
        const BYTES: usize = 100 << 20;
        let block = HostBlock::zeroed(BYTES).unwrap();
        let address = block.pointer().addr();
        assert_eq!(mappings().get(&address), Some(&BYTES));
        assert_eq!(resident(address, BYTES), 0);
        assert!(bytes() >= BYTES as u64);
        // SAFETY: the block has more bytes than these.
        unsafe { block.pointer().add(70 << 20).write_bytes(1, 5 << 20) };
        let written = resident(address, BYTES);
        assert!((5 << 20..=9 << 20).contains(&written), "{written}");
        drop(block);
        // Another thread may map the same address again, with another size.
        assert_ne!(mappings().get(&address), Some(&BYTES));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_block_that_is_discarded_has_no_pages_and_reads_as_zeros() {
        use crate::reservations::resident;
        const BYTES: usize = 5 << 20;
        let block = HostBlock::zeroed(BYTES).unwrap();
        let address = block.pointer().addr();
        // SAFETY: the block has these bytes, and only this thread has the block.
        let all = || unsafe { std::slice::from_raw_parts_mut(block.pointer(), BYTES) };
        all().fill(7);
        assert!(resident(address, BYTES) >= BYTES);
        // SAFETY: as above; no slice is in use.
        unsafe { block.discard() };
        assert_eq!(resident(address, BYTES), 0);
        assert!(all().iter().all(|byte| *byte == 0));
        // Small blocks have no pages of their own.
        let small = HostBlock::zeroed(5000).unwrap();
        // SAFETY: as above.
        unsafe {
            small.pointer().write(7);
            small.discard();
            assert_eq!(small.pointer().read(), 7);
        }
    }

    #[test]
    fn pages_of_files_do_not_count_as_used() {
        let second = "anon 500\nfile 300\ninactive_file 200\nactive_file 70\n";
        assert_eq!(file_pages(second), 270);
        let first = "inactive_file 2\nactive_file 3\ntotal_inactive_file 20\ntotal_active_file 30\n";
        assert_eq!(file_pages(first), 50);
        assert_eq!(file_pages(""), 0);
    }

    #[test]
    fn blocks_of_a_slab_are_disjoint_zeroed_and_freed_with_the_last_of_them() {
        let slabs = StateSlabs::default();
        let blocks: Vec<HostBlock> = (0..40).map(|i| slabs.zeroed(1_500_000 + i * 1000).unwrap()).collect();
        for (i, block) in blocks.iter().enumerate() {
            assert_eq!(block.pointer() as usize % ALIGNMENT, 0);
            // SAFETY: the block has these bytes, which are zeros until the next line.
            let all = unsafe { std::slice::from_raw_parts_mut(block.pointer(), block.bytes()) };
            assert!(all.iter().all(|b| *b == 0), "block {i}");
            all.fill(1 + i as u8);
            if i % 3 == 0 {
                block.use_huge_pages();
            }
        }
        for (i, block) in blocks.iter().enumerate() {
            // SAFETY: as above.
            let all = unsafe { std::slice::from_raw_parts(block.pointer(), block.bytes()) };
            assert!(all.iter().all(|b| *b == 1 + i as u8), "block {i}");
        }
        let slab = |block: &HostBlock| Arc::downgrade(block.part_of.as_ref().unwrap());
        let (first, last) = (slab(&blocks[0]), slab(&blocks[39]));
        assert!(!first.ptr_eq(&last), "40 blocks need more than one");
        drop(blocks);
        assert!(first.upgrade().is_none() && last.upgrade().is_none());
        assert!(slabs.zeroed(100).unwrap().part_of.is_none());
        assert!(slabs.zeroed(64 << 20).unwrap().part_of.is_none());
    }

    #[test]
    fn blocks_are_zero_aligned_and_refused_when_too_large() {
        for bytes in [1, 63, 4096, (1 << 20) - 1, 1 << 20, (1 << 21) + 5] {
            let block = HostBlock::zeroed(bytes).unwrap();
            assert_eq!(block.pointer() as usize % ALIGNMENT, 0);
            assert_eq!(block.bytes(), bytes);
            // SAFETY: the block has these bytes, all zero.
            let all = unsafe { std::slice::from_raw_parts(block.pointer(), bytes) };
            assert!(all.iter().all(|b| *b == 0));
        }
        assert_eq!(HostBlock::zeroed(0).unwrap().bytes(), 0);
        for bytes in [1 << 45, usize::MAX / 2, usize::MAX] {
            let error = HostBlock::zeroed(bytes).unwrap_err();
            assert!(
                matches!(error, BackendError::OutOfMemory { requested, .. } if requested == bytes as u64)
            );
        }
    }
}
