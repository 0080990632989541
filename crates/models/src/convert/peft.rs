//! LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`, read as a GGUF adapter.
//!
//! The modules of an adapter have the names of the model's own files. The rules of the model's family say which tensors of a
//! GGUF file they become, and in which order their rows are, exactly as for the weights themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quadriga_gguf::{File, Value, Writer};
use quadriga_graph::DType;
use serde::Deserialize;

use super::builder::FileBuilder;
use super::common::output_matrix;
use super::config::{Config, MAX_SETTINGS, read_object};
use super::error::{ConvertError, ConvertResult, invalid};
use super::families;
use super::output::TensorOrigin;
use super::source::{Source, TensorStore};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// What `adapter_config.json` says about the products.
#[derive(Deserialize)]
struct PeftConfig {
    peft_type: String,
    lora_alpha: f64,
    /// Alpha of modules whose names end with a pattern.
    #[serde(default)]
    alpha_pattern: Option<BTreeMap<String, f64>>,
    #[serde(default)]
    use_rslora: Option<bool>,
    #[serde(default)]
    use_dora: Option<bool>,
    #[serde(default)]
    fan_in_fan_out: Option<bool>,
}

/// The two matrices of a module.
struct PeftModule {
    /// The name in the model's own files, without `.weight`.
    name: String,
    /// `[rank, inputs]`.
    a: Source,
    /// `[outputs, rank]`.
    b: Source,
}

/// Whether a path is that of a PEFT adapter: a folder, or a safetensors file.
pub(crate) fn is_peft(path: &Path) -> bool {
    path.is_dir() || path.extension().is_some_and(|end| end == "safetensors")
}

/// Reads a PEFT adapter for the model in a GGUF file, as a GGUF adapter.
pub(crate) fn read_peft(path: &Path, model: &File) -> ConvertResult<File> {
    let (folder, weights): (PathBuf, PathBuf) = match path.is_dir() {
        true => (path.to_owned(), path.join(WEIGHTS)),
        false => (path.parent().map(Path::to_owned).unwrap_or_default(), path.to_owned()),
    };
    let config = PeftConfig::open(&folder.join(CONFIG))?;
    let store = TensorStore::open(std::slice::from_ref(&weights))?;
    let file = weights.display().to_string();
    let (modules, embedding) = modules(&store, &file)?;
    let architecture: &str = model.get("general.architecture")?;
    let ModuleOrigins { matrices: origins, experts } = origins(model, architecture, &modules)?;
    let is_known = |module: &&PeftModule| {
        origins.iter().any(|(_, origin)| origin.source == module.name)
            || experts.iter().any(|(_, sources)| sources.contains(&module.name))
    };
    if let Some(module) = modules.iter().find(|module| !is_known(module)) {
        let reason = format!("adapters of architecture {architecture} cannot change this module");
        return Err(invalid(file, format!("module {:?}", module.name), reason));
    }
    let mut writer = Writer::new();
    writer.set("general.architecture", architecture)?.set("general.type", "adapter")?;
    writer.set("adapter.type", "lora")?;
    if let Some(PeftModule { name, a, b }) = embedding {
        let factor = config.checked_factor(&name, a.rows(), &folder)?;
        let (rank, tokens) = (a.rows(), a.columns());
        let values = read(&store, &a, &file)?;
        let mut rows = Vec::with_capacity(values.len());
        for token in 0..tokens {
            rows.extend(values.iter().skip(token).step_by(tokens.max(1)).take(rank));
        }
        let second: Vec<f32> = read(&store, &b, &file)?.into_iter().map(|value| value * factor).collect();
        // As adapters in GGUF files have them: rows of the first are looked up.
        for (end, dims, values) in [("a", [tokens, rank], rows), ("b", [b.rows(), rank], second)] {
            writer.tensor(&format!("token_embd.weight.lora_{end}"), DType::F32, dims, move |out| {
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            })?;
        }
    }
    for (tensor, sources) in experts {
        let of_experts: Vec<&PeftModule> =
            sources.iter().filter_map(|name| modules.iter().find(|module| module.name == *name)).collect();
        let Some(first) = of_experts.first() else { continue };
        let [rank, inputs, outputs] = [first.a.rows(), first.a.columns(), first.b.rows()];
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for module in &of_experts {
            if [module.a.rows(), module.a.columns(), module.b.rows()] != [rank, inputs, outputs] {
                let reason = format!("its matrices have other shapes than those of {:?}", first.name);
                return Err(invalid(file, format!("module {:?}", module.name), reason));
            }
            let factor = config.checked_factor(&module.name, rank, &folder)?;
            a.extend(read(&store, &module.a, &file)?);
            b.extend(read(&store, &module.b, &file)?.into_iter().map(|value| value * factor));
        }
        let count = of_experts.len();
        for (end, dims, values) in [("a", [count, rank, inputs], a), ("b", [count, outputs, rank], b)] {
            writer.tensor(&format!("{tensor}.lora_{end}"), DType::F32, dims, move |out| {
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            })?;
        }
    }
    for (tensor, origin) in origins {
        let Some(module) = modules.iter().find(|module| module.name == origin.source) else { continue };
        let (rank, inputs) = (module.a.rows(), module.a.columns());
        let mut a = read(&store, &module.a, &file)?;
        if let Some(order) = &origin.columns {
            for row in a.chunks_exact_mut(inputs.max(1)) {
                let old = row.to_vec();
                for (value, column) in row.iter_mut().zip(order.iter()) {
                    *value = old.get(*column as usize).copied().unwrap_or(0.0);
                }
            }
        }
        let b = read(&store, &module.b, &file)?;
        let factor = config.checked_factor(&module.name, rank, &folder)?;
        let mut rows = Vec::with_capacity(origin.rows.len() * rank);
        for row in &origin.rows {
            let row = b.get(row * rank..(row + 1) * rank).unwrap_or_default();
            rows.extend(row.iter().map(|value| value * factor));
        }
        for (end, dims, values) in [("a", [rank, inputs], a), ("b", [origin.rows.len(), rank], rows)] {
            writer.tensor(&format!("{tensor}.lora_{end}"), DType::F32, dims, move |out| {
                values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()))
            })?;
        }
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes)?;
    Ok(File::from_bytes(bytes)?)
}

