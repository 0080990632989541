//! Fields that several of OpenAI's requests have.

use std::time::Duration;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::ReasoningEffort;
use crate::prompt::MAX_CHOICES;

/// Longer than any connection lives.
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The number of answers.
pub(crate) fn choices(fields: &Fields<'_>) -> Result<usize, ApiError> {
    let choices = fields.count("n")?.or(fields.count("n_cmpl")?).unwrap_or(1);
    match choices {
        1..=MAX_CHOICES => Ok(choices),
        _ => Err(fields.error("n", format!("must be from 1 to {MAX_CHOICES}"))),
    }
}

/// The priority, in the engine's sense: requests of a higher one are started first. In vLLM's requests, those of a lower number.
pub(crate) fn priority(fields: &Fields<'_>) -> Result<i32, ApiError> {
    let priority = fields.integer("priority")?.unwrap_or(0);
    i32::try_from(priority).map(i32::saturating_neg).map_err(|_| fields.error("priority", "is out of range"))
}

/// Whether the prompt may be found in the KV cache, and be found there by others.
pub(crate) fn shares_prefix(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(fields.flag("cache_prompt")?.unwrap_or(true))
}

/// The efforts of reasoning that templates may know.
pub(crate) const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// How long answers are to be, which models of OpenAI can be told.
pub(crate) const VERBOSITIES: &[&str] = &["low", "medium", "high"];

/// How much the model is to reason: an effort by name, unless a budget of tokens leaves no room for any.
pub(crate) fn reasoning(
    fields: &Fields<'_>,
    effort: Option<&str>,
) -> Result<(ReasoningEffort, Option<usize>), ApiError> {
    let effort = match effort {
        None => ReasoningEffort::Default,
        Some("none") => ReasoningEffort::Off,
        Some(effort) => ReasoningEffort::Named(effort.to_owned()),
    };
    let names =
        ["reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget"];
    let mut budget = None;
    for name in names {
        budget = budget.or(fields.integer(name)?);
    }
    Ok(match budget {
        // A model may reason although it is asked not to; then it ends at once.
        Some(0) => (ReasoningEffort::Off, Some(0)),
        Some(budget) => (effort, usize::try_from(budget).ok()),
        None => (effort, None),
    })
}

/// What the chunks of a stream have beside the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StreamOptions {
    /// Whether it ends with a chunk of counted tokens.
    pub(crate) usage: bool,
    /// Whether every chunk has the tokens that are counted so far.
    pub(crate) continuous: bool,
    /// Whether there is a chunk for each part of the prompt.
    pub(crate) progress: bool,
    /// Whether each chunk has the speeds so far.
    pub(crate) timings: bool,
}

impl StreamOptions {
    pub(crate) fn new(fields: &Fields<'_>) -> Result<StreamOptions, ApiError> {
        let (usage, continuous) = match fields.object("stream_options")? {
            Some(options) => (
                options.flag("include_usage")?.unwrap_or(false),
                options.flag("continuous_usage_stats")?.unwrap_or(false),
            ),
            None => (false, false),
        };
        Ok(StreamOptions {
            usage,
            continuous,
            progress: fields.flag("return_progress")?.unwrap_or(false),
            timings: fields.flag("timings_per_token")?.unwrap_or(false),
        })
    }

    /// Whether the engine has to say how far it is with the prompt.
    pub(crate) fn needs_progress(self) -> bool {
        self.progress || self.timings
    }
}

/// Which parts of an answer are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ShownParts {
    /// The reasoning.
    pub(crate) reasoning: bool,
    /// The tokens of prompt and answer, by their numbers.
    pub(crate) token_ids: bool,
}

impl ShownParts {
    pub(crate) fn new(fields: &Fields<'_>) -> Result<ShownParts, ApiError> {
        Ok(ShownParts {
            reasoning: fields.flag("include_reasoning")?.unwrap_or(true),
            token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
        })
    }
}

/// Checks the fields about streams, for routes that have none.
pub(crate) fn check_stream(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.flag("stream")?;
    sse_ping(fields, NEVER)?;
    StreamOptions::new(fields)?;
    Ok(())
}

/// The time between two pings.
pub(crate) fn sse_ping(fields: &Fields<'_>, default: Duration) -> Result<Duration, ApiError> {
    Ok(match fields.integer("sse_ping_interval")? {
        None => default,
        Some(..=0) => NEVER,
        Some(seconds) => Duration::from_secs(seconds.unsigned_abs()).min(NEVER),
    })
}
