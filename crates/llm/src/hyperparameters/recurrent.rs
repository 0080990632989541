//! Layers with a recurrent state in place of a KV cache.

use std::ops::Range;

use super::Hyperparameters;
use super::keys::{Keys, MAX_COUNT};
use crate::Result;

/// The shape of the recurrent layers: a short convolution and, in most architectures, linear attention behind it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecurrentShape {
    /// Tokens that the convolution sees, up to the current one.
    pub conv_kernel: usize,
    /// Channels of the convolution.
    pub conv_width: usize,
    /// The linear attention; `None` if the convolution is all that a layer remembers tokens by.
    pub linear: Option<LinearAttention>,
}

/// The heads of linear attention, whose state is a matrix for each value head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinearAttention {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a query or key head.
    pub key_length: usize,
    /// Elements of a value head.
    pub value_length: usize,
}

impl LinearAttention {
    /// Elements of one token's keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_length
    }

    /// Elements of one token's values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_length
    }

    /// Elements of the state of one sequence.
    pub fn state(&self) -> usize {
        self.value_heads * self.key_length * self.value_length
    }

    /// Pieces that the state is copied in: devices copy several at once.
    pub fn pieces(&self) -> usize {
        self.value_heads * pieces(self.key_length)
    }

    fn read(keys: &Keys<'_>) -> Result<LinearAttention> {
        let key_heads = keys.count("ssm.group_count")?;
        let value_heads = keys.count("ssm.time_step_rank")?;
        let divides = value_heads.is_multiple_of(key_heads);
        keys.check("ssm.time_step_rank", value_heads, divides, "a multiple of ssm.group_count")?;
        let key_length = keys.count("ssm.state_size")?;
        let inner = keys.count("ssm.inner_size")?;
        let divides = inner.is_multiple_of(value_heads);
        keys.check("ssm.inner_size", inner, divides, "a multiple of ssm.time_step_rank")?;
        Ok(LinearAttention { key_heads, value_heads, key_length, value_length: inner / value_heads })
    }
}

impl RecurrentShape {
    /// Elements of the convolution's state of one sequence: the tokens before the current one.
    pub fn conv_state(&self) -> usize {
        (self.conv_kernel - 1) * self.conv_width
    }

    /// Elements of the linear attention's state of one sequence.
    pub fn linear_state(&self) -> usize {
        self.linear.map_or(0, |linear| linear.state())
    }

    /// Pieces that the convolution's state is copied in: devices copy several at once.
    pub fn conv_pieces(&self) -> usize {
        (self.conv_kernel - 1) * pieces(self.conv_width)
    }

    /// The most pieces of a state.
    pub fn max_pieces(&self) -> usize {
        self.conv_pieces().max(self.linear.map_or(0, |linear| linear.pieces()))
    }

    /// The inputs of a batch that reads row `from` of the states and writes row `to`: the name and the pieces of each.
    pub fn piece_inputs(&self, from: i32, to: i32) -> impl Iterator<Item = (&'static str, Range<i32>)> {
        let conv = (["conv_from", "conv_to"], self.conv_pieces());
        let linear = self.linear.map(|linear| (["delta_from", "delta_to"], linear.pieces()));
        [Some(conv), linear].into_iter().flatten().flat_map(move |(names, pieces)| {
            let pieces = pieces as i32;
            names.into_iter().zip([from, to].map(|row| row * pieces..(row + 1) * pieces))
        })
    }

    /// A convolution of queries, keys and values, and linear attention behind it.
    fn read(keys: &Keys<'_>) -> Result<RecurrentShape> {
        let conv_kernel = keys.conv_kernel("ssm.conv_kernel")?;
        let linear = LinearAttention::read(keys)?;
        let LinearAttention { key_heads, value_heads, key_length, value_length } = linear;
        let inner = (value_heads * value_length) as u64;
        let sizes = [
            (key_heads as u64).checked_mul(key_length as u64),
            inner.checked_mul(key_length as u64),
            (conv_kernel as u64).checked_mul(2 * key_heads as u64 * key_length as u64 + inner),
        ];
        let fits = sizes.iter().all(|size| size.is_some_and(|size| size <= MAX_COUNT));
        keys.check("ssm.state_size", key_length, fits, "smaller: the state of a sequence is too large")?;
        let conv_width = 2 * linear.key_width() + linear.value_width();
        Ok(RecurrentShape { conv_kernel, conv_width, linear: Some(linear) })
    }
}

impl Keys<'_> {
    /// The number of tokens that a short convolution sees.
    fn conv_kernel(&self, key: &str) -> Result<usize> {
        let kernel = self.count(key)?;
        self.check(key, kernel, (2..=64).contains(&kernel), "from 2 to 64")?;
        Ok(kernel)
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

    /// The same for models all of whose layers are recurrent.
    pub(crate) fn read_all_recurrent(&mut self, keys: &Keys<'_>) -> Result<()> {
        self.recurrent = Some(RecurrentShape::read(keys)?);
        self.layers.iter_mut().for_each(|layer| layer.attention = false);
        Ok(())
    }

    /// Reads which layers are short convolutions, as wide as the residual stream: those without key and value heads.
    pub(crate) fn read_short_convolutions(&mut self, keys: &Keys<'_>) -> Result<()> {
        let key = "shortconv.l_cache";
        let conv_kernel = keys.conv_kernel(key)?;
        let fits = conv_kernel as u64 * self.width as u64 <= MAX_COUNT;
        keys.check(key, conv_kernel, fits, "smaller: the state of a sequence is too large")?;
        self.layers.iter_mut().for_each(|layer| layer.attention = layer.kv_heads > 0);
        if self.layers.iter().any(|layer| !layer.attention) {
            self.recurrent = Some(RecurrentShape { conv_kernel, conv_width: self.width, linear: None });
        }
        Ok(())
    }
}
