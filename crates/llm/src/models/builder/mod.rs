//! Building blocks of all architectures. This file has the model as a whole: inputs, embedding, layers, logits. The parts
//! of a layer are in files of their own.

mod attention;
mod delta_net;
mod encoder;
mod experts;
mod feed_forward;
mod latent;
mod latent_weights;
mod neurons;
mod recorder;
mod recurrent;
mod rope;
mod short_convolution;
mod state_space;
mod streams;
mod weights;

use std::cell::OnceCell;

use quadriga_gguf::File;
use quadriga_graph::{DType, GraphBuilder, Value};

pub(super) use self::attention::KeyValues;
pub(super) use self::delta_net::DeltaLayout;
pub(super) use self::encoder::TOKEN_TYPE_COUNT;
pub(crate) use self::encoder::TOKEN_TYPES;
pub(super) use self::neurons::FeedForward;
pub(crate) use self::neurons::{active_output, missed_output, predicted_output};
pub(super) use self::recorder::Recorder;
pub use self::recorder::TensorSpec;
use self::recurrent::RecurrentInputs;
pub(super) use self::recurrent::is_recurrent_state;
pub(super) use self::streams::first_stream;
use self::weights::FileWeights;
pub(crate) use self::weights::SLOTS_SUFFIX;
use super::GraphShape;
use crate::Result;
use crate::adapter::Adapter;
use crate::hyperparameters::{Hyperparameters, LayerShape, NormKind};
use crate::ranks::{Message, RankShare, StageResult};

/// The input with the slot of each expert.
pub(crate) const EXPERT_SLOTS: &str = "expert_slots";

/// The input with the number of each expert that is in no slot.
pub(crate) const EXPERTS_ON_HOST: &str = "experts_on_host";

/// The same, for a device that streams them.
pub(crate) const EXPERTS_NOT_IN_SLOTS: &str = "experts_not_in_slots";

/// The constant with the number of each expert.
pub(crate) const EXPERT_NUMBERS: &str = "expert_numbers";

/// The input with the neuron of each slot.
pub(crate) const NEURON_SLOTS: &str = "neuron_slots";

/// The input that has 1 for each neuron in no slot, and 0 for the others.
pub(crate) const NEURONS_ON_HOST: &str = "neurons_on_host";

/// The constant that has 1 for each neuron.
pub(crate) const ALL_NEURONS: &str = "all_neurons";

