//! Ranks that do not load their part, and a first rank that says nothing any more.

use super::faults::{Held, mpirun_each};
use super::*;

/// A file that does not answer, as on a network mount that hangs: here the rates of the second rank's devices.
#[test]
fn ranks_that_do_not_come_to_load_are_named_within_a_limit() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let stuck = fixture.path("stuck");
    std::fs::create_dir(&stuck).unwrap();
    assert!(Command::new("mkfifo").arg(stuck.join("limits.json")).status().unwrap().success());
    let options = ["run", "hello", "-m", fixture.model.to_str().unwrap(), "-n", "4", "-q"];
    let options = [&options[..], &["--rank-load-timeout", "1"]].concat();
    for family in families() {
        for shared in ["1", "0"] {
            let own: [&[&str]; 2] = [&[], &["--cache-dir", stuck.to_str().unwrap()]];
            let mut command = mpirun_each(&family, &options, own);
            let output = command.env("QUADRIGA_MPI_SHARED_MEMORY", shared).output().unwrap();
            let output = CommandOutput::from(output);
            assert_ne!(output.code, Some(0), "{output:?}");
            let wanted = "opening the devices did not end within 1 s: rank 1 did not take part";
            assert_eq!(output.err.matches(wanted).count(), 1, "{output:?}");
        }
    }
}

/// The thread of a process with this name.
fn thread_named(process: u32, name: &str) -> u32 {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let is_named =
        |path: &Path| std::fs::read_to_string(path.join("comm")).is_ok_and(|found| found.trim() == name);
    let mut found = threads.map(|entry| entry.path()).filter(|path| is_named(path));
    let path = found.next().unwrap();
    path.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Without requests, nobody waits for the first rank but the ranks that follow it.
#[test]
fn a_first_rank_whose_engine_hangs_is_found_by_the_others() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let model = ["-m", fixture.model.to_str().unwrap(), "--rank-step-timeout", "2", "-c", "64"];
    for family in families() {
        for how in ["tensor", "pipeline"] {
            let mut served = Served::start(&family, &[&model[..], &["--parallelism", how]].concat());
            let first = ranks_below(served.child.id())[0];
            let held = Held::new(thread_named(first, "quadriga-steps"));
            let (mut said, wanted) =
                (String::new(), "waiting for a command of rank 0 did not end within 2 s");
            while !said.contains(wanted) {
                assert!(served.log.read_line(&mut said).unwrap() > 0, "{how}: {said}");
            }
            drop(held);
            let (code, rest) = served.end();
            assert_eq!(code, Some(75), "{how}: {said}{rest}");
            assert!(said.contains("rank 0 did not take part"), "{how}: {said}{rest}");
        }
    }
}

/// Only the second rank cannot read its file.
#[test]
fn an_error_of_one_rank_is_said_once_with_its_name() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let (missing, damaged) = (fixture.path("missing.gguf"), fixture.path("damaged.gguf"));
    let whole = std::fs::read(&fixture.model).unwrap();
    std::fs::write(&damaged, &whole[..whole.len() / 2]).unwrap();
    for family in families() {
        for command in [&["run", "hello", "-n", "4", "-q"][..], &["serve", "--port", "0", "-c", "64", "-q"]] {
            for (file, wanted) in [(&missing, "No such file"), (&damaged, "damaged.gguf")] {
                let own = [&fixture.model, file].map(|file| ["-m", file.to_str().unwrap()]);
                let output = mpirun_each(&family, command, [&own[0], &own[1]]).output().unwrap();
                let output = CommandOutput::from(output);
                assert_ne!(output.code, Some(0), "{output:?}");
                let lines: Vec<&str> =
                    output.err.lines().filter(|line| line.starts_with("quadriga: ")).collect();
                let [line] = lines[..] else { panic!("{output:?}") };
                assert!(line.contains("rank 1 on ") && line.contains(wanted), "{line}");
                assert!(line.contains(file.to_str().unwrap()), "{line}");
            }
        }
    }
}
