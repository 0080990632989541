//! Runs a model's graphs over its KV cache, for one or several sequences at once.

mod expert_cache;
mod experts;
mod lead;
mod moves;
mod neuron_slots;
mod neurons;
mod options;
mod rank_state;
mod recurrent;
mod results;
mod run_ahead;
mod sequences;
mod stages;
mod state;
mod temporary_file;
mod windows;

use std::time::Instant;

use quadriga_runtime::{Detail, ObservedRun, Observer, Plan, PlanKey, Progress, Scheduler, Session, Trace};

pub use self::expert_cache::ExpertCacheUse;
pub(crate) use self::experts::{BatchRow, ExpertSlots, slot_bytes};
pub(crate) use self::lead::{END, Leader};
use self::lead::{RankCommand, next_command};
pub(crate) use self::moves::row_copies;
pub use self::neuron_slots::NeuronSlotUse;
use self::neuron_slots::NeuronSlots;
pub(crate) use self::neuron_slots::STAGED_ROWS;
use self::neurons::NeuronObserver;
pub use self::neurons::NeuronUse;
pub use self::options::{EngineOptions, RecurrentStates, WindowSavings};
pub(crate) use self::options::{
    MAX_OBSERVED_TOKENS, MAX_PARTS, SCRAP_PAGES, STATES_OF_SEQUENCE, WASTED_PARTS,
};
use self::recurrent::RecurrentRows;
pub(crate) use self::results::{resize, row_of};
use self::run_ahead::Decode;
pub(crate) use self::run_ahead::has_logits_on_host;
use self::sequences::Sequences;
use self::stages::Unanswered;
pub(crate) use self::stages::pipelined_batch;
use self::windows::Windows;
use crate::hyperparameters::{LayerCaches, QUERY_FACTORS};
use crate::models::GraphShape;
use crate::{Error, Model, Result};

/// A token of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchToken {
    /// The sequence that the token is appended to.
    pub sequence: usize,
    /// The token.
    pub token: u32,
    /// Whether the logits after this token are an output.
    pub output: bool,
}

/// A model with its KV cache, ready to compute logits.
///
/// ```no_run
/// use quadriga_llm::placement::Placement;
/// use quadriga_llm::sampling::argmax;
/// use quadriga_llm::{Engine, EngineOptions, Model};
///
/// let model = Model::open("model.gguf")?;
/// let (options, placement) = (EngineOptions::default(), Placement::default());
/// let placed = placement.plan(&model, &placement.open_devices()?, &options)?;
/// let mut engine = Engine::new(model, &placed.scheduler, placed.engine_options(&options), &mut |_| {})?;
///
/// let prompt = engine.model().tokenizer()?.encode_prompt("The capital of France is", true);
/// engine.feed(&prompt)?; // prefill
/// for _ in 0..8 {
///     let token = argmax(engine.logits(0))?;
///     engine.feed(&[token])?; // decode
/// }
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub struct Engine {
    model: Model,
    session: Session,
    options: EngineOptions,
    sequences: Sequences,
    /// In models with recurrent layers.
    recurrent: Option<RecurrentRows>,
    windows: Windows,
    /// Where devices have slots for experts of the host.
    experts: Option<ExpertSlots>,
    /// Where devices have rows of some neurons.
    neuron_slots: Option<NeuronSlots>,
    /// Where active neurons are counted.
    neurons: Option<NeuronObserver>,
    /// What this rank's layers remember tokens by.
    caches: LayerCaches,
    /// Whether layers with a window have a KV cache of their own.
    windows_apart: bool,
    inputs: BatchInputs,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    decode: Decode,
    /// Whether a device has the logits, so that it can compute the argmax; `None` before that is known.
    argmax_on_device: Option<bool>,
    observer: Option<(Detail, BatchObserver)>,
    node_observer: Option<Box<dyn Observer + Send>>,
    /// Tells other ranks what to compute, on the first of several.
    leader: Option<Leader>,
}

