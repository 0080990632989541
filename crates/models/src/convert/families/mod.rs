//! The families of models: which classes of `config.json` become which architecture, and how.

mod deepseek;
mod dense;
mod encoders;
mod experts;
mod fused;
mod gemma;
mod recurrent;

use super::builder::FileBuilder;
use super::config::Config;
use super::error::{ConvertError, ConvertResult};

/// A family of models.
pub(super) struct Family {
    /// The classes in `config.json`.
    pub(super) classes: &'static [&'static str],
    /// The architecture's name in GGUF files.
    pub(super) architecture: &'static str,
    /// What the names of a text model's tensors may begin with.
    pub(super) prefixes: &'static [&'static str],
    /// A tensor that every model of the family has, behind the prefix.
    pub(super) embedding: &'static str,
    /// Tensors that are left out: beginnings of names behind the prefix.
    pub(super) ignored: &'static [&'static str],
    /// Whether rows of the embedding without a token are cut off.
    pub(super) cuts_embedding: bool,
    /// Adds the keys.
    pub(super) keys: fn(&mut FileBuilder<'_>) -> ConvertResult<()>,
    /// Adds embedding, final norm, output matrix and whatever is not in a layer.
    pub(super) globals: fn(&mut FileBuilder<'_>) -> ConvertResult<()>,
    /// Adds the tensors of a layer.
    pub(super) layer: fn(&mut FileBuilder<'_>, usize) -> ConvertResult<()>,
}

/// The prefixes of models with and without images.
const TEXT_PREFIXES: &[&str] =
    &["model.", "model.language_model.", "language_model.model.", "language_model.", "", "model.text_model."];

/// What most families have in common.
const USUAL: Family = Family {
    classes: &[],
    architecture: "",
    prefixes: TEXT_PREFIXES,
    embedding: "embed_tokens.weight",
    ignored: &[],
    cuts_embedding: false,
    keys: super::common::common_keys,
    globals: |builder| super::common::LayerRules::PLAIN.globals(builder),
    layer: |builder, layer| {
        super::common::LayerRules::PLAIN.layer(builder, &format!("layers.{layer}."), layer)
    },
};

/// All families.
fn all() -> impl Iterator<Item = &'static Family> {
    [
        dense::FAMILIES,
        gemma::FAMILIES,
        experts::FAMILIES,
        deepseek::FAMILIES,
        recurrent::FAMILIES,
        encoders::FAMILIES,
    ]
    .into_iter()
    .flatten()
}

/// The classes of `config.json` that can be converted, with the architecture of each.
pub(super) fn classes() -> impl Iterator<Item = (&'static str, &'static str)> {
    all().flat_map(|family| family.classes.iter().map(|class| (*class, family.architecture)))
}

/// A family that becomes this architecture.
pub(super) fn of_architecture(architecture: &str) -> Option<&'static Family> {
    all().find(|family| family.architecture == architecture)
}

/// The family of a configuration.
pub(super) fn find(config: &Config) -> ConvertResult<&'static Family> {
    all().find(|family| family.classes.contains(&config.class())).ok_or_else(|| {
        let mut known: Vec<&str> = classes().map(|(class, _)| class).collect();
        known.sort_unstable();
        ConvertError::Architecture { name: config.class().to_owned(), known }
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_architecture_that_runs_can_be_converted() {
        let known: Vec<&str> = super::classes().map(|(_, architecture)| architecture).collect();
        for architecture in quadriga_llm::models::architectures() {
            assert!(known.contains(&architecture), "{architecture}");
        }
        let classes: Vec<&str> = super::classes().map(|(class, _)| class).collect();
        for class in &classes {
            assert_eq!(
                classes.iter().filter(|other| *other == class).count(),
                1,
                "{class} is in two families"
            );
        }
    }
}
