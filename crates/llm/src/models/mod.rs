//! Model graphs: one file per architecture.
//!
//! All graphs of a model share their weights and their KV cache by name. A graph is built for a [`GraphShape`] and
//! serves every batch of that shape, since tokens, positions and KV-cache slots are inputs:
//!
//! | input | type, shape | meaning |
//! |---|---|---|
//! | `tokens` | i32 `[n]` | the tokens |
//! | `positions` | i32 `[n]` | each token's position in its sequence |
//! | `slots` | i32 `[n]` | the KV-cache slot that each token's key and value are written to |
//! | `spans` | i32 `[n, 2]` | the slots that each token attends to: from the first to one past the last; absent if all layers have a window. With a page table i32 `[n, 3]`: positions of the token's sequence, and its row of the table |
//! | `pages` | i32 `[s, p]` | with [`GraphShape::page_table`]: the pages of the KV cache that each sequence has |
//! | `conv_from`, `conv_to` | i32 `[p]` | the pieces of the convolutions' states that the batch reads and writes: `row · p + i`; absent if no layer is recurrent. With several [`GraphShape::sequences`], those of one after the other |
//! | `delta_from`, `delta_to` | i32 `[p]` | the same of the states of linear attention |
//! | `single_rows` | i32 `[s]` | with [`GraphShape::parts`]: the tokens of the sequences that have one; absent if none has |
//! | `part_rows` | i32 `[length · count]` | with them: the first token of each part, the second of each, …; `n` for one that a part lacks |
//! | `part_ends` | i32 `[count · before]` | with them: the last tokens of each part, which its convolution remembers: `t · count + part`, where the first `t` are those that it remembered before |
//! | `part_order` | i32 `[n]` | with them: where the result of each token is, after `single_rows` in `part_rows` |
//! | `expanded_pages` | i32 `[p]` | with [`GraphShape::expanded`]: the pages of the prompts whose latent attention is expanded, one prompt's after the other's |
//! | `expanded_spans` | i32 `[t, 2]` | with it: `spans` of the last `t` tokens, in slots of these pages |
//! | `window_pages` | i32 `[s, p]` | `pages` in layers with a sliding window, where those have a KV cache of their own; 0 for pages that are before the window |
//! | `window_slots` | i32 `[n]` | `slots` in layers with a sliding window, where those have a KV cache of their own |
//! | `window_spans` | i32 `[n, 2]` | `spans` in layers with a sliding window; absent if there are none |
//! | `token_types` | i32 `[n]` | of encoders with a classification head and several types of tokens: 0 in the first text of a pair, 1 in the second |
//! | `rows` | i32 `[m]` | the tokens whose logits are an output; of encoders with a classification head, the first of each text |
//! | `expert_slots` | i32 `[layers, experts]` | with [`GraphShape::expert_slots`]: the slot of each expert, or −1 |
//! | `experts_on_host` | i32 `[layers, experts]` | with them: the number of each expert that is in no slot, or −1 |
//! | `experts_not_in_slots` | i32 `[layers, experts]` | in its place without [`GraphShape::observe_experts`] |
//!
//! | `neuron_slots` | i32 `[layers, slots]` | with [`Neurons::slots`]: the neuron of each slot, or −1 |
//! | `neurons_on_host` | f32 `[layers, neurons]` | with them: 1 for each neuron that is in no slot, else 0 |
//!
//! | output | type, shape | meaning |
//! |---|---|---|
//! | `logits` | f32 `[m, vocabulary]` | the logits after each output token |
//! | `hidden` | f32 `[m, width]` | with [`GraphShape::hidden`], and of encoders: the hidden state after the last layer |
//! | `rank` | f32 `[m, k]` | of encoders with a classification head: its scores for the first token of each text |
//! | `experts.N` | i32 `[n · used, 1]` | with [`GraphShape::expert_slots`]: the experts that layer N uses |
//! | `neurons.N` | f32 `[n, neurons]` | with [`Neurons::observe`]: the activations of layer N's neurons, 0 if inactive |
//! | `predicted_neurons.N` | f32 `[n, neurons]` | with it and predictors: 1 for each neuron that is expected to be active, else 0 |
//! | `missed_neurons.N` | f32 `[n, neurons]` | with it and predictors: the activations that the predictor took for 0 |
//! | `argmax` | i32 `[m]` | with [`GraphShape::argmax`]: the first of the largest logits of each row |
//! | `sum` | f32 `[m, 1]` | with either of these: the sum of each row, finite only if all its logits are |
//! | `top` | i32 `[m, k]` | with [`GraphShape::top`]: the tokens of the largest logits of each row, largest first |
//! | `top_logits` | f32 `[m, k, 1]` | with [`GraphShape::top`]: their logits |

