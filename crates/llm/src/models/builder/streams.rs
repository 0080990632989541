//! Parallel residual streams (AltUp), inputs of each layer, and the low-rank branch beside attention (LAuReL).
//!
//! Streams are `[n, count, width]`. A layer predicts all streams, computes the first of them, and corrects the predictions by
//! how far it was off. How streams mix depends on the token, by a router.

use quadriga_graph::{Gate, Value};

use super::neurons::activation_of;
use super::{LayerBuilder, ModelBuilder};
use crate::hyperparameters::ParallelStreams;
use crate::models::neurons::NeuronMode;
use crate::{Error, Result};

/// The smallest length of a vector that is made another's.
const SHORTEST: f32 = 1e-6;

/// The weights of a layer's router, which is used twice.
#[derive(Clone, Copy)]
pub(in crate::models) struct StreamRouter<'g> {
    norm: Value<'g>,
    matrix: Value<'g>,
    /// The factor that the file may have beside the matrix.
    scale: Option<Value<'g>>,
}

/// The first stream `[n, width]`, as a view.
pub(in crate::models) fn first_stream(streams: Value<'_>) -> Value<'_> {
    let [_, n, count, width] = streams.shape().dims4();
    let row = 4 * count * width;
    streams.view([n, width], [n * row, n * row, row, 4], 0)
}

/// The length of each row.
fn lengths(x: Value<'_>) -> Value<'_> {
    x.sqr().sum_rows().sqrt()
}

impl<'g> ModelBuilder<'g> {
    fn streams(&self) -> Result<ParallelStreams> {
        self.hyper.streams.ok_or_else(|| Error::Hyperparameter {
            key: format!("{}.altup.num_inputs", self.hyper.architecture),
            value: "missing".to_owned(),
            wanted: "at least 2".to_owned(),
        })
    }

    /// The streams of embedded tokens `[n, width]`: the tokens, and products with a matrix for each other stream, which are made as
    /// long.
    pub(in crate::models) fn split_streams(&self, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.g.scope("altup_proj");
        let (others, n, width) = (self.streams()?.count - 1, self.shape.tokens, self.hyper.width);
        let matrices = self.weights.get("altup_proj.weight", &[others, width, width])?;
        let products = matrices.mul_mat(x.reshape([1, n, width]).repeat([others, n, width]));
        let products = products.l2_norm(SHORTEST).mul(lengths(x));
        Ok(x.reshape([n, 1, width]).concat(1, &[products.permute([1, 0, 2]).cont()]))
    }

    /// The mean of the streams `[n, width]`, where all but the first are multiplied with a matrix each and made as long as
    /// the first.
    pub(in crate::models) fn join_streams(&self, streams: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.g.scope("altup_unembd_proj");
        let [_, n, count, width] = streams.shape().dims4();
        let first = first_stream(streams).cont();
        let matrices = self.weights.get("altup_unembd_proj.weight", &[count - 1, width, width])?;
        let products = matrices.mul_mat(streams.slice(1, 1, count - 1).permute([1, 0, 2]).cont());
        let products = products.l2_norm(SHORTEST).mul(lengths(first));
        let sum = (0..count - 1)
            .fold(first, |sum, stream| sum.add(products.slice(0, stream, 1).reshape([n, width])));
        Ok(sum.scale(1.0 / count as f32))
    }

    /// The vectors that layers have of each token besides `[n, layers, layer_input]`: an embedding, and a product with the
    /// embedded token.
    pub(in crate::models) fn layer_inputs(&self, x: Value<'g>) -> Result<Value<'g>> {
        let _scope = self.g.scope("per_layer_inputs");
        let (n, layers, len) = (self.shape.tokens, self.hyper.layers.len(), self.streams()?.layer_input);
        let dims = [self.hyper.vocabulary, layers * len];
        let embedded = self.weights.get("per_layer_token_embd.weight", &dims)?.get_rows(self.tokens());
        let embedded = embedded.reshape([n, layers, len]).scale((len as f32).sqrt());
        let product = self.linear("per_layer_model_proj", layers * len, x)?;
        let product = product.scale(1.0 / (self.hyper.width as f32).sqrt()).reshape([n, layers, len]);
        let normed = self.norm("per_layer_proj_norm", product)?;
        Ok(normed.add(embedded).scale(std::f32::consts::FRAC_1_SQRT_2))
    }
}

impl<'g> LayerBuilder<'_, 'g> {
    /// The layer's router.
    pub(in crate::models) fn stream_router(&self) -> Result<StreamRouter<'g>> {
        let (weights, width) = (&self.model.weights, self.width());
        let dims = [self.model.streams()?.count, width];
        Ok(StreamRouter {
            norm: weights.vector(&self.name("altup_router_norm.weight"), width)?,
            matrix: weights.get(&self.name("altup_router.weight"), &dims)?,
            scale: weights.find_vector(&self.name("altup_router.scale"), 1)?,
        })
    }

    /// How a token's streams mix `[n, count]`, by its first stream.
    fn modalities(&self, router: StreamRouter<'g>, x: Value<'g>) -> Value<'g> {
        let _scope = self.model.g.scope(&self.name("altup_router"));
        let normed = self.model.plain_norm(x).mul(router.norm).scale(1.0 / self.width() as f32);
        let logits = router.matrix.mul_mat(normed);
        router.scale.map_or(logits, |scale| logits.mul(scale)).tanh()
    }

    /// The streams after the layer, as far as they can be known before it: each is the old one plus a mixture of all.
    pub(in crate::models) fn predict_streams(
        &self,
        router: StreamRouter<'g>,
        streams: Value<'g>,
    ) -> Result<Value<'g>> {
        let [_, n, count, _] = streams.shape().dims4();
        let modalities = self.modalities(router, first_stream(streams));
        let mixture = self.linear("altup_predict_coef", count * count, modalities)?;
        let _scope = self.model.g.scope(&self.name("altup"));
        let mixture = mixture.reshape([n, count, count]).transpose().cont();
        Ok(streams.out_prod(mixture).add(streams))
    }

    /// The streams after the layer: the predictions, plus the error of the first, which is known by now, times a factor for
    /// each stream.
    pub(in crate::models) fn correct_streams(
        &self,
        router: StreamRouter<'g>,
        predictions: Value<'g>,
        computed: Value<'g>,
    ) -> Result<Value<'g>> {
        let [_, n, count, width] = predictions.shape().dims4();
        let modalities = self.modalities(router, computed);
        let factors = self.linear("altup_correct_coef", count, modalities)?.scale_bias(1.0, 1.0);
        let _scope = self.model.g.scope(&self.name("altup"));
        let error = computed.sub(first_stream(predictions)).reshape([n, 1, width]).repeat([n, count, width]);
        Ok(error.mul(factors.reshape([n, count, 1])).add(predictions))
    }

    /// Adds what the layer's inputs make of the first stream to the other streams.
    pub(in crate::models) fn add_layer_input(
        &self,
        streams: Value<'g>,
        inputs: Value<'g>,
    ) -> Result<Value<'g>> {
        let [_, n, count, width] = streams.shape().dims4();
        let len = inputs.shape().cols();
        let input = inputs.slice(1, self.index, 1).cont().reshape([self.model.shape.tokens, len]);
        let scale = self.model.weights.vector(&self.name("altup_correct_scale.weight"), width)?;
        let gate = self.linear("inp_gate", len, first_stream(streams).mul(scale))?;
        let gated = gate.gated(Gate::Geglu, self.output_rows(input));
        let added = self.norm("post_norm", self.linear("proj", width, gated)?)?;
        let _scope = self.model.g.scope(&self.name("altup"));
        let others = streams.slice(1, 1, count - 1).add(added.reshape([n, 1, width]));
        Ok(streams.slice(1, 0, 1).concat(1, &[others]))
    }

    /// [`LayerBuilder::output_rows`] of streams.
    pub(in crate::models) fn output_streams(&self, streams: Value<'g>) -> Value<'g> {
        let [_, n, count, width] = streams.shape().dims4();
        let rows = self.output_rows(streams.reshape([n, count * width]));
        rows.reshape([rows.shape().rows(), count, width])
    }

    /// A branch of low rank beside attention, with the rows it is made of.
    pub(in crate::models) fn laurel(&self, x: Value<'g>) -> Result<Value<'g>> {
        let short = self.linear("laurel_l", self.model.streams()?.laurel_rank, x)?;
        let branch = self.norm("laurel_post_norm", self.linear("laurel_r", self.width(), short)?)?;
        Ok(x.add(branch))
    }

    /// A gated feed-forward network whose gates are cut, in layers where they are: those within some standard deviations above
    /// the mean of a token's become 0, and the rows of these neurons are not read. The variance is the mean of the squares, as in the model's own code and in transformers
    /// (`unbiased=False`); llama.cpp divides by one less, which moves the cut of the published models by 1 in 16,000.
    pub(in crate::models) fn feed_forward_with_cut(&self, x: Value<'g>, gate: Gate) -> Result<Value<'g>> {
        let Some(cut) = self.shape.gate_cut else { return self.feed_forward(x, gate) };
        let inner = self.feed_forward_width()?;
        let gates = self.linear("ffn_gate", inner, x)?;
        let gates = {
            let _scope = self.model.g.scope(&self.name("ffn_gate"));
            let above = gates.sub(gates.mean());
            let variance = above.sqr().sum_rows().scale(1.0 / inner.max(1) as f32);
            above.sub(variance.sqrt().scale(cut)).relu()
        };
        if self.model.shape.neurons.mode != NeuronMode::Dense {
            return self.active_rows(x, gates.unary(activation_of(gate)));
        }
        self.down(gates.gated(gate, self.linear("ffn_up", inner, x)?))
    }
}
