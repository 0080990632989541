//! What a converted file will contain: keys, tensors and their types. Everything is checked before anything is written.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::DType;
use quadriga_llm::models::{self, TensorSpec};
use serde_json::Value;

use super::builder::FileBuilder;
use super::common::check_rope_factors;
use super::config::{Config, MAX_LIST, MAX_SETTINGS, read_bytes, read_object};
use super::encode::TargetType;
use super::error::{ConvertError, ConvertResult, invalid, io_error, is_regular};
use super::families::{self, Family};
use super::output::OutputTensor;
use super::source::TensorStore;
use super::tokenizer::{self, TokenizerKeys};
use super::{ConvertOptions, safetensors::SafeType};

/// More layers than any model has.
const MAX_LAYERS: usize = 4096;

/// Parts of names of tensors that belong to images or sound, or that are computed anew.
const IGNORED: &[&str] = &[
    "rotary_emb.inv_freq",
    ".attention.masked_bias",
    ".attention.bias",
    "vision_tower.",
    "vision_model.",
    "vision_encoder.",
    "multi_modal_projector.",
    "multimodal_projector.",
    "embed_vision.",
    "embed_audio.",
    "audio_tower.",
    "visual.",
    "model.connector.",
];

/// Tensors that are found by their names, not by the graph.
const BY_NAME: &[&str] = &["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// Ends of the names of tensors whose number of rows decides about the graph: types of tokens, positions that begin with unused
/// rows, and gates that are part of the matrix beside them.
const ROWS_DECIDE: &[&str] =
    &["token_types.weight", "position_embd.weight", "cls.output.weight", ".ffn_up.weight"];

/// A conversion that has been checked.
pub(super) struct ConversionPlan {
    pub(super) architecture: &'static str,
    pub(super) keys: Vec<(String, OwnedValue)>,
    pub(super) tensors: Vec<(OutputTensor, DType)>,
    pub(super) store: TensorStore,
    /// What the user should know about the result.
    pub(super) notes: Vec<String>,
}

impl ConversionPlan {
    /// Reads a folder and decides what becomes of each of its tensors.
    pub(super) fn new(folder: &Path, options: &ConvertOptions) -> ConvertResult<ConversionPlan> {
        let path = folder.join("config.json");
        if !is_regular(&path)? {
            return Err(ConvertError::NotAModel { path: folder.to_owned() });
        }
        let config = Config::open(&path)?;
        let family = families::find(&config)?;
        let store = TensorStore::open(&shards(folder)?)?.with_scale_block(config.scale_block()?);
        let prefix =
            family.prefixes.iter().find(|prefix| store.has(&format!("{prefix}{}", family.embedding)));
        let prefix = *prefix.ok_or_else(|| ConvertError::MissingTensor {
            name: format!("{}{}", family.prefixes.first().unwrap_or(&""), family.embedding),
            architecture: family.architecture.to_owned(),
        })?;
        let layers = config.count(&["num_hidden_layers", "n_layer", "n_layers", "num_layers"])?;
        if layers == 0 || layers > MAX_LAYERS {
            return Err(invalid(
                "config.json",
                "num_hidden_layers",
                format!("{layers} layers; it must be from 1 to {MAX_LAYERS}"),
            ));
        }
        let embedding = store.find(&format!("{prefix}{}", family.embedding))?;
        let rows = embedding.map_or(0, |embedding| embedding.rows());
        let TokenizerKeys { keys: vocabulary, tokens, notes } = match options.vocabulary {
            true => {
                tokenizer::keys(folder, &config, family.architecture, rows, options.pre_tokenizer.as_deref())?
            }
            false => TokenizerKeys {
                keys: vec![("tokenizer.ggml.model".to_owned(), "no_vocab".into())],
                tokens: rows,
                notes: Vec::new(),
            },
        };
        let cut = family.cuts_embedding && tokens < rows;
        let mut builder = FileBuilder {
            config: &config,
            store: &store,
            architecture: family.architecture,
            prefix: prefix.to_owned(),
            layers,
            heads: heads(&config)?,
            tokens: cut.then_some(tokens),
            keys: Vec::new(),
            tensors: Vec::new(),
        };
        (family.keys)(&mut builder)?;
        builder.set_count("vocab_size", if cut { tokens } else { rows });
        (family.globals)(&mut builder)?;
        check_rope_factors(&builder)?;
        for layer in 0..layers {
            (family.layer)(&mut builder, layer)?;
        }
        // Layers behind those of the text model, which predict further tokens.
        let further = config.find_count(&["num_nextn_predict_layers"])?.unwrap_or(0);
        ignore(family, &store, prefix, layers..layers.saturating_add(further));
        if let Some(name) = store.unused() {
            let architecture = family.architecture.to_owned();
            return Err(ConvertError::UnknownTensor { name: name.to_owned(), architecture });
        }
        let Some(target) = options.target.or_else(|| TargetType::of_sources(&store)) else {
            return Err(ConvertError::NotAModel { path: folder.to_owned() });
        };
        let mut keys = general_keys(folder, family.architecture, options);
        if let Some(pooling) = pooling(folder)? {
            builder.set_count("pooling_type", pooling);
        }
        keys.append(&mut builder.keys);
        keys.extend(match cut {
            true => cut_vocabulary(vocabulary, tokens),
            false => vocabulary,
        });
        let tensors = std::mem::take(&mut builder.tensors);
        drop(builder);
        let specs = check(family.architecture, &keys, &tensors, options.vocabulary)?;
        let tensors = target.assign(family.architecture, &keys, tensors, &specs);
        if let Some((_, value)) = keys.iter_mut().find(|(key, _)| key == "general.file_type") {
            *value = target.file_type_id(&tensors).into();
        }
        Ok(ConversionPlan { architecture: family.architecture, keys, tensors, store, notes })
    }
}

/// Arrays of the vocabulary with as many entries as the embedding keeps rows.
fn cut_vocabulary(keys: Vec<(String, OwnedValue)>, tokens: usize) -> Vec<(String, OwnedValue)> {
    let cut = |(key, value): (String, OwnedValue)| {
        let value = match (key.as_str(), value.value()) {
            ("tokenizer.ggml.tokens", quadriga_gguf::Value::Array(list)) => {
                let texts: Vec<&str> = list
                    .iter()
                    .take(tokens)
                    .filter_map(|value| match value {
                        quadriga_gguf::Value::String(text) => Some(text),
                        _ => None,
                    })
                    .collect();
                texts.into()
            }
            ("tokenizer.ggml.scores", quadriga_gguf::Value::Array(list)) => {
                let scores: Vec<f32> = list
                    .iter()
                    .take(tokens)
                    .filter_map(|value| match value {
                        quadriga_gguf::Value::F32(score) => Some(score),
                        _ => None,
                    })
                    .collect();
                scores.into()
            }
            ("tokenizer.ggml.token_type", quadriga_gguf::Value::Array(list)) => {
                let kinds: Vec<i32> = list
                    .iter()
                    .take(tokens)
                    .filter_map(|value| match value {
                        quadriga_gguf::Value::I32(kind) => Some(kind),
                        _ => None,
                    })
                    .collect();
                kinds.into()
            }
            _ => value,
        };
        (key, value)
    };
    keys.into_iter().map(cut).collect()
}

/// The safetensors files of a folder: those of its index, else all that belong to the model.
fn shards(folder: &Path) -> ConvertResult<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    let mut names: Vec<String> = if is_regular(&index)? {
        let object = read_object(&index, MAX_LIST)?;
        let Some(Value::Object(map)) = object.get("weight_map") else {
            return Err(invalid("model.safetensors.index.json", "weight_map", "it is missing, or no object"));
        };
        let mut names = Vec::new();
        for (tensor, file) in map {
            let file =
                file.as_str().filter(|file| !file.contains(['/', '\\']) && file.ends_with(".safetensors"));
            let Some(file) = file else {
                let place = format!("weight_map[{tensor:?}]");
                return Err(invalid(
                    "model.safetensors.index.json",
                    place,
                    "it names no .safetensors file of this folder",
                ));
            };
            names.push(file.to_owned());
        }
        names
    } else {
        let entries = std::fs::read_dir(folder).map_err(io_error("read", folder))?;
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| name.ends_with(".safetensors")).collect();
        // Some folders also have the weights in the layout of the model's own code.
        if names.iter().any(|name| name.starts_with("model")) {
            names.retain(|name| name.starts_with("model"));
        }
        names
    };
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(ConvertError::NotAModel { path: folder.to_owned() });
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Heads of queries, and of keys and values.
fn heads(config: &Config) -> ConvertResult<(usize, usize)> {
    let heads = config.find_count(&["num_attention_heads", "n_head", "n_heads"])?.unwrap_or(0);
    let own = config.find_count(&["num_key_value_heads", "num_kv_heads", "n_head_kv"])?;
    if ["OPT", "Bert", "NomicBert"].iter().any(|start| config.class().starts_with(start)) {
        return Ok((heads, heads));
    }
    let falcon = matches!(config.class(), "FalconForCausalLM" | "RWForCausalLM");
    if falcon && !config.flag("new_decoder_architecture")?.unwrap_or(false) {
        let shared = config.flag("multi_query")?.unwrap_or(true);
        return Ok((heads, if shared { 1 } else { heads }));
    }
    Ok((heads, own.unwrap_or(heads)))
}

