//! A model file, opened and checked.

use std::path::Path;
use std::sync::Arc;

use quadriga_gguf::File;
use quadriga_graph::Graph;

use crate::hyperparameters::Hyperparameters;
use crate::models::{self, GraphShape};
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// A model: its file, its numbers, and how it reads and writes text. Cheap to clone.
#[derive(Clone)]
pub struct Model {
    inner: Arc<Inner>,
}

struct Inner {
    file: File,
    hyper: Hyperparameters,
    /// Absent in files made for benchmarks.
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl Model {
    /// Opens a GGUF file (of a split model, any part) and checks everything but the weights' values: metadata,
    /// vocabulary, and that every tensor is there with the right shape and a type that can be computed with.
    pub fn open(path: impl AsRef<Path>) -> Result<Model> {
        Model::from_file(File::open(path)?)
    }

    /// The model in a file that is open already.
    pub fn from_file(file: File) -> Result<Model> {
        let hyper = Hyperparameters::from_file(&file)?;
        let tokenizer = match Tokenizer::from_file(&file) {
            Ok(tokenizer) => Some(tokenizer),
            Err(Error::NoVocabulary) => None,
            Err(error) => return Err(error),
        };
        // Every token of the vocabulary must have its row in the embedding; more rows do no harm.
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
        let model = Model { inner: Arc::new(Inner { file, hyper, tokenizer, template }) };
        // Building the smallest graph looks at every tensor.
        let cache = quadriga_graph::DType::F16;
        model.graph(GraphShape {
            tokens: 1,
            rows: 1,
            visible_slots: 1,
            cache_slots: 1,
            cache,
            hidden: false,
            argmax: false,
        })?;
        Ok(model)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.inner.file
    }

    /// The model's numbers.
    pub fn hyperparameters(&self) -> &Hyperparameters {
        &self.inner.hyper
    }

    /// The vocabulary, or the error that says that the file has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.inner.tokenizer.as_ref().ok_or(Error::NoVocabulary)
    }

    /// The chat template, if the file has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.inner.template.as_ref()
    }

    /// The graph for batches of a shape.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph> {
        models::build(&self.inner.file, &self.inner.hyper, shape)
    }
}
