//! A small random model of every architecture.

use quadriga_llm::Model;

use super::recurrent::RecurrentRecipe;
use super::{QueryNorms, Recipe};
use crate::recurrent_models::delta_recipes;

/// A small random model.
pub struct SmallModel {
    pub name: String,
    pub architecture: &'static str,
    pub model: Model,
    /// How many ranks its groups of heads are enough for.
    pub most_ranks: usize,
    pub window: Option<usize>,
}

/// Enough layers for three stages, and heads for four ranks where nothing else is smaller.
fn larger(recipe: Recipe) -> Recipe {
    let heads = if recipe.heads > 0 { (8, 4) } else { (0, 0) };
    let layers = recipe.layers.max(4);
    let positions = if recipe.latent.is_some() { (4, 4) } else { heads };
    Recipe { layers, heads: positions.0, kv_heads: positions.1, ..recipe }
}

fn small(name: &str, recipe: &Recipe, model: Model, most_ranks: usize) -> SmallModel {
    SmallModel {
        name: format!("{} ({name})", recipe.architecture),
        architecture: recipe.architecture,
        model,
        most_ranks,
        window: recipe.window.map(|window| window as usize),
    }
}

/// At least one of each architecture but the encoders.
pub fn small_models() -> Vec<SmallModel> {
    let mut recipes: Vec<(&str, Recipe)> =
        ["llama", "qwen2", "qwen3"].map(|architecture| ("plain", Recipe::new(architecture))).to_vec();
    recipes.push(("tied", Recipe { tied: true, ..Recipe::new("llama") }));
    recipes.push(("norms of each head", {
        let family = Recipe::families().into_iter().find(|recipe| recipe.architecture == "command-r");
        // The number of layers tells which models have them.
        Recipe { layers: 64, query_norms: QueryNorms::EachHead, ..family.unwrap() }
    }));
    recipes.push(("windows in all layers", Recipe { window: Some(5), ..Recipe::new("llama") }));
    recipes.extend(Recipe::families().into_iter().map(|recipe| ("family", recipe)));
    recipes.extend(Recipe::rectified());
    let several = |(_, recipe): &(&str, Recipe)| recipe.experts.is_some_and(|experts| experts.count > 1);
    recipes.extend(Recipe::with_experts().into_iter().filter(several));
    let olmo3 = recipes.iter().find(|(_, recipe)| recipe.architecture == "olmo2").unwrap().1.clone();
    recipes.push(("windows", Recipe { window: Some(6), window_period: 4, ..olmo3 }));
    let lfm2 = recipes.iter().find(|(_, recipe)| recipe.architecture == "lfm2").unwrap().1.clone();
    recipes.push(("windows", Recipe { window: Some(5), ..lfm2 }));
    let mut models = Vec::new();
    for (name, recipe) in recipes {
        let recipe = larger(recipe);
        // State spaces have two groups of heads.
        let most_ranks = if recipe.recurrent == Some(RecurrentRecipe::StateSpace) { 2 } else { 4 };
        models.push(small(name, &recipe, recipe.model(), most_ranks));
    }
    for recipe in delta_recipes() {
        let recipe = larger(recipe);
        // Linear attention has two key heads.
        let model = super::recurrent::parts_of(&recipe).model().unwrap();
        models.push(small("delta rule", &recipe, model, 2));
    }
    models
}
