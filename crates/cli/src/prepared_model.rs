//! A model that is opened and planned: what it takes, and loading it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_llm::models::Neurons;
use quadriga_llm::placement::{Devices, PlacedModel, Placement};
use quadriga_llm::serving::{Batcher, BatcherOptions};
use quadriga_llm::{
    DeviceRank, Embedder, EmbedderOptions, Engine, EngineOptions, Generator, GeneratorOptions, Model,
};
use quadriga_runtime::{Backend, BackendBytes, Plan, Progress};
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::{ranks, size};

/// The most tokens by which the cost of a gate threshold is measured.
const MAX_COMPARED: usize = 256;

/// The memory of a backend that a model takes, as JSON has it.
#[derive(serde::Serialize)]
pub(crate) struct BackendMemory {
    #[serde(flatten)]
    bytes: BackendBytes,
    /// Bytes of slots for experts of the CPU, which are part of the weights.
    expert_slots: u64,
    /// Bytes for experts that are on their way to a slot, which are not.
    expert_staging: u64,
}

/// A model whose file is open and whose largest batch is planned; its weights are not loaded yet.
pub(crate) struct Prepared {
    pub(crate) model: Model,
    pub(crate) devices: Devices,
    pub(crate) placement: Placement,
    /// The model on its devices, with the plan of the largest batch over a full KV cache.
    pub(crate) placed: PlacedModel,
    /// The engine's options, with the context that was chosen.
    pub(crate) options: EngineOptions,
    /// Further GPUs that have a part of every layer, until they follow.
    pub(crate) others: Mutex<Vec<DeviceRank>>,
    pub(crate) quiet: bool,
    /// The progress bar of the current prefill.
    pub(crate) prefill_bar: Arc<Mutex<Option<ProgressBar>>>,
    /// Duration of opening and planning.
    pub(crate) opening: Duration,
}

impl Prepared {
    /// The model's name: its file name without the extension.
    pub(crate) fn title(&self) -> String {
        let name = self.model.file().paths().next().and_then(|path| path.file_stem());
        name.map_or_else(|| "the model".to_owned(), |name| name.to_string_lossy().into_owned())
    }

    /// Loads the weights into an engine. Returns it with the seconds since it was opened.
    pub(crate) fn engine(&self) -> Outcome<(Engine, f64)> {
        let options = self.options.clone();
        let load = |progress: &mut dyn FnMut(Progress)| {
            Engine::new(self.model.clone(), &self.placed.scheduler, options, progress)
        };
        self.start(None, load, |mut engine| engine.follow())
    }

    /// Loads what computes. Every command starts in this way: further GPUs compute what the first one does, on threads of their own, with
    /// an engine, or a batcher with these options; and ranks after the first `follow` it to its end.
    fn start<T>(
        &self,
        batcher: Option<&BatcherOptions>,
        load: impl FnOnce(&mut dyn FnMut(Progress)) -> quadriga_llm::Result<T>,
        follow: impl FnOnce(T) -> quadriga_llm::Result<()>,
    ) -> Outcome<(T, f64)> {
        let others = std::mem::take(&mut *self.others.lock().unwrap_or_else(PoisonError::into_inner));
        for other in others {
            other.follow(&self.model, batcher.cloned())?;
        }
        match ranks::follows() {
            true => Err(ranks::follow(|| Ok(follow(self.load(load)?.0)?))),
            false => self.load(load),
        }
    }

    /// Checks the plan of each GPU that has a part of every layer, or else the only one.
    pub(crate) fn check_plans<E>(
        &self,
        check: impl Fn(&Plan, &[Arc<dyn Backend>]) -> Result<(), E>,
    ) -> Result<(), E> {
        let others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let first = (&self.placed.forecast, self.devices.backends());
        let others = others.iter().map(|other| (&other.placed.forecast, other.devices.backends()));
        std::iter::once(first).chain(others).try_for_each(|(plan, backends)| check(plan, backends))
    }

    /// Prints the KL divergence that a gate threshold costs on these tokens, if there is one.
    pub(crate) fn explain_gate_threshold(&self, tokens: &[u32]) -> Outcome {
        let threshold = self.options.neurons.gate_threshold();
        let most = self.options.context.min(MAX_COMPARED);
        let tokens = tokens.get(..most.min(tokens.len())).unwrap_or_default();
        if threshold == 0.0 || self.quiet || tokens.is_empty() {
            return Ok(());
        }
        if self.model.ranks().is_some() {
            // They follow one engine.
            note!(
                "quadriga: --gate-threshold {threshold}: its KL divergence is measured on one rank only, and several divide the model"
            );
            return Ok(());
        }
        let engine = |neurons: Neurons| {
            let options =
                EngineOptions { neurons, greedy: false, output_rows: tokens.len(), ..self.options.clone() };
            Engine::new(self.model.clone(), &self.placed.scheduler, options, &mut |_| {})
        };
        let mut exact = engine(Neurons::DENSE)?;
        let mut cut = engine(Neurons { observe: true, ..self.options.neurons })?;
        let divergence = quadriga_llm::divergence(&mut exact, &mut cut, tokens)?;
        let active = cut.neuron_use().map_or(1.0, |usage| usage.active as f64 / usage.neurons.max(1) as f64);
        note!(
            "quadriga: --gate-threshold {threshold}: {:.1} % of the neurons active, KL divergence {divergence:.5} nats per token, over {}",
            100.0 * active,
            plural(tokens.len(), "token", "tokens")
        );
        Ok(())
    }

