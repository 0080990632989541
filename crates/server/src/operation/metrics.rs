//! Counters and histograms of a model, in the text format of Prometheus.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use quadriga_llm::serving::{BatcherState, Finished};
use quadriga_llm::{ExpertCacheUse, Finish};

use super::exposition::{Exposition, escaped};

/// Upper bounds in seconds of the buckets of all histograms.
const BOUNDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    300.0,
];

/// Times by their length.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS.len() + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    /// Counts a time.
    pub fn note(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        if let Some(bucket) = self.buckets.get(bucket) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        self.microseconds.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The sum of all times in seconds.
    pub fn seconds(&self) -> f64 {
        self.microseconds.load(Ordering::Relaxed) as f64 / 1e6
    }

    /// The number of times.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    fn write(&self, name: &'static str, help: &str, labels: &str, out: &mut Exposition) {
        let out = out.family(name, "histogram", help);
        let mut sum = 0;
        for (bucket, bound) in self.buckets.iter().zip(BOUNDS.iter().map(Some).chain([None])) {
            sum += bucket.load(Ordering::Relaxed);
            let bound = bound.map_or_else(|| "+Inf".to_owned(), f64::to_string);
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {sum}");
        }
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}", self.seconds());
        let _ = writeln!(out, "{name}_count{{{labels}}} {sum}");
    }
}

/// Seconds over which the current speed is measured.
const RATE_SECONDS: u64 = 5;

/// Tokens of the last seconds.
#[derive(Debug, Default)]
struct Rate {
    /// The second that each slot is for, and its tokens.
    slots: [(u64, u64); RATE_SECONDS as usize + 1],
}

impl Rate {
    fn add(&mut self, second: u64) {
        let index = (second % (RATE_SECONDS + 1)) as usize;
        if let Some(slot) = self.slots.get_mut(index) {
            if slot.0 != second {
                *slot = (second, 0);
            }
            slot.1 += 1;
        }
    }

    /// Tokens a second over the last whole seconds.
    fn rate(&self, second: u64) -> f64 {
        let recent = self.slots.iter().filter(|(at, _)| *at < second && *at + RATE_SECONDS >= second);
        recent.map(|(_, tokens)| tokens).sum::<u64>() as f64 / RATE_SECONDS as f64
    }
}

/// Counters and histograms of a model.
#[derive(Debug)]
pub struct ModelMetrics {
    since: Instant,
    rate: Mutex<Rate>,
    generated: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    /// Tokens of prompts that were computed within the time of [`Self::prefill`] and [`Self::partial_prefill`].
    prefilled: AtomicU64,
    /// Tokens that were generated within the time of [`Self::decode`] and [`Self::partial_decode`]: all but the first of an answer.
    decoded: AtomicU64,
    /// Microseconds of prefills, and of generation, of answers that did not come to their end: histograms are of those that did.
    partial_prefill: AtomicU64,
    partial_decode: AtomicU64,
    /// The most tokens of a prompt and its answer.
    longest: AtomicU64,
    /// Answers by the reason why they ended: end or stop, length, cancelled, failed.
    ended: [AtomicU64; 4],
    /// What the engines of earlier loads counted.
    earlier: Mutex<BatcherState>,
    queue: Histogram,
    first_token: Histogram,
    prefill: Histogram,
    between_tokens: Histogram,
    decode: Histogram,
    per_token: Histogram,
    whole: Histogram,
}

impl Default for ModelMetrics {
    fn default() -> ModelMetrics {
        ModelMetrics {
            since: Instant::now(),
            rate: Mutex::default(),
            generated: AtomicU64::default(),
            prompt_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            prefilled: AtomicU64::default(),
            decoded: AtomicU64::default(),
            partial_prefill: AtomicU64::default(),
            partial_decode: AtomicU64::default(),
            longest: AtomicU64::default(),
            ended: Default::default(),
            earlier: Mutex::default(),
            queue: Histogram::default(),
            first_token: Histogram::default(),
            prefill: Histogram::default(),
            between_tokens: Histogram::default(),
            decode: Histogram::default(),
            per_token: Histogram::default(),
            whole: Histogram::default(),
        }
    }
}

