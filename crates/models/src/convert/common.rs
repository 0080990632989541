//! The keys and tensors that most architectures share.

use super::builder::FileBuilder;
use super::config::Config;
use super::error::{ConvertResult, invalid};
use super::output::{ElementMap, OutputTensor};
use super::source::Source;

/// Which rows of queries and keys a rotary embedding pairs in the converted file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RopeRows {
    /// As in the model's own files.
    Kept,
    /// The files pair the halves of a head, and the architecture adjacent rows.
    Interleaved,
}

/// The parts of a layer as most models call them, and their names in GGUF files.
const LAYER_PARTS: &[(&str, &str)] = &[
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// How the tensors of a family's layers become those of the file.
pub(super) struct LayerRules {
    pub(super) rope: RopeRows,
    /// Whether norms are stored as differences from 1.
    pub(super) norms_plus_one: bool,
    /// Parts that are called otherwise than in most models; they come first.
    pub(super) parts: &'static [(&'static str, &'static str)],
}

impl LayerRules {
    pub(super) const PLAIN: LayerRules =
        LayerRules { rope: RopeRows::Kept, norms_plus_one: false, parts: &[] };
    pub(super) const INTERLEAVED: LayerRules =
        LayerRules { rope: RopeRows::Interleaved, ..LayerRules::PLAIN };

    /// Adds the ordinary tensors of a layer, whose names begin with `from`.
    pub(super) fn layer(&self, builder: &mut FileBuilder<'_>, from: &str, layer: usize) -> ConvertResult<()> {
        let known = |part: &str| self.parts.iter().any(|(own, _)| *own == part);
        let common = LAYER_PARTS.iter().filter(|(part, _)| !known(part));
        for (part, name) in self.parts.iter().chain(common) {
            for end in [".weight", ".bias"] {
                if let Some(source) = builder.find(&format!("{from}{part}{end}"))? {
                    let tensor = self.tensor(builder, &format!("blk.{layer}.{name}{end}"), source)?;
                    builder.push(tensor);
                }
            }
        }
        Ok(())
    }

    /// A tensor with what its name asks for.
    pub(super) fn tensor(
        &self,
        builder: &FileBuilder<'_>,
        name: &str,
        source: Source,
    ) -> ConvertResult<OutputTensor> {
        let part = name.rsplit('.').nth(1).unwrap_or(name);
        let heads = match part {
            "attn_q" => builder.heads.0,
            "attn_k" => builder.heads.1,
            _ => 0,
        };
        if self.rope == RopeRows::Interleaved && heads > 0 {
            return interleaved(name, source, heads);
        }
        let shifted =
            self.norms_plus_one && part.ends_with("_norm") && part != "ssm_norm" && name.ends_with(".weight");
        let tensor = OutputTensor::whole(name, source);
        Ok(if shifted { tensor.mapped(ElementMap::AddOne) } else { tensor })
    }

    /// Adds embedding, final norm and output matrix.
    pub(super) fn globals(&self, builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
        let embedding = builder.need("embed_tokens.weight")?;
        let tensor = embedding_rows(builder, "token_embd.weight", embedding);
        builder.push(tensor);
        let norm = builder.need("norm.weight")?;
        let tensor = self.tensor(builder, "output_norm.weight", norm)?;
        builder.push(tensor);
        output_matrix(builder)
    }
}

/// The rows of an embedding that the tokenizer has tokens for.
pub(super) fn embedding_rows(builder: &FileBuilder<'_>, name: &str, source: Source) -> OutputTensor {
    let rows = builder.tokens.unwrap_or(usize::MAX).min(source.rows());
    let columns = source.columns();
    OutputTensor::whole(name, source).with_dims(vec![rows, columns])
}

/// Adds the output matrix, unless it is the embedding.
pub(super) fn output_matrix(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let flag = builder.config.flag("tie_word_embeddings")?;
    let (tied, mut found) = (flag.unwrap_or(false), false);
    for name in ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "output.weight"] {
        if !builder.store.has(name) {
            continue;
        }
        found = true;
        if tied {
            builder.store.ignore(name);
        } else if let Some(source) = builder.store.find(name)? {
            let tensor = embedding_rows(builder, "output.weight", source);
            builder.push(tensor);
        }
    }
    // Models of embeddings have no output matrix, whatever their configuration says.
    let class = builder.config.class();
    let has_head = !class.ends_with("Model") || class.ends_with("LMHeadModel");
    if flag == Some(false) && !found && has_head {
        let reason = "it is false, but the files have no lm_head.weight: they are incomplete";
        return Err(invalid("config.json", "tie_word_embeddings", reason));
    }
    Ok(())
}

/// A tensor of queries or keys whose halves of heads become pairs of rows.
fn interleaved(name: &str, source: Source, heads: usize) -> ConvertResult<OutputTensor> {
    let rows = if source.shape.len() == 1 { source.columns() } else { source.rows() };
    let length = rows.checked_div(heads).unwrap_or(0);
    if length == 0 || !length.is_multiple_of(2) || length * heads != rows {
        return Err(super::source::wrong_shape(&source, &format!("rows of {heads} heads of even length")));
    }
    Ok(OutputTensor::permuted(name, source, move |row| {
        let (head, within) = (row / length, row % length);
        head * length + within % 2 * (length / 2) + within / 2
    }))
}

