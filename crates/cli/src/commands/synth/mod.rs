//! `quadriga synth`: writes a GGUF file of any shape and type with random weights, for benchmarks and tests.

mod shapes;
mod vocabulary;
mod weights;

use std::path::PathBuf;

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_llm::models;
use quadriga_view::format::plural;

use self::shapes::{KeyValue, Keys, Preset};
use self::weights::RandomWeights;
use crate::failure::{Failure, Outcome};
use crate::{interrupt, values};

/// Arguments of `quadriga synth`.
#[derive(clap::Args)]
pub(crate) struct SynthArgs {
    /// Output file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Known model shape, which the options below change
    #[arg(long, value_enum)]
    preset: Option<Preset>,
    /// Model architecture: llama, qwen3moe, gpt-oss, gemma3, bert … [default: the preset's, else llama]
    #[arg(long, value_name = "NAME")]
    arch: Option<String>,
    /// Number of layers [default: 2; 4 with recurrent layers]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    layers: Option<usize>,
    /// Embedding width [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    width: Option<usize>,
    /// Feed-forward width [default: twice the embedding width]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    ffn: Option<usize>,
    /// Number of attention heads [default: 4]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    heads: Option<usize>,
    /// Number of KV heads [default: number of attention heads]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    kv_heads: Option<usize>,
    /// Vocabulary size [default: 512]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    vocab: Option<usize>,
    /// Number of experts, in architectures that have them [default: 4]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    experts: Option<usize>,
    /// Number of experts that a token uses [default: 2]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::whole)]
    experts_used: Option<usize>,
    /// Context length in the metadata
    #[arg(long, value_name = "N", default_value_t = 4096, allow_negative_numbers = true, value_parser = context_length)]
    context: u32,
    /// Data type of the matrices: f32, f16, bf16, q4_0 … q6_k, iq1_s … iq4_xs, tq1_0, tq2_0, mxfp4, nvfp4
    #[arg(long = "type", value_name = "TYPE", default_value = "q4_0", value_parser = matrix_type)]
    dtype: DType,
    /// Random seed
    #[arg(short, long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::fixed_seed)]
    seed: u64,
    /// Tie the output matrix to the token embedding
    #[arg(long)]
    tied: bool,
    /// Write no vocabulary: the model can be benchmarked, but not used with text
    #[arg(long)]
    no_vocab: bool,
}

fn context_length(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err(format!("must be a whole number from 1 to {}", u32::MAX)),
        Ok(number) => Ok(number),
    }
}

fn matrix_type(name: &str) -> Result<DType, String> {
    let known = || DType::all().filter(|dtype| dtype.is_computable());
    known().find(|dtype| dtype.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<String> = known().map(|dtype| dtype.name().to_lowercase()).collect();
        format!("must be one of {}", names.join(", "))
    })
}

/// The largest value of any dimension: keeps products of two dimensions within `usize`.
const MAX_DIMENSION: usize = 1 << 24;

/// Writes the file.
pub(crate) fn synth(arguments: &SynthArgs) -> Outcome {
    let architecture = arguments.architecture()?;
    let keys = arguments.keys(architecture)?;
    let ctrl_c = interrupt::catch();
    let mut described = Writer::new();
    metadata(&mut described, arguments, architecture, &keys)?;
    let mut bytes = Vec::new();
    described.write_to(&mut bytes)?;
    let optional = |name: &str| shapes::has_optional(architecture, arguments.tied, name);
    let tensors = models::tensors(&File::from_bytes(bytes)?, &optional)
        .map_err(|error| Failure::Usage(format!("{architecture}: {error}")))?;
    let mut writer = Writer::new();
    metadata(&mut writer, arguments, architecture, &keys)?;
    let mut weights = RandomWeights::new(arguments.seed, &ctrl_c);
    for tensor in &tensors {
        weights.tensor(&mut writer, tensor, arguments.dtype)?;
    }
    for (dtype, count) in weights.substitutes() {
        let (wanted, block) = (arguments.dtype, arguments.dtype.block_len());
        note!(
            "quadriga: {} as {dtype} instead of {wanted}, whose rows are whole blocks of {block} elements",
            plural(*count, "matrix is written", "matrices are written")
        );
    }
    match writer.write(&arguments.output) {
        Err(_) if ctrl_c.is_pressed() => Err(Failure::Interrupted),
        result => Ok(result?),
    }
}

