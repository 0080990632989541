//! One run: hands out copies and splits in the plan's order, with the waits that make it right.
//!
//! Within a lane everything happens in order. Between lanes: a split waits for its copies, a copy for the split that
//! makes its source and for the split after which its place is free, a write for the copies of what it overwrites. At
//! the start of a run each lane waits for copies that the run before may still be making from its memory.
#![expect(
    clippy::indexing_slicing,
    reason = "a compiled plan has an entry for each of the plan's splits and copies"
)]

use quadriga_graph::TensorId;

use super::compile::Compiled;
use super::journey::{Journey, timed};
use super::lane::Lane;
use super::timing::Timing;
use crate::schedule::{Plan, ScheduleStep};
use crate::trace::{Detail, Stream};
use crate::{BackendError, Program, Region, RuntimeError};

/// What a run works on.
pub(crate) struct Run<'s> {
    pub(crate) plan: &'s Plan,
    pub(crate) compiled: &'s mut Compiled,
    pub(crate) lanes: &'s mut [Lane],
    /// Which place of the inputs this run reads.
    pub(crate) bank: usize,
    /// Whether new inputs are on their way.
    pub(crate) fresh_inputs: bool,
    /// The clock, if somebody wants to know.
    pub(crate) timing: Option<Timing>,
}

impl Run<'_> {
    /// Hands everything out. What fails on a device while it works shows when it is waited for.
    pub(crate) fn issue(&mut self) -> Result<(), RuntimeError> {
        self.begin()?;
        let plan = self.plan;
        for step in plan.order() {
            match *step {
                ScheduleStep::Copy(copy) => self.copy(copy)?,
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
        if let Some(traffic) = &mut lane.traffic {
            if self.fresh_inputs {
                traffic.incoming.record(&*traffic.inputs)?;
            }
            // Only large inputs and copies wait for it.
            if self.fresh_inputs || !self.compiled.copies.is_empty() {
                lane.compute.record(&*traffic.start)?;
            }
            if self.fresh_inputs {
                lane.compute.wait(&*traffic.inputs)?;
            }
        }
        Ok(())
    }

    fn split(&mut self, number: usize) -> Result<(), RuntimeError> {
        self.wait_for_copies(number)?;
        let backend = self.plan.splits().splits[number].backend;
        let programs = &mut self.compiled.programs[number];
        let bank = self.bank % programs.len().max(1);
        let lane = &mut self.lanes[backend];
        let ran = match &mut self.timing {
            None => lane.compute.run(&mut *programs[bank]),
            Some(timing) => {
                let detail = timing.detail;
                timed(lane, Stream::Compute, timing, (ScheduleStep::Split(number), backend), |queue| {
                    let program = &mut *programs[bank];
                    match detail {
                        Detail::Splits => queue.run(program),
                        Detail::Operations => queue.run_timed(program),
                    }
                    .map(|()| true)
                })
                .map(|_| ())
            }
        };
        ran.map_err(|error| self.in_split(number, error))?;
        self.finish_split(number)
    }

    /// Lets a split's lane wait for what the split reads, and for copies of what it overwrites.
    pub(crate) fn wait_for_copies(&mut self, number: usize) -> Result<(), RuntimeError> {
        let split = &self.plan.splits().splits[number];
        for copy in split.inputs.iter().chain(&split.after_copies) {
            if let Some(done) = &self.compiled.copies[*copy].done {
                let waited = self.lanes[split.backend].compute.wait(&**done);
                waited.map_err(|error| self.in_split(number, error))?;
            }
        }
        Ok(())
    }

    /// Marks the end of a split.
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

    /// Runs the program of a single node of a split, and reads its result.
    pub(crate) fn single(
        &mut self,
        number: usize,
        program: &mut dyn Program,
        result: &Region,
        bytes: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let backend = self.plan.splits().splits[number].backend;
        let queue = &mut self.lanes[backend].compute;
        let done = queue.run(program).and_then(|()| queue.read(result, bytes));
        done.map_err(RuntimeError::device)
    }

    pub(crate) fn copy(&mut self, number: usize) -> Result<(), RuntimeError> {
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
        let mut journey = Journey {
            copy: number,
            from: copy.from,
            to: copy.to,
            ahead: copy.source.is_none(),
            waits: [source, free],
            moving: &mut self.compiled.copies[number],
            lanes: &mut *self.lanes,
            timing: &mut self.timing,
        };
        let done = journey.make(plan);
        let name = || plan.graph().name(TensorId::from_index(copy.tensor));
        done.map_err(|error| RuntimeError::device(error).at(name).in_split(copy.reader, name))
    }

    fn in_split(&self, number: usize, error: BackendError) -> RuntimeError {
        let splits = self.plan.splits();
        let first =
            || splits.nodes_of(number).first().map_or_else(String::new, |n| self.plan.graph().node_name(*n));
        RuntimeError::device(error).in_split(number, first)
    }
}
