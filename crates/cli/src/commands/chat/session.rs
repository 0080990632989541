//! A chat with a model: questions and answers, commands on the conversation, and its options.

use std::io::{self, Write};
use std::path::Path;

use quadriga_llm::template::Message;
use quadriga_llm::{Finish, Generator, GeneratorOptions, RequestOptions};
use quadriga_view::format::plural;

use super::conversation::Conversation;
use crate::answer::{AnswerOptions, Answered, IGNORE_EOS, speed_text, stream};
use crate::answer_printer::AnswerPrinter;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;
use crate::{interrupt, terminal, values};

/// The share of the context that is kept free for an answer.
const ANSWER_SHARE: usize = 4;

/// A conversation with a loaded model.
pub(super) struct ChatSession {
    generator: Generator,
    prepared: Prepared,
    conversation: Conversation,
    /// Whether the model's chat template is used, without which there is no system prompt.
    has_template: bool,
    answer: AnswerOptions,
    model: ModelOptions,
    options: GeneratorOptions,
    /// Whether a new seed was set since the last answer.
    reseed: bool,
    /// Whether the user was told that old messages are dropped.
    said_dropped: bool,
    totals: ChatTotals,
}

/// Tokens and seconds of all answers.
#[derive(Default)]
struct ChatTotals {
    answers: usize,
    prompt: (usize, f64),
    /// Tokens, decode steps and seconds of those.
    answer: (usize, usize, f64),
}

impl ChatSession {
    /// Loads the model.
    pub(super) fn load(
        mut prepared: Prepared,
        options: GeneratorOptions,
        answer: AnswerOptions,
        model: ModelOptions,
    ) -> Outcome<ChatSession> {
        answer.set_template(&mut prepared)?;
        let template_variables = answer.template_variables(&prepared.model);
        // The conversation has the system prompt, so that it can be changed.
        let system = options.system.clone();
        let (generator, load_seconds) =
            prepared.generator(GeneratorOptions { system: None, template_variables, ..options.clone() })?;
        if !model.quiet {
            note!("{} · loaded in {load_seconds:.2} s · /help for commands", prepared.title());
            answer.explain_missing_template(&prepared.model);
        }
        let has_template = generator.model().template().is_some() && !options.raw;
        let mut session = ChatSession {
            generator,
            prepared,
            conversation: Conversation::default(),
            has_template,
            answer,
            model,
            options,
            reseed: false,
            said_dropped: false,
            totals: ChatTotals::default(),
        };
        if let Some(system) = system {
            session.set_system(&system);
        }
        Ok(session)
    }

    /// The generator, whose KV cache is loaded and saved.
    pub(super) fn generator_mut(&mut self) -> &mut Generator {
        &mut self.generator
    }

    /// The number of answers so far.
    pub(super) fn answers(&self) -> usize {
        self.totals.answers
    }

    /// Answers a message. An error is printed and removes the message, but does not end the conversation.
    pub(super) fn ask(&mut self, message: &str) -> Outcome {
        self.turn(message, "the message was removed from the conversation").map(drop)
    }

    /// Adds a message and its answer to the conversation. Without an answer neither is added, the reason is printed with
    /// this consequence, and the result is false.
    fn turn(&mut self, message: &str, consequence: &str) -> Outcome<bool> {
        self.conversation.push("user", message);
        let answered = self.answer();
        self.prepared.clear_prefill();
        if !matches!(answered, Ok(true)) {
            self.conversation.pop("user");
        }
        match answered {
            Ok(false) => note!("(stopped before the first token; {consequence})"),
            Err(Failure::Message(text) | Failure::Usage(text)) => note!("quadriga: {text} ({consequence})"),
            other => return other,
        }
        Ok(false)
    }