impl PeftConfig {
    fn open(path: &Path) -> ConvertResult<PeftConfig> {
        let name = path.display().to_string();
        let object = serde_json::Value::Object(read_object(path, MAX_SETTINGS)?);
        let config: PeftConfig =
            serde_json::from_value(object).map_err(|error| invalid(&name, "object", error.to_string()))?;
        if config.peft_type != "LORA" {
            let reason = format!("{} is not supported, only LORA", config.peft_type);
            return Err(invalid(name, "peft_type", reason));
        }
        for (key, value) in [("use_dora", config.use_dora), ("fan_in_fan_out", config.fan_in_fan_out)] {
            if value == Some(true) {
                return Err(invalid(name, key, "true is not supported"));
            }
        }
        for pattern in config.alpha_pattern.iter().flatten().map(|(pattern, _)| pattern) {
            if regex::Regex::new(&PeftConfig::ending(pattern)).is_err() {
                return Err(invalid(name, "alpha_pattern", format!("{pattern:?} is no pattern")));
            }
        }
        Ok(config)
    }

    /// The factor of a module's product, if it is a number.
    fn checked_factor(&self, module: &str, rank: usize, folder: &Path) -> ConvertResult<f32> {
        let factor = self.factor(module, rank) as f32;
        if factor.is_finite() {
            return Ok(factor);
        }
        let reason = format!("the factor of module {module:?} is not finite");
        Err(invalid(folder.join(CONFIG).display().to_string(), "lora_alpha", reason))
    }

    /// PEFT matches patterns with the ends of names, at a dot.
    fn ending(pattern: &str) -> String {
        format!(r"^(.*\.)?({pattern})$")
    }

    /// What the product of a module is multiplied by.
    fn factor(&self, module: &str, rank: usize) -> f64 {
        let own = self.alpha_pattern.iter().flatten().find(|(pattern, _)| {
            regex::Regex::new(&PeftConfig::ending(pattern)).is_ok_and(|pattern| pattern.is_match(module))
        });
        let alpha = own.map_or(self.lora_alpha, |(_, alpha)| *alpha);
        let rank = rank.max(1) as f64;
        alpha / if self.use_rslora == Some(true) { rank.sqrt() } else { rank }
    }
}

/// The ends of the names of matrices, and whether they are the first of their pair. Embeddings have names of their own.
const ENDS: &[(&str, bool)] = &[
    (".lora_A.weight", true),
    (".lora_B.weight", false),
    (".lora_A.default.weight", true),
    (".lora_B.default.weight", false),
    (".lora_embedding_A", true),
    (".lora_embedding_B", false),
    (".lora_embedding_A.default", true),
    (".lora_embedding_B.default", false),
];

/// The end of the name of the model's own matrix, which PEFT saves beside an adapter of the embedding or the output.
const UNCHANGED: &str = ".base_layer.weight";

/// What the modules of token embeddings are called.
const EMBEDDINGS: &[&str] = &["embed_tokens", "wte", "word_embeddings", "tok_embeddings"];