mod architecture;
mod bamboo;
mod bert;
mod builder;
mod command_r;
mod deepseek2;
#[cfg(test)]
mod default_tests;
mod falcon;
mod gemma;
mod gemma2;
mod gemma3;
mod gemma3n;
mod glm4;
mod glm4moe;
mod gpt_oss;
mod granite;
mod granitemoe;
mod layer_set;
mod lfm2;
mod lfm2moe;
mod llama;
mod llama4;
mod mamba2;
mod neurons;
mod nomic_bert;
mod olmo2;
mod olmoe;
mod opt;
mod phi3;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen35;
mod qwen35moe;
mod qwen3moe;
mod qwen3next;
mod smallthinker;
mod smollm3;
mod tensor_list;
mod unused_tensors;

use quadriga_gguf::File;
use quadriga_graph::{DType, Graph, GraphBuilder, layer_of};

use self::architecture::Architecture;
use self::builder::ModelBuilder;
pub(crate) use self::builder::TOKEN_TYPES;
pub use self::builder::TensorSpec;
use self::builder::is_recurrent_state;
pub(crate) use self::builder::{ALL_NEURONS, NEURON_SLOTS, NEURONS_ON_HOST};
pub(crate) use self::builder::{
    EXPERT_NUMBERS, EXPERT_SLOTS, EXPERTS_NOT_IN_SLOTS, EXPERTS_ON_HOST, SLOTS_SUFFIX,
};
pub(crate) use self::builder::{active_output, missed_output, predicted_output};
pub use self::layer_set::LayerSet;
pub use self::neurons::{NeuronMode, Neurons};
pub use self::tensor_list::tensors;
pub(crate) use self::unused_tensors::check_tensors;
use crate::adapter::Adapter;
use crate::hyperparameters::{Hyperparameters, Keys};
use crate::ranks::RankShare;
use crate::{Error, Result};

/// The supported architectures.
static ARCHITECTURES: &[Architecture] = &[
    llama::ARCHITECTURE,
    bamboo::ARCHITECTURE,
    falcon::ARCHITECTURE,
    opt::ARCHITECTURE,
    qwen2::ARCHITECTURE,
    qwen3::ARCHITECTURE,
    qwen35::ARCHITECTURE,
    qwen35moe::ARCHITECTURE,
    qwen3next::ARCHITECTURE,
    command_r::ARCHITECTURE,
    deepseek2::ARCHITECTURE,
    gemma::ARCHITECTURE,
    gemma2::ARCHITECTURE,
    gemma3::ARCHITECTURE,
    gemma3n::ARCHITECTURE,
    glm4::ARCHITECTURE,
    glm4moe::ARCHITECTURE,
    gpt_oss::ARCHITECTURE,
    granite::ARCHITECTURE,
    granitemoe::ARCHITECTURE,
    lfm2::ARCHITECTURE,
    lfm2moe::ARCHITECTURE,
    llama4::ARCHITECTURE,
    mamba2::ARCHITECTURE,
    olmo2::ARCHITECTURE,
    olmoe::ARCHITECTURE,
    phi3::ARCHITECTURE,
    qwen2moe::ARCHITECTURE,
    qwen3moe::ARCHITECTURE,
    smallthinker::ARCHITECTURE,
    smollm3::ARCHITECTURE,
    bert::ARCHITECTURE,
    nomic_bert::ARCHITECTURE,
];

/// The names of the supported architectures, as GGUF files have them.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|architecture| architecture.name)
}

fn sorted_names() -> Vec<&'static str> {
    let mut names: Vec<_> = architectures().collect();
    names.sort_unstable();
    names
}