/// The keys that most architectures have.
pub(super) fn common_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let config = builder.config;
    builder.set_count("block_count", builder.layers);
    let context =
        ["max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "model_max_length"];
    let context = config.find_count(&context)?.unwrap_or(2048);
    builder.set_count("context_length", context);
    builder.set_count("embedding_length", config.count(&["hidden_size", "n_embd", "d_model"])?);
    // Some models have a list, one per layer.
    let inner = ["intermediate_size", "n_inner"];
    if config.value(&inner).is_some_and(|value| !value.is_array()) {
        builder.copy_count("feed_forward_length", &inner)?;
    }
    builder.set_count("attention.head_count", builder.heads.0);
    builder.set_count("attention.head_count_kv", builder.heads.1);
    builder.copy_number("attention.layer_norm_rms_epsilon", &["rms_norm_eps", "norm_eps"])?;
    builder.copy_number("attention.layer_norm_epsilon", &["layer_norm_eps", "layer_norm_epsilon"])?;
    if let Some(length) = config.find_count(&["head_dim"])? {
        builder.set_count("attention.key_length", length);
        builder.set_count("attention.value_length", length);
    }
    builder.copy_count("vocab_size", &["vocab_size"])?;
    rope_keys(builder)
}

/// The parameters of the rotary embedding: those of layers that attend to everything, where they differ.
pub(super) fn rope_parameters(config: &Config) -> ConvertResult<Option<Config>> {
    let all = config.object(&["rope_parameters", "rope_scaling"])?;
    let Some(all) = all else { return Ok(None) };
    Ok(Some(all.object(&["full_attention"])?.unwrap_or(all)))
}

/// The same for layers with a sliding window.
pub(super) fn window_rope_base(config: &Config) -> ConvertResult<Option<f64>> {
    let all = config.object(&["rope_parameters", "rope_scaling"])?;
    let own = all.and_then(|all| all.object(&["sliding_attention"]).transpose()).transpose()?;
    match own {
        Some(own) => own.find_number(&["rope_theta"]),
        None => config.find_number(&["rope_local_base_freq", "local_rope_theta", "swa_rope_theta"]),
    }
}

fn rope_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let config = builder.config;
    let parameters = rope_parameters(config)?;
    let own = match &parameters {
        Some(parameters) => parameters.find_number(&["rope_theta"])?,
        None => None,
    };
    if let Some(base) =
        own.map_or_else(|| config.find_number(&["rope_theta", "rotary_emb_base"]), |base| Ok(Some(base)))?
    {
        builder.set_number("rope.freq_base", base);
    }
    let Some(parameters) = parameters else { return Ok(()) };
    let kind = parameters.text(&["rope_type", "type"])?.unwrap_or("default").to_ascii_lowercase();
    let factor = positive(&parameters, "factor")?;
    match (kind.as_str(), factor) {
        // Llama 3's factors are a tensor, and Phi's two tensors: check_rope_factors finds out whether the family has them.
        ("default" | "llama3" | "longrope" | "su" | "mrope", _) => {}
        ("linear", Some(factor)) => {
            builder.set("rope.scaling.type", "linear");
            builder.set_number("rope.scaling.factor", factor);
        }
        ("yarn", Some(factor)) => {
            builder.set("rope.scaling.type", "yarn");
            builder.set_number("rope.scaling.factor", factor);
            let original = parameters.find_count(&["original_max_position_embeddings"])?;
            let original = original
                .map_or_else(|| config.find_count(&["original_max_position_embeddings"]), |n| Ok(Some(n)))?;
            match original.or(config.find_count(&["max_position_embeddings"])?) {
                Some(original) => builder.set_count("rope.scaling.original_context_length", original),
                None => return Err(config.missing(&["original_max_position_embeddings"])),
            }
            for (key, from) in [
                ("rope.scaling.yarn_ext_factor", "extrapolation_factor"),
                ("rope.scaling.yarn_beta_fast", "beta_fast"),
                ("rope.scaling.yarn_beta_slow", "beta_slow"),
            ] {
                if let Some(value) = parameters.find_number(&[from])? {
                    builder.set_number(key, value);
                }
            }
            if let Some(wanted) = yarn_attention_factor(&parameters, factor)? {
                // The graphs multiply this key by YaRN's own factor, unless nothing is extrapolated.
                let extrapolates = parameters.find_number(&["extrapolation_factor"])? != Some(0.0);
                let own = if extrapolates { yarn_magnitude(factor, 1.0) } else { 1.0 };
                builder.set_number("rope.scaling.attn_factor", wanted / own);
            }
        }
        _ => return Err(config.unsupported("rope_parameters.rope_type", &kind)),
    }
    Ok(())
}

