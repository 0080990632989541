//! The `quadriga` command as a function, for programs that bring it along under another name: the Python package's
//! `python -m quadriga` is one.
//!
//! ```no_run
//! let line = ["quadriga", "run", "What is gravity?"].map(std::ffi::OsString::from);
//! std::process::exit(quadriga_cli::main_with_args(line).into());
//! ```

/// Prints a line on standard error, with control characters escaped, or logs it where the log has another form. Unlike `eprintln!`
/// it does not panic when standard error is closed.
macro_rules! note {
    ($($text:tt)*) => {
        crate::notes::note(&format!($($text)*))
    };
}

mod answer;
mod answer_printer;
mod atomic_file;
mod backends;
mod command_line;
mod commands;
mod environment;
mod failure;
mod fetch;
mod file_hint;
mod foreign_options;
mod hub;
mod hub_model;
mod interrupt;
mod kernel_progress;
mod known_limits;
mod kv_pages;
mod llama_environment;
mod llama_options;
mod lora;
mod model_argument;
mod model_options;
mod notes;
mod output_check;
mod penalty_options;
mod piped_input;
mod placement_options;
mod prepared_model;
mod prompt_cache;
mod rank_devices;
mod rank_threads;
mod ranks;
mod recording;
mod serving_options;
mod similar;
mod size;
mod terminal;
mod values;

use std::ffi::OsString;

use clap::error::ContextKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::{
    batch, bench, chat, check, compare, convert, devices, embed, eval, imatrix, inspect, lora_merge, neurons,
    perplexity, plan, pull, quantize, run, serve, split, synth,
};
use crate::failure::Outcome;
use crate::model_options::ModelOptions;

/// Run language models on several processors at once.
#[derive(Parser)]
#[command(name = "quadriga", version, args_override_self = true, after_help = AFTER_HELP)]
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
    /// Answer requests over HTTP, as OpenAI and others do
    Serve(Box<serve::ServeArgs>),
    /// Answer a file of requests, many at once
    Batch(Box<batch::BatchArgs>),
    /// Measure prefill and decode speed
    Bench(Box<bench::BenchArgs>),
    /// Show placement, splits and memory of a model without loading it
    Plan(Box<plan::PlanArgs>),
    /// Compute embeddings of texts
    Embed(Box<embed::EmbedArgs>),
    /// Print metadata and tensors of a GGUF file
    Inspect(inspect::InspectArgs),
    /// Download a model of Hugging Face's hub into the cache
    Pull(pull::PullArgs),
    /// List the models in the cache
    #[command(alias = "ls")]
    List(pull::ListArgs),
    /// Convert a folder of safetensors, or a repository, to GGUF
    Convert(convert::ConvertArgs),
    /// Merge LoRA adapters into a GGUF file
    Lora(lora_merge::LoraArgs),
    /// Split a GGUF file into parts
    Split(split::SplitArgs),
    /// Merge the parts of a GGUF file
    Merge(split::MergeArgs),
    /// Remove models from the cache
    Rm(pull::RemoveArgs),
    /// Show where a model of the cache is, and what it is
    Show(pull::ShowArgs),
    /// List available devices
    Devices(devices::DevicesArgs),
    /// Evaluate test cases with known results
    Eval(Box<eval::EvalArgs>),
    /// Run the conformance suite on a device
    Check(check::CheckArgs),
    /// Count how often each neuron of a model with ReLU is active
    Neurons(Box<neurons::NeuronsArgs>),
    /// Write a GGUF file with smaller types
    Quantize(Box<quantize::QuantizeArgs>),
    /// Measure which inputs of a model's weights matter, for quantize
    Imatrix(Box<imatrix::ImatrixArgs>),
    /// Measure how well a model predicts a text
    Perplexity(Box<perplexity::PerplexityArgs>),
    /// Compare the predictions and weights of two models
    Compare(Box<compare::CompareArgs>),
    /// Write a GGUF file with random weights
    Synth(synth::SynthArgs),
}

impl Command {
    /// The options of a command that several ranks can run together.
    fn of_ranks(&self) -> Option<&ModelOptions> {
        match self {
            Command::Run(arguments) => Some(&arguments.model),
            Command::Chat(arguments) => Some(&arguments.model),
            Command::Bench(arguments) => Some(&arguments.model).filter(|_| arguments.has_one_engine()),
            Command::Eval(arguments) => Some(&arguments.model),
            Command::Serve(arguments) => Some(&arguments.model),
            Command::Batch(arguments) => Some(&arguments.model),
            Command::Embed(arguments) => Some(&arguments.model),
            _ => None,
        }
    }

