//! Keys of mixtures of experts.

use quadriga_graph::GroupScore;

use super::Hyperparameters;
use super::biases::require_bias;
use super::keys::Keys;
use crate::Result;

/// What makes probabilities of a router's logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gating {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
    /// The softmax over the selected experts, which are those with the largest logits.
    SoftmaxOfSelected,
}

/// The mixture of experts that is a layer's feed-forward network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Experts {
    /// The number of experts.
    pub count: usize,
    /// The number of experts that each token uses.
    pub used: usize,
    /// The inner width of each expert.
    pub width: usize,
    /// The inner width of the expert that all tokens use, beside the selected ones; 0 if there is none.
    pub shared_width: usize,
    /// Whether its result is multiplied with the sigmoid of a gate.
    pub shared_gate: bool,
    /// What makes probabilities of the router's logits.
    pub gating: Gating,
    /// Whether the weights of the used experts are divided by their sum.
    pub normalize: bool,
    /// The factor of the weights.
    pub scale: f32,
    /// Whether the weights multiply what the experts read, instead of their results.
    pub weighs_inputs: bool,
    /// The number of groups of consecutive experts; 1 if there are none.
    pub groups: usize,
    /// The number of groups that a token's experts are selected from.
    pub groups_used: usize,
    /// By which score those groups are the best.
    pub group_score: GroupScore,
}

/// What holds for an architecture's experts where a file does not say otherwise.
#[derive(Clone, Copy)]
pub(crate) struct ExpertDefaults {
    /// See [`Experts::gating`].
    pub(crate) gating: Gating,
    /// See [`Experts::normalize`].
    pub(crate) normalize: bool,
    /// The inner width of each expert, from that of a dense network and the number of used experts.
    pub(crate) width: fn(feed_forward: usize, used: usize) -> usize,
    /// The inner width of the shared expert, from that of a dense network and of an expert.
    pub(crate) shared_width: fn(feed_forward: usize, width: usize) -> usize,
    /// See [`Experts::shared_gate`].
    pub(crate) shared_gate: bool,
    /// See [`Experts::weighs_inputs`].
    pub(crate) weighs_inputs: bool,
}

impl ExpertDefaults {
    /// Softmax over all experts, then divided by the sum of the selected ones; experts as wide as a dense network, none
    /// shared.
    pub(crate) const NORMALIZED_SOFTMAX: ExpertDefaults = ExpertDefaults {
        gating: Gating::Softmax,
        normalize: true,
        width: |feed_forward, _| feed_forward,
        shared_width: |_, _| 0,
        shared_gate: false,
        weighs_inputs: false,
    };

    /// As many experts as a token uses are together as wide as a dense network.
    pub(crate) const SHARE_OF_DENSE: fn(usize, usize) -> usize =
        |feed_forward, used| feed_forward.checked_div(used).unwrap_or(0);
}

impl Hyperparameters {
    /// Reads the keys of experts, which all layers have but the leading dense ones.
    pub(crate) fn read_experts(&mut self, keys: &Keys<'_>, defaults: ExpertDefaults) -> Result<()> {
        let key = "leading_dense_block_count";
        let dense = keys.find_count_or_zero(key)?.unwrap_or(0);
        keys.check(key, dense, dense <= self.blocks, "at most the number of blocks")?;
        for layer in self.layers.iter_mut().skip(dense) {
            layer.experts = Some(keys.experts(layer.feed_forward, defaults)?);
        }
        Ok(())
    }

    /// Reads the keys of experts, which the last of every so many layers has.
    pub(crate) fn read_interleaved_experts(
        &mut self,
        keys: &Keys<'_>,
        defaults: ExpertDefaults,
    ) -> Result<()> {
        let step = keys.count("interleave_moe_layer_step")?;
        for layer in self.layers.iter_mut().skip(step - 1).step_by(step) {
            layer.experts = Some(keys.experts(layer.feed_forward, defaults)?);
        }
        Ok(())
    }

    /// As [`Hyperparameters::read_experts`] for architectures that have dense models, too: those have no experts.
    pub(crate) fn find_experts(&mut self, keys: &Keys<'_>, defaults: ExpertDefaults) -> Result<()> {
        match keys.find_count_or_zero("expert_count")? {
            None | Some(0) => Ok(()),
            Some(_) => self.read_experts(keys, defaults),
        }
    }

