//! Mutation testing by mutant schemata: all mutants of a package are compiled into one build of its tests, and an
//! environment variable chooses one of them at run time. A test judges only the mutants it reaches.

mod compile;
mod instrument;
mod judge;
mod mutate;
mod record;
mod render;
mod report;
#[cfg(test)]
mod tests;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use regex::Regex;
use serde::{Deserialize, Serialize};

use crate::compile::TestProgram;
use crate::instrument::{Package, update};
use crate::judge::{Judge, Verdict};
use crate::mutate::Mutant;
use crate::record::{Limits, Recorder, Recording};

/// A result, or a message for the user.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// An error with this message.
pub fn fail<T>(message: &str) -> Outcome<T> {
    Err(message.into())
}

#[derive(Parser)]
#[command(about = "Mutation testing: every mutant in one build, chosen at run time")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// List the mutants of a package
    List {
        #[arg(long)]
        package: String,
        /// Workspace
        #[arg(long, default_value = ".")]
        source: PathBuf,
    },
    /// Copy a workspace with all mutants of a package, build the tests and record which mutants each one reaches
    Prepare {
        /// Package to mutate
        #[arg(long)]
        package: String,
        /// Further packages whose tests judge the mutants
        #[arg(long)]
        judge: Vec<String>,
        /// Workspace, a git checkout
        #[arg(long, default_value = ".")]
        source: PathBuf,
        /// Target folder whose dependencies are used again (hard links)
        #[arg(long)]
        target: Option<PathBuf>,
        #[command(flatten)]
        recording: RecordingArgs,
    },
    /// Bring a scratch folder up to date with its workspace, build and record
    Record {
        /// Workspace [default: as prepared]
        #[arg(long)]
        source: Option<PathBuf>,
        /// Keep recordings of known tests but those matching this regular expression; "^$" records only new tests
        #[arg(long, value_name = "REGEX")]
        only: Option<Regex>,
        #[command(flatten)]
        recording: RecordingArgs,
    },
    /// Run mutants that have no verdict yet, and print the report
    Run(RunArgs),
    /// Print survivors and figures per file
    Report {
        #[arg(long)]
        scratch: PathBuf,
        /// Only files matching this glob
        #[arg(long)]
        files: Option<String>,
    },
}

#[derive(Args)]
struct RecordingArgs {
    /// Folder for the instrumented copy, its builds and results
    #[arg(long)]
    scratch: PathBuf,
    /// Leave out tests whose "PROGRAM NAME" matches
    #[arg(long, value_name = "REGEX")]
    skip: Option<Regex>,
    /// Seconds a test may take
    #[arg(long, default_value_t = 120)]
    limit: u64,
    /// Tests at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Memory of a test in GiB
    #[arg(long, default_value_t = 6)]
    memory: u64,
}

#[derive(Args)]
struct RunArgs {
    /// Prepared folder
    #[arg(long)]
    scratch: PathBuf,
    /// Every N-th mutant, from I
    #[arg(long, value_name = "I/N")]
    shard: Option<String>,
    /// Random sample of N mutants
    #[arg(long, value_name = "N")]
    sample: Option<usize>,
    /// Random seed of the sample
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only files matching this glob
    #[arg(long)]
    files: Option<String>,
    /// Only mutants whose name (FILE:LINE:COLUMN: description) matches
    #[arg(long, value_name = "REGEX")]
    names: Option<Regex>,
    /// Mutants that were missed so far, again
    #[arg(long)]
    missed: bool,
    /// Mutants that have a verdict already, again
    #[arg(long)]
    again: bool,
    /// Leave out tests that take longer, in seconds
    #[arg(long, default_value_t = 60.0)]
    longest: f64,
    /// Mutants at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Memory of a test in GiB
    #[arg(long, default_value_t = 6)]
    memory: u64,
}

