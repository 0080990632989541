//! The memory of answers: of those that are collected until they are complete, and of those that wait for their clients to read them.
//! All answers of a server share it, so that no request takes the memory of the others.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use quadriga_llm::serving::{Event, TokenLogprobs};

use crate::error::{ApiError, ErrorKind};
use crate::generation::Generation;
use crate::operation::memory_room::{AnswerMemory, MemoryRoom};

/// The most tokens of a streamed answer that wait for a client to read them, beyond what buffers of the connection hold. One that
/// reads no more has its answer ended: its sequence is for others then.
pub const MAX_UNREAD: usize = 2048;

/// Bytes of a token of an answer that is collected: its text as it is gathered, and as it is written.
const TOKEN_BYTES: usize = 128;

/// The same for a log-probability, which is an object with a token, its text and its bytes while the answer is written.
const LOGPROB_BYTES: usize = 1024;

/// Tokens of an answer whose room is reserved. Longer ones take more as they grow: few have all the tokens that they may have.
const RESERVED_TOKENS: usize = 4096;

/// The memory that the answers of one request may take, of which some is reserved.
pub(crate) struct AnswerRoom {
    room: MemoryRoom,
    /// The most bytes.
    most: usize,
}

/// The memory of the answers of one request.
pub(crate) struct HeldAnswers {
    room: MemoryRoom,
    /// The most bytes.
    most: usize,
    /// Bytes that are reserved and not used yet.
    reserved: AtomicUsize,
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
    pub(crate) fn new(room: AnswerRoom, streamed: bool, answers: usize) -> HeldAnswers {
        let waiting = (0..answers).map(|_| AtomicUsize::new(0)).collect();
        let AnswerRoom { room, most } = room;
        let reserved = AtomicUsize::new(room.bytes());
        HeldAnswers { room, most, reserved, streamed, waiting }
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
        let rest = |left: usize| Some(left.saturating_sub(bytes));
        let left = self.reserved.fetch_update(Ordering::AcqRel, Ordering::Acquire, rest);
        let more = bytes.saturating_sub(left.unwrap_or_else(|left| left));
        if self.room.bytes().saturating_add(more) > self.most {
            return Err(Overflow::Share);
        }
        if self.room.grow(more) { Ok(()) } else { Err(Overflow::Pool) }
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
        let most = self.most >> 10;
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
            Overflow::Pool => no_room(),
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

/// The error of a request for which there is no memory now.
fn no_room() -> ApiError {
    let message = "the answers to other requests take all the memory that there is for them";
    ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(1))
}

impl AnswerRoom {
    /// Room for a stream, or for answers that are collected.
    fn new(memory: &AnswerMemory, streamed: bool) -> AnswerRoom {
        let (pool, most) = match streamed {
            true => (&memory.streamed, memory.streamed.most() / 2),
            false => (&memory.collected, collected_share(memory)),
        };
        AnswerRoom { room: MemoryRoom::new(pool), most }
    }
}

/// Bytes of a number of an embedding: as it is computed, and as it is written.
const NUMBER_BYTES: usize = 20;

/// Reserves the room of vectors with so many numbers, before any of them is computed.
pub(crate) fn reserve_numbers(memory: &AnswerMemory, numbers: usize) -> Result<MemoryRoom, ApiError> {
    let (bytes, most) = (numbers.saturating_mul(NUMBER_BYTES), collected_share(memory));
    if bytes > most {
        return Err(ApiError::invalid(format!(
            "the embeddings take {} KiB; at most {} KiB are collected for a request: send fewer texts",
            bytes.div_ceil(1 << 10),
            most >> 10
        )));
    }
    let room = MemoryRoom::new(&memory.collected);
    room.grow(bytes).then_some(room).ok_or_else(no_room)
}

/// The most bytes of the collected answers of one request: half of the memory of all answers.
fn collected_share(memory: &AnswerMemory) -> usize {
    memory.collected.most().saturating_add(memory.streamed.most()) / 2
}

/// Bytes of a token's log-probability beside those of so many others.
fn logprob_bytes(others: usize) -> usize {
    LOGPROB_BYTES.saturating_mul(others.saturating_add(1))
}

/// Reserves the room of answers that are collected before anything of them is computed. Refuses a request whose answers would not fit
/// once they have all the tokens that it asks for. Those that nothing but the context
/// limits are ended when they take too much. `prompts` are its parts with the tokens of their prompts.
pub(crate) fn reserve<'g>(
    memory: &AnswerMemory,
    context: usize,
    prompts: impl IntoIterator<Item = (&'g Generation, usize)>,
) -> Result<AnswerRoom, ApiError> {
    let (mut bytes, mut needed, mut count, mut first) = (0_usize, 0_usize, 0, None);
    for (generation, prompt) in prompts {
        let room = context.saturating_sub(prompt);
        let tokens = generation.max_tokens.unwrap_or(1).min(room);
        let logprobs = tokens.saturating_mul(generation.logprobs.map_or(0, logprob_bytes));
        let of_answers = |tokens: usize| {
            tokens.saturating_mul(TOKEN_BYTES).saturating_add(logprobs).saturating_mul(generation.choices)
        };
        let echoed = generation.prompt_logprobs.map_or(0, logprob_bytes).saturating_mul(prompt);
        bytes = bytes.saturating_add(of_answers(tokens)).saturating_add(echoed);
        needed = needed.saturating_add(of_answers(tokens.min(RESERVED_TOKENS))).saturating_add(echoed);
        count += 1;
        first.get_or_insert(generation);
    }
    let room = AnswerRoom::new(memory, first.is_some_and(|first| first.streamed));
    let Some(first) = first.filter(|first| !first.streamed) else { return Ok(room) };
    if bytes > room.most {
        let field = match (first.logprobs.filter(|count| *count > 0), first.choices) {
            _ if count > 1 => "prompt",
            (Some(_), _) => first.logprobs_field,
            (None, 1) => "max_tokens",
            (None, _) => "n",
        };
        let problem = format!(
            "asks for {} KiB of answers and log-probabilities; at most {} KiB are collected for a request: {WAY_OUT}",
            bytes.div_ceil(1 << 10),
            room.most >> 10
        );
        return Err(ApiError::field(field, problem));
    }
    room.room.grow(needed).then_some(room).ok_or_else(no_room)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use crate::generation::Prompt;

    fn generation(streamed: bool) -> Generation {
        Generation { streamed, max_tokens: Some(1), ..Generation::new(Prompt::Text(String::new())) }
    }

    /// So many log-probabilities of a prompt.
    fn prompt(tokens: usize) -> Event {
        let one = TokenLogprobs { logprob: 0.0, rank: 0, top: Vec::new() };
        Event::Prompt { logprobs: vec![one; tokens] }
    }

    #[test]
    fn collected_answers_reserve_their_room_and_leave_that_of_streams() {
        let memory = AnswerMemory::new(100 << 10);
        let asks = Generation { prompt_logprobs: Some(0), ..generation(false) };
        let reserve = |tokens| reserve(&memory, 1000, [(&asks, tokens)]);
        // One request may take half; all of them three quarters.
        let error = reserve(51).err().unwrap();
        assert!(error.message.contains("at most 50 KiB"), "{error}");
        let first = HeldAnswers::new(reserve(49).unwrap(), false, 1);
        let second = reserve(25).unwrap();
        let error = reserve(10).err().unwrap();
        assert_eq!(error.kind, ErrorKind::TooMany, "{error}");
        // What is reserved is there, and is not counted twice.
        assert_eq!(first.add(0, &prompt(49)), Ok(()));
        assert_eq!(first.bytes(), 49 * LOGPROB_BYTES + TOKEN_BYTES);
        // A stream goes on beside them.
        let room = super::reserve(&memory, 1000, [(&generation(true), 1)]).unwrap();
        assert_eq!(HeldAnswers::new(room, true, 1).add(0, &prompt(100)), Ok(()));
        drop(second);
        assert!(reserve(10).is_ok());
    }

    #[test]
    fn embeddings_share_the_memory_of_collected_answers() {
        let memory = AnswerMemory::new(1000 * NUMBER_BYTES);
        assert!(reserve_numbers(&memory, 501).unwrap_err().message.contains("fewer texts"));
        let first = reserve_numbers(&memory, 500).unwrap();
        assert_eq!(reserve_numbers(&memory, 500).unwrap_err().kind, ErrorKind::TooMany);
        let _second = reserve_numbers(&memory, 250).unwrap();
        drop(first);
        assert!(reserve_numbers(&memory, 500).is_ok());
    }

    #[test]
    fn an_answer_is_ended_where_its_share_or_all_memory_ends() {
        let memory = AnswerMemory::new(64 << 10);
        let stream = || HeldAnswers::new(reserve(&memory, 1000, [(&generation(true), 1)]).unwrap(), true, 1);
        let each = size_of::<TokenLogprobs>();
        let half = (8 << 10) / each;
        let streams = [stream(), stream()];
        assert_eq!(streams[0].add(0, &prompt(half)), Ok(()));
        assert_eq!(streams[0].add(0, &prompt(half)), Err(Overflow::Share));
        assert_eq!(streams[1].add(0, &prompt(half)), Ok(()));
        let third = stream();
        assert_eq!(third.add(0, &prompt(half)), Err(Overflow::Pool));
        assert_eq!(third.error(Overflow::Pool).kind, ErrorKind::TooMany);
        // The client of another one has read on.
        streams[0].take(0, &prompt(half));
        assert_eq!(third.add(0, &prompt(half)), Ok(()));
    }
}