/// Marks the tensors that are not converted, among them those of the layers `further`.
fn ignore(family: &Family, store: &TensorStore, prefix: &str, further: std::ops::Range<usize>) {
    let names: Vec<String> = store.names().map(str::to_owned).collect();
    for name in names {
        let behind = name.strip_prefix(prefix).unwrap_or(&name);
        let own = family.ignored.iter().any(|start| behind.starts_with(start) || name.starts_with(start));
        let layer =
            behind.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        let is_further = layer.is_some_and(|layer| further.contains(&layer));
        if own || IGNORED.iter().any(|part| name.contains(part)) || is_further {
            store.ignore(&name);
        }
    }
}

fn general_keys(folder: &Path, architecture: &str, options: &ConvertOptions) -> Vec<(String, OwnedValue)> {
    let folder_name =
        folder.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let name = options.name.clone().or(folder_name).unwrap_or_else(|| architecture.to_owned());
    vec![
        ("general.architecture".to_owned(), architecture.into()),
        ("general.type".to_owned(), "model".into()),
        ("general.name".to_owned(), name.into()),
        // Set when the types are known.
        ("general.file_type".to_owned(), 0u32.into()),
        ("general.quantization_version".to_owned(), 2u32.into()),
    ]
}

/// How sentence-transformers make one vector of a text: 1 mean, 2 first token, 3 last token.
fn pooling(folder: &Path) -> ConvertResult<Option<usize>> {
    let path = folder.join("modules.json");
    if !is_regular(&path)? {
        return Ok(None);
    }
    let bytes = read_bytes(&path, MAX_SETTINGS)?;
    let modules: Vec<Value> =
        serde_json::from_slice(&bytes).map_err(|error| invalid("modules.json", "list", error.to_string()))?;
    let is_pooling = |module: &&Value| {
        module.get("type").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("Pooling"))
    };
    let Some(module) = modules.iter().find(is_pooling) else { return Ok(None) };
    let name = module.get("path").and_then(Value::as_str).unwrap_or_default();
    if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
        return Err(invalid("modules.json", "path", format!("{name:?} is no folder of the model")));
    }
    let object = read_object(&folder.join(name).join("config.json"), MAX_SETTINGS)?;
    let flag = |key: &str| object.get(key).and_then(Value::as_bool).unwrap_or(false);
    let mode = object.get("pooling_mode").and_then(Value::as_str);
    match () {
        () if flag("pooling_mode_mean_tokens") || mode == Some("mean") => Ok(Some(1)),
        () if flag("pooling_mode_cls_token") || mode == Some("cls") => Ok(Some(2)),
        () if flag("pooling_mode_lasttoken") || mode == Some("lasttoken") => Ok(Some(3)),
        () => Err(invalid(
            format!("{name}/config.json"),
            "pooling_mode",
            "only mean, cls and lasttoken are supported",
        )),
    }
}

