//! Runs a model's graphs for many sequences at once, over a KV cache in pages.

mod cached_pages;
mod expanded_parts;
mod part_inputs;
mod ranks;
mod stages;
mod step_inputs;
mod step_results;
mod step_sizes;

use std::collections::VecDeque;

use quadriga_graph::PAGE_SLOTS;
use quadriga_runtime::{PendingRead, Plan, PlanKey, Progress, Scheduler, Session};

pub(super) use self::stages::PassedStep;
use self::stages::StepAnswer;
use self::step_inputs::StepInputs;
use self::step_results::TopRows;
pub(super) use self::step_sizes::bucket;
use self::step_sizes::coarse_bucket;
use super::page_pool::PageId;
use super::state_rows::{KeptState, StateRows};
use super::window_pages::WindowPages;
use crate::engine::{EngineOptions, ExpertCacheUse, ExpertSlots, Leader, resize};
use crate::hyperparameters::Hyperparameters;
use crate::models::{GraphShape, PageTable, PromptParts};
use crate::{Error, LogitsError, Model, Result};

/// The fewest pages of a row of a page table; more are a power of two.
const MIN_TABLE_PAGES: usize = 8;

/// A token of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StepToken {
    pub(super) token: u32,
    /// Its position in its sequence.
    pub(super) position: usize,
    /// The number of its sequence in this step. A token of none computes nothing that anybody reads.
    pub(super) sequence: usize,
    /// Whether the logits after it are an output, or its hidden state.
    pub(super) output: bool,
    /// Whether that is the hidden state.
    pub(super) hidden: bool,
    /// Whether the host needs all of these logits.
    pub(super) logits: bool,
}

impl StepToken {
    /// Takes the place of a sequence that needs no further step.
    pub(super) const UNUSED: StepToken =
        StepToken { token: 0, position: 0, sequence: usize::MAX, output: true, hidden: false, logits: false };
}

/// A sequence of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSequence<'a> {
    /// Its pages: enough for all of its positions.
    pub(super) pages: &'a [PageId],
    /// Its pages in layers with a window, where those have some of their own.
    pub(super) window_pages: Option<&'a WindowPages>,
    /// Where its recurrent state is kept, in models that have one: a number below [`EngineOptions::sequences`].
    pub(super) lane: usize,
    /// Whether that state is kept after the step, for other sequences that begin with the same tokens.
    pub(super) checkpoint: Option<KeptState>,
}

impl StepSequence<'_> {
    /// Takes the place of a sequence that is not there.
    pub(super) const NONE: StepSequence<'static> =
        StepSequence { pages: &[], window_pages: None, lane: 0, checkpoint: None };
}

/// A model with a KV cache in pages.
pub(super) struct PagedEngine {
    model: Model,
    session: Session,
    options: EngineOptions,
    inputs: StepInputs,
    /// Whether a device has the logits, so that it can compute the argmax, or the largest of them.
    logits_on_device: bool,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    /// The rows whose logits the host has.
    loaded: Vec<bool>,
    argmax: Vec<Result<u32, LogitsError>>,
    top: TopRows,
    /// The row of results of each output.
    output_rows: Vec<usize>,
    /// In models with recurrent layers: which rows hold which states.
    states: StateRows,
    /// Where devices have slots for experts of the host.
    experts: Option<ExpertSlots>,
    recurrent: bool,
    /// A step of which only the argmax is wanted, whose results have not been read.
    in_flight: Option<StepInFlight>,
    /// The step that follows it ahead of the host, with the argmax of the other as its tokens.
    ahead: Option<StepInFlight>,
    /// On the first rank of a pipeline: the steps that later stages compute, oldest first.
    passed_on: VecDeque<StepInFlight>,
    /// In models with recurrent layers: the steps that these belong to, which may have several each.
    passed_steps: VecDeque<PassedStep>,
    /// The results of those before them that had to be received early.
    answered: VecDeque<Result<StepAnswer>>,
    /// The bytes of a page on each rank; empty where there is one.
    rank_page_bytes: Vec<usize>,
    /// Tells the other ranks, on the first of several.
    leader: Option<Leader>,
    /// In models with recurrent layers: the lanes of the latest step, and the row of the state that it wrote for each, until
    /// [`PagedEngine::keep_states`].
    written_states: Vec<(usize, usize)>,
    /// Steps that failed when nobody needed their results any more.
    failed_unneeded: u64,
}