/// A function that is called after every batch with its plan and its times.
pub type BatchObserver = Box<dyn FnMut(&Batch<'_>) + Send>;

/// A batch that was computed, and its times.
pub struct Batch<'a> {
    /// The plan that ran.
    pub plan: &'a Plan,
    /// The times of its splits, and of its operations if requested.
    pub trace: &'a Trace,
    /// The time at which it began.
    pub started: Instant,
    /// Its tokens.
    pub tokens: &'a [BatchToken],
    /// Tokens in the KV cache of the first token's sequence before the batch.
    pub position: usize,
    /// The share of the plan's KV-cache slots that the batch attends to, 0 to 1: a plan serves many lengths of the
    /// cache.
    pub visible: f64,
    /// How the expert cache has served up to and including this batch; `None` if there is none.
    pub expert_cache: Option<ExpertCacheUse>,
}

/// The input tensors of a batch; kept to reuse their memory.
#[derive(Default)]
struct BatchInputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    query_factors: Vec<f32>,
    slots: Vec<i32>,
    spans: Vec<i32>,
    window_slots: Vec<i32>,
    window_spans: Vec<i32>,
    rows: Vec<i32>,
    /// The rows of recurrent states that are read and written.
    state_rows: [i32; 2],
    /// The pieces of such a row.
    state_pieces: Vec<i32>,
}

/// The KV-cache slots that a batch attends to.
struct VisibleSlots {
    /// One past the last of them.
    end: usize,
    /// Their number, summed over the batch's tokens.
    total: usize,
    /// Tokens in the KV cache of the first token's sequence before the batch.
    position: usize,
}

