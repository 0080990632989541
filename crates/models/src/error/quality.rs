//! Errors of comparisons.

/// Why models could not be judged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum QualityError {
    #[error("the text has {found} tokens; one chunk needs {expected}")]
    ShortText { found: usize, expected: usize },
    #[error("the logits are not finite: the model is damaged")]
    NotFinite,
    #[error("the models have vocabularies of {reference} and {other} tokens: they cannot be compared")]
    Vocabulary { reference: usize, other: usize },
    #[error(
        "token {id} is {reference:?} in the reference and {other:?} in the other model: models with different vocabularies cannot \
         be compared"
    )]
    Token { id: usize, reference: String, other: String },
    #[error(
        "{which} has no vocabulary, and the model that it is compared with has one: they cannot be compared"
    )]
    NoVocabulary { which: &'static str },
    #[error(
        "no tensor of one model has the name and the shape of one of the other: their weights cannot be compared; -f TEXT \
         compares predictions"
    )]
    NoTensorPairs,
    #[error("cancelled")]
    Cancelled,
}
