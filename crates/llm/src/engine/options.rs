//! The capacity of an engine, and the sizes of its caches that follow from it.

use std::sync::Arc;

use quadriga_graph::{DType, PAGE_SLOTS};
use quadriga_runtime::Scheduler;

use super::recurrent::RecurrentRows;
use crate::adapter::Adapter;
use crate::hyperparameters::{CacheRows, DEFAULT_CONTEXT, Hyperparameters, LayerShape};
use crate::models::{
    ExpandedParts, GraphShape, LayerSet, NeuronMode, Neurons, PageTable, PromptParts, WindowCache,
};
use crate::{Error, Model, NeuronCounts, Result};

/// The capacity of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// The context size: the largest number of tokens of one sequence; 0 means what the model was trained with, at most
    /// 4096.
    pub context: usize,
    /// The number of sequences.
    pub sequences: usize,
    /// Pages of a KV cache that all sequences share, [`PAGE_SLOTS`](quadriga_graph::PAGE_SLOTS) tokens each, for a
    /// [`Batcher`](crate::serving::Batcher). 0: each sequence has slots for `context` tokens of its own.
    pub pages: usize,
    /// The batch size: the largest number of tokens that are computed at once. Longer prompts are split into batches.
    pub batch: usize,
    /// The output rows of a batch that forecasts, and with them automatic placements, leave room for, at most the batch size: 1 to
    /// generate text, more if all logits or hidden states of a prompt are read.
    pub output_rows: usize,
    /// The element type of the keys in the KV cache: F32, F16, BF16, Q8_0, Q5_1 or Q4_0.
    pub cache_keys: DType,
    /// The element type of the values in the KV cache, of the same.
    pub cache_values: DType,
    /// KV-cache slots of a sequence in layers with a sliding window. 0 means as many as the window and a batch need, or
    /// all of the context where that saves nothing; the context means all. With [pages](EngineOptions::pages), as many as the window
    /// needs; a batch has pages of its own.
    pub window_slots: usize,
    /// The number of [checkpoints](crate::Engine::checkpoint) of each sequence: states of earlier tokens, so that it can be
    /// truncated without computing it from its beginning. Models that can return to any earlier token have none. Where so
    /// many would take more memory than sliding windows save, there are two or one. With [pages](EngineOptions::pages) all
    /// sequences share them ([`EngineOptions::kept_states`], [`EngineOptions::kept_windows`]), and none is a sequence's own.
    pub checkpoints: usize,
    /// Slots for experts on devices, in all layers together: an expert in a slot is computed there, while the host computes
    /// the others, and experts move into slots as they are used. 0: experts are computed where their tensors are.
    pub expert_slots: usize,
    /// The layers without slots: accelerators have the tensors of their experts.
    pub resident_experts: LayerSet,
    /// The most bytes of experts that are uploaded to a device in one step; an expert of more bytes goes alone. They have so much
    /// memory there. 0: [`DEFAULT_UPLOAD_BYTES`](quadriga_runtime::DEFAULT_UPLOAD_BYTES).
    pub upload_bytes: u64,
    /// How the neurons of feed-forward networks are computed: whether rows of inactive ones are skipped.
    pub neurons: Neurons,
    /// How often each neuron is active: the most active ones are in [`Neurons::slots`] from the beginning. Without counts, neurons
    /// move there as they are used.
    pub neuron_counts: Option<Arc<NeuronCounts>>,
    /// The most tokens of a batch whose neurons are [observed](Neurons::observe): the activations of a long one take much memory.
    pub observed_tokens: usize,
    /// Whether the hidden states after the last layer are outputs too, for [`Engine::hidden`](crate::Engine::hidden).
    pub hidden: bool,
    /// Whether the logits are computed; if not, only the hidden states are outputs.
    pub logits: bool,
    /// Whether only the most probable token of each output row is needed, for [`Engine::argmax`](crate::Engine::argmax):
    /// the device that has the logits then computes the argmax, and the logits are not copied to the host. The engine
    /// clears this where the logits are in host memory anyway.
    pub greedy: bool,
}

/// The KV cache of layers with a sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowSavings {
    /// The number of these layers.
    pub layers: usize,
    /// Bytes of their KV cache, with checkpoints.
    pub own: u64,
    /// Bytes that all of the context would take in them.
    pub full: u64,
    /// The part of `own` that checkpoints take.
    pub checkpoints: u64,
}

