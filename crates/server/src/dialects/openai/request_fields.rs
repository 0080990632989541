//! Fields that several of OpenAI's requests have.

use std::time::Duration;

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{NO_BUDGET, ReasoningEffort};
use crate::model::ServedModel;
use crate::prompt::MAX_CHOICES;
use crate::reasoning_output::ReasoningOutput;

/// Longer than any connection lives.
const NEVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The number of answers.
pub(crate) fn choices(fields: &Fields<'_>) -> Result<usize, ApiError> {
    let mut found = None;
    for name in ["n", "n_cmpl"] {
        let Some(choices) = fields.count(name)? else { continue };
        if !(1..=MAX_CHOICES).contains(&choices) {
            return Err(fields.error(name, format!("must be from 1 to {MAX_CHOICES}")));
        }
        found.get_or_insert(choices);
    }
    Ok(found.unwrap_or(1))
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

/// Fields of chat completions that are refused, unless their value turns them off.
pub(crate) const REFUSED_OF_CHATS: &[&str] = &["echo", "audio"];

/// The same of responses.
pub(crate) const REFUSED_OF_RESPONSES: &[&str] = &["prompt_logprobs", "return_token_ids"];

/// Fields of responses that name something which would have been stored.
pub(crate) const STORED: [&str; 3] = ["previous_response_id", "conversation", "prompt"];

/// The efforts of reasoning that templates may know.
pub(crate) const EFFORTS: &[&str] = &["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// How long answers are to be, which models of OpenAI can be told.
pub(crate) const VERBOSITIES: &[&str] = &["low", "medium", "high"];

/// The names of the most tokens of reasoning; the first that is there counts.
pub(crate) const REASONING_BUDGETS: [&str; 4] =
    ["reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget"];

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
    let mut budget = None;
    for name in REASONING_BUDGETS {
        let tokens = fields.integer(name)?;
        budget = budget.or(tokens);
    }
    Ok(match budget {
        // A model may reason although it is asked not to; then it ends at once.
        Some(0) => (ReasoningEffort::Off, Some(0)),
        Some(budget) => (effort, Some(usize::try_from(budget).unwrap_or(NO_BUDGET))),
        None => (effort, None),
    })
}

/// The slot that an answer is to have, if it is free; -1 for any.
pub(crate) fn slot(fields: &Fields<'_>, served: &ServedModel) -> Result<Option<usize>, ApiError> {
    const NAME: &str = "id_slot";
    let count = served.options.engine.sequences;
    match fields.integer(NAME)? {
        None | Some(-1) => Ok(None),
        Some(number) => match usize::try_from(number).ok().filter(|slot| *slot < count) {
            Some(slot) => Ok(Some(slot)),
            None => {
                let problem = format!(
                    "is {number}; there are the slots 0 to {}, or -1 for any",
                    count.saturating_sub(1)
                );
                Err(fields.error(NAME, problem))
            }
        },
    }
}

/// The schema of a slot, of which models have different numbers.
pub(crate) fn slot_schema() -> Value {
    json!({ "type": "integer", "minimum": -1, "maximum": 9_000_000_000_000_000_i64 })
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
    /// The slot that the answer had.
    pub(crate) slot: bool,
}

impl ShownParts {
    pub(crate) fn new(fields: &Fields<'_>) -> Result<ShownParts, ApiError> {
        Ok(ShownParts {
            reasoning: fields.flag("include_reasoning")?.unwrap_or(true),
            token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
            slot: fields.has("id_slot"),
        })
    }
}

/// Where the reasoning is in the answer; as the server's flag says if the request does not.
pub(crate) fn reasoning_output(
    fields: &Fields<'_>,
    served: &ServedModel,
) -> Result<ReasoningOutput, ApiError> {
    let name = fields.one_of("reasoning_format", &ReasoningOutput::NAMES)?;
    Ok(name.and_then(ReasoningOutput::named).unwrap_or(served.reasoning_output))
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
