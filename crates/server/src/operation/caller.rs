//! Who asks: a key with its limits, or anybody.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{ApiError, ErrorKind};
use crate::operation::memory_room::AnswerMemory;

/// The time over which tokens are counted.
const MINUTE: Duration = Duration::from_secs(60);

/// What the holder of a key may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeyLimits {
    /// Tokens of prompts and answers within a minute; no limit if `None`.
    pub tokens_per_minute: Option<u64>,
    /// Requests that are answered at the same time; no limit if `None`.
    pub concurrent: Option<usize>,
}

/// What the holder of a key uses.
#[derive(Debug, Default)]
struct KeyUse {
    running: usize,
    /// Tokens that running requests may still use.
    reserved: u64,
    /// Tokens of the last minute, by the time at which they were counted.
    tokens: VecDeque<(Instant, u64)>,
}

/// Who asks.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    client: u64,
    limits: KeyLimits,
    usage: Arc<Mutex<KeyUse>>,
    /// The memory for its answers and those of all others.
    answers: AnswerMemory,
}

/// A request of a caller, until it is dropped.
#[derive(Debug)]
pub struct CallerUse {
    usage: Arc<Mutex<KeyUse>>,
    tokens_per_minute: Option<u64>,
    /// Tokens of it that are reserved and not used yet.
    reserved: AtomicU64,
    answers: AnswerMemory,
}

/// Tokens that a request may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TokenNeed {
    /// Those that it asks for.
    pub asked: u64,
    /// The most that it can use. They are more than it asks for if nothing but the context limits its answer.
    pub most: u64,
}

impl TokenNeed {
    /// Of a request whose tokens are known.
    pub fn exact(tokens: usize) -> TokenNeed {
        TokenNeed { asked: tokens as u64, most: tokens as u64 }
    }
}

impl std::iter::Sum for TokenNeed {
    fn sum<I: Iterator<Item = TokenNeed>>(needs: I) -> TokenNeed {
        needs.fold(TokenNeed::default(), |sum, need| TokenNeed {
            asked: sum.asked.saturating_add(need.asked),
            most: sum.most.saturating_add(need.most),
        })
    }
}

impl Caller {
    /// A caller with limits. Callers of one number get one share of the engine.
    pub fn new(client: u64, limits: KeyLimits) -> Caller {
        Caller { client, limits, usage: Arc::default(), answers: AnswerMemory::default() }
    }

    /// The same caller, whose answers take part of this memory.
    #[must_use]
    pub(crate) fn with_answer_memory(self, answers: &AnswerMemory) -> Caller {
        Caller { answers: answers.clone(), ..self }
    }

    /// The same caller with other limits.
    #[must_use]
    pub fn with_limits(&self, limits: KeyLimits) -> Caller {
        Caller { limits, ..self.clone() }
    }

    /// The number under which requests get a share of the engine.
    pub fn client(&self) -> u64 {
        self.client
    }

    /// Begins a request, if the limits allow it. Its tokens are reserved until they are used or it ends, as far as the limit
    /// goes: what it asks for must be left.
    pub fn begin(&self, need: TokenNeed) -> Result<CallerUse, ApiError> {
        let begun = self.enter()?;
        begun.reserve(need)?;
        Ok(begun)
    }

    /// Begins a request whose tokens are not known yet: it is one of those at a time before anything is computed for it.
    pub fn enter(&self) -> Result<CallerUse, ApiError> {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(most) = self.limits.concurrent.filter(|most| usage.running >= *most) {
            let message = format!("the key may have {most} requests at a time; wait until one is answered");
            return Err(ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(1)));
        }
        usage.running += 1;
        let tokens_per_minute = self.limits.tokens_per_minute;
        Ok(CallerUse {
            usage: Arc::clone(&self.usage),
            tokens_per_minute,
            reserved: AtomicU64::new(0),
            answers: self.answers.clone(),
        })
    }
}

impl CallerUse {
    /// The memory for its answers.
    pub(crate) fn answer_memory(&self) -> &AnswerMemory {
        &self.answers
    }

