//! Memory of others that does not keep to the rules, and what every backend must do with it.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_graph::Data;
use quadriga_runtime::{Backend, BackendError, Buffer, Region, Usage};

/// An owner that answers with one vector and with another in turn.
struct Alternating {
    answers: [Vec<u8>; 2],
    asked: AtomicUsize,
}

impl AsRef<[u8]> for Alternating {
    fn as_ref(&self) -> &[u8] {
        &self.answers[self.asked.fetch_add(1, Ordering::Relaxed) % 2]
    }
}

/// What a backend maps are the bytes that it got first, however often they are copied and read. `false` if it maps nothing.
pub(crate) fn check_alternating_owner(backend: &dyn Backend) -> bool {
    // Without a whole page, which cannot be locked, and with some.
    for len in [100, 20_000] {
        let owner = Alternating { answers: [vec![1; len], vec![2; len]], asked: AtomicUsize::new(0) };
        let Some(mapped) = backend.map(&Data::deferred(Arc::new(owner), len)) else { return false };
        let from = Region::new(Arc::clone(&mapped), 0, len).unwrap();
        let mut queue = backend.queue().unwrap();
        for round in 0..3 {
            let to = Region::new(backend.allocate(len, Usage::Compute).unwrap(), 0, len).unwrap();
            assert!(queue.copy(&from, &to).unwrap());
            let mut found = vec![0; len];
            queue.read(&to, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == 1), "{len} bytes, round {round}");
            mapped.read(0, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == 1), "{len} bytes, round {round}");
        }
    }
    true
}

/// A buffer of somebody else that says the host can address it, at an address where nothing is. Counts reads and writes.
#[derive(Default)]
pub(crate) struct Elsewhere {
    reads: AtomicUsize,
    writes: AtomicUsize,
}

const ELSEWHERE_BYTES: usize = 20 << 20;

impl Buffer for Elsewhere {
    fn backend(&self) -> &str {
        "elsewhere"
    }
    fn bytes(&self) -> usize {
        ELSEWHERE_BYTES
    }
    fn usage(&self) -> Usage {
        Usage::Compute
    }
    fn is_host(&self) -> bool {
        true
    }
    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        into.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((offset + at) % 251) as u8);
        Ok(())
    }
    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        assert!(from.iter().enumerate().all(|(at, byte)| *byte == ((offset + at) % 251) as u8));
        Ok(())
    }
    fn address(&self) -> u64 {
        4096
    }
    fn clear(&self, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Copies from and to such a buffer go through its methods.
pub(crate) fn check_foreign_host_buffer(backend: &dyn Backend) {
    let elsewhere = Arc::new(Elsewhere::default());
    let shared: Arc<dyn Buffer> = Arc::<Elsewhere>::clone(&elsewhere);
    let mut queue = backend.queue().unwrap();
    // Small copies may be batched, and large ones are cut into parts.
    for len in [16, 3000, 1 << 20, ELSEWHERE_BYTES] {
        let counts = || (elsewhere.reads.load(Ordering::Relaxed), elsewhere.writes.load(Ordering::Relaxed));
        let before = counts();
        let from = Region::new(Arc::clone(&shared), 0, len).unwrap();
        let to = Region::new(backend.allocate(len, Usage::Compute).unwrap(), 0, len).unwrap();
        assert!(queue.copy(&from, &to).unwrap());
        let mut found = vec![0; len];
        queue.read(&to, &mut found).unwrap();
        assert!(found.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8), "{len} bytes");
        assert!(queue.copy(&to, &from).unwrap());
        queue.synchronize().unwrap();
        let after = counts();
        assert!(after.0 > before.0 && after.1 > before.1, "{len} bytes: {before:?}, then {after:?}");
    }
}
