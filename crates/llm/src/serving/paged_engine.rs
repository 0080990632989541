//! Runs a model's graphs for many sequences at once, over a KV cache in pages.

use quadriga_graph::PAGE_SLOTS;
use quadriga_runtime::{PlanKey, Progress, Scheduler, Session};

use super::page_pool::PageId;
use crate::engine::{EngineOptions, SCRAP_PAGES, STATES_OF_SEQUENCE, resize, row_copies, row_of};
use crate::models::{GraphShape, PageTable};
use crate::sampling::find_argmax;
use crate::{Error, LogitsError, Model, Result};

/// The fewest pages of a row of a page table; more are a power of two.
const MIN_TABLE_PAGES: usize = 8;

/// The key of the graph that copies a page: no step is this large.
const COPY_KEY: PlanKey = PlanKey([u64::MAX; 4]);

/// A token of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepToken {
    pub(super) token: u32,
    /// Its position in its sequence.
    pub(super) position: usize,
    /// The number of its sequence in this step.
    pub(super) sequence: usize,
    /// Whether the logits after it are an output.
    pub(super) output: bool,
}

/// A sequence of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepSequence<'a> {
    /// Its pages: enough for all of its positions.
    pub(super) pages: &'a [PageId],
    /// Where its recurrent state is kept, in models that have one: a number below [`EngineOptions::sequences`].
    pub(super) lane: usize,
}

/// A model with a KV cache in pages.
pub(super) struct PagedEngine {
    model: Model,
    session: Session,
    options: EngineOptions,
    inputs: StepInputs,
    /// Whether a device has the logits, so that it can compute the argmax.
    argmax_on_device: bool,
    logits: Vec<f32>,
    argmax: Vec<Result<u32, LogitsError>>,
    /// The row of results of each output.
    output_rows: Vec<usize>,
    /// In models with recurrent layers, of each lane: which of its rows holds the state.
    states: Vec<usize>,
    recurrent: bool,
}

