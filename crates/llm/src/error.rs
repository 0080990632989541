//! The errors of this crate.

use crate::state_error::StateError;

/// The result of a function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A low-rank adapter is malformed, or does not fit the model.
    #[error("the adapter cannot be used: {reason}")]
    Adapter {
        /// What is wrong with it.
        reason: String,
    },
    /// The model cannot be divided among ranks, or a call is not possible with several.
    #[error("several ranks: {reason}")]
    Ranks {
        /// The reason, with numbers.
        reason: String,
    },
    /// Ranks could not exchange data.
    #[error(transparent)]
    Cluster(#[from] quadriga_cluster::ClusterError),
    /// The model file is malformed, or lacks a required value.
    #[error(transparent)]
    File(#[from] quadriga_gguf::Error),

    /// The architecture of the model is not supported.
    #[error("the architecture {name:?} is not supported yet (supported: {known})")]
    UnsupportedArchitecture {
        /// The name in the file.
        name: String,
        /// The supported names.
        known: String,
    },

    /// Too many requests wait to be answered.
    #[error("{waiting} requests are waiting already; try again later")]
    QueueFull {
        /// Requests that wait, beyond those that start with the next step.
        waiting: usize,
    },

    /// The service was stopped before the request was answered.
    #[error("the service has stopped")]
    ServiceStopped,

    /// A request's sampling hook panicked.
    #[error("the sampling hook of the request panicked")]
    HookPanicked,

    /// A thread could not be started.
    #[error("a thread could not be started: {reason}")]
    Thread {
        /// What the system says.
        reason: String,
    },

    /// A value in the file's metadata is out of range.
    #[error("key {key:?} is {}; it must be {wanted}", printable(value))]
    Hyperparameter {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The accepted values.
        wanted: String,
    },

    /// A tensor has another shape than the metadata requires.
    #[error("tensor {name:?} has shape {found:?}; the model's metadata requires {wanted:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its extents, outermost first.
        found: Vec<usize>,
        /// The required extents.
        wanted: Vec<usize>,
    },

    /// A file has tensors that its model does not use: its metadata describes another model.
    #[error(
        "the file has tensors ({count}) that a model of the architecture {architecture:?} with this metadata does not use, such as {names}; {key:?} is wrong, or the file is of another model"
    )]
    UnusedTensors {
        /// The architecture.
        architecture: &'static str,
        /// How many.
        count: usize,
        /// The first of them.
        names: String,
        /// The key that may be wrong.
        key: String,
    },

    /// No operation is implemented for the type of a tensor.
    #[error("tensor {name:?} is of type {dtype}, which is not supported; use a file in another quantization")]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: quadriga_graph::DType,
    },

    /// A tensor whose values must be finite has another one.
    #[error("tensor {name:?} has the value {value} at {index}; the file may be damaged")]
    TensorValue {
        /// The tensor.
        name: String,
        /// The place of the value.
        index: usize,
        /// The value.
        value: f32,
    },

    /// A tensor of indices or counts has a value that does not fit.
    #[error("tensor {name:?} has the value {value} at {index}, which is out of range or repeated")]
    TensorInteger {
        /// The tensor.
        name: String,
        /// The place of the value.
        index: usize,
        /// The value.
        value: i32,
    },

    /// Counts of neurons were collected with another model.
    #[error(
        "the counts of active neurons belong to another model ({found}, this one is {wanted}); collect them anew with `quadriga neurons`"
    )]
    ForeignCounts {
        /// The identity of the model that they belong to.
        found: String,
        /// The identity of the model.
        wanted: String,
    },

    /// The model's graph could not be built.
    #[error("the model's graph cannot be built: {0}")]
    Graph(#[from] Box<quadriga_graph::BuildError>),

    /// Planning or running failed.
    #[error(transparent)]
    Runtime(#[from] quadriga_runtime::RuntimeError),

    /// The CPU backend cannot be created with its options.
    #[error(transparent)]
    Cpu(#[from] quadriga_cpu::Error),

    /// A name that stands for no device.
    #[error("there is no device \"{name}\"; devices are cpu, cuda:0, cuda:1 …")]
    UnknownDevice {
        /// The name.
        name: String,
    },

    /// A device appears twice in a list of devices.
    #[error("the device {name} is named twice")]
    DuplicateDevice {
        /// The device.
        name: String,
    },

    /// A device cannot be opened.
    #[error("cannot use the device {name}: {source}")]
    Device {
        /// The device.
        name: String,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// A placement of tensors by name that cannot be used.
    #[error("the tensor override {text:?}: {reason}")]
    TensorOverride {
        /// The override.
        text: String,
        /// Why.
        reason: String,
    },

    /// The context has no room for the tokens.
    #[error("{}", context_full(*wanted, *used, *context))]
    ContextFull {
        /// Tokens to be added.
        wanted: usize,
        /// Tokens there already.
        used: usize,
        /// The context size.
        context: usize,
    },

    /// There is no memory for the results of a batch.
    #[error(
        "no memory for the results of {rows} tokens ({width} numbers each); ask for those of fewer tokens at once"
    )]
    OutputMemory {
        /// Tokens whose results are outputs.
        rows: usize,
        /// Numbers of each.
        width: usize,
    },

    /// An embedding or a score is not finite.
    #[error(
        "the result of text {} is unusable: element {index} is {value}; the file may be damaged or unsupported",
        text + 1
    )]
    Embedding {
        /// The number of the text among those of the call, from 0.
        text: usize,
        /// The element of its embedding or scores.
        index: usize,
        /// Its value.
        value: f32,
    },

    /// A prompt without tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,

    /// A sequence number that does not exist.
    #[error("there is no sequence {sequence}: the engine has {count}")]
    Sequence {
        /// The number.
        sequence: usize,
        /// The number of sequences.
        count: usize,
    },

    /// An encoder is asked for text.
    #[error(
        "{architecture} is an encoder, which computes embeddings and generates no text: use `quadriga embed` (Embedder)"
    )]
    Encoder {
        /// The architecture.
        architecture: &'static str,
    },

    /// A model that cannot rank is asked to.
    #[error(
        "the model has no classification head: it makes embeddings by mean, cls or last, but cannot rank"
    )]
    NoClassificationHead,

    /// An expert's part of a tensor is not in one piece.
    #[error("{tensor}: the bytes of expert {expert} are not in one piece")]
    Expert {
        /// The slots that it should go to.
        tensor: String,
        /// The expert.
        expert: usize,
    },

    /// A recurrent state that is needed is not there any more.
    #[error("the recurrent state of sequence {sequence} is lost; truncate the sequence and feed it again")]
    StateLost {
        /// The sequence.
        sequence: usize,
    },

    /// An observer of intermediate results ended the run.
    #[error("the observer of intermediate results ended the run")]
    ObserverStopped,

    /// An option is outside its range.
    #[error("{name} is {value}; it must be {wanted}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: String,
        /// The accepted values.
        wanted: &'static str,
    },

    /// The heads' lengths are not multiples of the block size of the KV cache's type.
    #[error(
        "a {} KV cache needs heads of whole blocks of {block} elements; the model's have {keys} (keys) and {values} (values)",
        dtype.name().to_lowercase()
    )]
    CacheBlocks {
        /// The type of the KV cache.
        dtype: quadriga_graph::DType,
        /// Elements of its blocks.
        block: usize,
        /// Elements of a key head.
        keys: usize,
        /// Elements of a value head.
        values: usize,
    },

    /// The file has no vocabulary.
    #[error("the file has no vocabulary: it can be benchmarked, but not used with text")]
    NoVocabulary,

    /// The file's tokenizer model is not supported.
    #[error("unknown tokenizer model {model:?} (known: {known}); the file cannot be used with text")]
    UnknownTokenizer {
        /// The name in the file.
        model: String,
        /// The supported names.
        known: String,
    },

    /// The file's pre-tokenizer is not supported.
    #[error(
        "unknown pre-tokenizer {name:?} (tokenizer.ggml.pre); \
         \"default\" is what llama.cpp uses for files without one; known are: {known}"
    )]
    UnknownPreTokenizer {
        /// The name in the file.
        name: String,
        /// The supported names.
        known: String,
    },

    /// The vocabulary is inconsistent.
    #[error("the vocabulary is unusable: {}", printable(reason))]
    Vocabulary {
        /// The inconsistency.
        reason: String,
    },

    /// The chat template cannot be parsed or rendered.
    #[error("the model's chat template failed: {}", printable(reason))]
    Template {
        /// The error of the template engine.
        reason: String,
    },

    /// A sampling parameter is outside its range.
    #[error("{name} = {value} is out of range: it must be {wanted}")]
    SamplingOption {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The accepted values.
        wanted: &'static str,
    },

    /// A sampling option refers to the vocabulary, which this sampler does not have.
    #[error("{name} needs the vocabulary of a model: make the sampler for one")]
    SamplingNeedsModel {
        /// The option.
        name: &'static str,
    },

    /// A grammar for constrained generation cannot be compiled.
    #[error("the {grammar} cannot be used: {reason}")]
    Grammar {
        /// The kind of grammar.
        grammar: &'static str,
        /// What is wrong with it.
        reason: String,
    },

    /// A grammar was not compiled to its end, since its [`Cancellation`](crate::constraint::Cancellation) was set.
    #[error("the grammar was being compiled when its request was cancelled")]
    Cancelled,

    /// A sampling hook failed.
    #[error("the sampling hook failed: {0}")]
    SamplingHook(#[source] Box<dyn std::error::Error + Send + Sync>),

    /// Logit bias, penalties or a sampling hook left no distribution over tokens.
    #[error("logit bias or sampling hook leave no token to sample: {0}")]
    ChangedLogits(#[source] LogitsError),

    /// The logits are not a distribution over tokens.
    #[error("the model's output is unusable: {0}; the file may be damaged or unsupported")]
    Logits(#[from] LogitsError),

    /// A saved KV cache cannot be written or used.
    #[error("the saved KV cache{name}: {source}")]
    SavedState {
        /// A space and the file's path, or nothing.
        name: String,
        /// The reason.
        source: StateError,
    },

    /// Results were read before their batch was waited for.
    #[error("the batch is in flight: its results must be waited for")]
    BatchInFlight,

    /// A token number beyond the vocabulary.
    #[error("token {token} does not exist: the vocabulary has {count} tokens")]
    Token {
        /// The number.
        token: u32,
        /// The size of the vocabulary.
        count: usize,
    },

    /// The default model could not be downloaded.
    #[error("cannot fetch the default model: {reason}\n{remedy}")]
    Fetch {
        /// The reason.
        reason: String,
        /// How to install it by hand.
        remedy: String,
    },

    /// The caller cancelled the download of the default model.
    #[error("fetching the default model was cancelled; the next run starts it again")]
    FetchCancelled,

    /// There is no cache folder for the default model.
    #[error("no cache folder: neither QUADRIGA_CACHE nor HOME is set")]
    NoCacheFolder,
}

fn context_full(wanted: usize, used: usize, context: usize) -> String {
    match used {
        0 => format!("{wanted} tokens do not fit the context of {context}"),
        used => format!("{wanted} more tokens do not fit the context of {context}, of which {used} are used"),
    }
}

/// A text from a file or template without control characters, which could change a terminal's state: as `\u{1b}`.
fn printable(text: &str) -> String {
    let safe =
        |letter: char| letter == '"' || letter == '\'' || letter == '\\' || letter.escape_debug().len() == 1;
    text.chars()
        .map(|letter| if safe(letter) { letter.to_string() } else { letter.escape_debug().to_string() })
        .collect()
}

impl From<StateError> for Error {
    fn from(source: StateError) -> Error {
        Error::SavedState { name: String::new(), source }
    }
}

impl From<quadriga_graph::BuildError> for Error {
    fn from(error: quadriga_graph::BuildError) -> Error {
        Error::Graph(Box::new(error))
    }
}

/// The reason why logits are not a distribution over tokens.
#[derive(Clone, Copy, PartialEq, Debug, thiserror::Error)]
pub enum LogitsError {
    /// There are none.
    #[error("there are no logits")]
    Empty,
    /// One is NaN or +inf.
    #[error("the logit of token {token} is {logit}")]
    NotFinite {
        /// The token.
        token: u32,
        /// Its logit.
        logit: f32,
    },
    /// All are -inf.
    #[error("every token is excluded (-inf)")]
    AllExcluded,
}