/// The states of recurrent layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecurrentStates {
    /// The number of these layers.
    pub layers: usize,
    /// Bytes of their states, with checkpoints.
    pub bytes: u64,
    /// The part of `bytes` that checkpoints take.
    pub checkpoints: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            context: 0,
            sequences: 1,
            pages: 0,
            batch: 512,
            output_rows: 1,
            cache_keys: DType::F16,
            cache_values: DType::F16,
            window_slots: 0,
            checkpoints: 4,
            expert_slots: 0,
            resident_experts: LayerSet::EMPTY,
            upload_bytes: 0,
            neurons: Neurons::default(),
            neuron_counts: None,
            observed_tokens: usize::MAX,
            hidden: false,
            logits: true,
            greedy: false,
        }
    }
}

/// Pages before those of sequences: rows that only fill up a batch write there, each to a slot of its own.
pub(crate) const SCRAP_PAGES: usize = 8;

/// The most parts of prompts in a batch, in models with recurrent layers.
pub(crate) const MAX_PARTS: usize = 8;

/// The most tokens that recurrent layers compute for parts of prompts, as a multiple of those that there are: parts have the length
/// of the longest there.
pub(crate) const WASTED_PARTS: usize = 2;

/// Rows of recurrent states that a sequence has in a KV cache of pages: the state before a step, and after it.
pub(crate) const STATES_OF_SEQUENCE: usize = 2;

/// The largest logits of a row that a device finds for the host to sample from.
const TOP_LOGITS: usize = 128;

/// The largest number of checkpoints of a sequence.
const MAX_CHECKPOINTS: usize = 1024;

/// The largest batch whose experts the host looks up and observes: more tokens use nearly all experts, and those that are in no
/// slot are streamed.
pub(crate) const MAX_OBSERVED_TOKENS: usize = 8;

/// The longest batch by which is learned which neurons are active.
const MAX_LEARNED_TOKENS: usize = 8;

/// The smallest number of KV-cache slots that a graph attends over.
const MIN_VISIBLE_SLOTS: usize = 512;

/// The window layers' slots are a multiple of this, and at least as many more than the window: their rows are moved to the
/// front only every so many tokens.
const WINDOW_SLACK: usize = 64;

impl EngineOptions {
    /// These options with one element type for keys and values.
    pub fn cache(self, dtype: DType) -> EngineOptions {
        EngineOptions { cache_keys: dtype, cache_values: dtype, ..self }
    }

    /// These options for a KV cache without [pages](EngineOptions::pages). Slots of window layers that were chosen for pages are
    /// chosen anew.
    #[must_use]
    pub fn without_pages(self) -> EngineOptions {
        let window_slots = if self.window_slots == usize::MAX { usize::MAX } else { 0 };
        EngineOptions { pages: 0, window_slots, ..self }
    }

