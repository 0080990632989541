//! Device-side fault reports: how a kernel reports bad data, such as a row index out of range.
//!
//! The kernel skips the access and stores a fault code in its program's fault word, in pinned host memory (the first
//! report wins). Whoever waits for work of a queue reads the words of the programs that ran there, and finds node and
//! reason in the program's table.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use quadriga_runtime::{BackendError, RankGroup};

use crate::buffer::PinnedBuffer;
use crate::context::Context;

/// Fault words that are allocated at a time.
const WORDS_PER_PAGE: usize = 1024;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of [`WORDS_PER_PAGE`] words at an address that stays until the page is dropped.
trait WordPage: Send {
    fn address(&self) -> usize;
}

impl WordPage for PinnedBuffer {
    fn address(&self) -> usize {
        PinnedBuffer::address(self).expose_provenance()
    }
}

type AllocatePage = Box<dyn Fn() -> Result<Box<dyn WordPage>, BackendError> + Send + Sync>;

/// The fault words of a backend.
pub(crate) struct FaultWords {
    backend: String,
    allocate: AllocatePage,
    pool: Mutex<WordPool>,
}

#[derive(Default)]
struct WordPool {
    /// Freed with the pool.
    pages: Vec<Box<dyn WordPage>>,
    /// Addresses of the words that no program has.
    free: Vec<usize>,
}

impl FaultWords {
    pub(crate) fn new(context: &Arc<Context>) -> FaultWords {
        let (backend, context) = (context.name.clone(), Arc::clone(context));
        let allocate = move || -> Result<Box<dyn WordPage>, BackendError> {
            Ok(Box::new(PinnedBuffer::new(&context, WORDS_PER_PAGE * 4)?))
        };
        FaultWords { backend, allocate: Box::new(allocate), pool: Mutex::default() }
    }
}

/// The faults of one program.
pub(crate) struct ProgramFaults {
    words: Arc<FaultWords>,
    /// The address of a word that no other program has.
    address: usize,
    /// Node and reason of each fault code: code `i` is at `i − 1`, and 0 means no fault.
    table: Mutex<Vec<(String, &'static str)>>,
    /// The ranks of the program's collectives, each with the name of a node.
    ranks: Mutex<Vec<(String, Arc<dyn RankGroup>)>>,
}

impl ProgramFaults {
    pub(crate) fn new(words: &Arc<FaultWords>) -> Result<ProgramFaults, BackendError> {
        let mut pool = lock(&words.pool);
        if pool.free.is_empty() {
            let page = (words.allocate)()?;
            let base = page.address();
            pool.free.extend((0..WORDS_PER_PAGE).rev().map(|word| base + 4 * word));
            pool.pages.push(page);
        }
        let address = pool.free.pop().unwrap_or_default();
        drop(pool);
        let faults = ProgramFaults {
            words: Arc::clone(words),
            address,
            table: Mutex::default(),
            ranks: Mutex::default(),
        };
        faults.word().store(0, Ordering::Release);
        Ok(faults)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the address is that of four aligned bytes of one of the pool's pages, which live as long as this; the
        // device writes the word only with system-wide atomics.
        unsafe { AtomicU32::from_ptr(std::ptr::with_exposed_provenance_mut(self.address)) }
    }

    /// The address of the fault word, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }

    /// The code with which a kernel reports this fault.
    pub(crate) fn code(&self, node: &str, reason: &'static str) -> u32 {
        let mut table = lock(&self.table);
        if let Some(known) = table.iter().position(|(n, r)| n == node && *r == reason) {
            return known as u32 + 1;
        }
        table.push((node.to_owned(), reason));
        table.len() as u32
    }

    /// Reports a failure of ranks that a collective of the program is executed with: its results are not valid then.
    pub(crate) fn watch_ranks(&self, node: &str, ranks: &Arc<dyn RankGroup>) {
        let mut known = lock(&self.ranks);
        if !known.iter().any(|(_, known)| Arc::ptr_eq(known, ranks)) {
            known.push((node.to_owned(), Arc::clone(ranks)));
        }
    }

    /// The fault reported since the last call, as an error. A failure of ranks stays.
    fn take(&self) -> Result<(), BackendError> {
        for (node, ranks) in lock(&self.ranks).iter() {
            if let Some(reason) = ranks.failure() {
                let (backend, node) = (self.words.backend.clone(), node.clone());
                return Err(BackendError::Node { backend, node, reason });
            }
        }
        if self.word().load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let code = self.word().swap(0, Ordering::AcqRel);
        let table = lock(&self.table);
        let (node, reason) = table
            .get((code as usize).wrapping_sub(1))
            .map_or(("unknown node", "bad data"), |(node, reason)| (node.as_str(), *reason));
        Err(BackendError::Node {
            backend: self.words.backend.clone(),
            node: node.to_owned(),
            reason: reason.to_owned(),
        })
    }
}

impl Drop for ProgramFaults {
    fn drop(&mut self) {
        // Queues hold this until the program's last run is complete, so no kernel stores to the word any more.
        lock(&self.words.pool).free.push(self.address);
    }
}

/// The faults of the programs that ran on a queue, and on queues that it waited for.
#[derive(Default)]
pub(crate) struct QueueFaults {
    /// Each program with the number of its last run.
    programs: Mutex<Vec<(Arc<ProgramFaults>, u64)>>,
    /// How many runs were launched.
    runs: AtomicU64,
    waited_for: Mutex<Vec<Weak<QueueFaults>>>,
}

impl QueueFaults {
    /// Notes a run of a program.
    pub(crate) fn add_run(&self, faults: &Arc<ProgramFaults>) {
        let run = self.runs.fetch_add(1, Ordering::Relaxed) + 1;
        let mut programs = lock(&self.programs);
        match programs.iter_mut().find(|(known, _)| Arc::ptr_eq(known, faults)) {
            Some((_, last)) => *last = run,
            None => programs.push((Arc::clone(faults), run)),
        }
    }

