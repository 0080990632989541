//! Parallel residual streams in f64.

use super::super::streams::StreamRecipe;
use super::{Reference, Row, dot, multiply};

/// Graphs have 32 bits of it.
fn root(x: f32) -> f64 {
    f64::from(x.sqrt())
}

impl Reference {
    /// The rows after the last layer of a model with streams.
    pub(super) fn run_streams(&self, recipe: StreamRecipe, tokens: &[u32], embedded: &[Row]) -> Vec<Row> {
        let r = &self.recipe;
        let inputs: Vec<Row> = tokens.iter().zip(embedded).map(|(t, x)| self.inputs(recipe, *t, x)).collect();
        let mut streams: Vec<Vec<Row>> = embedded.iter().map(|x| self.split(recipe, x)).collect();
        let mut active_rows: Vec<Vec<Row>> = Vec::new();
        for layer in 0..r.layers {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let predictions: Vec<Vec<Row>> =
                streams.iter().map(|streams| self.predict(layer, streams)).collect();
            active_rows.push(predictions.iter().map(|streams| streams[0].clone()).collect());
            let source = r.shares_cache_of(layer).unwrap_or(layer);
            let attended = self.attention_over(layer, &active_rows[layer], source, &active_rows[source]);
            for (t, streams) in streams.iter_mut().enumerate() {
                let active = &predictions[t][0];
                let normed = self.before(layer, "attn_norm", active);
                let low = self.linear(&name("laurel_r"), &self.linear(&name("laurel_l"), &normed));
                let laurel = sum(&normed, &self.norm(&name("laurel_post_norm"), &low));
                let mixed = scaled(&sum(&sum(active, &attended[t]), &laurel), root(0.5));
                let computed = sum(&mixed, &self.feed_forward(layer, None, &mixed));
                let modalities = self.modalities(layer, &computed);
                let factors = self.linear(&name("altup_correct_coef"), &modalities);
                let error = sum(&computed, &scaled(active, -1.0));
                *streams = predictions[t]
                    .iter()
                    .zip(factors)
                    .map(|(stream, factor)| sum(stream, &scaled(&error, factor + 1.0)))
                    .collect();
                let scale = &self.weights[&name("altup_correct_scale.weight")];
                let first: Row = streams[0].iter().zip(scale).map(|(a, b)| a * b).collect();
                let input = inputs[t][layer * recipe.input..][..recipe.input].to_vec();
                let gated = self.gated(&self.linear(&name("inp_gate"), &first), &input);
                let added = self.norm(&name("post_norm"), &self.linear(&name("proj"), &gated));
                streams.iter_mut().skip(1).for_each(|stream| *stream = sum(stream, &added));
            }
        }
        streams.iter().map(|streams| self.join(recipe, streams)).collect()
    }

    /// Gates of a layer, cut where they are.
    pub(super) fn cut(&self, layer: usize, gate: Row) -> Row {
        let Some((layers, by)) = self.recipe.streams.map(|streams| streams.cut) else { return gate };
        if layer >= layers {
            return gate;
        }
        let count = gate.len() as f64;
        let mean = gate.iter().sum::<f64>() / count;
        let squares = gate.iter().map(|g| (g - mean).powi(2)).sum::<f64>();
        // The mean of the squares: the model is trained so.
        let deviation = (squares / gate.len() as f64).sqrt();
        gate.iter().map(|g| (g - mean - deviation * f64::from(by)).max(0.0)).collect()
    }

    fn inputs(&self, recipe: StreamRecipe, token: u32, x: &Row) -> Row {
        let (len, all) = (recipe.input, recipe.input * self.recipe.layers);
        let embedded = &self.weights["per_layer_token_embd.weight"][token as usize * all..][..all];
        let product = self.linear("per_layer_model_proj", x);
        let product = scaled(&product, f64::from(1.0 / (x.len() as f32).sqrt()));
        let normed = product.chunks(len).flat_map(|part| self.norm("per_layer_proj_norm", &part.to_vec()));
        let both = normed.zip(embedded).map(|(a, b)| (a + b * root(len as f32)) * root(0.5));
        both.collect()
    }

    fn split(&self, recipe: StreamRecipe, x: &Row) -> Vec<Row> {
        let matrices = self.weights["altup_proj.weight"].chunks(x.len() * x.len());
        let others = matrices.map(|matrix| as_long_as(x, &multiply(matrix, x)));
        let all: Vec<Row> = std::iter::once(x.clone()).chain(others).collect();
        assert_eq!(all.len(), recipe.count);
        all
    }

    fn join(&self, recipe: StreamRecipe, streams: &[Row]) -> Row {
        let first = &streams[0];
        let matrices = self.weights["altup_unembd_proj.weight"].chunks(first.len() * first.len());
        let others = matrices.zip(&streams[1..]).map(|(matrix, x)| as_long_as(first, &multiply(matrix, x)));
        let total = others.fold(first.clone(), |total, other| sum(&total, &other));
        scaled(&total, f64::from(1.0 / recipe.count as f32))
    }

    fn modalities(&self, layer: usize, x: &Row) -> Row {
        let normed = self.norm(&format!("blk.{layer}.altup_router_norm"), x);
        let logits = self
            .linear(&format!("blk.{layer}.altup_router"), &scaled(&normed, f64::from(1.0 / x.len() as f32)));
        logits.iter().map(|v| v.tanh()).collect()
    }

    fn predict(&self, layer: usize, streams: &[Row]) -> Vec<Row> {
        let modalities = self.modalities(layer, &streams[0]);
        let mixture = self.linear(&format!("blk.{layer}.altup_predict_coef"), &modalities);
        let mixed = mixture.chunks(streams.len()).map(|factors| {
            let add = |total: Row, (stream, factor): (&Row, &f64)| sum(&total, &scaled(stream, *factor));
            streams.iter().zip(factors).fold(vec![0.0; streams[0].len()], add)
        });
        streams.iter().zip(mixed).map(|(stream, mixed)| sum(stream, &mixed)).collect()
    }
}

fn sum(a: &Row, b: &Row) -> Row {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn scaled(x: &Row, factor: f64) -> Row {
    x.iter().map(|v| v * factor).collect()
}

fn as_long_as(x: &Row, y: &Row) -> Row {
    scaled(y, (dot(x, x) / dot(y, y)).sqrt())
}
