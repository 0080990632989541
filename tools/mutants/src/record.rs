//! Runs tests, each in a process of its own, and records which mutants each of them reaches.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::compile::TestProgram;

/// A test, how long it takes, and the mutants it reaches.
#[derive(Clone, Serialize, Deserialize)]
pub struct Recording {
    pub program: String,
    /// Empty for a program without a test harness.
    pub test: String,
    pub seconds: f64,
    /// Whether it passes without a mutant; if not, it judges none.
    pub passed: bool,
    /// A bit for each mutant, eight per byte, in hexadecimal.
    reached: String,
}

impl Recording {
    /// Whether the test reaches the mutant `id`.
    pub fn reaches(&self, id: usize) -> bool {
        let byte = self
            .reached
            .get(id / 8 * 2..id / 8 * 2 + 2)
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        byte.is_some_and(|byte| byte >> (id % 8) & 1 == 1)
    }
}

fn hexadecimal(flags: &[u8]) -> String {
    let byte = |flags: &[u8]| {
        flags.iter().enumerate().fold(0u8, |byte, (at, flag)| byte | u8::from(*flag != 0) << at)
    };
    flags.chunks(8).map(|flags| format!("{:02x}", byte(flags))).collect()
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Passed,
    Failed,
    TimedOut,
}

/// What every test runs under.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Bytes of private writable memory: some mutants make a list grow without end.
    pub memory: u64,
}

/// Runs one test with a variable set. All its processes are killed at the time limit.
pub fn run_test(
    program: &TestProgram,
    test: &str,
    variable: (&str, &OsStr),
    temporary: &Path,
    limit: Duration,
    limits: Limits,
) -> Outcome<(Ending, Duration)> {
    let _ = fs::remove_dir_all(temporary);
    fs::create_dir_all(temporary)?;
    let shell = format!("ulimit -c 0; ulimit -d {}; exec \"$@\"", limits.memory / 1024);
    let mut command = Command::new("timeout");
    command
        .args(["-s", "KILL", &format!("{:.1}", limit.as_secs_f64()), "sh", "-c", &shell, "sh"])
        .arg(&program.executable);
    if !test.is_empty() {
        command.args(["--exact", test]);
    }
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder).env("TMPDIR", temporary);
    command.env_remove("QUADRIGA_MUTANT").env_remove("QUADRIGA_MUTANT_RECORD").env(variable.0, variable.1);
    let start = Instant::now();
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    let elapsed = start.elapsed();
    let ending = match status.success() {
        true => Ending::Passed,
        false if elapsed >= limit => Ending::TimedOut,
        false => Ending::Failed,
    };
    Ok((ending, elapsed))
}

/// The names of a program's tests but the ignored ones, or one empty name if it has no test harness.
fn test_names(program: &TestProgram) -> Outcome<Vec<String>> {
    let list = |arguments: &[&str]| -> Outcome<Option<BTreeSet<String>>> {
        let output = Command::new(&program.executable)
            .args(arguments)
            .current_dir(&program.folder)
            .stdin(Stdio::null())
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_string).collect();
        Ok(output.status.success().then_some(names))
    };
    let all = list(&["--list", "--format", "terse"])?;
    let ignored = list(&["--list", "--format", "terse", "--ignored"])?;
    Ok(match (all, ignored) {
        (Some(all), Some(ignored)) => all.difference(&ignored).cloned().collect(),
        _ => vec![String::new()],
    })
}

/// Which tests are recorded, and how.
pub struct Recorder<'a> {
    /// Tests that are left out.
    pub skip: Option<&'a Regex>,
    /// Recordings to keep, by program and test.
    pub kept: BTreeMap<(String, String), Recording>,
    pub limit: Duration,
    pub limits: Limits,
    pub jobs: usize,
    /// Where temporary files are made.
    pub folder: &'a Path,
}

impl Recorder<'_> {
    /// Runs every test of `programs` without a mutant.
    pub fn record(&self, programs: &[TestProgram]) -> Outcome<Vec<Recording>> {
        let mut tests = Vec::new();
        for program in programs {
            let names = test_names(program)?.into_iter();
            let names = names.filter(|name| {
                !self.skip.is_some_and(|skip| skip.is_match(&format!("{} {name}", program.name)))
            });
            tests.extend(names.map(|name| (program, name)));
        }
        let queue = Mutex::new(tests.iter());
        let done = Mutex::new(Vec::new());
        let work = |job: usize| -> Outcome<()> {
            loop {
                let Some((program, test)) = queue.lock().map_err(|_| "poisoned")?.next() else {
                    return Ok(());
                };
                let recording = match self.kept.get(&(program.name.clone(), test.clone())) {
                    Some(kept) => kept.clone(),
                    None => self.record_one(program, test, job)?,
                };
                let mut done = done.lock().map_err(|_| "poisoned")?;
                done.push(recording);
                if done.len() % 100 == 0 {
                    eprintln!("{} of {} tests recorded", done.len(), tests.len());
                }
            }
        };
        crate::in_parallel(self.jobs, work)?;
        Ok(done.into_inner().map_err(|_| "poisoned")?)
    }

    fn record_one(&self, program: &TestProgram, test: &str, job: usize) -> Outcome<Recording> {
        let file = self.folder.join(format!("reached.{job}"));
        let _ = fs::remove_file(&file);
        let temporary = self.folder.join(format!("tmp.{job}"));
        let variable = ("QUADRIGA_MUTANT_RECORD", file.as_os_str());
        let (ending, elapsed) = run_test(program, test, variable, &temporary, self.limit, self.limits)?;
        if ending != Ending::Passed {
            eprintln!("{} {test}: {ending:?} without a mutant, and judges none", program.name);
        }
        let reached = hexadecimal(&fs::read(&file).unwrap_or_default());
        let passed = ending == Ending::Passed;
        Ok(Recording {
            program: program.name.clone(),
            test: test.to_string(),
            seconds: elapsed.as_secs_f64(),
            passed,
            reached,
        })
    }
}
