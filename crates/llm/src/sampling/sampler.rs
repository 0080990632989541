//! The sampler: the sampling state of one sequence.

use super::candidates::Candidates;
use super::dry::{self, Breakers};
use super::options::SamplingOptions;
use super::penalties::{RecentTokens, clamp};
use super::probabilities::{argmax, check_logits};
use super::random::Random;
use super::top_logits::{Lowering, TopLogits};
use crate::sampling_hook::SamplingHook;
use crate::{Error, LogitsError, Model, Result};

/// Samples tokens from logits. Keeps the state of one sequence: the random state, and the tokens so far, which
/// penalties refer to.
///
/// ```
/// use quadriga_llm::sampling::{Sampler, SamplingOptions};
///
/// let options = SamplingOptions { temperature: 0.7, top_k: 20, seed: 1, ..SamplingOptions::default() };
/// let mut sampler = Sampler::new(options)?;
/// let logits = [0.5, 3.0, 2.5, -1.0]; // from `Engine::logits`
/// let token = sampler.sample(&logits)?;
/// sampler.accept(token);
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone)]
pub struct Sampler {
    options: SamplingOptions,
    /// The vocabulary, where an option needs it.
    model: Option<Model>,
    random: Random,
    tokens: Vec<u32>,
    recent: RecentTokens,
    breakers: Breakers,
    /// Logits after bias, penalties and hook; kept to reuse the memory, as the candidates are.
    changed: Vec<f32>,
    candidates: Candidates,
}

impl std::fmt::Debug for Sampler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut fields = f.debug_struct("Sampler");
        fields.field("options", &self.options).field("random", &self.random).field("tokens", &self.tokens);
        fields.finish_non_exhaustive()
    }
}

impl Sampler {
    /// Checks the options and seeds the random state.
    ///
    /// # Errors
    /// An option is out of range, or needs the vocabulary of a model ([`Sampler::for_model`]).
    pub fn new(options: SamplingOptions) -> Result<Sampler> {
        options.check()?;
        let needs_model = |name| Err(Error::SamplingNeedsModel { name });
        if options.ignore_eos {
            return needs_model("ignore-eos");
        }
        if options.dry.is_active() && !options.dry.sequence_breakers.is_empty() {
            return needs_model("dry-sequence-breaker");
        }
        Ok(Sampler::checked(options, None))
    }

    /// As [`Sampler::new`], for a model: its vocabulary has the end-of-generation tokens and the texts of tokens that
    /// some options refer to.
    pub fn for_model(options: SamplingOptions, model: &Model) -> Result<Sampler> {
        options.check()?;
        let count = model.hyperparameters().vocabulary;
        if let Some((token, _)) = options.logit_bias.iter().find(|(token, _)| **token as usize >= count) {
            return Err(Error::Token { token: *token, count });
        }
        if options.ignore_eos || options.dry.is_active() {
            model.tokenizer()?;
        }
        Ok(Sampler::checked(options, Some(model.clone())))
    }

    fn checked(options: SamplingOptions, model: Option<Model>) -> Sampler {
        let random = Random { state: options.seed };
        Sampler {
            options,
            model,
            random,
            tokens: Vec::new(),
            recent: RecentTokens::default(),
            breakers: Breakers::default(),
            changed: Vec::new(),
            candidates: Candidates::default(),
        }
    }

    /// The options in use.
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// The random state. A sampler that is given it with [`Sampler::set_random_state`] draws the same random numbers as
    /// this one from now on.
    pub fn random_state(&self) -> u64 {
        self.random.state
    }

    /// Replaces the random state, which a new sampler has from its seed.
    pub fn set_random_state(&mut self, state: u64) {
        self.random.state = state;
    }

    /// The tokens that were accepted.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets the accepted tokens, before another prompt. The random state is kept.
    pub fn clear_tokens(&mut self) {
        self.tokens.clear();
        self.recent.clear();
        self.breakers.clear();
    }

    /// Appends a token: those of the prompt, and each sampled token that is used.
    pub fn accept(&mut self, token: u32) {
        self.tokens.push(token);
        if self.options.has_penalties() {
            self.recent.accept(&self.tokens, self.options.repeat_last_n);
        }
        if self.options.dry.is_active() {
            let tokenizer = self.model.as_ref().and_then(|model| model.tokenizer().ok());
            let text = tokenizer.map_or(&[][..], |tokenizer| dry::token_text(tokenizer, token));
            self.breakers.accept(&self.options.dry, text);
        }
    }

