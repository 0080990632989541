//! Compiles grammars for one vocabulary.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::{CancellationHandle, Matcher, ParserFactory};
use rustc_hash::FxHashMap;
use serde_json::Value;

use super::cancellation::Cancellation;
use super::compiler_slots::{CANCEL_INTERVAL, CompilerSlots, MAX_COMPILING};
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
    special: Arc<FxHashMap<String, u32>>,
    /// The latest schemas that were relaxed, with what was left of them; the latest last.
    relaxed: Mutex<Vec<(Value, Value)>>,
    /// Grammars that are compiled at once.
    compiling: Arc<CompilerSlots>,
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
        let special = Arc::new(vocabulary::special_tokens(tokenizer));
        Ok(ConstraintEngine {
            factory: Arc::new(factory),
            workers,
            special,
            relaxed: Mutex::default(),
            compiling: Arc::default(),
            compiled: Mutex::default(),
        })
    }

    /// Compiles the grammar of a whole output.
    ///
    /// # Errors
    /// [`Error::Grammar`], with the reason.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint> {
        self.compile_after(grammar, None, &Cancellation::default())
    }

    /// Grammars that are being compiled now, and how often one ever was. A grammar that was cancelled counts until its compiler
    /// has stopped.
    pub fn compiling(&self) -> (usize, u64) {
        self.compiling.counts()
    }

    /// Takes all compilers: other grammars wait until what is returned is dropped. For tests of whoever waits.
    ///
    /// # Errors
    /// None: it waits until they are free.
    #[doc(hidden)]
    pub fn hold_compilers(&self) -> Result<impl Send + use<>> {
        let never = Cancellation::default();
        (0..MAX_COMPILING).map(|_| self.compiling.enter(&never)).collect::<Result<Vec<_>>>()
    }

    /// Compiles the grammar of an answer after what a splitter at the beginning of the output expects: reasoning, if the
    /// model has begun or may begin with it.
    pub fn compile_answer(
        &self,
        grammar: &Grammar,
        splitter: &ReasoningSplitter,
        tokenizer: &Tokenizer,
    ) -> Result<Constraint> {
        self.compile_until(grammar, splitter, tokenizer, &Cancellation::default())
    }

    /// The same, as long as it is not cancelled.
    pub(crate) fn compile_until(
        &self,
        grammar: &Grammar,
        splitter: &ReasoningSplitter,
        tokenizer: &Tokenizer,
        cancellation: &Cancellation,
    ) -> Result<Constraint> {
        self.compile_after(grammar, reasoning::before_answer(splitter, tokenizer, false), cancellation)
    }

    /// The same for a grammar of which any text is an answer, but for text that begins with a marker of reasoning.
    pub(crate) fn compile_text(
        &self,
        grammar: &Grammar,
        splitter: &ReasoningSplitter,
        tokenizer: &Tokenizer,
        cancellation: &Cancellation,
    ) -> Result<Constraint> {
        self.compile_after(grammar, reasoning::before_answer(splitter, tokenizer, true), cancellation)
    }

    pub(crate) fn compile_after(
        &self,
        grammar: &Grammar,
        before: Option<String>,
        cancellation: &Cancellation,
    ) -> Result<Constraint> {
        if let Some(constraint) = self.find(grammar, &before) {
            return Ok(constraint);
        }
        if before.is_some() {
            // How the answer begins cannot be tried behind reasoning.
            self.compile_after(grammar, None, cancellation)?;
        }
        let constraint = self.compile_anew(grammar, before.clone(), cancellation)?;
        self.keep(grammar, before, &constraint);
        Ok(constraint)
    }

    /// A schema of objects without the parts that cannot be enforced; of any object if they are not found with bounded work.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if that was cancelled.
    pub(crate) fn relaxed(&self, schema: &Value, cancellation: &Cancellation) -> Result<Value> {
        let known = |relaxed: &Vec<(Value, Value)>| {
            relaxed.iter().find(|(other, _)| other == schema).map(|(_, found)| found.clone())
        };
        if let Some(found) = known(&self.relaxed.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(found);
        }
        let compiles = |part: &Value| {
            !cancellation.is_cancelled()
                && self.compile_anew(&Grammar::JsonSchema(part.clone()), None, cancellation).is_ok()
        };
        let found = relaxed::relaxed(schema, &compiles);
        cancellation.check()?;
        let mut relaxed = self.relaxed.lock().unwrap_or_else(PoisonError::into_inner);
        if relaxed.len() >= KEPT {
            relaxed.remove(0);
        }
        relaxed.push((schema.clone(), found.clone()));
        Ok(found)
    }

    fn compile_anew(
        &self,
        grammar: &Grammar,
        before: Option<String>,
        cancellation: &Cancellation,
    ) -> Result<Constraint> {
        let name = grammar.name();
        let failed = |reason| Error::Grammar { grammar: name, reason };
        let compiler = Compiler {
            factory: Arc::clone(&self.factory),
            special: Arc::clone(&self.special),
            cancellation: cancellation.clone(),
            trial: Arc::default(),
        };
        let trial = Arc::clone(&compiler.trial);
        let slot = self.compiling.enter(cancellation)?;
        let (sender, receiver) = channel();
        let grammar = grammar.clone();
        // The checks and the compiler recurse over the grammar.
        let thread = std::thread::Builder::new().name("quadriga-grammar".to_owned());
        let thread = thread.stack_size(bounds::COMPILER_STACK).spawn(move || {
            let compiled = compiler.compile(&grammar, before);
            // The slot is free as soon as the result is there, or nobody wants it.
            drop(slot);
            let _ = sender.send(compiled);
        });
        thread.map_err(|error| Error::Thread { reason: error.to_string() })?;
        let compiled = loop {
            match receiver.recv_timeout(CANCEL_INTERVAL) {
                Ok(compiled) => break compiled,
                Err(RecvTimeoutError::Disconnected) => break Err("its compiler failed".to_owned()),
                Err(RecvTimeoutError::Timeout) if cancellation.is_cancelled() => {
                    let trial = trial.lock().unwrap_or_else(PoisonError::into_inner).take();
                    trial.iter().for_each(CancellationHandle::cancel);
                    return Err(Error::Cancelled);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        match compiled {
            Ok(matcher) => {
                Ok(Constraint { matcher: Arc::new(Mutex::new(matcher)), workers: Arc::clone(&self.workers) })
            }
            Err(_) if cancellation.is_cancelled() => Err(Error::Cancelled),
            Err(reason) => Err(failed(reason)),
        }
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

/// What a thread needs to compile a grammar.
struct Compiler {
    factory: Arc<ParserFactory>,
    special: Arc<FxHashMap<String, u32>>,
    cancellation: Cancellation,
    /// Cancels the trial of how an answer begins, while it runs.
    trial: Arc<Mutex<Option<CancellationHandle>>>,
}

impl Compiler {
    /// Checks and compiles a grammar and tries how an answer begins; the reason if one of them fails. What it says of cancelled work is not
    /// heard.
    fn compile(&self, grammar: &Grammar, before: Option<String>) -> std::result::Result<Matcher, String> {
        let answer = source::of(grammar, &|name| self.special.get(name).copied(), &self.cancellation)?;
        if self.cancellation.is_cancelled() {
            return Err("it was cancelled".to_owned());
        }
        let parser = self.factory.create_parser(source::top_level(answer, before));
        let parser = parser.map_err(|error| plain(&error))?;
        let matcher = Matcher::new(Ok(parser));
        let trial = matcher.deep_clone().into_cancellable();
        *self.trial.lock().unwrap_or_else(PoisonError::into_inner) = trial.cancellation_handle();
        if self.cancellation.is_cancelled() {
            return Err("it was cancelled".to_owned());
        }
        mask::check_opening(trial)?;
        Ok(matcher)
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
        Box::new(self.constraint_hook())
    }

    pub(super) fn constraint_hook(&self) -> ConstraintHook {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
        ConstraintHook::new(MaskJob::new(matcher), Arc::clone(&self.workers))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tokenizer::{TokenType, Vocabulary};

    fn engine() -> ConstraintEngine {
        let tokens: Vec<String> = (' '..='~').map(String::from).chain(["</s>".to_owned()]).collect();
        let count = tokens.len();
        let mut types = vec![TokenType::Normal; count];
        *types.last_mut().unwrap() = TokenType::Control;
        let vocabulary = Vocabulary {
            model: "llama".into(),
            tokens,
            types,
            scores: vec![0.0; count],
            eos: Some(count as u32 - 1),
            ..Vocabulary::default()
        };
        ConstraintEngine::new(&Tokenizer::new(vocabulary).unwrap()).unwrap()
    }

    #[test]
    fn a_grammar_that_waits_for_a_slot_is_given_up_when_it_is_cancelled() {
        let (engine, cancellation) = (engine(), Cancellation::default());
        let grammar = Grammar::Regex("a+".to_owned());
        let never = Cancellation::default();
        let slots: Vec<_> = (0..MAX_COMPILING).map(|_| engine.compiling.enter(&never).unwrap()).collect();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| engine.compile_after(&grammar, None, &cancellation).map(drop));
            cancellation.cancel();
            assert!(matches!(waiting.join().unwrap(), Err(Error::Cancelled)));
        });
        drop(slots);
        assert_eq!(engine.compiling(), (0, MAX_COMPILING as u64));
        engine.compile(&grammar).unwrap();
        assert_eq!(engine.compiling(), (0, MAX_COMPILING as u64 + 1));
    }

    /// The mask of the next token is computed as soon as the last one is known, and not only when the logits are there.
    #[test]
    fn a_token_that_was_accepted_begins_the_next_mask() {
        let mut hook = engine().compile(&Grammar::Regex("abc".to_owned())).unwrap().constraint_hook();
        let tokens = |text: &str| text.bytes().map(|byte| u32::from(byte - b' ')).collect::<Vec<u32>>();
        let allowed = |hook: &ConstraintHook| -> Vec<u32> {
            hook.job.with_mask(|mask| {
                let words = mask.unwrap().as_slice().iter().zip((0..).step_by(32));
                words
                    .flat_map(|(word, first)| {
                        (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
                    })
                    .collect()
            })
        };
        // What comes before the answer is no part of it.
        hook.accepted(&tokens("xy"));
        hook.apply(&tokens("xy"), &mut [0.0; 96]).unwrap();
        assert_eq!(allowed(&hook), tokens("a"));
        for (answer, next) in [("xya", "b"), ("xyab", "c")] {
            hook.accepted(&tokens(answer));
            assert_eq!(allowed(&hook), tokens(next), "{answer}");
        }
        let mut logits = [0.0; 96];
        hook.apply(&tokens("xyab"), &mut logits).unwrap();
        let left: Vec<u32> = (0..96).filter(|token| logits[*token as usize] == 0.0).collect();
        assert_eq!(left, tokens("c"));
    }

    #[test]
    fn cancelled_work_is_neither_begun_nor_kept() {
        let (engine, cancelled) = (engine(), Cancellation::default());
        cancelled.cancel();
        let schema = json!({ "type": "object", "properties": { "a": { "type": "string", "pattern": "(" } } });
        assert!(matches!(engine.relaxed(&schema, &cancelled), Err(Error::Cancelled)));
        let grammar = Grammar::JsonObject;
        assert!(matches!(engine.compile_after(&grammar, None, &cancelled), Err(Error::Cancelled)));
        assert_eq!(engine.compiling(), (0, 0));
        // Others get what they ask for.
        let relaxed = engine.relaxed(&schema, &Cancellation::default()).unwrap();
        assert_eq!(relaxed, json!({ "type": "object", "properties": { "a": { "type": "string" } } }));
        engine.compile(&grammar).unwrap();
        // What is known needs no work.
        engine.compile_after(&grammar, None, &cancelled).unwrap();
    }

    /// Threads of a server have a small stack: also of schemas that are nearly as deep as they may be, nothing recurses on theirs.
    #[test]
    fn deep_schemas_are_read_on_any_thread() {
        let link = |at: usize| json!({ "anyOf": [{ "$ref": format!("#/$defs/d{}", at + 1) }] });
        let mut links: serde_json::Map<String, Value> =
            (0..2700).map(|at| (format!("d{at}"), link(at))).collect();
        links.insert("d2700".to_owned(), json!({ "type": "object" }));
        let reached = json!({ "type": "object", "$ref": "#/$defs/d0", "$defs": links });
        links.insert("z".to_owned(), json!({ "$ref": "#/$defs/d0", "required": [] }));
        // Nothing refers to these.
        let hidden = json!({ "type": "object", "properties": { "a": {} }, "$defs": links });
        let engine = engine();
        std::thread::scope(|scope| {
            let read = || {
                let reason = |schema| super::super::json_rule(schema).unwrap_err();
                assert!(reason(&reached).contains("items of the parser"), "{}", reason(&reached));
                assert!(reason(&hidden).contains("combined schemas"), "{}", reason(&hidden));
                let compiled = engine.compile(&Grammar::JsonSchema(hidden)).map(drop);
                assert!(compiled.unwrap_err().to_string().contains("combined schemas"));
            };
            let thread = std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, read).unwrap();
            thread.join().unwrap();
        });
    }

    /// The trial of how an answer begins ends between two steps of the parser.
    #[test]
    fn a_compiler_looks_whether_it_was_cancelled() {
        let (engine, cancellation) = (engine(), Cancellation::default());
        let grammar = || source::of(&Grammar::Json, &|_| None, &Cancellation::default());
        let compiler = Compiler {
            factory: Arc::clone(&engine.factory),
            special: Arc::clone(&engine.special),
            cancellation: cancellation.clone(),
            trial: Arc::default(),
        };
        assert!(compiler.compile(&Grammar::Json, None).is_ok());
        cancellation.cancel();
        assert!(compiler.compile(&Grammar::Json, None).is_err());
        let top_level = source::top_level(grammar().unwrap(), None);
        let matcher = Matcher::new(engine.factory.create_parser(top_level)).into_cancellable();
        matcher.cancellation_handle().unwrap().cancel();
        assert!(mask::check_opening(matcher).is_err());
    }
}