/// What is wanted of the outputs of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// The most probable tokens.
    Argmax,
    /// Tokens are sampled: by the largest logits, or by all.
    Logits,
    /// All logits, on the host.
    AllLogits,
}

/// A step that a device computes.
struct StepInFlight {
    shape: GraphShape,
    output_rows: Vec<usize>,
    /// The outputs of which all logits are needed.
    logits: Vec<usize>,
    /// Its results, once they are on their way to the host.
    read: Option<PendingRead>,
}

impl PagedEngine {
    /// Plans the model for the scheduler's backends, loads the weights and allocates the pages.
    pub(super) fn new(
        model: Model,
        scheduler: &Scheduler,
        options: EngineOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<PagedEngine> {
        let hyper = model.hyperparameters();
        if hyper.encoder {
            return Err(Error::Encoder { architecture: hyper.architecture });
        }
        let wanted = "at least 1";
        if options.pages == 0 {
            return Err(Error::Option { name: "the number of pages", value: "0".to_owned(), wanted });
        }
        let mut options = options.resolve(&model)?.on(scheduler);
        options.greedy = false;
        options.agree(&model)?;
        let with_ranks = model.ranks().map(|ranks| ranks.scheduler(scheduler)).transpose()?;
        let scheduler = with_ranks.as_ref().unwrap_or(scheduler);
        let recurrent = hyper.recurrent.is_some();
        let mut engine = PagedEngine {
            session: Session::new(scheduler)?,
            states: StateRows::new(options.sequences, options.kept_states()),
            inputs: StepInputs::default(),
            logits_on_device: false,
            logits: Vec::new(),
            hidden: Vec::new(),
            loaded: Vec::new(),
            argmax: Vec::new(),
            top: TopRows::default(),
            output_rows: Vec::new(),
            experts: None,
            recurrent,
            in_flight: None,
            ahead: None,
            passed_on: VecDeque::new(),
            passed_steps: VecDeque::new(),
            answered: VecDeque::new(),
            rank_page_bytes: Vec::new(),
            leader: None,
            written_states: Vec::new(),
            failed_unneeded: 0,
            model,
            options,
        };
        engine.model.file().check_mapped()?;
        // The graph of one token uses every weight, but for those of expanded latent attention; larger steps find them loaded.
        let smallest = engine.shape(1, [1, 0], (1, 1), None, Wanted::Logits);
        if let Some(expanded) = engine.smallest_expanded(smallest) {
            engine.prepare(expanded, progress)?;
        }
        engine.prepare(smallest, progress)?;
        let upload_bytes = engine.options.upload_bytes;
        engine.experts = ExpertSlots::new(&engine.model, &mut engine.session, upload_bytes)?;
        let on_device = |plan: &Plan| !crate::engine::has_logits_on_host(plan);
        engine.logits_on_device = engine.ranks().is_none() && engine.session.plan().is_some_and(on_device);
        if let Some(ranks) = engine.ranks().cloned() {
            // All have loaded their weights before the first computes.
            engine.rank_page_bytes = ranks.gather(engine.own_page_bytes())?;
            engine.leader = ranks.leads().then(|| Leader::new(&ranks));
        }
        Ok(engine)
    }

    pub(super) fn model(&self) -> &Model {
        &self.model
    }

    pub(super) fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    /// How the expert cache has served; `None` if there is none.
    pub(super) fn expert_cache(&self) -> Option<ExpertCacheUse> {
        self.experts.as_ref().map(ExpertSlots::usage)
    }

    /// A step has failed: experts that arrived for it may not have.
    fn lose_experts(&mut self) {
        if let Some(experts) = &mut self.experts {
            experts.fail();
        }
    }

    /// A step has failed, which is reported already.
    fn settle_failure(&mut self) {
        self.lose_experts();
        // A device may report a failure once more when it is waited for: the next step begins without it.
        let _ = self.session.wait();
    }

    /// Steps that failed when nobody needed their results any more.
    pub(super) fn failed_unneeded(&self) -> u64 {
        self.failed_unneeded
    }

    /// The shape of a step with so many tokens, outputs of logits and of hidden states, sequences, and pages of the longest one. In
    /// models with recurrent layers, `parts` says which sequences have several tokens, if it has others, too.
    fn shape(
        &self,
        tokens: usize,
        outputs: [usize; 2],
        (sequences, pages): (usize, usize),
        parts: Option<PromptParts>,
        wanted: Wanted,
    ) -> GraphShape {
        // Beside parts of prompts, a few rows more or less cost little: steps come in fewer shapes, and sessions keep fewer plans.
        let of_tokens = if tokens > 2 * sequences { coarse_bucket } else { bucket };
        let of_outputs = if tokens > sequences { coarse_bucket } else { bucket };
        let padded = match sequences {
            _ if parts.is_some() => of_tokens(tokens).min(self.options.batch).max(tokens),
            // Recurrent layers would take padding for tokens.
            0..=1 if self.recurrent => tokens,
            _ if self.recurrent => of_tokens(sequences).min(self.options.sequences).max(sequences),
            _ => of_tokens(tokens).min(self.options.batch),
        };
        let most = self.options.context.div_ceil(PAGE_SLOTS);
        let pages = pages.max(MIN_TABLE_PAGES).next_power_of_two().min(most).max(1);
        // A row of the table costs nothing beside a token: where they are about as many, their number follows from that of the tokens.
        let rows = if tokens > 2 * sequences { coarse_bucket(sequences) } else { padded };
        let table = PageTable { rows: rows.min(self.options.sequences).max(sequences), pages };
        let tokens = padded;
        // The memory is planned for so many rows of outputs.
        let planned = self.options.output_rows;
        let [logit_rows, hidden] =
            outputs.map(|outputs| of_outputs(outputs).min(tokens).min(planned.max(outputs)));
        let rows = logit_rows + hidden;
        let shape = self.options.paged_shape(&self.model, tokens, rows, table);
        let shape = match hidden {
            0 => shape,
            _ => GraphShape { hidden: true, logits: logit_rows > 0, logit_rows, ..shape },
        };
        let has_logits = rows > 0 && hidden == 0;
        let on_device = self.logits_on_device && has_logits;
        let top = if on_device && wanted == Wanted::Logits { shape.top } else { 0 };
        // The last stage of a pipeline sends few bytes instead of all logits.
        let argmax = (on_device || self.has_stages() && has_logits) && wanted == Wanted::Argmax;
        let parts = parts.map(|parts| self.padded_parts(parts));
        let together = match parts {
            Some(parts) => parts.singles + parts.count,
            None if self.recurrent && sequences > 1 => tokens,
            None => 1,
        };
        GraphShape { argmax, top, sequences: together, parts, ..shape }
    }

    fn prepare(&mut self, shape: GraphShape, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let GraphShape { tokens, rows, page_table, expanded, argmax, top, sequences, parts, .. } = shape;
        let table = page_table.map_or(0, |table| (table.rows as u64) << 32 | table.pages as u64);
        let logit_rows = if shape.hidden { shape.logit_rows } else { rows };
        let rows = (logit_rows as u64) << 32 | rows as u64;
        // As many tokens may be those of one sequence, of several, or of both; or some are expanded, in models without parts.
        let several = expanded.map_or(sequences, |parts| parts.tokens);
        let tokens = (several as u64) << 32 | tokens as u64;
        let parts = parts.map_or(0, |parts| (parts.count as u64) << 24 | parts.length as u64);
        let parts = (parts | expanded.map_or(0, |parts| parts.pages as u64)) << 24;
        let numbers = [tokens, rows, table, parts | (top as u64) << 1 | u64::from(argmax)];
        let key = PlanKey::of(self.model.id(), numbers);
        let model = &self.model;
        Ok(self.session.prepare_with(key, || model.graph(shape), progress)?)
    }

    /// Starts a step: the tokens of each sequence are neighbours, in the order of their positions. [`PagedEngine::finish`] waits
    /// for its outputs, and [`PagedEngine::keep_states`] ends it. After an error the step can be computed again: it only writes to slots of its own tokens.
    pub(super) fn start(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        // The CPU computes with the mapped weights: noticed here, a truncated file is an error and not a signal.
        self.model.file().check_mapped()?;
        if self.stages() == 1 {
            self.discard();
        }
        self.clear_outputs();
        self.written_states.clear();
        match self.recurrent {
            true => self.run_recurrent(tokens, sequences, wanted),
            false => self.start_together(tokens, sequences, wanted),
        }
    }

    /// Starts a batch on all ranks.
    pub(super) fn start_together(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        self.clear_outputs();
        self.tell_step(tokens, sequences, wanted)?;
        let computed = self.run_batch(tokens, sequences, wanted);
        self.together(computed)
    }

    /// An error unless rows of recurrent states and lanes agree.
    pub(super) fn check_states(&self) -> Result<(), String> {
        self.states.check()
    }

    /// The latest step wrote states to these rows of lanes.
    pub(super) fn note_states(&mut self, written: Vec<(usize, usize)>) {
        self.written_states = written;
    }

    /// The results of the latest step are there: its sequences go on from the states that it wrote. Until then the step can be
    /// computed again.
    pub(super) fn keep_states(&mut self) {
        for (lane, row) in std::mem::take(&mut self.written_states) {
            self.states.set(lane, row);
        }
    }

    /// The rows of recurrent states.
    pub(super) fn states(&self) -> &StateRows {
        &self.states
    }

    /// The rows of recurrent states.
    pub(super) fn states_mut(&mut self) -> &mut StateRows {
        &mut self.states
    }

    /// Starts the step after the one in flight before the host knows its results: each row goes on with the argmax of that row.
    /// `false`, and nothing has happened, where that is not possible.
    pub(super) fn follow(&mut self, tokens: &[StepToken], sequences: &[StepSequence<'_>]) -> Result<bool> {
        let Some(step) = self.in_flight.as_ref().filter(|step| step.read.is_none()) else { return Ok(false) };
        let (shape, outputs) = (step.shape, tokens.iter().filter(|token| token.output).count());
        let table = (sequences.len(), longest(sequences));
        // Which experts a step uses is read before the next one begins, and which have arrived.
        let is_next = self.experts.is_none()
            && self.shape(tokens.len(), [outputs, 0], table, None, Wanted::Argmax) == shape
            && shape.rows == shape.tokens
            && outputs == tokens.len();
        if !is_next || self.ahead.is_some() || !self.session.plan().is_some_and(Plan::is_asynchronous) {
            return Ok(false);
        }
        let followed = self.start_ahead(tokens, sequences, shape);
        if followed.is_err() {
            // Both steps fail with the error that is reported.
            let _ = self.abandon();
        }
        followed
    }

    fn start_ahead(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        shape: GraphShape,
    ) -> Result<bool> {
        let output_rows = self.fill(tokens, sequences, &shape);
        if !self.session.chain("argmax", "tokens")? {
            return Ok(false);
        }
        self.set_inputs(&shape, true)?;
        // The inputs of the next step are set by now, so that one transfer can bring them and the results.
        self.secure_results()?;
        self.session.start()?;
        self.ahead = Some(StepInFlight { shape, output_rows, logits: Vec::new(), read: None });
        Ok(true)
    }

    /// Waits for the results of the step in flight; of several, those of the oldest. A step that follows it is in flight then.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.has_stages() {
            return match self.recurrent {
                true => self.passed_steps.pop_front().map_or(Ok(()), |step| self.receive_step(step)),
                false => self.receive_results(),
            };
        }
        if self.in_flight.is_none() {
            return Ok(());
        }
        let finished = self.read_results();
        self.in_flight = self.ahead.take();
        if finished.is_err() {
            self.in_flight = None;
            self.settle_failure();
        }
        finished
    }

