//! Runs a model's graphs for many sequences at once, over a KV cache in pages.

use quadriga_graph::PAGE_SLOTS;
use quadriga_runtime::{PendingRead, Plan, PlanKey, Progress, Scheduler, Session};

use super::page_pool::PageId;
use super::state_rows::StateRows;
use super::window_pages::WindowPages;
use crate::engine::{EngineOptions, SCRAP_PAGES, resize, row_copies, row_of};
use crate::hyperparameters::Hyperparameters;
use crate::models::{GraphShape, PageTable};
use crate::sampling::{TopLogits, find_argmax};
use crate::{Error, LogitsError, Model, Result};

/// The fewest pages of a row of a page table; more are a power of two.
const MIN_TABLE_PAGES: usize = 8;

/// The keys of the graphs that copy a page, of all layers or of those with a window: no step is this large.
const COPY_KEYS: [PlanKey; 2] = [PlanKey([u64::MAX; 4]), PlanKey([u64::MAX - 1; 4])];

/// A token of a step.
#[derive(Clone, Copy, Debug)]
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
    pub(super) checkpoint: bool,
}

impl StepSequence<'_> {
    /// Takes the place of a sequence that is not there.
    pub(super) const NONE: StepSequence<'static> =
        StepSequence { pages: &[], window_pages: None, lane: 0, checkpoint: false };
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
    recurrent: bool,
    /// A step of which only the argmax is wanted, whose results have not been read.
    in_flight: Option<StepInFlight>,
    /// The step that follows it ahead of the host, with the argmax of the other as its tokens.
    ahead: Option<StepInFlight>,
}

/// The largest logits of each row of a step.
#[derive(Default)]
struct TopRows {
    /// Of each row; 0 if they were not computed.
    count: usize,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    /// The sum of all logits of each row: finite only if they all are.
    sums: Vec<f32>,
}

/// What is wanted of the outputs of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// The most probable tokens.
    Argmax,
    /// Tokens are sampled: by the largest logits, or by all.
    Logits,
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

