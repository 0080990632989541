//! What a model file holds, in a page.

use std::{
    collections::BTreeMap,
    fmt::{self, Write},
};

use quadriga_graph::DType;

use crate::{file::File, from_value::FromValue, known, value::Value};

/// A model file in short: what it is, how large, and what it needs to run.
///
/// Fields that a file does not tell are `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Version of the file format.
    pub version: u32,
    /// How many files the model is in.
    pub parts: usize,
    /// Bytes of all files together.
    pub file_bytes: u64,
    /// How many keys the metadata has.
    pub keys: usize,
    /// The architecture: "llama".
    pub architecture: Option<String>,
    /// The model's name.
    pub name: Option<String>,
    /// The size that its makers give it: "135M".
    pub size_label: Option<String>,
    /// The licence.
    pub license: Option<String>,
    /// What most tensors are quantized to, as its makers name it: "Q4_K_M".
    pub file_type: Option<String>,
    /// How many tensors there are.
    pub tensors: usize,
    /// Elements of all tensors together.
    pub parameters: u64,
    /// Bytes of all tensors together.
    pub tensor_bytes: u64,
    /// Tensors by type, those with the most bytes first.
    pub types: Vec<TypeTotal>,
    /// The numbers that make the model's shape, as "blocks" = "30": only those that the file has.
    pub dimensions: Vec<(&'static str, String)>,
    /// The tokenizer, if the file has one.
    pub tokenizer: Option<TokenizerSummary>,
}

/// All tensors of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeTotal {
    /// The type.
    pub dtype: DType,
    /// How many tensors have it.
    pub tensors: usize,
    /// Their elements.
    pub parameters: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The tokenizer in short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerSummary {
    /// The kind of tokenizer: "gpt2" for byte-pair encoding, "llama" for pieces with scores.
    pub model: String,
    /// The rule that splits text before byte-pair encoding.
    pub pre: Option<String>,
    /// How many tokens there are.
    pub tokens: usize,
    /// How many merges there are.
    pub merges: usize,
    /// The tokens with a special role that the file names: "begin" = 1.
    pub special: Vec<(&'static str, u64)>,
    /// Whether there is a chat template.
    pub chat_template: bool,
}

/// What the numbers under the architecture's name are called.
const DIMENSIONS: &[(&str, &str)] = &[
    ("blocks", "block_count"),
    ("context", "context_length"),
    ("embedding", "embedding_length"),
    ("feed forward", "feed_forward_length"),
    ("heads", "attention.head_count"),
    ("key/value heads", "attention.head_count_kv"),
    ("experts", "expert_count"),
    ("experts used", "expert_used_count"),
    ("vocabulary", "vocab_size"),
    ("rope dimensions", "rope.dimension_count"),
    ("rope base", "rope.freq_base"),
];

const SPECIAL: &[(&str, &str)] = &[
    ("begin", "tokenizer.ggml.bos_token_id"),
    ("end", "tokenizer.ggml.eos_token_id"),
    ("unknown", "tokenizer.ggml.unknown_token_id"),
    ("padding", "tokenizer.ggml.padding_token_id"),
];

/// The values of `general.file_type` that makers of models use.
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
];

impl Summary {
    /// Summarizes a file.
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

/// The value of a key, where another type is as good as absent.
fn optional<'a, T: FromValue<'a>>(file: &'a File, key: &str) -> Option<T> {
    file.value(key).and_then(T::from_value)
}

fn file_type(id: u32) -> String {
    match FILE_TYPES.iter().find(|(known, _)| *known == id) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("type {id}"),
    }
}

/// A number, or the range of an array of numbers with one per block.
fn brief(value: Value<'_>) -> String {
    let Some(numbers) = Vec::<i64>::from_value(value) else { return value.to_string() };
    match (numbers.iter().min(), numbers.iter().max()) {
        (Some(least), Some(most)) if least == most => least.to_string(),
        (Some(least), Some(most)) => format!("{least} to {most}, by block"),
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

/// A number of things, shortened: 134515008 as "134.5 M".
fn short(count: u64) -> String {
    let count = count as f64;
    match [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")].iter().find(|(unit, _)| count >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", count / unit),
        None => format!("{count}"),
    }
}

/// A number of bytes, shortened: 98765432 as "94.2 MiB".
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
        let told = [
            ("architecture", &self.architecture),
            ("name", &self.name),
            ("size label", &self.size_label),
            ("license", &self.license),
            ("quantization", &self.file_type),
        ];
        for (label, text) in told {
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
                "{:>5} tensors {:>9} parameters {:>11} {bits:>6.2} bits each",
                total.tensors,
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
    // A file's text goes to people's terminals: it may not move the cursor there, or worse.
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
