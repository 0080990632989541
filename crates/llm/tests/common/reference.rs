//! Reference transformers in f64, written from their papers: no KV cache, no batches, no code shared with the graphs.

mod delta;
mod experts;
mod recurrent;
mod streams;

use std::collections::HashMap;
use std::f64::consts::{PI, TAU};

use quadriga_graph::blocks;

use super::{Parts, QueryNorms, Recipe, Scaling};

type Row = Vec<f64>;

/// A model's weights as f64.
pub struct Reference {
    recipe: Recipe,
    weights: HashMap<String, Row>,
}

impl Reference {
    pub fn new(recipe: &Recipe) -> Reference {
        Reference::of(recipe, recipe.parts())
    }

    /// The model of a recipe whose tensors are these.
    pub fn of(recipe: &Recipe, parts: Parts) -> Reference {
        let mut weights = HashMap::new();
        for (name, dtype, dims, bytes) in parts.tensors {
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
        let mut x: Vec<Row> = tokens
            .iter()
            .map(|t| {
                let row = &embedding[*t as usize * r.width..][..r.width];
                row.iter().map(|v| v * f64::from(r.embedding_scale)).collect()
            })
            .collect();
        if r.positions {
            let table = &self.weights["position_embd.weight"];
            for (position, row) in x.iter_mut().enumerate() {
                let own = &table[(position + 2) * r.width..];
                row.iter_mut().zip(own).for_each(|(to, value)| *to += value);
            }
        }
        if let Some(streams) = r.streams {
            x = self.run_streams(streams, tokens, &x);
        }
        for layer in (0..r.layers).filter(|_| r.streams.is_none()) {
            let before = x.clone();
            let attended = match r.recurrent.filter(|_| r.is_recurrent(layer)) {
                Some(recurrent) => self.recurrent(layer, recurrent, &x),
                None => self.attention(layer, &x),
            };
            self.add(&mut x, &attended);
            if !r.has_feed_forward() {
                continue;
            }
            let input = if r.parallel { &before } else { &x };
            let router = if r.architecture == "smallthinker" { Some(&before) } else { None };
            let fed: Vec<Row> = (0..x.len())
                .map(|t| self.feed_forward(layer, router.map(|rows| &rows[t]), &input[t]))
                .collect();
            self.add(&mut x, &fed);
        }
        let hidden: Vec<Row> = x.iter().map(|row| self.norm(r.output_norm(), row)).collect();
        let head = if r.tied { "token_embd.weight" } else { "output.weight" };
        let logits = hidden.iter().map(|row| {
            let cap = |v: f64| r.logit_cap.map_or(v, |cap| (v / f64::from(cap)).tanh() * f64::from(cap));
            multiply(&self.weights[head], row)
                .into_iter()
                .map(|v| cap(v * f64::from(r.logit_scale)))
                .collect()
        });
        let logits = logits.collect();
        (hidden, logits)
    }

    fn add(&self, to: &mut [Row], branch: &[Row]) {
        let scale = f64::from(self.recipe.residual_scale);
        for (to, branch) in to.iter_mut().zip(branch) {
            to.iter_mut().zip(branch).for_each(|(to, branch)| *to += branch * scale);
        }
    }

    /// The norm before a part of a layer.
    fn before(&self, layer: usize, part: &str, x: &Row) -> Row {
        if self.recipe.pre_norms { self.norm(&format!("blk.{layer}.{part}"), x) } else { x.clone() }
    }

    /// The norm after a part of a layer.
    fn after(&self, layer: usize, part: &str, x: Row) -> Row {
        if self.recipe.post_norms { self.norm(&format!("blk.{layer}.{part}"), &x) } else { x }
    }

    /// Queries (0), keys (1) or values (2) of a token, before they are cut into heads.
    fn project(&self, layer: usize, which: usize, x: &Row) -> Row {
        let r = &self.recipe;
        if !r.fused_attention {
            return self.linear(&format!("blk.{layer}.{}", ["attn_q", "attn_k", "attn_v"][which]), x);
        }
        let all = self.linear(&format!("blk.{layer}.attn_qkv"), x);
        let widths = [r.heads * r.key_length, r.kv_heads * r.key_length, r.kv_heads * r.value_length];
        let start: usize = widths[..which].iter().sum();
        all[start..][..widths[which]].to_vec()
    }

    /// The heads of queries or keys, with norms and rotary embedding.
    fn heads(&self, layer: usize, which: usize, position: usize, x: &Row) -> Vec<Row> {
        let r = &self.recipe;
        if let Some(latent) = r.latent {
            return self.latent_heads(layer, latent, which, position, x);
        }
        let name = format!("blk.{layer}.{}", ["attn_q_norm", "attn_k_norm"][which]);
        let mut all = self.project(layer, which, x);
        if r.query_norms == QueryNorms::All {
            all = self.norm(&name, &all);
        }
        let mut heads: Vec<Row> = all.chunks(r.key_length).map(<[f64]>::to_vec).collect();
        for (number, head) in heads.iter_mut().enumerate() {
            match r.query_norms {
                QueryNorms::Head => *head = self.norm(&name, head),
                QueryNorms::EachHead => {
                    let weights = &self.weights[&format!("{name}.weight")][number * r.key_length..];
                    *head = self.norm_with(&weights[..r.key_length], head);
                }
                QueryNorms::No | QueryNorms::All => {}
            }
            if r.has_rope(layer) && !r.positions {
                self.rope(r.has_window(layer), position, head);
                if r.plain_norms {
                    *head = self.norm_with(&vec![1.0; r.key_length], head);
                }
            } else if let Some((scale, length)) = r.temperature.filter(|_| which == 0) {
                let times = ((position + 1) / length) as f64;
                head.iter_mut().for_each(|v| *v *= 1.0 + f64::from(scale) * (times + 1.0).ln());
            }
        }
        heads
    }

    fn attention(&self, layer: usize, x: &[Row]) -> Vec<Row> {
        self.attention_over(layer, x, layer, x)
    }

    /// Attention over the keys and values that a layer makes of rows: the same, or those of an earlier one.
    fn attention_over(&self, layer: usize, x: &[Row], source: usize, keys_of: &[Row]) -> Vec<Row> {
        let r = &self.recipe;
        let norm = |layer: usize, x: &[Row]| -> Vec<Row> {
            x.iter().map(|row| self.before(layer, "attn_norm", row)).collect()
        };
        let (own, normed) = (norm(layer, x), norm(source, keys_of));
        let each = |which: usize| -> Vec<Vec<Row>> {
            let (layer, rows) = if which == 0 { (layer, &own) } else { (source, &normed) };
            rows.iter().enumerate().map(|(t, row)| self.heads(layer, which, t, row)).collect()
        };
        let (queries, keys) = (each(0), each(1));
        let values: Vec<Vec<Row>> = match r.latent {
            Some(_) => each(2),
            None => normed
                .iter()
                .map(|row| {
                    let heads = self.project(source, 2, row);
                    let heads = heads.chunks(r.value_length).map(<[f64]>::to_vec);
                    let normed = |head: Row| self.norm_with(&vec![1.0; r.value_length], &head);
                    heads.map(|head| if r.streams.is_some() { normed(head) } else { head }).collect()
                })
                .collect(),
        };
        let group = r.heads / r.kv_heads;
        let scale = r.attention_scale.map_or(1.0 / (r.key_length as f64).sqrt(), f64::from);
        // Files have 32 bits of it, and graphs compute with them.
        let scale = f64::from((scale * self.latent_magnitude().powi(2)) as f32);
        let cap = |v: f64| r.attention_cap.map_or(v, |cap| (v / f64::from(cap)).tanh() * f64::from(cap));
        let window = r.window.filter(|_| r.has_window(layer)).map_or(usize::MAX, |window| window as usize);
        (0..x.len())
            .map(|t| {
                let first = if r.chunked && window < usize::MAX {
                    t / window * window
                } else {
                    (t + 1).saturating_sub(window)
                };
                let mut all = Vec::new();
                for (head, query) in queries[t].iter().enumerate() {
                    let of = head / group;
                    let scores: Row = (first..=t).map(|s| cap(dot(query, &keys[s][of]) * scale)).collect();
                    let sink = r.sinks.then(|| self.weights[&format!("blk.{layer}.attn_sinks.weight")][head]);
                    let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                    let parts: Row = scores.iter().map(|score| (score - most).exp()).collect();
                    let sum: f64 = parts.iter().copied().chain(sink.map(|sink| (sink - most).exp())).sum();
                    let mut mixed = vec![0.0; r.value_length];
                    for (part, s) in parts.iter().zip(first..) {
                        mixed.iter_mut().zip(&values[s][of]).for_each(|(to, v)| *to += part / sum * v);
                    }
                    all.extend(mixed);
                }
                self.after(
                    layer,
                    "post_attention_norm",
                    self.linear(&format!("blk.{layer}.attn_output"), &all),
                )
            })
            .collect()
    }

    /// A feed-forward network; its experts are selected by the router's row, if that is another one.
    fn feed_forward(&self, layer: usize, router: Option<&Row>, x: &Row) -> Row {
        let r = &self.recipe;
        let normed = self.before(layer, if r.parallel { "attn_norm" } else { r.feed_forward_norm() }, x);
        if let Some(experts) = r.experts_of(layer) {
            return self.after(
                layer,
                "post_ffw_norm",
                self.mixture(layer, experts, router.unwrap_or(&normed), &normed),
            );
        }
        if r.ungated {
            let up = self.linear(&format!("blk.{layer}.ffn_up"), &normed);
            return self.down(layer, &up.into_iter().map(|v| v.max(0.0)).collect());
        }
        let (gate, up) = if r.fused_feed_forward {
            let both = self.linear(&format!("blk.{layer}.ffn_up"), &normed);
            (both[..r.feed_forward].to_vec(), both[r.feed_forward..].to_vec())
        } else {
            let linear = |part: &str| self.linear(&format!("blk.{layer}.{part}"), &normed);
            (linear("ffn_gate"), linear("ffn_up"))
        };
        let inner = self.gated(&self.cut(layer, gate), &up);
        self.after(layer, "post_ffw_norm", self.down(layer, &inner))
    }

    /// The last matrix of a feed-forward network.
    fn down(&self, layer: usize, inner: &Row) -> Row {
        if !self.recipe.transposed {
            return self.linear(&format!("blk.{layer}.ffn_down"), inner);
        }
        let rows = self.weights[&format!("blk.{layer}.ffn_down_t.weight")].chunks(self.recipe.width);
        let mut sum = vec![0.0; self.recipe.width];
        for (row, factor) in rows.zip(inner) {
            sum.iter_mut().zip(row).for_each(|(to, value)| *to += factor * value);
        }
        sum
    }

    /// The product of an activated gate with another row.
    fn gated(&self, gate: &Row, up: &Row) -> Row {
        let both = |(g, u): (&f64, &f64)| match self.recipe.architecture {
            "gpt-oss" => {
                let g = g.min(7.0);
                g / (1.0 + (-1.702 * g).exp()) * (u.clamp(-7.0, 7.0) + 1.0)
            }
            "smallthinker" => g.max(0.0) * u,
            "bamboo" => g.max(0.0) * u.max(0.0),
            _ if self.recipe.relu => g.max(0.0) * u,
            _ if self.recipe.gelu => {
                0.5 * g * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh()) * u
            }
            _ => g / (1.0 + (-g).exp()) * u,
        };
        gate.iter().zip(up).map(both).collect()
    }

