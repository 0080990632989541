//! `quadriga synth`: writes a GGUF file of any shape and type with random weights, for benchmarks and tests.

mod outline;
mod rectified;
mod shapes;
mod topics;
mod vocabulary;
mod weights;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use quadriga_gguf::{File, OwnedValue, Summary, Writer};
use quadriga_graph::DType;
use quadriga_llm::models::{self, TensorSpec};
use quadriga_view::format::plural;

use self::rectified::{Rectified, THRESHOLD_KEY};
pub(crate) use self::shapes::Preset;
use self::shapes::{KeyValue, Keys};
pub(crate) use self::topics::TOPICS_KEY;
use self::topics::Topics;
use self::weights::RandomWeights;
use crate::failure::{Failure, Outcome};
use crate::{interrupt, size, values};

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
    /// Number of layers [default: 2, or as many as one of each kind needs]
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
    /// Context length in the metadata [default: the preset's, else 4096]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = context_length)]
    context: Option<u32>,
    /// Data type of the matrices: f32, f16, bf16, q4_0 … q6_k, iq1_s … iq4_xs, tq1_0, tq2_0, mxfp4, nvfp4 [default: q4_0; of
    /// gpt-oss presets mxfp4 for experts and q8_0]
    #[arg(long = "type", value_name = "TYPE", value_parser = matrix_type)]
    dtype: Option<DType>,
    /// Random seed
    #[arg(short, long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::fixed_seed)]
    seed: u64,
    /// Divide the tokens into N topics, each of which prefers some experts: of a topic's text, `bench --topic` measures what an
    /// expert cache gains [default: 0, experts are chosen at random]
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::whole)]
    topics: usize,
    /// Rectify the feed-forward networks of a llama: few neurons are active, a quarter of them for four fifths of the time;
    /// with the transposed matrices and predictors of PowerInfer's files
    #[arg(long)]
    relu: bool,
    /// Share of the neurons that a token activates, with --relu
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = share, requires = "relu")]
    active: f64,
    /// Write PowerInfer's container
    #[arg(long, requires = "relu")]
    powerinfer: bool,
    /// Tie the output matrix to the token embedding [default: as the preset]
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

fn share(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|share| *share > 0.0 && *share <= 0.5);
    number.ok_or_else(|| "must be above 0 and at most 0.5".to_owned())
}

pub(crate) fn matrix_type(name: &str) -> Result<DType, String> {
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
    let ctrl_c = interrupt::catch();
    let description = arguments.describe()?;
    let mut writer = if arguments.powerinfer { Writer::powerinfer() } else { Writer::new() };
    description.metadata(&mut writer, arguments)?;
    let rectified = description.rectified(arguments)?;
    let mut weights = RandomWeights::new(arguments.seed, &ctrl_c);
    if arguments.topics > 0 {
        let (experts, vocabulary) = (description.number("expert_count"), description.number("vocab_size"));
        if experts == 0 || arguments.topics > vocabulary {
            return Err(Failure::Usage(format!(
                "--topics {}: a model with experts and at least as many tokens is needed",
                arguments.topics
            )));
        }
    }
    let used = description.number("expert_used_count").max(1);
    let topics = (arguments.topics > 0).then(|| Topics::new(arguments.topics, used, arguments.seed));
    let mut substitutes: BTreeMap<(DType, DType), usize> = BTreeMap::new();
    for tensor in &description.tensors {
        let (dtype, wanted) = arguments.type_of(tensor);
        if topics.as_ref().map_or(Ok(false), |topics| topics.tensor(&mut writer, tensor, dtype, &ctrl_c))? {
            continue;
        }
        if rectified.map_or(Ok(false), |own| own.tensor(&mut writer, tensor, dtype, &ctrl_c))? {
            continue;
        }
        if dtype != wanted {
            *substitutes.entry((dtype, wanted)).or_default() += 1;
        }
        weights.tensor(&mut writer, tensor, dtype)?;
    }
    if let Some(rectified) = rectified {
        for layer in 0..description.layers() {
            let neurons = description.number("feed_forward_length");
            rectified.predictor(&mut writer, layer, neurons, &ctrl_c)?;
        }
    }
    for ((dtype, wanted), count) in substitutes {
        let block = wanted.block_len();
        note!(
            "quadriga: {} as {dtype} instead of {wanted}, whose rows are whole blocks of {block} elements",
            plural(count, "matrix is written", "matrices are written")
        );
    }
    match writer.write(&arguments.output) {
        Err(_) if ctrl_c.is_pressed() => return Err(Failure::Interrupted),
        result => result?,
    }
    let file = File::open(&arguments.output)?;
    let summary = Summary::of(&file);
    let types: Vec<String> = summary.types.iter().map(|total| total.dtype.to_string()).collect();
    note!(
        "wrote {}: {}, {}, {:.1} M parameters, {}, {}",
        arguments.output.display(),
        description.architecture,
        plural(description.layers(), "layer", "layers"),
        summary.parameters as f64 / 1e6,
        types.join(" and "),
        size::text(summary.file_bytes)
    );
    Ok(())
}

