//! `quadriga chat`: an interactive conversation.

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::PathBuf;

use quadriga_llm::template::Message;
use quadriga_llm::{Finish, Generator};
use quadriga_view::format::plural;
use rustyline::error::ReadlineError;

use crate::answer::{AnswerOptions, Answered, speed_text, stream};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::{ModelOptions, Prepared};

/// Arguments of `quadriga chat`.
#[derive(clap::Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    model: ModelOptions,
    /// GGUF file, as with -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    file: Option<PathBuf>,
}

const HELP: &str = "\
/reset  clear the conversation
/stats  print speed and memory
/exit   quit (also Ctrl-D)
Ctrl-C stops the current answer; the text so far stays in the conversation.";

/// Answers line by line until the input ends.
pub(crate) fn chat(arguments: &ChatArgs) -> Outcome {
    let model = arguments.model.with_file(arguments.file.as_deref());
    let options = arguments.answer.generator(&model)?;
    let prepared = model.prepare(&options.engine)?;
    let (generator, load_seconds) = prepared.generator(options)?;
    let mut lines = LineReader::new()?;
    if !arguments.model.quiet {
        let name = prepared.model.file().find::<&str>("general.name").ok().flatten().unwrap_or("the model");
        note!("{} · loaded in {load_seconds:.2} s · /help for commands", name.escape_debug());
    }
    let mut conversation =
        Conversation { generator, prepared, messages: Vec::new(), totals: ChatTotals::default() };
    while let Some(line) = lines.next()? {
        match line.trim() {
            "" => {}
            "/help" => note!("{HELP}"),
            "/reset" => {
                conversation.messages.clear();
                note!("Conversation cleared.");
            }
            "/stats" => conversation.print_stats(),
            "/exit" | "/quit" => break,
            command if command.starts_with('/') => {
                note!("Unknown command {command}; /help lists all commands.")
            }
            message => conversation.answer(message)?,
        }
    }
    if !arguments.model.quiet {
        conversation.print_stats();
    }
    Ok(())
}

/// Tokens and seconds of all answers.
#[derive(Default)]
struct ChatTotals {
    answers: usize,
    prompt: (usize, f64),
    /// Tokens, decode steps and seconds of those.
    answer: (usize, usize, f64),
}

struct Conversation {
    generator: Generator,
    prepared: Prepared,
    messages: Vec<Message>,
    totals: ChatTotals,
}

impl Conversation {
    /// Answers one message. An error of one answer is printed and does not end the conversation.
    fn answer(&mut self, message: &str) -> Outcome {
        self.messages.push(Message::new("user", message));
        let ctrl_c = interrupt::catch_and_cancel(self.generator.cancel_flag());
        let mut out = io::stdout().lock();
        let answered = match self.generator.chat(&self.messages) {
            Ok(answer) => stream(answer, &ctrl_c, &mut out),
            Err(error) => Err(Failure::from(error)),
        };
        match answered {
            Ok(answered) => {
                writeln!(out)?;
                if answered.finish.is_none() && answered.answer.0 == 0 {
                    note!("(stopped before the first token; the message was removed from the conversation)");
                    self.messages.pop();
                    return Ok(());
                }
                if answered.finish == Some(Finish::Context) {
                    note!("(the context is full; /reset clears the conversation)");
                }
                self.totals.add(&answered);
                self.messages.push(Message::new("assistant", answered.text));
                Ok(())
            }
            Err(Failure::Message(text)) => {
                note!("quadriga: {text} (/reset clears the conversation)");
                self.messages.pop();
                Ok(())
            }
            Err(other) => Err(other),
        }
    }

    fn print_stats(&self) {
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
            let steps = tokens - 1;
            self.answer.1 += steps;
            self.answer.2 += steps as f64 / speed.max(1e-9);
        }
    }
}

/// The source of input lines: a line editor on a terminal, else stdin.
enum LineReader {
    Editor(Box<rustyline::DefaultEditor>),
    Plain,
}

impl LineReader {
    fn new() -> Outcome<LineReader> {
        if !io::stdin().is_terminal() {
            return Ok(LineReader::Plain);
        }
        match rustyline::DefaultEditor::new() {
            Ok(editor) => Ok(LineReader::Editor(Box::new(editor))),
            Err(error) => Err(Failure::Message(format!("cannot use the terminal: {error}"))),
        }
    }

    /// The next line; `None` at the end.
    fn next(&mut self) -> Outcome<Option<String>> {
        let unreadable = |reason: String| Err(Failure::Message(format!("cannot read the input: {reason}")));
        match self {
            LineReader::Editor(editor) => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        // A missing history entry is no reason to stop.
                        let _ = editor.add_history_entry(&line);
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Eof) => return Ok(None),
                    // It may have been meant for an answer that ended just before.
                    Err(ReadlineError::Interrupted) => note!("(Ctrl-D or /exit quits)"),
                    Err(error) => return unreadable(error.to_string()),
                }
            },
            LineReader::Plain => {
                let mut bytes = Vec::new();
                match io::stdin().lock().read_until(b'\n', &mut bytes) {
                    Ok(0) => Ok(None),
                    Ok(_) => match String::from_utf8(bytes) {
                        Ok(line) => Ok(Some(line)),
                        Err(_) => unreadable("not valid UTF-8; convert it, for example with iconv".into()),
                    },
                    Err(error) => unreadable(error.to_string()),
                }
            }
        }
    }
}