    /// Answers the last message and adds the answer to the conversation. False if Ctrl-C came before the first token.
    fn answer(&mut self) -> Outcome<bool> {
        let context = self.generator.engine().options().context;
        let room = (context / ANSWER_SHARE).min(self.options.max_tokens.unwrap_or(usize::MAX));
        let messages = if self.has_template {
            self.conversation.with_system()
        } else {
            self.conversation.messages().to_vec()
        };
        let fitted = self.generator.fit(&messages, room)?;
        let request = RequestOptions {
            sampling: self.options.sampling.clone(),
            reseed: std::mem::take(&mut self.reseed),
            max_tokens: self.options.max_tokens,
            stops: self.options.stops.clone(),
            reasoning_budget: self.options.reasoning_budget,
            ..self.generator.request_options()
        };
        let ctrl_c = interrupt::catch_and_cancel(self.generator.cancel_flag());
        let mut out = io::stdout().lock();
        let answer = self.generator.chat_with(&fitted.messages, request)?;
        let (shown, mut aside) = (self.answer.reasoning.display(self.model.quiet), io::stderr());
        let printer = AnswerPrinter::new(&mut out, &mut aside, terminal::escapes_answers(), shown);
        let answered = stream(answer, &ctrl_c, printer)?;
        writeln!(out)?;
        answered.explain_missing(self.answer.reasoning);
        if answered.finish.is_none() && answered.answer.0 == 0 {
            return Ok(false);
        }
        for _ in 0..fitted.dropped_turns {
            self.conversation.drop_oldest_turn();
        }
        let quiet = self.model.quiet;
        if fitted.dropped_turns > 0 && !std::mem::replace(&mut self.said_dropped, true) && !quiet {
            note!("(the context of {context} tokens is full: the oldest messages are dropped from now on)");
        }
        if answered.finish == Some(Finish::Context) && !quiet {
            note!("(the answer ends here: the context of {context} tokens is full; -c sets a larger one)");
        }
        self.totals.add(&answered);
        let reasoning_content = Some(answered.reasoning).filter(|text| !text.is_empty());
        self.conversation.add(Message { reasoning_content, ..Message::new("assistant", answered.text) });
        Ok(true)
    }

    /// Answers the last message again. Without a new answer, message and answer stay.
    pub(super) fn regenerate(&mut self) -> Outcome {
        let before = self.conversation.clone();
        let message = self.pop_turn("There is no message to answer again.")?;
        let answered = self.turn(&message, "the conversation is unchanged");
        if !matches!(answered, Ok(true)) {
            self.conversation = before;
        }
        answered.map(drop)
    }

    /// Removes the last messages and their answers: so many, or one.
    pub(super) fn undo(&mut self, count: &str) -> Outcome {
        let count = match count {
            "" => 1,
            text => values::at_least_one(text)
                .map_err(|error| Failure::Usage(format!("/undo {text}: the number of messages {error}")))?,
        };
        for number in 0..count {
            let nothing =
                if number == 0 { "There is nothing to undo." } else { "There is nothing else to undo." };
            let message = self.pop_turn(nothing)?;
            note!("Removed: {}", shortened(&message));
        }
        Ok(())
    }

    /// Removes the last message and its answer; the message. Without a message nothing is removed.
    fn pop_turn(&mut self, nothing: &str) -> Outcome<String> {
        let answer = self.conversation.pop("assistant");
        match (self.conversation.pop("user"), answer) {
            (Some(message), _) => Ok(message.content),
            (None, answer) => {
                if let Some(answer) = answer {
                    self.conversation.add(answer);
                }
                Err(Failure::Usage(nothing.to_owned()))
            }
        }
    }

    pub(super) fn reset(&mut self) {
        self.conversation.clear();
        self.said_dropped = false;
        note!("Conversation cleared.");
    }

    /// Prints the system prompt.
    pub(super) fn show_system(&self) {
        match &self.conversation.system {
            None => note!("There is no system prompt."),
            Some(system) => note!("System prompt: {system}"),
        }
    }

