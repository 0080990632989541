//! The summary of a model file.

use std::{
    collections::BTreeMap,
    fmt::{self, Write},
};

use quadriga_graph::DType;

use crate::{file::File, from_value::FromValue, known, value::Value};

/// A summary of a model file: architecture, size, tensor types, dimensions and tokenizer. It prints as a table.
///
/// Fields without a key in the file are `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Version of the file format.
    pub version: u32,
    /// The number of files.
    pub parts: usize,
    /// The total size of all files.
    pub file_bytes: u64,
    /// The number of metadata keys.
    pub keys: usize,
    /// The architecture: "llama".
    pub architecture: Option<String>,
    /// The model's name.
    pub name: Option<String>,
    /// The size label of the authors: "135M".
    pub size_label: Option<String>,
    /// The licence.
    pub license: Option<String>,
    /// The quantization scheme: "Q4_K_M".
    pub file_type: Option<String>,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The size of all tensors in bytes.
    pub tensor_bytes: u64,
    /// Totals per tensor type, largest first.
    pub types: Vec<TypeTotal>,
    /// The hyperparameters that the file has, such as ("layers", "30").
    pub dimensions: Vec<(&'static str, String)>,
    /// The tokenizer, if the file has one.
    pub tokenizer: Option<TokenizerSummary>,
}

/// The totals of one tensor type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeTotal {
    /// The type.
    pub dtype: DType,
    /// The number of tensors.
    pub tensors: usize,
    /// The number of elements.
    pub parameters: u64,
    /// The size in bytes.
    pub bytes: u64,
}

/// A summary of the tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerSummary {
    /// The tokenizer's algorithm: "gpt2" for byte-pair encoding, "llama" for SentencePiece.
    pub model: String,
    /// The pre-tokenizer of byte-pair encoding.
    pub pre: Option<String>,
    /// The size of the vocabulary.
    pub tokens: usize,
    /// The number of merges.
    pub merges: usize,
    /// The ids of the special tokens that the file has, such as ("begin", 1).
    pub special: Vec<(&'static str, u64)>,
    /// Whether there is a chat template.
    pub chat_template: bool,
}

/// Labels of the architecture's hyperparameters.
const DIMENSIONS: &[(&str, &str)] = &[
    ("layers", "block_count"),
    ("context", "context_length"),
    ("embedding", "embedding_length"),
    ("feed forward", "feed_forward_length"),
    ("heads", "attention.head_count"),
    ("KV heads", "attention.head_count_kv"),
    ("experts", "expert_count"),
    ("experts used", "expert_used_count"),
    ("vocabulary", "vocab_size"),
    ("RoPE dimensions", "rope.dimension_count"),
    ("RoPE base", "rope.freq_base"),
];

const SPECIAL: &[(&str, &str)] = &[
    ("BOS", "tokenizer.ggml.bos_token_id"),
    ("EOS", "tokenizer.ggml.eos_token_id"),
    ("unknown", "tokenizer.ggml.unknown_token_id"),
    ("padding", "tokenizer.ggml.padding_token_id"),
];

/// The names of the values of `general.file_type`.
const FILE_TYPES: &[(u32, &str)] = &[
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4_MOE"),
    (39, "NVFP4"),
];

impl Summary {
    /// The summary of a file.
    ///
    /// ```
    /// use quadriga_gguf::{File, Summary, Writer};
    ///
    /// let mut bytes = Vec::new();
    /// let mut writer = Writer::new();
    /// writer.set("general.architecture", "llama")?;
    /// writer.write_to(&mut bytes)?;
    /// let summary = Summary::of(&File::from_bytes(bytes)?);
    /// assert_eq!(summary.architecture.as_deref(), Some("llama"));
    /// println!("{summary}");
    /// # Ok::<(), quadriga_gguf::Error>(())
    /// ```
    pub fn of(file: &File) -> Summary {
        let text = |key| optional::<&str>(file, key).map(str::to_owned);
        let architecture = text(known::ARCHITECTURE);
        let own = |key: &str| file.value(&format!("{}.{key}", architecture.as_deref()?));
        let dimensions =
            DIMENSIONS.iter().filter_map(|(name, key)| Some((*name, brief(own(key)?)))).collect();
        let types = totals(file);
        Summary {
            version: file.version(),
            parts: file.part_count(),
            file_bytes: file.byte_len(),
            keys: file.metadata().len(),
            name: text("general.name"),
            size_label: text("general.size_label"),
            license: text("general.license"),
            file_type: optional(file, "general.file_type").map(file_type),
            tensors: file.tensor_count(),
            parameters: types.iter().fold(0, |sum, total| sum.saturating_add(total.parameters)),
            tensor_bytes: types.iter().map(|total| total.bytes).sum(),
            types,
            dimensions,
            tokenizer: tokenizer(file),
            architecture,
        }
    }
}