    /// Checks the options against a model, and fills in those that are left to it.
    pub fn resolve(mut self, model: &Model) -> Result<EngineOptions> {
        let hyper = model.hyperparameters();
        if self.context == 0 {
            self.context = hyper.context.min(DEFAULT_CONTEXT);
        }
        if self.batch == 0 {
            return wrong("the batch size", 0, "at least 1");
        }
        if self.sequences == 0 {
            return wrong("the number of sequences", 0, "at least 1");
        }
        if self.context.checked_mul(self.sequences).is_none_or(|slots| i32::try_from(slots).is_err()) {
            return wrong("the context", self.context, "small enough for 32-bit indices of KV-cache slots");
        }
        if self.pages > 0 {
            self.resolve_pages(hyper)?;
        }
        if self.checkpoints > MAX_CHECKPOINTS {
            return wrong("the number of checkpoints", self.checkpoints, "at most 1024");
        }
        if !self.logits && !self.hidden {
            let (name, value) = ("the output of logits", "off".to_owned());
            return Err(Error::Option { name, value, wanted: "on, unless hidden states are outputs" });
        }
        self.greedy &= self.logits;
        // Outputs that are read after each batch leave nothing to run ahead of.
        let all: usize = hyper.layers.iter().map(|layer| layer.feed_forward).sum();
        self.neurons.slots = self.neurons.slots.min(all);
        self.greedy &= !self.neurons_of(1).observe;
        self.check_cache_types(hyper)?;
        if self.neurons.mode == NeuronMode::Predicted && hyper.predictor_threshold.is_none() {
            let (name, value) = ("the neurons that are computed", "predicted".to_owned());
            let wanted = "exact or dense: the file has no predictors";
            return Err(Error::Option { name, value, wanted });
        }
        let with_slots = hyper.layers.iter().enumerate();
        let with_slots = with_slots.filter(|(layer, _)| !self.resident_experts.contains(*layer));
        let experts = with_slots.filter_map(|(_, layer)| layer.experts);
        self.expert_slots = self.expert_slots.min(experts.map(|experts| experts.count).sum());
        let changes_experts = |adapter: &Adapter| adapter.pairs().any(|(_, pair)| pair.experts().is_some());
        let changes_neurons =
            |adapter: &Adapter| adapter.pairs().any(|(name, _)| name.ends_with("ffn_up.weight"));
        if model.adapters().iter().any(changes_experts) {
            // Their matrices go by the numbers of experts, not by slots.
            self.expert_slots = 0;
        }
        if model.adapters().iter().any(changes_neurons) {
            // What they add has a row for each neuron, and none for a slot.
            self.neurons.slots = 0;
        }
        // An encoder computes a text as a whole, and several short ones at once.
        let most = self.context.saturating_mul(self.sequences);
        self.batch = if hyper.encoder { self.batch.max(self.context) } else { self.batch.min(most) };
        self.hidden |= !self.logits;
        self.greedy &= self.logits;
        self.output_rows = self.output_rows.clamp(1, self.batch);
        // The first rank reads logits, wherever they are computed; experts and neurons stay where they are, and are not counted.
        if model.ranks().is_some() {
            (self.greedy, self.expert_slots) = (false, 0);
            self.neurons = Neurons { slots: 0, observe: false, ..self.neurons };
        }
        self.resolve_windows(hyper)?;
        let rows = self.state_rows();
        let pieces = hyper.recurrent.as_ref().map_or(1, |shape| shape.max_pieces());
        if rows.checked_mul(pieces).is_none_or(|pieces| i32::try_from(pieces).is_err()) {
            return wrong(
                "the number of sequences",
                self.sequences,
                "smaller: their recurrent states are too many",
            );
        }
        Ok(self)
    }

    /// For a new engine: an error if there was one of these ranks, or if they compute graphs of different shapes, because memory or options
    /// differ, with different files, or parts that do not belong together.
    pub(crate) fn agree(&self, model: &Model) -> Result<()> {
        let Some(ranks) = model.ranks() else { return Ok(()) };
        ranks.claim()?;
        let EngineOptions { context, batch, sequences, output_rows, pages, cache_keys, cache_values, .. } =
            self;
        let EngineOptions { window_slots, checkpoints, .. } = self;
        let own = format!(
            "a context of {context}, {sequences} sequences, {pages} pages, {window_slots} slots of windows, {checkpoints} checkpoints, batches of {batch} with {output_rows} outputs, a KV cache of {cache_keys} and {cache_values}"
        );
        let reason = if !ranks.is_same_on_all(&model.quick_identity())? {
            "the model files differ: copy that of rank 0 to the machines of the others, or give all of them one path".to_owned()
        } else if !ranks.is_same_on_all(own.as_bytes())? {
            let mut first = own.into_bytes();
            ranks.communicator().broadcast_message(&mut first, 0)?;
            format!("the options differ: rank 0 has {}; name them", String::from_utf8_lossy(&first))
        } else if !ranks.is_same_on_all(ranks.layout().unwrap_or_default().as_bytes())? {
            "the ranks have divided the model in different ways: they need the same build of the program"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Error::Ranks { reason })
    }

    /// Checks the options of a KV cache in pages. Its layers keep every position, and nothing is truncated.
    fn resolve_pages(&mut self, hyper: &Hyperparameters) -> Result<()> {
        if hyper.encoder {
            self.pages = 0;
            return Ok(());
        }
        let slots = self.all_pages().and_then(|pages| pages.checked_mul(PAGE_SLOTS));
        if slots.is_none_or(|slots| i32::try_from(slots).is_err()) {
            return wrong(
                "the number of pages",
                self.pages,
                "small enough for 32-bit indices of KV-cache slots",
            );
        }
        self.context = self.context.min(self.pages * PAGE_SLOTS);
        self.resolve_window_pages(hyper);
        Ok(())
    }

