//! Keys that the format defines, and the types of their values.

use crate::{
    error::FormatErrorKind,
    value::{Value, ValueType},
};

/// The first bytes of a file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// The first bytes of a file in PowerInfer's container.
pub(crate) const POWERINFER_MAGIC: [u8; 4] = *b"PWRI";

/// The key of the alignment of tensor data.
pub(crate) const ALIGNMENT: &str = "general.alignment";
/// The key of the model's architecture, which is also the prefix of the architecture's own keys.
pub(crate) const ARCHITECTURE: &str = "general.architecture";
/// The keys of a model split over several files.
pub(crate) const SPLIT_NUMBER: &str = "split.no";
pub(crate) const SPLIT_COUNT: &str = "split.count";
pub(crate) const SPLIT_TENSORS: &str = "split.tensors.count";

/// The alignment of a file without [`ALIGNMENT`].
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
const MIN_ALIGNMENT: u32 = 8;
const MAX_ALIGNMENT: u32 = 1 << 24;

/// The types that a value may have.
#[derive(Clone, Copy)]
enum ValueShape {
    String,
    Bool,
    Integer,
    /// An integer or a float: converters have written lengths and rates as either.
    Number,
    /// One value for all blocks, or one per block.
    IntegerOrIntegers,
    Strings,
    Integers,
    Floats,
    Alignment,
}

const KEYS: &[(&str, ValueShape)] = &[
    (ALIGNMENT, ValueShape::Alignment),
    (ARCHITECTURE, ValueShape::String),
    ("general.name", ValueShape::String),
    ("general.type", ValueShape::String),
    ("general.basename", ValueShape::String),
    ("general.size_label", ValueShape::String),
    ("general.license", ValueShape::String),
    ("general.file_type", ValueShape::Integer),
    ("general.quantization_version", ValueShape::Integer),
    (SPLIT_NUMBER, ValueShape::Integer),
    (SPLIT_COUNT, ValueShape::Integer),
    (SPLIT_TENSORS, ValueShape::Integer),
    ("tokenizer.ggml.model", ValueShape::String),
    ("tokenizer.ggml.pre", ValueShape::String),
    ("tokenizer.ggml.tokens", ValueShape::Strings),
    ("tokenizer.ggml.merges", ValueShape::Strings),
    ("tokenizer.ggml.scores", ValueShape::Floats),
    ("tokenizer.ggml.token_type", ValueShape::Integers),
    ("tokenizer.ggml.bos_token_id", ValueShape::Integer),
    ("tokenizer.ggml.eos_token_id", ValueShape::Integer),
    ("tokenizer.ggml.unknown_token_id", ValueShape::Integer),
    ("tokenizer.ggml.padding_token_id", ValueShape::Integer),
    ("tokenizer.ggml.add_bos_token", ValueShape::Bool),
    ("tokenizer.ggml.add_eos_token", ValueShape::Bool),
    ("tokenizer.ggml.add_space_prefix", ValueShape::Bool),
    ("tokenizer.chat_template", ValueShape::String),
];

/// Keys after the prefix `ARCHITECTURE.`.
const ARCHITECTURE_KEYS: &[(&str, ValueShape)] = &[
    ("vocab_size", ValueShape::Integer),
    ("context_length", ValueShape::Integer),
    ("embedding_length", ValueShape::Integer),
    ("block_count", ValueShape::Integer),
    ("feed_forward_length", ValueShape::IntegerOrIntegers),
    ("expert_count", ValueShape::Integer),
    ("expert_used_count", ValueShape::Integer),
    ("attention.head_count", ValueShape::IntegerOrIntegers),
    ("attention.head_count_kv", ValueShape::IntegerOrIntegers),
    ("attention.key_length", ValueShape::Integer),
    ("attention.value_length", ValueShape::Integer),
    ("attention.layer_norm_epsilon", ValueShape::Number),
    ("attention.layer_norm_rms_epsilon", ValueShape::Number),
    ("rope.dimension_count", ValueShape::Integer),
    ("rope.freq_base", ValueShape::Number),
    ("rope.scaling.type", ValueShape::String),
    ("rope.scaling.factor", ValueShape::Number),
];

fn shape_of(key: &str, architecture: Option<&str>) -> Option<ValueShape> {
    let own = |key: &str| {
        let rest = key.strip_prefix(architecture?)?.strip_prefix('.')?;
        ARCHITECTURE_KEYS.iter().find(|(name, _)| *name == rest)
    };
    KEYS.iter().find(|(name, _)| *name == key).or_else(|| own(key)).map(|(_, shape)| *shape)
}

/// Checks the value of a key that the format defines; other keys may have any value.
pub(crate) fn check(key: &str, value: &Value<'_>, architecture: Option<&str>) -> Result<(), FormatErrorKind> {
    let Some(shape) = shape_of(key, architecture) else { return Ok(()) };
    let integer = value.integer().is_some();
    let elements = match value {
        Value::Array(array) => Some(array.element_type()),
        _ => None,
    };
    let integers = elements.is_some_and(is_integer);
    let (fits, expected) = match shape {
        ValueShape::String => (value.kind() == ValueType::String, "a string"),
        ValueShape::Bool => (value.kind() == ValueType::Bool, "a bool"),
        ValueShape::Integer => (integer, "an integer"),
        ValueShape::Number => (integer || is_float(value.kind()), "a number"),
        ValueShape::IntegerOrIntegers => (integer || integers, "an integer or an array of integers"),
        ValueShape::Strings => (elements == Some(ValueType::String), "an array of strings"),
        ValueShape::Integers => (integers, "an array of integers"),
        ValueShape::Floats => (elements.is_some_and(is_float), "an array of floats"),
        ValueShape::Alignment => (value.kind() == ValueType::U32, "a u32"),
    };
    if !fits {
        return Err(FormatErrorKind::WrongType { expected, found: value.describe() });
    }
    match (shape, value) {
        (ValueShape::Alignment, Value::U32(alignment)) => check_alignment(*alignment),
        _ => Ok(()),
    }
}

fn check_alignment(alignment: u32) -> Result<(), FormatErrorKind> {
    if alignment.is_power_of_two() && (MIN_ALIGNMENT..=MAX_ALIGNMENT).contains(&alignment) {
        return Ok(());
    }
    Err(FormatErrorKind::Alignment {
        found: alignment.into(),
        min: MIN_ALIGNMENT.into(),
        max: MAX_ALIGNMENT.into(),
    })
}

fn is_integer(kind: ValueType) -> bool {
    use ValueType::*;
    matches!(kind, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
}

fn is_float(kind: ValueType) -> bool {
    matches!(kind, ValueType::F32 | ValueType::F64)
}
