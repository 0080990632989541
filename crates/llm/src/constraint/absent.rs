//! What stands for the compiler of grammars in builds without it.

use std::convert::Infallible;

use super::cancellation::Cancellation;
use super::grammar::Grammar;
use crate::reasoning::ReasoningSplitter;
use crate::sampling_hook::SamplingHook;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Compiles no grammar in a build without the feature `constraint`.
pub struct ConstraintEngine;

impl ConstraintEngine {
    /// An engine.
    pub fn new(_: &Tokenizer) -> Result<ConstraintEngine> {
        Ok(ConstraintEngine)
    }

    /// An error.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint> {
        let reason = "this build has no grammars (feature \"constraint\")".to_owned();
        Err(Error::Grammar { grammar: grammar.name(), reason })
    }

    /// An error.
    pub fn compile_answer(
        &self,
        grammar: &Grammar,
        _: &ReasoningSplitter,
        _: &Tokenizer,
    ) -> Result<Constraint> {
        self.compile(grammar)
    }

    /// An error.
    pub(crate) fn compile_until(
        &self,
        grammar: &Grammar,
        _: &ReasoningSplitter,
        _: &Tokenizer,
        _: &Cancellation,
    ) -> Result<Constraint> {
        self.compile(grammar)
    }
}

/// A grammar, compiled for a vocabulary: there is none in a build without the feature `constraint`.
#[derive(Clone)]
pub struct Constraint(Infallible);

impl Constraint {
    /// A hook for one answer.
    pub fn hook(&self) -> Box<dyn SamplingHook> {
        match self.0 {}
    }
}
