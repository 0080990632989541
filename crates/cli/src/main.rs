//! The `quadriga` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    quadriga_cli::main_with_args(std::env::args_os()).into()
}
