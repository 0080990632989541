//! `quadriga chat`: an interactive conversation.

mod conversation;
mod input;
mod session;

use std::path::{Path, PathBuf};

use self::input::{ChatInput, InputReader};
use self::session::ChatSession;
use crate::answer::AnswerOptions;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prompt_cache::PromptCacheOptions;

/// Arguments of `quadriga chat`.
#[derive(clap::Args)]
pub(crate) struct ChatArgs {
    /// First message
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    cache: PromptCacheOptions,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// GGUF file, as with -m
    #[arg(value_name = "MODEL", conflicts_with_all = ["model", "hf_repo"])]
    file: Option<PathBuf>,
}

const HELP: &str = "\
/regen           answer the last message again
/undo [N]        remove the last message, or the last N, and their answers
/reset           clear the conversation
/system [TEXT]   set the system prompt, or show it; /system \"\" removes it
/set             show all options that can be changed
/set NAME VALUE  change an option, such as /set temp 0.2, /set ignore-eos on or /set logit-bias none
/save FILE       write the conversation to a file
/load FILE       continue the conversation of a file
/stats           print speed and memory
/exit            quit (also Ctrl-D)
A message of several lines begins and ends with \"\"\".
Ctrl-C stops the current answer; the text so far stays in the conversation. It drops a message of several lines.";

/// Answers messages until the input ends.
pub(crate) fn chat(arguments: &ChatArgs) -> Outcome {
    arguments.cache.check()?;
    let model = arguments.model.with_file(arguments.file.as_deref());
    let options = arguments.answer.generator(&model)?;
    let prepared = model.prepare(&options.engine)?;
    let mut input = InputReader::new(std::io::stdin())?;
    let mut session = ChatSession::load(prepared, options, arguments.answer.clone(), model.clone())?;
    arguments.cache.load(session.generator_mut())?;
    let single = arguments.answer.single_turn;
    if let Some(prompt) = &arguments.prompt {
        session.ask(&model.llama.unescaped(prompt))?;
    }
    while !(single && session.answers() > 0)
        && let Some(entry) = input.next()?
    {
        match entry {
            ChatInput::Message(text) => session.ask(&text)?,
            ChatInput::Command(name, rest) => {
                if is_exit(&name) {
                    break;
                }
                match command(&mut session, &name, &rest) {
                    Err(Failure::Message(text) | Failure::Usage(text)) => note!("{text}"),
                    outcome => outcome?,
                }
            }
        }
    }
    session.finish();
    arguments.cache.save(session.generator_mut())
}

fn is_exit(name: &str) -> bool {
    matches!(name, "exit" | "quit" | "bye")
}

/// Executes a command; an error is printed and does not end the conversation.
fn command(session: &mut ChatSession, name: &str, rest: &str) -> Outcome {
    let file = || match rest {
        "" => Err(Failure::Usage(format!("/{name} needs a file, for example: /{name} chat.json"))),
        path => Ok(Path::new(path)),
    };
    match name {
        "help" | "?" => note!("{HELP}"),
        "reset" | "clear" => session.reset(),
        "regen" => return session.regenerate(),
        "undo" => session.undo(rest)?,
        "system" if rest.is_empty() => session.show_system(),
        "system" => session.set_system(rest),
        "set" if rest.is_empty() => session.show_settings(),
        "set" => session.set(rest)?,
        "save" => session.save(file()?)?,
        "load" => session.load_file(file()?)?,
        "stats" => session.print_stats(),
        other => return Err(Failure::Usage(format!("Unknown command /{other}; /help lists all commands."))),
    }
    Ok(())
}
