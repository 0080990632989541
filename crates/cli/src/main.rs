//! The `quadriga` command.

/// Prints a line on standard error. Unlike `eprintln!` it does not panic when standard error is closed.
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

/// Run language models on several processors at once.
#[derive(Parser)]
#[command(name = "quadriga", version, after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Without -m, the default model (SmolLM2 135M) is downloaded once into the cache
folder (--cache-dir or QUADRIGA_CACHE). Results go to stdout, everything else
to stderr. Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted.";

#[derive(Subcommand)]
enum Command {
    /// Generate the answer to one prompt
    Run(Box<run::RunArgs>),
    /// Chat with a model
    Chat(Box<chat::ChatArgs>),
    /// Measure prefill and decode speed
    Bench(Box<bench::BenchArgs>),
    /// Show placement, splits and memory of a model without loading it
    Plan(Box<plan::PlanArgs>),
    /// Print metadata and tensors of a GGUF file
    Inspect(inspect::InspectArgs),
    /// List available devices
    Devices(devices::DevicesArgs),
    /// Evaluate test cases with known results
    Eval(Box<eval::EvalArgs>),
    /// Run the conformance suite on a device
    Check(check::CheckArgs),
    /// Write a GGUF file with random weights
    Synth(synth::SynthArgs),
}

/// Multi-letter options with a single dash, as in llama.cpp, and their long forms.
const LONG_WITH_ONE_DASH: &[(&str, &str)] = &[("-ngl", "--gpu-layers")];

/// The command line with single-dash options replaced by their long forms, which the parser knows.
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
