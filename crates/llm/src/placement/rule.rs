//! The placement rule of a model's weights and KV cache: which layers accelerators hold, by tensor name.

use quadriga_graph::layer_of;

use super::shares::{device_at, first_used, last_used};
use crate::hyperparameters::Hyperparameters;
use crate::models::{ALL_NEURONS, EXPERT_NUMBERS, EXPERTS_ON_HOST, NEURONS_ON_HOST, SLOTS_SUFFIX};

/// A rule for `Scheduler::place` that offloads `on_devices` of a model's layers to `accelerators` backends, which must
/// come before the CPU in the scheduler's list.
///
/// The output matrix counts as one more layer after the blocks, and is the first to be offloaded. Offloaded blocks are
/// spread evenly over the model, so that the weights streamed for a layer that the CPU holds arrive while a device
/// computes the layers before it; several accelerators get a contiguous range of the offloaded blocks each. When all
/// layers are offloaded, so is the token embedding; otherwise it is placed where it is read.
///
/// ```
/// # fn example(model: &quadriga_llm::Model, gpu: std::sync::Arc<dyn quadriga_runtime::Backend>)
/// #     -> Result<(), quadriga_llm::Error> {
/// use std::sync::Arc;
///
/// use quadriga_llm::placement::offload;
/// use quadriga_runtime::{Backend, Scheduler};
///
/// let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new()?);
/// let scheduler = Scheduler::new([gpu, cpu]).place(offload(model.hyperparameters(), 12, 1));
/// # Ok(())
/// # }
/// ```
pub fn offload(
    hyper: &Hyperparameters,
    on_devices: usize,
    accelerators: usize,
) -> impl Fn(&str) -> Option<usize> + Send + Sync + 'static {
    offload_layers(hyper.layers.len(), on_devices, vec![1.0; accelerators])
}

/// [`offload`] for a model of this many layers, of which accelerators have these shares.
pub(super) fn offload_layers(
    layers: usize,
    on_devices: usize,
    shares: Vec<f64>,
) -> impl Fn(&str) -> Option<usize> + Send + Sync + 'static {
    let all = on_devices > layers;
    let cpu = shares.len();
    move |name: &str| {
        let device = match layer_of(name) {
            Some(layer) => offloaded_index(layers, on_devices, layer)
                .map(|index| device_at(&shares, index as f64 / on_devices.max(1) as f64)),
            None if name.starts_with("output") => (on_devices > 0).then(|| last_used(&shares)),
            // Models without an output matrix read the token embedding at both ends.
            None if (all || on_devices == 0) && is_shared(name) => all.then(|| first_used(&shares)),
            // Inputs and the like are placed where they are read.
            None => return None,
        };
        Some(device.unwrap_or(cpu))
    }
}

/// A rule that also places the slots of an expert cache, and the tables that say what is in them: slots are on the
/// accelerator of their layer's attention, or else on the first; what the host looks up is on the CPU.
pub(super) fn with_expert_slots(
    rule: impl Fn(&str) -> Option<usize> + Send + Sync + 'static,
    accelerators: usize,
) -> impl Fn(&str) -> Option<usize> + Send + Sync + 'static {
    let cpu = accelerators;
    move |name: &str| match (name.ends_with(SLOTS_SUFFIX), layer_of(name)) {
        (true, Some(layer)) => {
            let attention = rule(&format!("blk.{layer}.attn_norm.weight"));
            Some(attention.filter(|device| *device < cpu).unwrap_or(0))
        }
        _ if [EXPERTS_ON_HOST, EXPERT_NUMBERS, NEURONS_ON_HOST, ALL_NEURONS].contains(&name) => Some(cpu),
        _ => rule(name),
    }
}

/// The index of a layer among the offloaded ones, if it is one of them. The output matrix is one of the `on_devices`.
pub(super) fn offloaded_index(layers: usize, on_devices: usize, layer: usize) -> Option<usize> {
    let blocks = on_devices.saturating_sub(1).min(layers);
    let before = layer * blocks / layers.max(1);
    ((layer + 1) * blocks / layers.max(1) > before).then_some(before)
}