    /// Samples a token; the caller [accepts](Self::accept) it if it is used. `-inf` excludes a token; NaN, `+inf` and
    /// logits that exclude every token are errors.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        self.sample_from(logits, None)
    }

    /// As [`Sampler::sample`], with a hook that may change the logits.
    pub fn sample_with(&mut self, logits: &[f32], hook: &mut dyn SamplingHook) -> Result<u32> {
        self.sample_from(logits, Some(hook))
    }

    /// As [`Sampler::sample`], with the same token, from the largest logits alone. `None`, and nothing has changed, if others are
    /// needed.
    pub(crate) fn sample_top(&mut self, top: &TopLogits<'_>) -> Option<u32> {
        if !self.fill_top(top, false) {
            return None;
        }
        self.take()
    }

    /// Whether [`Sampler::sample_top`] finds a token.
    pub(crate) fn is_top_enough(&mut self, top: &TopLogits<'_>) -> bool {
        self.fill_top(top, true)
    }

    /// Whether the logits of recent tokens change.
    pub(crate) fn has_penalties(&self) -> bool {
        self.options.has_penalties()
    }

    /// Fills the candidates with the largest logits after they were lowered; `false` if others are needed. With `only_ask` they are
    /// not filled where that is certain without.
    fn fill_top(&mut self, top: &TopLogits<'_>, only_ask: bool) -> bool {
        if self.options.needs_all_logits() {
            return false;
        }
        let tokenizer = self.model.as_ref().and_then(|model| model.tokenizer().ok());
        let banned: Vec<u32> = match tokenizer.filter(|_| self.options.ignore_eos) {
            Some(tokenizer) => tokenizer.end_tokens().collect(),
            None => Vec::new(),
        };
        let lowering = Lowering { options: &self.options, recent: &self.recent, banned: &banned };
        only_ask && lowering.is_certain(top) || lowering.fill(top, &mut self.candidates)
    }

    /// Filters the candidates, and takes one of them.
    fn take(&mut self) -> Option<u32> {
        self.candidates.filter(&self.options, &mut self.random);
        if self.options.takes_best() {
            self.candidates.best()
        } else {
            self.candidates.draw(self.options.temperature, &mut self.random)
        }
    }

    fn sample_from(&mut self, logits: &[f32], hook: Option<&mut dyn SamplingHook>) -> Result<u32> {
        if self.options.is_greedy() && hook.is_none() {
            return argmax(logits);
        }
        check_logits(logits)?;
        if self.change(logits, hook)? {
            self.candidates.fill(&self.changed);
        } else {
            self.candidates.fill(logits);
        }
        self.take().ok_or_else(|| LogitsError::Empty.into())
    }

    /// Applies bias, penalties and hook to a copy of the logits; whether there are any of them.
    fn change(&mut self, logits: &[f32], hook: Option<&mut dyn SamplingHook>) -> Result<bool> {
        let options = &self.options;
        let (penalties, dry) = (options.has_penalties(), options.dry.is_active());
        if options.logit_bias.is_empty() && !options.ignore_eos && !penalties && !dry && hook.is_none() {
            return Ok(false);
        }
        let bans_ends = self.adjust(logits, true)?;
        if let Some(hook) = hook {
            hook.apply(&self.tokens, &mut self.changed).map_err(Error::SamplingHook)?;
            // A grammar leaves nothing but an end after a complete answer: bans yield.
            if bans_ends && !self.changed.iter().any(|logit| logit.is_finite()) {
                self.adjust(logits, false)?;
                hook.apply(&self.tokens, &mut self.changed).map_err(Error::SamplingHook)?;
            }
        }
        check_logits(&self.changed).map_err(Error::ChangedLogits)?;
        Ok(true)
    }

    /// Applies bias and penalties to a copy of the logits, with or without bans of end-of-generation tokens; whether there are any.
    fn adjust(&mut self, logits: &[f32], with_bans: bool) -> Result<bool> {
        let options = &self.options;
        let tokenizer = self.model.as_ref().and_then(|model| model.tokenizer().ok());
        let is_end = |token: u32| tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token));
        let mut bans_ends = options.ignore_eos;
        let changed = &mut self.changed;
        changed.clear();
        changed.extend_from_slice(logits);
        for (token, bias) in &options.logit_bias {
            let count = logits.len();
            let logit = changed.get_mut(*token as usize).ok_or(Error::Token { token: *token, count })?;
            let bans_end = !bias.is_finite() && is_end(*token);
            bans_ends |= bans_end;
            if with_bans || !bans_end {
                *logit = if bias.is_finite() { clamp(*logit, *logit + bias) } else { *bias };
            }
        }
        if let Some(tokenizer) = tokenizer.filter(|_| options.ignore_eos && with_bans) {
            for token in tokenizer.end_tokens() {
                if let Some(logit) = changed.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        if options.has_penalties() {
            self.recent.penalize(options, changed);
        }
        if options.dry.is_active() {
            dry::penalize(&options.dry, &self.tokens, self.breakers.since, tokenizer, changed);
        }
        Ok(bans_ends)
    }
}