impl Engine {
    /// Plans the model for the scheduler's backends, loads the weights and allocates the KV cache.
    pub fn new(
        model: Model,
        scheduler: &Scheduler,
        options: EngineOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Engine> {
        if model.hyperparameters().encoder {
            return Err(Error::Encoder { architecture: model.hyperparameters().architecture });
        }
        let options = options.resolve(&model)?.on(scheduler);
        options.agree(&model)?;
        let with_ranks = model.ranks().map(|ranks| ranks.scheduler(scheduler)).transpose()?;
        let scheduler = with_ranks.as_ref().unwrap_or(scheduler);
        let session = Session::new(scheduler)?;
        let sequences = Sequences::new(options.sequences);
        let hyper = model.hyperparameters();
        let has_states = hyper.recurrent.is_some();
        let recurrent = has_states.then(|| RecurrentRows::new(options.sequences, options.checkpoints));
        let own_slots = options.window_cache(hyper).map(|_| options.window_slots);
        let caches = model.caches();
        let windows_apart = own_slots.is_some();
        let window = hyper.window().unwrap_or(0);
        let windows = Windows::new(options.sequences, options.checkpoints, window, own_slots);
        let mut engine = Engine {
            model,
            session,
            options,
            sequences,
            recurrent,
            windows,
            experts: None,
            neuron_slots: None,
            neurons: None,
            caches,
            windows_apart,
            inputs: BatchInputs::default(),
            logits: Vec::new(),
            hidden: Vec::new(),
            decode: Decode::default(),
            argmax_on_device: None,
            observer: None,
            node_observer: None,
            leader: None,
        };
        engine.model.file().check_mapped()?;
        // The graph of one token uses every weight; larger batches find them loaded.
        engine.prepare(engine.options.shape(&engine.model, 1, 1, 1), progress)?;
        if engine.options.greedy {
            let on_host = engine.session.plan().is_none_or(has_logits_on_host);
            engine.argmax_on_device = Some(!on_host);
            if on_host {
                engine.options.greedy = false;
                engine.prepare(engine.options.shape(&engine.model, 1, 1, 1), progress)?;
            }
        }
        if engine.options.neurons.observe {
            engine.neurons = Some(NeuronObserver::new(&engine.model));
        }
        engine.experts = ExpertSlots::new(&engine.model, &mut engine.session, engine.options.upload_bytes)?;
        let counts = engine.options.neuron_counts.clone();
        engine.neuron_slots = NeuronSlots::new(&engine.model, &mut engine.session, counts.as_deref())?;
        if let Some(ranks) = engine.model.ranks() {
            // All have loaded their weights before the first computes; some take longer.
            ranks.meet()?;
            engine.leader = ranks.leads().then(|| Leader::new(ranks));
        }
        Ok(engine)
    }

    /// Computes what the first rank's engine computes, until that is dropped: for every other rank of several.
    ///
    /// # Errors
    /// The model is not divided, or ranks could not compute or exchange data.
    pub fn follow(&mut self) -> Result<()> {
        let Some(ranks) = self.model.ranks().filter(|ranks| !ranks.leads()).cloned() else {
            return Err(Error::Ranks { reason: "only ranks after the first follow".to_owned() });
        };
        let commands = ranks.commands();
        loop {
            match next_command(&commands)? {
                RankCommand::Extend(tokens) => self.extend(&tokens)?,
                RankCommand::Truncate { sequence, len } => {
                    self.truncate(sequence, len);
                }
                RankCommand::Checkpoint { sequence } => self.checkpoint(sequence)?,
                RankCommand::Save { sequence } => self.send_state(sequence)?,
                RankCommand::Load { sequence } => self.receive_state(sequence)?,
                RankCommand::End => return Ok(()),
            }
        }
    }

    /// Tells the other ranks, if there are any.
    fn tell(&self, command: impl FnOnce() -> RankCommand) -> Result<()> {
        self.leader.as_ref().map_or(Ok(()), |leader| leader.tell(&command()))
    }

    /// Whether results are read on another rank.
    fn follows(&self) -> bool {
        self.model.ranks().is_some_and(|ranks| !ranks.leads())
    }

    /// Plans the largest batch over a full KV cache. Nothing is loaded.
    pub fn forecast(model: &Model, scheduler: &Scheduler, options: EngineOptions) -> Result<Plan> {
        let options = options.resolve(model)?.on(scheduler);
        let shape =
            options.shape(model, options.batch, options.output_rows, options.context * options.sequences);
        let mut largest = scheduler.plan(model.graph(shape)?)?;
        let arenas = |plan: &Plan| -> u64 {
            (0..plan.backends().len()).map(|backend| plan.memory().arena_bytes(backend)).sum()
        };
        for shape in options.other_largest_shapes(model, shape) {
            let other = scheduler.plan(model.graph(shape)?)?;
            if arenas(&other) > arenas(&largest) {
                largest = other;
            }
        }
        Ok(largest)
    }

    /// Plans a batch that attends to the first `visible_slots` of the KV cache at most. The options are resolved.
    pub(crate) fn plan_batch(
        model: &Model,
        scheduler: &Scheduler,
        options: &EngineOptions,
        tokens: usize,
        visible_slots: usize,
    ) -> Result<Plan> {
        Engine::plan_outputs(model, scheduler, options, (tokens, 1), visible_slots)
    }

    /// As [`Engine::plan_batch`], with logits of so many of the tokens.
    pub(crate) fn plan_outputs(
        model: &Model,
        scheduler: &Scheduler,
        options: &EngineOptions,
        (tokens, outputs): (usize, usize),
        visible_slots: usize,
    ) -> Result<Plan> {
        let options = options.clone().on(scheduler);
        Ok(scheduler.plan(model.graph(options.shape(model, tokens, outputs, visible_slots))?)?)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The options, with everything filled in.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The session that runs the graphs.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The session that runs the graphs. A step that ran ahead is discarded, since its memory may be overwritten.
    pub fn session_mut(&mut self) -> &mut Session {
        self.decode.discard_run_ahead();
        &mut self.session
    }

    /// Sets the observer of all batches from now on; `None` removes it. Observed batches are timed and computed one
    /// after the other, without run-ahead; without an observer nothing is timed.
    pub fn observe(&mut self, observer: Option<(Detail, BatchObserver)>) {
        self.decode.discard_run_ahead();
        self.observer = observer;
    }

    /// Sets an observer of intermediate results, which sees those of every batch from now on that it wants to see; `None`
    /// removes it. An observer that ends a run makes [`Engine::extend`] fail.
    pub fn observe_nodes(&mut self, observer: Option<Box<dyn Observer + Send>>) {
        self.decode.discard_run_ahead();
        self.node_observer = observer;
    }

    /// The number of tokens in a sequence's KV cache.
    pub fn len(&self, sequence: usize) -> usize {
        self.sequences.len(sequence)
    }

    /// The tokens in a sequence's KV cache.
    pub fn tokens(&self, sequence: usize) -> &[u32] {
        self.sequences.tokens(sequence)
    }

    /// Whether no sequence has any tokens.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Removes a sequence's tokens from position `len` on, or more of them: layers with a sliding window and recurrent
    /// layers forget, so that such a model can only go back to a few tokens before, to a
    /// [checkpoint](Engine::checkpoint) or to the beginning. Returns the number of tokens that are left, at most `len`; the
    /// caller computes those that are missing again.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> usize {
        self.decode.discard_run_ahead();
        // A failure shows in the next batch.
        drop(self.tell(|| RankCommand::Truncate { sequence, len }));
        let mut kept = len.min(self.len(sequence));
        loop {
            let recurrent = self.recurrent.as_ref().map_or(kept, |rows| rows.retained(sequence, kept));
            let both = self.windows.retained(sequence, recurrent);
            if both == kept {
                break;
            }
            kept = both;
        }
        self.windows.truncate(sequence, kept);
        self.sequences.truncate(sequence, kept);
        kept
    }

    /// Appends tokens to sequences and computes them, in batches. Afterwards there is a row of results for each token
    /// whose `output` is set, in their order: [`Engine::logits`], or with [`EngineOptions::greedy`] only
    /// [`Engine::argmax`], once [`Engine::wait`] or [`Engine::run_ahead`] has returned.
    ///
    /// On an error, which devices may report only when the results are waited for, the sequences are as they were
    /// before the call; those of models that forget may be shorter, as after [`Engine::truncate`]. If the previous call's
    /// batch was not waited for, its failure shows here, and the sequences are as they were before that call.
    pub fn extend(&mut self, tokens: &[BatchToken]) -> Result<()> {
        // The CPU computes with the mapped weights: noticed here, a truncated file is an error and not a signal.
        self.model.file().check_mapped()?;
        if self.adopt_run_ahead(tokens) {
            return Ok(());
        }
        // A batch in flight takes back its own tokens if it fails; afterwards this could no longer tell them apart.
        self.wait()?;
        self.sequences.begin();
        let result = self.try_extend(tokens);
        if result.is_err() {
            self.roll_back();
        }
        result
    }

    /// Returns to the sequences before the latest batch or, in models that forget, to a prefix of them.
    fn roll_back(&mut self) {
        if let Some(experts) = &mut self.experts {
            experts.fail();
        }
        if let Some(slots) = &mut self.neuron_slots {
            slots.fail();
        }
        for sequence in 0..self.options.sequences {
            self.truncate(sequence, self.sequences.before(sequence));
        }
    }

    /// Appends tokens to sequence 0 and computes them; the logits after the last one are the output.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let last = tokens.len().saturating_sub(1);
        let tokens: Vec<BatchToken> = tokens
            .iter()
            .enumerate()
            .map(|(i, token)| BatchToken { sequence: 0, token: *token, output: i == last })
            .collect();
        self.extend(&tokens)
    }

