//! The hook between logits and sampling that keeps an answer within its grammar.

use std::sync::Arc;

use super::mask::MaskJob;
use super::workers::Workers;
use crate::sampling_hook::{HookError, SamplingHook};

/// Excludes all tokens that cannot continue one answer under a [`Constraint`](super::Constraint).
///
/// The answer begins after the tokens that the sampler has when the hook is first called: the prompt.
pub(super) struct ConstraintHook {
    pub(super) job: Arc<MaskJob>,
    workers: Arc<Workers>,
    /// Tokens of the prompt and the answer that the job knows of.
    seen: Option<usize>,
}

impl ConstraintHook {
    /// A hook at the beginning of an answer. The first mask is computed at once.
    pub(super) fn new(job: MaskJob, workers: Arc<Workers>) -> ConstraintHook {
        let mut hook = ConstraintHook { job: Arc::new(job), workers, seen: None };
        hook.add(&[]);
        hook
    }

    fn add(&mut self, tokens: &[u32]) {
        if self.job.add(tokens) {
            self.workers.submit(&self.job);
        }
    }

    /// Tells the job of all tokens that it has not seen.
    fn catch_up(&mut self, tokens: &[u32]) {
        if let Some(seen) = self.seen {
            self.add(tokens.get(seen..).unwrap_or_default());
        }
        self.seen = Some(tokens.len());
    }
}

impl SamplingHook for ConstraintHook {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        if self.seen.is_some_and(|seen| tokens.len() < seen) {
            return Err("the answer under a constraint was shortened".into());
        }
        self.catch_up(tokens);
        self.job.with_mask(|mask| {
            let mask = mask.map_err(|reason| format!("the answer cannot be continued: {reason}"))?;
            let words = mask.as_slice().iter().copied().chain(std::iter::repeat(0));
            for (logits, word) in logits.chunks_mut(32).zip(words) {
                for (bit, logit) in logits.iter_mut().enumerate().filter(|_| word != u32::MAX) {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Ok(())
        })
    }

    fn accepted(&mut self, tokens: &[u32]) {
        // Before the first token was sampled, it is not known where the answer begins.
        if self.seen.is_some_and(|seen| tokens.len() >= seen) {
            self.catch_up(tokens);
        }
    }
}
