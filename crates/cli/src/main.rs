//! The `quadriga` command.

/// Prints a line on standard error. Unlike `eprintln!` it does not mind if nobody reads it.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod answer;
mod atomic_file;
mod backends;
mod commands;
mod failure;
mod fetch;
mod interrupt;
mod known_limits;
mod model_options;
mod recording;
mod size;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::commands::{bench, chat, check, devices, eval, inspect, plan, run, synth};
use crate::failure::Outcome;

/// Runs language models on several processors at once.
#[derive(Parser)]
#[command(name = "quadriga", version, after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Without -m the default model is used, fetched once into the cache folder
(--cache-dir, QUADRIGA_CACHE). Results go to standard output, all else to
standard error. Exit codes: 0 done, 1 failed, 2 wrong command line, 130 Ctrl-C.";

#[derive(Subcommand)]
enum Command {
    /// Answer one prompt
    Run(Box<run::Run>),
    /// Talk with a model
    Chat(Box<chat::Chat>),
    /// Measure tokens a second
    Bench(Box<bench::Bench>),
    /// Show where a model would go and what it would take
    Plan(Box<plan::Plan>),
    /// Print what is in a model file
    Inspect(inspect::Inspect),
    /// List what there is to run on
    Devices(devices::Devices),
    /// Compute cases with known results
    Eval(Box<eval::Eval>),
    /// Run the conformance suite on a device
    Check(check::Check),
    /// Write a model file with random weights
    Synth(synth::Synth),
}

/// Options that users of llama.cpp know with one dash and several letters.
const LONG_WITH_ONE_DASH: &[(&str, &str)] = &[("-ngl", "--gpu-layers")];

/// The command line with every option in the form that the parser knows.
fn command_line(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut verbatim = false;
    arguments
        .map(|argument| {
            verbatim |= argument == "--";
            let text = argument.to_str().filter(|_| !verbatim).unwrap_or_default();
            let (name, value) =
                text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
            match (LONG_WITH_ONE_DASH.iter().find(|(short, _)| *short == name), value) {
                (Some((_, long)), None) => long.into(),
                (Some((_, long)), Some(value)) => format!("{long}={value}").into(),
                (None, _) => argument,
            }
        })
        .collect()
}

fn main() -> ExitCode {
    let arguments = Arguments::parse_from(command_line(std::env::args_os()));
    interrupt::install();
    match execute(&arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn execute(command: &Command) -> Outcome {
    match command {
        Command::Run(arguments) => run::run(arguments),
        Command::Chat(arguments) => chat::chat(arguments),
        Command::Bench(arguments) => bench::bench(arguments),
        Command::Plan(arguments) => plan::plan(arguments),
        Command::Inspect(arguments) => inspect::inspect(arguments),
        Command::Devices(arguments) => devices::devices(arguments),
        Command::Eval(arguments) => eval::eval(arguments),
        Command::Check(arguments) => check::check(arguments),
        Command::Synth(arguments) => synth::synth(arguments),
    }
}
