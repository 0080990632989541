//! Mixtures of experts and latent attention in f64.

use super::super::experts::{ExpertRecipe, Layout};
use super::super::latent::LatentRecipe;
use super::{Reference, Row, dot, multiply};

impl Reference {
    /// The mixture of experts of a normed row, selected by the router's.
    pub(super) fn mixture(&self, layer: usize, experts: ExpertRecipe, router: &Row, x: &Row) -> Row {
        let logits = self.linear(&format!("blk.{layer}.ffn_gate_inp"), router);
        let chosen = self.route(layer, experts, &logits);
        let mut y = vec![0.0; x.len()];
        for (expert, weight) in chosen {
            let (before, after) = if experts.weighs_inputs { (weight, 1.0) } else { (1.0, weight) };
            let input = x.iter().map(|v| v * before).collect();
            let result = self.expert(layer, experts, expert, &input);
            y.iter_mut().zip(result).for_each(|(y, r)| *y += after * r);
        }
        if experts.shared > 0 {
            let linear = |part: &str, x: &Row| self.linear(&format!("blk.{layer}.{part}"), x);
            let inner = self.gated(&linear("ffn_gate_shexp", x), &linear("ffn_up_shexp", x));
            let mut shared = linear("ffn_down_shexp", &inner);
            if experts.shared_gate {
                let logit = dot(&self.weights[&format!("blk.{layer}.ffn_gate_inp_shexp.weight")], x);
                shared.iter_mut().for_each(|v| *v /= 1.0 + (-logit).exp());
            }
            y.iter_mut().zip(shared).for_each(|(y, v)| *y += v);
        }
        y
    }

    /// The experts that are used, and their weights.
    fn route(&self, layer: usize, experts: ExpertRecipe, logits: &Row) -> Vec<(usize, f64)> {
        let softmax = |logits: &Row| -> Row {
            let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|l| (l - most).exp()).sum();
            logits.iter().map(|l| (l - most).exp() / sum).collect()
        };
        let probabilities: Row = match experts.gating {
            1 => softmax(logits),
            2 => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
            _ => logits.clone(),
        };
        let mut scores = probabilities.clone();
        if let Some(bias) = self.weights.get(&format!("blk.{layer}.exp_probs_b.bias")) {
            scores.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
        }
        let best = |scores: &[f64], count: usize| -> Vec<usize> {
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            order.truncate(count);
            order
        };
        if experts.groups > 1 {
            let size = experts.count / experts.groups;
            let score = |group| best(group, experts.group_scores).into_iter().map(|i| group[i]).sum();
            let group_scores: Row = scores.chunks(size).map(score).collect();
            let kept = best(&group_scores, experts.groups_used);
            for (expert, score) in scores.iter_mut().enumerate() {
                if !kept.contains(&(expert / size)) {
                    *score = f64::NEG_INFINITY;
                }
            }
        }
        let chosen = best(&scores, experts.used);
        let mut weights: Row = chosen.iter().map(|i| probabilities[*i]).collect();
        if experts.gating == 3 {
            weights = softmax(&weights);
        }
        let sum: f64 = if experts.normalize { weights.iter().sum() } else { 1.0 };
        chosen.into_iter().zip(weights).map(|(i, w)| (i, w / sum * f64::from(experts.scale))).collect()
    }

    fn expert(&self, layer: usize, experts: ExpertRecipe, expert: usize, x: &Row) -> Row {
        let part = |part: &str, rows: usize, x: &Row| -> Row {
            let name = format!("blk.{layer}.{part}");
            let mut y = match experts.layout {
                Layout::Apart => multiply(&self.weights[&format!("{name}.{expert}.weight")], x),
                _ => {
                    let size = rows * x.len();
                    multiply(&self.weights[&format!("{name}_exps.weight")][expert * size..][..size], x)
                }
            };
            if let Some(biases) = self.weights.get(&format!("{name}_exps.bias")) {
                y.iter_mut().zip(&biases[expert * rows..]).for_each(|(y, b)| *y += b);
            }
            y
        };
        let (gate, up) = match experts.layout {
            Layout::Fused => {
                let both = part("ffn_gate_up", 2 * experts.width, x);
                (both[..experts.width].to_vec(), both[experts.width..].to_vec())
            }
            _ => (part("ffn_gate", experts.width, x), part("ffn_up", experts.width, x)),
        };
        part("ffn_down", x.len(), &self.gated(&gate, &up))
    }

    /// The heads of queries (0), keys (1) or values (2) with latent attention, in its expanded form.
    pub(super) fn latent_heads(
        &self,
        layer: usize,
        latent: LatentRecipe,
        which: usize,
        position: usize,
        x: &Row,
    ) -> Vec<Row> {
        let r = &self.recipe;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let plain = r.key_length - r.rope_dims;
        if which == 0 {
            let all = match latent.query_rank {
                Some(_) => {
                    let short = self.norm(&name("attn_q_a_norm"), &self.linear(&name("attn_q_a"), x));
                    self.linear(&name("attn_q_b"), &short)
                }
                None => self.linear(&name("attn_q"), x),
            };
            return all.chunks(r.key_length).map(|head| self.rotate_last(position, head)).collect();
        }
        let both = self.linear(&name("attn_kv_a_mqa"), x);
        let short = self.norm(&name("attn_kv_a_norm"), &both[..latent.rank].to_vec());
        (0..r.heads)
            .map(|head| {
                let (key, value) = self.expand(layer, latent, head, &short);
                let key = [key, both[latent.rank..].to_vec()].concat();
                assert_eq!(key.len(), plain + r.rope_dims);
                if which == 1 { self.rotate_last(position, &key) } else { value }
            })
            .collect()
    }

    fn rotate_last(&self, position: usize, head: &[f64]) -> Row {
        let plain = head.len() - self.recipe.rope_dims;
        let mut last = head[plain..].to_vec();
        self.rope(false, position, &mut last);
        [&head[..plain], &last].concat()
    }

    /// A head's key without its rotated part, and its value.
    fn expand(&self, layer: usize, latent: LatentRecipe, head: usize, short: &Row) -> (Row, Row) {
        let r = &self.recipe;
        let (plain, rank) = (r.key_length - r.rope_dims, latent.rank);
        let matrix = |part: &str, size: usize| {
            &self.weights[&format!("blk.{layer}.{part}.weight")][head * size..][..size]
        };
        if latent.separate {
            let keys = matrix("attn_k_b", rank * plain);
            let key = (0..plain).map(|i| (0..rank).map(|j| keys[j * plain + i] * short[j]).sum()).collect();
            return (key, multiply(matrix("attn_v_b", r.value_length * rank), short));
        }
        let both = multiply(matrix("attn_kv_b", (plain + r.value_length) * rank), short);
        (both[..plain].to_vec(), both[plain..].to_vec())
    }
}
