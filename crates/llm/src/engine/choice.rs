//! The most probable token, chosen where the logits are computed, so that they need not travel; and the one after it,
//! whose computing a device starts before anybody knows which token it is.

use std::sync::Arc;

use quadriga_graph::TensorId;
use quadriga_runtime::{Backend, Plan, Scheduler};

use super::{BatchToken, Engine, EngineOptions, Inputs, row_of};
use crate::sampling::most_probable;
use crate::{Error, Result};

impl EngineOptions {
    /// These options for a scheduler's backends: where all memory is the host's, logits need not travel, and are given.
    pub(super) fn on(mut self, scheduler: &Scheduler) -> EngineOptions {
        self.greedy &= scheduler.backends().iter().any(|backend| !backend.memory().host);
        self
    }
}

/// Whether the host can reach the logits of a plan where they are.
pub(super) fn has_logits_at_hand(plan: &Plan) -> bool {
    let logits = plan.graph().outputs().iter().find(|(name, _)| name == "logits");
    let storage = |id: TensorId| plan.graph().get(id).map(|tensor| tensor.storage());
    let home = logits.and_then(|(_, id)| plan.home(storage(*id)?));
    let backend: Option<&Arc<dyn Backend>> = home.and_then(|home| plan.backends().get(home));
    backend.is_none_or(|backend| backend.memory().host)
}

impl Engine {
    /// The most probable token after row `row` of those that were wanted, of equals the smallest: what a greedy sampler
    /// takes. With [`EngineOptions::greedy`] it is chosen on the device that has the logits; else it is chosen here.
    /// Logits that are no numbers are an error, as for a sampler.
    pub fn choice(&mut self, row: usize) -> Result<u32> {
        self.settle(false)?;
        self.chosen(row)
    }

    /// As [`choice`](Engine::choice) of the first row. Where one token was computed on devices that work by themselves,
    /// they go on with the chosen one at once: if that is [fed](Engine::feed) next, it is under way already. If it is
    /// not, nothing has happened.
    pub fn choice_ahead(&mut self) -> Result<u32> {
        self.settle(true)?;
        self.chosen(0)
    }

    /// Waits until what was fed is computed.
    pub fn wait(&mut self) -> Result<()> {
        self.settle(false)
    }

    fn chosen(&self, row: usize) -> Result<u32> {
        if !self.options.greedy {
            return most_probable(self.logits(row));
        }
        match self.choices.get(row) {
            Some(Ok(token)) => Ok(*token),
            Some(Err(reason)) => Err(Error::Logits { reason: reason.clone() }),
            None => most_probable(&[]),
        }
    }

    /// Brings the choices of the latest run here, if they are not.
    pub(super) fn settle(&mut self, ahead: bool) -> Result<()> {
        let rows = std::mem::take(&mut self.unread);
        if rows == 0 {
            return Ok(());
        }
        let settled = self.bring_choices(rows, ahead);
        if settled.is_err() {
            self.lengths.clone_from(&self.before);
            self.forget_choices();
        }
        settled
    }

    /// What was computed last, or is under way, no longer counts.
    pub(super) fn forget_choices(&mut self) {
        self.choices.clear();
        self.unread = 0;
        self.last = None;
        self.ahead = None;
    }

    /// Whether these entries are under way already: then they count from now on.
    pub(super) fn is_under_way(&mut self, entries: &[BatchToken]) -> bool {
        let Some(ahead) = self.ahead.take() else { return false };
        if entries != [ahead] {
            return false;
        }
        self.before.clone_from(&self.lengths);
        if let Some(length) = self.lengths.get_mut(ahead.sequence) {
            *length += 1;
        }
        self.choices.clear();
        (self.unread, self.last) = (1, Some(ahead));
        true
    }

    fn bring_choices(&mut self, rows: usize, ahead: bool) -> Result<()> {
        let mut next = if ahead { self.prepare_ahead()? } else { None };
        // The next run's inputs are set by now: they travel along with what is asked for here.
        let fetched = self.session.fetch(&["choice", "sum"])?;
        if next.is_some() {
            self.session.start()?;
        }
        self.bytes.resize(rows * 8, 0);
        self.session.receive(fetched, &mut self.bytes)?;
        let (words, _) = self.bytes.as_chunks::<4>();
        let (tokens, sums) = words.split_at(words.len() / 2);
        let vocabulary = self.model.hyperparameters().vocabulary as u32;
        let first = self.choices.len();
        let choices = tokens.iter().zip(sums).map(|(token, sum)| {
            // The sum is a number only if every logit is one: else whoever judges logits must look at them.
            let token = u32::from_ne_bytes(*token);
            let sound = f32::from_ne_bytes(*sum).is_finite() && token < vocabulary;
            if sound { Ok(token) } else { Err(String::new()) }
        });
        self.choices.extend(choices);
        if self.choices.iter().skip(first).any(std::result::Result::is_err) {
            self.look_at_logits(rows, next.take().is_some())?;
        }
        let token = self.choices.last().and_then(|choice| choice.as_ref().ok());
        self.ahead = next.zip(token).map(|(next, token)| BatchToken { token: *token, ..next });
        Ok(())
    }

    /// Sets the inputs of the run that follows the latest one, with its choice as the token, if that can be done ahead:
    /// then what is appended, but for its token.
    fn prepare_ahead(&mut self) -> Result<Option<BatchToken>> {
        let Some(last) = self.last else { return Ok(None) };
        let room = self.len(last.sequence) < self.options.context;
        if !room || self.options.hidden || self.watcher.is_some() || !self.session.is_asynchronous() {
            return Ok(None);
        }
        let batch = self.fill(&[last]);
        // Nothing is appended before somebody feeds it.
        if let Some(length) = self.lengths.get_mut(last.sequence) {
            *length -= 1;
        }
        let shape = self.options.shape(1, 1, batch.furthest);
        if self.shape != Some(shape) || !self.session.carry("choice", "tokens")? {
            return Ok(None);
        }
        let Inputs { positions, slots, spans, .. } = &self.inputs;
        for (name, values) in [("positions", positions), ("slots", slots), ("spans", spans)] {
            self.session.set(name, values.as_slice())?;
        }
        Ok(Some(last))
    }

    /// Judges the latest run's logits here, row by row, where the device's choice cannot be trusted.
    fn look_at_logits(&mut self, rows: usize, overwritten: bool) -> Result<()> {
        if let Some(last) = self.last.filter(|_| overwritten) {
            // The run that went ahead has their memory: they are computed once more.
            if let Some(length) = self.lengths.get_mut(last.sequence) {
                *length -= 1;
            }
            self.run(&[last])?;
        }
        let vocabulary = self.model.hyperparameters().vocabulary;
        let mut logits = vec![0.0; rows * vocabulary];
        self.session.read_into("logits", &mut logits)?;
        let first = self.choices.len() - rows;
        for (row, choice) in self.choices.iter_mut().skip(first).enumerate() {
            *choice = most_probable(row_of(&logits, vocabulary, row)).map_err(|error| match error {
                Error::Logits { reason } => reason,
                other => other.to_string(),
            });
        }
        Ok(())
    }
}