    /// Forgets steps in flight, and waits for them: whatever failed in them does not show in the next one.
    pub(super) fn discard(&mut self) {
        if self.abandon().is_err() {
            self.failed_unneeded += 1;
        }
    }

    /// As [`PagedEngine::discard`]; an error if they failed.
    fn abandon(&mut self) -> Result<()> {
        self.drain();
        let ahead = self.ahead.take();
        if self.in_flight.take().or(ahead).is_none() {
            return Ok(());
        }
        let waited = self.session.wait();
        if waited.is_err() {
            self.lose_experts();
        }
        Ok(waited?)
    }

    /// Computes a step, and waits for it.
    pub(super) fn run(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        self.start(tokens, sequences, wanted)?;
        self.finish()
    }

    fn run_batch(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        let outputs = || tokens.iter().filter(|token| token.output);
        let table = (sequences.len(), longest(sequences));
        let counts = [false, true].map(|hidden| outputs().filter(|token| token.hidden == hidden).count());
        let shape = self.shape(tokens.len(), counts, table, self.prompt_parts(tokens), wanted);
        let (shape, output_rows) = match self.divide(tokens) {
            Some(divided) => {
                let (arranged, shape) = divided.arrange(tokens, shape, self.expanded_pages());
                let rows = self.fill(&arranged, sequences, &shape);
                (shape, divided.restore(tokens, &rows))
            }
            None => (shape, self.fill(tokens, sequences, &shape)),
        };
        self.output_rows = output_rows;
        let all = outputs().zip(&self.output_rows).filter(|(token, _)| token.logits);
        let logits: Vec<usize> = all.map(|(_, row)| *row).collect();
        let computed = self.compute(shape, logits);
        if computed.is_err() {
            self.settle_failure();
        }
        computed
    }