    /// Sets the system prompt; `""`, or an empty text, removes it.
    pub(super) fn set_system(&mut self, text: &str) {
        self.conversation.system = Some(text).filter(|text| !matches!(*text, "" | "\"\"")).map(str::to_owned);
        if self.conversation.system.is_some() && !self.has_template {
            note!("(the system prompt has no effect without a chat template)");
        }
    }

    /// Prints all options that can be set.
    pub(super) fn show_settings(&self) {
        for (name, value) in self.answer.settings() {
            note!("{name:<22} {value}");
        }
    }

    /// Changes an option: its name and value as on the command line.
    pub(super) fn set(&mut self, text: &str) -> Outcome {
        let (name, value) = match text.split_once(char::is_whitespace) {
            Some(both) => both,
            // A flag needs no value.
            None if text.trim_start_matches('-') == IGNORE_EOS => (text, "on"),
            None => {
                return Err(Failure::Usage(
                    "/set needs a name and a value, for example: /set temp 0.2".into(),
                ));
            }
        };
        let name = name.trim_start_matches('-');
        let value = value.trim();
        if matches!(name, "system" | "system-prompt") {
            self.set_system(value);
            return Ok(());
        }
        let changed = self.answer.with(name, value)?;
        self.options = changed.generator(&self.model)?;
        if matches!(name, "reasoning" | "reasoning-budget") {
            let variables = changed.template_variables(&self.prepared.model);
            self.generator.set_template_variables(variables);
        }
        self.answer = changed;
        self.reseed |= matches!(name, "seed" | "s");
        Ok(())
    }

    pub(super) fn save(&self, path: &Path) -> Outcome {
        self.conversation.save(path)?;
        note!("Saved {} to {}.", self.count(), path.display());
        Ok(())
    }

    pub(super) fn load_file(&mut self, path: &Path) -> Outcome {
        self.conversation = Conversation::read(path)?;
        self.said_dropped = false;
        note!("Loaded {} from {}.", self.count(), path.display());
        Ok(())
    }

    fn count(&self) -> String {
        plural(self.conversation.messages().len(), "message", "messages")
    }

    /// Prints the statistics at the end, unless the options ask for quiet.
    pub(super) fn finish(&self) {
        if !self.model.quiet {
            self.print_stats();
        }
    }

    pub(super) fn print_stats(&self) {
        let ChatTotals { answers, prompt, answer } = &self.totals;
        let (prompt_tokens, seconds) = prompt;
        let prompt_speed = *prompt_tokens as f64 / seconds.max(1e-9);
        let (_, steps, seconds) = answer;
        let speed = (*steps > 0).then(|| *steps as f64 / seconds.max(1e-9));
        if *answers > 0 {
            note!(
                "{} · prompt {}, {prompt_speed:.1} tok/s · generation {}, {} tok/s",
                plural(*answers, "answer", "answers"),
                plural(*prompt_tokens, "token", "tokens"),
                plural(answer.0, "token", "tokens"),
                speed_text(speed)
            );
        }
        note!("memory: {}", self.prepared.memory());
        if let Some(cache) = self.generator.engine().expert_cache() {
            note!("{cache}");
        }
    }
}

impl ChatTotals {
    fn add(&mut self, answered: &Answered) {
        self.answers += 1;
        let (tokens, speed) = answered.prompt;
        self.prompt.0 += tokens;
        self.prompt.1 += tokens as f64 / speed.max(1e-9);
        let (tokens, speed) = answered.answer;
        self.answer.0 += tokens;
        if let Some(speed) = speed {
            let steps = tokens.saturating_sub(1);
            self.answer.1 += steps;
            self.answer.2 += steps as f64 / speed.max(1e-9);
        }
    }
}

/// The beginning of a message, on one line.
fn shortened(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    let short: String = line.chars().take(60).collect();
    if short.len() < message.len() { format!("{short} …") } else { short }
}
