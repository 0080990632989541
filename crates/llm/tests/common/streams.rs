//! Random models with parallel residual streams.

use quadriga_graph::DType;

use super::{Parts, Recipe};

/// The rank of the branch beside attention, which no key tells.
pub const LAUREL_RANK: usize = 64;

/// The streams of a random model.
#[derive(Clone, Copy, Debug)]
pub struct StreamRecipe {
    pub count: usize,
    /// The width of a layer's inputs.
    pub input: usize,
    /// The last layers, which attend to the keys and values of others.
    pub shared: usize,
    /// The first layers, whose gates are cut at so many standard deviations.
    pub cut: (usize, f32),
}

impl Recipe {
    /// The layer whose keys and values a layer attends to, if it has none.
    pub fn shares_cache_of(&self, layer: usize) -> Option<usize> {
        let own = self.layers - self.streams?.shared.min(self.layers.saturating_sub(2));
        let of_kind = |earlier: &usize| self.has_window(*earlier) == self.has_window(layer);
        (layer >= own).then(|| (0..own).rev().find(of_kind).unwrap())
    }
}

impl StreamRecipe {
    pub fn add_keys(&self, recipe: &Recipe, parts: &mut Parts) {
        let key = |key: &str| format!("{}.{key}", recipe.architecture);
        parts.set(&key("altup.num_inputs"), self.count as u32);
        parts.set(&key("embedding_length_per_layer_input"), self.input as u32);
        let shared = (0..recipe.layers).filter(|layer| recipe.shares_cache_of(*layer).is_some()).count();
        parts.set(&key("attention.shared_kv_layers"), shared as u32);
        let (layers, cut) = self.cut;
        let cut = |layer: usize| if layer < layers { cut } else { f32::NEG_INFINITY };
        parts.set(&key("activation_sparsity_scale"), (0..recipe.layers).map(cut).collect::<Vec<_>>());
    }

    /// The tensors of no layer.
    pub fn add_tensors(&self, recipe: &Recipe, parts: &mut Parts) {
        let (width, inputs) = (recipe.width, self.input * recipe.layers);
        parts.stack("altup_proj.weight", recipe.dtype, self.count - 1, [width, width]);
        parts.stack("altup_unembd_proj.weight", recipe.dtype, self.count - 1, [width, width]);
        parts.matrix("per_layer_token_embd.weight", recipe.dtype, [recipe.vocabulary, inputs], 1.0);
        parts.matrix("per_layer_model_proj.weight", recipe.dtype, [inputs, width], 1.0);
        parts.vector("per_layer_proj_norm.weight", self.input, 1.0, 0.5);
    }

    pub fn add_layer(&self, recipe: &Recipe, layer: usize, parts: &mut Parts) {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let (width, count) = (recipe.width, self.count);
        for (part, dims, size) in [
            ("inp_gate", [self.input, width], 1.0),
            ("proj", [width, self.input], 1.0),
            ("laurel_l", [LAUREL_RANK, width], 1.0),
            ("laurel_r", [width, LAUREL_RANK], 1.0),
        ] {
            parts.matrix(&name(part), recipe.dtype, dims, size);
        }
        // Large ones, since what the router reads is divided by the width.
        parts.matrix(&name("altup_router"), DType::F32, [count, width], 40.0);
        parts.matrix(&name("altup_predict_coef"), DType::F32, [count * count, count], 0.7);
        parts.matrix(&name("altup_correct_coef"), DType::F32, [count, count], 0.7);
        for part in ["post_norm", "altup_correct_scale", "altup_router_norm", "laurel_post_norm"] {
            parts.vector(&name(part), width, 1.0, 0.5);
        }
    }
}
