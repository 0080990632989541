//! The gated delta rule and attention with an output gate in f64, one token after another, as Qwen3-Next and Qwen 3.5 are
//! published. Dimensions are those of [`parts_of`].

use super::super::Recipe;
use super::super::recurrent::parts_of;
use super::recurrent::convolve;
use super::{Reference, Row, dot, multiply};

const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 6;
const KEY: usize = 8;
const VALUE: usize = 12;
/// Value heads of each key head.
const EACH: usize = VALUE_HEADS / KEY_HEADS;

fn sigmoid(v: f64) -> f64 {
    1.0 / (1.0 + (-v).exp())
}

impl Reference {
    /// A model with the gated delta rule.
    pub fn with_delta_rule(recipe: &Recipe) -> Reference {
        let mut parts = parts_of(recipe);
        for (name, ..) in &mut parts.tensors {
            *name = name.replace("post_attention_norm", "ffn_norm");
        }
        Reference::of(recipe, parts)
    }

    /// The logits of every token of one sequence.
    pub fn run_delta(&self, tokens: &[u32]) -> Vec<Row> {
        let r = &self.recipe;
        let embedding = &self.weights["token_embd.weight"];
        let mut x: Vec<Row> =
            tokens.iter().map(|t| embedding[*t as usize * r.width..][..r.width].to_vec()).collect();
        for layer in 0..r.layers {
            let normed: Vec<Row> =
                x.iter().map(|row| self.norm(&format!("blk.{layer}.attn_norm"), row)).collect();
            let mixed = match layer % 4 {
                3 => self.gated_attention(layer, &normed),
                _ => self.delta_rule(layer, &normed),
            };
            self.add(&mut x, &mixed);
            let fed: Vec<Row> = x.iter().map(|row| self.feed_forward(layer, None, row)).collect();
            self.add(&mut x, &fed);
        }
        let logits = |row: &Row| multiply(&self.weights["output.weight"], &self.norm("output_norm", row));
        x.iter().map(logits).collect()
    }

    fn delta_rule(&self, layer: usize, x: &[Row]) -> Vec<Row> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let is_grouped = self.recipe.architecture == "qwen3next";
        let (keys, silu) = (KEY_HEADS * KEY, |v: f64| v * sigmoid(v));
        let inputs: Vec<Row> = x.iter().map(|row| self.linear(&name("attn_qkv"), row)).collect();
        let convolved = convolve(&self.weights[&name("ssm_conv1d.weight")], 4, &inputs);
        let mut states = vec![[[0.0; VALUE]; KEY]; VALUE_HEADS];
        let mut results = Vec::new();
        for (row, convolved) in x.iter().zip(&convolved) {
            let convolved: Row = convolved.iter().map(|v| silu(*v)).collect();
            let unit = |head: &[f64]| -> Row {
                let length = dot(head, head).sqrt();
                head.iter().map(|v| v / length).collect()
            };
            let z = self.linear(&name("attn_gate"), row);
            let mut all = Vec::new();
            for (head, state) in states.iter_mut().enumerate() {
                let of = if is_grouped { head / EACH } else { head % KEY_HEADS };
                let query = unit(&convolved[of * KEY..][..KEY]);
                let key = unit(&convolved[keys + of * KEY..][..KEY]);
                let value = &convolved[2 * keys + head * VALUE..][..VALUE];
                let (beta, alpha) = if is_grouped {
                    let both = multiply(&self.weights[&name("ssm_ba.weight")], row);
                    let first = head / EACH * 2 * EACH + head % EACH;
                    (both[first], both[first + EACH])
                } else {
                    let of = |part: &str| multiply(&self.weights[&name(part)], row)[head];
                    (of("ssm_beta.weight"), of("ssm_alpha.weight"))
                };
                let step = (1.0 + (alpha + self.weights[&name("ssm_dt.bias")][head]).exp()).ln();
                let decay = (step * self.weights[&name("ssm_a")][head]).exp();
                let mut out = vec![0.0; VALUE];
                for column in 0..VALUE {
                    (0..KEY).for_each(|i| state[i][column] *= decay);
                    let known: f64 = (0..KEY).map(|i| state[i][column] * key[i]).sum();
                    let change = sigmoid(beta) * (value[column] - known);
                    (0..KEY).for_each(|i| state[i][column] += key[i] * change);
                    let read: f64 = (0..KEY).map(|i| state[i][column] * query[i]).sum();
                    out[column] = read / (KEY as f64).sqrt();
                }
                let normed = self.norm(&name("ssm_norm"), &out);
                all.extend(normed.iter().zip(&z[head * VALUE..]).map(|(v, z)| v * silu(*z)));
            }
            results.push(self.linear(&name("ssm_out"), &all));
        }
        results
    }

    fn gated_attention(&self, layer: usize, x: &[Row]) -> Vec<Row> {
        let r = &self.recipe;
        let (d, group) = (r.key_length, r.heads / r.kv_heads);
        let name = |part: &str| format!("blk.{layer}.{part}");
        let head = |norm: &str, position: usize, head: &[f64]| -> Row {
            let mut normed = self.norm(&name(norm), &head.to_vec());
            self.rope(false, position, &mut normed);
            normed
        };
        let keys: Vec<Vec<Row>> = x
            .iter()
            .enumerate()
            .map(|(t, row)| {
                self.linear(&name("attn_k"), row).chunks(d).map(|key| head("attn_k_norm", t, key)).collect()
            })
            .collect();
        let values: Vec<Row> = x.iter().map(|row| self.linear(&name("attn_v"), row)).collect();
        let attend = |(t, row): (usize, &Row)| {
            let both = self.linear(&name("attn_q"), row);
            let mut all = Vec::new();
            for (number, both) in both.chunks(2 * d).enumerate() {
                let (query, of) = (head("attn_q_norm", t, &both[..d]), number / group);
                let weights: Row =
                    (0..=t).map(|s| (dot(&query, &keys[s][of]) / (d as f64).sqrt()).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for (i, gate) in both[d..].iter().enumerate() {
                    let value = |s: usize| values[s][of * r.value_length + i];
                    let mixed: f64 = weights.iter().enumerate().map(|(s, w)| w / sum * value(s)).sum();
                    all.push(mixed * sigmoid(*gate));
                }
            }
            self.linear(&name("attn_output"), &all)
        };
        x.iter().enumerate().map(attend).collect()
    }
}
