//! Who asks: a key with its limits, or anybody.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{ApiError, ErrorKind};

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
    /// Tokens of the last minute, by the time at which they were counted.
    tokens: VecDeque<(Instant, u64)>,
}

/// Who asks.
#[derive(Clone, Debug, Default)]
pub struct Caller {
    client: u64,
    limits: KeyLimits,
    usage: Arc<Mutex<KeyUse>>,
}

/// A request of a caller, until it is dropped.
#[derive(Debug)]
pub struct CallerUse {
    usage: Arc<Mutex<KeyUse>>,
}

impl Caller {
    /// A caller with limits. Callers of one number get one share of the engine.
    pub fn new(client: u64, limits: KeyLimits) -> Caller {
        Caller { client, limits, usage: Arc::default() }
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

    /// Begins a request, if the limits allow it.
    pub fn begin(&self) -> Result<CallerUse, ApiError> {
        let mut usage = self.usage.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        usage.forget_before(now);
        if let Some(most) = self.limits.concurrent.filter(|most| usage.running >= *most) {
            let message = format!("the key may have {most} requests at a time; wait until one is answered");
            return Err(ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(1)));
        }
        if let Some(most) = self.limits.tokens_per_minute.filter(|most| usage.sum() >= *most) {
            let oldest = usage.tokens.front().map_or(MINUTE, |(at, _)| MINUTE.saturating_sub(now - *at));
            let message =
                format!("the key may use {most} tokens a minute, and has used them; try again later");
            return Err(ApiError::new(ErrorKind::TooMany, message).retry_after(oldest));
        }
        usage.running += 1;
        Ok(CallerUse { usage: Arc::clone(&self.usage) })
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
        match usage.tokens.back_mut() {
            // One entry a second is exact enough, and bounds their number.
            Some((at, sum)) if now - *at < Duration::from_secs(1) => *sum += tokens as u64,
            _ => usage.tokens.push_back((now, tokens as u64)),
        }
    }
}

impl Drop for CallerUse {
    fn drop(&mut self) {
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
        let first = caller.begin().unwrap();
        let error = caller.begin().unwrap_err();
        assert_eq!(error.kind, ErrorKind::TooMany);
        drop(first);
        let second = caller.clone().begin().unwrap();
        second.charge(9);
        drop(second);
        caller.begin().unwrap().charge(1);
        let error = caller.begin().unwrap_err();
        assert!(error.message.contains("10 tokens a minute"), "{error}");
        assert!(error.retry_after.unwrap() <= MINUTE);
    }
}
