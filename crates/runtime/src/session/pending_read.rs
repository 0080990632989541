//! Outputs that are copied to the host while devices already compute the next run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::lane::Lane;
use super::outputs::OutputPlace;
use super::prepared::PreparedPlan;
use super::tensor_ref::TensorRef;
use crate::schedule::MAX_PENDING_READS;
use crate::{Buffer, Event, Region, RuntimeError};

/// Outputs that are being read, from [`Session::read_async`](crate::Session::read_async); to be finished with
/// [`Session::finish_read`](crate::Session::finish_read).
#[derive(Debug, PartialEq, Eq)]
pub struct PendingRead {
    /// The session's [`PendingReads::owner`].
    owner: u64,
    number: u64,
}

/// All pending reads of a session.
pub(crate) struct PendingReads {
    /// A number that no other session has.
    owner: u64,
    slots: [ReadSlot; MAX_PENDING_READS],
    /// How many reads there have been.
    count: u64,
}

/// Staging memory and events of a read, kept for the next one.
#[derive(Default)]
struct ReadSlot {
    /// The read that has the slot; 0 for none.
    number: u64,
    outputs: Vec<StagedOutput>,
    used: usize,
    /// For each backend that was read from, the event that its copies are done, and whether the current read waits for
    /// it.
    done: Vec<(usize, Arc<dyn Event>, bool)>,
}

/// One output of a read.
struct StagedOutput {
    backend: usize,
    staging: Arc<dyn Buffer>,
    bytes: usize,
}

impl PendingReads {
    pub(crate) fn new() -> PendingReads {
        static SESSIONS: AtomicU64 = AtomicU64::new(0);
        PendingReads { owner: SESSIONS.fetch_add(1, Ordering::Relaxed), slots: Default::default(), count: 0 }
    }

    /// Abandons all reads.
    pub(crate) fn forget(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.number = 0);
    }

    /// Enqueues copies of outputs of a plan's latest run.
    pub(crate) fn start(
        &mut self,
        plan: &PreparedPlan,
        outputs: &[&str],
        lanes: &mut [Lane],
    ) -> Result<PendingRead, RuntimeError> {
        // Before a slot is taken, which an earlier read may still have.
        for name in outputs {
            plan.result(TensorRef::Name(name))?;
        }
        self.count += 1;
        let number = self.count;
        // A free one, or else that of the oldest read.
        let slot = self.slots.iter_mut().min_by_key(|slot| slot.number);
        let slot = slot.ok_or_else(|| RuntimeError::internal("a pending read has no slot"))?;
        // Copies of a read that was never finished may still write to the slot's staging memory.
        slot.wait()?;
        (slot.number, slot.used) = (0, 0);
        for name in outputs {
            let place = plan.result(TensorRef::Name(name))?;
            let Some(lane) = lanes.get_mut(place.backend) else { return Err(RuntimeError::ForeignPlan) };
            slot.enqueue(lane, place, plan.inputs.bank)?;
        }
        for (backend, event, _) in slot.done.iter().filter(|(_, _, waits)| *waits) {
            let Some(lane) = lanes.get_mut(*backend) else { continue };
            lane.compute.record(&**event).map_err(RuntimeError::device)?;
        }
        slot.number = number;
        Ok(PendingRead { owner: self.owner, number })
    }

    /// Waits for a read, and copies the bytes of its outputs, one after the other.
    pub(crate) fn finish(&mut self, read: &PendingRead, into: &mut [u8]) -> Result<(), RuntimeError> {
        if read.owner != self.owner {
            return Err(RuntimeError::ForeignRead);
        }
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.number == read.number) else {
            return Err(RuntimeError::Gone { name: "of the pending read".to_owned() });
        };
        slot.number = 0;
        let outputs = slot.outputs.get(..slot.used).unwrap_or_default();
        let expected = outputs.iter().map(|output| output.bytes).sum();
        if into.len() != expected {
            let (name, found) = ("the pending read".to_owned(), into.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        slot.wait()?;
        let mut rest = into;
        for output in slot.outputs.iter().take(slot.used) {
            let Some((bytes, others)) = rest.split_at_mut_checked(output.bytes) else { break };
            output.staging.read(0, bytes).map_err(RuntimeError::device)?;
            rest = others;
        }
        Ok(())
    }
}

impl ReadSlot {
    /// Waits for the copies of the slot's latest read, unless it was waited for.
    fn wait(&mut self) -> Result<(), RuntimeError> {
        for (_, event, waits) in &mut self.done {
            if std::mem::take(waits) {
                event.wait().map_err(RuntimeError::device)?;
            }
        }
        Ok(())
    }

    /// Enqueues the copy of an output to staging memory, after the run.
    fn enqueue(&mut self, lane: &mut Lane, place: &OutputPlace, bank: usize) -> Result<(), RuntimeError> {
        let from = place.region(bank);
        let fits = |out: &StagedOutput| out.backend == place.backend && out.staging.bytes() >= from.bytes;
        if !self.outputs.get(self.used).is_some_and(fits) {
            let staging = lane.backend.staging(from.bytes).map_err(RuntimeError::device)?;
            self.outputs.truncate(self.used);
            self.outputs.push(StagedOutput { backend: place.backend, staging, bytes: 0 });
        }
        let Some(output) = self.outputs.get_mut(self.used) else {
            return Err(RuntimeError::internal("an output has no staging memory"));
        };
        output.bytes = from.bytes;
        self.used += 1;
        let mut copy = || {
            let to = Region::new(Arc::clone(&output.staging), 0, from.bytes)?;
            if !lane.compute.copy(from, &to)? {
                let mut bytes = vec![0; from.bytes];
                lane.compute.read(from, &mut bytes)?;
                output.staging.write(0, &bytes)?;
            }
            Ok(())
        };
        copy().map_err(|error| RuntimeError::device(error).at(|| place.name.clone()))?;
        if lane.is_asynchronous() {
            match self.done.iter_mut().find(|(backend, ..)| *backend == place.backend) {
                Some((_, _, waits)) => *waits = true,
                None => {
                    let event = lane.backend.event(false).map_err(RuntimeError::device)?;
                    self.done.push((place.backend, event, true));
                }
            }
        }
        Ok(())
    }
}