/// Writes a file that has the shapes of a preset, but no weights, into a folder, so that it can be planned. Its path.
pub(crate) fn outline(preset: Preset, dtype: Option<DType>, folder: &Path) -> Outcome<PathBuf> {
    let name = preset.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
    let arguments = SynthArgs::of(preset, dtype, folder.join(format!("{name}.gguf")));
    outline::write(&arguments, &arguments.output)?;
    Ok(arguments.output)
}

/// What a file is to contain, apart from the values of its weights.
struct Description {
    architecture: &'static str,
    keys: Keys,
    tensors: Vec<TensorSpec>,
}

impl Description {
    fn layers(&self) -> usize {
        self.number("block_count")
    }

    fn number(&self, name: &str) -> usize {
        match self.keys.iter().find(|(key, _)| *key == name) {
            Some((_, KeyValue::Whole(value))) => *value,
            _ => 0,
        }
    }

    /// The KV heads of each layer: every third has attention, the others are short convolutions.
    fn heads_by_layer(&self) -> OwnedValue {
        let heads = u32::try_from(self.number("attention.head_count_kv")).unwrap_or(u32::MAX);
        let of = |layer: usize| if layer % 3 == 2 { heads } else { 0 };
        (0..self.layers()).map(of).collect::<Vec<u32>>().into()
    }

    /// What makes the model's networks rectified, if they are to be.
    fn rectified(&self, arguments: &SynthArgs) -> Outcome<Option<Rectified>> {
        if arguments.relu && self.architecture != "llama" {
            return Err(Failure::Usage(format!(
                "--relu: the architecture is {}, not llama",
                self.architecture
            )));
        }
        let SynthArgs { active, seed, .. } = *arguments;
        let width = self.number("embedding_length");
        Ok(arguments.relu.then_some(Rectified { active, width, seed }))
    }

    fn metadata(&self, writer: &mut Writer<'_>, arguments: &SynthArgs) -> quadriga_gguf::Result<()> {
        writer.set("general.architecture", self.architecture)?;
        let title = format!("random {} × {}", self.layers(), self.number("embedding_length"));
        writer.set("general.name", title)?;
        for (key, value) in &self.keys {
            let value = match *key {
                "attention.head_count_kv" if self.number("shortconv.l_cache") > 0 => self.heads_by_layer(),
                _ => (*value).into(),
            };
            writer.set(&format!("{}.{key}", self.architecture), value)?;
        }
        if arguments.relu {
            writer.set("llama.hidden_activation", "relu")?.set(THRESHOLD_KEY, 0.0f32)?;
        }
        if arguments.topics > 0 {
            writer.set(TOPICS_KEY, arguments.topics as u32)?;
        }
        let encoder = shapes::is_encoder(self.architecture);
        if encoder {
            writer.set("tokenizer.ggml.token_type_count", shapes::TOKEN_TYPES)?;
        }
        let tokens = self.number("vocab_size");
        match arguments.no_vocab {
            true => vocabulary::none(writer),
            false if encoder => vocabulary::word_pieces(writer, tokens),
            false => vocabulary::bytes(writer, tokens),
        }
    }
}

/// Options that set a key of the metadata.
const FLAGS: &[(&str, &str)] = &[
    ("--layers", "block_count"),
    ("--width", "embedding_length"),
    ("--ffn", "feed_forward_length"),
    ("--heads", "attention.head_count"),
    ("--kv-heads", "attention.head_count_kv"),
    ("--vocab", "vocab_size"),
    ("--experts", "expert_count"),
    ("--experts-used", "expert_used_count"),
    ("--context", "context_length"),
];

impl SynthArgs {
    /// The options of a preset, without a vocabulary.
    fn of(preset: Preset, dtype: Option<DType>, output: PathBuf) -> SynthArgs {
        SynthArgs {
            output,
            preset: Some(preset),
            arch: None,
            layers: None,
            width: None,
            ffn: None,
            heads: None,
            kv_heads: None,
            vocab: None,
            experts: None,
            experts_used: None,
            context: None,
            dtype,
            seed: 0,
            topics: 0,
            relu: false,
            active: 0.1,
            powerinfer: false,
            tied: false,
            no_vocab: true,
        }
    }