    /// Chooses whether window layers have pages of their own: where that saves memory, if need be with fewer of them for prefixes.
    fn resolve_window_pages(&mut self, hyper: &Hyperparameters) {
        let forgets = hyper.recurrent.is_some();
        let Some(window) = hyper.window() else {
            self.window_slots = self.context;
            self.checkpoints = if forgets { self.checkpoints } else { 0 };
            return;
        };
        // The positions before the next token that its window has, wherever in a page they begin; and a page for what follows.
        let needed = (window - 1).div_ceil(PAGE_SLOTS).saturating_add(2).saturating_mul(PAGE_SLOTS);
        if self.window_slots == 0 {
            self.window_slots = needed;
        }
        let saves = |checkpoints: usize| {
            let kept = pages_before(window).saturating_mul(checkpoints);
            self.window_slots < self.context && self.running_window_pages().saturating_add(kept) < self.pages
        };
        let choices = [self.checkpoints, 2, 1, 0].into_iter().filter(|count| *count <= self.checkpoints);
        let saving = choices.into_iter().find(|count| saves(*count));
        self.window_slots = if saving.is_some() { self.window_slots.max(needed) } else { self.context };
        if !forgets {
            self.checkpoints = saving.unwrap_or(0);
        } else if saving.is_some_and(|count| count < self.checkpoints) {
            // The states have as many as were wanted.
            self.window_slots = self.context;
        }
    }

    /// Pages of window layers for running sequences: those of the windows, and those of the tokens of a step.
    fn running_window_pages(&self) -> usize {
        let windows = (self.window_slots / PAGE_SLOTS).saturating_mul(self.sequences);
        windows.saturating_add(self.batch.div_ceil(PAGE_SLOTS))
    }

    /// The pages of window layers, in a KV cache in pages where they have some of their own.
    pub(crate) fn window_pages(&self, hyper: &Hyperparameters) -> Option<usize> {
        let apart = self.pages > 0 && hyper.window().is_some() && self.window_slots < self.context;
        apart.then(|| self.running_window_pages().saturating_add(self.kept_window_pages(hyper)))
    }

    /// Of these, the pages for windows before the ends of prompts, which outlast the pages of answers.
    pub(crate) fn kept_window_pages(&self, hyper: &Hyperparameters) -> usize {
        hyper.window().map_or(0, pages_before).saturating_mul(self.kept_windows())
    }

    /// The number of earlier tokens that layers with a sliding window can return to, of all sequences together.
    pub fn kept_windows(&self) -> usize {
        match self.pages {
            0 => self.checkpoints.saturating_mul(self.sequences),
            // The pages of running sequences hold others where they suffice.
            _ => self.checkpoints,
        }
    }

    /// The number of earlier tokens that recurrent layers can return to, of all sequences together. With pages there is one for each
    /// sequence, and [`EngineOptions::checkpoints`] more.
    pub fn kept_states(&self) -> usize {
        match (self.pages, self.checkpoints) {
            (_, 0) => 0,
            (0, each) => each.saturating_mul(self.sequences),
            (_, more) => more.saturating_add(self.sequences),
        }
    }

    /// The pages of sequences, and those before them that rows without a token write to.
    fn all_pages(&self) -> Option<usize> {
        self.pages.checked_add(SCRAP_PAGES)
    }

    /// The shape of the graph for a step of `tokens` with `rows` outputs, whose page table has this shape. The options must be
    /// [resolved](EngineOptions::resolve) for the model, with pages.
    pub(crate) fn paged_shape(
        &self,
        model: &Model,
        tokens: usize,
        rows: usize,
        table: PageTable,
    ) -> GraphShape {
        let slots = self.cache_slots();
        let state_rows = self.state_rows();
        GraphShape {
            visible_slots: slots,
            cache_slots: slots,
            page_table: Some(table),
            window_cache: self.window_cache(model.hyperparameters()),
            state_rows,
            neurons: Neurons { slots: 0, observe: false, ..self.neurons },
            top: if self.logits && rows > 0 { TOP_LOGITS } else { 0 },
            ..self.slots_shape(model, tokens, rows, 1)
        }
    }