/// Whether a weight belongs to no layer.
fn is_shared(name: &str) -> bool {
    name.starts_with("token_embd") || name.starts_with("rope_f")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offloaded_layers_are_spread_evenly_and_include_the_last() {
        for (layers, on_devices) in [(1, 1), (4, 0), (4, 3), (30, 7), (32, 16), (32, 32), (32, 40)] {
            let indices: Vec<usize> =
                (0..layers).filter_map(|layer| offloaded_index(layers, on_devices, layer)).collect();
            let blocks = on_devices.saturating_sub(1).min(layers);
            assert_eq!(indices, (0..blocks).collect::<Vec<_>>(), "{on_devices} of {layers} and the output");
            // No run of the CPU's layers is longer than another by more than one.
            let host: Vec<usize> = (0..layers)
                .map(|layer| usize::from(offloaded_index(layers, on_devices, layer).is_none()))
                .collect();
            let runs: Vec<usize> = host.split(|on_host| *on_host == 0).map(<[usize]>::len).collect();
            let runs = runs.split_last().map_or(&[][..], |(_, runs)| runs);
            assert!(runs.iter().max() <= runs.iter().min().map(|least| least + 1).as_ref());
        }
    }

    #[test]
    fn the_rule_places_layers_output_and_embedding() {
        let rule = offload_layers(4, 3, vec![1.0]);
        assert_eq!(rule("blk.0.attn_q.weight"), Some(1));
        assert_eq!(rule("blk.1.attn_q.weight"), Some(0));
        assert_eq!(rule("blk.2.attn_q.weight"), Some(1));
        assert_eq!(rule("blk.3.cache_k"), Some(0));
        assert_eq!(rule("output.weight"), Some(0));
        assert_eq!(rule("token_embd.weight"), None);
        assert_eq!(rule("tokens"), None);
        let none = offload_layers(4, 0, vec![1.0]);
        assert_eq!(none("token_embd.weight"), Some(1));
        assert_eq!(none("output_norm.weight"), Some(1));
        let all = offload_layers(4, 5, vec![1.0]);
        assert_eq!(all("token_embd.weight"), Some(0));
        assert_eq!(all("blk.0.attn_q.weight"), Some(0));
    }

    #[test]
    fn slots_are_on_the_device_of_their_layer_and_what_the_host_looks_up_is_not() {
        let rule = with_expert_slots(offload_layers(4, 3, vec![1.0; 2]), 2);
        assert_eq!(rule("blk.1.ffn_up_exps.weight.slots"), Some(0));
        assert_eq!(rule("blk.3.ffn_up_exps.bias.slots"), Some(0));
        assert_eq!(rule("blk.0.ffn_up_exps.weight.slots"), Some(0), "its layer is on the CPU");
        assert_eq!(rule("blk.0.ffn_up_exps.weight"), Some(2));
        assert_eq!((rule("experts_on_host"), rule("expert_numbers")), (Some(2), Some(2)));
        assert_eq!(rule("expert_slots"), None);
    }

    #[test]
    fn several_accelerators_share_the_layers() {
        let rule = offload_layers(4, 5, vec![1.0; 2]);
        let devices: Vec<_> = (0..4).map(|layer| rule(&format!("blk.{layer}.cache_v"))).collect();
        assert_eq!(devices, [Some(0), Some(0), Some(0), Some(1)]);
        assert_eq!(rule("output.weight"), Some(1));
        assert_eq!(rule("token_embd.weight"), Some(0));
    }

    #[test]
    fn an_accelerator_without_a_share_has_nothing() {
        let rule = offload_layers(4, 5, vec![0.0, 3.0, 2.0, 0.0]);
        let devices: Vec<_> = (0..4).map(|layer| rule(&format!("blk.{layer}.cache_v"))).collect();
        assert_eq!(devices, [Some(1), Some(1), Some(1), Some(2)]);
        assert_eq!((rule("output.weight"), rule("token_embd.weight")), (Some(2), Some(1)));
    }
}
