//! A model file, opened and checked.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use quadriga_cluster::Communicator;
use quadriga_gguf::File;
use quadriga_graph::Graph;
use quadriga_runtime::ModelId;
use sha2::{Digest, Sha256};

use crate::adapter::Adapter;
use crate::constraint::ConstraintEngine;
use crate::hyperparameters::{AttentionTemperature, CacheRows, Hyperparameters, LayerCaches};
use crate::models::{self, GraphShape};
use crate::ranks::{Grid, Link, Parallelism, RankResources, RankShare, WholeModel, chosen_grid};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::tools::{Tool, ToolCallParser, ToolFormat};
use crate::{Error, Result};

/// A model: its file, hyperparameters, tokenizer and chat template. Cheap to clone.
///
/// ```no_run
/// use quadriga_llm::Model;
///
/// let model = Model::open("model.gguf")?;
/// let hyper = model.hyperparameters();
/// println!("{} with {} layers", hyper.architecture, hyper.layers.len());
/// let tokens = model.tokenizer()?.encode("Hello", false);
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone)]
pub struct Model {
    inner: Arc<ModelInner>,
    /// In place of the file's own.
    template: Option<Arc<ChatTemplate>>,
    /// Of the chat template; found when it is first needed.
    tool_format: Arc<OnceLock<Arc<ToolFormat>>>,
    adapters: Arc<[Adapter]>,
    /// Where several ranks compute the model.
    ranks: Option<Arc<RankShare>>,
    /// Of its weights, as its graphs have them: the file's, adapters, and what a rank has of them.
    id: Arc<ModelId>,
}

struct ModelInner {
    file: File,
    hyper: Hyperparameters,
    /// Absent in files without a vocabulary, which are made for benchmarks.
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    identity: OnceLock<[u8; 32]>,
    quick_identity: OnceLock<[u8; 32]>,
    /// Made when it is first needed.
    constraints: Mutex<Option<Arc<ConstraintEngine>>>,
}

/// Bytes of a tensor that are part of a model's identity, at each of the places.
const IDENTITY_BYTES: usize = 64;

/// Places of a tensor that are part of a model's identity, from its first bytes to its last at equal distances.
const IDENTITY_PLACES: usize = 66;