    /// Beside the largest batch, the shapes of steps of many sequences that may take more memory: their outputs are not the largest
    /// logits but all of them, their argmax, or hidden states.
    pub(super) fn other_largest_shapes(&self, model: &Model, largest: GraphShape) -> Vec<GraphShape> {
        let mut shapes: Vec<GraphShape> = self.shape_of_sequences(model).into_iter().collect();
        shapes.extend(self.shape_of_parts(model, largest));
        let expanded = self.shapes_of_expanded(model, largest);
        for largest in std::iter::once(largest).chain(expanded.iter().copied()) {
            if largest.page_table.is_none() || largest.rows == 0 {
                continue;
            }
            let whole = GraphShape { top: 0, ..largest };
            shapes.push(whole);
            if self.logits && model.hyperparameters().recurrent.is_none() {
                shapes.push(GraphShape { argmax: true, ..whole });
            }
        }
        shapes.extend(expanded);
        shapes
    }

    /// The shape of the graph for one token of every sequence, where that may take more memory than the largest batch: recurrent
    /// layers then have a copy of each state.
    pub(super) fn shape_of_sequences(&self, model: &Model) -> Option<GraphShape> {
        let recurrent = self.pages > 0 && model.hyperparameters().recurrent.is_some();
        let sequences = Some(self.sequences).filter(|sequences| recurrent && *sequences > 1)?;
        let table = PageTable { rows: sequences, pages: self.context.div_ceil(PAGE_SLOTS) };
        Some(GraphShape { sequences, ..self.paged_shape(model, sequences, sequences, table) })
    }

    /// The shape of the largest batch with parts of several prompts, in models with recurrent layers: those compute tokens for the
    /// parts that are shorter than the longest, too.
    fn shape_of_parts(&self, model: &Model, largest: GraphShape) -> Option<GraphShape> {
        let several = model.hyperparameters().recurrent.is_some() && self.sequences > 1;
        let batch = Some(largest.tokens).filter(|batch| self.pages > 0 && several && *batch > 1)?;
        let count = self.sequences.min(MAX_PARTS);
        let length = (WASTED_PARTS * batch).div_ceil(count);
        let parts = PromptParts { singles: self.sequences - count, count, length };
        Some(GraphShape { sequences: self.sequences, parts: Some(parts), ..largest })
    }

    /// An error unless the layers' heads can be stored in the cache's types.
    fn check_cache_types(&self, hyper: &Hyperparameters) -> Result<()> {
        for (name, dtype) in
            [("the cache type of keys", self.cache_keys), ("the cache type of values", self.cache_values)]
        {
            if !dtype.is_cache_type() {
                let wanted = "f32, f16, bf16, q8_0, q5_1 or q4_0";
                return Err(Error::Option { name, value: dtype.to_string(), wanted });
            }
        }
        // A row of a head in the cache consists of whole blocks.
        for layer in hyper.layers.iter().filter(|layer| layer.attention) {
            let (keys, values) = (layer.key_length, layer.value_length);
            // The values of absorbed latent attention are a part of the rows of keys.
            let own_values = if hyper.has_latent_cache() { keys } else { values };
            let value_type = if hyper.has_latent_cache() { self.cache_keys } else { self.cache_values };
            for (dtype, length) in [(self.cache_keys, keys), (value_type, own_values)] {
                if !length.is_multiple_of(dtype.block_len()) {
                    return Err(Error::CacheBlocks { dtype, block: dtype.block_len(), keys, values });
                }
            }
        }
        Ok(())
    }

    /// Chooses the size of the window layers' cache, and whether checkpoints are needed.
    fn resolve_windows(&mut self, hyper: &Hyperparameters) -> Result<()> {
        let full = self.context;
        if self.pages > 0 {
            return Ok(());
        }
        let Some(window) = hyper.window() else {
            self.window_slots = full;
            self.checkpoints = if hyper.recurrent.is_some() { self.checkpoints } else { 0 };
            return Ok(());
        };
        let needed = window - 1 + self.batch;
        if self.window_slots == 0 {
            let slots =
                window.saturating_add(self.batch.max(WINDOW_SLACK)).checked_next_multiple_of(WINDOW_SLACK);
            let saves = |slots: usize, checkpoints: usize| {
                slots.saturating_add((window - 1).saturating_mul(checkpoints)) < full
            };
            // Fewer checkpoints, rather than a full cache.
            let choices = [self.checkpoints, 2, 1].into_iter().filter(|count| *count <= self.checkpoints);
            let saving = slots.and_then(|slots| {
                choices.into_iter().find(|count| saves(slots, *count)).map(|count| (slots, count))
            });
            self.window_slots = saving.map_or(full, |(slots, _)| slots);
            if let Some((_, checkpoints)) = saving.filter(|_| hyper.recurrent.is_none()) {
                self.checkpoints = checkpoints;
            }
        }
        self.window_slots = self.window_slots.min(full);
        if self.window_slots < needed.min(full) {
            let wanted = "0, or as many as the window and a batch together";
            return wrong("the number of window slots", self.window_slots, wanted);
        }
        if self.window_slots == full && hyper.recurrent.is_none() {
            self.checkpoints = 0;
        }
        let kept = (window - 1).checked_mul(self.checkpoints);
        let rows = kept.and_then(|kept| kept.checked_add(self.window_slots)?.checked_mul(self.sequences));
        if rows.is_none_or(|rows| i32::try_from(rows).is_err()) {
            return wrong("the number of checkpoints", self.checkpoints, "smaller");
        }
        Ok(())
    }