    /// Notes that later work of this queue comes after work of another one.
    pub(crate) fn add_wait(&self, other: &Arc<QueueFaults>) {
        let mut waited_for = lock(&self.waited_for);
        let this = std::ptr::from_ref(self);
        if Arc::as_ptr(other) != this && !waited_for.iter().any(|known| known.as_ptr() == Arc::as_ptr(other))
        {
            waited_for.retain(|known| known.strong_count() > 0);
            waited_for.push(Arc::downgrade(other));
        }
    }

    /// How many runs were launched so far.
    pub(crate) fn runs(&self) -> u64 {
        self.runs.load(Ordering::Relaxed)
    }

    /// A fault that was reported and not taken yet, as an error. The first `complete` runs of this queue are complete:
    /// programs that were dropped since are forgotten.
    pub(crate) fn take(&self, complete: u64) -> Result<(), BackendError> {
        let mut taken = self.take_own();
        let mut seen = vec![std::ptr::from_ref(self)];
        let mut others: Vec<Arc<QueueFaults>> =
            lock(&self.waited_for).iter().filter_map(Weak::upgrade).collect();
        while let Some(other) = others.pop() {
            if !seen.contains(&Arc::as_ptr(&other)) {
                seen.push(Arc::as_ptr(&other));
                taken = taken.and_then(|()| other.take_own());
                others.extend(lock(&other.waited_for).iter().filter_map(Weak::upgrade));
            }
        }
        lock(&self.programs).retain(|(faults, last)| *last > complete || Arc::strong_count(faults) > 1);
        taken
    }

    fn take_own(&self) -> Result<(), BackendError> {
        lock(&self.programs).iter().try_for_each(|(faults, _)| faults.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct HostPage(Box<[AtomicU32]>);

    impl WordPage for HostPage {
        fn address(&self) -> usize {
            self.0.as_ptr().expose_provenance()
        }
    }

    fn words() -> Arc<FaultWords> {
        let page = || (0..WORDS_PER_PAGE).map(|_| AtomicU32::new(0)).collect();
        Arc::new(FaultWords {
            backend: "test".into(),
            allocate: Box::new(move || Ok(Box::new(HostPage(page())))),
            pool: Mutex::default(),
        })
    }

    fn program(words: &Arc<FaultWords>, node: &str) -> Arc<ProgramFaults> {
        let faults = Arc::new(ProgramFaults::new(words).unwrap());
        assert_eq!(faults.code(node, "bad"), 1);
        faults
    }

    fn node(result: Result<(), BackendError>) -> Option<String> {
        match result {
            Err(BackendError::Node { node, .. }) => Some(node),
            _ => None,
        }
    }

    #[test]
    fn a_fault_is_reported_once_by_its_own_queue() {
        let words = words();
        let (one, two) = (program(&words, "one"), program(&words, "two"));
        let (mine, other) = (QueueFaults::default(), QueueFaults::default());
        mine.add_run(&one);
        other.add_run(&two);
        one.word().store(1, Ordering::Release);
        assert_eq!(node(other.take(1)), None);
        assert_eq!(node(mine.take(1)).as_deref(), Some("one"));
        assert_eq!(node(mine.take(1)), None);
    }

    #[test]
    fn a_queue_reports_faults_of_queues_that_it_waited_for() {
        let words = words();
        let (compute, copies) = (Arc::new(QueueFaults::default()), Arc::new(QueueFaults::default()));
        let one = program(&words, "one");
        compute.add_run(&one);
        // Each waits for the other, as in a pipeline.
        copies.add_wait(&compute);
        compute.add_wait(&copies);
        compute.add_wait(&compute);
        one.word().store(1, Ordering::Release);
        assert_eq!(node(copies.take(0)).as_deref(), Some("one"));
        assert_eq!(node(compute.take(1)), None);
    }

    #[test]
    fn a_word_is_reused_once_its_dropped_program_is_complete() {
        let words = words();
        let queue = QueueFaults::default();
        let dropped = program(&words, "dropped");
        let address = dropped.address();
        queue.add_run(&dropped);
        queue.add_run(&dropped);
        drop(dropped);
        queue.take(1).unwrap();
        assert_ne!(program(&words, "next").address(), address, "its second run may be in flight");
        queue.take(2).unwrap();
        let reused = program(&words, "reused");
        assert_eq!((reused.address(), reused.word().load(Ordering::Acquire)), (address, 0));
    }
}
