//! Issuing a run of the current plan.

use super::clock::TraceClock;
use super::execute::Run;
use super::prepared::{PreparedPlan, Results};
use super::session::Session;
use crate::RuntimeError;
use crate::trace::Detail;

/// A run. Dropped before it has ended, because of an error or a panic of a device or observer, it is given up: its inputs
/// and results are gone.
pub(super) struct Attempt<'s> {
    pub(super) session: &'s mut Session,
    ended: bool,
}

impl<'s> Attempt<'s> {
    pub(super) fn new(session: &'s mut Session) -> Attempt<'s> {
        Attempt { session, ended: false }
    }

    /// Everything of the run is issued.
    pub(super) fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.session.recover();
        }
    }
}

impl Session {
    /// Issues a run; the clock of a run that takes times.
    pub(super) fn issue(
        &mut self,
        current: usize,
        detail: Option<Detail>,
    ) -> Result<Option<TraceClock>, RuntimeError> {
        let attempt = Attempt::new(self);
        let clock = attempt.session.try_issue(current, detail)?;
        attempt.end();
        Ok(clock)
    }

    fn try_issue(
        &mut self,
        current: usize,
        detail: Option<Detail>,
    ) -> Result<Option<TraceClock>, RuntimeError> {
        let uploads = self.swap_banks(current)?;
        let clock = detail.map(|detail| TraceClock::start(&mut self.lanes, detail)).transpose();
        let clock = clock.map_err(RuntimeError::device)?;
        let PreparedPlan { plan, compiled, inputs, results, .. } = self.plans.get_mut(current)?;
        let compiled = compiled.as_mut().ok_or_else(not_compiled)?;
        self.in_flight = Some(current);
        // Until everything is issued: a device may fail, or panic.
        *results = Results::Gone;
        let mut run = Run { plan, compiled, lanes: &mut self.lanes, bank: inputs.bank, uploads, clock };
        run.issue()?;
        *results = Results::Present;
        Ok(run.clock)
    }

    /// Gives a run the inputs that were set; whether some of them are in the upload queues.
    pub(super) fn swap_banks(&mut self, current: usize) -> Result<bool, RuntimeError> {
        self.plans.get(current)?.inputs.check_all_set()?;
        self.plans.occupy(current);
        self.queued = Some(current);
        self.plans.get_mut(current)?.inputs.swap_banks(&mut self.lanes)
    }
}

#[track_caller]
pub(super) fn not_compiled() -> RuntimeError {
    RuntimeError::internal("the current plan is not compiled")
}