    /// The shape of the graph for a batch of `tokens` with `rows` outputs that attends to the first `visible_slots` of
    /// the KV cache at most. The options must be [resolved](EngineOptions::resolve) for the model.
    pub fn shape(&self, model: &Model, tokens: usize, rows: usize, visible_slots: usize) -> GraphShape {
        if self.pages == 0 {
            return self.slots_shape(model, tokens, rows, visible_slots);
        }
        let pages = self.context.div_ceil(PAGE_SLOTS);
        let shape =
            self.paged_shape(model, tokens, rows, PageTable { rows: self.sequences.min(tokens), pages });
        // A token that is generated, and a part of a prompt, at the end of the longest sequence: with the matrices of both forms.
        let parts = ExpandedParts { tokens: tokens.saturating_sub(1), pages };
        let expanded = self.expands(model, parts.tokens, pages * PAGE_SLOTS).then_some(parts);
        GraphShape { expanded, ..shape }
    }

    /// In models with latent attention, whether a part of a prompt of so many tokens that sees so many slots in pages attends to the
    /// expanded keys and values of all heads.
    pub(crate) fn expands(&self, model: &Model, tokens: usize, visible: usize) -> bool {
        let slots = self.context.next_multiple_of(PAGE_SLOTS);
        let Some(latent) = model.hyperparameters().latent.filter(|_| tokens > 1) else { return false };
        latent.heads_at_once(1, slots).is_some() && latent.expands(tokens, visible, slots)
    }

    /// Where steps may have parts of prompts whose latent attention is expanded, those that take most memory: a token is generated
    /// beside as many of prompts as a step has, whose pages are all those of the longest sequence, or the other way round. Both have
    /// the matrices of both forms.
    fn shapes_of_expanded(&self, model: &Model, largest: GraphShape) -> Vec<GraphShape> {
        let (batch, pages) = (largest.tokens, self.context.div_ceil(PAGE_SLOTS));
        if largest.page_table.is_none() || !self.expands(model, batch, pages * PAGE_SLOTS) {
            return Vec::new();
        }
        let shape = |parts: ExpandedParts| GraphShape { tokens: batch + 1, expanded: Some(parts), ..largest };
        [ExpandedParts { tokens: batch, pages }, ExpandedParts { tokens: 1, pages: 1 }].map(shape).into()
    }

    fn slots_shape(&self, model: &Model, tokens: usize, rows: usize, visible_slots: usize) -> GraphShape {
        let cache_slots = self.cache_slots();
        let visible_slots = visible_slots.max(MIN_VISIBLE_SLOTS).next_power_of_two().min(cache_slots);
        GraphShape {
            tokens,
            rows,
            context: self.context,
            visible_slots,
            cache_slots,
            page_table: None,
            expanded: None,
            window_cache: self.window_cache(model.hyperparameters()),
            state_rows: self.state_rows(),
            sequences: 1,
            parts: None,
            cache_keys: self.cache_keys,
            cache_values: self.cache_values,
            neurons: self.neurons_of(tokens),
            expert_slots: self.expert_slots,
            resident_experts: self.resident_experts,
            observe_experts: tokens <= MAX_OBSERVED_TOKENS,
            hidden: self.hidden || !self.logits,
            logits: self.logits,
            logit_rows: usize::MAX,
            argmax: self.logits && self.greedy && rows > 0,
            top: 0,
        }
    }

    /// How the neurons of a batch are computed.
    fn neurons_of(&self, tokens: usize) -> Neurons {
        // What is not known is learned while tokens are generated.
        let learns = self.neurons.slots > 0 && self.neuron_counts.is_none() && tokens <= MAX_LEARNED_TOKENS;
        let observes = self.neurons.observe && tokens <= self.observed_tokens;
        Neurons { observe: observes || learns, ..self.neurons }
    }

