//! Layers with a recurrent state in place of a KV cache.

use super::Hyperparameters;
use super::keys::{Keys, MAX_COUNT};
use crate::Result;

/// The shape of the recurrent layers, which have a gated delta rule (linear attention) behind a short convolution.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecurrentShape {
    /// Tokens that the convolution sees, up to the current one.
    pub conv_kernel: usize,
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a query or key head.
    pub key_length: usize,
    /// Elements of a value head.
    pub value_length: usize,
}

impl RecurrentShape {
    /// Elements of one token's keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_length
    }

    /// Elements of one token's values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_length
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn conv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Elements of the convolution's state of one sequence: the tokens before the current one.
    pub fn conv_state(&self) -> usize {
        (self.conv_kernel - 1) * self.conv_width()
    }

    /// Elements of the delta rule's state of one sequence.
    pub fn delta_state(&self) -> usize {
        self.value_heads * self.key_length * self.value_length
    }

    /// Pieces that the convolution's state is copied in: devices copy several at once.
    pub fn conv_pieces(&self) -> usize {
        (self.conv_kernel - 1) * pieces(self.conv_width())
    }

    /// Pieces that the delta rule's state is copied in.
    pub fn delta_pieces(&self) -> usize {
        self.value_heads * pieces(self.key_length)
    }

    fn read(keys: &Keys<'_>) -> Result<RecurrentShape> {
        let conv_kernel = keys.count("ssm.conv_kernel")?;
        let holds = (2..=64).contains(&conv_kernel);
        keys.check("ssm.conv_kernel", conv_kernel, holds, "from 2 to 64")?;
        let key_heads = keys.count("ssm.group_count")?;
        let value_heads = keys.count("ssm.time_step_rank")?;
        let divides = value_heads.is_multiple_of(key_heads);
        keys.check("ssm.time_step_rank", value_heads, divides, "a multiple of ssm.group_count")?;
        let key_length = keys.count("ssm.state_size")?;
        let inner = keys.count("ssm.inner_size")?;
        let divides = inner.is_multiple_of(value_heads);
        keys.check("ssm.inner_size", inner, divides, "a multiple of ssm.time_step_rank")?;
        let shape = RecurrentShape {
            conv_kernel,
            key_heads,
            value_heads,
            key_length,
            value_length: inner / value_heads,
        };
        let sizes = [
            (key_heads as u64).checked_mul(key_length as u64),
            (inner as u64).checked_mul(key_length as u64),
            (conv_kernel as u64).checked_mul(2 * key_heads as u64 * key_length as u64 + inner as u64),
        ];
        let fits = sizes.iter().all(|size| size.is_some_and(|size| size <= MAX_COUNT));
        keys.check("ssm.state_size", key_length, fits, "smaller: the state of a sequence is too large")?;
        Ok(shape)
    }
}

/// Equal pieces of so many elements.
fn pieces(elements: usize) -> usize {
    if elements.is_multiple_of(8) { 8 } else { 1 }
}

impl Hyperparameters {
    /// Reads the shape of recurrent layers and which ones those are: all but every fourth, unless the file says otherwise.
    pub(crate) fn read_recurrent(&mut self, keys: &Keys<'_>) -> Result<()> {
        self.recurrent = Some(RecurrentShape::read(keys)?);
        let key = "full_attention_interval";
        let interval = keys.find_count(key)?.unwrap_or(4);
        let flags = keys.find_flags("attention.recurrent_layers", self.blocks)?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let recurrent = match &flags {
                Some(flags) => flags.get(index).copied().unwrap_or(false),
                None => !(index + 1).is_multiple_of(interval),
            };
            layer.attention = !recurrent;
        }
        Ok(())
    }
}