impl Model {
    /// Opens a GGUF file (of a split model, any part) and checks its metadata and vocabulary, and that every tensor
    /// exists with the right shape and a supported type. The values of the weights are not read: the file is
    /// memory-mapped and must not be modified in place while the model is used. `Model::from_file(File::read(path)?)`
    /// reads it into memory instead, and with `File::read_on_demand` those of its tensors, or parts of them, that are used.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        Model::from_file(File::open(path)?)
    }

    /// The model in an opened file.
    pub fn from_file(file: File) -> Result<Model> {
        let hyper = models::hyperparameters(&file)?;
        let tokenizer = match Tokenizer::from_file(&file) {
            Ok(tokenizer) => Some(tokenizer),
            Err(Error::NoVocabulary) => None,
            Err(error) => return Err(error),
        };
        // Every token of the vocabulary needs a row of the embedding; additional rows are padding.
        if let Some(tokens) = tokenizer.as_ref().map(Tokenizer::token_count).filter(|n| *n > hyper.vocabulary)
        {
            return Err(Error::TensorShape {
                name: "token_embd.weight".to_owned(),
                found: vec![hyper.vocabulary, hyper.width],
                wanted: vec![tokens, hyper.width],
            });
        }
        let template = match &tokenizer {
            Some(tokenizer) => ChatTemplate::from_file(&file, tokenizer)?,
            None => None,
        };
        let model = Model {
            inner: Arc::new(ModelInner {
                file,
                hyper,
                tokenizer,
                template,
                identity: OnceLock::new(),
                quick_identity: OnceLock::new(),
                constraints: Mutex::default(),
            }),
            template: None,
            tool_format: Arc::default(),
            adapters: Arc::default(),
            ranks: None,
            id: Arc::new(ModelId::new()),
        };
        models::check_tensors(&model.inner.file, &model.inner.hyper)?;
        Ok(model)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// The hyperparameters.
    pub fn hyperparameters(&self) -> &Hyperparameters {
        &self.inner.hyper
    }

    /// A hash by which a model is recognised: of its hyperparameters, the names, types and shapes of all tensors, and
    /// samples of each: 64 bytes at 66 places from its beginning to its end. Fine-tunes of a model differ in it; a change
    /// of only a few weights between those places is not noticed. Models that ranks divide in another way differ, too: so do their
    /// KV caches.
    pub fn identity(&self) -> [u8; 32] {
        self.identity_with(self.ranks().and_then(|ranks| ranks.layout()))
    }

    /// As [`Model::identity`], but the same however ranks divide the model: by it results of a model are recognised.
    pub fn weights_identity(&self) -> [u8; 32] {
        self.identity_with(None)
    }

    /// The identity of the file with its adapters and a layout of ranks.
    fn identity_with(&self, layout: Option<String>) -> [u8; 32] {
        let own = self.file_identity();
        if self.adapters.is_empty() && layout.is_none() {
            return own;
        }
        let mut hash = Sha256::new();
        hash.update(own);
        hash.update(layout.unwrap_or_default());
        for adapter in self.adapters.iter() {
            for (name, pair) in adapter.pairs() {
                hash.update(format!("{name:?} {} ", adapter.factor(pair)));
                hash.update(pair.a.data.bytes());
                hash.update(pair.b.data.bytes());
            }
        }
        hash.finalize().into()
    }

    /// The identity of the file alone.
    fn file_identity(&self) -> [u8; 32] {
        *self.inner.identity.get_or_init(|| self.hash_samples(IDENTITY_PLACES))
    }

    /// As [`Model::identity`], of few bytes of the file: by it ranks notice that they have different ones, before they divide it, and each
    /// reads little of what it does not compute. It does not tell apart how ranks divide a model, or adapters.
    pub fn quick_identity(&self) -> [u8; 32] {
        *self.inner.quick_identity.get_or_init(|| self.hash_samples(2))
    }

    /// A hash of hyperparameters and tensors, with samples at so many places of each.
    fn hash_samples(&self, places: usize) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(format!("{:?}", self.inner.hyper));
        for tensor in self.inner.file.tensors() {
            let (name, dtype, dims) = (tensor.name(), tensor.dtype().id(), tensor.shape().dims().to_vec());
            hash.update(format!("{name:?} {dtype} {dims:?} "));
            let last = tensor.byte_len().saturating_sub(IDENTITY_BYTES);
            let inner = places - 1;
            for start in (0..inner).map(|place| last / inner * place).chain([last]) {
                let length = (tensor.byte_len() - start).min(IDENTITY_BYTES);
                let sample = tensor.data().slice(start, length);
                let sample = sample.map(|sample| self.inner.file.on_demand(&tensor, sample));
                hash.update(sample.as_ref().map_or_else(Default::default, quadriga_graph::Data::bytes));
                // The system has mapped much more around it than was read.
                sample.iter().for_each(quadriga_graph::Data::release);
            }
        }
        hash.finalize().into()
    }

    /// The tokenizer; an error if the file has no vocabulary.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.inner.tokenizer.as_ref().ok_or(Error::NoVocabulary)
    }

    /// The chat template, if there is one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref().or(self.inner.template.as_ref())
    }

    /// The model with this chat template, in Jinja, in place of the file's own.
    pub fn with_template(self, source: &str) -> Result<Model> {
        let template = ChatTemplate::for_tokenizer(source, self.tokenizer()?)?;
        Ok(Model { template: Some(Arc::new(template)), tool_format: Arc::default(), ..self })
    }

    /// How the model writes calls of tools, as its chat template has it.
    ///
    /// # Errors
    /// The model has no chat template or no vocabulary.
    pub fn tool_format(&self) -> Result<Arc<ToolFormat>> {
        let tokenizer = self.tokenizer()?;
        let missing = || Error::Template { reason: "the model has none, and tools need one".to_owned() };
        let template = self.template().ok_or_else(missing)?;
        let find = || {
            let tokens = &tokenizer.vocabulary().tokens;
            let ends: Vec<&str> = tokenizer
                .end_tokens()
                .filter_map(|end| tokens.get(end as usize))
                .map(String::as_str)
                .collect();
            Arc::new(ToolFormat::of_template(template, &ends))
        };
        Ok(Arc::clone(self.tool_format.get_or_init(find)))
    }

    /// A parser of calls of tools at the beginning of an answer.
    ///
    /// # Errors
    /// The model has no chat template or no vocabulary.
    pub fn tool_call_parser(&self, tools: Arc<[Tool]>) -> Result<ToolCallParser> {
        let tokenizer = self.tokenizer()?;
        let is_token = |text: &str| tokenizer.control_texts().any(|control| control == text);
        Ok(ToolCallParser::new(self.tool_format()?, tools).with_tokens(is_token))
    }

    /// The model with low-rank adapters, in place of any that it had. Those of scale 0 are left out.
    pub fn with_adapters(self, adapters: &[Adapter]) -> Result<Model> {
        let own = self.inner.hyper.architecture;
        if let Some(other) = adapters.iter().find(|adapter| adapter.architecture() != own) {
            let reason = format!("it belongs to architecture {}, the model is {own}", other.architecture());
            return Err(Error::Adapter { reason });
        }
        models::check_adapters(&self.inner.file, &self.inner.hyper, adapters)?;
        let adapters = adapters.iter().filter(|adapter| adapter.scale() != 0.0).cloned().collect();
        Ok(Model { adapters, id: Arc::new(ModelId::new()), ..self })
    }

    /// The part of the model that this rank of several computes. Graphs have that part only, so that only its weights are
    /// loaded.
    ///
    /// # Errors
    /// The model cannot be divided in this way, with the numbers.
    pub fn with_ranks(self, communicator: Arc<dyn Communicator>, parallelism: Parallelism) -> Result<Model> {
        let speeds = vec![1.0; communicator.size()];
        self.with_uneven_ranks(communicator, parallelism, &speeds)
    }

    /// As [`Model::with_ranks`], for ranks of different speeds: each gets a part in proportion to its own. All ranks give the same.
    ///
    /// # Errors
    /// As [`Model::with_ranks`]; there are not as many speeds as ranks, or one is not positive.
    pub fn with_uneven_ranks(
        self,
        communicator: Arc<dyn Communicator>,
        parallelism: Parallelism,
        speeds: &[f64],
    ) -> Result<Model> {
        let resources: Vec<RankResources> =
            speeds.iter().map(|speed| RankResources::of_speed(*speed)).collect();
        self.with_rank_resources(communicator, parallelism, &resources)
    }

    /// As [`Model::with_uneven_ranks`], for ranks with limited memory, too: a rank that has too little for a part in proportion to its
    /// speed gets less, and the others more. All ranks give the same.
    ///
    /// # Errors
    /// As [`Model::with_uneven_ranks`]; a rank has too little memory, with the bytes that it needs and has.
    pub fn with_rank_resources(
        self,
        communicator: Arc<dyn Communicator>,
        parallelism: Parallelism,
        resources: &[RankResources],
    ) -> Result<Model> {
        if !self.adapters.is_empty() {
            return Err(Error::Ranks { reason: "adapters cannot be divided yet".to_owned() });
        }
        let cache = parallelism.cache.unwrap_or_else(|| CacheRows::of_one_sequence(&self.inner.hyper));
        let whole = WholeModel::new(&self.inner.file, &self.inner.hyper, &cache);
        let share = RankShare::new(&whole, communicator, parallelism, resources)?;
        let model = Model { ranks: Some(Arc::new(share)), id: Arc::new(ModelId::new()), ..self };
        model.graph(GraphShape::new(1, 1))?;
        Ok(model)
    }

    /// How ranks with these resources divide the model, where it is left to them, without starting any.
    ///
    /// # Errors
    /// As [`Model::with_rank_resources`].
    pub fn grid_of_ranks(
        &self,
        parallelism: Parallelism,
        resources: &[RankResources],
        link: Link,
    ) -> Result<Grid> {
        let cache = parallelism.cache.unwrap_or_else(|| CacheRows::of_one_sequence(&self.inner.hyper));
        chosen_grid(
            &WholeModel::new(&self.inner.file, &self.inner.hyper, &cache),
            parallelism,
            resources,
            link,
        )
    }

    /// The hyperparameters of this rank's part: with its heads, columns and states.
    pub(crate) fn part(&self) -> &Hyperparameters {
        self.ranks.as_deref().map_or(&self.inner.hyper, RankShare::hyper)
    }

    /// How queries grow with their position, if those of one of this rank's layers do.
    pub(crate) fn temperature(&self) -> Option<AttentionTemperature> {
        let hyper = self.part();
        let layers = self.ranks.as_deref().map_or(0..hyper.layers.len(), RankShare::layers);
        let own = hyper.layers.get(layers).unwrap_or_default();
        hyper.temperature.filter(|_| own.iter().any(|layer| layer.rope.is_none()))
    }

    /// What this rank's layers remember tokens by.
    pub(crate) fn caches(&self) -> LayerCaches {
        let hyper = self.part();
        hyper.caches_of(self.ranks.as_deref().map_or(0..hyper.layers.len(), RankShare::layers))
    }

    /// This rank's part, where several ranks compute the model.
    pub fn ranks(&self) -> Option<&Arc<RankShare>> {
        self.ranks.as_ref()
    }

    /// What stands for its weights in the keys of a session's graphs.
    pub(crate) fn id(&self) -> &ModelId {
        &self.id
    }

    /// The low-rank adapters.
    pub fn adapters(&self) -> &[Adapter] {
        &self.adapters
    }

    /// The compiler of grammars for this model's vocabulary. The first call makes it, which takes some tenths of a second for
    /// a large vocabulary; all clones of a model share it.
    pub fn constraints(&self) -> Result<Arc<ConstraintEngine>> {
        let mut constraints = self.inner.constraints.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = &*constraints {
            return Ok(Arc::clone(engine));
        }
        let engine = Arc::new(ConstraintEngine::new(self.tokenizer()?)?);
        *constraints = Some(Arc::clone(&engine));
        Ok(engine)
    }

    /// Builds the graph for batches of a shape.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph> {
        models::build_adapted(&self.inner.file, self.part(), &self.adapters, self.ranks.as_deref(), shape)
    }
}