    /// Whether the command was given `-q`.
    fn is_quiet(&self) -> bool {
        match self {
            Command::Run(arguments) => arguments.model.quiet,
            Command::Chat(arguments) => arguments.model.quiet,
            Command::Serve(arguments) => arguments.model.quiet,
            Command::Batch(arguments) => arguments.model.quiet,
            Command::Bench(arguments) => arguments.model.quiet,
            Command::Plan(arguments) => arguments.model.quiet,
            Command::Embed(arguments) => arguments.model.quiet,
            Command::Eval(arguments) => arguments.model.quiet,
            Command::Neurons(arguments) => arguments.model.quiet,
            Command::Quantize(arguments) => arguments.quiet,
            Command::Imatrix(arguments) => arguments.model.quiet,
            Command::Perplexity(arguments) => arguments.model.quiet,
            Command::Compare(arguments) => arguments.model.quiet,
            Command::Lora(_)
            | Command::Split(_)
            | Command::Merge(_)
            | Command::Convert(_)
            | Command::Pull(_)
            | Command::List(_)
            | Command::Rm(_)
            | Command::Show(_) => false,
            Command::Inspect(_) | Command::Devices(_) | Command::Check(_) | Command::Synth(_) => false,
        }
    }
}

/// The parser of the command line. Options of answers that mean nothing to a command are not in its help text.
fn parser() -> clap::Command {
    let without_turns = |command: clap::Command| command.mut_arg("single_turn", |option| option.hide(true));
    let parser = Arguments::command();
    parser.mut_subcommand("serve", without_turns).mut_subcommand("batch", without_turns)
}

/// Runs the command with a command line, whose first argument is the program's name, and returns the exit code. It handles
/// Ctrl-C for the whole process from then on.
pub fn main_with_args(line: impl IntoIterator<Item = OsString>) -> u8 {
    let mut parser = parser();
    let outcome = command_line::normalize(line.into_iter(), &parser).and_then(|line| {
        let mut parsed = parser.try_get_matches_from_mut(line.clone());
        if let Ok(matches) = &parsed
            && let Some(extended) = llama_environment::extended(&line, &parser, matches)?
        {
            let again = parser.try_get_matches_from_mut(extended.words.iter());
            parsed = Ok(again.map_err(|error| extended.failure(&error))?);
        }
        let arguments = match parsed.and_then(|matches| Arguments::from_arg_matches(&matches)) {
            Ok(arguments) => arguments,
            Err(error) => {
                let mut error = error.with_cmd(&parser);
                // The advice to put an unknown option behind `--`, where it would be part of the prompt.
                error.remove(ContextKind::Suggested);
                let code = u8::try_from(error.exit_code()).unwrap_or(2);
                if !ranks::was_launched_after_the_first() {
                    // Help and version go to standard output; where that is closed, nobody reads them.
                    let _ = error.print();
                } else if code != 0 {
                    ranks::wait_for_the_first();
                }
                return Ok(code);
            }
        };
        environment::check()?;
        if matches!(arguments.command, Command::Serve(_)) {
            // Before the first thread, that for Ctrl-C.
            serve::use_one_arena();
        }
        interrupt::install();
        if !arguments.command.is_quiet() {
            kernel_progress::install();
        }
        let timeouts = arguments.command.of_ranks().map(|options| ranks::Timeouts {
            silence: options.rank_timeout,
            step: options.rank_step_timeout,
            load: options.rank_load_timeout,
        });
        ranks::start(timeouts)?;
        if let Some(options) = arguments.command.of_ranks() {
            options.explain_parallelism();
        }
        ranks::guarded(|| execute(&arguments.command)).map(|()| 0)
    });
    ranks::end(outcome)
}

fn execute(command: &Command) -> Outcome {
    match command {
        Command::Run(arguments) => run::run(arguments),
        Command::Chat(arguments) => chat::chat(arguments),
        Command::Serve(arguments) => serve::serve(arguments),
        Command::Batch(arguments) => batch::batch(arguments),
        Command::Bench(arguments) => bench::bench(arguments),
        Command::Plan(arguments) => plan::plan(arguments),
        Command::Embed(arguments) => embed::embed(arguments),
        Command::Inspect(arguments) => inspect::inspect(arguments),
        Command::Pull(arguments) => pull::pull(arguments),
        Command::Lora(arguments) => lora_merge::lora(arguments),
        Command::Split(arguments) => split::split(arguments),
        Command::Merge(arguments) => split::merge(arguments),
        Command::Convert(arguments) => convert::convert(arguments),
        Command::List(arguments) => pull::list(arguments),
        Command::Rm(arguments) => pull::remove(arguments),
        Command::Show(arguments) => pull::show(arguments),
        Command::Devices(arguments) => devices::devices(arguments),
        Command::Eval(arguments) => eval::eval(arguments),
        Command::Check(arguments) => check::check(arguments),
        Command::Neurons(arguments) => neurons::neurons(arguments),
        Command::Quantize(arguments) => quantize::quantize(arguments),
        Command::Imatrix(arguments) => imatrix::imatrix(arguments),
        Command::Perplexity(arguments) => perplexity::perplexity(arguments),
        Command::Compare(arguments) => compare::compare(arguments),
        Command::Synth(arguments) => synth::synth(arguments),
    }
}
