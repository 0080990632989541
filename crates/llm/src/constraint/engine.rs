//! Compiles grammars for one vocabulary.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use llguidance::{Matcher, ParserFactory};
use rustc_hash::FxHashMap;
use serde_json::Value;

use super::grammar::Grammar;
use super::hook::ConstraintHook;
use super::mask::{MaskJob, plain};
use super::vocabulary::TokenTrie;
use super::workers::Workers;
use super::{bounds, mask, reasoning, relaxed, source, vocabulary};
use crate::reasoning::ReasoningSplitter;
use crate::sampling_hook::SamplingHook;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Compiled grammars that are kept for further requests.
const KEPT: usize = 32;

/// Compiles [grammars](Grammar) for the vocabulary of one model, and has threads that compute masks.
/// [`Model::constraints`](crate::Model::constraints) makes it when it is first needed, and shares it.
pub struct ConstraintEngine {
    factory: Arc<ParserFactory>,
    workers: Arc<Workers>,
    /// Control tokens and others that are never split, by their text.
    special: FxHashMap<String, u32>,
    /// The latest schemas that were relaxed, with what was left of them; the latest last.
    relaxed: Mutex<Vec<(Value, Value)>>,
    /// Grammars that are compiled at once.
    compiling: CompilerSlots,
    /// The latest grammars that were compiled, with what comes before the answer; the latest last.
    compiled: Mutex<Vec<(Grammar, Option<String>, Constraint)>>,
}

impl ConstraintEngine {
    /// An engine for a tokenizer's vocabulary.
    pub fn new(tokenizer: &Tokenizer) -> Result<ConstraintEngine> {
        let failed = |error: &dyn std::fmt::Display| Error::Vocabulary { reason: plain(error) };
        let trie = TokenTrie::env(tokenizer)?;
        let mut factory = ParserFactory::new_simple(&trie).map_err(|error| failed(&error))?;
        factory.quiet();
        *factory.limits_mut() = bounds::limits();
        let workers = Arc::new(Workers::start()?);
        let special = vocabulary::special_tokens(tokenizer);
        Ok(ConstraintEngine {
            factory: Arc::new(factory),
            workers,
            special,
            relaxed: Mutex::default(),
            compiling: CompilerSlots::default(),
            compiled: Mutex::default(),
        })
    }

    /// Compiles the grammar of a whole output.
    ///
    /// # Errors
    /// [`Error::Grammar`], with the reason.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint> {
        self.compile_after(grammar, None)
    }

    /// Compiles the grammar of an answer after what a splitter at the beginning of the output expects: reasoning, if the
    /// model has begun or may begin with it.
    pub fn compile_answer(
        &self,
        grammar: &Grammar,
        splitter: &ReasoningSplitter,
        tokenizer: &Tokenizer,
    ) -> Result<Constraint> {
        self.compile_after(grammar, reasoning::before_answer(splitter, tokenizer, false))
    }

    /// The same for a grammar of which any text is an answer, but for text that begins with a marker of reasoning.
    pub(crate) fn compile_text(
        &self,
        grammar: &Grammar,
        splitter: &ReasoningSplitter,
        tokenizer: &Tokenizer,
    ) -> Result<Constraint> {
        self.compile_after(grammar, reasoning::before_answer(splitter, tokenizer, true))
    }

    fn compile_after(&self, grammar: &Grammar, before: Option<String>) -> Result<Constraint> {
        if let Some(constraint) = self.find(grammar, &before) {
            return Ok(constraint);
        }
        if before.is_some() {
            // How the answer begins cannot be tried behind reasoning.
            self.compile_after(grammar, None)?;
        }
        let constraint = self.compile_anew(grammar, before.clone())?;
        self.keep(grammar, before, &constraint);
        Ok(constraint)
    }

    /// A schema of objects without the parts that cannot be enforced; of any object if they are not found with bounded work.
    pub(crate) fn relaxed(&self, schema: &Value) -> Value {
        let known = |relaxed: &Vec<(Value, Value)>| {
            relaxed.iter().find(|(other, _)| other == schema).map(|(_, found)| found.clone())
        };
        if let Some(found) = known(&self.relaxed.lock().unwrap_or_else(PoisonError::into_inner)) {
            return found;
        }
        let compiles = |part: &Value| self.compile_anew(&Grammar::JsonSchema(part.clone()), None).is_ok();
        let found = relaxed::relaxed(schema, &compiles);
        let mut relaxed = self.relaxed.lock().unwrap_or_else(PoisonError::into_inner);
        if relaxed.len() >= KEPT {
            relaxed.remove(0);
        }
        relaxed.push((schema.clone(), found.clone()));
        found
    }

    fn compile_anew(&self, grammar: &Grammar, before: Option<String>) -> Result<Constraint> {
        let failed = |reason| Error::Grammar { grammar: grammar.name(), reason };
        let answer = source::of(grammar, &|name| self.special.get(name).copied()).map_err(failed)?;
        let top_level = source::top_level(answer, before);
        let factory = Arc::clone(&self.factory);
        let _slot = self.compiling.enter();
        // The compiler recurses over the grammar.
        let thread = std::thread::Builder::new().name("quadriga-grammar".to_owned());
        let compiled = thread.stack_size(bounds::COMPILER_STACK).spawn(move || {
            let parser = factory.create_parser(top_level).map_err(|error| plain(&error))?;
            let matcher = Matcher::new(Ok(parser));
            mask::check_opening(&matcher)?;
            Ok(matcher)
        });
        let compiled = compiled.map_err(|error| Error::Thread { reason: error.to_string() })?.join();
        let compiled = compiled.unwrap_or_else(|_| Err("its compiler failed".to_owned()));
        Ok(Constraint {
            matcher: Arc::new(Mutex::new(compiled.map_err(failed)?)),
            workers: Arc::clone(&self.workers),
        })
    }

    fn find(&self, grammar: &Grammar, before: &Option<String>) -> Option<Constraint> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let at = compiled.iter().position(|(other, prefix, _)| other == grammar && prefix == before)?;
        let found = compiled.remove(at);
        let constraint = found.2.clone();
        compiled.push(found);
        Some(constraint)
    }

    fn keep(&self, grammar: &Grammar, before: Option<String>, constraint: &Constraint) {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if compiled.len() >= KEPT {
            compiled.remove(0);
        }
        compiled.push((grammar.clone(), before, constraint.clone()));
    }
}

/// Grammars that are compiled at once; others wait. Requests cannot take more of the machine than this.
const MAX_COMPILING: usize = 2;

/// Counts grammars that are being compiled.
#[derive(Default)]
struct CompilerSlots {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A grammar that is being compiled, until it is dropped.
struct CompilerSlot<'s>(&'s CompilerSlots);

impl CompilerSlots {
    /// Waits for a free slot.
    fn enter(&self) -> CompilerSlot<'_> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken >= MAX_COMPILING {
            taken = self.freed.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken += 1;
        CompilerSlot(self)
    }
}

impl Drop for CompilerSlot<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.freed.notify_one();
    }
}

/// A grammar, compiled for a vocabulary. Cheap to clone.
#[derive(Clone)]
pub struct Constraint {
    /// Before the first token.
    matcher: Arc<Mutex<Matcher>>,
    workers: Arc<Workers>,
}

impl Constraint {
    /// A hook for one answer.
    pub fn hook(&self) -> Box<dyn SamplingHook> {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        Box::new(ConstraintHook::new(MaskJob::new(matcher), Arc::clone(&self.workers)))
    }
}
