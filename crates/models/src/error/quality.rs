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
    #[error("cancelled")]
    Cancelled,
}