/// A number of the rotary embedding's parameters that must be greater than 0.
pub(super) fn positive(parameters: &Config, key: &str) -> ConvertResult<Option<f64>> {
    match parameters.find_number(&[key])? {
        Some(number) if number <= 0.0 => {
            let reason = format!("it is {number}; it must be greater than 0");
            Err(invalid("config.json", format!("rope_parameters.{key}"), reason))
        }
        number => Ok(number),
    }
}

/// The factor by which YaRN multiplies rotated elements, where the configuration has another one than YaRN's own.
pub(super) fn yarn_attention_factor(parameters: &Config, factor: f64) -> ConvertResult<Option<f64>> {
    if let Some(given) = positive(parameters, "attention_factor")? {
        return Ok(Some(given));
    }
    let is_given = |number: &f64| *number != 0.0;
    let one = parameters.find_number(&["mscale"])?.filter(is_given);
    let all = parameters.find_number(&["mscale_all_dim"])?.filter(is_given);
    let (Some(one), Some(all)) = (one, all) else { return Ok(None) };
    let wanted = yarn_magnitude(factor, one) / yarn_magnitude(factor, all);
    if wanted > 0.0 && wanted.is_finite() {
        return Ok(Some(wanted));
    }
    let reason =
        format!("{one} and {all} of mscale_all_dim give the factor {wanted}; it must be greater than 0");
    Err(invalid("config.json", "rope_parameters.mscale", reason))
}

fn yarn_magnitude(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 1.0 + 0.1 * scale * factor.ln() }
}

/// An error if the configuration scales frequencies by factors for which the family has no tensor.
pub(super) fn check_rope_factors(builder: &FileBuilder<'_>) -> ConvertResult<()> {
    let Some(parameters) = rope_parameters(builder.config)? else { return Ok(()) };
    let Some(kind) = parameters.text(&["rope_type", "type"])? else { return Ok(()) };
    let needed: &[&str] = match kind.to_ascii_lowercase().as_str() {
        "llama3" => &["rope_freqs.weight"],
        "longrope" | "su" => &["rope_factors_long.weight", "rope_factors_short.weight"],
        _ => &[],
    };
    let has = |name: &&str| builder.tensors.iter().any(|tensor| tensor.name == **name);
    if needed.iter().all(has) {
        Ok(())
    } else {
        Err(builder.config.unsupported("rope_parameters.rope_type", kind))
    }
}

/// An error unless the layers without rotary embedding are every `period`th, as in the architecture's graph.
pub(super) fn require_rope_period(builder: &FileBuilder<'_>, period: usize) -> ConvertResult<()> {
    let config = builder.config;
    let list = config.numbers("no_rope_layers")?.filter(|list| !list.is_empty());
    match list {
        // 1 for layers with it.
        Some(list) => {
            let rotates = |layer: usize| !(layer + 1).is_multiple_of(period);
            require_layout(builder, "no_rope_layers", &list, rotates)
        }
        None => builder.require("no_rope_layer_interval", &[&period.to_string()]),
    }
}

/// An error unless a list has a number for each layer, which is not 0 in those that `expected` names.
pub(super) fn require_layout(
    builder: &FileBuilder<'_>,
    key: &str,
    list: &[f64],
    expected: impl Fn(usize) -> bool,
) -> ConvertResult<()> {
    let same = list.iter().enumerate().all(|(layer, kind)| (*kind != 0.0) == expected(layer));
    if list.len() == builder.layers && same {
        return Ok(());
    }
    let shown: Vec<String> = list.iter().take(8).map(f64::to_string).collect();
    let more = if list.len() > 8 { ", …" } else { "" };
    let text = format!("[{}{more}] for {} layers", shown.join(", "), builder.layers);
    Err(builder.config.unsupported(key, text))
}

/// Llama 3's factors of the frequencies, as a tensor.
pub(super) fn llama3_factors(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let Some(parameters) = rope_parameters(builder.config)? else { return Ok(()) };
    if parameters.text(&["rope_type", "type"])? != Some("llama3") {
        return Ok(());
    }
    let base = match parameters.find_number(&["rope_theta"])? {
        Some(base) => base,
        None => builder.config.find_number(&["rope_theta"])?.unwrap_or(10_000.0),
    };
    let length = builder.head_length()?;
    let number =
        |key: &str, default: f64| parameters.find_number(&[key]).map(|found| found.unwrap_or(default));
    let (factor, low, high) =
        (number("factor", 8.0)?, number("low_freq_factor", 1.0)?, number("high_freq_factor", 4.0)?);
    let original = number("original_max_position_embeddings", 8192.0)?;
    if !(factor > 0.0 && low > 0.0 && high > low && original > 0.0 && base > 1.0) {
        return Err(invalid("config.json", "rope_scaling", "factors of llama3 that contradict each other"));
    }
    let factors = (0..length / 2).map(|pair| {
        let wavelength = std::f64::consts::TAU * base.powf(2.0 * pair as f64 / length as f64);
        let scaled = if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        scaled as f32
    });
    let factors = factors.collect();
    builder.push(OutputTensor::constant("rope_freqs.weight", factors));
    Ok(())
}