/// Well-known models of an architecture, as text; `None` if it is not supported.
pub fn known_models(architecture: &str) -> Option<&'static str> {
    ARCHITECTURES.iter().find(|known| known.name == architecture).map(|known| known.models)
}

fn find(name: &str) -> Result<&'static Architecture> {
    ARCHITECTURES.iter().find(|known| known.name == name).ok_or_else(|| Error::UnsupportedArchitecture {
        name: name.to_owned(),
        known: sorted_names().join(", "),
    })
}

/// The properties of a batch that its graph depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GraphShape {
    /// Tokens in the batch.
    pub tokens: usize,
    /// Tokens whose logits are an output; with 0 the graph only fills the KV cache. Of encoders: the texts.
    pub rows: usize,
    /// The largest number of tokens of a sequence; some models choose between weights by it.
    pub context: usize,
    /// KV-cache slots that attention covers, from the first: all slots that a token of the batch may see.
    pub visible_slots: usize,
    /// Slots of the whole KV cache.
    pub cache_slots: usize,
    /// The page table, where sequences share the KV cache in pages; `None` if each has slots of its own.
    pub page_table: Option<PageTable>,
    /// In models with latent attention and a page table: the parts of prompts whose attention is expanded, the last tokens of the batch.
    pub expanded: Option<ExpandedParts>,
    /// Rows of each recurrent state, in models that have some.
    pub state_rows: usize,
    /// Sequences of the batch, in models with recurrent states: 1 for tokens of one sequence, or as many as there are tokens for one
    /// token of each. With `parts`, those of one token and those of several.
    pub sequences: usize,
    /// In models with recurrent states: how many sequences of the batch have one token, and how many have several; `None` if it has
    /// tokens of one sequence, or one of each.
    pub parts: Option<PromptParts>,
    /// The KV cache of layers with a sliding window; `None` if they use the other layers' slots.
    pub window_cache: Option<WindowCache>,
    /// The element type of the keys in the KV cache.
    pub cache_keys: DType,
    /// The element type of the values in the KV cache.
    pub cache_values: DType,
    /// Slots for experts that a device computes while the host computes the others, in all layers together; they are
    /// spread evenly. With 0, experts are computed where their tensors are.
    pub expert_slots: usize,
    /// The layers whose experts are computed where their tensors are in any case: they get none of the slots.
    pub resident_experts: LayerSet,
    /// How the neurons of feed-forward networks are computed.
    pub neurons: Neurons,
    /// Whether the experts that a batch with slots uses are outputs. Without, the host does not look them up, so that a device can
    /// stream those that are in no slot.
    pub observe_experts: bool,
    /// Whether the hidden state after the last layer is an output, beside the logits.
    pub hidden: bool,
    /// Whether the logits are an output. Without them nor an argmax, hidden states must be.
    pub logits: bool,
    /// Of the output rows, the first whose logits are computed, where only the hidden states of others are wanted; `usize::MAX` for
    /// all of them.
    pub logit_rows: usize,
    /// Whether the argmax of the logits is an output, beside them.
    pub argmax: bool,
    /// The number of largest logits of each row that are outputs, beside all of them; 0 for none.
    pub top: usize,
}

/// The sequences of a batch, in models with recurrent states: some of one token, others with a part of a prompt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PromptParts {
    /// Sequences of one token.
    pub singles: usize,
    /// Parts of prompts.
    pub count: usize,
    /// Tokens of the longest part, or more. Recurrent layers compute as many of each.
    pub length: usize,
}

/// Parts of prompts that attend to the keys and values of all heads, which are made of the latent vectors in pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExpandedParts {
    /// Their tokens: the last ones of the batch.
    pub tokens: usize,
    /// The pages of all of them.
    pub pages: usize,
}

/// The shape of a page table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PageTable {
    /// Its rows: one for each sequence of a batch.
    pub rows: usize,
    /// The pages of a row.
    pub pages: usize,
}

/// A KV cache of layers with a sliding window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WindowCache {
    /// The slots that attention covers: those of all sequences.
    pub slots: usize,
    /// All rows: the slots, and the rows of checkpoints after them.
    pub rows: usize,
}

