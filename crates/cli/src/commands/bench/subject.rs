//! What is measured: an engine, or an encoder that only computes prompts.

use std::time::Instant;

use quadriga_llm::{Embedder, Engine, ExpertCacheUse, NeuronSlotUse, NeuronUse};

use super::samples::Samples;
use crate::failure::Outcome;

/// One measurement.
pub(super) struct Test {
    pub(super) kind: TestKind,
    /// Tokens in the KV cache before it.
    pub(super) depth: usize,
    pub(super) samples: Samples,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TestKind {
    /// Prompt processing: all tokens in batches.
    Prompt,
    /// Text generation: one token at a time.
    Generation,
}

impl TestKind {
    /// The name in tables and JSON, as in llama-bench.
    pub(super) fn name(self) -> &'static str {
        match self {
            TestKind::Prompt => "pp",
            TestKind::Generation => "tg",
        }
    }
}

impl Test {
    /// The name of a row: `pp512 @ 1024`.
    pub(super) fn title(&self) -> String {
        let depth = if self.depth > 0 { format!(" @ {}", self.depth) } else { String::new() };
        format!("{}{}{depth}", self.kind.name(), self.samples.tokens)
    }
}

/// A loaded model.
pub(super) enum Subject {
    Engine(Box<Engine>),
    Encoder(Box<Embedder>),
}

impl Subject {
    /// Runs all tests, and once more where the plan of a longer batch has let the memory grow that all plans share: those from
    /// before it are compiled again then.
    pub(super) fn warm_up(&mut self, tests: &[Test], tokens: &[u32], given: bool) -> Outcome {
        for _ in 0..2 {
            for test in tests {
                self.run(test, tokens, given)?;
            }
            if !matches!(self, Subject::Engine(engine) if !engine.session().is_compiled()) {
                break;
            }
        }
        Ok(())
    }

    /// Runs a test once; text is generated with the given tokens, or else with the most probable ones where a device computes
    /// those. The seconds that it took.
    pub(super) fn run(&mut self, test: &Test, tokens: &[u32], given: bool) -> Outcome<f64> {
        let fed = tokens.get(..test.samples.tokens).unwrap_or_default();
        match self {
            Subject::Encoder(embedder) => {
                // Longer prompts are several texts.
                let texts: Vec<&[u32]> =
                    fed.chunks(embedder.model().hyperparameters().context.max(1)).collect();
                let started = Instant::now();
                embedder.embed_batch(&texts)?;
                Ok(started.elapsed().as_secs_f64())
            }
            Subject::Engine(engine) => {
                let kept = engine.truncate(0, test.depth);
                if let Some(missing) = tokens.get(kept..test.depth).filter(|missing| !missing.is_empty()) {
                    engine.feed(missing)?;
                    engine.checkpoint(0)?;
                    engine.wait()?;
                }
                let started = Instant::now();
                match test.kind {
                    TestKind::Prompt => engine.feed(fed)?,
                    TestKind::Generation if engine.options().greedy && !given => {
                        continue_greedily(engine, fed)?
                    }
                    TestKind::Generation => fed.iter().try_for_each(|token| engine.feed(&[*token]))?,
                }
                engine.wait()?;
                Ok(started.elapsed().as_secs_f64())
            }
        }
    }

    /// How the expert cache has served.
    pub(super) fn expert_cache(&self) -> Option<ExpertCacheUse> {
        match self {
            Subject::Engine(engine) => engine.expert_cache(),
            Subject::Encoder(_) => None,
        }
    }

    /// How the rows of neurons on devices have served.
    pub(super) fn neuron_slots(&self) -> Option<NeuronSlotUse> {
        match self {
            Subject::Engine(engine) => engine.neuron_slots(),
            Subject::Encoder(_) => None,
        }
    }

    /// The active neurons of all batches, if they were counted.
    pub(super) fn neuron_use(&self) -> Option<NeuronUse> {
        match self {
            Subject::Engine(engine) => engine.neuron_use(),
            Subject::Encoder(_) => None,
        }
    }

    /// Whether a device computes the argmax.
    pub(super) fn is_greedy(&self) -> bool {
        matches!(self, Subject::Engine(engine) if engine.options().greedy)
    }
}

/// Feeds the first token, then as many argmax tokens of the engine as there are others.
fn continue_greedily(engine: &mut Engine, fed: &[u32]) -> Outcome {
    let Some((first, rest)) = fed.split_first() else { return Ok(()) };
    engine.feed(&[*first])?;
    for _ in rest {
        engine.run_ahead()?;
        let token = engine.argmax(0)?;
        engine.feed(&[token])?;
    }
    Ok(())
}