/// What is known of a scratch folder, in `.mutants/state.json`.
#[derive(Default, Serialize, Deserialize)]
pub struct State {
    pub package: String,
    judges: Vec<String>,
    source: PathBuf,
    /// The index is the number that chooses a mutant.
    pub mutants: Vec<Mutant>,
    /// Names of the mutants that do not compile.
    pub dropped: BTreeSet<String>,
    pub excluded: usize,
    pub constant: usize,
    pub macros: usize,
    programs: Vec<TestProgram>,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Outcome<()> {
    match task {
        Task::List { package, source } => {
            for mutant in Package::read(&source, &package)?.mutants {
                println!("{}", mutant.name);
            }
            Ok(())
        }
        Task::Prepare { package, judge, source, target, recording } => {
            let scratch = scratch_folder(&recording.scratch)?;
            if let Some(target) = target {
                link_dependencies(&target, &scratch)?;
            }
            let old = read_state(&scratch).unwrap_or_default();
            let judges = std::iter::once(package.clone()).chain(judge).collect();
            let state = State { package, judges, source: fs::canonicalize(source)?, ..old };
            prepare(state, &scratch, &recording, None)
        }
        Task::Record { source, only, recording } => {
            let scratch = scratch_folder(&recording.scratch)?;
            let mut state = read_state(&scratch)?;
            if let Some(source) = source {
                state.source = fs::canonicalize(source)?;
            }
            prepare(state, &scratch, &recording, only.as_ref())
        }
        Task::Run(arguments) => judge(&arguments),
        Task::Report { scratch, files } => {
            let scratch = scratch_folder(&scratch)?;
            let files = files.as_deref().map(glob).transpose()?;
            let results = report::latest(read_lines(&scratch.join(".mutants/results.jsonl"))?);
            report::print(&read_state(&scratch)?, &results, &|file| {
                files.as_ref().is_none_or(|files| files.is_match(file))
            });
            Ok(())
        }
    }
}

fn prepare(mut state: State, scratch: &Path, arguments: &RecordingArgs, only: Option<&Regex>) -> Outcome<()> {
    let folder = scratch.join(".mutants");
    let package = Package::read(&state.source, &state.package)?;
    let same =
        state.mutants.iter().map(|mutant| &mutant.name).eq(package.mutants.iter().map(|mutant| &mutant.name));
    state.mutants.clone_from(&package.mutants);
    (state.excluded, state.constant, state.macros) = (package.excluded, package.constant, package.macros);
    eprintln!("{} mutants of {}", state.mutants.len(), state.package);
    state.programs = compile::build(&package, &state.source, scratch, &state.judges, &mut state.dropped)?;
    let names: BTreeSet<&str> = state.mutants.iter().map(|mutant| mutant.name.as_str()).collect();
    state.dropped.retain(|name| names.contains(name.as_str()));
    update(&folder.join("state.json"), serde_json::to_string(&state)?.as_bytes())?;

    let mut kept = BTreeMap::new();
    if let Some(only) = only {
        if !same {
            eprintln!("the mutants have changed: every test is recorded");
        }
        let old: Vec<Recording> =
            if same { read_lines(&folder.join("recordings.jsonl"))? } else { Vec::new() };
        let old = old.into_iter().filter(|old| !only.is_match(&format!("{} {}", old.program, old.test)));
        kept = old.map(|old| ((old.program.clone(), old.test.clone()), old)).collect();
    }
    let limits = Limits { memory: arguments.memory << 30 };
    let limit = Duration::from_secs(arguments.limit);
    let recorder = Recorder {
        skip: arguments.skip.as_ref(),
        kept,
        limit,
        limits,
        jobs: arguments.jobs,
        folder: &folder,
    };
    let recordings = recorder.record(&state.programs)?;
    let lines: Result<Vec<String>, _> = recordings.iter().map(serde_json::to_string).collect();
    update(&folder.join("recordings.jsonl"), lines?.join("\n").as_bytes())?;
    let seconds: f64 = recordings.iter().map(|recording| recording.seconds).sum();
    eprintln!("{} tests recorded, {seconds:.0} s in all", recordings.len());
    Ok(())
}

fn judge(arguments: &RunArgs) -> Outcome<()> {
    let scratch = scratch_folder(&arguments.scratch)?;
    let folder = scratch.join(".mutants");
    let state = read_state(&scratch)?;
    let recordings: Vec<Recording> = read_lines(&folder.join("recordings.jsonl"))?;
    let results = report::latest(read_lines(&folder.join("results.jsonl"))?);
    let files = arguments.files.as_deref().map(glob).transpose()?;

    let mut mutants: Vec<(usize, &Mutant)> = state.mutants.iter().enumerate().collect();
    mutants.retain(|(_, mutant)| {
        !state.dropped.contains(&mutant.name)
            && files.as_ref().is_none_or(|files| files.is_match(&mutant.file))
            && arguments.names.as_ref().is_none_or(|names| names.is_match(&mutant.name))
    });
    if let Some(sample) = arguments.sample {
        let hash = |name: &str| {
            let mut hasher = DefaultHasher::new();
            (arguments.seed, name).hash(&mut hasher);
            hasher.finish()
        };
        mutants.sort_by_cached_key(|(_, mutant)| hash(&mutant.name));
        mutants.truncate(sample);
        mutants.sort_by_key(|(id, _)| *id);
    }
    if let Some(shard) = &arguments.shard {
        let parts =
            shard.split_once('/').and_then(|(index, count)| Some((index.parse().ok()?, count.parse().ok()?)));
        let Some((index, count)) = parts.filter(|(index, count): &(usize, usize)| index < count) else {
            return fail("--shard takes I/N with I from 0 to N - 1");
        };
        mutants = mutants.into_iter().skip(index).step_by(count).collect();
    }
    mutants.retain(|(_, mutant)| match results.get(&mutant.name).map(|judgement| judgement.verdict) {
        None => !arguments.missed,
        Some(Verdict::Missed | Verdict::Unreached) => arguments.missed || arguments.again,
        Some(Verdict::Killed | Verdict::Timeout) => arguments.again && !arguments.missed,
    });

    let programs = state.programs.iter().map(|program| (program.name.as_str(), program)).collect();
    let limits = Limits { memory: arguments.memory << 30 };
    let judge = Judge {
        programs,
        recordings: &recordings,
        limits,
        longest: arguments.longest,
        jobs: arguments.jobs,
        folder: &folder,
    };
    judge.run(mutants)?;
    let results = report::latest(read_lines(&folder.join("results.jsonl"))?);
    report::print(&state, &results, &|file| files.as_ref().is_none_or(|files| files.is_match(file)));
    Ok(())
}

/// Runs `work` on so many threads, with their numbers.
pub fn in_parallel(jobs: usize, work: impl Fn(usize) -> Outcome<()> + Sync) -> Outcome<()> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1))
            .map(|job| {
                scope.spawn({
                    let work = &work;
                    move || work(job)
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| fail("a thread panicked")))
    })
}