/// What was computed for an answer that did not come to its end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PartialAnswer {
    /// Tokens of its prompt that are computed, with those that were found in the KV cache.
    pub(crate) prompt: usize,
    /// Those that were found.
    pub(crate) cached: usize,
    /// How long the prompt was computed.
    pub(crate) prefill: Duration,
    /// Tokens after the first.
    pub(crate) decoded: usize,
    /// From the first token to the latest.
    pub(crate) decode: Duration,
}

/// A state with the counters of another one added to its own.
fn counters(state: BatcherState, other: &BatcherState) -> BatcherState {
    let expert_cache = match (state.expert_cache, other.expert_cache) {
        (Some(earlier), Some(other)) => Some(ExpertCacheUse {
            slots: other.slots,
            lookups: earlier.lookups + other.lookups,
            hits: earlier.hits + other.hits,
            uploads: earlier.uploads + other.uploads,
            bytes: earlier.bytes + other.bytes,
        }),
        (earlier, other) => other.or(earlier),
    };
    BatcherState {
        steps: state.steps + other.steps,
        stepped: state.stepped + other.stepped,
        preempted: state.preempted + other.preempted,
        guessed: state.guessed + other.guessed,
        guessed_right: state.guessed_right + other.guessed_right,
        failed_steps: state.failed_steps + other.failed_steps,
        failed_page_moves: state.failed_page_moves + other.failed_page_moves,
        failed_guesses: state.failed_guesses + other.failed_guesses,
        expert_cache,
        ..state
    }
}

/// The names of the reasons why answers end, in the order of [`ModelMetrics::ended`].
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

impl ModelMetrics {
    /// Counts a token, with the time since the one before it.
    pub fn note_token(&self, since_last: Option<Duration>) {
        self.generated.fetch_add(1, Ordering::Relaxed);
        if let Some(time) = since_last {
            self.between_tokens.note(time);
        }
        let second = self.since.elapsed().as_secs();
        self.rate.lock().unwrap_or_else(PoisonError::into_inner).add(second);
    }

    /// Tokens a second over the last few seconds.
    pub fn tokens_per_second(&self) -> f64 {
        let second = self.since.elapsed().as_secs();
        self.rate.lock().unwrap_or_else(PoisonError::into_inner).rate(second)
    }

    /// Notes how long a request waited until the first part of it was computed.
    pub fn note_begun(&self, queued: Duration) {
        self.queue.note(queued);
    }

    /// Notes the time from a request to its first token, when that is there: an answer that its client does not wait for has one, too.
    pub fn note_first_token(&self, time: Duration) {
        self.first_token.note(time);
    }

    /// Counts an answer that is complete.
    pub fn note_finished(&self, finished: &Finished) {
        self.end(usize::from(matches!(finished.finish, Finish::Length | Finish::Context)));
        self.prompt_tokens.fetch_add(finished.counts.prompt as u64, Ordering::Relaxed);
        self.cached_tokens.fetch_add(finished.counts.cached as u64, Ordering::Relaxed);
        let counts = &finished.counts;
        self.prefilled.fetch_add(counts.prompt.saturating_sub(counts.cached) as u64, Ordering::Relaxed);
        self.decoded.fetch_add(counts.answer.saturating_sub(1) as u64, Ordering::Relaxed);
        let tokens = (finished.counts.prompt + finished.counts.answer) as u64;
        self.longest.fetch_max(tokens, Ordering::Relaxed);
        self.prefill.note(finished.first_token.saturating_sub(finished.queued));
        self.decode.note(finished.decode);
        self.whole.note(finished.first_token + finished.decode);
        if let Ok(steps @ 1..) = u32::try_from(finished.counts.answer.saturating_sub(1)) {
            self.per_token.note(finished.decode / steps);
        }
    }

