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
    /// Whether the file has a matrix for the keys and one for the values of each head, instead of one for all keys and values.
    pub separate: bool,
}

/// The most bytes that the keys of some heads take while they are expanded.
const MAX_EXPANDED_BYTES: usize = 256 << 20;

impl LatentAttention {
    /// Elements of a query or key head.
    pub fn key_length(&self) -> usize {
        self.plain + self.rotated
    }

    /// Whether a batch of `tokens` attends at less cost to the keys and values of every head, made of all of the first
    /// `slots` of a KV cache, than to what is cached, with queries and results made to fit. In multiplications for each
    /// head, the former make a key and a value for each slot, the latter a query and a result for each token.
    fn is_cheaper_expanded(&self, tokens: usize, slots: usize) -> bool {
        let [rank, plain, rotated, value] =
            [self.rank, self.plain, self.rotated, self.value_length].map(|n| n as u128);
        let (tokens, slots) = (tokens as u128, slots as u128);
        // Half of the batch is before the average token of it.
        let pairs = tokens * slots.saturating_sub(tokens / 2);
        let one = rank * (plain + value);
        slots * one + pairs * (plain + rotated + value) < tokens * one + pairs * (2 * rank + rotated)
    }

    /// Whether a batch of `tokens` that attends to the first `visible` of `slots` of a KV cache is expanded: where that costs less,
    /// with all slots, too.
    pub fn expands(&self, tokens: usize, visible: usize, slots: usize) -> bool {
        [visible, slots].into_iter().all(|slots| self.is_cheaper_expanded(tokens, slots))
    }

    /// How many of `heads` are expanded at a time for a batch of `tokens` that attends to the first `visible` of `slots` of a
    /// KV cache; `None` if the absorbed form costs less. What it takes does not exceed what the same batch takes with all
    /// slots, so that a plan for those has room for it.
    pub fn expanded_heads(&self, heads: usize, tokens: usize, visible: usize, slots: usize) -> Option<usize> {
        self.expands(tokens, visible, slots).then(|| self.heads_at_once(heads, slots)).flatten()
    }

    /// How many of `heads` are expanded at a time, so that those of all `slots` of a KV cache have room; `None` if not one has.
    pub fn heads_at_once(&self, heads: usize, slots: usize) -> Option<usize> {
        let one = slots.checked_mul(self.key_length())?.checked_mul(size_of::<f32>())?;
        let most = (MAX_EXPANDED_BYTES / one.max(1)).min(heads);
        // Parts of nearly equal size.
        (most > 0).then(|| heads.div_ceil(heads.div_ceil(most)))
    }
}

impl Hyperparameters {
    /// Reads the keys of latent attention, and gives all layers the shape that their KV caches have.
    pub(crate) fn read_latent_attention(&mut self, keys: &Keys<'_>) -> Result<LatentAttention> {
        let latent = keys.latent_attention(self)?;
        for layer in &self.layers {
            // All heads share what is cached; files whose keys and values are of one matrix count the heads made of it.
            let (key, heads, kv_heads) = ("attention.head_count_kv", layer.heads, layer.kv_heads);
            let wanted = "1, or as attention.head_count: all heads share one latent vector";
            keys.check(key, kv_heads, kv_heads == 1 || kv_heads == heads, wanted)?;
        }
        for layer in &mut self.layers {
            (layer.kv_heads, layer.key_length, layer.value_length) =
                (1, latent.rank + latent.rotated, latent.rank);
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
        let separate = self.find_count(key)?.is_some() && self.find_count(value)?.is_some();
        let (key, value) =
            if separate { (key, value) } else { ("attention.key_length", "attention.value_length") };
        let (key_length, value_length) = (self.count(key)?, self.count(value)?);
        let Some(plain) = key_length.checked_sub(rotated).filter(|plain| *plain > 0) else {
            return Err(self.wrong(key, key_length, "larger than rope.dimension_count"));
        };
        if separate {
            self.check_cached("attention.key_length", rank + rotated)?;
            self.check_cached("attention.value_length", rank)?;
        }
        for layer in &hyper.layers {
            let fits = layer.heads as u64 * (key_length.max(value_length)) as u64 <= super::keys::MAX_COUNT;
            let wanted = "smaller: the product of heads and head length is too large";
            self.check(key, key_length.max(value_length), fits, wanted)?;
        }
        Ok(LatentAttention { rank, query_rank, plain, rotated, value_length, separate })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// DeepSeek V2 Lite.
    const LITE: LatentAttention = LatentAttention {
        rank: 512,
        query_rank: None,
        plain: 128,
        rotated: 64,
        value_length: 128,
        separate: true,
    };

    #[test]
    fn prompts_are_expanded_and_few_tokens_are_not() {
        let heads = |tokens, visible, slots| LITE.expanded_heads(16, tokens, visible, slots);
        for (tokens, visible) in [(1, 256), (8, 4096), (64, 256), (128, 4096), (100, 256)] {
            assert_eq!(heads(tokens, visible, 4096), None, "{tokens} of {visible}");
        }
        for (tokens, visible) in [(200, 256), (256, 4096), (512, 512), (512, 4096), (2048, 2048)] {
            assert_eq!(heads(tokens, visible, 4096), Some(16), "{tokens} of {visible}");
        }
        // 174 tokens outweigh the slots of any cache; 160 do in a short one, but not with all slots.
        assert!(LITE.is_cheaper_expanded(160, 256) && !LITE.is_cheaper_expanded(160, 4096));
        assert_eq!(heads(160, 256, 4096), None);
        assert_eq!(heads(160, 256, 256), Some(16));
    }

    #[test]
    fn long_caches_are_expanded_for_some_heads_at_a_time() {
        let heads = |heads, slots| LITE.expanded_heads(heads, 512, slots, slots);
        assert_eq!(heads(16, 20_000), Some(16));
        assert_eq!(heads(16, 32_768), Some(8), "ten fit, in two parts of eight");
        assert_eq!(heads(16, 163_840), Some(2));
        assert_eq!(heads(128, 8192), Some(32));
        assert_eq!(heads(20, 32_768), Some(10));
        assert_eq!(heads(16, 1 << 20), None, "not one fits");
        assert_eq!(heads(16, usize::MAX), None);
    }
}
