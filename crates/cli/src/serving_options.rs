//! Options of commands that compute several requests at once.

use std::path::PathBuf;
use std::time::Duration;

use quadriga_graph::{DType, PAGE_SLOTS};
use quadriga_llm::placement::Devices;
use quadriga_llm::serving::{Batcher, BatcherOptions, CacheFile};
use quadriga_llm::{EngineOptions, Model};

use crate::failure::{Failure, Outcome};
use crate::kv_pages::{DEFAULT_TOKENS, pages_of};
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;
use crate::{size, values};

/// Heading of the help text.
const SERVING: &str = "Batching options";

/// Requests that are computed at once, unless `--parallel` says otherwise.
const DEFAULT_PARALLEL: usize = 32;

/// Sequences, memory and speculation.
#[derive(Clone, clap::Args)]
pub(crate) struct ServingOptions {
    /// Most requests that are computed at once, also -np
    #[arg(
        long,
        value_name = "N",
        default_value_t = DEFAULT_PARALLEL,
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        help_heading = SERVING
    )]
    pub(crate) parallel: usize,
    /// KV cache in tokens, all requests together [default: 16384 or the context if that is more, or what all of them need if that is less]
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        help_heading = SERVING
    )]
    kv_tokens: Option<usize>,
    /// Host memory for prefixes whose place in the KV cache was needed for others, such as 4G
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "0",
        allow_negative_numbers = true,
        value_parser = size::parse,
        help_heading = SERVING
    )]
    cache_ram: u64,
    /// File for prefixes that do not fit the host memory of --cache-ram either; it outlasts the process
    #[arg(long, value_name = "FILE", help_heading = SERVING)]
    cache_file: Option<PathBuf>,
    /// Most bytes of the cache file
    #[arg(
        long,
        value_name = "BYTES",
        default_value = "4G",
        requires = "cache_file",
        allow_negative_numbers = true,
        value_parser = size::parse,
        help_heading = SERVING
    )]
    cache_file_size: u64,
    /// Prompt look-up: guess up to N tokens of text that repeats, 0 for none. Tokens are sampled as without it
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = values::whole,
        help_heading = SERVING
    )]
    lookup: usize,
    /// Draft model: a smaller one with the same vocabulary that guesses tokens, also -md. Tokens are sampled as without it
    #[arg(long, value_name = "FILE", help_heading = SERVING)]
    draft: Option<PathBuf>,
    /// Draft model of Hugging Face's hub, also -hfd
    #[arg(long, value_name = "ORG/REPO[:QUANT]", conflicts_with = "draft", help_heading = SERVING)]
    hf_repo_draft: Option<String>,
    /// Most tokens that the draft model guesses at a time
    #[arg(
        long,
        value_name = "N",
        default_value_t = 6,
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        help_heading = SERVING
    )]
    draft_max: usize,
}

impl ServingOptions {
    /// Whether the user chose how much memory requests take.
    pub(crate) fn chooses_sizes(&self) -> bool {
        self.kv_tokens.is_some() || self.parallel != DEFAULT_PARALLEL
    }