    fn linear(&self, name: &str, x: &Row) -> Row {
        let mut y = multiply(&self.weights[&format!("{name}.weight")], x);
        if let Some(bias) = self.weights.get(&format!("{name}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, name: &str, x: &Row) -> Row {
        let mut normed = self.norm_with(&self.weights[&format!("{name}.weight")], x);
        if let Some(bias) = self.weights.get(&format!("{name}.bias")) {
            normed.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias);
        }
        normed
    }

    fn norm_with(&self, weights: &[f64], x: &Row) -> Row {
        let count = x.len() as f64;
        let middle = if self.recipe.layer_norm { x.iter().sum::<f64>() / count } else { 0.0 };
        let square = x.iter().map(|x| (x - middle).powi(2)).sum::<f64>() / count;
        let scale = 1.0 / (square + f64::from(1e-5f32)).sqrt();
        x.iter().zip(weights).map(|(x, w)| (x - middle) * scale * w).collect()
    }

    /// Applies RoPE to a head.
    fn rope(&self, window: bool, position: usize, head: &mut Row) {
        let r = &self.recipe;
        let half = r.rope_dims / 2;
        for i in 0..half {
            let (first, second) = if r.adjacent { (2 * i, 2 * i + 1) } else { (i, i + half) };
            let (frequency, magnitude) = match r.window_rope_base.filter(|_| window) {
                Some(base) => (f64::from(base).powf(-2.0 * i as f64 / r.rope_dims as f64), 1.0),
                None => self.frequency(i),
            };
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (head[first], head[second]);
            head[first] = (a * cos - b * sin) * magnitude;
            head[second] = (a * sin + b * cos) * magnitude;
        }
    }

    /// The root of what YaRN multiplies the scores of latent attention by, instead of the rotated elements.
    fn latent_magnitude(&self) -> f64 {
        let multiplier = self.recipe.latent.and_then(|latent| latent.log_multiplier);
        match (multiplier, self.recipe.scaling) {
            (Some(multiplier), Scaling::Yarn { factor, .. }) => {
                1.0 + f64::from(multiplier) * f64::from(factor).ln()
            }
            _ => 1.0,
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
        if r.long_factors {
            // The models' contexts are longer than the original one of 32.
            plain /= self.weights["rope_factors_long.weight"][pair];
        }
        let magnitude = f64::from(r.rope_magnitude);
        match r.scaling {
            Scaling::No => (plain, magnitude),
            Scaling::Linear(factor) => (plain / f64::from(factor), magnitude),
            Scaling::Yarn { factor, original } => {
                // The pair whose angle makes this number of rotations over the original context.
                let pair_of = |rotations: f64| {
                    dims * (f64::from(original) / (rotations * TAU)).ln() / (2.0 * base.ln())
                };
                let low = pair_of(32.0).floor().max(0.0);
                let high = pair_of(1.0).ceil().min(dims - 1.0);
                let stretched = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let factor = f64::from(factor);
                (
                    plain * (1.0 - stretched) + plain / factor * stretched,
                    magnitude
                        * if r.latent.is_some_and(|l| l.log_multiplier.is_some()) {
                            1.0
                        } else {
                            1.0 + 0.1 * factor.ln()
                        },
                )
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