    /// Keys and tensors of the file.
    fn describe(&self) -> Outcome<Description> {
        let architecture = self.architecture()?;
        if self.tied && shapes::is_never_tied(architecture) {
            return Err(Failure::Usage(format!(
                "{architecture} has an output matrix of its own; leave --tied out"
            )));
        }
        let keys = self.keys(architecture)?;
        let preset_ties = self.preset.is_some_and(Preset::is_tied) && !shapes::is_never_tied(architecture);
        let tied = self.tied || preset_ties;
        let mut description = Description { architecture, keys, tensors: Vec::new() };
        let mut writer = Writer::new();
        description.metadata(&mut writer, self)?;
        let mut bytes = Vec::new();
        writer.write_to(&mut bytes)?;
        let optional = |name: &str| {
            let rectified = name.ends_with(".ffn_down_t.weight") || name.ends_with(".ffn_gate.bias");
            self.relu && rectified || shapes::has_optional(architecture, &description.keys, tied, name)
        };
        let tensors = models::tensors(&File::from_bytes(bytes)?, &optional);
        description.tensors = tensors.map_err(|error| {
            // Users know options, not keys.
            let text = FLAGS.iter().fold(error.to_string(), |text, (flag, key)| {
                text.replace(&format!("key \"{architecture}.{key}\""), flag)
            });
            Failure::Usage(format!("{architecture}: {text}"))
        })?;
        Ok(description)
    }

    /// The type of a tensor, and the one that it would have if its rows were whole blocks of that.
    fn type_of(&self, tensor: &TensorSpec) -> (DType, DType) {
        if tensor.f32_only {
            return (DType::F32, DType::F32);
        }
        let experts = tensor.name.contains("_exps.");
        let default = match self.preset {
            Some(Preset::GptOss20B | Preset::GptOss120B) if experts => DType::MXFP4,
            Some(Preset::GptOss20B | Preset::GptOss120B) => DType::Q8_0,
            _ => DType::Q4_0,
        };
        // Routers are small, and decide much: files have them in full precision.
        let is_router = tensor.name.ends_with("ffn_gate_inp.weight");
        let wanted = if is_router { DType::F32 } else { self.dtype.unwrap_or(default) };
        (weights::fitting(wanted, tensor.dims.last().copied().unwrap_or(1)), wanted)
    }

    /// The architecture: as asked for, or the preset's.
    fn architecture(&self) -> Outcome<&'static str> {
        let preset = self.preset.map(Preset::architecture);
        let Some(name) = &self.arch else { return Ok(preset.unwrap_or("llama")) };
        let known = models::architectures().find(|known| known == name);
        let known = known.ok_or_else(|| {
            let mut names: Vec<_> = models::architectures().collect();
            names.sort_unstable();
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
            ("context_length", KeyValue::Whole(4096)),
        ];
        let mut keys = shapes::with(small, shapes::special(architecture));
        if let Some(preset) = self.preset {
            keys = shapes::with(keys, preset.keys());
        }
        for (flag, key) in FLAGS {
            let value = match *flag {
                "--layers" => self.layers,
                "--width" => self.width,
                "--ffn" => self.ffn,
                "--heads" => self.heads,
                "--kv-heads" => self.kv_heads,
                "--vocab" => self.vocab,
                "--experts" => self.experts,
                "--experts-used" => self.experts_used,
                _ => self.context.map(|context| context as usize),
            };
            let Some(value) = value else { continue };
            if let Some(part) = shapes::missing_part(architecture, flag) {
                return Err(Failure::Usage(format!("{flag}: the layers of {architecture} have no {part}")));
            }
            if value == 0 || (value > MAX_DIMENSION && *flag != "--context") {
                return Err(Failure::Usage(format!(
                    "{flag} is {value}; it must be from 1 to {MAX_DIMENSION}"
                )));
            }
            keys = shapes::with(keys, vec![(key, KeyValue::Whole(value))]);
        }
        self.fill_in(shapes::adjust(keys))
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
        if heads > 0 && find(&keys, "attention.key_length").is_none() && !width.is_multiple_of(2 * heads) {
            return usage(format!(
                "a width of {width} cannot be divided into {} of even size",
                plural(heads, "head", "heads")
            ));
        }
        default(&mut keys, "feed_forward_length", width.saturating_mul(2));
        default(&mut keys, "attention.head_count_kv", heads);
        if let Some(experts) = find(&keys, "expert_count") {
            default(&mut keys, "expert_used_count", experts.min(2));
        }
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
                "the vocabulary needs at least {} tokens; use a larger --vocab, or --no-vocab",
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