    fn compute(&mut self, shape: GraphShape, logits: Vec<usize>) -> Result<()> {
        self.prepare(shape, &mut |_| {})?;
        self.set_inputs(&shape, false)?;
        if let Some(experts) = &mut self.experts {
            experts.set_tables(&mut self.session, &shape)?;
        }
        self.session.start()?;
        if self.has_stages() {
            self.session.wait()?;
            return self.pass_on(shape);
        }
        if shape.rows == 0 || self.follows() {
            self.session.wait()?;
            return self.observe_experts(&shape);
        }
        self.observe_experts(&shape)?;
        if shape.argmax || shape.top > 0 {
            let output_rows = std::mem::take(&mut self.output_rows);
            self.in_flight = Some(StepInFlight { shape, output_rows, logits, read: None });
            return Ok(());
        }
        let Hyperparameters { vocabulary, width, .. } = *self.model.hyperparameters();
        if shape.hidden {
            resize(&mut self.hidden, shape.rows, width)?;
            self.session.read_into("hidden", &mut self.hidden)?;
        }
        let rows = shape.logit_rows.min(shape.rows);
        resize(&mut self.logits, rows, vocabulary)?;
        if rows > 0 {
            self.session.read_into("logits", &mut self.logits)?;
        }
        self.loaded = vec![true; rows];
        Ok(())
    }
}

/// The most pages that a sequence of a step has.
fn longest(sequences: &[StepSequence<'_>]) -> usize {
    sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(1)
}