/// What a state of a model's graphs holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StateKind {
    /// Rows for all positions, or for a window's in the same slots.
    Full,
    /// Rows for the latest positions, in slots of their own.
    Window,
    /// States of recurrent layers.
    Recurrent,
}

impl StateKind {
    /// The kind of the state of this name; `apart` if window layers have a KV cache of their own.
    pub(crate) fn of(name: &str, hyper: &Hyperparameters, apart: bool) -> StateKind {
        let layer = layer_of(name).and_then(|layer| hyper.layers.get(layer));
        match layer {
            _ if is_recurrent_state(name) => StateKind::Recurrent,
            Some(layer) if apart && layer.window.is_some() => StateKind::Window,
            _ => StateKind::Full,
        }
    }
}

impl GraphShape {
    /// A batch of one sequence with outputs for all tokens, over an F16 KV cache of as many slots as `context`.
    pub fn new(tokens: usize, context: usize) -> GraphShape {
        GraphShape {
            tokens,
            rows: tokens,
            context,
            visible_slots: context,
            cache_slots: context,
            page_table: None,
            expanded: None,
            state_rows: 2,
            sequences: 1,
            parts: None,
            window_cache: None,
            cache_keys: DType::F16,
            cache_values: DType::F16,
            expert_slots: 0,
            resident_experts: LayerSet::EMPTY,
            neurons: Neurons::default(),
            observe_experts: true,
            hidden: false,
            logits: true,
            logit_rows: usize::MAX,
            argmax: false,
            top: 0,
        }
    }

    /// Whether the graph has an input that says which tokens are outputs: unless all are, in their order, or none.
    pub(crate) fn selects_rows(&self) -> bool {
        let mixed = self.logits && self.logit_rows < self.rows;
        self.rows > 0 && (self.rows != self.tokens || mixed)
    }
}

/// Reads and checks the metadata of a model file.
pub fn hyperparameters(file: &File) -> Result<Hyperparameters> {
    let architecture = find(file.get::<&str>("general.architecture")?)?;
    architecture.hyperparameters(&Keys::new(file, architecture.name))
}

/// Builds the graph of a model for one batch shape.
pub fn build(file: &File, hyper: &Hyperparameters, shape: GraphShape) -> Result<Graph> {
    build_adapted(file, hyper, &[], None, shape)
}

/// As [`build`], with what adapters add, or for a part of the model.
pub(crate) fn build_adapted(
    file: &File,
    hyper: &Hyperparameters,
    adapters: &[Adapter],
    ranks: Option<&RankShare>,
    shape: GraphShape,
) -> Result<Graph> {
    let g = GraphBuilder::new();
    let built = ModelBuilder::new(&g, file, hyper, adapters, ranks, shape)
        .and_then(|builder| (find(hyper.architecture)?.build)(&builder));
    finish(g, built).map(|(graph, ())| graph)
}

/// The finished graph and what came of building it. The graph's own error is the earlier one: after it, values have shapes
/// that no tensor fits.
fn finish<T>(g: GraphBuilder, built: Result<T>) -> Result<(Graph, T)> {
    let graph = g.finish()?;
    Ok((graph, built?))
}

/// An error if adapters have matrices that the model's graph does not use.
pub(crate) fn check_adapters(file: &File, hyper: &Hyperparameters, adapters: &[Adapter]) -> Result<()> {
    let g = GraphBuilder::new();
    let checked =
        ModelBuilder::new(&g, file, hyper, adapters, None, GraphShape::new(1, 1)).and_then(|builder| {
            (find(hyper.architecture)?.build)(&builder)?;
            builder.check_adapters()
        });
    finish(g, checked).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_the_graph_comes_before_what_it_led_to() {
        let late = || Error::UnsupportedArchitecture { name: "late".to_owned(), known: String::new() };
        let g = GraphBuilder::new();
        g.input("x", DType::F32, [2]).add(g.input("y", DType::F32, [3]));
        assert!(matches!(finish(g, Err::<(), _>(late())), Err(Error::Graph(_))));
        assert!(matches!(
            finish(GraphBuilder::new(), Err::<(), _>(late())),
            Err(Error::UnsupportedArchitecture { .. })
        ));
        assert!(matches!(finish(GraphBuilder::new(), Ok(7)), Ok((_, 7))));
    }
}
