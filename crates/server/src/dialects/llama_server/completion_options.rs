//! What a completion's answer has beside the text.

use serde_json::Value;

use crate::generation::Prompt;

/// What is asked beside the generations themselves.
#[derive(Clone, Debug)]
pub(super) struct AnswerOptions {
    /// Whether whole answers have their tokens.
    pub(super) return_tokens: bool,
    pub(super) timings_per_token: bool,
    pub(super) return_progress: bool,
    /// Fields of whole answers; all if there are none.
    pub(super) response_fields: Vec<String>,
    /// `generation_settings`.
    pub(super) settings: Value,
    /// The prompts.
    pub(super) prompts: Vec<Prompt>,
    /// Answers to each prompt.
    pub(super) choices: usize,
}
