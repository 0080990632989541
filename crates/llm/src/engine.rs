//! Runs a model's graphs over its cache, for one or several sequences at once.

mod choice;

use std::time::Instant;

use quadriga_graph::DType;
use quadriga_runtime::{Detail, Key, Plan, Progress, Scheduler, Session, Trace};

use crate::models::GraphShape;
use crate::{Error, Model, Result};

/// How much an engine has room for.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// The most tokens of one sequence; 0 means what the model was trained with, at most 4096.
    pub context: usize,
    /// How many sequences there are.
    pub sequences: usize,
    /// The most tokens that are computed at once: longer prompts go in several batches.
    pub batch: usize,
    /// The type of the cache: F16, F32 or Q8_0.
    pub cache: DType,
    /// Whether the last layer's results are kept, for [`Engine::hidden`].
    pub hidden: bool,
    /// Whether only the most probable token is wanted after each row, for [`Engine::choice`]: a device then chooses it,
    /// and its logits are not brought here. Where the host has them at hand the engine turns this off, and gives
    /// logits.
    pub greedy: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            context: 0,
            sequences: 1,
            batch: 512,
            cache: DType::F16,
            hidden: false,
            greedy: false,
        }
    }
}

/// The context that a file's own is cut to, unless more is asked for: a cache takes memory for all of it.
const DEFAULT_CONTEXT: usize = 4096;

/// The least number of cells that a graph looks at.
const LEAST_WINDOW: usize = 512;

/// One token to be computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchToken {
    /// The sequence that it is appended to.
    pub sequence: usize,
    /// The token.
    pub token: u32,
    /// Whether the logits after it are wanted.
    pub wanted: bool,
}

/// A model with its cache, ready to compute.
pub struct Engine {
    model: Model,
    session: Session,
    options: EngineOptions,
    /// Tokens in the cache, of each sequence.
    lengths: Vec<usize>,
    logits: Vec<f32>,
    hidden: Vec<f32>,
    inputs: Inputs,
    /// The lengths before what was appended last.
    before: Vec<usize>,
    /// The shape of the latest run.
    shape: Option<GraphShape>,
    /// The most probable tokens, or why there is none, of the rows that were wanted; of the latest run's rows, `unread`
    /// are still on their way.
    choices: Vec<std::result::Result<u32, String>>,
    unread: usize,
    /// The latest batch, if it was one token with its results wanted.
    last: Option<BatchToken>,
    /// The token behind it, if it is being computed already.
    ahead: Option<BatchToken>,
    /// Choices as they come; kept to be filled again.
    bytes: Vec<u8>,
    watcher: Option<(Detail, Watcher)>,
}

/// Told of every batch that was computed.
pub type Watcher = Box<dyn FnMut(&Batch<'_>) + Send>;

/// A batch that was computed, and how long everything took.
pub struct Batch<'a> {
    /// The plan that ran.
    pub plan: &'a Plan,
    /// How long everything in it took.
    pub trace: &'a Trace,
    /// When it began.
    pub started: Instant,
    /// Its tokens.
    pub entries: &'a [BatchToken],
    /// Tokens in the cache of the first one's sequence before the batch.
    pub position: usize,
    /// How much of what attention could look at it saw, 0 to 1: a plan serves many lengths of the cache.
    pub visible: f64,
}

/// What a batch hands to the session; kept to be filled again.
#[derive(Default)]
struct Inputs {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
    spans: Vec<i32>,
    rows: Vec<i32>,
}

/// What a batch reaches.
struct Filled {
    /// One past the last cell of the cache that it sees.
    furthest: usize,
    /// Cells that its tokens see, all together.
    seen: usize,
    /// Tokens in the cache of the first one's sequence before it.
    position: usize,
}

impl EngineOptions {
    /// These options with what they leave open filled in from the model, or what is wrong with them.
    pub fn resolve(mut self, model: &Model) -> Result<EngineOptions> {
        let wrong =
            |name, value: usize, wanted| Err(Error::Option { name, value: value.to_string(), wanted });
        let trained = model.hyperparameters().context;
        if self.context == 0 {
            self.context = trained.min(DEFAULT_CONTEXT);
        }
        if self.batch == 0 {
            return wrong("the batch size", 0, "at least 1");
        }
        if self.sequences == 0 {
            return wrong("the number of sequences", 0, "at least 1");
        }
        if self.context.checked_mul(self.sequences).is_none_or(|cells| i32::try_from(cells).is_err()) {
            return wrong("the context", self.context, "such that all sequences' cells can be numbered");
        }
        // A head's row of the cache is whole blocks.
        let wide = [model.hyperparameters().key_length, model.hyperparameters().value_length];
        match self.cache {
            DType::F16 | DType::F32 => {}
            DType::Q8_0 if wide.iter().all(|w| w.is_multiple_of(32)) => {}
            DType::Q8_0 => {
                let [keys, values] = wide;
                return Err(Error::CacheBlocks { keys, values });
            }
            other => {
                let value = other.to_string();
                return Err(Error::Option { name: "the cache type", value, wanted: "f16, f32 or q8_0" });
            }
        }
        self.batch = self.batch.min(self.context * self.sequences);
        Ok(self)
    }

