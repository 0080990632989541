//! Checked access to the metadata of a model file. Every error names the key.

use std::cell::RefCell;
use std::collections::HashSet;

use quadriga_gguf::{File, Value};

use crate::{Error, Result};

/// The largest accepted count: more than any model has, and small enough that the product of two does not overflow.
pub(crate) const MAX_COUNT: u64 = 1 << 30;

/// Metadata keys that begin with the architecture's name. Keys are passed without that prefix.
pub(crate) struct Keys<'f> {
    file: &'f File,
    prefix: &'static str,
    /// Whether the file has the model's tensors.
    has_tensors: bool,
    /// The whole keys that were looked up.
    read: RefCell<HashSet<String>>,
}

impl<'f> Keys<'f> {
    /// The keys of an architecture.
    pub(crate) fn new(file: &'f File, prefix: &'static str) -> Keys<'f> {
        Keys { file, prefix, has_tensors: true, read: RefCell::default() }
    }

    /// The keys of a file that describes a model without having its tensors.
    pub(crate) fn without_tensors(file: &'f File, prefix: &'static str) -> Keys<'f> {
        Keys { file, prefix, has_tensors: false, read: RefCell::default() }
    }

    /// Whether the file has the model's tensors.
    pub(crate) fn has_tensors(&self) -> bool {
        self.has_tensors
    }

    /// The file, for tensors and keys without the prefix.
    pub(crate) fn file(&self) -> &'f File {
        self.file
    }

    /// An error if the file lacks a tensor that other models may lack.
    pub(crate) fn require_tensor(&self, name: &str) -> Result<()> {
        if self.has_tensors {
            self.file.tensor(name)?;
        }
        Ok(())
    }

    /// The architecture's name.
    pub(crate) fn architecture(&self) -> &'static str {
        self.prefix
    }

    /// The whole key, which counts as read.
    fn key(&self, key: &str) -> String {
        let whole = format!("{}.{key}", self.prefix);
        self.read.borrow_mut().insert(whole.clone());
        whole
    }

    /// The value of a key that nothing has read.
    pub(super) fn unread(&self, key: &str) -> Option<Value<'f>> {
        let whole = format!("{}.{key}", self.prefix);
        self.file.value(&whole).filter(|_| !self.read.borrow().contains(&whole))
    }

    /// Notes that an architecture knows a key, and that files have it without the model using it.
    pub(crate) fn ignore(&self, key: &str) {
        self.key(key);
    }

    /// The error about a value that is not accepted.
    pub(crate) fn wrong(&self, key: &str, value: impl ToString, wanted: &str) -> Error {
        Error::Hyperparameter { key: self.key(key), value: value.to_string(), wanted: wanted.to_owned() }
    }

    /// An error unless a condition on a value holds.
    pub(crate) fn check(&self, key: &str, value: usize, holds: bool, wanted: &str) -> Result<()> {
        if holds { Ok(()) } else { Err(self.wrong(key, value, wanted)) }
    }

    /// A number of at most 2^30; 0 is accepted.
    pub(crate) fn find_count_or_zero(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.file.find::<u64>(&self.key(key))? else { return Ok(None) };
        self.limited(key, value).map(Some)
    }

    /// A number from 1 to 2^30.
    pub(crate) fn find_count(&self, key: &str) -> Result<Option<usize>> {
        match self.find_count_or_zero(key)? {
            Some(0) => Err(self.wrong(key, 0, "at least 1")),
            found => Ok(found),
        }
    }

    /// A number from 1 to 2^30 that the file must have.
    pub(crate) fn count(&self, key: &str) -> Result<usize> {
        match self.find_count(key)? {
            Some(value) => Ok(value),
            None => Ok(self.file.get::<u64>(&self.key(key))? as usize),
        }
    }

    /// A number for each block: a single one for all, or an array with one for each. 0 is accepted.
    pub(crate) fn find_counts(&self, key: &str, blocks: usize) -> Result<Option<Vec<usize>>> {
        if !self.is_array(key) {
            return Ok(self.find_count_or_zero(key)?.map(|value| vec![value; blocks]));
        }
        let Some(values) = self.array::<u64>(key, blocks)? else { return Ok(None) };
        values.into_iter().map(|value| self.limited(key, value)).collect::<Result<_>>().map(Some)
    }

    /// As [`Keys::find_counts`], but the file must have the key.
    pub(crate) fn counts(&self, key: &str, blocks: usize) -> Result<Vec<usize>> {
        match self.find_counts(key, blocks)? {
            Some(values) => Ok(values),
            None => Ok(vec![self.file.get::<u64>(&self.key(key))? as usize; blocks]),
        }
    }

    /// An array with one truth value for each block, or with 0 or 1.
    pub(crate) fn find_flags(&self, key: &str, blocks: usize) -> Result<Option<Vec<bool>>> {
        if self.file.find::<Vec<i64>>(&self.key(key)).is_err() {
            return self.array::<bool>(key, blocks);
        }
        let flag = |number: i64| match number {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.wrong(key, other, "an array of truth values, or of 0 and 1")),
        };
        let Some(numbers) = self.array::<i64>(key, blocks)? else { return Ok(None) };
        numbers.into_iter().map(flag).collect::<Result<_>>().map(Some)
    }

    /// An array with one number for each block.
    pub(crate) fn find_floats(&self, key: &str, blocks: usize) -> Result<Option<Vec<f32>>> {
        self.array::<f32>(key, blocks)
    }

    /// Whether the file has an array under a key.
    pub(crate) fn is_array(&self, key: &str) -> bool {
        matches!(self.file.value(&self.key(key)), Some(Value::Array(_)))
    }

    /// A truth value.
    pub(crate) fn find_flag(&self, key: &str) -> Result<Option<bool>> {
        Ok(self.file.find::<bool>(&self.key(key))?)
    }

    /// A text.
    pub(crate) fn find_text(&self, key: &str) -> Result<Option<&'f str>> {
        Ok(self.file.find::<&str>(&self.key(key))?)
    }

    /// A finite number.
    pub(crate) fn find_float(&self, key: &str) -> Result<Option<f32>> {
        match self.file.find::<f32>(&self.key(key))? {
            Some(value) if !value.is_finite() => Err(self.wrong(key, value, "a finite number")),
            found => Ok(found),
        }
    }

    /// A finite number that the file must have.
    pub(crate) fn float(&self, key: &str) -> Result<f32> {
        match self.find_float(key)? {
            Some(value) => Ok(value),
            None => Ok(self.file.get::<f32>(&self.key(key))?),
        }
    }

    /// A positive number, or the default.
    pub(crate) fn positive(&self, key: &str, default: f32) -> Result<f32> {
        match self.find_float(key)? {
            Some(value) if value <= 0.0 => Err(self.wrong(key, value, "positive")),
            found => Ok(found.unwrap_or(default)),
        }
    }

    /// A positive number; 0 means the same as no such key.
    pub(crate) fn find_factor(&self, key: &str) -> Result<Option<f32>> {
        match self.find_float(key)? {
            Some(value) if value < 0.0 => Err(self.wrong(key, value, "positive")),
            found => Ok(found.filter(|value| *value > 0.0)),
        }
    }

    /// An error if the model is a mixture of experts.
    pub(crate) fn refuse_experts(&self) -> Result<()> {
        let experts = self.find_count_or_zero("expert_count")?.unwrap_or(0);
        self.check("expert_count", experts, experts == 0, "absent or 0: this architecture has no experts")
    }

    fn limited(&self, key: &str, value: u64) -> Result<usize> {
        if value > MAX_COUNT { Err(self.wrong(key, value, "at most 2^30")) } else { Ok(value as usize) }
    }

    /// An array of exactly one element for each block.
    fn array<T>(&self, key: &str, blocks: usize) -> Result<Option<Vec<T>>>
    where
        Vec<T>: quadriga_gguf::FromValue<'f>,
    {
        match self.file.find::<Vec<T>>(&self.key(key))? {
            Some(values) if values.len() != blocks => {
                let (found, wanted) =
                    (values.len(), format!("an array with an element for each of {blocks} blocks"));
                Err(self.wrong(key, format!("an array of {found}"), &wanted))
            }
            found => Ok(found),
        }
    }
}