#[derive(Default)]
struct StepInputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    spans: Vec<i32>,
    window_spans: Vec<i32>,
    pages: Vec<i32>,
    window_slots: Vec<i32>,
    window_pages: Vec<i32>,
    rows: Vec<i32>,
    /// The rows of recurrent states that each sequence reads and writes.
    state_rows: Vec<[i32; 2]>,
    pieces: Vec<i32>,
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
        let recurrent = hyper.recurrent.is_some();
        let mut engine = PagedEngine {
            session: Session::new(scheduler)?,
            states: StateRows::new(options.sequences, options.checkpoints * options.sequences),
            inputs: StepInputs::default(),
            logits_on_device: false,
            logits: Vec::new(),
            hidden: Vec::new(),
            loaded: Vec::new(),
            argmax: Vec::new(),
            top: TopRows::default(),
            output_rows: Vec::new(),
            recurrent,
            in_flight: None,
            ahead: None,
            model,
            options,
        };
        engine.model.file().check_mapped()?;
        // The graph of one token uses every weight; larger steps find them loaded.
        engine.prepare(engine.shape(1, [1, 0], (1, 1), Wanted::Logits), progress)?;
        engine.logits_on_device =
            engine.session.plan().is_some_and(|plan| !crate::engine::has_logits_on_host(plan));
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

    /// The bytes of a page in all states.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The states that have rows for slots: their names, and the bytes of a page.
    fn page_parts(&self) -> Vec<(String, usize)> {
        self.parts_of(
            self.options.paged_shape(&self.model, 1, 1, PageTable { rows: 1, pages: 1 }).cache_slots,
        )
    }

    fn parts_of(&self, slots: usize) -> Vec<(String, usize)> {
        let mut states = self.session.states();
        states.retain(|state| state.shape.dims().first() == Some(&slots));
        states.into_iter().map(|state| (state.name, state.bytes / slots.max(1) * PAGE_SLOTS)).collect()
    }

    /// Reads the keys and values of a page.
    pub(super) fn read_page(&mut self, page: PageId) -> Result<Vec<u8>> {
        self.secure_results()?;
        let mut content = Vec::with_capacity(self.page_bytes());
        for (name, bytes) in self.page_parts() {
            let start = content.len();
            content.resize(start + bytes, 0);
            if let Some(into) = content.get_mut(start..) {
                self.session.read_state_at(&name, page as usize * bytes, into)?;
            }
        }
        Ok(content)
    }

    /// Writes what [`PagedEngine::read_page`] has read, to the same page or to another one.
    pub(super) fn write_page(&mut self, page: PageId, content: &[u8]) -> Result<()> {
        self.secure_results()?;
        let mut rest = content;
        for (name, bytes) in self.page_parts() {
            let Some((part, after)) = rest.split_at_checked(bytes) else { break };
            self.session.write_state_at(&name, page as usize * bytes, part)?;
            rest = after;
        }
        Ok(())
    }

    /// Copies a page, on the devices that have it.
    pub(super) fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        let [key, _] = COPY_KEYS;
        self.copy_rows(key, &self.page_parts(), from, to)
    }

    /// Copies a page of layers with a window that have pages of their own.
    pub(super) fn copy_window_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        let [_, key] = COPY_KEYS;
        let slots = self.options.window_pages(self.model.hyperparameters()).unwrap_or(0) + SCRAP_PAGES;
        self.copy_rows(key, &self.parts_of(slots * PAGE_SLOTS), from, to)
    }

    fn copy_rows(&mut self, key: PlanKey, parts: &[(String, usize)], from: PageId, to: PageId) -> Result<()> {
        self.secure_results()?;
        let mut states = self.session.states();
        states.retain(|state| parts.iter().any(|(name, _)| *name == state.name));
        if states.is_empty() {
            return Ok(());
        }
        self.session.prepare_with(key, || row_copies(&states, PAGE_SLOTS), &mut |_| {})?;
        for (name, page) in [("from", from), ("to", to)] {
            let first = page as usize * PAGE_SLOTS;
            let rows: Vec<i32> = (first..first + PAGE_SLOTS).map(|row| row as i32).collect();
            self.session.set(name, rows.as_slice())?;
        }
        let started = self.session.start();
        // After an error, too: whatever a device still does with the pages has ended then.
        let waited = self.session.wait();
        started?;
        Ok(waited?)
    }

    /// The shape of a step with so many tokens, outputs of logits and of hidden states, sequences, and pages of the longest one.
    fn shape(
        &self,
        tokens: usize,
        outputs: [usize; 2],
        (sequences, pages): (usize, usize),
        wanted: Wanted,
    ) -> GraphShape {
        // Beside parts of prompts, a few rows more or less cost little: steps come in fewer shapes.
        let bucket = if tokens > 2 * sequences { coarse_bucket } else { bucket };
        let tokens = match sequences {
            // Recurrent layers would take padding for tokens.
            0..=1 if self.recurrent => tokens,
            _ if self.recurrent => bucket(sequences).min(self.options.sequences).max(sequences),
            _ => bucket(tokens).min(self.options.batch),
        };
        let most = self.options.context.div_ceil(PAGE_SLOTS);
        let pages = pages.max(MIN_TABLE_PAGES).next_power_of_two().min(most).max(1);
        let table = PageTable { rows: bucket(sequences).min(self.options.sequences).max(sequences), pages };
        // The memory is planned for so many rows of outputs.
        let planned = self.options.output_rows;
        let [logit_rows, hidden] =
            outputs.map(|outputs| bucket(outputs).min(tokens).min(planned.max(outputs)));
        let rows = logit_rows + hidden;
        let shape = self.options.paged_shape(&self.model, tokens, rows, table);
        let shape = match hidden {
            0 => shape,
            _ => GraphShape { hidden: true, logits: logit_rows > 0, logit_rows, ..shape },
        };
        let on_device = self.logits_on_device && !self.recurrent && rows > 0 && hidden == 0;
        let top = if on_device && wanted == Wanted::Logits { shape.top } else { 0 };
        let together = if self.recurrent && sequences > 1 { tokens } else { 1 };
        GraphShape { argmax: on_device && wanted == Wanted::Argmax, top, sequences: together, ..shape }
    }

    fn prepare(&mut self, shape: GraphShape, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let GraphShape { tokens, rows, page_table, argmax, top, .. } = shape;
        let table = page_table.map_or(0, |table| (table.rows as u64) << 32 | table.pages as u64);
        let logit_rows = if shape.hidden { shape.logit_rows } else { rows };
        let rows = (logit_rows as u64) << 32 | rows as u64;
        let key = PlanKey([tokens as u64, rows, table, (top as u64) << 1 | u64::from(argmax)]);
        let model = &self.model;
        Ok(self.session.prepare_with(key, || model.graph(shape), progress)?)
    }

    /// Starts a step: the tokens of each sequence are neighbours, in the order of their positions. [`PagedEngine::finish`] waits
    /// for its outputs. After an error the step can be computed again: it only writes to slots of its own tokens.
    pub(super) fn start(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        // The CPU computes with the mapped weights: noticed here, a truncated file is an error and not a signal.
        self.model.file().check_mapped()?;
        self.discard();
        self.output_rows.clear();
        self.loaded.clear();
        self.argmax.clear();
        self.top.count = 0;
        if !self.recurrent {
            return self.run_batch(tokens, sequences, wanted);
        }
        self.run_recurrent(tokens, sequences)
    }

    /// An error unless rows of recurrent states and lanes agree.
    pub(super) fn check_states(&self) -> Result<(), String> {
        self.states.check()
    }

    /// The rows of recurrent states.
    pub(super) fn states(&self) -> &StateRows {
        &self.states
    }

    /// The rows of recurrent states.
    pub(super) fn states_mut(&mut self) -> &mut StateRows {
        &mut self.states
    }

    /// Notes which rows of recurrent states the next batch reads and writes: at least as many as it has sequences.
    pub(super) fn set_pieces<'r>(&mut self, rows: impl Iterator<Item = &'r [usize; 2]>) {
        self.inputs.state_rows.clear();
        self.inputs.state_rows.extend(rows.map(|rows| rows.map(|row| row as i32)));
    }

    /// Forgets the outputs of the latest batch.
    pub(super) fn clear_outputs(&mut self) {
        self.output_rows.clear();
        self.loaded.clear();
        self.argmax.clear();
        self.top.count = 0;
    }

    /// Takes the results of all outputs of a step whose batches gave some each.
    pub(super) fn set_outputs(&mut self, logits: Vec<f32>, hidden: Vec<f32>, outputs: usize) {
        self.clear_outputs();
        (self.logits, self.hidden) = (logits, hidden);
        self.loaded = vec![true; outputs];
        self.output_rows.extend(0..outputs);
    }

    /// Starts the step after the one in flight before the host knows its results: each row goes on with the argmax of that row.
    /// `false`, and nothing has happened, where that is not possible.
    pub(super) fn follow(&mut self, tokens: &[StepToken], sequences: &[StepSequence<'_>]) -> Result<bool> {
        let Some(step) = self.in_flight.as_ref().filter(|step| step.read.is_none()) else { return Ok(false) };
        let (shape, outputs) = (step.shape, tokens.iter().filter(|token| token.output).count());
        let table = (sequences.len(), longest(sequences));
        let is_next = self.shape(tokens.len(), [outputs, 0], table, Wanted::Argmax) == shape
            && shape.rows == shape.tokens
            && outputs == tokens.len();
        if !is_next || self.ahead.is_some() || !self.session.plan().is_some_and(Plan::is_asynchronous) {
            return Ok(false);
        }
        let followed = self.start_ahead(tokens, sequences, shape);
        if followed.is_err() {
            self.discard();
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

    /// Waits for the results of the step in flight. A step that follows it is in flight then.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.in_flight.is_none() {
            return Ok(());
        }
        let finished = self.read_results();
        self.in_flight = self.ahead.take();
        if finished.is_err() {
            self.in_flight = None;
            // A device may report a failure once more when it is waited for: the next step begins without it.
            let _ = self.session.wait();
        }
        finished
    }

    /// Forgets steps in flight, and waits for them: whatever failed in them does not show in the next one.
    pub(super) fn discard(&mut self) {
        let ahead = self.ahead.take();
        if self.in_flight.take().or(ahead).is_some() {
            let _ = self.session.wait();
        }
    }

    /// Sends the results of the latest step on their way to the host, before something else uses their memory.
    fn secure_results(&mut self) -> Result<()> {
        if let Some(step) = self.ahead.as_mut().or(self.in_flight.as_mut())
            && step.read.is_none()
        {
            let outputs: &[&str] =
                if step.shape.argmax { &["argmax", "sum"] } else { &["top", "top_logits", "sum"] };
            step.read = Some(self.session.read_async(outputs)?);
        }
        Ok(())
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

    pub(super) fn run_batch(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        let outputs = || tokens.iter().filter(|token| token.output);
        let table = (sequences.len(), longest(sequences));
        let counts = [false, true].map(|hidden| outputs().filter(|token| token.hidden == hidden).count());
        let shape = self.shape(tokens.len(), counts, table, wanted);
        self.output_rows = self.fill(tokens, sequences, &shape);
        let all = outputs().zip(&self.output_rows).filter(|(token, _)| token.logits);
        let logits: Vec<usize> = all.map(|(_, row)| *row).collect();
        let computed = self.compute(shape, logits);
        if computed.is_err() {
            // A device may report a failure once more when it is waited for: the next step begins without it.
            let _ = self.session.wait();
        }
        computed
    }

    fn compute(&mut self, shape: GraphShape, logits: Vec<usize>) -> Result<()> {
        self.prepare(shape, &mut |_| {})?;
        self.set_inputs(&shape, false)?;
        self.session.start()?;
        if shape.rows == 0 {
            return Ok(self.session.wait()?);
        }
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

    /// Fills the graph's inputs, and returns the row of each output. Rows without a token see nothing, and write to slots that
    /// nobody reads.
    fn fill(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        shape: &GraphShape,
    ) -> Vec<usize> {
        let hyper = self.model.hyperparameters();
        let window = hyper.window_span();
        let inputs = &mut self.inputs;
        for list in [
            &mut inputs.tokens,
            &mut inputs.positions,
            &mut inputs.slots,
            &mut inputs.spans,
            &mut inputs.window_spans,
            &mut inputs.pages,
            &mut inputs.window_slots,
            &mut inputs.window_pages,
            &mut inputs.rows,
        ] {
            list.clear();
        }
        let (mut output_rows, mut unused) = (Vec::new(), 0);
        inputs.rows.resize(shape.rows, 0);
        let (mut outputs, mut hidden_outputs) = (0, shape.logit_rows.min(shape.rows));
        for row in 0..shape.tokens.max(tokens.len()) {
            let token = tokens.get(row).copied();
            if let Some(token) = token.filter(|token| token.output) {
                let next = if token.hidden { &mut hidden_outputs } else { &mut outputs };
                if let Some(into) = inputs.rows.get_mut(*next) {
                    *into = row as i32;
                }
                output_rows.push(if shape.selects_rows() { *next } else { row });
                *next += 1;
            }
            let used = token.and_then(|token| Some((token, sequences.get(token.sequence)?)));
            let Some((StepToken { token, position, sequence, .. }, StepSequence { pages, window_pages, .. })) =
                used
            else {
                inputs.tokens.push(0);
                inputs.positions.push(0);
                inputs.slots.push((unused % (SCRAP_PAGES * PAGE_SLOTS)) as i32);
                inputs.window_slots.push((unused % (SCRAP_PAGES * PAGE_SLOTS)) as i32);
                inputs.spans.extend([0; 3]);
                inputs.window_spans.extend([0; 3]);
                unused += 1;
                continue;
            };
            let page = pages.get(position / PAGE_SLOTS).copied().unwrap_or(0) as usize;
            let end = position as i32 + 1;
            let first = window.map_or(0, |window| window.first(position));
            inputs.tokens.push(token as i32);
            inputs.positions.push(position as i32);
            inputs.slots.push((page * PAGE_SLOTS + position % PAGE_SLOTS) as i32);
            let page = window_pages.and_then(|own| own.get(position / PAGE_SLOTS)).unwrap_or(0) as usize;
            inputs.window_slots.push((page * PAGE_SLOTS + position % PAGE_SLOTS) as i32);
            inputs.spans.extend([0, end, sequence as i32]);
            inputs.window_spans.extend([first as i32, end, sequence as i32]);
        }
        let table = shape.page_table.unwrap_or(PageTable { rows: 0, pages: 0 });
        for row in 0..table.rows {
            let pages = sequences.get(row).map_or(&[][..], |sequence| sequence.pages);
            inputs.pages.extend(pages.iter().map(|page| *page as i32));
            inputs.pages.resize((row + 1) * table.pages, 0);
            let own = sequences.get(row).and_then(|sequence| sequence.window_pages);
            let (first, pages) = own.map_or((0, &[][..]), WindowPages::parts);
            // Nobody looks at those before the window.
            inputs.window_pages.resize(row * table.pages + first.min(table.pages), 0);
            inputs.window_pages.extend(pages.iter().map(|page| *page as i32));
            inputs.window_pages.resize((row + 1) * table.pages, 0);
        }
        output_rows
    }

    /// Sets the graph's inputs; with `chained`, its tokens are the results of the step before.
    fn set_inputs(&mut self, shape: &GraphShape, chained: bool) -> Result<()> {
        let StepInputs {
            tokens,
            positions,
            slots,
            spans,
            window_slots,
            window_spans,
            pages,
            window_pages,
            rows,
            state_rows,
            pieces,
        } = &mut self.inputs;
        let hyper = self.model.hyperparameters();
        let (full, windows) = (hyper.has_full_attention(), hyper.window().is_some());
        let apart = shape.window_cache.is_some();
        for (name, values, has) in [
            ("tokens", tokens, !chained),
            ("positions", positions, true),
            ("slots", slots, full || windows && !apart),
            ("spans", spans, full),
            ("window_slots", window_slots, windows && apart),
            ("window_spans", window_spans, windows),
            ("pages", pages, full || windows && !apart),
            ("window_pages", window_pages, windows && apart),
            ("rows", rows, shape.selects_rows()),
        ] {
            if has {
                self.session.set(name, values.as_slice())?;
            }
        }
        if let Some(recurrent) = &hyper.recurrent {
            for (input, (name, _)) in recurrent.piece_inputs(0, 0).enumerate() {
                pieces.clear();
                for [from, to] in state_rows.iter().take(shape.sequences) {
                    let of_sequence = recurrent.piece_inputs(*from, *to).nth(input);
                    pieces.extend(of_sequence.into_iter().flat_map(|(_, pieces)| pieces));
                }
                self.session.set(name, pieces.as_slice())?;
            }
        }
        Ok(())
    }

    /// Reads the results of the step in flight; logits that are not finite show in the sum.
    fn read_results(&mut self) -> Result<()> {
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
            let checked = |(token, sum): (&[u8; 4], &[u8; 4])| {
                let (token, sum) = (i32::from_ne_bytes(*token), f32::from_ne_bytes(*sum));
                match u32::try_from(token) {
                    Ok(token) if sum.is_finite() => Ok(token),
                    _ => Err(LogitsError::NotFinite { token: token.max(0) as u32, logit: sum }),
                }
            };
            self.argmax.extend(results.iter().zip(sums).map(checked));
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
        for wanted in logits.chunk_by(|one, next| one + 1 == *next) {
            if let Some(first) = wanted.first() {
                self.load_rows(*first, wanted.len())?;
            }
        }
        Ok(())
    }

    /// Reads the logits of some rows of the latest step.
    fn load_rows(&mut self, first: usize, count: usize) -> Result<()> {
        let vocabulary = self.model.hyperparameters().vocabulary;
        resize(&mut self.logits, self.loaded.len(), vocabulary)?;
        if let Some(into) = self.logits.get_mut(first * vocabulary..(first + count) * vocabulary) {
            self.session.read_at("logits", first * vocabulary, into)?;
        }
        self.loaded.iter_mut().skip(first).take(count).for_each(|loaded| *loaded = true);
        Ok(())
    }

    /// The hidden state of output `output`.
    pub(super) fn hidden(&self, output: usize) -> &[f32] {
        let row = self.output_rows.get(output).copied().unwrap_or(usize::MAX);
        row_of(&self.hidden, self.model.hyperparameters().width, row)
    }

    /// The logits after output `output`; empty if only the argmax was computed.
    pub(super) fn logits(&mut self, output: usize) -> Result<&[f32]> {
        let row = self.output_rows.get(output).copied().unwrap_or(usize::MAX);
        match self.loaded.get(row) {
            Some(true) => {}
            Some(false) => self.load_rows(row, 1)?,
            None => return Ok(&[]),
        }
        Ok(row_of(&self.logits, self.model.hyperparameters().vocabulary, row))
    }

    /// The largest logits after output `output`, if a device found them.
    pub(super) fn top_logits(&self, output: usize) -> Option<TopLogits<'_>> {
        let TopRows { count, tokens, logits, sums } = &self.top;
        let row = self.output_rows.get(output).copied().filter(|_| *count > 0)?;
        sums.get(row).filter(|sum| sum.is_finite())?;
        let own = row * count..(row + 1) * count;
        let vocabulary = self.model.hyperparameters().vocabulary;
        Some(TopLogits { tokens: tokens.get(own.clone())?, logits: logits.get(own)?, vocabulary })
    }

    /// The most probable token after output `output`.
    pub(super) fn argmax(&mut self, output: usize) -> Result<u32> {
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

/// The most pages that a sequence of a step has.
fn longest(sequences: &[StepSequence<'_>]) -> usize {
    sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(1)
}

/// The sizes of steps with parts of prompts: powers of two, and three quarters of them.
pub(super) fn coarse_bucket(count: usize) -> usize {
    let power = count.next_power_of_two();
    match power / 4 * 3 {
        most if power >= 8 && count > 0 && count <= most => most,
        _ if count == 0 => 0,
        _ => power,
    }
}

/// Steps come in these sizes, so that few plans serve all of them: 1, 2, 4, multiples of 8 up to 256, and larger steps in an
/// eighth of their size.
pub(super) fn bucket(count: usize) -> usize {
    match count {
        0..=2 => count,
        3..=4 => 4,
        5..=256 => count.next_multiple_of(8),
        _ => count.next_multiple_of((count.next_power_of_two() / 8).min(SCRAP_PAGES * PAGE_SLOTS)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_padded_to_few_sizes_of_which_none_is_much_too_large() {
        for (bucket, sizes, waste) in
            [(bucket as fn(usize) -> usize, 64, 8), (coarse_bucket as fn(usize) -> usize, 24, 4)]
        {
            let mut seen = std::collections::BTreeSet::new();
            for count in 0..=2048 {
                let size = bucket(count);
                assert!(size >= count && bucket(size) == size, "{count}: {size}");
                assert!(size - count <= (count / 2).max(waste), "{count}: {size}");
                seen.insert(size);
            }
            assert!(seen.len() <= sizes, "{seen:?}");
        }
    }
}
