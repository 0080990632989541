//! Which layers live on which device: a rule over the names of weights and cache.

use crate::Hyperparameters;

/// Which of `layers` blocks go to a device that takes `on_device` of them and the logits, which count as one: they are
/// spread evenly, so that what the host lends for one layer can travel while the device computes its own before it.
/// The number among the device's blocks, where it is one of them.
pub fn place_on_device(layers: usize, on_device: usize, block: usize) -> Option<usize> {
    let blocks = on_device.saturating_sub(1).min(layers);
    let before = block * blocks / layers.max(1);
    ((block + 1) * blocks / layers.max(1) > before).then_some(before)
}

/// A placement rule for `Scheduler::place`, where backend 0 is the accelerator and backend 1 the host: `on_device` of the
/// model's layers go to the device, [evenly spread](place_on_device), the logits counting as one more layer after the
/// blocks. With all of them there, the embedding goes too; with some, it is wherever it is read.
pub fn offload(
    hyper: &Hyperparameters,
    on_device: usize,
) -> impl Fn(&str) -> Option<usize> + Send + Sync + 'static {
    let layers = hyper.layers;
    let all = on_device > layers;
    move |name: &str| {
        let device =
            match name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok()) {
                Some(block) => place_on_device(layers, on_device, block).is_some(),
                None if name.starts_with("output") => on_device > 0,
                // In models that have no other matrix for the logits, the embedding is read at both ends.
                None if (all || on_device == 0) && is_shared(name) => all,
                // What is not placed, such as inputs, is wherever it is read.
                None => return None,
            };
        Some(usize::from(!device))
    }
}

/// Whether a weight belongs to no layer.
fn is_shared(name: &str) -> bool {
    name.starts_with("token_embd") || name == "rope_freqs.weight"
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{Pairing, Rope};

    use super::*;
    use crate::Architecture;

    fn hyper(layers: usize) -> Hyperparameters {
        Hyperparameters {
            architecture: Architecture::Llama,
            layers,
            width: 8,
            feed_forward: 8,
            heads: 1,
            kv_heads: 1,
            key_length: 8,
            value_length: 8,
            norm_epsilon: 1e-5,
            context: 8,
            sliding_window: None,
            rope: Rope::new(8, Pairing::Adjacent, 1e4),
            vocabulary: 8,
        }
    }

    #[test]
    fn layers_of_the_device_are_spread_and_the_last_is_its() {
        for (layers, on_device) in [(1, 1), (4, 0), (4, 3), (30, 7), (32, 16), (32, 32), (32, 40)] {
            let places: Vec<usize> =
                (0..layers).filter_map(|block| place_on_device(layers, on_device, block)).collect();
            let blocks = on_device.saturating_sub(1).min(layers);
            assert_eq!(places, (0..blocks).collect::<Vec<_>>(), "{on_device} of {layers} and the logits");
            // No run of the host's layers is longer than another by more than one.
            let host: Vec<usize> = (0..layers)
                .map(|block| usize::from(place_on_device(layers, on_device, block).is_none()))
                .collect();
            let runs: Vec<usize> = host.split(|on_host| *on_host == 0).map(<[usize]>::len).collect();
            let runs = runs.split_last().map_or(&[][..], |(_, runs)| runs);
            assert!(runs.iter().max() <= runs.iter().min().map(|least| least + 1).as_ref());
        }
        let rule = offload(&hyper(4), 3);
        assert_eq!(rule("blk.0.attn_q.weight"), Some(1));
        assert_eq!(rule("blk.1.attn_q.weight"), Some(0));
        assert_eq!(rule("blk.2.attn_q.weight"), Some(1));
        assert_eq!(rule("blk.3.cache_k"), Some(0));
        assert_eq!(rule("output.weight"), Some(0));
        assert_eq!(rule("token_embd.weight"), None);
        assert_eq!(offload(&hyper(4), 0)("token_embd.weight"), Some(1));
        assert_eq!(rule("tokens"), None);
        assert_eq!(offload(&hyper(4), 0)("output_norm.weight"), Some(1));
        assert_eq!(offload(&hyper(4), 5)("token_embd.weight"), Some(0));
        assert_eq!(offload(&hyper(4), 5)("blk.0.attn_q.weight"), Some(0));
    }
}