    /// The shape of the graph for a batch; the options must be resolved.
    pub fn shape(&self, tokens: usize, rows: usize, window: usize) -> GraphShape {
        let cells = self.context * self.sequences;
        let window = window.max(LEAST_WINDOW).next_power_of_two().min(cells);
        let choice = self.greedy && rows > 0;
        GraphShape { tokens, rows, window, cells, cache: self.cache, hidden: self.hidden, choice }
    }
}

impl Engine {
    /// Plans the model for the scheduler's backends, loads the weights there and makes the cache.
    pub fn new(
        model: Model,
        scheduler: &Scheduler,
        options: EngineOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Engine> {
        let options = options.resolve(&model)?.on(scheduler);
        let session = Session::new(scheduler)?;
        let lengths = vec![0; options.sequences];
        let mut engine = Engine {
            model,
            session,
            options,
            lengths,
            logits: Vec::new(),
            hidden: Vec::new(),
            inputs: Inputs::default(),
            before: Vec::new(),
            shape: None,
            choices: Vec::new(),
            unread: 0,
            last: None,
            ahead: None,
            bytes: Vec::new(),
            watcher: None,
        };
        // The graph of one token uses every weight; larger batches find them loaded.
        engine.prepare(engine.options.shape(1, 1, 1), progress)?;
        if engine.options.greedy && engine.session.plan().is_none_or(choice::has_logits_at_hand) {
            engine.options.greedy = false;
            engine.prepare(engine.options.shape(1, 1, 1), progress)?;
        }
        Ok(engine)
    }

    /// What planning the largest batch over a full cache gives, before anything is loaded.
    pub fn forecast(model: &Model, scheduler: &Scheduler, options: EngineOptions) -> Result<Plan> {
        let options = options.resolve(model)?.on(scheduler);
        let shape = options.shape(options.batch, 1, options.context * options.sequences);
        Ok(scheduler.plan(model.graph(shape)?)?)
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
    pub fn session(&mut self) -> &mut Session {
        (self.last, self.ahead) = (None, None);
        &mut self.session
    }

    /// Takes the times of every batch from now on, and tells of them; `None` ends it. Watched batches are computed one
    /// after the other and cost a little more; others cost nothing.
    pub fn watch(&mut self, watcher: Option<(Detail, Watcher)>) {
        self.ahead = None;
        self.watcher = watcher;
    }

    /// Tokens in a sequence's cache.
    pub fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Whether no sequence has any tokens.
    pub fn is_empty(&self) -> bool {
        self.lengths.iter().all(|len| *len == 0)
    }

    /// Forgets a sequence's tokens from `len` on.
    pub fn truncate(&mut self, sequence: usize, len: usize) {
        (self.last, self.ahead) = (None, None);
        for lengths in [&mut self.lengths, &mut self.before] {
            if let Some(length) = lengths.get_mut(sequence) {
                *length = (*length).min(len);
            }
        }
    }

    /// Appends tokens to sequences and computes them, in batches. Afterwards [`Engine::logits`], or with
    /// [`EngineOptions::greedy`] [`Engine::choice`] alone, has a row for each entry that was wanted, in their order.
    /// Choices are waited for when they are asked for, or by [`Engine::wait`].
    ///
    /// On an error, which may show only when it is waited for, the sequences are as they were before the call.
    pub fn extend(&mut self, entries: &[BatchToken]) -> Result<()> {
        if self.is_under_way(entries) {
            return Ok(());
        }
        self.before.clone_from(&self.lengths);
        let result = self.try_extend(entries);
        if result.is_err() {
            self.lengths.clone_from(&self.before);
        }
        result
    }

    /// Appends tokens to sequence 0 and computes them; the logits after the last one are wanted.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let last = tokens.len().saturating_sub(1);
        let entries: Vec<BatchToken> = tokens
            .iter()
            .enumerate()
            .map(|(i, token)| BatchToken { sequence: 0, token: *token, wanted: i == last })
            .collect();
        self.extend(&entries)
    }

    /// Logits over the vocabulary: row `row` of those that were wanted. Empty where only choices are.
    pub fn logits(&self, row: usize) -> &[f32] {
        row_of(&self.logits, self.model.hyperparameters().vocabulary, row)
    }

    /// The last layer's result: row `row` of those that were wanted. Empty unless the options ask for it.
    pub fn hidden(&self, row: usize) -> &[f32] {
        row_of(&self.hidden, self.model.hyperparameters().width, row)
    }

    fn try_extend(&mut self, entries: &[BatchToken]) -> Result<()> {
        self.check(entries)?;
        self.forget_choices();
        let wanted = entries.iter().filter(|e| e.wanted).count();
        let vocabulary = if self.options.greedy { 0 } else { self.model.hyperparameters().vocabulary };
        let width = if self.options.hidden { self.model.hyperparameters().width } else { 0 };
        self.logits.resize(wanted * vocabulary, 0.0);
        self.hidden.resize(wanted * width, 0.0);
        let mut done = 0;
        for batch in entries.chunks(self.options.batch) {
            self.settle(false)?;
            let rows = self.run(batch)?;
            if self.options.greedy {
                self.unread = rows;
                self.last = batch.first().filter(|entry| batch.len() == 1 && entry.wanted).copied();
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
        Ok(())
    }

    /// An error unless every token exists and fits its sequence.
    fn check(&self, entries: &[BatchToken]) -> Result<()> {
        let vocabulary = self.model.hyperparameters().vocabulary;
        let mut added = vec![0usize; self.lengths.len()];
        for entry in entries {
            if entry.token as usize >= vocabulary {
                return Err(Error::Token { token: entry.token, count: vocabulary });
            }
            let count = self.lengths.len();
            let slot =
                added.get_mut(entry.sequence).ok_or(Error::Sequence { sequence: entry.sequence, count })?;
            *slot += 1;
        }
        for (wanted, used) in added.iter().zip(&self.lengths) {
            if wanted + used > self.options.context {
                return Err(Error::ContextFull {
                    wanted: *wanted,
                    used: *used,
                    context: self.options.context,
                });
            }
        }
        Ok(())
    }

    fn prepare(&mut self, shape: GraphShape, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let key = Key([shape.tokens as u64, shape.rows as u64, shape.window as u64, u64::from(shape.choice)]);
        let model = &self.model;
        Ok(self.session.prepare_with(key, || model.graph(shape), progress)?)
    }

    /// Appends a batch to its sequences, and puts together what the graph needs to know of it.
    fn fill(&mut self, batch: &[BatchToken]) -> Filled {
        let (context, window) = (self.options.context, self.model.hyperparameters().sliding_window);
        let inputs = &mut self.inputs;
        for list in [
            &mut inputs.tokens,
            &mut inputs.positions,
            &mut inputs.slots,
            &mut inputs.spans,
            &mut inputs.rows,
        ] {
            list.clear();
        }
        let position =
            batch.first().map_or(0, |entry| self.lengths.get(entry.sequence).copied().unwrap_or(0));
        let mut filled = Filled { furthest: 0, seen: 0, position };
        for (row, entry) in batch.iter().enumerate() {
            let Some(length) = self.lengths.get_mut(entry.sequence) else { continue };
            let position = *length;
            *length += 1;
            let first = entry.sequence * context;
            let visible = window.map_or(0, |window| (position + 1).saturating_sub(window));
            filled.furthest = filled.furthest.max(first + position + 1);
            filled.seen += position + 1 - visible;
            inputs.tokens.push(entry.token as i32);
            inputs.positions.push(position as i32);
            inputs.slots.push((first + position) as i32);
            inputs.spans.extend([(first + visible) as i32, (first + position + 1) as i32]);
            if entry.wanted {
                inputs.rows.push(row as i32);
            }
        }
        filled
    }

    /// Computes one batch and returns how many rows of results it has.
    fn run(&mut self, batch: &[BatchToken]) -> Result<usize> {
        let Filled { furthest, seen, position } = self.fill(batch);
        let rows = self.inputs.rows.len();
        let shape = self.options.shape(batch.len(), rows, furthest);
        self.prepare(shape, &mut |_| {})?;
        self.shape = Some(shape);
        let inputs = &self.inputs;
        for (name, values) in [
            ("tokens", &inputs.tokens),
            ("positions", &inputs.positions),
            ("slots", &inputs.slots),
            ("spans", &inputs.spans),
        ] {
            self.session.set(name, values.as_slice())?;
        }
        if rows > 0 && rows < batch.len() {
            self.session.set("rows", inputs.rows.as_slice())?;
        }
        match &mut self.watcher {
            None => {
                self.session.start()?;
                // Reading results waits for them.
                if rows == 0 {
                    self.session.wait()?;
                }
            }
            Some((detail, watcher)) => {
                let started = Instant::now();
                let trace = self.session.trace(*detail)?;
                let visible = seen as f64 / (batch.len() * shape.window).max(1) as f64;
                if let Some(plan) = self.session.plan() {
                    watcher(&Batch { plan, trace: &trace, started, entries: batch, position, visible });
                }
            }
        }
        Ok(rows)
    }
}

fn row_of(all: &[f32], width: usize, row: usize) -> &[f32] {
    let start = row.saturating_mul(width);
    all.get(start..start.saturating_add(width)).unwrap_or(&[])
}
