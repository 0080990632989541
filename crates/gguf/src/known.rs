//! Keys with a fixed meaning: what type their values must have.

use crate::{
    error::FormatErrorKind,
    value::{Value, ValueType},
};

/// The key that sets where tensor data may start.
pub(crate) const ALIGNMENT: &str = "general.alignment";
/// The key that names the model's architecture, which is also the first word of its own keys.
pub(crate) const ARCHITECTURE: &str = "general.architecture";
/// The keys of a model split over several files.
pub(crate) const SPLIT_NUMBER: &str = "split.no";
pub(crate) const SPLIT_COUNT: &str = "split.count";
pub(crate) const SPLIT_TENSORS: &str = "split.tensors.count";

/// The alignment of a file that does not set it.
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
const LEAST_ALIGNMENT: u32 = 8;
const MOST_ALIGNMENT: u32 = 1 << 24;

#[derive(Clone, Copy)]
enum Kind {
    String,
    Bool,
    Integer,
    /// Converters have written lengths and rates with either.
    Number,
    /// One for all blocks, or one per block.
    IntegerOrIntegers,
    Strings,
    Integers,
    Floats,
    Alignment,
}

const KEYS: &[(&str, Kind)] = &[
    (ALIGNMENT, Kind::Alignment),
    (ARCHITECTURE, Kind::String),
    ("general.name", Kind::String),
    ("general.type", Kind::String),
    ("general.basename", Kind::String),
    ("general.size_label", Kind::String),
    ("general.license", Kind::String),
    ("general.file_type", Kind::Integer),
    ("general.quantization_version", Kind::Integer),
    (SPLIT_NUMBER, Kind::Integer),
    (SPLIT_COUNT, Kind::Integer),
    (SPLIT_TENSORS, Kind::Integer),
    ("tokenizer.ggml.model", Kind::String),
    ("tokenizer.ggml.pre", Kind::String),
    ("tokenizer.ggml.tokens", Kind::Strings),
    ("tokenizer.ggml.merges", Kind::Strings),
    ("tokenizer.ggml.scores", Kind::Floats),
    ("tokenizer.ggml.token_type", Kind::Integers),
    ("tokenizer.ggml.bos_token_id", Kind::Integer),
    ("tokenizer.ggml.eos_token_id", Kind::Integer),
    ("tokenizer.ggml.unknown_token_id", Kind::Integer),
    ("tokenizer.ggml.padding_token_id", Kind::Integer),
    ("tokenizer.ggml.add_bos_token", Kind::Bool),
    ("tokenizer.ggml.add_eos_token", Kind::Bool),
    ("tokenizer.ggml.add_space_prefix", Kind::Bool),
    ("tokenizer.chat_template", Kind::String),
];

/// Keys that follow the architecture's name and a dot.
const ARCHITECTURE_KEYS: &[(&str, Kind)] = &[
    ("vocab_size", Kind::Integer),
    ("context_length", Kind::Integer),
    ("embedding_length", Kind::Integer),
    ("block_count", Kind::Integer),
    ("feed_forward_length", Kind::IntegerOrIntegers),
    ("expert_count", Kind::Integer),
    ("expert_used_count", Kind::Integer),
    ("attention.head_count", Kind::IntegerOrIntegers),
    ("attention.head_count_kv", Kind::IntegerOrIntegers),
    ("attention.key_length", Kind::Integer),
    ("attention.value_length", Kind::Integer),
    ("attention.layer_norm_epsilon", Kind::Number),
    ("attention.layer_norm_rms_epsilon", Kind::Number),
    ("rope.dimension_count", Kind::Integer),
    ("rope.freq_base", Kind::Number),
    ("rope.scaling.type", Kind::String),
    ("rope.scaling.factor", Kind::Number),
];

fn kind_of(key: &str, architecture: Option<&str>) -> Option<Kind> {
    let own = |key: &str| {
        let rest = key.strip_prefix(architecture?)?.strip_prefix('.')?;
        ARCHITECTURE_KEYS.iter().find(|(name, _)| *name == rest)
    };
    KEYS.iter().find(|(name, _)| *name == key).or_else(|| own(key)).map(|(_, kind)| *kind)
}

/// Whether a key that everybody knows has a value of the type that everybody expects.
pub(crate) fn check(key: &str, value: &Value<'_>, architecture: Option<&str>) -> Result<(), FormatErrorKind> {
    let Some(kind) = kind_of(key, architecture) else { return Ok(()) };
    let integer = value.integer().is_some();
    let elements = match value {
        Value::Array(array) => Some(array.element_type()),
        _ => None,
    };
    let integers = elements.is_some_and(is_integer);
    let (fits, wanted) = match kind {
        Kind::String => (value.kind() == ValueType::String, "a string"),
        Kind::Bool => (value.kind() == ValueType::Bool, "a bool"),
        Kind::Integer => (integer, "an integer"),
        Kind::Number => (integer || is_float(value.kind()), "a number"),
        Kind::IntegerOrIntegers => (integer || integers, "an integer or an array of integers"),
        Kind::Strings => (elements == Some(ValueType::String), "an array of strings"),
        Kind::Integers => (integers, "an array of integers"),
        Kind::Floats => (elements.is_some_and(is_float), "an array of floats"),
        Kind::Alignment => (value.kind() == ValueType::U32, "a u32"),
    };
    if !fits {
        return Err(FormatErrorKind::Kind { wanted, found: value.describe() });
    }
    match (kind, value) {
        (Kind::Alignment, Value::U32(alignment)) => check_alignment(*alignment),
        _ => Ok(()),
    }
}

fn check_alignment(alignment: u32) -> Result<(), FormatErrorKind> {
    if alignment.is_power_of_two() && (LEAST_ALIGNMENT..=MOST_ALIGNMENT).contains(&alignment) {
        return Ok(());
    }
    Err(FormatErrorKind::Alignment {
        found: alignment.into(),
        least: LEAST_ALIGNMENT.into(),
        most: MOST_ALIGNMENT.into(),
    })
}

fn is_integer(kind: ValueType) -> bool {
    use ValueType::*;
    matches!(kind, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
}

fn is_float(kind: ValueType) -> bool {
    matches!(kind, ValueType::F32 | ValueType::F64)
}