    /// Reserves the tokens of the request, if as many as it asks for are left, and returns how many it may use: they may be fewer
    /// than the most that it can.
    pub fn reserve(&self, need: TokenNeed) -> Result<u64, ApiError> {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        usage.forget_before(now);
        if let Some(most) = self.tokens_per_minute {
            let left = most.saturating_sub(usage.sum()).saturating_sub(usage.reserved);
            let asked = need.asked;
            if asked > most {
                // It would be refused at any time.
                return Err(ApiError::invalid(format!(
                    "the key may use {most} tokens a minute, but prompt and answer may have {asked}; lower max_tokens"
                )));
            }
            if left == 0 || asked > left {
                let oldest = usage.tokens.front().map_or(MINUTE, |(at, _)| MINUTE.saturating_sub(now - *at));
                let message = format!(
                    "the key may use {most} tokens a minute, of which {left} are left, but prompt and answer may have \
                     {asked}; try again later, or lower max_tokens"
                );
                return Err(ApiError::new(ErrorKind::TooMany, message).retry_after(oldest));
            }
            let reserved = need.most.min(left);
            usage.reserved += reserved;
            self.reserved.fetch_add(reserved, Ordering::Relaxed);
            return Ok(reserved);
        }
        Ok(need.most)
    }
}

impl KeyUse {
    fn forget_before(&mut self, now: Instant) {
        while self.tokens.front().is_some_and(|(at, _)| now - *at >= MINUTE) {
            self.tokens.pop_front();
        }
    }

    fn sum(&self) -> u64 {
        self.tokens.iter().map(|(_, tokens)| tokens).sum()
    }
}

impl CallerUse {
    /// Counts tokens of prompt and answer.
    pub fn charge(&self, tokens: usize) {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        usage.forget_before(now);
        let used = (tokens as u64).min(self.reserved.load(Ordering::Relaxed));
        self.reserved.fetch_sub(used, Ordering::Relaxed);
        usage.reserved = usage.reserved.saturating_sub(used);
        match usage.tokens.back_mut() {
            // One entry a second is exact enough, and bounds their number.
            Some((at, sum)) if now - *at < Duration::from_secs(1) => *sum += tokens as u64,
            _ => usage.tokens.push_back((now, tokens as u64)),
        }
    }
}

impl CallerUse {
    /// Gives back what was reserved and not used.
    pub fn release(&self) {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.reserved = usage.reserved.saturating_sub(self.reserved.swap(0, Ordering::Relaxed));
    }
}

impl Drop for CallerUse {
    fn drop(&mut self) {
        self.release();
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        usage.running = usage.running.saturating_sub(1);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn limits_refuse_and_recover() {
        let caller = Caller::new(1, KeyLimits { concurrent: Some(1), tokens_per_minute: Some(10) });
        let begin = || caller.begin(TokenNeed::exact(1));
        let first = begin().unwrap();
        let error = begin().unwrap_err();
        assert_eq!(error.kind, ErrorKind::TooMany);
        drop(first);
        let second = begin().unwrap();
        second.charge(9);
        drop(second);
        begin().unwrap().charge(1);
        let error = begin().unwrap_err();
        assert!(error.message.contains("10 tokens a minute"), "{error}");
        assert!(error.retry_after.unwrap() <= MINUTE);
    }

    #[test]
    fn requests_count_before_their_tokens_are_known() {
        let caller = Caller::new(1, KeyLimits { concurrent: Some(1), tokens_per_minute: Some(10) });
        let first = caller.enter().unwrap();
        assert_eq!(caller.enter().unwrap_err().kind, ErrorKind::TooMany);
        assert!(first.reserve(TokenNeed::exact(11)).is_err());
        drop(first);
        caller.enter().unwrap().reserve(TokenNeed::exact(10)).unwrap();
    }

    #[test]
    fn tokens_of_running_requests_are_reserved() {
        let caller = Caller::new(1, KeyLimits { tokens_per_minute: Some(50), ..KeyLimits::default() });
        let error = caller.begin(TokenNeed::exact(500)).unwrap_err();
        assert!(error.message.contains("lower max_tokens"), "{error}");
        let running = caller.begin(TokenNeed::exact(30)).unwrap();
        assert!(caller.begin(TokenNeed::exact(30)).is_err(), "they are reserved");
        running.charge(10);
        assert!(caller.begin(TokenNeed::exact(30)).is_err(), "20 are still reserved");
        running.release();
        drop(caller.begin(TokenNeed::exact(40)).unwrap());
        // Without a limit of its own, a request gets what is left.
        let rest = caller.begin(TokenNeed { asked: 5, most: 4096 }).unwrap();
        assert!(caller.begin(TokenNeed::exact(1)).is_err());
        rest.charge(100);
        drop(rest);
        assert!(caller.begin(TokenNeed::exact(1)).is_err(), "more than the limit was used");
    }
}
