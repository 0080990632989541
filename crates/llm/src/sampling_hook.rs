//! A caller's code between logits and sampling.

/// The error of a [`SamplingHook`].
pub type HookError = Box<dyn std::error::Error + Send + Sync>;

/// Sees the logits before a token is sampled, and may change them: for constrained generation, where all tokens that a
/// grammar does not allow become `-inf`, or for a penalty of the caller's own.
///
/// It is called after logit bias and penalties, before the candidates are filtered and drawn from; and once more if it leaves
/// nothing while end-of-generation tokens are banned, with those. With a hook the logits are always copied to the host, even for
/// greedy sampling.
///
/// ```
/// use quadriga_llm::sampling::{HookError, Sampler, SamplingHook, SamplingOptions};
///
/// /// Allows a token at most once.
/// struct Once;
///
/// impl SamplingHook for Once {
///     fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
///         for token in tokens {
///             if let Some(logit) = logits.get_mut(*token as usize) {
///                 *logit = f32::NEG_INFINITY;
///             }
///         }
///         Ok(())
///     }
/// }
///
/// let mut sampler = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
/// for wanted in [1, 2, 0] {
///     let token = sampler.sample_with(&[0.1, 2.5, 1.0], &mut Once)?;
///     assert_eq!(token, wanted);
///     sampler.accept(token);
/// }
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
///
/// Closures are hooks, too:
///
/// ```
/// # use quadriga_llm::sampling::{Sampler, SamplingOptions};
/// # let mut sampler = Sampler::new(SamplingOptions { temperature: 0.0, ..SamplingOptions::default() })?;
/// let mut no_zero = |_: &[u32], logits: &mut [f32]| logits[0] = f32::NEG_INFINITY;
/// assert_eq!(sampler.sample_with(&[3.0, 1.0], &mut no_zero)?, 1);
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub trait SamplingHook: Send {
    /// Changes the logits for the next token. `tokens` are those that the sampler has accepted: the prompt, and the
    /// answer so far. `-inf` excludes a token; NaN, `+inf` and excluding every token are errors, and so is an error that
    /// is returned: it ends the answer.
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError>;

    /// Called when a token was sampled and another one will be: `tokens` end with it. The device computes the next logits
    /// meanwhile, so that work that does not need them can begin. Samplers that are used directly need not call it.
    fn accepted(&mut self, tokens: &[u32]) {
        let _ = tokens;
    }
}

/// Two hooks, one after the other.
pub(crate) struct ChainedHooks(pub(crate) Box<dyn SamplingHook>, pub(crate) Box<dyn SamplingHook>);

impl SamplingHook for ChainedHooks {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        self.0.apply(tokens, logits)?;
        self.1.apply(tokens, logits)
    }

    fn accepted(&mut self, tokens: &[u32]) {
        self.0.accepted(tokens);
        self.1.accepted(tokens);
    }
}

impl<F: FnMut(&[u32], &mut [f32]) + Send> SamplingHook for F {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        self(tokens, logits);
        Ok(())
    }
}
