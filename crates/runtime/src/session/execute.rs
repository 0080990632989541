//! One run: issues copies and splits in the plan's order, with the waits between them.
//!
//! The splits of a lane run in order. Between lanes, a split waits for its copies, a copy for the split that computes its
//! source and for the split after which its memory is free, and a write for the copies of the bytes that it overwrites. At the
//! start of a run each lane waits for copies out of its memory that the previous run may still be making.
#![expect(
    clippy::indexing_slicing,
    reason = "a compiled plan has an element for each of the plan's splits and copies"
)]

use quadriga_graph::TensorId;

use super::clock::TraceClock;
use super::compile::CompiledPlan;
use super::lane::Lane;
use super::transfer::Transfer;
use crate::schedule::{Plan, ScheduleStep};
use crate::trace::{Detail, Stream};
use crate::{BackendError, Program, Region, RuntimeError};

/// A run of a compiled plan.
pub(crate) struct Run<'s> {
    pub(crate) plan: &'s Plan,
    pub(crate) compiled: &'s mut CompiledPlan,
    pub(crate) lanes: &'s mut [Lane],
    /// The bank of inputs that this run reads.
    pub(crate) bank: usize,
    /// Whether inputs are in the upload queues.
    pub(crate) uploads: bool,
    /// Takes times, in a traced run.
    pub(crate) clock: Option<TraceClock>,
}

impl Run<'_> {
    /// Issues everything. A failure of a device that works asynchronously shows when it is waited for.
    pub(crate) fn issue(&mut self) -> Result<(), RuntimeError> {
        self.begin()?;
        let plan = self.plan;
        for step in plan.order() {
            match *step {
                ScheduleStep::Copy(copy) => self.copy(copy)?,
                ScheduleStep::Prefetch(copy) => self.prefetch(copy)?,
                ScheduleStep::Split(split) => self.split(split)?,
            }
        }
        Ok(())
    }

    /// Starts all lanes.
    pub(crate) fn begin(&mut self) -> Result<(), RuntimeError> {
        for lane in 0..self.lanes.len() {
            self.start_lane(lane).map_err(RuntimeError::device)?;
        }
        Ok(())
    }

    fn start_lane(&mut self, number: usize) -> Result<(), BackendError> {
        let lane = &mut self.lanes[number];
        for copy in &self.compiled.loose_ends[number] {
            if let Some(done) = &self.compiled.copies[*copy].done {
                lane.compute.wait(&**done)?;
            }
        }
        if let Some(transfers) = &mut lane.transfers {
            if self.uploads {
                transfers.upload.record(&*transfers.inputs)?;
            }
            // Only uploads and copies wait for it.
            if self.uploads || !self.compiled.copies.is_empty() {
                lane.compute.record(&*transfers.start)?;
            }
            if self.uploads {
                lane.compute.wait(&*transfers.inputs)?;
            }
        }
        Ok(())
    }

    /// Runs a split, after the copies that it waits for.
    pub(crate) fn split(&mut self, number: usize) -> Result<(), RuntimeError> {
        self.wait_for_copies(number)?;
        let backend = self.plan.splits().splits[number].backend;
        let programs = &mut self.compiled.programs[number];
        let bank = self.bank % programs.len().max(1);
        let lane = &mut self.lanes[backend];
        let ran = match &mut self.clock {
            None => lane.compute.run(&mut *programs[bank]),
            Some(clock) => {
                let detail = clock.detail;
                let what = (ScheduleStep::Split(number), backend);
                let timed = clock.time(lane, Stream::Compute, what, |queue| {
                    let program = &mut *programs[bank];
                    match detail {
                        Detail::Splits => queue.run(program),
                        Detail::Operations => queue.run_timed(program),
                    }
                    .map(|()| true)
                });
                timed.map(|_| ())
            }
        };
        ran.map_err(|error| self.in_split(number, error))?;
        self.finish_split(number)
    }

    /// Lets a split's lane wait for the copies that the split reads, for copies of the bytes that it overwrites, and for
    /// the splits of other lanes before a barrier.
    pub(crate) fn wait_for_copies(&mut self, number: usize) -> Result<(), RuntimeError> {
        let split = &self.plan.splits().splits[number];
        for copy in split.inputs.iter().chain(&split.after_copies) {
            if let Some(done) = &self.compiled.copies[*copy].done {
                let waited = self.lanes[split.backend].compute.wait(&**done);
                waited.map_err(|error| self.in_split(number, error))?;
            }
        }
        for before in &split.after_splits {
            if let Some(done) = &self.compiled.done[*before] {
                let waited = self.lanes[split.backend].compute.wait(&**done);
                waited.map_err(|error| self.in_split(number, error))?;
            }
        }
        Ok(())
    }

    /// Records that a split is done.
    pub(crate) fn finish_split(&mut self, number: usize) -> Result<(), RuntimeError> {
        let backend = self.plan.splits().splits[number].backend;
        match &self.compiled.done[number] {
            Some(event) => {
                let recorded = self.lanes[backend].compute.record(&**event);
                recorded.map_err(|error| self.in_split(number, error))
            }
            None => Ok(()),
        }
    }

    /// Runs the program of some nodes of a split.
    pub(crate) fn run_segment(
        &mut self,
        number: usize,
        program: &mut dyn Program,
    ) -> Result<(), RuntimeError> {
        let backend = self.plan.splits().splits[number].backend;
        self.lanes[backend].compute.run(program).map_err(RuntimeError::device)
    }

    /// Reads a result of a split that has been issued; waits for it.
    pub(crate) fn read(
        &mut self,
        number: usize,
        result: &Region,
        bytes: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let backend = self.plan.splits().splits[number].backend;
        self.lanes[backend].compute.read(result, bytes).map_err(RuntimeError::device)
    }

    pub(crate) fn copy(&mut self, number: usize) -> Result<(), RuntimeError> {
        self.transfer(number, |transfer| transfer.issue())
    }

    /// Copies slices that are likely to be selected.
    pub(crate) fn prefetch(&mut self, number: usize) -> Result<(), RuntimeError> {
        self.transfer(number, |transfer| transfer.prefetch_slices())
    }

    fn transfer(
        &mut self,
        number: usize,
        issue: impl FnOnce(&mut Transfer<'_>) -> Result<(), BackendError>,
    ) -> Result<(), RuntimeError> {
        let plan = self.plan;
        let copy = &plan.splits().copies[number];
        let source = match copy.source {
            Some(split) => self.compiled.done[split].clone(),
            None => self.lanes[copy.from].start(),
        };
        let free = match copy.after {
            Some(split) => self.compiled.done[split].clone(),
            None => self.lanes[copy.to].start(),
        };
        let selected =
            copy.selected_by.and_then(|selection| self.compiled.done[selection.computed_by].clone());
        let mut transfer = Transfer {
            copy: number,
            from: copy.from,
            to: copy.to,
            prefetch: copy.source.is_none(),
            waits: [source, free, selected],
            regions: &mut self.compiled.copies[number],
            lanes: &mut *self.lanes,
            clock: &mut self.clock,
        };
        let issued = issue(&mut transfer);
        let name = || plan.graph().name(TensorId::from_index(copy.tensor));
        issued.map_err(|error| RuntimeError::device(error).at(name).in_split(copy.reader, name))
    }

    fn in_split(&self, number: usize, error: BackendError) -> RuntimeError {
        let splits = self.plan.splits();
        let first =
            || splits.nodes_of(number).first().map_or_else(String::new, |n| self.plan.graph().node_name(*n));
        RuntimeError::device(error).in_split(number, first)
    }
}
