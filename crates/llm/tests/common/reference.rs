//! Reference transformers in f64, written from their papers: no KV cache, no batches, no code shared with the graphs.

use std::collections::HashMap;
use std::f64::consts::TAU;

use quadriga_graph::blocks;

use super::{Recipe, Scaling};

type Row = Vec<f64>;

/// A model's weights as f64.
pub struct Reference {
    recipe: Recipe,
    weights: HashMap<String, Row>,
}

impl Reference {
    pub fn new(recipe: &Recipe) -> Reference {
        let mut weights = HashMap::new();
        for (name, dtype, dims, bytes) in recipe.parts().tensors {
            let mut values = vec![0f32; dims.iter().product()];
            blocks::dequantize(dtype, &bytes, &mut values).unwrap();
            weights.insert(name, values.into_iter().map(f64::from).collect());
        }
        Reference { recipe: recipe.clone(), weights }
    }

    /// The normed results of the last layer and the logits, for every token of one sequence.
    pub fn run(&self, tokens: &[u32]) -> (Vec<Row>, Vec<Row>) {
        let r = &self.recipe;
        let embedding = &self.weights["token_embd.weight"];
        let mut x: Vec<Row> =
            tokens.iter().map(|t| embedding[*t as usize * r.width..][..r.width].to_vec()).collect();
        for layer in 0..r.layers {
            let attended = self.attention(layer, &x);
            add(&mut x, &attended);
            let fed: Vec<Row> = x.iter().map(|row| self.feed_forward(layer, row)).collect();
            add(&mut x, &fed);
        }
        let hidden: Vec<Row> = x.iter().map(|row| self.norm("output_norm.weight", row)).collect();
        let head = if r.tied { "token_embd.weight" } else { "output.weight" };
        let logits = hidden.iter().map(|row| multiply(&self.weights[head], row)).collect();
        (hidden, logits)
    }

    fn attention(&self, layer: usize, x: &[Row]) -> Vec<Row> {
        let r = &self.recipe;
        let normed: Vec<Row> =
            x.iter().map(|row| self.norm(&format!("blk.{layer}.attn_norm.weight"), row)).collect();
        let project = |part: &str, length: usize, rotated: bool| -> Vec<Vec<Row>> {
            let heads = |(position, row): (usize, &Row)| {
                let all = self.linear(&format!("blk.{layer}.{part}"), row);
                let mut heads: Vec<Row> = all.chunks(length).map(<[f64]>::to_vec).collect();
                for head in heads.iter_mut().filter(|_| rotated) {
                    if r.architecture == "qwen3" {
                        *head = self.norm(&format!("blk.{layer}.{part}_norm.weight"), head);
                    }
                    self.rope(position, head);
                }
                heads
            };
            normed.iter().enumerate().map(heads).collect()
        };
        let queries = project("attn_q", r.key_length, true);
        let keys = project("attn_k", r.key_length, true);
        let values = project("attn_v", r.value_length, false);
        let group = r.heads / r.kv_heads;
        (0..x.len())
            .map(|t| {
                let first = r.window.map_or(0, |window| (t + 1).saturating_sub(window as usize));
                let mut all = Vec::new();
                for (head, query) in queries[t].iter().enumerate() {
                    let of = head / group;
                    let scores: Row = (first..=t)
                        .map(|s| dot(query, &keys[s][of]) / (r.key_length as f64).sqrt())
                        .collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let parts: Row = scores.iter().map(|score| (score - most).exp()).collect();
                    let sum: f64 = parts.iter().sum();
                    let mut mixed = vec![0.0; r.value_length];
                    for (part, s) in parts.iter().zip(first..) {
                        mixed.iter_mut().zip(&values[s][of]).for_each(|(to, v)| *to += part / sum * v);
                    }
                    all.extend(mixed);
                }
                self.linear(&format!("blk.{layer}.attn_output"), &all)
            })
            .collect()
    }

    fn feed_forward(&self, layer: usize, x: &Row) -> Row {
        let normed = self.norm(&format!("blk.{layer}.ffn_norm.weight"), x);
        let gate = self.linear(&format!("blk.{layer}.ffn_gate"), &normed);
        let up = self.linear(&format!("blk.{layer}.ffn_up"), &normed);
        let inner = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        self.linear(&format!("blk.{layer}.ffn_down"), &inner)
    }

    fn linear(&self, name: &str, x: &Row) -> Row {
        let mut y = multiply(&self.weights[&format!("{name}.weight")], x);
        if let Some(bias) = self.weights.get(&format!("{name}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, name: &str, x: &Row) -> Row {
        let mean = dot(x, x) / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
        x.iter().zip(&self.weights[name]).map(|(x, w)| x * scale * w).collect()
    }

    /// Applies RoPE to a head: adjacent pairs in Llama, the two halves in Qwen.
    fn rope(&self, position: usize, head: &mut Row) {
        let r = &self.recipe;
        let half = r.rope_dims / 2;
        for i in 0..half {
            let (first, second) = if r.architecture == "llama" { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (frequency, magnitude) = self.frequency(i);
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (head[first], head[second]);
            head[first] = (a * cos - b * sin) * magnitude;
            head[second] = (a * sin + b * cos) * magnitude;
        }
    }

    /// Radians per position of a pair, and what it is multiplied by.
    fn frequency(&self, pair: usize) -> (f64, f64) {
        let r = &self.recipe;
        let (base, dims) = (f64::from(r.rope_base), r.rope_dims as f64);
        let mut plain = base.powf(-2.0 * pair as f64 / dims);
        if r.rope_factors {
            plain /= self.weights["rope_freqs.weight"][pair];
        }
        match r.scaling {
            Scaling::No => (plain, 1.0),
            Scaling::Linear(factor) => (plain / f64::from(factor), 1.0),
            Scaling::Yarn { factor, original } => {
                // The pair whose angle makes this number of rotations over the original context.
                let pair_of = |rotations: f64| {
                    dims * (f64::from(original) / (rotations * TAU)).ln() / (2.0 * base.ln())
                };
                let low = pair_of(32.0).floor().max(0.0);
                let high = pair_of(1.0).ceil().min(dims - 1.0);
                let stretched = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let factor = f64::from(factor);
                (plain * (1.0 - stretched) + plain / factor * stretched, 1.0 + 0.1 * factor.ln())
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn multiply(matrix: &[f64], x: &[f64]) -> Row {
    matrix.chunks(x.len()).map(|row| dot(row, x)).collect()
}

fn add(to: &mut [Row], other: &[Row]) {
    for (to, other) in to.iter_mut().zip(other) {
        to.iter_mut().zip(other).for_each(|(to, other)| *to += other);
    }
}