    /// Loads the weights into a text generator. Returns it with the seconds since it was opened.
    pub(crate) fn generator(&self, options: GeneratorOptions) -> Outcome<(Generator, f64)> {
        if ranks::follows() {
            // Engines are what they follow; it never comes back otherwise.
            return self.engine().and(Err(Failure::Followed));
        }
        let options = GeneratorOptions { engine: self.options.clone(), ..options };
        let load = |progress: &mut dyn FnMut(Progress)| {
            Generator::on(self.model.clone(), &self.placed.scheduler, options, progress)
        };
        let (mut generator, seconds) = self.start(None, load, |_| Ok(()))?;
        if !self.quiet {
            let shared = Arc::clone(&self.prefill_bar);
            generator.observe_prefill(Some(Box::new(move |progress| {
                let mut bar = shared.lock().unwrap_or_else(PoisonError::into_inner);
                let style = ProgressStyle::with_template("prompt [{wide_bar}] {pos}/{len} tokens {eta}");
                let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
                // Drawn only where standard error is a terminal.
                let shown = bar.get_or_insert_with(|| ProgressBar::new(0).with_style(style));
                shown.set_length(progress.total as u64);
                shown.set_position(progress.done as u64);
                if progress.done == progress.total {
                    shown.finish_and_clear();
                    *bar = None;
                }
            })));
        }
        Ok((generator, seconds))
    }

    /// Loads the weights into a batcher. Returns it with the seconds since it was opened.
    pub(crate) fn batcher(&self, options: BatcherOptions) -> Outcome<(Batcher, f64)> {
        let options = BatcherOptions { engine: self.options.clone(), ..options };
        let own = options.clone();
        let load = |progress: &mut dyn FnMut(Progress)| {
            Batcher::new(self.model.clone(), &self.placed.scheduler, own, progress)
        };
        self.start(Some(&options), load, |mut batcher| batcher.follow_ranks())
    }

    /// Loads the weights into an embedder. Returns it with the seconds since it was opened.
    pub(crate) fn embedder(&self, options: EmbedderOptions) -> Outcome<(Embedder, f64)> {
        let load = |progress: &mut dyn FnMut(Progress)| {
            Embedder::new(self.model.clone(), &self.placed.scheduler, options, progress)
        };
        self.start(None, load, |mut embedder| embedder.follow_ranks())
    }

    /// Removes the progress bar of a prefill that was cancelled or failed.
    pub(crate) fn clear_prefill(&self) {
        if let Some(bar) = self.prefill_bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
    }

    fn load<T>(
        &self,
        load: impl FnOnce(&mut dyn FnMut(Progress)) -> quadriga_llm::Result<T>,
    ) -> Outcome<(T, f64)> {
        let started = Instant::now();
        // Drawn only where standard error is a terminal.
        let bar = if self.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        let style = ProgressStyle::with_template("loading [{wide_bar}] {bytes}/{total_bytes}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        let loaded = load(&mut |progress| {
            bar.set_length(progress.total);
            bar.set_position(progress.done);
        });
        bar.finish_and_clear();
        if let (Err(error), Some(ranks)) = (&loaded, self.model.ranks()) {
            // Others wait for this one.
            ranks.communicator().fail(&error.to_string());
        }
        Ok((loaded?, (self.opening + started.elapsed()).as_secs_f64()))
    }

    /// The memory of each device that the model takes.
    pub(crate) fn backend_memory(&self) -> Vec<BackendMemory> {
        let (slots, staging) = (&self.placed.expert_slot_bytes, &self.placed.expert_staging_bytes);
        let of = |all: &[u64], number: usize| all.get(number).copied().unwrap_or(0);
        let all = self.placed.forecast.bytes().into_iter().enumerate();
        all.map(|(number, bytes)| BackendMemory {
            bytes,
            expert_slots: of(slots, number),
            expert_staging: of(staging, number),
        })
        .collect()
    }

    /// The memory of each device that the model takes, as text.
    pub(crate) fn memory(&self) -> String {
        let mut parts: Vec<String> = self
            .placed
            .forecast
            .bytes()
            .iter()
            .filter(|bytes| bytes.total() + bytes.mapped > 0)
            .map(|bytes| {
                let mapped = match bytes.mapped {
                    0 => String::new(),
                    mapped => format!(", and {} of weights in the mapped file", size::text(mapped)),
                };
                let cache = match bytes.state {
                    0 => String::new(),
                    state => format!("KV cache {}, ", size::text(state)),
                };
                format!(
                    "{} {} (weights {}, {cache}compute {}){mapped}",
                    bytes.backend,
                    size::text(bytes.total()),
                    size::text(bytes.weights),
                    size::text(bytes.compute + bytes.work)
                )
            })
            .collect();
        if self.options.expert_slots > 0 {
            let bytes = self.placed.expert_slot_bytes.iter().sum();
            let slots = plural(self.options.expert_slots, "expert", "experts");
            parts.push(format!("expert cache {} of it for {slots}", size::text(bytes)));
        }
        parts.join("; ")
    }
}
