//! Whether two models have the same tokens: predictions and weights of others cannot be compared.

use quadriga_gguf::File;

use crate::error::{QualityError, Result};

/// The type of tokens that stand for text, by `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;

/// An error that says what differs unless both files have the same vocabulary. Control tokens and those that nothing uses may
/// have other names: models that were trained further give them some. Files without a vocabulary are not told apart.
pub fn check_vocabularies(reference: &File, other: &File) -> Result<()> {
    let (ours, theirs) = (tokens(reference)?, tokens(other)?);
    let (Some(ours), Some(theirs)) = (&ours, &theirs) else {
        return match (ours, theirs) {
            (None, None) => Ok(()),
            (None, _) => Err(QualityError::NoVocabulary { which: "the reference" }.into()),
            _ => Err(QualityError::NoVocabulary { which: "the other model" }.into()),
        };
    };
    if ours.len() != theirs.len() {
        return Err(QualityError::Vocabulary { reference: ours.len(), other: theirs.len() }.into());
    }
    let (our_types, their_types) = (types(reference), types(other));
    let is_text = |types: &[i32], id: usize| types.get(id).is_none_or(|kind| *kind == NORMAL);
    let differs = |id: &usize| ours.get(*id) != theirs.get(*id);
    let found =
        (0..ours.len()).filter(differs).find(|id| is_text(&our_types, *id) || is_text(&their_types, *id));
    match found {
        Some(id) => {
            let text = |tokens: &[&str]| tokens.get(id).map_or_else(String::new, |token| (*token).to_owned());
            Err(QualityError::Token { id, reference: text(ours), other: text(theirs) }.into())
        }
        None => Ok(()),
    }
}

fn tokens(file: &File) -> Result<Option<Vec<&str>>> {
    Ok(file.find("tokenizer.ggml.tokens")?)
}

/// The types of tokens; empty if the file has none, or none that are integers.
fn types(file: &File) -> Vec<i32> {
    file.find("tokenizer.ggml.token_type").ok().flatten().unwrap_or_default()
}