/// Compares the tensors with those that the model's graph uses, and reads the tokenizer back.
fn check(
    architecture: &str,
    keys: &[(String, OwnedValue)],
    tensors: &[OutputTensor],
    vocabulary: bool,
) -> ConvertResult<BTreeMap<String, TensorSpec>> {
    let mut writer = Writer::new();
    for (key, value) in keys {
        writer.set(key, value.clone())?;
    }
    for name in BY_NAME {
        if tensors.iter().any(|tensor| tensor.name == *name) {
            writer.tensor_bytes(name, DType::F32, [1], &[0; 4])?;
        }
    }
    for tensor in tensors.iter().filter(|tensor| ROWS_DECIDE.iter().any(|end| tensor.name.ends_with(end))) {
        let rows = tensor.row_count();
        writer.tensor(&tensor.name, DType::F32, [rows, 1], move |out| {
            (0..rows).try_for_each(|_| out.write_all(&[0; 4]))
        })?;
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes)?;
    let metadata = File::from_bytes(bytes)?;
    if vocabulary {
        quadriga_llm::tokenizer::Tokenizer::from_file(&metadata)?;
    }
    let has = |name: &str| tensors.iter().any(|tensor| tensor.name == name);
    let specs = models::tensors(&metadata, &has)?;
    for spec in &specs {
        let found = tensors.iter().find(|tensor| tensor.name == spec.name);
        let Some(found) = found else {
            return Err(ConvertError::MissingTensor {
                name: spec.name.clone(),
                architecture: architecture.to_owned(),
            });
        };
        let same = found.dims == spec.dims
            || elements_without_ones(&found.dims) == elements_without_ones(&spec.dims);
        if !same {
            return Err(ConvertError::Shape {
                name: found.name.clone(),
                expected: format!("{:?}", spec.dims),
                found: found.dims.clone(),
            });
        }
    }
    let unused = unused_keys_and_values(architecture, keys, tensors);
    let known: BTreeMap<String, TensorSpec> =
        specs.into_iter().chain(unused).map(|spec| (spec.name.clone(), spec)).collect();
    let extra = tensors
        .iter()
        .find(|tensor| !known.contains_key(&tensor.name) && !BY_NAME.contains(&tensor.name.as_str()));
    match extra {
        Some(extra) => Err(ConvertError::UnknownTensor {
            name: extra.name.clone(),
            architecture: architecture.to_owned(),
        }),
        None => Ok(known),
    }
}

