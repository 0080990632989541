//! `quadriga synth`: writes a GGUF file of any shape and type with random weights, for benchmarks and tests.

mod vocabulary;
mod weights;

use std::path::PathBuf;

use clap::ValueEnum;
use quadriga_gguf::Writer;
use quadriga_graph::DType;
use quadriga_view::format::plural;

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
    /// Model architecture
    #[arg(long, value_enum, default_value = "llama")]
    arch: Arch,
    /// Number of layers [default: 2]
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
    /// Context length in the metadata
    #[arg(long, value_name = "N", default_value_t = 4096, allow_negative_numbers = true, value_parser = context_length)]
    context: u32,
    /// Data type of the matrices: f32, f16, bf16, q4_0 … q6_k, iq4_nl, iq4_xs, mxfp4
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

#[derive(Clone, Copy, ValueEnum)]
enum Preset {
    /// Llama 7B: 32 layers, 4096 wide, vocabulary of 32000
    #[value(name = "7b")]
    Llama7B,
    /// Llama 3 8B: 32 layers, 4096 wide, 8 KV heads, vocabulary of 128256
    #[value(name = "8b")]
    Llama8B,
    /// SmolLM2 135M: 30 layers, 576 wide, 3 KV heads, vocabulary of 49152
    #[value(name = "135m")]
    Smol135M,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Arch {
    Llama,
    Qwen2,
    Qwen3,
}

impl Arch {
    fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
        }
    }
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

/// The dimensions of the model, with defaults filled in.
#[derive(Clone, Copy)]
struct ModelShape {
    layers: usize,
    width: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
}

/// The largest value of any dimension: keeps products of two dimensions within `usize`.
const MAX_DIMENSION: usize = 1 << 24;

impl ModelShape {
    fn of(arguments: &SynthArgs) -> Outcome<ModelShape> {
        let (layers, width, ffn, heads, kv_heads, vocab) = match arguments.preset {
            Some(Preset::Llama7B) => (32, 4096, Some(11008), 32, Some(32), 32000),
            Some(Preset::Llama8B) => (32, 4096, Some(14336), 32, Some(8), 128_256),
            Some(Preset::Smol135M) => (30, 576, Some(1536), 9, Some(3), 49152),
            None => (2, 64, None, 4, None, 512),
        };
        let width = arguments.width.unwrap_or(width);
        let heads = arguments.heads.unwrap_or(heads);
        let shape = ModelShape {
            layers: arguments.layers.unwrap_or(layers),
            width,
            ffn: arguments.ffn.or(ffn).unwrap_or(width.saturating_mul(2)),
            heads,
            kv_heads: arguments.kv_heads.or(kv_heads).unwrap_or(heads),
            vocab: arguments.vocab.unwrap_or(vocab),
        };
        let usage = |text: String| Err(Failure::Usage(text));
        for (name, value) in [
            ("--layers", shape.layers),
            ("--width", shape.width),
            ("--ffn", shape.ffn),
            ("--heads", shape.heads),
            ("--kv-heads", shape.kv_heads),
            ("--vocab", shape.vocab),
        ] {
            if value == 0 || value > MAX_DIMENSION {
                return usage(format!("{name} is {value}; it must be from 1 to {MAX_DIMENSION}"));
            }
        }
        if !width.is_multiple_of(2 * heads) {
            return usage(format!(
                "a width of {width} cannot be divided into {} of even size",
                plural(heads, "head", "heads")
            ));
        }
        if !heads.is_multiple_of(shape.kv_heads) {
            return usage(format!(
                "--kv-heads {} does not divide {}",
                shape.kv_heads,
                plural(heads, "head", "heads")
            ));
        }
        if !arguments.no_vocab && shape.vocab < vocabulary::MIN_TOKENS {
            return usage(format!(
                "the byte-level vocabulary needs at least {} tokens; use a larger --vocab, or --no-vocab",
                vocabulary::MIN_TOKENS
            ));
        }
        Ok(shape)
    }
}

/// Writes the file.
pub(crate) fn synth(arguments: &SynthArgs) -> Outcome {
    let shape = ModelShape::of(arguments)?;
    let ctrl_c = interrupt::catch();
    let mut writer = Writer::new();
    metadata(&mut writer, arguments, shape)?;
    let mut weights = RandomWeights::new(arguments.seed, &ctrl_c);
    tensors(&mut writer, &mut weights, arguments, shape)?;
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

fn metadata(writer: &mut Writer<'_>, arguments: &SynthArgs, shape: ModelShape) -> quadriga_gguf::Result<()> {
    let arch = arguments.arch.name();
    writer.set("general.architecture", arch)?;
    writer.set("general.name", format!("random {} × {}", shape.layers, shape.width))?;
    for (key, value) in [
        ("vocab_size", shape.vocab),
        ("context_length", arguments.context as usize),
        ("embedding_length", shape.width),
        ("block_count", shape.layers),
        ("feed_forward_length", shape.ffn),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("rope.dimension_count", shape.width / shape.heads),
    ] {
        writer.set(&format!("{arch}.{key}"), value as u32)?;
    }
    writer.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5f32)?;
    writer.set(&format!("{arch}.rope.freq_base"), 10_000f32)?;
    if arguments.no_vocab { vocabulary::none(writer) } else { vocabulary::bytes(writer, shape.vocab) }
}

fn tensors<'a>(
    writer: &mut Writer<'a>,
    weights: &mut RandomWeights<'a>,
    arguments: &SynthArgs,
    shape: ModelShape,
) -> quadriga_gguf::Result<()> {
    let ModelShape { layers, width, ffn, heads, kv_heads, vocab } = shape;
    let head = width / heads;
    let dtype = arguments.dtype;
    weights.matrix(writer, "token_embd.weight", dtype, [vocab, width])?;
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        weights.norm(writer, &name("attn_norm.weight"), width)?;
        for (part, rows) in [("attn_q", width), ("attn_k", kv_heads * head), ("attn_v", kv_heads * head)] {
            weights.matrix(writer, &name(&format!("{part}.weight")), dtype, [rows, width])?;
            if arguments.arch == Arch::Qwen2 {
                weights.bias(writer, &name(&format!("{part}.bias")), rows)?;
            }
        }
        if arguments.arch == Arch::Qwen3 {
            weights.norm(writer, &name("attn_q_norm.weight"), head)?;
            weights.norm(writer, &name("attn_k_norm.weight"), head)?;
        }
        weights.matrix(writer, &name("attn_output.weight"), dtype, [width, width])?;
        weights.norm(writer, &name("ffn_norm.weight"), width)?;
        weights.matrix(writer, &name("ffn_gate.weight"), dtype, [ffn, width])?;
        weights.matrix(writer, &name("ffn_up.weight"), dtype, [ffn, width])?;
        weights.matrix(writer, &name("ffn_down.weight"), dtype, [width, ffn])?;
    }
    weights.norm(writer, "output_norm.weight", width)?;
    if !arguments.tied {
        weights.matrix(writer, "output.weight", dtype, [vocab, width])?;
    }
    Ok(())
}
