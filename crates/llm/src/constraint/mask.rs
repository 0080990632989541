//! The mask of one answer's next token, computed by a worker while the device computes the logits.

use std::panic::AssertUnwindSafe;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;
use toktrie::SimpleVob;

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

/// Lets a matcher see tokens, and computes the mask of the next one.
pub(super) fn next_mask(matcher: &mut Matcher, tokens: &[u32]) -> Result<SimpleVob, String> {
    if !tokens.is_empty() && !matcher.is_stopped() {
        matcher.consume_tokens(tokens).map_err(|error| plain(&error))?;
    }
    let mask = matcher.compute_mask_or_eos().map_err(|error| match plain(&error).as_str() {
        "NoExtensionBias" => "no token of the vocabulary continues the answer".to_owned(),
        reason => reason.to_owned(),
    })?;
    match mask.is_zero() {
        true => Err("the answer is complete, but the vocabulary has no end-of-generation token".to_owned()),
        false => Ok(mask),
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
