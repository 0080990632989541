//! The memory of answers: of those that are collected until they are complete, and of those that wait for their clients to read them.
//! All answers of a server share it, so that no request takes the memory of the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use quadriga_llm::serving::{Event, TokenLogprobs};

use crate::error::{ApiError, ErrorKind};
use crate::generation::Generation;
use crate::operation::memory_room::{MemoryPool, MemoryRoom};

/// The most tokens of a streamed answer that wait for a client to read them, beyond what buffers of the connection hold. One that
/// reads no more has its answer ended: its sequence is for others then.
pub const MAX_UNREAD: usize = 2048;

/// Bytes of a token of an answer that is collected: its text as it is gathered, and as it is written.
const TOKEN_BYTES: usize = 128;

/// The same for a log-probability, which is an object with a token, its text and its bytes while the answer is written.
const LOGPROB_BYTES: usize = 1024;

/// One request may take this part of the memory for answers.
const SHARE: usize = 2;

/// The memory of the answers of one request.
pub(crate) struct HeldAnswers {
    room: MemoryRoom,
    /// Whether the client reads them while they are generated.
    streamed: bool,
    /// Of each answer, the tokens that were generated and are not taken yet.
    waiting: Vec<AtomicUsize>,
}

/// Why an answer is ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Overflow {
    /// Its client does not read it.
    Unread,
    /// The request takes its share of the memory.
    Share,
    /// All requests take all of it.
    Pool,
}

impl HeldAnswers {
    /// For so many answers.
    pub(crate) fn new(pool: &Arc<MemoryPool>, streamed: bool, answers: usize) -> HeldAnswers {
        let waiting = (0..answers).map(|_| AtomicUsize::new(0)).collect();
        HeldAnswers { room: MemoryRoom::new(pool), streamed, waiting }
    }

    /// Takes room for an event of an answer, on the engine's thread.
    ///
    /// # Errors
    /// There is none, and the answer has to be ended.
    pub(crate) fn add(&self, answer: usize, event: &Event) -> Result<(), Overflow> {
        if self.streamed
            && matches!(event, Event::Token { .. })
            && let Some(waiting) = self.waiting.get(answer)
            && waiting.fetch_add(1, Ordering::Relaxed) >= MAX_UNREAD
        {
            return Err(Overflow::Unread);
        }
        let bytes = self.bytes_of(event);
        if self.room.bytes().saturating_add(bytes) > share(self.room.pool()) {
            return Err(Overflow::Share);
        }
        if self.room.grow(bytes) { Ok(()) } else { Err(Overflow::Pool) }
    }

    /// An event was taken. What is streamed is the connection's from now on.
    pub(crate) fn take(&self, answer: usize, event: &Event) {
        if !self.streamed {
            return;
        }
        self.room.shrink(self.bytes_of(event));
        if let Some(waiting) = self.waiting.get(answer).filter(|_| matches!(event, Event::Token { .. })) {
            waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The bytes that they take.
    pub(crate) fn bytes(&self) -> usize {
        self.room.bytes()
    }

    /// The answers are written: the text of so many bytes is all that is left of them.
    pub(crate) fn note_written(&self, bytes: usize) {
        self.room.shrink(self.room.bytes().saturating_sub(bytes));
    }

    /// The error of answers that were ended.
    pub(crate) fn error(&self, overflow: Overflow) -> ApiError {
        let most = share(self.room.pool()) >> 10;
        match overflow {
            Overflow::Unread => {
                let message = format!(
                    "{MAX_UNREAD} tokens waited for a client that did not read them, and the answer was ended"
                );
                ApiError::new(ErrorKind::Unavailable, message)
            }
            Overflow::Share if self.streamed => {
                let message = format!(
                    "{most} KiB waited for a client that did not read them, and the answer was ended"
                );
                ApiError::new(ErrorKind::Unavailable, message)
            }
            Overflow::Share => ApiError::invalid(format!(
                "the answer takes more than {most} KiB before it is complete; {WAY_OUT}"
            )),
            Overflow::Pool => {
                let message = "the answers to other requests take all the memory that there is for them";
                ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(1))
            }
        }
    }

    /// The bytes that an event takes until it is taken; of what is collected, until it is written.
    fn bytes_of(&self, event: &Event) -> usize {
        let logprobs = |found: &TokenLogprobs| match self.streamed {
            true => size_of::<TokenLogprobs>() + found.top.len() * size_of::<(u32, f64)>(),
            false => logprob_bytes(found.top.len()),
        };
        match event {
            Event::Token { logprobs: found, .. } => TOKEN_BYTES + found.as_ref().map_or(0, logprobs),
            Event::Prompt { logprobs: found } => found.iter().map(logprobs).sum(),
            _ => 0,
        }
    }
}

const WAY_OUT: &str = "ask for fewer answers, tokens or log-probabilities, or for a stream";

/// The most bytes of one request.
fn share(pool: &MemoryPool) -> usize {
    pool.most() / SHARE
}

/// Bytes of a token's log-probability beside those of so many others.
fn logprob_bytes(others: usize) -> usize {
    LOGPROB_BYTES.saturating_mul(others.saturating_add(1))
}

/// Refuses a request whose answers would not fit once they have all the tokens that it asks for. Those that nothing but the context
/// limits are ended when they take too much. `prompts` are its parts with the tokens of their prompts.
pub(crate) fn check<'g>(
    pool: &MemoryPool,
    context: usize,
    prompts: impl IntoIterator<Item = (&'g Generation, usize)>,
) -> Result<(), ApiError> {
    let (mut bytes, mut count, mut first) = (0_usize, 0, None);
    for (generation, prompt) in prompts {
        let room = context.saturating_sub(prompt);
        let tokens = generation.max_tokens.unwrap_or(1).min(room);
        let each = TOKEN_BYTES + generation.logprobs.map_or(0, logprob_bytes);
        let answers = tokens.saturating_mul(each).saturating_mul(generation.choices);
        let echoed = generation.prompt_logprobs.map_or(0, logprob_bytes).saturating_mul(prompt);
        bytes = bytes.saturating_add(answers).saturating_add(echoed);
        count += 1;
        first.get_or_insert(generation);
    }
    let Some(first) = first.filter(|first| !first.streamed && bytes > share(pool)) else { return Ok(()) };
    let field = match (first.logprobs.filter(|count| *count > 0), first.choices) {
        _ if count > 1 => "prompt",
        (Some(_), _) => first.logprobs_field,
        (None, 1) => "max_tokens",
        (None, _) => "n",
    };
    let problem = format!(
        "asks for {} KiB of answers and log-probabilities; at most {} KiB are collected for a request: {WAY_OUT}",
        bytes.div_ceil(1 << 10),
        share(pool) >> 10
    );
    Err(ApiError::field(field, problem))
}