    /// The options that were given, and have no effect for models with recurrent layers.
    fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            (self.cache_ram > 0, "--cache-ram"),
            (self.cache_file.is_some(), "--cache-file"),
            (self.lookup > 0, "--lookup"),
        ];
        given.into_iter().filter(|(is_given, _)| *is_given).map(|(_, name)| name)
    }

    /// A batcher of the prepared model, with the draft model if there is one; `model` says how models of the hub are got.
    /// Returns the seconds of loading, too.
    pub(crate) fn load(
        &self,
        model: &ModelOptions,
        prepared: &Prepared,
        options: BatcherOptions,
    ) -> Outcome<(Batcher, f64)> {
        if !model.quiet && prepared.model.hyperparameters().recurrent.is_some() {
            self.without_effect().for_each(|name| {
                note!("quadriga: {name} has no effect: the states of this model's recurrent layers stay on their device");
            });
        }
        let path = match &self.hf_repo_draft {
            Some(name) => Some(model.hub_path(name)?),
            None => self.draft.clone(),
        };
        let draft = path.map(|path| {
            Model::open(&path).map_err(|error| Failure::Message(format!("{}: {error}", path.display())))
        });
        let draft = draft.transpose()?;
        let (mut batcher, seconds) = prepared.batcher(options)?;
        if let Some(draft) = draft {
            let engine =
                EngineOptions { context: batcher.options().engine.context, ..prepared.options.clone() };
            let placed = prepared.placement.plan_draft(&draft, &prepared.devices, &engine)?;
            batcher.set_draft(draft, &placed.scheduler, &mut |_| {})?;
        }
        Ok((batcher, seconds))
    }

    /// The batcher's options for a model on devices.
    pub(crate) fn batcher(
        &self,
        model: &Model,
        engine: EngineOptions,
        devices: &Devices,
    ) -> Outcome<BatcherOptions> {
        let options = BatcherOptions {
            engine: paged(model, engine, self.parallel, self.kv_tokens, devices)?,
            cache_ram: self.cache_ram,
            cache_file: self.cache_file.clone().map(|path| CacheFile { path, bytes: self.cache_file_size }),
            lookup: self.lookup,
            draft: if self.draft.is_some() || self.hf_repo_draft.is_some() { self.draft_max } else { 0 },
            // Whoever submits decides how many wait.
            queue: usize::MAX,
            token_time: Some(Duration::from_millis(100)),
            ..BatcherOptions::default()
        };
        let page = token_bytes(model, &options.engine).saturating_mul(PAGE_SLOTS as u64);
        if (1..page).contains(&self.cache_ram) {
            let given = self.cache_ram;
            return Err(Failure::Usage(format!(
                "--cache-ram {given} is {given} bytes, and a page of the KV cache takes {page}: write {given}M for MiB"
            )));
        }
        Ok(options.for_model(model)?)
    }
}

/// Engine options with a KV cache in pages for so many sequences. A context that is left open (0) is what the model was trained
/// with, or less where memory is short.
pub(crate) fn paged(
    model: &Model,
    engine: EngineOptions,
    parallel: usize,
    kv_tokens: Option<usize>,
    devices: &Devices,
) -> Outcome<EngineOptions> {
    let mut one = EngineOptions { sequences: 1, pages: 0, ..engine.clone() }.resolve(model)?;
    // Ranks have to agree, and their memory differs.
    if engine.context == 0 && model.ranks().is_none() {
        let trained = model.hyperparameters().context;
        let room = kv_tokens.unwrap_or_else(|| DEFAULT_TOKENS.max(tokens_in_memory(model, &engine, devices)));
        one.context = trained.min(room.max(one.context));
    }
    Ok(EngineOptions {
        sequences: parallel,
        pages: pages_of(one.context, parallel, kv_tokens),
        context: one.context,
        ..engine
    })
}

/// The tokens whose keys and values take half of the memory that is free beside the weights.
fn tokens_in_memory(model: &Model, engine: &EngineOptions, devices: &Devices) -> usize {
    let free = |backend: &std::sync::Arc<dyn quadriga_runtime::Backend>| {
        Some(backend.device().free_bytes?.saturating_sub(backend.reserved_bytes()))
    };
    let free: u64 = devices.backends().iter().filter_map(free).sum();
    let room = free.saturating_sub(model.file().byte_len()) / 2;
    usize::try_from(room / token_bytes(model, engine).max(1)).unwrap_or(usize::MAX)
}

/// The bytes of a token's keys and values in all layers.
fn token_bytes(model: &Model, engine: &EngineOptions) -> u64 {
    let bytes = |dtype: DType, width: usize| dtype.row_bytes(width).unwrap_or(0) as u64;
    let own = model.hyperparameters().layers.iter();
    let own = own.filter(|layer| layer.attention && layer.shares_cache_of.is_none());
    own.map(|layer| {
        bytes(engine.cache_keys, layer.key_width()) + bytes(engine.cache_values, layer.value_width())
    })
    .sum()
}