    /// Sets the score of groups as models of DeepSeek have it, whose files do not name it: routers with a selection bias add the
    /// two largest scores of a group (V3, `noaux_tc`), those of softmax without one take the largest (V2,
    /// `group_limited_greedy`). There is no model with groups by sigmoid without that bias.
    pub(crate) fn set_group_scores(&mut self, keys: &Keys<'_>) -> Result<()> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let Some(experts) = layer.experts.as_mut().filter(|experts| experts.groups > 1) else { continue };
            let name = format!("blk.{index}.exp_probs_b");
            if experts.gating == Gating::Sigmoid {
                if keys.has_tensors() {
                    require_bias(keys, &name)?;
                }
            } else if keys.file().find_tensor(&format!("{name}.bias")).is_none() {
                experts.group_score = GroupScore::Max;
            }
        }
        Ok(())
    }

    /// The mixture of experts of the layers that have one; `None` if none has.
    pub fn experts(&self) -> Option<Experts> {
        self.layers.iter().find_map(|layer| layer.experts)
    }
}

impl Keys<'_> {
    fn experts(&self, feed_forward: usize, defaults: ExpertDefaults) -> Result<Experts> {
        let count = self.count("expert_count")?;
        let used = self.count("expert_used_count")?;
        self.check("expert_used_count", used, used <= count, "at most the number of experts")?;
        let width = match self.find_count_or_zero("expert_feed_forward_length")? {
            None | Some(0) => (defaults.width)(feed_forward, used),
            Some(width) => width,
        };
        self.check("expert_feed_forward_length", width, width > 0, "at least 1")?;
        let (groups, groups_used) = self.expert_groups(count, used)?;
        Ok(Experts {
            count,
            used,
            width,
            shared_width: self.shared_width(width, (defaults.shared_width)(feed_forward, width))?,
            shared_gate: defaults.shared_gate,
            gating: self.gating(defaults.gating)?,
            normalize: self.find_flag("expert_weights_norm")?.unwrap_or(defaults.normalize),
            scale: self.find_factor("expert_weights_scale")?.unwrap_or(1.0),
            weighs_inputs: defaults.weighs_inputs,
            groups,
            groups_used,
            group_score: GroupScore::TopTwo,
        })
    }

    /// The width of the shared expert: given as such, or as a number of experts.
    fn shared_width(&self, width: usize, default: usize) -> Result<usize> {
        if let Some(shared) = self.find_count_or_zero("expert_shared_feed_forward_length")? {
            return Ok(shared);
        }
        let shared = self.find_count_or_zero("expert_shared_count")?;
        Ok(shared.map_or(default, |experts| experts * width))
    }

    /// The number of groups, and of those that are used.
    fn expert_groups(&self, count: usize, used: usize) -> Result<(usize, usize)> {
        let (key, used_key) = ("expert_group_count", "expert_group_used_count");
        let groups = self.find_count_or_zero(key)?.unwrap_or(0).max(1);
        if groups == 1 {
            return Ok((1, 1));
        }
        self.check(key, groups, count.is_multiple_of(groups), "a divisor of the number of experts")?;
        let groups_used = self.count(used_key)?;
        self.check(used_key, groups_used, groups_used <= groups, "at most the number of groups")?;
        let wanted = "enough groups for the experts that a token uses";
        self.check(used_key, groups_used, used <= count / groups * groups_used, wanted)?;
        Ok((groups, groups_used))
    }

    fn gating(&self, default: Gating) -> Result<Gating> {
        let key = "expert_gating_func";
        Ok(match self.find_count_or_zero(key)? {
            None | Some(0) => default,
            Some(1) => Gating::Softmax,
            Some(2) => Gating::Sigmoid,
            Some(3) => Gating::SoftmaxOfSelected,
            Some(other) => {
                let wanted = "1 (softmax), 2 (sigmoid) or 3 (softmax of the selected experts)";
                return Err(self.wrong(key, other, wanted));
            }
        })
    }
}