#[derive(Default)]
struct StepInputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    spans: Vec<i32>,
    window_spans: Vec<i32>,
    pages: Vec<i32>,
    rows: Vec<i32>,
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
            states: vec![0; options.sequences],
            inputs: StepInputs::default(),
            argmax_on_device: false,
            logits: Vec::new(),
            argmax: Vec::new(),
            output_rows: Vec::new(),
            recurrent,
            model,
            options,
        };
        engine.model.file().check_mapped()?;
        // The graph of one token uses every weight; larger steps find them loaded.
        engine.prepare(engine.shape(1, 1, 1, 1, false), progress)?;
        engine.argmax_on_device =
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
        let slots = self.options.paged_shape(&self.model, 1, 1, PageTable { rows: 1, pages: 1 }).cache_slots;
        let mut states = self.session.states();
        states.retain(|state| state.shape.dims().first() == Some(&slots));
        states.into_iter().map(|state| (state.name, state.bytes / slots.max(1) * PAGE_SLOTS)).collect()
    }

    /// Reads the keys and values of a page.
    pub(super) fn read_page(&mut self, page: PageId) -> Result<Vec<u8>> {
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
        let names: Vec<String> = self.page_parts().into_iter().map(|(name, _)| name).collect();
        let mut states = self.session.states();
        states.retain(|state| names.contains(&state.name));
        self.session.prepare_with(COPY_KEY, || row_copies(&states, PAGE_SLOTS), &mut |_| {})?;
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

    /// Forgets the recurrent state of a lane, for a new sequence.
    pub(super) fn reset_lane(&mut self, lane: usize) {
        if let Some(state) = self.states.get_mut(lane) {
            *state = 0;
        }
    }

    fn shape(&self, tokens: usize, rows: usize, sequences: usize, pages: usize, argmax: bool) -> GraphShape {
        // Beside parts of prompts, a few rows more or less cost little: steps come in fewer shapes.
        let bucket = if tokens > 2 * sequences { coarse_bucket } else { bucket };
        // Recurrent layers would take padding for tokens.
        let tokens = if self.recurrent { tokens } else { bucket(tokens).min(self.options.batch) };
        let most = self.options.context.div_ceil(PAGE_SLOTS);
        let pages = pages.max(MIN_TABLE_PAGES).next_power_of_two().min(most).max(1);
        let table = PageTable { rows: bucket(sequences).min(self.options.sequences).max(sequences), pages };
        let rows = bucket(rows).min(tokens);
        let shape = self.options.paged_shape(&self.model, tokens, rows, table);
        GraphShape { argmax: argmax && rows > 0, ..shape }
    }

    fn prepare(&mut self, shape: GraphShape, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let GraphShape { tokens, rows, page_table, argmax, .. } = shape;
        let table = page_table.map_or(0, |table| (table.rows as u64) << 32 | table.pages as u64);
        let key = PlanKey([tokens as u64, rows as u64, table, u64::from(argmax)]);
        let model = &self.model;
        Ok(self.session.prepare_with(key, || model.graph(shape), progress)?)
    }

    /// Computes a step: the tokens of each sequence are neighbours, in the order of their positions. With `argmax`, only
    /// [`PagedEngine::argmax`] is wanted of its outputs. After an error the step can be computed again: it only writes to slots
    /// of its own tokens.
    pub(super) fn run(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        argmax: bool,
    ) -> Result<()> {
        // The CPU computes with the mapped weights: noticed here, a truncated file is an error and not a signal.
        self.model.file().check_mapped()?;
        self.output_rows.clear();
        self.argmax.clear();
        let outputs = tokens.iter().filter(|token| token.output).count();
        if !self.recurrent {
            let vocabulary = self.model.hyperparameters().vocabulary;
            return self.run_batch(tokens, sequences, argmax && self.argmax_on_device, outputs, vocabulary);
        }
        // Recurrent layers compute one sequence at a time.
        let vocabulary = self.model.hyperparameters().vocabulary;
        let mut new_states = self.states.clone();
        let mut logits = Vec::new();
        for batch in tokens.chunk_by(|a, b| a.sequence == b.sequence) {
            let Some(sequence) = batch.first().and_then(|token| sequences.get(token.sequence)) else {
                continue;
            };
            let alone: Vec<StepToken> =
                batch.iter().map(|token| StepToken { sequence: 0, ..*token }).collect();
            let from = self.states.get(sequence.lane).copied().unwrap_or(0);
            // A lane has two rows, and writes the one that it does not read. Row 0 is the state of an empty sequence.
            let first = 1 + STATES_OF_SEQUENCE * sequence.lane;
            let to = if from == first { first + 1 } else { first };
            self.set_pieces_later(from, to);
            let count = batch.iter().filter(|token| token.output).count();
            let (rows, done) = (std::mem::take(&mut self.output_rows), logits.len() / vocabulary.max(1));
            self.run_batch(&alone, std::slice::from_ref(sequence), false, count, vocabulary)?;
            let own = std::mem::replace(&mut self.output_rows, rows);
            self.output_rows.extend(own.iter().enumerate().map(|(at, _)| done + at));
            for row in own {
                logits.extend_from_slice(row_of(&self.logits, vocabulary, row));
            }
            if let Some(state) = new_states.get_mut(sequence.lane) {
                *state = to;
            }
        }
        self.logits = logits;
        self.states = new_states;
        Ok(())
    }

    /// Notes which rows of recurrent states the next batch reads and writes.
    fn set_pieces_later(&mut self, from: usize, to: usize) {
        self.inputs.pieces.clear();
        self.inputs.pieces.extend([from as i32, to as i32]);
    }

    fn run_batch(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        argmax: bool,
        outputs: usize,
        vocabulary: usize,
    ) -> Result<()> {
        let longest = sequences.iter().map(|sequence| sequence.pages.len()).max().unwrap_or(1);
        let shape = self.shape(tokens.len(), outputs, sequences.len(), longest, argmax);
        self.fill(tokens, sequences, &shape);
        let computed = self.compute(shape, vocabulary);
        if computed.is_err() {
            // A device may report a failure once more when it is waited for: the next step begins without it.
            let _ = self.session.wait();
        }
        computed
    }

    fn compute(&mut self, shape: GraphShape, vocabulary: usize) -> Result<()> {
        self.prepare(shape, &mut |_| {})?;
        self.set_inputs(&shape)?;
        self.session.start()?;
        if shape.rows == 0 {
            return Ok(self.session.wait()?);
        }
        if shape.argmax {
            return self.read_argmax(shape.rows);
        }
        resize(&mut self.logits, shape.rows, vocabulary)?;
        Ok(self.session.read_into("logits", &mut self.logits)?)
    }

    /// Fills the graph's inputs. Rows without a token see nothing, and write to slots that nobody reads.
    fn fill(&mut self, tokens: &[StepToken], sequences: &[StepSequence<'_>], shape: &GraphShape) {
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
            &mut inputs.rows,
        ] {
            list.clear();
        }
        let mut outputs = 0;
        for (row, StepToken { token, position, sequence, output }) in tokens.iter().enumerate() {
            let pages = sequences.get(*sequence).map_or(&[][..], |sequence| sequence.pages);
            let page = pages.get(position / PAGE_SLOTS).copied().unwrap_or(0) as usize;
            let end = *position as i32 + 1;
            let first = window.map_or(0, |window| window.first(*position));
            inputs.tokens.push(*token as i32);
            inputs.positions.push(*position as i32);
            inputs.slots.push((page * PAGE_SLOTS + position % PAGE_SLOTS) as i32);
            inputs.spans.extend([0, end, *sequence as i32]);
            inputs.window_spans.extend([first as i32, end, *sequence as i32]);
            if *output {
                inputs.rows.push(row as i32);
                self.output_rows.push(if shape.rows == shape.tokens { row } else { outputs });
                outputs += 1;
            }
        }
        for unused in 0..shape.tokens.saturating_sub(tokens.len()) {
            inputs.tokens.push(0);
            inputs.positions.push(0);
            inputs.slots.push((unused % (SCRAP_PAGES * PAGE_SLOTS)) as i32);
            inputs.spans.extend([0; 3]);
            inputs.window_spans.extend([0; 3]);
        }
        inputs.rows.resize(shape.rows, 0);
        let table = shape.page_table.unwrap_or(PageTable { rows: 0, pages: 0 });
        for row in 0..table.rows {
            let pages = sequences.get(row).map_or(&[][..], |sequence| sequence.pages);
            inputs.pages.extend(pages.iter().map(|page| *page as i32));
            inputs.pages.resize((row + 1) * table.pages, 0);
        }
    }

    fn set_inputs(&mut self, shape: &GraphShape) -> Result<()> {
        let StepInputs { tokens, positions, slots, spans, window_spans, pages, rows, pieces } = &self.inputs;
        let hyper = self.model.hyperparameters();
        let (full, windows) = (hyper.has_full_attention(), hyper.window().is_some());
        for (name, values, has) in [
            ("tokens", tokens, true),
            ("positions", positions, true),
            ("slots", slots, full || windows),
            ("spans", spans, full),
            ("window_spans", window_spans, windows),
            ("pages", pages, full || windows),
            ("rows", rows, shape.rows > 0 && shape.rows < shape.tokens),
        ] {
            if has {
                self.session.set(name, values.as_slice())?;
            }
        }
        if let (Some(recurrent), [from, to]) = (&hyper.recurrent, pieces.as_slice()) {
            for (name, pieces) in recurrent.piece_inputs(*from, *to) {
                let pieces: Vec<i32> = pieces.collect();
                self.session.set(name, pieces.as_slice())?;
            }
        }
        Ok(())
    }

    /// Reads the argmax of each row; logits that are not finite show in the sum.
    fn read_argmax(&mut self, rows: usize) -> Result<()> {
        // Both are copied before either is waited for.
        let mut bytes = vec![0; 2 * rows * size_of::<i32>()];
        let read = self.session.read_async(&["argmax", "sum"])?;
        self.session.finish_read(read, &mut bytes)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        let (tokens, sums) = numbers.split_at(numbers.len() / 2);
        let checked = |(token, sum): (&[u8; 4], &[u8; 4])| {
            let (token, sum) = (i32::from_ne_bytes(*token), f32::from_ne_bytes(*sum));
            match u32::try_from(token) {
                Ok(token) if sum.is_finite() => Ok(token),
                _ => Err(LogitsError::NotFinite { token: token.max(0) as u32, logit: sum }),
            }
        };
        self.argmax.extend(tokens.iter().zip(sums).map(checked));
        Ok(())
    }

    /// The logits after output `output`; empty if only the argmax was computed.
    pub(super) fn logits(&self, output: usize) -> &[f32] {
        let row = self.output_rows.get(output).copied().unwrap_or(usize::MAX);
        if self.argmax.is_empty() {
            row_of(&self.logits, self.model.hyperparameters().vocabulary, row)
        } else {
            &[]
        }
    }

    /// The most probable token after output `output`.
    pub(super) fn argmax(&self, output: usize) -> Result<u32> {
        let row = self.output_rows.get(output).copied().ok_or(LogitsError::Empty)?;
        match self.argmax.get(row) {
            Some(token) => Ok((*token)?),
            None => Ok(find_argmax(self.logits(output))?),
        }
    }
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