    /// The logits over the vocabulary in output row `row`. Empty if there is no such row, or with
    /// [`EngineOptions::greedy`].
    pub fn logits(&self, row: usize) -> &[f32] {
        row_of(&self.logits, self.model.hyperparameters().vocabulary, row)
    }

    /// The hidden state after the last layer in output row `row`. Empty unless [`EngineOptions::hidden`] is set.
    pub fn hidden(&self, row: usize) -> &[f32] {
        row_of(&self.hidden, self.model.hyperparameters().width, row)
    }

    fn try_extend(&mut self, tokens: &[BatchToken]) -> Result<()> {
        self.check(tokens)?;
        self.tell(|| RankCommand::Extend(tokens.to_vec()))?;
        let computed = self.compute_told(tokens);
        match self.model.ranks() {
            None => computed,
            Some(ranks) => ranks.together(computed),
        }
    }

    /// Computes what all ranks are told to.
    fn compute_told(&mut self, tokens: &[BatchToken]) -> Result<()> {
        self.decode.reset();
        self.restore_rows()?;
        let outputs = tokens.iter().filter(|token| token.output).count();
        let without = self.options.greedy || !self.options.logits;
        let vocabulary = if without { 0 } else { self.model.hyperparameters().vocabulary };
        let width = if self.options.hidden { self.model.hyperparameters().width } else { 0 };
        resize(&mut self.logits, outputs, vocabulary)?;
        resize(&mut self.hidden, outputs, width)?;
        let (mut done, mut unanswered) = (0, Unanswered::default());
        for batch in self.batches(tokens) {
            self.wait()?;
            self.make_room(batch)?;
            let shape = self.run(batch)?;
            let rows = shape.rows;
            if self.follows() {
                self.session.wait()?;
                self.report_done(rows)?;
                continue;
            }
            if self.pass_on(rows, &mut unanswered)? {
                continue;
            }
            if self.options.greedy {
                self.decode.start(batch, shape);
            }
            if let Some(into) = self.logits.get_mut(done * vocabulary..(done + rows) * vocabulary)
                && rows > 0
                && vocabulary > 0
            {
                self.session.read_into("logits", into)?;
            }
            if let Some(into) = self.hidden.get_mut(done * width..(done + rows) * width)
                && rows > 0
                && width > 0
            {
                self.session.read_into("hidden", into)?;
            }
            done += rows;
        }
        self.receive_batches(&mut unanswered)
    }

