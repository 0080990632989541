//! Keys of DeepSeek's multi-head latent attention.

use super::Hyperparameters;
use super::keys::Keys;
use crate::Result;

/// Multi-head latent attention: keys and values of all heads are products of one short vector for each token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LatentAttention {
    /// Elements of the vector that keys and values are made of.
    pub rank: usize,
    /// Elements of the vector that queries are made of; `None` if they are made of the activations.
    pub query_rank: Option<usize>,
    /// Elements of a query or key head without rotary embedding; they come first.
    pub plain: usize,
    /// Elements of a query or key head with rotary embedding. All heads of a token's keys have the same.
    pub rotated: usize,
    /// Elements of a value head.
    pub value_length: usize,
    /// Whether the KV cache holds the vector and the rotated elements, instead of the keys and values made of them. Files
    /// need separate matrices for keys and values for that.
    pub absorbed: bool,
}

impl LatentAttention {
    /// Elements of a query or key head.
    pub fn key_length(&self) -> usize {
        self.plain + self.rotated
    }
}

impl Hyperparameters {
    /// Reads the keys of latent attention, and gives all layers the shape that their KV caches have.
    pub(crate) fn read_latent_attention(&mut self, keys: &Keys<'_>) -> Result<LatentAttention> {
        let latent = keys.latent_attention(self)?;
        for layer in &mut self.layers {
            (layer.kv_heads, layer.key_length, layer.value_length) = match latent.absorbed {
                true => (1, latent.rank + latent.rotated, latent.rank),
                false => (layer.heads, latent.key_length(), latent.value_length),
            };
        }
        self.latent = Some(latent);
        Ok(latent)
    }
}

impl Keys<'_> {
    fn latent_attention(&self, hyper: &Hyperparameters) -> Result<LatentAttention> {
        let rank = self.count("attention.kv_lora_rank")?;
        let query_key = "attention.q_lora_rank";
        let query_rank = self.find_count_or_zero(query_key)?.filter(|rank| *rank > 0);
        if let (Some(rank), Some(_)) = (query_rank, self.file().find_tensor("blk.0.attn_q.weight")) {
            let wanted = "absent or 0: the queries of the file's layers are made by attn_q";
            return Err(self.wrong(query_key, rank, wanted));
        }
        let rotated = self.count("rope.dimension_count")?;
        let (key, value) = ("attention.key_length_mla", "attention.value_length_mla");
        let absorbed = self.find_count(key)?.is_some() && self.find_count(value)?.is_some();
        let (key, value) =
            if absorbed { (key, value) } else { ("attention.key_length", "attention.value_length") };
        let (key_length, value_length) = (self.count(key)?, self.count(value)?);
        let Some(plain) = key_length.checked_sub(rotated).filter(|plain| *plain > 0) else {
            return Err(self.wrong(key, key_length, "larger than rope.dimension_count"));
        };
        if absorbed {
            self.check_cached("attention.key_length", rank + rotated)?;
            self.check_cached("attention.value_length", rank)?;
        }
        for layer in &hyper.layers {
            let fits = layer.heads as u64 * (key_length.max(value_length)) as u64 <= super::keys::MAX_COUNT;
            let wanted = "smaller: the product of heads and head length is too large";
            self.check(key, key_length.max(value_length), fits, wanted)?;
        }
        Ok(LatentAttention { rank, query_rank, plain, rotated, value_length, absorbed })
    }

    /// An error unless a length of the cached vectors is absent or as the ranks require.
    fn check_cached(&self, key: &str, wanted: usize) -> Result<()> {
        match self.find_count(key)? {
            Some(found) if found != wanted => {
                Err(self.wrong(key, found, &format!("{wanted}, as attention.kv_lora_rank requires")))
            }
            _ => Ok(()),
        }
    }
}