impl SynthArgs {
    /// The architecture: as asked for, or the preset's.
    fn architecture(&self) -> Outcome<&'static str> {
        let preset = self.preset.map(Preset::architecture);
        let Some(name) = &self.arch else { return Ok(preset.unwrap_or("llama")) };
        let known = models::architectures().find(|known| known == name);
        let known = known.ok_or_else(|| {
            let names: Vec<_> = models::architectures().collect();
            Failure::Usage(format!("--arch {name} is not one of {}", names.join(", ")))
        })?;
        match preset {
            Some(preset) if preset != known && preset != "llama" => {
                Err(Failure::Usage(format!("--arch {known}: the preset is of architecture {preset}")))
            }
            _ => Ok(known),
        }
    }

    /// The keys of the metadata: those of the small model or the preset, as the options change them.
    fn keys(&self, architecture: &str) -> Outcome<Keys> {
        let small = vec![
            ("block_count", KeyValue::Whole(2)),
            ("embedding_length", KeyValue::Whole(64)),
            ("attention.head_count", KeyValue::Whole(4)),
            ("vocab_size", KeyValue::Whole(512)),
            ("context_length", KeyValue::Whole(self.context as usize)),
        ];
        let mut keys = shapes::with(small, shapes::special(architecture));
        if let Some(preset) = self.preset {
            keys = shapes::with(keys, preset.keys());
        }
        for (flag, key, value) in [
            ("--layers", "block_count", self.layers),
            ("--width", "embedding_length", self.width),
            ("--ffn", "feed_forward_length", self.ffn),
            ("--heads", "attention.head_count", self.heads),
            ("--kv-heads", "attention.head_count_kv", self.kv_heads),
            ("--vocab", "vocab_size", self.vocab),
            ("--experts", "expert_count", self.experts),
            ("--experts-used", "expert_used_count", self.experts_used),
        ] {
            let Some(value) = value else { continue };
            if value == 0 || value > MAX_DIMENSION {
                return Err(Failure::Usage(format!(
                    "{flag} is {value}; it must be from 1 to {MAX_DIMENSION}"
                )));
            }
            keys = shapes::with(keys, vec![(key, KeyValue::Whole(value))]);
        }
        self.fill_in(keys)
    }

    /// Adds the keys that follow from others, and checks what the model does not.
    fn fill_in(&self, mut keys: Keys) -> Outcome<Keys> {
        let find = |keys: &Keys, name: &str| {
            keys.iter().find(|(key, _)| *key == name).and_then(|(_, value)| match value {
                KeyValue::Whole(value) => Some(*value),
                _ => None,
            })
        };
        let get = |keys: &Keys, name: &str| find(keys, name).unwrap_or(1);
        let (width, heads) = (get(&keys, "embedding_length"), get(&keys, "attention.head_count"));
        let usage = |text: String| Err(Failure::Usage(text));
        let default = |keys: &mut Keys, name: &'static str, value: usize| {
            if find(keys, name).is_none() {
                keys.push((name, KeyValue::Whole(value)));
            }
        };
        if find(&keys, "attention.key_length").is_none() && !width.is_multiple_of(2 * heads) {
            return usage(format!(
                "a width of {width} cannot be divided into {} of even size",
                plural(heads, "head", "heads")
            ));
        }
        default(&mut keys, "feed_forward_length", width.saturating_mul(2));
        default(&mut keys, "attention.head_count_kv", heads);
        let key_length = find(&keys, "attention.key_length").unwrap_or(width / heads.max(1));
        default(&mut keys, "rope.dimension_count", key_length);
        let kv_heads = get(&keys, "attention.head_count_kv");
        if !heads.is_multiple_of(kv_heads) {
            return usage(format!(
                "--kv-heads {kv_heads} does not divide {}",
                plural(heads, "head", "heads")
            ));
        }
        if !self.no_vocab && get(&keys, "vocab_size") < vocabulary::MIN_TOKENS {
            return usage(format!(
                "the byte-level vocabulary needs at least {} tokens; use a larger --vocab, or --no-vocab",
                vocabulary::MIN_TOKENS
            ));
        }
        for (key, value) in [
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("attention.layer_norm_epsilon", 1e-5),
            ("rope.freq_base", 10_000.0),
        ] {
            if !keys.iter().any(|(known, _)| *known == key) {
                keys.push((key, KeyValue::Real(value)));
            }
        }
        Ok(keys)
    }
}

fn metadata(
    writer: &mut Writer<'_>,
    arguments: &SynthArgs,
    architecture: &str,
    keys: &Keys,
) -> quadriga_gguf::Result<()> {
    let number = |name: &str| keys.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
    let whole = |name: &str| match number(name) {
        Some(KeyValue::Whole(value)) => value,
        _ => 0,
    };
    writer.set("general.architecture", architecture)?;
    let title = format!("random {} × {}", whole("block_count"), whole("embedding_length"));
    writer.set("general.name", title)?;
    for (key, value) in keys {
        writer.set(&format!("{architecture}.{key}"), *value)?;
    }
    let vocab = whole("vocab_size");
    if arguments.no_vocab { vocabulary::none(writer) } else { vocabulary::bytes(writer, vocab) }
}
