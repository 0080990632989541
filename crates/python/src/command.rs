//! The command `quadriga`, as `python -m quadriga`.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with its arguments and returns the exit code. From then on Ctrl-C is the command's.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, arguments: Vec<OsString>) -> u8 {
    py.detach(|| quadriga_cli::main_with_args(arguments))
}