    /// The batches in which tokens are computed: with recurrent layers, those of one sequence each.
    fn batches<'t>(&self, tokens: &'t [BatchToken]) -> Vec<&'t [BatchToken]> {
        let together = |a: &BatchToken, b: &BatchToken| self.recurrent.is_none() || a.sequence == b.sequence;
        let most = pipelined_batch(tokens.len(), self.stages(), self.options.batch);
        tokens.chunk_by(together).flat_map(|run| run.chunks(most)).collect()
    }

    /// An error unless every token exists and fits its sequence.
    fn check(&self, tokens: &[BatchToken]) -> Result<()> {
        let vocabulary = self.model.hyperparameters().vocabulary;
        let count = self.options.sequences;
        let mut added = vec![0usize; count];
        for BatchToken { sequence, token, .. } in tokens {
            if *token as usize >= vocabulary {
                return Err(Error::Token { token: *token, count: vocabulary });
            }
            let added = added.get_mut(*sequence).ok_or(Error::Sequence { sequence: *sequence, count })?;
            *added += 1;
        }
        let context = self.options.context;
        for (sequence, wanted) in added.into_iter().enumerate() {
            let used = self.len(sequence);
            if wanted + used > context {
                return Err(Error::ContextFull { wanted, used, context });
            }
        }
        Ok(())
    }

    fn prepare(&mut self, shape: GraphShape, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let GraphShape { tokens, rows, visible_slots, argmax, .. } = shape;
        let numbers = [tokens as u64, rows as u64, visible_slots as u64, u64::from(argmax)];
        let key = PlanKey::of(self.model.id(), numbers);
        let model = &self.model;
        Ok(self.session.prepare_with(key, || model.graph(shape), progress)?)
    }

    /// Appends a batch to its sequences, and fills the graph's inputs.
    fn fill(&mut self, batch: &[BatchToken]) -> Result<VisibleSlots> {
        let (context, hyper) = (self.options.context, self.model.hyperparameters());
        let (window, full) = (hyper.window_span(), hyper.has_full_attention());
        let inputs = &mut self.inputs;
        for list in [
            &mut inputs.tokens,
            &mut inputs.positions,
            &mut inputs.slots,
            &mut inputs.spans,
            &mut inputs.window_slots,
            &mut inputs.window_spans,
            &mut inputs.rows,
        ] {
            list.clear();
        }
        let position = batch.first().map_or(0, |token| self.sequences.len(token.sequence));
        let mut visible = VisibleSlots { end: 0, total: 0, position };
        if let (Some(rows), Some(BatchToken { sequence, .. })) = (&mut self.recurrent, batch.first()) {
            let keep = self.sequences.before(*sequence);
            let rows = rows.begin(*sequence, position, batch.len(), keep);
            inputs.state_rows = rows.ok_or(Error::StateLost { sequence: *sequence })?.map(|row| row as i32);
        }
        for (row, BatchToken { sequence, token, output }) in batch.iter().enumerate() {
            let Some(position) = self.sequences.append(*sequence, *token) else { continue };
            let base = sequence * context;
            let first = window.map_or(0, |window| window.first(position));
            visible.end = visible.end.max(base + position + 1);
            visible.total += position + 1 - if full { 0 } else { first };
            inputs.tokens.push(*token as i32);
            inputs.positions.push(position as i32);
            inputs.slots.push((base + position) as i32);
            let end = (base + position + 1) as i32;
            inputs.spans.extend([base as i32, end]);
            let slot = self.windows.slot(*sequence, position).unwrap_or(base + position);
            inputs.window_slots.push(slot as i32);
            inputs.window_spans.extend([(slot + first - position) as i32, slot as i32 + 1]);
            if *output {
                inputs.rows.push(row as i32);
            }
        }
        Ok(visible)
    }

    /// Starts one batch, and returns the shape of its graph. Reading its results waits for it; a batch without results
    /// is waited for here.
    fn run(&mut self, batch: &[BatchToken]) -> Result<GraphShape> {
        let VisibleSlots { end, total, position } = self.fill(batch)?;
        let rows = self.inputs.rows.len();
        let shape = self.options.shape(&self.model, batch.len(), rows, end);
        self.prepare(shape, &mut |_| {})?;
        self.session.set("tokens", self.inputs.tokens.as_slice())?;
        self.set_positions()?;
        self.set_expert_tables(&shape)?;
        self.set_neuron_tables(&shape)?;
        if rows > 0 && rows < batch.len() {
            self.session.set("rows", self.inputs.rows.as_slice())?;
        }
        if let Some(observer) = &mut self.node_observer {
            if let ObservedRun::Stopped { .. } = self.session.debug().observe(observer.as_mut())? {
                return Err(Error::ObserverStopped);
            }
            return Ok(shape);
        }
        let Some((detail, _)) = &self.observer else {
            self.session.start()?;
            if rows == 0 {
                self.session.wait()?;
            }
            self.observe_experts(&shape)?;
            self.observe_neurons(&shape)?;
            self.observe_neuron_slots(&shape)?;
            return Ok(shape);
        };
        let started = Instant::now();
        let trace = self.session.debug().trace(*detail)?;
        self.observe_experts(&shape)?;
        self.observe_neurons(&shape)?;
        self.observe_neuron_slots(&shape)?;
        let visible = total as f64 / (batch.len() * shape.visible_slots).max(1) as f64;
        let (trace, tokens, expert_cache) = (&trace, batch, self.expert_cache());
        if let (Some((_, observer)), Some(plan)) = (&mut self.observer, self.session.plan()) {
            observer(&Batch { plan, trace, started, tokens, position, visible, expert_cache });
        }
        Ok(shape)
    }

    /// Sets all inputs that do not depend on which tokens the batch has.
    fn set_positions(&mut self) -> Result<()> {
        let BatchInputs {
            positions,
            query_factors,
            slots,
            spans,
            window_slots,
            window_spans,
            state_rows,
            state_pieces,
            ..
        } = &mut self.inputs;
        let LayerCaches { full, windows, recurrent } = self.caches;
        if let Some(shape) = self.model.part().recurrent.as_ref().filter(|_| recurrent) {
            let [from, to] = *state_rows;
            for (name, pieces) in shape.piece_inputs(from, to) {
                state_pieces.clear();
                state_pieces.extend(pieces);
                self.session.set(name, state_pieces.as_slice())?;
            }
        }
        let apart = self.windows_apart;
        self.session.set("positions", positions.as_slice())?;
        if let Some(temperature) = self.model.temperature() {
            temperature.fill(query_factors, positions);
            self.session.set(QUERY_FACTORS, query_factors.as_slice())?;
        }
        for (name, values, has) in [
            ("slots", slots, full || windows && !apart),
            ("spans", spans, full),
            ("window_slots", window_slots, windows && apart),
            ("window_spans", window_spans, windows),
        ] {
            if has {
                self.session.set(name, values.as_slice())?;
            }
        }
        Ok(())
    }
}