/// Layers that use the keys and values of earlier ones: published files have matrices of their own for them, which no graph uses,
/// and llama.cpp asks for.
fn unused_keys_and_values<'a>(
    architecture: &str,
    keys: &[(String, OwnedValue)],
    tensors: &'a [OutputTensor],
) -> impl Iterator<Item = TensorSpec> + use<'a> {
    let number = |name: &str| {
        let name = format!("{architecture}.{name}");
        let value = keys.iter().find(|(key, _)| *key == name).and_then(|(_, value)| value.value().integer());
        value.and_then(|value| usize::try_from(value).ok()).unwrap_or(0)
    };
    let layers = number("block_count");
    let sharing = layers - number("attention.shared_kv_layers").min(layers)..layers;
    tensors.iter().filter_map(move |tensor| {
        let (layer, part) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
        let own = matches!(part, "attn_k.weight" | "attn_v.weight" | "attn_k_norm.weight");
        let is_unused = own && sharing.contains(&layer.parse().ok()?);
        is_unused.then(|| TensorSpec {
            name: tensor.name.clone(),
            dims: tensor.dims.clone(),
            f32_only: part == "attn_k_norm.weight",
        })
    })
}

fn elements_without_ones(dims: &[usize]) -> Vec<usize> {
    dims.iter().copied().filter(|dim| *dim != 1).collect()
}

impl TargetType {
    /// The type that keeps what the files have.
    fn of_sources(store: &TensorStore) -> Option<TargetType> {
        TargetType::keeping(store.most_common_type().unwrap_or(SafeType::F16))
    }
}