    /// Counts what was computed for an answer that did not come to its end.
    pub(crate) fn note_partial(&self, partial: &PartialAnswer) {
        let add = |counter: &AtomicU64, count: usize| counter.fetch_add(count as u64, Ordering::Relaxed);
        let add_time = |counter: &AtomicU64, time: Duration| {
            counter.fetch_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed)
        };
        add(&self.prompt_tokens, partial.prompt);
        add(&self.cached_tokens, partial.cached);
        add(&self.prefilled, partial.prompt.saturating_sub(partial.cached));
        add(&self.decoded, partial.decoded);
        add_time(&self.partial_prefill, partial.prefill);
        add_time(&self.partial_decode, partial.decode);
    }

    /// Counts a request for embeddings or ranks that is answered, with the tokens of its texts.
    pub fn note_embedded(&self, tokens: usize) {
        self.end(0);
        self.prompt_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// Counts an answer whose client went away.
    pub fn note_cancelled(&self) {
        self.end(2);
    }

    /// Counts an answer that failed.
    pub fn note_failed(&self) {
        self.end(3);
    }

    fn end(&self, reason: usize) {
        if let Some(count) = self.ended.get(reason) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes what an engine has counted that is gone.
    pub(crate) fn note_unloaded(&self, state: &BatcherState) {
        let mut earlier = self.earlier.lock().unwrap_or_else(PoisonError::into_inner);
        *earlier = counters(*earlier, state);
    }

    /// Writes all of them, with the states of the model's engines, under the names of llama-server and of vLLM. There is more than
    /// one engine while one that was unloaded finishes its answers, and none if the model is not loaded.
    pub(crate) fn write(&self, model: &str, states: &[BatcherState], out: &mut Exposition) {
        let mut state = *self.earlier.lock().unwrap_or_else(PoisonError::into_inner);
        for engine in states {
            state = BatcherState {
                waiting: state.waiting + engine.waiting,
                running: state.running + engine.running,
                pages: state.pages + engine.pages,
                used_pages: state.used_pages + engine.used_pages,
                ..counters(state, engine)
            };
        }
        let labels = format!("model_name=\"{}\"", escaped(model));
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let per = |sum: f64, count: f64| if count > 0.0 { sum / count } else { 0.0 };
        let computed = load(&self.prompt_tokens) - load(&self.cached_tokens);
        let prefill_seconds = self.prefill.seconds() + load(&self.partial_prefill) / 1e6;
        let decode_seconds = self.decode.seconds() + load(&self.partial_decode) / 1e6;
        let usage = state.used_pages as f64 / state.pages.max(1) as f64;
        let rows: [(&'static str, &str, &str, f64); 28] = [
            ("llamacpp:prompt_tokens_total", "counter", "Prompt tokens computed", computed),
            (
                "llamacpp:prompt_tokens_cached_total",
                "counter",
                "Prompt tokens found in the KV cache",
                load(&self.cached_tokens),
            ),
            ("llamacpp:prompt_seconds_total", "counter", "Time of prefills", prefill_seconds),
            ("llamacpp:tokens_predicted_total", "counter", "Generated tokens", load(&self.generated)),
            ("llamacpp:tokens_predicted_seconds_total", "counter", "Time of generation", decode_seconds),
            (
                "llamacpp:n_tokens_max",
                "counter",
                "Most tokens of a prompt and its answer",
                load(&self.longest),
            ),
            (
                "llamacpp:spec_decode_num_draft_tokens_total",
                "counter",
                "Tokens guessed by prompt look-up",
                state.guessed as f64,
            ),
            (
                "llamacpp:spec_decode_num_accepted_tokens_total",
                "counter",
                "Guesses that were right",
                state.guessed_right as f64,
            ),
            ("llamacpp:n_decode_total", "counter", "Steps", state.steps as f64),
            (
                "llamacpp:n_busy_slots_per_decode",
                "gauge",
                "Sequences of a step, on average",
                per(state.stepped as f64, state.steps as f64),
            ),
            (
                "llamacpp:prompt_tokens_seconds",
                "gauge",
                "Average prompt throughput in tokens a second of prefills",
                per(load(&self.prefilled), prefill_seconds),
            ),
            (
                "llamacpp:predicted_tokens_seconds",
                "gauge",
                "Average generation throughput in tokens a second of generation",
                per(load(&self.decoded), decode_seconds),
            ),
            ("llamacpp:requests_processing", "gauge", "Sequences being computed", state.running as f64),
            ("llamacpp:requests_deferred", "gauge", "Requests that wait", state.waiting as f64),
            ("llamacpp:kv_cache_usage_ratio", "gauge", "Share of the KV cache in use", usage),
            ("vllm:num_requests_running", "gauge", "Sequences being computed", state.running as f64),
            ("vllm:num_requests_waiting", "gauge", "Requests that wait", state.waiting as f64),
            ("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 1 for all of it", usage),
            ("vllm:prompt_tokens_total", "counter", "Tokens of prompts", load(&self.prompt_tokens)),
            ("vllm:generation_tokens_total", "counter", "Generated tokens", load(&self.generated)),
            (
                "vllm:prefix_cache_queries_total",
                "counter",
                "Prompt tokens looked up in the KV cache",
                load(&self.prompt_tokens),
            ),
            (
                "vllm:prefix_cache_hits_total",
                "counter",
                "Prompt tokens found in the KV cache",
                load(&self.cached_tokens),
            ),
            (
                "vllm:num_preemptions_total",
                "counter",
                "Sequences put back for want of pages",
                state.preempted as f64,
            ),
            (
                "vllm:spec_decode_num_draft_tokens_total",
                "counter",
                "Tokens guessed by prompt look-up",
                state.guessed as f64,
            ),
            (
                "vllm:spec_decode_num_accepted_tokens_total",
                "counter",
                "Guesses that were right",
                state.guessed_right as f64,
            ),
            (
                "quadriga:failed_steps_total",
                "counter",
                "Steps that failed, and were computed again or ended their requests",
                state.failed_steps as f64,
            ),
            (
                "quadriga:failed_page_moves_total",
                "counter",
                "Pages of the KV cache that could not be copied or moved, and were computed again",
                state.failed_page_moves as f64,
            ),
            (
                "quadriga:failed_guesses_total",
                "counter",
                "Steps with fewer guesses because the draft model failed",
                state.failed_guesses as f64,
            ),
        ];
        for (name, kind, help, value) in rows {
            out.sample(name, kind, help, &labels, value);
        }
        let of_cache = |cache: &ExpertCacheUse| {
            [
                ("quadriga:expert_cache_slots", "gauge", "Slots for experts on GPUs", cache.slots),
                ("quadriga:expert_cache_queries_total", "counter", "Experts that tokens used", cache.lookups),
                ("quadriga:expert_cache_hits_total", "counter", "Of these, the ones in slots", cache.hits),
                ("quadriga:expert_cache_uploads_total", "counter", "Experts moved into slots", cache.uploads),
                ("quadriga:expert_cache_upload_bytes_total", "counter", "Their bytes", cache.bytes),
            ]
        };
        for (name, kind, help, value) in state.expert_cache.as_ref().map(of_cache).into_iter().flatten() {
            out.sample(name, kind, help, &labels, value as f64);
        }
        for (count, reason) in self.ended.iter().zip(REASONS) {
            let (name, help) = ("vllm:request_success_total", "Answers by the reason why they ended");
            let labels = format!("{labels},finished_reason=\"{reason}\"");
            out.sample(name, "counter", help, &labels, load(count));
        }
        let histograms = [
            ("vllm:time_to_first_token_seconds", "From submission to the first token", &self.first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens", &self.between_tokens),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time between an answer's tokens",
                &self.per_token,
            ),
            ("vllm:request_queue_time_seconds", "From submission to the first step", &self.queue),
            ("vllm:request_prefill_time_seconds", "From the first step to the first token", &self.prefill),
            ("vllm:request_decode_time_seconds", "From the first token to the last", &self.decode),
            ("vllm:e2e_request_latency_seconds", "From submission to the last token", &self.whole),
        ];
        for (name, help, histogram) in histograms {
            histogram.write(name, help, &labels, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use quadriga_llm::TokenCounts;

    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let histogram = Histogram::default();
        for milliseconds in [1, 3, 3, 400, 1_000_000] {
            histogram.note(Duration::from_millis(milliseconds));
        }
        let mut out = Exposition::default();
        histogram.write("x", "Times", "a=\"b\"", &mut out);
        let out = out.text();
        for line in ["le=\"0.001\"} 1", "le=\"0.005\"} 3", "le=\"0.5\"} 4", "le=\"300\"} 4", "le=\"+Inf\"} 5"]
        {
            assert!(out.contains(line), "{line} in {out}");
        }
        assert!(out.contains("x_count{a=\"b\"} 5"), "{out}");
    }

    #[test]
    fn the_expert_cache_is_counted_where_there_is_one() {
        let text = |expert_cache| {
            let mut out = Exposition::default();
            ModelMetrics::default().write(
                "m",
                &[BatcherState { expert_cache, ..Default::default() }],
                &mut out,
            );
            out.text()
        };
        let cache = ExpertCacheUse { slots: 7, lookups: 30, hits: 20, uploads: 3, bytes: 600 };
        let found = text(Some(cache));
        for line in [
            "quadriga:expert_cache_slots{model_name=\"m\"} 7",
            "quadriga:expert_cache_queries_total{model_name=\"m\"} 30",
            "quadriga:expert_cache_hits_total{model_name=\"m\"} 20",
            "quadriga:expert_cache_uploads_total{model_name=\"m\"} 3",
            "quadriga:expert_cache_upload_bytes_total{model_name=\"m\"} 600",
        ] {
            assert!(found.contains(line), "{line} in {found}");
        }
        assert!(!text(None).contains("expert_cache"));
    }

    #[test]
    fn failures_that_no_request_shows_are_counted() {
        let metrics = ModelMetrics::default();
        let state =
            BatcherState { failed_steps: 2, failed_page_moves: 3, failed_guesses: 4, ..Default::default() };
        // Those of an engine that was unloaded count, too.
        metrics.note_unloaded(&state);
        let mut out = Exposition::default();
        metrics.write("m", &[state], &mut out);
        let found = out.text();
        for line in [
            "steps_total{model_name=\"m\"} 4",
            "page_moves_total{model_name=\"m\"} 6",
            "guesses_total{model_name=\"m\"} 8",
        ] {
            let line = format!("quadriga:failed_{line}");
            assert!(found.contains(&line), "{line} in {found}");
        }
    }

    /// As llama-server has them: averages over the time of prefills and of generation, not over that of the clock.
    #[test]
    fn throughput_is_that_of_the_time_that_was_computed() {
        let metrics = ModelMetrics::default();
        let text = |metrics: &ModelMetrics| {
            let mut out = Exposition::default();
            metrics.write("m", &[], &mut out);
            out.text()
        };
        let has = |text: &str, name: &str, value: &str| {
            let line = format!("llamacpp:{name}{{model_name=\"m\"}} {value}\n");
            assert!(text.contains(&line), "{line} in {text}");
        };
        let before = text(&metrics);
        has(&before, "prompt_tokens_seconds", "0");
        has(&before, "predicted_tokens_seconds", "0");
        let finished = |prompt, cached, answer, prefill: u64, decode| Finished {
            guessed: 0,
            guessed_right: 0,
            finish: Finish::End,
            counts: TokenCounts { prompt, cached, answer, ..TokenCounts::default() },
            queued: Duration::from_secs(7),
            first_token: Duration::from_secs(7 + prefill),
            decode: Duration::from_secs(decode),
        };
        // The first token of an answer is that of its prefill. An answer without tokens has a prefill, too.
        metrics.note_finished(&finished(300, 100, 21, 2, 4));
        metrics.note_finished(&finished(100, 0, 0, 4, 0));
        metrics.note_finished(&finished(0, 0, 11, 0, 1));
        // Texts that are embedded take no time of prefills.
        metrics.note_embedded(1000);
        // What was computed for a client that went away took as much time as any other.
        let seconds = Duration::from_secs;
        metrics.note_partial(&PartialAnswer {
            prompt: 120,
            cached: 20,
            prefill: seconds(2),
            decoded: 12,
            decode: seconds(2),
        });
        let after = text(&metrics);
        has(&after, "prompt_tokens_seconds", "50");
        has(&after, "predicted_tokens_seconds", "6");
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let mut rate = Rate::default();
        for second in [10, 10, 11, 12, 13, 14, 15, 15] {
            rate.add(second);
        }
        assert_eq!(rate.rate(15), 6.0 / 5.0);
        assert_eq!(rate.rate(16), 6.0 / 5.0);
        assert_eq!(rate.rate(40), 0.0);
    }
}