/// The modules of an adapter, and that of the token embedding, whose first matrix is `[rank, tokens]` and whose second
/// `[width, rank]`; an error for anything that is not a low-rank product.
fn modules(store: &TensorStore, file: &str) -> ConvertResult<(Vec<PeftModule>, Option<PeftModule>)> {
    let split = |name: &str| -> Option<(String, bool)> {
        let name = name.strip_prefix("base_model.model.").unwrap_or(name);
        ENDS.iter().find_map(|(end, first)| Some((name.strip_suffix(end)?.to_owned(), *first)))
    };
    let mut pairs: BTreeMap<String, (Option<String>, Option<String>)> = BTreeMap::new();
    for name in store.names() {
        if name.ends_with(UNCHANGED) {
            continue;
        }
        let Some((module, first)) = split(name) else {
            let reason = "only the matrices lora_A and lora_B of linear layers and embeddings are supported; \
                          merge the adapter with PEFT, and convert the result";
            return Err(invalid(file, format!("tensor {name:?}"), reason));
        };
        let pair = pairs.entry(module).or_default();
        *(if first { &mut pair.0 } else { &mut pair.1 }) = Some(name.to_owned());
    }
    let (mut modules, mut embedding) = (Vec::new(), None);
    for (name, pair) in pairs {
        let wrong = |reason: &str| invalid(file, format!("module {name:?}"), reason);
        let (Some(a), Some(b)) = pair else { return Err(wrong("one of lora_A and lora_B is missing")) };
        let (Some(a), Some(b)) = (store.find(&a)?, store.find(&b)?) else {
            return Err(wrong("one of lora_A and lora_B is missing"));
        };
        match (a.shape.as_slice(), b.shape.as_slice()) {
            ([rows, _], [_, rank]) if rows == rank && *rank > 0 => {}
            _ => return Err(wrong(&format!("{:?} and {:?} are no product", a.shape, b.shape))),
        }
        let is_embedding = name.rsplit('.').next().is_some_and(|last| EMBEDDINGS.contains(&last));
        let module = PeftModule { name, a, b };
        match is_embedding {
            true => embedding = Some(module),
            false => modules.push(module),
        }
    }
    match modules.is_empty() && embedding.is_none() {
        true => Err(invalid(file, "header", "there are no tensors")),
        false => Ok((modules, embedding)),
    }
}

/// The tensors of the model that consist of modules.
#[derive(Default)]
struct ModuleOrigins {
    /// Those of rows of one module.
    matrices: Vec<(String, TensorOrigin)>,
    /// Those of experts, with a module for each.
    experts: Vec<(String, Vec<String>)>,
}

/// The tensors of the model that consist of modules.
fn origins(model: &File, architecture: &str, modules: &[PeftModule]) -> ConvertResult<ModuleOrigins> {
    let Some(family) = families::of_architecture(architecture) else {
        let known: BTreeSet<&str> = families::classes().map(|(_, architecture)| architecture).collect();
        let (name, known) = (architecture.to_owned(), known.into_iter().collect());
        return Err(ConvertError::Architecture { name, known });
    };
    let number = |key: &str| -> Option<usize> {
        let value = match model.value(&format!("{architecture}.{key}"))? {
            // Some models have a number per layer; the first counts.
            Value::Array(list) => list.iter().next()?,
            value => value,
        };
        value.integer().and_then(|number| usize::try_from(number).ok())
    };
    let heads = number("attention.head_count").unwrap_or(1);
    let kv_heads = number("attention.head_count_kv").unwrap_or(heads);
    let (layers, width) = (number("block_count").unwrap_or(0), number("embedding_length").unwrap_or(0));
    let class = family.classes.first().copied().unwrap_or_default();
    let config = serde_json::json!({
        "architectures": [class], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": number("attention.key_length"),
    });
    let config = Config::parse(config.to_string().as_bytes(), "general.architecture")?;
    let shapes = modules
        .iter()
        .map(|module| (format!("{}.weight", module.name), vec![module.b.rows(), module.a.columns()]));
    let store = TensorStore::of_shapes(shapes);
    let (mut best, mut most) = (ModuleOrigins::default(), 0);
    // The beginning of the names with which most modules find their places.
    for prefix in family.prefixes {
        let mut builder = FileBuilder {
            config: &config,
            store: &store,
            architecture: family.architecture,
            prefix: (*prefix).to_owned(),
            layers,
            heads: (heads, kv_heads),
            tokens: None,
            keys: Vec::new(),
            tensors: Vec::new(),
        };
        output_matrix(&mut builder)?;
        for layer in 0..layers {
            match (family.layer)(&mut builder, layer) {
                // Adapters have few of a layer's matrices.
                Ok(()) | Err(ConvertError::MissingTensor { .. } | ConvertError::MissingKey { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let mut found = ModuleOrigins::default();
        for tensor in &builder.tensors {
            if let Some(mut origin) = tensor.origin() {
                let Some(source) = origin.source.strip_suffix(".weight") else { continue };
                origin.source = source.to_owned();
                found.matrices.push((tensor.name.clone(), origin));
            } else if let Some(sources) = tensor.stacked_sources() {
                let names = sources.iter().map(|name| Some(name.strip_suffix(".weight")?.to_owned()));
                let Some(names) = names.collect::<Option<Vec<String>>>() else { continue };
                found.experts.push((tensor.name.clone(), names));
            }
        }
        let count = found.matrices.len() + found.experts.len();
        if count > most {
            (best, most) = (found, count);
        }
    }
    Ok(best)
}

/// All elements of a matrix.
fn read(store: &TensorStore, source: &Source, file: &str) -> ConvertResult<Vec<f32>> {
    let mut values = vec![0.0; source.elements()];
    store.read(source, 0, &mut values, &mut Vec::new()).map_err(super::error::io_error("read", file))?;
    match values.iter().all(|value| value.is_finite()) {
        true => Ok(values),
        false => Err(invalid(file, format!("tensor {:?}", source.name()), "a value is not finite")),
    }
}