fn scratch_folder(path: &Path) -> Outcome<PathBuf> {
    fs::create_dir_all(path.join(".mutants"))?;
    Ok(fs::canonicalize(path)?)
}

fn read_state(scratch: &Path) -> Outcome<State> {
    let path = scratch.join(".mutants/state.json");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(serde_json::from_str(&text)?)
}

/// The JSON lines of a file; none if it does not exist.
fn read_lines<T: serde::de::DeserializeOwned>(path: &Path) -> Outcome<Vec<T>> {
    let text = fs::read_to_string(path).unwrap_or_default();
    // The last line may be incomplete if a run was killed.
    Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

fn glob(pattern: &str) -> Outcome<Regex> {
    let escaped =
        regex::escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^/]*").replace(r"\?", "[^/]");
    Ok(Regex::new(&format!("^{escaped}$"))?)
}

/// Links what was built of dependencies into the scratch folder. Packages of the workspace are built anew, because
/// their path is part of their identity.
fn link_dependencies(target: &Path, scratch: &Path) -> Outcome<()> {
    let to = scratch.join("target/debug");
    fs::create_dir_all(&to)?;
    for name in ["deps", "build", ".fingerprint"] {
        if !to.join(name).exists() {
            let status =
                Command::new("cp").arg("-al").arg(target.join("debug").join(name)).arg(&to).status()?;
            if !status.success() {
                return fail("cp -al failed: the target folder has to be on the same file system");
            }
        }
    }
    Ok(())
}