/// A model graph under construction: the graph builder, the file's weights and the inputs that every layer reads.
pub(crate) struct ModelBuilder<'g> {
    g: &'g GraphBuilder,
    weights: FileWeights<'g>,
    hyper: &'g Hyperparameters,
    shape: GraphShape,
    positions: Value<'g>,
    tokens: OnceCell<Value<'g>>,
    /// Absent in encoders, which have no KV cache, and where all layers have other slots.
    slots: OnceCell<Value<'g>>,
    /// The slots, or the tokens of an encoder, that each token attends to in layers without a window. Absent where all
    /// have one.
    spans: Option<Value<'g>>,
    /// The slots of layers with a window in their own KV cache. Absent where they use the others' slots.
    window_slots: Option<Value<'g>>,
    /// The slots that each token attends to in layers with a window. Absent where none has one.
    window_spans: Option<Value<'g>>,
    /// The pages of each sequence. Absent where sequences have slots of their own.
    pages: Option<Value<'g>>,
    /// The pages of the parts of prompts whose latent attention is expanded, and the slots of these that their tokens attend to.
    expanded: Option<(Value<'g>, Value<'g>)>,
    /// The pages of layers with a window in their own KV cache. Absent where they use the others' pages.
    window_pages: Option<Value<'g>>,
    /// The pieces of recurrent states that are read and written. Absent where no layer has any.
    recurrent: Option<RecurrentInputs<'g>>,
    /// The factor of each token's queries. Absent where they have none.
    query_factors: OnceCell<Value<'g>>,
    /// Where experts are. Absent where no device has slots for some.
    tables: OnceCell<[Value<'g>; 3]>,
    device_tables: OnceCell<[Value<'g>; 2]>,
    /// Where neurons are. Absent where no device has rows of some.
    neuron_tables: OnceCell<[Value<'g>; 3]>,
    /// Absent when all tokens are outputs, or none.
    rows: Option<Value<'g>>,
    frequency_factors: Option<Value<'g>>,
    embedding: OnceCell<Value<'g>>,
}

/// One layer of a model graph under construction.
pub(crate) struct LayerBuilder<'p, 'g> {
    model: &'p ModelBuilder<'g>,
    index: usize,
    shape: &'g LayerShape,
}

impl<'g> ModelBuilder<'g> {
    pub(super) fn new(
        g: &'g GraphBuilder,
        file: &'g File,
        hyper: &'g Hyperparameters,
        adapters: &'g [Adapter],
        ranks: Option<&'g RankShare>,
        shape: GraphShape,
    ) -> Result<ModelBuilder<'g>> {
        ModelBuilder::with(g, FileWeights::new(g, file, None, adapters, ranks), hyper, shape)
    }

    /// An error if an adapter has matrices that nothing in the graph has used.
    pub(super) fn check_adapters(&self) -> Result<()> {
        self.weights.check_adapters()
    }

    /// The tensors of the file that nothing in the graph has asked for.
    pub(super) fn unknown_tensors(&self) -> Vec<&'g str> {
        self.weights.unknown()
    }

    /// A builder that records the tensors it needs, in place of finding them in the file.
    pub(super) fn recording(
        g: &'g GraphBuilder,
        file: &'g File,
        hyper: &'g Hyperparameters,
        shape: GraphShape,
        recorder: &'g Recorder<'g>,
    ) -> Result<ModelBuilder<'g>> {
        ModelBuilder::with(g, FileWeights::new(g, file, Some(recorder), &[], None), hyper, shape)
    }

    fn with(
        g: &'g GraphBuilder,
        weights: FileWeights<'g>,
        hyper: &'g Hyperparameters,
        shape: GraphShape,
    ) -> Result<ModelBuilder<'g>> {
        let n = shape.tokens;
        let layers = weights.ranks().map_or(0..hyper.layers.len(), RankShare::layers);
        let caches = hyper.caches_of(layers);
        let spans =
            |name: &str| g.input(name, DType::I32, [n, if shape.page_table.is_some() { 3 } else { 2 }]);
        let page_table = |name: &str, has: bool| {
            let table = shape.page_table.filter(|_| has);
            table.map(|table| g.input(name, DType::I32, [table.rows, table.pages]))
        };
        Ok(ModelBuilder {
            g,
            hyper,
            shape,
            positions: g.input("positions", DType::I32, [n]),
            tokens: OnceCell::new(),
            slots: OnceCell::new(),
            spans: (hyper.encoder || caches.full).then(|| spans("spans")),
            window_slots: (caches.windows && shape.window_cache.is_some())
                .then(|| g.input("window_slots", DType::I32, [n])),
            window_spans: caches.windows.then(|| spans("window_spans")),
            pages: page_table("pages", caches.full || caches.windows && shape.window_cache.is_none()),
            expanded: shape.expanded.filter(|_| caches.full).map(|parts| {
                let pages = g.input("expanded_pages", DType::I32, [parts.pages]);
                (pages, g.input("expanded_spans", DType::I32, [parts.tokens, 2]))
            }),
            window_pages: page_table("window_pages", caches.windows && shape.window_cache.is_some()),
            recurrent: hyper
                .recurrent
                .as_ref()
                .filter(|_| caches.recurrent)
                .map(|of_layers| RecurrentInputs::new(g, of_layers, &shape)),
            query_factors: OnceCell::new(),
            tables: OnceCell::new(),
            neuron_tables: OnceCell::new(),
            device_tables: OnceCell::new(),
            rows: (!hyper.encoder && shape.selects_rows()).then(|| g.input("rows", DType::I32, [shape.rows])),
            frequency_factors: rope::frequency_factors(&weights, hyper, shape.context)?,
            embedding: OnceCell::new(),
            weights,
        })
    }

    /// The hyperparameters.
    pub(super) fn hyper(&self) -> &'g Hyperparameters {
        self.hyper
    }

    /// The KV-cache slot that each token is written to.
    fn slots(&self) -> Value<'g> {
        *self.slots.get_or_init(|| self.g.input("slots", DType::I32, [self.shape.tokens]))
    }

    /// The slots of a layer for experts that a device computes.
    fn expert_slots(&self, layer: usize) -> usize {
        let resident = &self.shape.resident_experts;
        let has_slots = |(index, of_layer): &(usize, &LayerShape)| {
            of_layer.experts.is_some() && !resident.contains(*index)
        };
        let with_slots = || self.hyper.layers.iter().enumerate().filter(has_slots);
        let of_layer = with_slots().find(|(index, _)| *index == layer);
        let Some(experts) = of_layer.and_then(|(_, layer)| layer.experts) else { return 0 };
        let layers = with_slots().count();
        let before = with_slots().take_while(|(index, _)| *index < layer).count();
        let first = |layer: usize| layer * self.shape.expert_slots / layers.max(1);
        (first(before + 1) - first(before)).min(experts.count)
    }

    /// The slot of each expert `[layers, experts]`, or −1, and the number of each that is in no slot, both for a device to look up.
    fn expert_tables_of_device(&self, experts: usize) -> [Value<'g>; 2] {
        *self.device_tables.get_or_init(|| {
            let dims = [self.hyper.layers.len(), experts];
            [EXPERT_SLOTS, EXPERTS_NOT_IN_SLOTS].map(|name| self.g.input(name, DType::I32, dims))
        })
    }

    /// The slot of each expert `[layers, experts]`, or −1; the number of each that is in no slot; and the number of each.
    fn expert_tables(&self, experts: usize) -> (Value<'g>, Value<'g>, Value<'g>) {
        let [slots, host, numbers] = *self.tables.get_or_init(|| {
            let dims = [self.hyper.layers.len(), experts];
            let numbers: Vec<u8> = (0..experts as i32).flat_map(i32::to_le_bytes).collect();
            [
                self.g.input(EXPERT_SLOTS, DType::I32, dims),
                self.g.input(EXPERTS_ON_HOST, DType::I32, dims),
                self.g.constant(EXPERT_NUMBERS, DType::I32, [experts], numbers),
            ]
        });
        (slots, host, numbers)
    }

    /// The slots of a layer for rows of neurons that a device computes.
    fn neuron_slots(&self, layer: usize) -> usize {
        let (layers, all) = (self.hyper.layers.len().max(1), self.shape.neurons.slots);
        let most = self.hyper.layers.get(layer).map_or(0, |layer| layer.feed_forward);
        let first = |layer: usize| (layer as u128 * all as u128 / layers as u128) as usize;
        (first(layer + 1) - first(layer)).min(most)
    }

    /// The neuron of each slot `[layers, slots]`, or −1; 1 for each neuron in no slot `[layers, neurons]`, else 0; and 1 for
    /// each neuron.
    fn neuron_tables(&self, neurons: usize) -> [Value<'g>; 3] {
        *self.neuron_tables.get_or_init(|| {
            let layers = self.hyper.layers.len();
            let slots = (0..layers).map(|layer| self.neuron_slots(layer)).max().unwrap_or(0);
            let ones: Vec<u8> = (0..neurons).flat_map(|_| 1.0f32.to_le_bytes()).collect();
            [
                self.g.input(NEURON_SLOTS, DType::I32, [layers, slots]),
                self.g.input(NEURONS_ON_HOST, DType::F32, [layers, neurons]),
                self.g.constant(ALL_NEURONS, DType::F32, [neurons], ones),
            ]
        })
    }

    /// The embedded tokens `[n, width]`.
    pub(super) fn embed(&self) -> Result<Value<'g>> {
        let (tokens, ranks) = (self.tokens(), self.weights.ranks());
        if let Some(Message { ranks, peer, tag }) = ranks.and_then(RankShare::receive_activations) {
            let shape = [self.shape.tokens, self.hyper.width];
            return Ok(tokens.receive(ranks, (peer, tag), DType::F32, shape));
        }
        let embedding = self.embedding()?;
        let rows = match ranks.and_then(RankShare::embedding) {
            Some((local, own, ranks)) => {
                embedding.get_rows(tokens.custom(&local, &[])).custom(&own, &[tokens]).all_reduce(ranks)
            }
            None => embedding.get_rows(tokens),
        };
        let dims = [self.vocabulary(), self.hyper.width];
        let added = self.weights.low_rank_rows("token_embd.weight", dims, tokens)?;
        let rows = added.into_iter().fold(rows, |rows, added| rows.add(added));
        Ok(scaled(rows, self.hyper.embedding_scale))
    }

    /// The matrix of the token embedding, or this rank's rows of it.
    fn embedding(&self) -> Result<Value<'g>> {
        if let Some(embedding) = self.embedding.get() {
            return Ok(*embedding);
        }
        let embedding = self.weights.get("token_embd.weight", &[self.vocabulary(), self.hyper.width])?;
        Ok(*self.embedding.get_or_init(|| embedding))
    }

    /// The tokens whose rows of the embedding and the output matrix the graph has.
    fn vocabulary(&self) -> usize {
        self.weights.ranks().map_or(self.hyper.vocabulary, RankShare::vocabulary)
    }

    /// The tokens `[n]`.
    fn tokens(&self) -> Value<'g> {
        *self.tokens.get_or_init(|| self.g.input("tokens", DType::I32, [self.shape.tokens]))
    }

    /// The layers, first to last, or those of this rank.
    pub(super) fn layers(&self) -> impl Iterator<Item = LayerBuilder<'_, 'g>> {
        let layers = self.weights.ranks().map_or(0..self.hyper.layers.len(), RankShare::layers);
        let all = self.hyper.layers.iter().enumerate().filter(move |(index, _)| layers.contains(index));
        all.map(|(index, shape)| LayerBuilder { model: self, index, shape })
    }

    /// The model's kind of norm without weights.
    fn plain_norm(&self, x: Value<'g>) -> Value<'g> {
        match self.hyper.norm {
            NormKind::Rms => x.rms_norm(self.hyper.norm_epsilon),
            NormKind::Layer => x.norm(self.hyper.norm_epsilon),
        }
    }

    /// The model's kind of norm over the rows of `x`, with its weight and, if the file has one, its bias.
    fn norm(&self, name: &str, x: Value<'g>) -> Result<Value<'g>> {
        let len = x.shape().cols();
        let normed = self.plain_norm(x).mul(self.weights.vector(&format!("{name}.weight"), len)?);
        Ok(match self.weights.find_vector(&format!("{name}.bias"), len)? {
            Some(bias) => normed.add(bias),
            None => normed,
        })
    }

    /// The product with a matrix, times the number that the file may have beside it: NVFP4 has scales of little range.
    fn product(&self, name: &str, weight: Value<'g>, x: Value<'g>) -> Result<Value<'g>> {
        let y = weight.mul_mat(x);
        let y = match self.weights.find_vector(&format!("{name}.scale"), 1)? {
            Some(scale) => y.mul(scale),
            None => y,
        };
        let [rows, columns] = [weight.shape().rows(), weight.shape().cols()];
        let added = self.weights.low_rank(&format!("{name}.weight"), [rows, columns])?;
        let y = added.iter().fold(y, |y, added| y.add(added.product(x)));
        // Where ranks have columns of the matrix, each has a part of the sum.
        Ok(match self.weights.ranks().and_then(|ranks| ranks.after_product(name)) {
            Some(ranks) => y.all_reduce(ranks),
            None => y,
        })
    }

    /// `x · wᵀ + bias`, the bias where the file has one.
    fn linear(&self, name: &str, out: usize, x: Value<'g>) -> Result<Value<'g>> {
        let weight = self.weights.get(&format!("{name}.weight"), &[out, x.shape().cols()])?;
        let y = self.product(name, weight, x)?;
        Ok(match self.weights.find_vector(&format!("{name}.bias"), out)? {
            Some(bias) => y.add(bias),
            None => y,
        })
    }

    /// Declares the outputs. Models without an output matrix compute the logits with the token embedding.
    pub(super) fn finish(&self, x: Value<'g>) -> Result<()> {
        match self.weights.ranks().and_then(RankShare::send_activations) {
            Some(message) => self.pass_on(x, message),
            None => self.finish_normed(self.norm("output_norm", x)?),
        }
    }

    /// The same for files that have the last norm under another name than `output_norm`, by which placement knows it.
    pub(super) fn finish_with_norm(&self, name: &str, x: Value<'g>) -> Result<()> {
        if let Some(message) = self.weights.ranks().and_then(RankShare::send_activations) {
            return self.pass_on(x, message);
        }
        let weight =
            self.weights.renamed_vector(&format!("{name}.weight"), "output_norm.weight", self.hyper.width)?;
        self.finish_normed(self.plain_norm(x).mul(weight))
    }

    /// Sends the activations to the next stage of a pipeline.
    fn pass_on(&self, x: Value<'g>, message: Message) -> Result<()> {
        self.g.output("sent", send(x, message, &self.rows_input()).named("sent"));
        Ok(())
    }

    /// Whether the activations come from an earlier stage of a pipeline, which has embedded the tokens.
    fn is_later_stage(&self) -> bool {
        self.weights.ranks().is_some_and(|ranks| ranks.receive_activations().is_some())
    }

    /// The input with the output rows, where the graph has one: kept in graphs of ranks that do not select rows.
    fn rows_input(&self) -> Vec<Value<'g>> {
        self.rows.into_iter().collect()
    }

    /// The same for rows that are normed already.
    fn finish_normed(&self, hidden: Value<'g>) -> Result<()> {
        let h = self.hyper;
        // Results that go to the first rank are sent one after the other: each waits for the one before.
        let mut sent: Vec<Value<'g>> = Vec::new();
        if self.shape.hidden {
            match self.weights.ranks().and_then(|ranks| ranks.send_result(StageResult::Hidden)) {
                Some(message) => sent.push(send(hidden, message, &[])),
                None => self.g.output("hidden", hidden.named("hidden")),
            }
        }
        if !self.shape.logits {
            self.declare_sent(&sent);
            return Ok(());
        }
        let hidden = match self.shape.logit_rows {
            few if few < self.shape.rows => hidden.slice(0, 0, few),
            _ => hidden,
        };
        let (rows, ranks) = (self.vocabulary(), self.weights.ranks());
        let head = match self.weights.find("output.weight", &[rows, h.width])? {
            Some(head) => head,
            None => self.embedding()?,
        };
        let mut logits = self.product("output", head, hidden)?;
        if let Some(bias) = self.weights.find_vector("output.bias", rows)? {
            logits = logits.add(bias);
        }
        logits = scaled(logits, h.logit_scale);
        if let Some(cap) = h.logit_soft_cap {
            logits = logits.scale(1.0 / cap).tanh().scale(cap);
        }
        if let Some((ranks, columns)) = ranks.and_then(RankShare::gather_logits) {
            logits = logits.all_gather(ranks, columns);
        }
        let result = |result: StageResult| ranks.and_then(|ranks| ranks.send_result(result));
        match (result(StageResult::Argmax), result(StageResult::Sums), result(StageResult::Logits)) {
            (Some(argmax), Some(sums), _) if self.shape.argmax => {
                sent.push(send(logits.argmax(), argmax, &sent));
                sent.push(send(logits.sum_rows(), sums, &sent));
            }
            (_, _, Some(message)) => sent.push(send(logits, message, &sent)),
            _ => self.declare_logits(logits),
        }
        self.declare_sent(&sent);
        Ok(())
    }

    /// Declares what was sent last as an output, if anything was: it waits for all that was sent before.
    fn declare_sent(&self, sent: &[Value<'g>]) {
        if let Some(last) = sent.last() {
            self.g.output("sent", last.named("sent"));
        }
    }

    /// Declares the logits as outputs, and what is computed of them.
    fn declare_logits(&self, logits: Value<'g>) {
        let h = self.hyper;
        let logits = logits.named("logits");
        self.g.output("logits", logits);
        if self.shape.argmax {
            self.g.output("argmax", logits.argmax().named("argmax"));
        }
        if self.shape.top > 0 {
            let top = logits.top_k(self.shape.top.min(h.vocabulary)).named("top");
            let column = logits.reshape([self.shape.rows, h.vocabulary, 1]);
            self.g.output("top", top);
            self.g.output("top_logits", column.get_rows(top).named("top_logits"));
        }
        if self.shape.argmax || self.shape.top > 0 {
            self.g.output("sum", logits.sum_rows().named("sum"));
        }
    }
}

/// Sends a tensor to another rank, after these.
fn send<'g>(value: Value<'g>, Message { ranks, peer, tag }: Message, after: &[Value<'g>]) -> Value<'g> {
    value.send(ranks, peer, tag, after)
}

impl<'g> LayerBuilder<'_, 'g> {
    /// The layer's shape.
    pub(super) fn shape(&self) -> &'g LayerShape {
        self.shape
    }

    /// The width of the residual stream.
    pub(super) fn width(&self) -> usize {
        self.model.hyper.width
    }

    /// The name of one of the layer's tensors.
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.index)
    }

    /// A norm over the rows of `x`: of the residual stream, or of each head of `[n, heads, d]`.
    pub(super) fn norm(&self, part: &str, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.model.g.scope(&self.name(part));
        self.model.norm(&self.name(part), x)
    }

    /// A norm over the rows of heads `[n, heads, d]` with weights for each head.
    pub(super) fn norm_each_head(&self, part: &str, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.model.g.scope(&self.name(part));
        let dims = x.shape();
        let dims = dims.dims().get(1..).unwrap_or_default();
        let weight = self.model.weights.elements(&self.name(&format!("{part}.weight")), dims)?;
        Ok(self.model.plain_norm(x).mul(weight))
    }

    /// Whether the file has a norm.
    pub(super) fn has_norm(&self, part: &str) -> bool {
        self.model.weights.has(&self.name(&format!("{part}.weight")))
    }

    /// A norm that only some files have; without it, `x` itself.
    pub(super) fn find_norm(&self, part: &str, x: Value<'g>) -> Result<Value<'g>> {
        match self.has_norm(part) {
            true => self.norm(part, x),
            false => Ok(x),
        }
    }

    /// `x · wᵀ + bias` with one of the layer's weights.
    pub(super) fn linear(&self, part: &str, out: usize, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.model.g.scope(&self.name(part));
        self.model.linear(&self.name(part), out, x)
    }

    /// Adds a branch to the residual stream, times the model's factor.
    pub(super) fn residual(&self, x: Value<'g>, branch: Value<'g>) -> Value<'g> {
        x.add(scaled(branch, self.model.hyper.residual_scale))
    }

    /// In the last layer, the rows of `x` that are outputs; all rows otherwise. The result of [`LayerBuilder::attention`]
    /// has the same rows.
    pub(super) fn output_rows(&self, x: Value<'g>) -> Value<'g> {
        match self.model.rows {
            Some(rows) if self.is_last() => x.get_rows(rows),
            _ => x,
        }
    }

    /// Whether nothing after this layer's caches is needed: it is the last one that has some, and no token is an output.
    pub(super) fn ends_here(&self) -> bool {
        self.index + 1 == self.model.hyper.remembering_layers() && self.model.shape.rows == 0
    }

    fn is_last(&self) -> bool {
        self.index + 1 == self.model.hyper.layers.len()
    }
}

/// `x` times a factor; `x` itself if that is 1.
pub(super) fn scaled(x: Value<'_>, factor: f32) -> Value<'_> {
    if factor == 1.0 { x } else { x.scale(factor) }
}
