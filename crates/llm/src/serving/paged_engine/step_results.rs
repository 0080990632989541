//! The results of a step: argmax, the largest logits, all logits, hidden states.

use quadriga_runtime::PlanLimits;

use super::{PagedEngine, StepInFlight};
use crate::engine::{resize, row_of};
use crate::sampling::{TopLogits, find_argmax};
use crate::{LogitsError, Result};

/// The largest logits of each row of a step.
#[derive(Default)]
pub(super) struct TopRows {
    /// Of each row; 0 if they were not computed.
    pub(super) count: usize,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// The sum of all logits of each row: finite only if they all are.
    sums: Vec<f32>,
}

/// The plans that an engine without requests keeps, those used last: enough for the sizes of steps that one answer after another
/// comes to, from its prompt to its end.
const IDLE_PLANS: usize = 4;

/// The argmax of a row of logits, unless their sum shows that one of them is not finite.
pub(super) fn checked_argmax((token, sum): (i32, f32)) -> Result<u32, LogitsError> {
    match u32::try_from(token) {
        Ok(token) if sum.is_finite() => Ok(token),
        _ => Err(LogitsError::NotFinite { token: token.max(0) as u32, logit: sum }),
    }
}

impl PagedEngine {
    /// Gives memory back that steps get again when they need it: most plans, what steps compute in, and the results of the latest one.
    /// Nothing happens while a step is in flight.
    pub(in crate::serving) fn release_memory(&mut self) -> Result<()> {
        if self.in_flight.is_some() || self.ahead.is_some() {
            return Ok(());
        }
        self.clear_outputs();
        (self.logits, self.hidden, self.top) = (Vec::new(), Vec::new(), TopRows::default());
        self.session.set_plan_limits(PlanLimits { plans: IDLE_PLANS, ..PlanLimits::default() })?;
        self.session.discard_values()?;
        Ok(self.session.set_plan_limits(PlanLimits::default())?)
    }

    /// Forgets the outputs of the latest batch.
    pub(in crate::serving) fn clear_outputs(&mut self) {
        self.output_rows.clear();
        self.loaded.clear();
        self.argmax.clear();
        self.top.count = 0;
    }

    /// Takes the results of all outputs of a step whose batches gave some each.
    pub(in crate::serving) fn set_outputs(&mut self, logits: Vec<f32>, hidden: Vec<f32>, outputs: usize) {
        self.clear_outputs();
        (self.logits, self.hidden) = (logits, hidden);
        self.loaded = vec![true; outputs];
        self.output_rows.extend(0..outputs);
    }

    /// Sends the results of the latest step on their way to the host, before something else uses their memory.
    pub(super) fn secure_results(&mut self) -> Result<()> {
        if let Some(step) = self.ahead.as_mut().or(self.in_flight.as_mut())
            && step.read.is_none()
        {
            let outputs: &[&str] =
                if step.shape.argmax { &["argmax", "sum"] } else { &["top", "top_logits", "sum"] };
            step.read = Some(self.session.read_async(outputs)?);
        }
        Ok(())
    }

    /// Reads the results of the step in flight; logits that are not finite show in the sum.
    pub(super) fn read_results(&mut self) -> Result<()> {
        if self.ahead.is_none() {
            self.secure_results()?;
        }
        let Some(StepInFlight { shape, output_rows, logits, read: Some(read) }) = self.in_flight.take()
        else {
            return Err(LogitsError::Empty.into());
        };
        let vocabulary = self.model.hyperparameters().vocabulary;
        let (rows, count) = (shape.rows, shape.top.min(vocabulary));
        // All are copied before any is waited for.
        let numbers = if shape.argmax { 2 * rows } else { rows * (2 * count + 1) };
        let mut bytes = vec![0; numbers * size_of::<i32>()];
        self.session.finish_read(read, &mut bytes)?;
        self.output_rows = output_rows;
        self.argmax.clear();
        let (numbers, _) = bytes.as_chunks::<4>();
        let (results, sums) = numbers.split_at(numbers.len().saturating_sub(rows));
        if shape.argmax {
            let both = |(token, sum): (&[u8; 4], &[u8; 4])| {
                checked_argmax((i32::from_ne_bytes(*token), f32::from_ne_bytes(*sum)))
            };
            self.argmax.extend(results.iter().zip(sums).map(both));
            return Ok(());
        }
        let (tokens, values) = results.split_at(rows * count);
        let TopRows { count: top, tokens: top_tokens, logits: top_logits, sums: top_sums } = &mut self.top;
        *top = count;
        for (list, numbers) in [(top_logits, values), (top_sums, sums)] {
            list.clear();
            list.extend(numbers.iter().map(|number| f32::from_ne_bytes(*number)));
        }
        top_tokens.clear();
        top_tokens.extend(tokens.iter().map(|token| u32::from_ne_bytes(*token)));
        self.loaded.clear();
        self.loaded.resize(rows, false);
        self.load_all(&logits)
    }

