//! Small models of other families than Llama's.

use super::recurrent::RecurrentRecipe;
use super::streams::StreamRecipe;
use super::{QueryNorms, Recipe, Scaling};

impl Recipe {
    /// Models of which few neurons are active, by name.
    pub fn rectified() -> Vec<(&'static str, Recipe)> {
        let relu = |architecture| Recipe { relu: true, ..Recipe::new(architecture) };
        let falcon = Recipe {
            layer_norm: true,
            parallel: true,
            ungated: true,
            fused_attention: true,
            tied: true,
            ..relu("falcon")
        };
        let opt = Recipe {
            layer_norm: true,
            ungated: true,
            tied: true,
            biases: true,
            output_bias: true,
            positions: true,
            kv_heads: 4,
            ..relu("opt")
        };
        vec![
            ("llama, transposed", Recipe { transposed: true, ..relu("llama") }),
            ("llama", relu("llama")),
            ("bamboo", Recipe { adjacent: true, transposed: true, ..relu("bamboo") }),
            ("falcon, transposed", Recipe { transposed: true, ..falcon.clone() }),
            ("falcon", falcon),
            ("opt", Recipe { transposed: true, ..opt }),
        ]
    }

    /// A model whose first layers cut their gates, so that few neurons are active there: Gemma 3n's.
    pub fn with_cut_gates() -> Recipe {
        let cut = Recipe::families().into_iter().find(|recipe| recipe.streams.is_some()).unwrap();
        Recipe { transposed: true, ..cut }
    }

    /// A small model of each architecture that is not Llama's with other biases and norms.
    pub fn families() -> Vec<Recipe> {
        let gemma = |architecture| Recipe {
            gelu: true,
            tied: true,
            embedding_scale: 8.0,
            ..Recipe::new(architecture)
        };
        vec![
            Recipe {
                adjacent: true,
                embedding_scale: 3.0,
                residual_scale: 0.3,
                attention_scale: Some(0.2),
                logit_scale: 0.125,
                ..Recipe::new("granite")
            },
            Recipe { layers: 5, adjacent: true, rope_period: 4, ..Recipe::new("smollm3") },
            Recipe { fused_attention: true, fused_feed_forward: true, ..Recipe::new("phi3") },
            gemma("gemma"),
            Recipe {
                post_norms: true,
                attention_cap: Some(5.0),
                logit_cap: Some(3.0),
                window: Some(6),
                window_period: 2,
                ..gemma("gemma2")
            },
            Recipe {
                layers: 7,
                post_norms: true,
                query_norms: QueryNorms::Head,
                window: Some(6),
                window_period: 6,
                rope_base: 1_000_000.0,
                window_rope_base: Some(10_000.0),
                scaling: Scaling::Linear(8.0),
                ..gemma("gemma3")
            },
            Recipe {
                layers: 7,
                post_norms: true,
                query_norms: QueryNorms::Head,
                attention_scale: Some(1.0),
                logit_cap: Some(3.0),
                window: Some(6),
                window_period: 2,
                names_period: true,
                rope_base: 1_000_000.0,
                window_rope_base: Some(10_000.0),
                streams: Some(StreamRecipe { count: 3, input: 24, shared: 3, cut: (2, 0.4) }),
                ..gemma("gemma3n")
            },
            Recipe {
                pre_norms: false,
                post_norms: true,
                query_norms: QueryNorms::All,
                ..Recipe::new("olmo2")
            },
            Recipe {
                adjacent: true,
                layer_norm: true,
                parallel: true,
                tied: true,
                logit_scale: 0.25,
                ..Recipe::new("command-r")
            },
            Recipe {
                adjacent: true,
                post_norms: true,
                biases: true,
                fused_feed_forward: true,
                rope_dims: 8,
                ..Recipe::new("glm4")
            },
            Recipe {
                layers: 4,
                tied: true,
                query_norms: QueryNorms::Head,
                recurrent: Some(RecurrentRecipe::ShortConvolutions { kernel: 3 }),
                ..Recipe::new("lfm2")
            },
            Recipe {
                heads: 0,
                kv_heads: 0,
                feed_forward: 0,
                tied: true,
                recurrent: Some(RecurrentRecipe::StateSpace),
                ..Recipe::new("mamba2")
            },
        ]
    }
}
