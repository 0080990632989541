//! `quadriga chat`: a conversation.

use std::io::{self, BufRead, IsTerminal, Write};

use quadriga_llm::template::Message;
use quadriga_llm::{Finish, Generator};
use rustyline::error::ReadlineError;

use crate::answer::{AnswerOptions, Answered, stream};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::{ModelOptions, Prepared};

/// With which model to talk, and how it answers.
#[derive(clap::Args)]
pub(crate) struct Chat {
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    model: ModelOptions,
}

const HELP: &str = "\
/reset  forget the conversation
/stats  speed and memory
/exit   end (also Ctrl-D)
Ctrl-C stops an answer, or the reading of a long question; what the answer said so far stays in the conversation.";

/// Talks until the input ends.
pub(crate) fn chat(arguments: &Chat) -> Outcome {
    let options = arguments.answer.generator(&arguments.model);
    let prepared = arguments.model.prepare(&options.engine)?;
    let (generator, load_seconds) = prepared.generator(options)?;
    let mut lines = Lines::new()?;
    if !arguments.model.quiet {
        let name = prepared.model.file().find::<&str>("general.name").ok().flatten().unwrap_or("the model");
        note!("{} · loaded in {load_seconds:.2} s · /help for commands", name.escape_debug());
    }
    let mut conversation =
        Conversation { generator, prepared, messages: Vec::new(), totals: Totals::default() };
    while let Some(line) = lines.next()? {
        match line.trim() {
            "" => {}
            "/help" => note!("{HELP}"),
            "/reset" => {
                conversation.messages.clear();
                note!("The conversation is forgotten.");
            }
            "/stats" => conversation.print_stats(),
            "/exit" | "/quit" => break,
            command if command.starts_with('/') => {
                note!("There is no command {command}; /help lists them.")
            }
            said => conversation.answer(said)?,
        }
    }
    if !arguments.model.quiet {
        conversation.print_stats();
    }
    Ok(())
}

#[derive(Default)]
struct Totals {
    answers: usize,
    prompt: (usize, f64),
    answer: (usize, f64),
}

struct Conversation {
    generator: Generator,
    prepared: Prepared,
    messages: Vec<Message>,
    totals: Totals,
}

impl Conversation {
    /// Answers what was said. What goes wrong with one answer does not end the conversation.
    fn answer(&mut self, said: &str) -> Outcome {
        self.messages.push(Message::new("user", said));
        let gentle = interrupt::gently_setting(self.generator.cancel_flag());
        let mut out = io::stdout().lock();
        let answered = match self.generator.chat(&self.messages) {
            Ok(answer) => stream(answer, &gentle, &mut out),
            Err(error) => Err(Failure::from(error)),
        };
        match answered {
            Ok(answered) => {
                writeln!(out)?;
                if answered.finish.is_none() && answered.answer.0 == 0 {
                    note!("(stopped before the answer began; the question is not part of the conversation)");
                    self.messages.pop();
                    return Ok(());
                }
                if answered.finish == Some(Finish::Context) {
                    note!("(the context is full; /reset starts anew)");
                }
                self.totals.add(&answered);
                self.messages.push(Message::new("assistant", answered.text));
                Ok(())
            }
            Err(Failure::Message(text)) => {
                note!("quadriga: {text} (/reset forgets the conversation so far)");
                self.messages.pop();
                Ok(())
            }
            Err(other) => Err(other),
        }
    }

    fn print_stats(&self) {
        let Totals { answers, prompt, answer } = &self.totals;
        let speed = |(tokens, seconds): &(usize, f64)| *tokens as f64 / seconds.max(1e-9);
        if *answers > 0 {
            note!(
                "{answers} answers · prompt {} tokens, {:.1} tok/s · answers {} tokens, {:.1} tok/s",
                prompt.0,
                speed(prompt),
                answer.0,
                speed(answer)
            );
        }
        note!("memory: {}", self.prepared.memory());
    }
}

impl Totals {
    fn add(&mut self, answered: &Answered) {
        let add = |total: &mut (usize, f64), (tokens, speed): (usize, f64)| {
            total.0 += tokens;
            total.1 += tokens as f64 / speed.max(1e-9);
        };
        self.answers += 1;
        add(&mut self.prompt, answered.prompt);
        add(&mut self.answer, answered.answer);
    }
}

/// Where lines come from: an editor on a terminal, or plain standard input.
enum Lines {
    Editor(Box<rustyline::DefaultEditor>),
    Plain,
}

impl Lines {
    fn new() -> Outcome<Lines> {
        if !io::stdin().is_terminal() {
            return Ok(Lines::Plain);
        }
        match rustyline::DefaultEditor::new() {
            Ok(editor) => Ok(Lines::Editor(Box::new(editor))),
            Err(error) => Err(Failure::Message(format!("cannot use the terminal: {error}"))),
        }
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Outcome<Option<String>> {
        let unreadable = |reason: String| Err(Failure::Message(format!("cannot read the input: {reason}")));
        match self {
            Lines::Editor(editor) => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        // A line that is not remembered can still be answered.
                        let _ = editor.add_history_entry(&line);
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Eof) => return Ok(None),
                    // It may have been meant for an answer that has just ended.
                    Err(ReadlineError::Interrupted) => note!("(Ctrl-D or /exit ends the chat)"),
                    Err(error) => return unreadable(error.to_string()),
                }
            },
            Lines::Plain => {
                let mut bytes = Vec::new();
                match io::stdin().lock().read_until(b'\n', &mut bytes) {
                    Ok(0) => Ok(None),
                    Ok(_) => match String::from_utf8(bytes) {
                        Ok(line) => Ok(Some(line)),
                        Err(_) => unreadable("it is not UTF-8; convert it, for example with iconv".into()),
                    },
                    Err(error) => unreadable(error.to_string()),
                }
            }
        }
    }
}
