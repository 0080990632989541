//! Counts what an engine computes for an answer, on the engine's thread, also of answers that do not come to their end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use quadriga_llm::serving::Event;

use crate::model::InFlight;
use crate::operation::metrics::{ModelMetrics, PartialAnswer};

/// Counts the events of one answer. When it is dropped, the answer has ended.
pub(crate) struct AnswerMeter {
    metrics: Arc<ModelMetrics>,
    entry: Arc<InFlight>,
    begun: bool,
    /// What was computed so far; none once somebody counts the whole answer.
    partial: Option<PartialAnswer>,
    tokens: Option<TokenTimes>,
}

/// When the first token and the latest one were there.
struct TokenTimes {
    first: Instant,
    last: Instant,
}

impl AnswerMeter {
    pub(crate) fn new(metrics: &Arc<ModelMetrics>, entry: &Arc<InFlight>) -> AnswerMeter {
        AnswerMeter {
            metrics: Arc::clone(metrics),
            entry: Arc::clone(entry),
            begun: false,
            partial: Some(PartialAnswer::default()),
            tokens: None,
        }
    }

    /// Counts an event.
    pub(crate) fn note(&mut self, event: &Event) {
        match event {
            Event::Finished(_) | Event::Failed(_) => return self.entry.slot.end(),
            _ => self.entry.slot.begin(),
        }
        if !std::mem::replace(&mut self.begun, true) {
            // The step that computed the first part is none of the wait.
            let prefill = if let Event::Progress { prefill, .. } = event { *prefill } else { Duration::ZERO };
            self.metrics.note_begun(self.entry.since.elapsed().saturating_sub(prefill));
        }
        match event {
            Event::Progress { cached, computed, prefill } => {
                self.entry.computed.store(*computed, Ordering::Relaxed);
                if let Some(partial) = &mut self.partial {
                    (partial.cached, partial.prompt, partial.prefill) = (*cached, *computed, *prefill);
                }
            }
            Event::Token { .. } => self.note_token(),
            _ => {}
        }
    }

    /// Whoever waits for the answer counts it as a whole.
    pub(crate) fn note_whole(&mut self) {
        self.partial = None;
    }

    fn note_token(&mut self) {
        self.entry.generated.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        match &mut self.tokens {
            None => {
                self.metrics.note_first_token(now - self.entry.since);
                self.metrics.note_token(None);
                self.tokens = Some(TokenTimes { first: now, last: now });
            }
            Some(times) => {
                self.metrics.note_token(Some(now - times.last));
                times.last = now;
                if let Some(partial) = &mut self.partial {
                    // The prefill gave the first one.
                    partial.decoded += 1;
                    partial.decode = now - times.first;
                }
            }
        }
    }
}

impl Drop for AnswerMeter {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            self.metrics.note_partial(partial);
        }
    }
}

#[cfg(test)]
mod tests {
    use quadriga_llm::serving::Finished;
    use quadriga_llm::{Finish, TokenCounts};

    use super::*;
    use crate::operation::exposition::Exposition;
    use crate::slot_table::{AnswerSlot, SlotTable};

    /// The tokens of a prompt that are counted once an answer has ended and somebody heard of that, or nobody.
    fn counted(is_heard: bool) -> bool {
        let metrics = Arc::new(ModelMetrics::default());
        let entry = InFlight {
            since: Instant::now(),
            prompt_tokens: 17,
            computed: Default::default(),
            generated: Default::default(),
            options: None,
            slot: AnswerSlot::new(&Arc::new(SlotTable::new(1)), None),
        };
        let mut meter = AnswerMeter::new(&metrics, &Arc::new(entry));
        meter.note(&Event::Progress { cached: 0, computed: 17, prefill: Duration::ZERO });
        meter.note(&Event::Finished(Finished {
            finish: Finish::End,
            counts: TokenCounts::default(),
            queued: Duration::ZERO,
            first_token: Duration::ZERO,
            decode: Duration::ZERO,
            guessed: 0,
            guessed_right: 0,
        }));
        if is_heard {
            meter.note_whole();
        }
        drop(meter);
        let mut out = Exposition::default();
        metrics.write("m", &[], &mut out);
        out.text().lines().any(|line| line.starts_with("vllm:prompt_tokens_total") && line.ends_with(" 17"))
    }

    #[test]
    fn an_answer_whose_end_nobody_hears_is_counted() {
        assert!(counted(false));
        assert!(!counted(true), "it is counted by whoever heard of it");
    }
}
