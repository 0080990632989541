//! The mask of one answer's next token, computed by a worker while the device computes the logits.

use std::panic::AssertUnwindSafe;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;
use toktrie::{SimpleVob, TokTrie};

/// The state of one answer under a constraint, shared by its hook and a worker.
pub(super) struct MaskJob {
    state: Mutex<MaskState>,
    done: Condvar,
}

struct MaskState {
    /// `None` while a worker has it.
    matcher: Option<Matcher>,
    /// Tokens that the matcher has not seen.
    tokens: Vec<u32>,
    /// Of the answer with all its tokens, once it is computed; or why it cannot be.
    mask: Option<Result<SimpleVob, String>>,
    /// Whether the job waits for a worker, or is worked on.
    queued: bool,
}

impl MaskJob {
    /// The state before the first token.
    pub(super) fn new(matcher: Matcher) -> MaskJob {
        let state = MaskState { matcher: Some(matcher), tokens: Vec::new(), mask: None, queued: false };
        MaskJob { state: Mutex::new(state), done: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, MaskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds tokens; whether a worker is needed now.
    pub(super) fn add(&self, tokens: &[u32]) -> bool {
        let mut state = self.lock();
        // After a failure nothing can be computed any more.
        if matches!(state.mask, Some(Err(_))) {
            return false;
        }
        state.tokens.extend_from_slice(tokens);
        if !tokens.is_empty() {
            state.mask = None;
        }
        let needed = state.mask.is_none() && !state.queued;
        state.queued |= needed;
        needed
    }

    /// Waits for the mask and uses it.
    pub(super) fn with_mask<T>(&self, use_mask: impl FnOnce(Result<&SimpleVob, &str>) -> T) -> T {
        let mut state = self.lock();
        while state.queued {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        use_mask(match &state.mask {
            Some(Ok(mask)) => Ok(mask),
            Some(Err(reason)) => Err(reason),
            None => Err("no mask was computed"),
        })
    }

    /// A worker's part: computes until the matcher has seen all tokens.
    pub(super) fn work(&self) {
        let mut state = self.lock();
        loop {
            let tokens = std::mem::take(&mut state.tokens);
            let Some(mut matcher) = state.matcher.take() else {
                state.mask = Some(Err("the grammar's state was lost".to_owned()));
                break;
            };
            drop(state);
            let computed = std::panic::catch_unwind(AssertUnwindSafe(|| next_mask(&mut matcher, &tokens)));
            let computed = computed.unwrap_or_else(|_| Err("the grammar's compiler failed".to_owned()));
            state = self.lock();
            state.matcher = Some(matcher);
            let ends = state.tokens.is_empty() || computed.is_err();
            if ends {
                state.mask = Some(computed);
                break;
            }
        }
        state.queued = false;
        self.done.notify_all();
    }
}

/// Masks of the beginning of an answer that are tried when its grammar is compiled.
const OPENING: usize = 4;

/// Tries how an answer begins, as far as there is one way: what fails there is the grammar's error, and not one of the answer.
pub(super) fn check_opening(mut matcher: Matcher) -> Result<(), String> {
    let vocabulary = matcher.tok_env().map_err(|error| plain(&error))?;
    for _ in 0..OPENING {
        next_mask(&mut matcher, &[])?;
        let forced = matcher.compute_ff_bytes();
        // Control tokens have no text.
        if forced.is_empty() || forced.contains(&TokTrie::SPECIAL_TOKEN_MARKER) {
            break;
        }
        let tokens = vocabulary.tokenize_bytes(&forced);
        let taken = matcher.try_consume_tokens(&tokens).map_err(|error| in_words(&plain(&error)))?;
        // Where the vocabulary has other tokens for it, the answer decides.
        if taken < tokens.len() || matcher.is_stopped() {
            break;
        }
    }
    Ok(())
}

/// Lets a matcher see tokens, and computes the mask of the next one.
pub(super) fn next_mask(matcher: &mut Matcher, tokens: &[u32]) -> Result<SimpleVob, String> {
    if !tokens.is_empty() && !matcher.is_stopped() {
        matcher.consume_tokens(tokens).map_err(|error| in_words(&plain(&error)))?;
    }
    let mask = matcher.compute_mask_or_eos().map_err(|error| in_words(&plain(&error)))?;
    match mask.is_zero() {
        true => Err("the answer is complete, but the vocabulary has no end-of-generation token".to_owned()),
        false => Ok(mask),
    }
}

/// Limits of the parser by words of its errors.
const LIMITS: [&str; 4] = ["Current row has", "Too many items", "too many expressions", "too many states"];

/// The parser's error in words that concern whoever wrote the grammar.
fn in_words(reason: &str) -> String {
    if reason.contains("NoExtensionBias") {
        "no token of the vocabulary continues the answer".to_owned()
    } else if LIMITS.iter().any(|words| reason.contains(words)) {
        "the grammar allows too many continuations at once; use fewer alternatives and optional parts"
            .to_owned()
    } else {
        reason.to_owned()
    }
}

/// Characters of an error at its beginning and at its end; the reason is often at the end.
const SHOWN: (usize, usize) = (300, 500);

/// An error without the state and the stack that the compiler appends, and without the middle of a long one.
pub(super) fn plain(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default();
    let text = text.strip_prefix("panic: ").unwrap_or(text).trim_end();
    let count = text.chars().count();
    if count <= SHOWN.0 + SHOWN.1 {
        return text.to_owned();
    }
    let beginning = text.chars().take(SHOWN.0);
    beginning.chain(" … ".chars()).chain(text.chars().skip(count - SHOWN.1)).collect()
}
