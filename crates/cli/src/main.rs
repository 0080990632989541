//! The `quadriga` command.

mod inspect;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

/// Runs one tensor graph on several processors at once.
#[derive(Parser)]
#[command(name = "quadriga", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print what is in a model file.
    Inspect {
        /// The GGUF file; of a split model, any of its parts.
        file: PathBuf,
        /// Also list every tensor.
        #[arg(long)]
        tensors: bool,
        /// Print everything as JSON.
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Inspect { file, tensors, json } => inspect::inspect(&file, tensors, json),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("quadriga: {error}");
            ExitCode::FAILURE
        }
    }
}