/// The value of a key; `None` if it has another type.
fn optional<'a, T: FromValue<'a>>(file: &'a File, key: &str) -> Option<T> {
    file.value(key).and_then(T::from_value)
}

fn file_type(id: u32) -> String {
    match FILE_TYPES.iter().find(|(known, _)| *known == id) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("type {id}"),
    }
}

/// A number, or the range of an array with one number per block.
fn brief(value: Value<'_>) -> String {
    let Some(numbers) = Vec::<i64>::from_value(value) else { return value.to_string() };
    match (numbers.iter().min(), numbers.iter().max()) {
        (Some(min), Some(max)) if min == max => min.to_string(),
        (Some(min), Some(max)) => format!("{min} to {max}, by layer"),
        _ => "none".to_owned(),
    }
}

fn totals(file: &File) -> Vec<TypeTotal> {
    let mut totals = BTreeMap::new();
    for tensor in file.tensors() {
        let dtype = tensor.dtype();
        let total = totals.entry(dtype).or_insert(TypeTotal { dtype, tensors: 0, parameters: 0, bytes: 0 });
        total.tensors += 1;
        total.parameters = total.parameters.saturating_add(tensor.element_count());
        total.bytes += tensor.byte_len() as u64;
    }
    let mut totals: Vec<_> = totals.into_values().collect();
    totals.sort_by_key(|total| std::cmp::Reverse(total.bytes));
    totals
}

fn tokenizer(file: &File) -> Option<TokenizerSummary> {
    let len = |key| match file.value(key) {
        Some(Value::Array(array)) => array.len(),
        _ => 0,
    };
    Some(TokenizerSummary {
        model: optional::<&str>(file, "tokenizer.ggml.model")?.to_owned(),
        pre: optional::<&str>(file, "tokenizer.ggml.pre").map(str::to_owned),
        tokens: len("tokenizer.ggml.tokens"),
        merges: len("tokenizer.ggml.merges"),
        special: SPECIAL.iter().filter_map(|(name, key)| Some((*name, optional(file, key)?))).collect(),
        chat_template: file.value("tokenizer.chat_template").is_some(),
    })
}

/// A count with a unit prefix: 134515008 as "134.5 M".
fn short(count: u64) -> String {
    let count = count as f64;
    match [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")].iter().find(|(unit, _)| count >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", count / unit),
        None => format!("{count}"),
    }
}

/// A size with a binary unit: 98765432 as "94.2 MiB".
fn short_bytes(bytes: u64) -> String {
    let units = [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = if self.parts == 1 { String::new() } else { format!(" in {} files", self.parts) };
        line(f, "format", format!("GGUF version {}, {} keys", self.version, self.keys))?;
        line(f, "size", format!("{}{files}", short_bytes(self.file_bytes)))?;
        let texts = [
            ("architecture", &self.architecture),
            ("name", &self.name),
            ("size label", &self.size_label),
            ("license", &self.license),
            ("quantization", &self.file_type),
        ];
        for (label, text) in texts {
            if let Some(text) = text {
                line(f, label, text)?;
            }
        }
        for (label, text) in &self.dimensions {
            line(f, label, text)?;
        }
        if let Some(tokenizer) = &self.tokenizer {
            line(f, "tokenizer", tokenizer)?;
        }
        line(f, "tensors", self.tensors)?;
        line(f, "parameters", format!("{} ({})", short(self.parameters), self.parameters))?;
        for total in &self.types {
            let bits = total.bytes as f64 * 8.0 / total.parameters.max(1) as f64;
            let text = format!(
                "{:>5} {:<7} {:>9} parameters {:>11} {bits:>6.2} bits per weight",
                total.tensors,
                if total.tensors == 1 { "tensor" } else { "tensors" },
                short(total.parameters),
                short_bytes(total.bytes),
            );
            line(f, &format!("  {}", total.dtype), text)?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, label: &str, text: impl fmt::Display) -> fmt::Result {
    write!(f, "{label:<16} ")?;
    // Text of the file goes to a terminal: control characters are escaped.
    for letter in text.to_string().chars() {
        match letter.is_control() {
            true => write!(f, "{}", letter.escape_default())?,
            false => f.write_char(letter)?,
        }
    }
    writeln!(f)
}

impl fmt::Display for TokenizerSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.model)?;
        if let Some(pre) = &self.pre {
            write!(f, " ({pre})")?;
        }
        write!(f, ", {} tokens, {} merges", self.tokens, self.merges)?;
        for (name, id) in &self.special {
            write!(f, ", {name} {id}")?;
        }
        f.write_str(if self.chat_template { ", chat template" } else { ", no chat template" })
    }
}
