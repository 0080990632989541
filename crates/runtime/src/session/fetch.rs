//! Small results that are on their way to the host while devices already do something else.

use std::sync::Arc;

use super::Session;
use super::cache::Results;
use super::lane::Lane;
use super::outputs::OutputPlace;
use crate::{Buffer, Event, Region, RuntimeError};

/// Outputs of a run that were asked for, to be had from [`Session::receive`].
#[derive(Debug, PartialEq, Eq)]
pub struct Fetched {
    number: u64,
}

/// How many fetches may be under way: one that is waited for, and one for the run behind it.
const SLOTS: usize = 2;

/// All fetches of a session.
#[derive(Default)]
pub(crate) struct Fetches {
    slots: [Slot; SLOTS],
    /// How many there have been.
    count: u64,
}

/// Room for the outputs of a fetch, kept to be used again.
#[derive(Default)]
struct Slot {
    /// Which fetch has it; 0 for none.
    number: u64,
    parts: Vec<Part>,
    used: usize,
    /// For each backend that a fetch came from, the event that its bytes are there, and whether this fetch waits for
    /// it.
    ends: Vec<(usize, Arc<dyn Event>, bool)>,
}

/// One output of a fetch.
struct Part {
    backend: usize,
    staging: Arc<dyn Buffer>,
    bytes: usize,
}

impl Fetches {
    /// Nothing that was asked for is to be had any more.
    pub(crate) fn forget(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.number = 0);
    }
}

impl Slot {
    /// Puts the copy of an output to host memory into its backend's queue, behind the run.
    fn ask(&mut self, lane: &mut Lane, place: &OutputPlace, bank: usize) -> Result<(), RuntimeError> {
        let from = place.region(bank);
        let fits = |part: &Part| part.backend == place.backend && part.staging.bytes() >= from.bytes;
        if !self.parts.get(self.used).is_some_and(fits) {
            let staging = lane.backend.staging(from.bytes).map_err(RuntimeError::device)?;
            self.parts.truncate(self.used);
            self.parts.push(Part { backend: place.backend, staging, bytes: 0 });
        }
        let Some(part) = self.parts.get_mut(self.used) else { return Err(RuntimeError::NoPlan) };
        part.bytes = from.bytes;
        self.used += 1;
        let mut copied = || {
            let to = Region::new(Arc::clone(&part.staging), 0, from.bytes)?;
            if !lane.compute.copy(from, &to)? {
                let mut bytes = vec![0; from.bytes];
                lane.compute.read(from, &mut bytes)?;
                part.staging.write(0, &bytes)?;
            }
            Ok(())
        };
        copied().map_err(|error| RuntimeError::device(error).at(|| place.name.clone()))?;
        if lane.traffic.is_some() {
            match self.ends.iter_mut().find(|(backend, ..)| *backend == place.backend) {
                Some((_, _, waits)) => *waits = true,
                None => {
                    let event = lane.backend.event(false).map_err(RuntimeError::device)?;
                    self.ends.push((place.backend, event, true));
                }
            }
        }
        Ok(())
    }
}

impl Session {
    /// Asks for outputs of the latest run, without waiting: they are brought to the host when the run is done, and what
    /// is started meanwhile does not change them. [`Session::receive`] hands them out. Two such may be under way; a
    /// third takes the place of the first.
    pub fn fetch(&mut self, outputs: &[&str]) -> Result<Fetched, RuntimeError> {
        let asked = self.ask(outputs);
        if matches!(asked, Err(RuntimeError::Device { .. })) {
            self.recover();
        }
        asked
    }

    fn ask(&mut self, outputs: &[&str]) -> Result<Fetched, RuntimeError> {
        let number = self.fetches.count + 1;
        let at = (number % SLOTS as u64) as usize;
        let Some(slot) = self.fetches.slots.get_mut(at) else { return Err(RuntimeError::NoPlan) };
        // Taken out, so that outputs can be found while it is filled.
        let mut slot = std::mem::take(slot);
        (slot.number, slot.used) = (0, 0);
        slot.ends.iter_mut().for_each(|(_, _, waits)| *waits = false);
        let mut asked = Ok(());
        for name in outputs {
            asked = self.output(name).and_then(|(entry, output)| {
                let Some(entry) = self.entries.get(entry) else { return Err(RuntimeError::NoPlan) };
                let Some(place) = entry.outputs.get(output) else { return Err(RuntimeError::NoPlan) };
                match entry.results {
                    Results::None => return Err(RuntimeError::NothingRun),
                    Results::Gone => return Err(RuntimeError::Gone { name: place.name.clone() }),
                    Results::There => {}
                }
                let Some(lane) = self.lanes.get_mut(place.backend) else {
                    return Err(RuntimeError::ForeignPlan);
                };
                slot.ask(lane, place, entry.inputs.bank)
            });
            if asked.is_err() {
                break;
            }
        }
        if asked.is_ok() {
            for (backend, event, _) in slot.ends.iter().filter(|(_, _, waits)| *waits) {
                let Some(lane) = self.lanes.get_mut(*backend) else { continue };
                asked = asked.and(lane.compute.record(&**event).map_err(RuntimeError::device));
            }
            slot.number = number;
        }
        if let Some(home) = self.fetches.slots.get_mut(at) {
            *home = slot;
        }
        self.fetches.count = number;
        asked.map(|()| Fetched { number })
    }

    /// Waits for outputs that were asked for, and puts their bytes, one output after the other, into `into`.
    pub fn receive(&mut self, fetched: Fetched, into: &mut [u8]) -> Result<(), RuntimeError> {
        let at = (fetched.number % SLOTS as u64) as usize;
        let Some(slot) = self.fetches.slots.get_mut(at).filter(|slot| slot.number == fetched.number) else {
            return Err(RuntimeError::Gone { name: "that was fetched".to_owned() });
        };
        slot.number = 0;
        let parts = slot.parts.get(..slot.used).unwrap_or_default();
        let expected = parts.iter().map(|part| part.bytes).sum();
        if into.len() != expected {
            let (name, found) = ("that was fetched".to_owned(), into.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        let mut events = slot.ends.iter().filter(|(_, _, waits)| *waits).map(|(_, event, _)| event);
        let arrived = events.try_for_each(|event| event.wait());
        let taken = arrived.and_then(|()| {
            let mut rest = into;
            for part in parts {
                let Some((mine, others)) = rest.split_at_mut_checked(part.bytes) else { break };
                part.staging.read(0, mine)?;
                rest = others;
            }
            Ok(())
        });
        taken.map_err(|error| {
            let error = self.blame(RuntimeError::device(error));
            self.recover();
            error
        })
    }

    /// Whether all of the current plan runs on devices that work by themselves: [`start`](Session::start) returns
    /// before anything is computed then, and more than one run can be under way.
    pub fn is_asynchronous(&self) -> bool {
        self.plan().is_some_and(|plan| {
            let asynchronous = plan.scheduler().asynchronous();
            let splits = &plan.splits().splits;
            splits.iter().all(|split| asynchronous.get(split.backend).copied().unwrap_or(false))
        })
    }
}