    /// Whether the host has no logits of a step but the largest, and those that were asked for.
    pub(in crate::serving) fn has_only_top(&self) -> bool {
        self.top.count > 0
    }

    /// Reads the logits of outputs of the latest step that the host does not have yet. After an error the step can be computed
    /// again.
    pub(in crate::serving) fn read_logits(&mut self, outputs: &[usize]) -> Result<()> {
        let rows = outputs.iter().filter_map(|output| self.output_rows.get(*output).copied());
        let mut rows: Vec<usize> = rows.filter(|row| self.loaded.get(*row) == Some(&false)).collect();
        rows.sort_unstable();
        let read = self.load_all(&rows);
        if read.is_err() {
            self.settle_failure();
        }
        read
    }

    /// Reads the logits of rows of the latest step, neighbours together.
    fn load_all(&mut self, rows: &[usize]) -> Result<()> {
        for wanted in rows.chunk_by(|one, next| one + 1 == *next) {
            if let Some(first) = wanted.first() {
                self.load_rows(*first, wanted.len())?;
            }
        }
        Ok(())
    }

    /// Reads the logits of some rows of the latest step.
    pub(super) fn load_rows(&mut self, first: usize, count: usize) -> Result<()> {
        let vocabulary = self.model.hyperparameters().vocabulary;
        resize(&mut self.logits, self.loaded.len(), vocabulary)?;
        if let Some(into) = self.logits.get_mut(first * vocabulary..(first + count) * vocabulary) {
            self.session.read_at("logits", first * vocabulary, into)?;
        }
        self.loaded.iter_mut().skip(first).take(count).for_each(|loaded| *loaded = true);
        Ok(())
    }

    /// The hidden state of output `output`.
    pub(in crate::serving) fn hidden(&self, output: usize) -> &[f32] {
        let row = self.output_rows.get(output).copied().unwrap_or(usize::MAX);
        row_of(&self.hidden, self.model.hyperparameters().width, row)
    }

    /// The logits after output `output`; empty if only the argmax was computed.
    pub(in crate::serving) fn logits(&mut self, output: usize) -> Result<&[f32]> {
        let row = self.output_rows.get(output).copied().unwrap_or(usize::MAX);
        match self.loaded.get(row) {
            Some(true) => {}
            Some(false) => self.load_rows(row, 1)?,
            None => return Ok(&[]),
        }
        Ok(row_of(&self.logits, self.model.hyperparameters().vocabulary, row))
    }

    /// The largest logits after output `output`, if a device found them.
    pub(in crate::serving) fn top_logits(&self, output: usize) -> Option<TopLogits<'_>> {
        let TopRows { count, tokens, logits, sums } = &self.top;
        let row = self.output_rows.get(output).copied().filter(|_| *count > 0)?;
        sums.get(row).filter(|sum| sum.is_finite())?;
        let own = row * count..(row + 1) * count;
        let vocabulary = self.model.hyperparameters().vocabulary;
        Some(TopLogits { tokens: tokens.get(own.clone())?, logits: logits.get(own)?, vocabulary })
    }

    /// The most probable token after output `output`.
    pub(in crate::serving) fn argmax(&mut self, output: usize) -> Result<u32> {
        let row = self.output_rows.get(output).copied().ok_or(LogitsError::Empty)?;
        if let Some(token) = self.argmax.get(row) {
            return Ok((*token)?);
        }
        if let Some(best) = self.top_logits(output).and_then(|top| top.tokens.first().copied()) {
            return Ok(best);
        }
        Ok(find_argmax(self.logits(output)?)?)
    }
}
