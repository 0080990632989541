//! What the user of the quantizer can choose.

use quadriga_gguf::OwnedValue;
use quadriga_graph::DType;
use regex::Regex;

use super::file_type::FileType;
use super::kernels::is_target;
use super::prune::PrunedLayers;
use crate::error::QuantizeError;

/// How a file is quantized.
#[derive(Clone, Debug)]
pub struct QuantizeOptions {
    /// The type or mix.
    pub file_type: FileType,
    /// The type of `output.weight`.
    pub output_type: Option<DType>,
    /// The type of the token embedding.
    pub embedding_type: Option<DType>,
    /// Types of tensors by name; the first that matches decides.
    pub tensor_types: Vec<TensorType>,
    /// `output.weight` stays as it is.
    pub leave_output: bool,
    /// All tensors get the type of the mix.
    pub pure: bool,
    /// All tensors are copied as they are.
    pub only_copy: bool,
    /// Layers that are left out.
    pub pruned: PrunedLayers,
    /// Quantized tensors are quantized again.
    pub allow_requantize: bool,
    /// The result has the same parts as a split model.
    pub keep_split: bool,
    /// Metadata of the result.
    pub overrides: Vec<(String, OwnedValue)>,
    /// Names of tensors, or parts of names, whose importance is used; empty for all.
    pub include_weights: Vec<String>,
    /// Names of tensors, or parts of names, whose importance is not used.
    pub exclude_weights: Vec<String>,
    /// Threads that compute; 0 for one per core.
    pub threads: usize,
    /// The most bytes of buffers; one chunk of rows per thread is always allowed.
    pub memory: usize,
}

impl QuantizeOptions {
    /// The defaults, for a type or mix.
    pub fn new(file_type: FileType) -> QuantizeOptions {
        QuantizeOptions {
            file_type,
            output_type: None,
            embedding_type: None,
            tensor_types: Vec::new(),
            leave_output: false,
            pure: false,
            only_copy: false,
            pruned: PrunedLayers::default(),
            allow_requantize: false,
            keep_split: false,
            overrides: Vec::new(),
            include_weights: Vec::new(),
            exclude_weights: Vec::new(),
            threads: 0,
            memory: 256 << 20,
        }
    }

    /// The number of threads.
    pub(crate) fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, Into::into),
            count => count,
        }
    }

    /// Whether the importance of a tensor is used.
    pub(crate) fn uses_importance(&self, name: &str) -> bool {
        let among = |list: &[String]| list.iter().any(|part| name.contains(part.as_str()));
        (self.include_weights.is_empty() || among(&self.include_weights)) && !among(&self.exclude_weights)
    }
}

/// A type for all tensors whose name matches.
#[derive(Clone, Debug)]
pub struct TensorType {
    /// Matches a part of the name.
    pub pattern: Regex,
    /// The type.
    pub dtype: DType,
}

/// Parses the name of a type that tensors can have.
pub fn parse_type(name: &str) -> Result<DType, QuantizeError> {
    let known = || {
        let names = DType::all().filter(|dtype| is_target(*dtype)).map(DType::name);
        names.collect::<Vec<_>>().join(", ")
    };
    DType::from_name(name)
        .filter(|dtype| is_target(*dtype))
        .ok_or_else(|| QuantizeError::UnknownType { name: name.to_owned(), known: known() })
}

impl TensorType {
    /// Parses `REGEX=TYPE`; the expression ignores case, as names of tensors are in lower case.
    pub fn parse(text: &str) -> Result<TensorType, QuantizeError> {
        let wrong = |reason: String| QuantizeError::TensorType { text: text.to_owned(), reason };
        let (pattern, name) = text.rsplit_once('=').ok_or_else(|| wrong("there is no =".to_owned()))?;
        if pattern.is_empty() {
            return Err(wrong("there is no expression before =".to_owned()));
        }
        let pattern = Regex::new(&lower_case(pattern)).map_err(|error| wrong(error.to_string()))?;
        let dtype = parse_type(name).map_err(|error| wrong(error.to_string()))?;
        Ok(TensorType { pattern, dtype })
    }
}

/// An expression with its letters in lower case, but for classes such as `\D`. Matching without case would need a table of all letters
/// of Unicode, which only some builds have.
fn lower_case(pattern: &str) -> String {
    let mut is_escaped = false;
    let lower = |letter: char| {
        let kept = is_escaped;
        is_escaped = letter == '\\' && !is_escaped;
        if kept { letter } else { letter.to_ascii_lowercase() }
    };
    pattern.chars().map(lower).collect()
}

/// Parses `KEY=TYPE:VALUE` with the types int, float, bool and str. A float is kept with 64 bits for keys that have as many in the
/// input; those of others are written with 32.
pub fn parse_override(text: &str) -> Result<(String, OwnedValue), QuantizeError> {
    let wrong = |reason: &str| QuantizeError::Override { text: text.to_owned(), reason: reason.to_owned() };
    let (key, rest) = text.split_once('=').ok_or_else(|| wrong("there is no ="))?;
    let (kind, value) = rest.split_once(':').ok_or_else(|| wrong("there is no : after the type"))?;
    if key.is_empty() {
        return Err(wrong("there is no key before ="));
    }
    if key.starts_with("split.") {
        return Err(wrong("the keys of split.* are those of a model's parts, and follow from them"));
    }
    let value: OwnedValue = match kind {
        "int" => integer(value.parse().map_err(|_| wrong("the value is not an integer"))?),
        "float" => value.parse::<f64>().map_err(|_| wrong("the value is not a number"))?.into(),
        "bool" => value.parse::<bool>().map_err(|_| wrong("the value must be true or false"))?.into(),
        "str" => value.into(),
        _ => return Err(wrong("the type must be int, float, bool or str")),
    };
    Ok((key.to_owned(), value))
}

/// An integer in the type that keys of files mostly have: 32 bits, without a sign where there is none.
fn integer(number: i64) -> OwnedValue {
    match (u32::try_from(number), i32::try_from(number)) {
        (Ok(number), _) => number.into(),
        (_, Ok(number)) => number.into(),
        _ => number.into(),
    }
}
