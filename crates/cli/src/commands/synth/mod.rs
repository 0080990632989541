//! `quadriga synth`: a model file of any shape and type with random weights, for benchmarks and tests.

mod vocabulary;
mod weights;

use std::path::PathBuf;

use clap::ValueEnum;
use quadriga_gguf::Writer;
use quadriga_graph::DType;

use self::weights::Source;
use crate::failure::{Failure, Outcome};
use crate::interrupt;

/// The shape of the model to write.
#[derive(clap::Args)]
pub(crate) struct Synth {
    /// The file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Start from a known shape; the options below change it
    #[arg(long, value_enum)]
    preset: Option<Preset>,
    /// The architecture
    #[arg(long, value_enum, default_value = "llama")]
    arch: Arch,
    /// Blocks [2]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Width of the residual stream [64]
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Width of the feed-forward layer [twice the width]
    #[arg(long, value_name = "N")]
    ffn: Option<usize>,
    /// Query heads [4]
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Key and value heads [as many as query heads]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Tokens in the vocabulary [512]
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// The context that the file names
    #[arg(long, value_name = "N", default_value_t = 4096)]
    context: u32,
    /// The type of the matrices: f32, f16, bf16, q4_0 … q6_k, iq4_nl, iq4_xs, mxfp4
    #[arg(long = "type", value_name = "TYPE", default_value = "q4_0", value_parser = matrix_type)]
    dtype: DType,
    /// Where the random numbers start
    #[arg(short, long, default_value_t = 0)]
    seed: u64,
    /// Let the embedding be the output matrix, too
    #[arg(long)]
    tied: bool,
    /// Leave out the words: the model can be benchmarked, but not talked to
    #[arg(long)]
    no_vocab: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Preset {
    /// Llama 7B: 32 blocks, 4096 wide, 32000 tokens
    #[value(name = "7b")]
    Llama7B,
    /// Llama 3 8B: 32 blocks, 4096 wide, 8 key heads, 128256 tokens
    #[value(name = "8b")]
    Llama8B,
    /// SmolLM2 135M: 30 blocks, 576 wide, 3 key heads, 49152 tokens
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

fn matrix_type(name: &str) -> Result<DType, String> {
    let known = || DType::all().filter(|dtype| dtype.is_computable());
    known().find(|dtype| dtype.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let names: Vec<String> = known().map(|dtype| dtype.name().to_lowercase()).collect();
        format!("the types are {}", names.join(", "))
    })
}

/// A shape with everything filled in.
#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    width: usize,
    ffn: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
}

/// More than any model has of anything: keeps sizes within what can be counted.
const MOST: usize = 1 << 24;

impl Shape {
    fn of(arguments: &Synth) -> Outcome<Shape> {
        let (layers, width, ffn, heads, kv_heads, vocab) = match arguments.preset {
            Some(Preset::Llama7B) => (32, 4096, Some(11008), 32, Some(32), 32000),
            Some(Preset::Llama8B) => (32, 4096, Some(14336), 32, Some(8), 128_256),
            Some(Preset::Smol135M) => (30, 576, Some(1536), 9, Some(3), 49152),
            None => (2, 64, None, 4, None, 512),
        };
        let width = arguments.width.unwrap_or(width);
        let heads = arguments.heads.unwrap_or(heads);
        let shape = Shape {
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
            if value == 0 || value > MOST {
                return usage(format!("{name} is {value}; it must be from 1 to {MOST}"));
            }
        }
        if !width.is_multiple_of(2 * heads) {
            return usage(format!("a width of {width} cannot be shared by {heads} heads of even size"));
        }
        if !heads.is_multiple_of(shape.kv_heads) {
            return usage(format!("--kv-heads {} does not divide the {heads} heads", shape.kv_heads));
        }
        if !arguments.no_vocab && shape.vocab < vocabulary::LEAST {
            return usage(format!(
                "a vocabulary of bytes needs at least {} tokens; use a larger --vocab, or --no-vocab",
                vocabulary::LEAST
            ));
        }
        Ok(shape)
    }
}

/// Writes the file.
pub(crate) fn synth(arguments: &Synth) -> Outcome {
    let shape = Shape::of(arguments)?;
    let gentle = interrupt::gently();
    let mut writer = Writer::new();
    metadata(&mut writer, arguments, shape)?;
    let mut source = Source::new(arguments.seed, &gentle);
    tensors(&mut writer, &mut source, arguments, shape)?;
    match writer.write(&arguments.output) {
        Err(_) if gentle.is_interrupted() => Err(Failure::Interrupted),
        result => Ok(result?),
    }
}

fn metadata(writer: &mut Writer<'_>, arguments: &Synth, shape: Shape) -> quadriga_gguf::Result<()> {
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
    source: &mut Source<'a>,
    arguments: &Synth,
    shape: Shape,
) -> quadriga_gguf::Result<()> {
    let Shape { layers, width, ffn, heads, kv_heads, vocab } = shape;
    let head = width / heads;
    let dtype = arguments.dtype;
    source.matrix(writer, "token_embd.weight", dtype, [vocab, width])?;
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        source.norm(writer, &name("attn_norm.weight"), width)?;
        for (part, rows) in [("attn_q", width), ("attn_k", kv_heads * head), ("attn_v", kv_heads * head)] {
            source.matrix(writer, &name(&format!("{part}.weight")), dtype, [rows, width])?;
            if arguments.arch == Arch::Qwen2 {
                source.bias(writer, &name(&format!("{part}.bias")), rows)?;
            }
        }
        if arguments.arch == Arch::Qwen3 {
            source.norm(writer, &name("attn_q_norm.weight"), head)?;
            source.norm(writer, &name("attn_k_norm.weight"), head)?;
        }
        source.matrix(writer, &name("attn_output.weight"), dtype, [width, width])?;
        source.norm(writer, &name("ffn_norm.weight"), width)?;
        source.matrix(writer, &name("ffn_gate.weight"), dtype, [ffn, width])?;
        source.matrix(writer, &name("ffn_up.weight"), dtype, [ffn, width])?;
        source.matrix(writer, &name("ffn_down.weight"), dtype, [width, ffn])?;
    }
    source.norm(writer, "output_norm.weight", width)?;
    if !arguments.tied {
        source.matrix(writer, "output.weight", dtype, [vocab, width])?;
    }
    Ok(())
}
