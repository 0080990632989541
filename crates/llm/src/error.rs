//! What can go wrong, in words for the person at the terminal.

use std::path::PathBuf;

/// The result of a function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that this crate reports as wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file breaks its format, or lacks a value that is needed.
    #[error(transparent)]
    File(#[from] quadriga_gguf::Error),

    /// The model is of a family that is not known here.
    #[error("the architecture \"{name}\" is not supported (known: {known})")]
    UnsupportedArchitecture {
        /// The name in the file.
        name: String,
        /// The names that would work.
        known: String,
    },

    /// A value in the file's metadata makes no sense.
    #[error("key \"{key}\" is {value}; it must be {wanted}")]
    Hyperparameter {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it may be.
        wanted: String,
    },

    /// A tensor has another shape than the metadata says.
    #[error("tensor \"{name}\" has shape {found:?}; the model's metadata asks for {wanted:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Its extents, outermost first.
        found: Vec<usize>,
        /// What they should be.
        wanted: Vec<usize>,
    },

    /// A tensor is of a type that cannot be computed with.
    #[error(
        "tensor \"{name}\" is of type {dtype}, which cannot be computed with; use a file in another quantization"
    )]
    TensorType {
        /// The tensor.
        name: String,
        /// Its type.
        dtype: quadriga_graph::DType,
    },

    /// The model's graph could not be built.
    #[error("the model's graph cannot be built: {0}")]
    Graph(#[from] Box<quadriga_graph::BuildError>),

    /// Planning or running failed.
    #[error(transparent)]
    Runtime(#[from] quadriga_runtime::RuntimeError),

    /// The CPU backend cannot be made as asked.
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

    /// More tokens than the context holds.
    #[error("{wanted} tokens do not fit the context of {context} ({used} are used)")]
    ContextFull {
        /// Tokens to be added.
        wanted: usize,
        /// Tokens there already.
        used: usize,
        /// The most there can be.
        context: usize,
    },

    /// There is nothing to go on from.
    #[error("the prompt is empty")]
    EmptyPrompt,

    /// A sequence number beyond those that were asked for.
    #[error("there is no sequence {sequence}: {count} were asked for")]
    Sequence {
        /// The number.
        sequence: usize,
        /// How many there are.
        count: usize,
    },

    /// An option is outside its range.
    #[error("{name} is {value}; it must be {wanted}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        wanted: &'static str,
    },

    /// The cache's type has blocks that the model's heads do not fill.
    #[error(
        "a q8_0 cache stores blocks of 32 numbers, which heads of {keys} (keys) and {values} (values) numbers do not fill"
    )]
    CacheBlocks {
        /// Numbers of a head's key.
        keys: usize,
        /// Numbers of a head's value.
        values: usize,
    },

    /// The file has no vocabulary, or says that it has none.
    #[error("the file has no vocabulary: it can be benchmarked, but not used with text")]
    NoVocabulary,

    /// The file's tokenizer is of a kind that is not known here.
    #[error("unknown tokenizer model '{model}' (known: {known}); the file cannot be used with text")]
    UnknownTokenizer {
        /// The name in the file.
        model: String,
        /// The names that would work.
        known: String,
    },

    /// The file's vocabulary wants to be split by rules that are not known here.
    #[error("unknown pre-tokenizer '{name}'; known are: {known}")]
    UnknownPreTokenizer {
        /// The name in the file.
        name: String,
        /// The names that would work.
        known: String,
    },

    /// The vocabulary contradicts itself.
    #[error("the vocabulary is unusable: {reason}")]
    Vocabulary {
        /// What is wrong with it.
        reason: String,
    },

    /// The chat template cannot be parsed or rendered.
    #[error("the model's chat template failed: {reason}")]
    Template {
        /// What the template engine says.
        reason: String,
    },

    /// A sampling parameter is outside its range.
    #[error("{name} = {value} is out of range: it must be {wanted}")]
    SamplingOption {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        wanted: &'static str,
    },

    /// The logits are not a distribution over tokens.
    #[error("the model's output is unusable: {0}; the file may be damaged or unsupported")]
    Logits(#[from] LogitsError),

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

    /// The default model could not be brought to this machine.
    #[error("cannot fetch the default model: {reason}\n{remedy}")]
    Fetch {
        /// What went wrong.
        reason: String,
        /// What to do by hand.
        remedy: String,
    },

    /// The caller asked to stop while the default model was being fetched.
    #[error("fetching the default model was cancelled; the next run starts it again")]
    FetchCancelled,

    /// There is no folder to keep the default model in.
    #[error("no cache folder: neither QUADRIGA_CACHE nor HOME is set")]
    NoCacheFolder,

    /// A file or folder could not be used.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
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
