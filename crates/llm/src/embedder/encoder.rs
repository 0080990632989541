//! Runs an encoder on several texts at once: each token sees only the text that it belongs to.

use quadriga_runtime::{PlanKey, Progress, Scheduler, Session};

use crate::models::{GraphShape, TOKEN_TYPES};
use crate::{Model, Result};

/// Batches are padded to multiples of this many tokens, and those of up to four times as many to a quarter of it, so that
/// texts of many lengths share few plans.
const PADDING: usize = 64;

/// An encoder's session.
pub(super) struct EncoderRunner {
    session: Session,
    /// The most tokens of a batch.
    limit: usize,
    /// Whether the model has a classification head.
    has_head: bool,
    /// Whether it tells the tokens of a pair's texts apart by their types.
    has_types: bool,
}

impl EncoderRunner {
    /// Loads the weights.
    pub(super) fn new(
        model: &Model,
        scheduler: &Scheduler,
        limit: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<EncoderRunner> {
        model.file().check_mapped()?;
        let has_head = super::can_rank(model);
        let types =
            model.file().find_tensor(TOKEN_TYPES).and_then(|types| types.shape().dims().first().copied());
        let has_types = has_head && types.is_some_and(|types| types > 1);
        let mut runner = EncoderRunner { session: Session::new(scheduler)?, limit, has_head, has_types };
        runner.prepare(model, 1, 1, progress)?;
        Ok(runner)
    }

    /// The most tokens of a batch.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// The hidden states of all tokens of these texts, one after another.
    pub(super) fn hidden(&mut self, model: &Model, texts: &[&[u32]]) -> Result<Vec<f32>> {
        self.start(model, texts, None)?;
        let mut hidden: Vec<f32> = self.session.read("hidden")?;
        let tokens: usize = texts.iter().map(|text| text.len()).sum();
        hidden.truncate(tokens * model.hyperparameters().width);
        Ok(hidden)
    }

    /// The scores of the classification head for each text, or pair of texts: what follows the first separator is the second.
    pub(super) fn scores(&mut self, model: &Model, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let separator = model.tokenizer().ok().and_then(|tokenizer| tokenizer.sequence_end());
        let rows = self.start(model, texts, separator)?;
        let scores: Vec<f32> = self.session.read("rank")?;
        let each = (scores.len() / rows.max(1)).max(1);
        Ok(scores.chunks(each).take(texts.len()).map(<[f32]>::to_vec).collect())
    }

    /// Starts a batch, of pairs if there is a token that separates them. Returns the number of rows that the classification head
    /// computes.
    fn start(&mut self, model: &Model, texts: &[&[u32]], separator: Option<u32>) -> Result<usize> {
        model.file().check_mapped()?;
        let (mut tokens, mut positions) = (Vec::new(), Vec::new());
        let (mut spans, mut first, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for text in texts {
            let start = tokens.len() as i32;
            let end = start + text.len() as i32;
            first.push(start);
            tokens.extend(text.iter().map(|token| *token as i32));
            positions.extend(0..text.len() as i32);
            text.iter().for_each(|_| spans.extend([start, end]));
            types.extend(token_types(text, separator));
        }
        // Each token of the padding is a text of its own, whose results nobody reads.
        let count = padded(tokens.len()).min(self.limit).max(tokens.len());
        for padding in tokens.len() as i32..count as i32 {
            tokens.push(0);
            positions.push(0);
            spans.extend([padding, padding + 1]);
        }
        let rows = texts.len().next_power_of_two().min(count);
        first.resize(rows, 0);
        self.prepare(model, count, rows, &mut |_| {})?;
        self.session.set("tokens", tokens.as_slice())?;
        self.session.set("positions", positions.as_slice())?;
        self.session.set("spans", spans.as_slice())?;
        if self.has_head {
            self.session.set("rows", first.as_slice())?;
        }
        if self.has_types {
            types.resize(count, 0);
            self.session.set("token_types", types.as_slice())?;
        }
        self.session.start()?;
        Ok(rows)
    }

    /// Plans the graph for batches of so many tokens and texts.
    fn prepare(
        &mut self,
        model: &Model,
        tokens: usize,
        texts: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<()> {
        let rows = if self.has_head { texts } else { 1 };
        let shape = GraphShape { rows, ..GraphShape::new(tokens, model.hyperparameters().context) };
        let key = PlanKey::of(model.id(), [tokens as u64, rows as u64, 0, 0]);
        Ok(self.session.prepare_with(key, || model.graph(shape), progress)?)
    }
}

/// The type of each token: 0 up to the first separator, which ends the first text of a pair, and 1 after it.
fn token_types(text: &[u32], separator: Option<u32>) -> impl Iterator<Item = i32> {
    let first = text.iter().position(|token| Some(*token) == separator).map_or(text.len(), |end| end + 1);
    (0..text.len()).map(move |position| i32::from(position >= first))
}

/// The number of tokens that a batch is padded to.
fn padded(tokens: usize) -> usize {
    let multiple = if tokens <= 4 * PADDING { PADDING / 4 } else { PADDING };
    tokens.next_multiple_of(multiple)
}
