//! Layers that are left out of a file: the others are numbered again, in their names and in keys that have a value per layer.

use std::collections::BTreeSet;

use quadriga_gguf::{File, OwnedValue, Value};

use crate::error::QuantizeError;

/// The layers of a model that are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrunedLayers(BTreeSet<usize>);

impl PrunedLayers {
    /// Parses numbers of layers, separated by commas.
    pub fn parse(text: &str) -> Result<PrunedLayers, QuantizeError> {
        let wrong = |reason: String| QuantizeError::Prune { text: text.to_owned(), reason };
        let number = |part: &str| {
            part.trim().parse::<usize>().map_err(|_| wrong(format!("{part:?} is not a layer number")))
        };
        text.split(',').map(number).collect::<Result<_, _>>().map(PrunedLayers)
    }

    /// Whether no layer is left out.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The new name of a tensor; `None` if it belongs to a layer that is left out.
    pub(crate) fn rename(&self, name: &str) -> Option<String> {
        let numbered = name.strip_prefix("blk.").and_then(|rest| {
            let (layer, rest) = rest.split_once('.')?;
            Some((layer.parse::<usize>().ok()?, rest))
        });
        match numbered {
            Some((layer, _)) if self.0.contains(&layer) => None,
            Some((layer, rest)) => Some(format!("blk.{}.{rest}", layer - self.0.range(..layer).count())),
            None => Some(name.to_owned()),
        }
    }

    /// An error unless the model has these layers, and others.
    pub(crate) fn check(&self, layers: usize) -> Result<(), QuantizeError> {
        match self.0.last() {
            Some(layer) if *layer >= layers => {
                Err(QuantizeError::PrunedLayer { layer: *layer, last: layers.saturating_sub(1) })
            }
            Some(_) if self.0.len() >= layers => Err(QuantizeError::PrunedAll { layers }),
            _ => Ok(()),
        }
    }

    /// The keys that change: the number of layers, and lists with an element for each.
    pub(crate) fn keys(&self, file: &File) -> Vec<(String, OwnedValue)> {
        let Some(architecture) = file.value("general.architecture").and_then(|value| match value {
            Value::String(name) => Some(name.to_owned()),
            _ => None,
        }) else {
            return Vec::new();
        };
        let count = format!("{architecture}.block_count");
        let layers = file.value(&count).and_then(|value| usize::try_from(value.integer()?).ok());
        let Some(layers) = layers.filter(|_| !self.is_empty()) else { return Vec::new() };
        let own = |key: &str| key.strip_prefix(&architecture).is_some_and(|rest| rest.starts_with('.'));
        let mut changed = Vec::new();
        for (key, value) in file.metadata().filter(|(key, _)| own(key)) {
            if let Value::Array(list) = value
                && list.len() == layers
                && let Some(value) = self.kept(&mut list.iter())
            {
                changed.push((key.to_owned(), value));
            }
        }
        let left = layers.saturating_sub(self.0.len());
        changed.push((count, u32::try_from(left).unwrap_or(u32::MAX).into()));
        changed
    }

    /// The elements of a list that belong to layers that are kept; `None` for lists of other types than keys of models have.
    fn kept<'v>(&self, list: &mut dyn Iterator<Item = Value<'v>>) -> Option<OwnedValue> {
        let kept: Vec<Value<'v>> =
            list.enumerate().filter(|(layer, _)| !self.0.contains(layer)).map(|(_, value)| value).collect();
        macro_rules! all {
            ($($kind:ident)*) => {
                match kept.first()? {
                    $(Value::$kind(_) => kept
                        .iter()
                        .map(|value| match value { Value::$kind(value) => Some(*value), _ => None })
                        .collect::<Option<Vec<_>>>()
                        .map(Into::into),)*
                    _ => None,
                }
            };
        }
        all!(U8 I8 U16 I16 U32 I32 U64 I64 F32 F64 Bool)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_numbered_again() {
        let pruned = PrunedLayers::parse("3, 1").unwrap();
        for (name, new) in [
            ("blk.0.attn_q.weight", Some("blk.0.attn_q.weight")),
            ("blk.1.attn_q.weight", None),
            ("blk.2.attn_q.weight", Some("blk.1.attn_q.weight")),
            ("blk.4.ffn_up.weight", Some("blk.2.ffn_up.weight")),
            ("output.weight", Some("output.weight")),
        ] {
            assert_eq!(pruned.rename(name).as_deref(), new, "{name}");
        }
        assert!(pruned.check(4).is_ok());
        assert!(matches!(pruned.check(3), Err(QuantizeError::PrunedLayer { layer: 3, last: 2 })));
        assert!(matches!(
            PrunedLayers::parse("0,1").unwrap().check(2),
            Err(QuantizeError::PrunedAll { layers: 2 })
        ));
        for wrong in ["", "a", "1,,2", "-1", "1-3"] {
            assert!(PrunedLayers::parse(wrong).is_err(), "{wrong}");
        }
    }
}
