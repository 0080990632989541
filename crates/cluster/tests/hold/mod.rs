//! An MPI library in which a rank stops, for tests of what the others do then.

#![allow(dead_code, clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the library of an installed family into a folder: the family's own, but for `mpi.c`.
pub(crate) fn library(family: &Path, folder: &Path) -> PathBuf {
    let names = [("libmpi_abi.so.1", "libmpi_abi.held.so"), ("libmpi.so.40", "libmpi.held.so")];
    let family = family.join("lib").canonicalize().unwrap();
    let (real, held) = names.into_iter().find(|(real, _)| family.join(real).exists()).unwrap();
    let (source, held) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster/tests/hold/mpi.c"), folder.join(held));
    let mut compile = Command::new("cc");
    compile.args(["-shared", "-fPIC", "-o"]).arg(&held).arg(source).arg(family.join(real));
    compile.arg(format!("-Wl,-rpath,{}", family.display()));
    assert!(compile.status().unwrap().success());
    held
}

/// Runs another command, whose rank of this number stops when it calls the function.
pub(crate) fn held(function: &str, rank: usize) -> Command {
    let mut command = Command::new("env");
    command.args([format!("QUADRIGA_TEST_HOLD={function}"), format!("QUADRIGA_TEST_HOLD_RANK={rank}")]);
    command
}