    /// The window layers' own KV cache; `None` if they use the full one.
    pub(super) fn window_cache(&self, hyper: &Hyperparameters) -> Option<WindowCache> {
        let window = hyper.window().filter(|_| self.window_slots < self.context)?;
        if self.pages > 0 {
            let slots = self.window_pages(hyper)?.saturating_add(SCRAP_PAGES).saturating_mul(PAGE_SLOTS);
            return Some(WindowCache { slots, rows: slots });
        }
        let slots = self.window_slots * self.sequences;
        Some(WindowCache { slots, rows: slots + self.sequences * self.checkpoints * (window - 1) })
    }

    /// What the window layers' own KV cache takes, and what all of the context would take in those layers; `None` if they have
    /// none. The options must be resolved for the model.
    pub fn window_savings(&self, model: &Model) -> Option<WindowSavings> {
        let hyper = model.hyperparameters();
        let cache = self.window_cache(hyper)?;
        let own = |layer: &&LayerShape| layer.attention && layer.shares_cache_of.is_none();
        let windowed = hyper.layers.iter().filter(own).filter(|layer| layer.window.is_some());
        let bytes = |dtype: DType, width: usize| dtype.row_bytes(width).unwrap_or(0) as u64;
        let row: u64 = windowed
            .clone()
            .map(|layer| {
                bytes(self.cache_keys, layer.key_width()) + bytes(self.cache_values, layer.value_width())
            })
            .sum();
        Some(WindowSavings {
            layers: windowed.count(),
            own: cache.rows as u64 * row,
            full: self.cache_slots() as u64 * row,
            checkpoints: match self.pages {
                0 => (cache.rows - cache.slots) as u64 * row,
                _ => (self.kept_window_pages(hyper) * PAGE_SLOTS) as u64 * row,
            },
        })
    }

    /// The slots of layers that keep the whole context.
    fn cache_slots(&self) -> usize {
        match self.pages {
            0 => self.context * self.sequences,
            _ => self.all_pages().unwrap_or(0) * PAGE_SLOTS,
        }
    }

    /// The rows of a model's caches with these options.
    ///
    /// # Errors
    /// The options do not fit the model.
    pub fn cache_rows(&self, model: &Model) -> Result<CacheRows> {
        let options = self.clone().resolve(model)?;
        let full = options.cache_slots();
        Ok(CacheRows {
            full,
            windows: options.window_cache(model.hyperparameters()).map_or(full, |cache| cache.rows),
            states: options.state_rows(),
            keys: options.cache_keys,
            values: options.cache_values,
        })
    }

    /// What the states of recurrent layers take; `None` if there are none. The options must be resolved for the model.
    pub fn recurrent_states(&self, model: &Model) -> Option<RecurrentStates> {
        let hyper = model.hyperparameters();
        let shape = hyper.recurrent.as_ref()?;
        let layers = hyper.layers.iter().filter(|layer| !layer.attention).count();
        let row = (layers * (shape.conv_state() + shape.linear_state()) * size_of::<f32>()) as u64;
        let rows = self.state_rows() as u64;
        let checkpoints = self.kept_states() as u64 * row;
        Some(RecurrentStates { layers, bytes: rows * row, checkpoints })
    }

    /// Rows of each recurrent state.
    fn state_rows(&self) -> usize {
        match self.pages {
            0 => RecurrentRows::count(self.sequences, self.checkpoints),
            _ => (1 + STATES_OF_SEQUENCE * self.sequences).saturating_add(self.kept_states()),
        }
    }

    /// These options for a scheduler's backends: where all of them use host memory, logits need no copy.
    pub(crate) fn on(mut self, scheduler: &Scheduler) -> EngineOptions {
        let has_device = scheduler.backends().iter().any(|backend| !backend.memory().host);
        self.greedy &= has_device;
        if !has_device {
            self.expert_slots = 0;
            self.neurons.slots = 0;
        }
        self
    }
}

/// The pages that hold the window of the first token of a page, but for that page itself.
fn pages_before(window: usize) -> usize {
    (window - 1).div_ceil(PAGE_SLOTS)
}

fn wrong<T>(name: &'static str, value: usize, wanted: &'static str) -> Result<T> {
    Err(Error::Option { name, value: value.to_string(), wanted })
}
