//! Collects the keys and tensors of a converted file.

use quadriga_gguf::OwnedValue;

use super::config::Config;
use super::error::{ConvertError, ConvertResult, invalid};
use super::output::OutputTensor;
use super::source::{Source, TensorStore};

/// More elements than a head of any model has, and more heads than any layer.
pub(super) const MAX_HEAD: usize = 1 << 16;

/// The keys and tensors of a file while they are collected.
pub(super) struct FileBuilder<'a> {
    pub(super) config: &'a Config,
    pub(super) store: &'a TensorStore,
    /// The architecture's name in GGUF files.
    pub(super) architecture: &'static str,
    /// What the names of the text model's tensors begin with.
    pub(super) prefix: String,
    /// The number of layers.
    pub(super) layers: usize,
    /// Heads of queries, and of keys and values.
    pub(super) heads: (usize, usize),
    /// Tokens of the vocabulary that the tokenizer has; rows of embeddings behind them are cut off where a family asks for it.
    pub(super) tokens: Option<usize>,
    pub(super) keys: Vec<(String, OwnedValue)>,
    pub(super) tensors: Vec<OutputTensor>,
}

impl FileBuilder<'_> {
    /// Sets a key of the architecture, in place of one of the same name.
    pub(super) fn set(&mut self, name: &str, value: impl Into<OwnedValue>) {
        let name = format!("{}.{name}", self.architecture);
        self.keys.retain(|(known, _)| *known != name);
        self.keys.push((name, value.into()));
    }

    /// Sets a key to a whole number.
    pub(super) fn set_count(&mut self, name: &str, value: usize) {
        self.set(name, u32::try_from(value).unwrap_or(u32::MAX));
    }

    /// Sets a key to a number.
    pub(super) fn set_number(&mut self, name: &str, value: f64) {
        self.set(name, value as f32);
    }

    /// Sets a key to the value of a configuration key, if that is there.
    pub(super) fn copy_count(&mut self, name: &str, keys: &[&str]) -> ConvertResult<()> {
        if let Some(value) = self.config.find_count(keys)? {
            self.set_count(name, value);
        }
        Ok(())
    }

    /// The same for a number.
    pub(super) fn copy_number(&mut self, name: &str, keys: &[&str]) -> ConvertResult<()> {
        if let Some(value) = self.config.find_number(keys)? {
            self.set_number(name, value);
        }
        Ok(())
    }

    /// A tensor of the text model, by the end of its name.
    pub(super) fn find(&self, name: &str) -> ConvertResult<Option<Source>> {
        self.store.find(&format!("{}{name}", self.prefix))
    }

    /// The same for a tensor that must be there.
    pub(super) fn need(&self, name: &str) -> ConvertResult<Source> {
        self.find(name)?.ok_or_else(|| ConvertError::MissingTensor {
            name: format!("{}{name}", self.prefix),
            architecture: self.architecture.to_owned(),
        })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.store.has(&format!("{}{name}", self.prefix))
    }

    /// Adds a tensor.
    pub(super) fn push(&mut self, tensor: OutputTensor) {
        self.tensors.push(tensor);
    }

    /// Adds a tensor as it is, if it is there.
    pub(super) fn copy(&mut self, from: &str, to: &str) -> ConvertResult<bool> {
        let Some(source) = self.find(from)? else { return Ok(false) };
        self.push(OutputTensor::whole(to, source));
        Ok(true)
    }

    /// Adds weight and bias of a part of a layer, as far as they are there.
    pub(super) fn copy_part(&mut self, from: &str, to: &str) -> ConvertResult<()> {
        for end in [".weight", ".bias"] {
            self.copy(&format!("{from}{end}"), &format!("{to}{end}"))?;
        }
        Ok(())
    }

    /// Adds the matrices of a layer's experts, one tensor per expert: `PREFIX.E.PART.weight`.
    pub(super) fn stack_experts(
        &mut self,
        from: &str,
        parts: &[(&str, &str)],
        to: &str,
    ) -> ConvertResult<bool> {
        let mut found = false;
        for (part, name) in parts {
            let mut experts = Vec::new();
            while let Some(expert) = self.find(&format!("{from}.{}.{part}.weight", experts.len()))? {
                experts.push(expert);
            }
            if !experts.is_empty() {
                self.push(OutputTensor::stacked(&format!("{to}{name}.weight"), experts)?);
                found = true;
            }
        }
        Ok(found)
    }

    /// The elements of a head.
    pub(super) fn head_length(&self) -> ConvertResult<usize> {
        let length = match self.config.find_count(&["head_dim"])? {
            Some(length) => length,
            None => self.config.count(&["hidden_size", "n_embd", "d_model"])? / self.heads.0.max(1),
        };
        match length <= MAX_HEAD {
            true => Ok(length),
            false => Err(invalid(
                "config.json",
                "head_dim",
                format!("a head of {length} elements; at most {MAX_HEAD} are supported"),
            )),
        }
    }

    /// An error unless a configuration key is absent or has this value.
    pub(super) fn require(&self, key: &str, allowed: &[&str]) -> ConvertResult<()> {
        let Some(value) = self.config.value(&[key]) else { return Ok(()) };
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if allowed.contains(&text.as_str()) { Ok(()) } else { Err(self.config.unsupported(key, text)) }
    }
}
